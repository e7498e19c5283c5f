"""``blt doctor`` finds what is wrong with an installation, and finds nothing wrong with a good one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from commands import Call, caller

from bltoolbox.cli import diagnosis as doctor
from bltoolbox.cli.diagnosis import Finding, Verdict
from bltoolbox.config.registry import load_registry


@pytest.fixture
def blt_doctor(capfd: pytest.CaptureFixture[str]) -> Call:
    return caller("doctor", capfd)


def subjects(findings: Sequence[Finding], verdict: Verdict) -> list[str]:
    return [finding.subject for finding in findings if finding.verdict is verdict]


def test_nothing_is_wrong_here(blt_doctor: Call) -> None:
    done = blt_doctor("--json")
    assert done.returncode == 0, done.stdout
    found = {one["subject"]: one for one in json.loads(done.stdout)}
    assert {"bltoolbox", "packages", "plugins", "processors", "here", "computing on cpu"} <= found.keys()
    assert not [one for one in found.values() if one["verdict"] == "wrong"]
    assert (
        "torch " in found["packages"]["found"] and "reduces the error" in found["computing on cpu"]["found"]
    )


def test_a_person_reads_lines_and_a_last_word(blt_doctor: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = [
        Finding("one", Verdict.OK, "fine"),
        Finding("two", Verdict.WRONG, "not there", "pip install two"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda registry: iter(bad))
    done = blt_doctor()
    assert done.returncode == 4
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["ok", "one", "fine"],
        ["wrong", "two", "not", "there", "->", "pip", "install", "two"],
    ]
    assert done.stderr == "1 problem found\n"
    assert [one["remedy"] for one in json.loads(blt_doctor("--json").stdout)] == ["", "pip install two"]


def test_broken_plugins_are_named(blt_doctor: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_computing", lambda registry: [])
    file = tmp_path / "mine.py"
    file.write_text("import a_package_that_is_not_there\n")
    done = blt_doctor("--plugin", str(file))
    assert done.returncode == 4
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("wrong")]
    assert "mine" in line and "a_package_that_is_not_there" in line


class TestPackages:
    def requires(self, monkeypatch: pytest.MonkeyPatch, *requirements: str) -> list[Finding]:
        monkeypatch.setattr(metadata, "requires", lambda name: list(requirements))
        return list(doctor._packages())

    def test_missing_old_and_optional(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = self.requires(
            monkeypatch,
            "no-such-package>=1",
            "pyyaml>=1000.1",
            "numpy>=1.2",
            "not-there-either; extra == 'tensorboard'",
            "nor-this>=2; extra == 'test'",
        )
        assert subjects(found, Verdict.WRONG) == ["no-such-package", "pyyaml"]
        assert subjects(found, Verdict.NOTE) == ["not-there-either"]
        assert found[0].remedy == "pip install 'no-such-package>=1'"
        assert f"numpy {np.__version__}" in found[-1].found and "yaml" not in found[-1].found

    def test_what_cannot_be_imported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(name: str) -> Any:
            raise RuntimeError("operator torchvision::nms does not exist\nand so on")

        monkeypatch.setattr(doctor.importlib, "import_module", fail)
        (found, rest) = self.requires(monkeypatch, "torchvision>=0.1")
        assert found.verdict is Verdict.WRONG and "nms does not exist" in found.found
        assert "torch torchvision" in found.remedy and "and so on" not in found.found and not rest.found

    @pytest.mark.parametrize(
        ("version", "requirement", "fits"),
        [
            ("1.9", "numpy>=1.10", False),
            ("2.4.1+cu128", "numpy>=2.4.0", True),
            ("1.0rc1", "numpy>=1.0", False),
            ("1.1.dev3", "numpy>=1.0", True),
            ("3.0", "numpy>=1.0,<3", False),
            ("3.0", "numpy!=3.0", False),
            ("1.0", "numpy>=2; python_version < '3'", True),
        ],
    )
    def test_versions(
        self, monkeypatch: pytest.MonkeyPatch, version: str, requirement: str, fits: bool
    ) -> None:
        monkeypatch.setattr(metadata, "version", lambda name: version)
        assert subjects(self.requires(monkeypatch, requirement), Verdict.WRONG) == ([] if fits else ["numpy"])


class TestComputing:
    def test_a_device_that_computes_nonsense(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for nonsense in (
            lambda noisy, device, registry: noisy,
            lambda noisy, device, registry: noisy * np.nan,
        ):
            monkeypatch.setattr(doctor, "_restore", nonsense)
            (found,) = doctor._computing(load_registry())
            assert found.verdict is Verdict.WRONG and "expected more than 2" in found.found

    def test_devices_that_disagree(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        clean, _ = doctor._plain_areas()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(
            doctor,
            "_restore",
            lambda noisy, device, registry: clean + (0.02 if device == "cuda:1" else 0.001),
        )
        assert subjects(list(doctor._computing(load_registry())), Verdict.WRONG) == ["computing on cuda:1"]

    def test_a_device_that_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(noisy: Any, device: str, registry: Any) -> Any:
            raise RuntimeError("no kernel image is available\nfor execution")

        monkeypatch.setattr(doctor, "_restore", fail)
        (found,) = doctor._computing(load_registry())
        assert found.verdict is Verdict.WRONG and found.found == "RuntimeError: no kernel image is available"


def test_threads_and_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def verdict(usable: int, threads: int) -> Finding:
        monkeypatch.setattr(doctor, "processors", lambda: usable)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        (found,) = doctor._processors()
        return found

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert verdict(2, 2).verdict is Verdict.OK
    assert "OMP_NUM_THREADS=2" in verdict(2, 16).remedy
    assert "unset" in verdict(16, 1).remedy
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert verdict(16, 1).verdict is Verdict.OK


def test_folders_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BLT_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.chdir(tmp_path)
    here, cache = doctor._folders()
    assert here.verdict is Verdict.OK and str(tmp_path) in here.found
    assert cache.verdict is Verdict.NOTE and "BLT_CACHE" in cache.remedy
    usage = SimpleNamespace(free=1 << 20)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    assert next(iter(doctor._folders())).verdict is Verdict.NOTE


def test_variables_that_change_a_run_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(doctor._VARIABLES)]:
        monkeypatch.delenv(name)
    assert not list(doctor._variables())
    monkeypatch.setenv("BLT_PLUGINS", "lower_solvers")
    (found,) = doctor._variables()
    assert found.found == "BLT_PLUGINS=lower_solvers"


def test_a_check_that_fails_does_not_end_the_visit(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*registry: Any) -> Iterator[Finding]:
        raise OSError("the disk is on fire")
        yield

    for name in ("_computing", "_packages"):
        monkeypatch.setattr(doctor, name, fail)
    found = list(doctor.examine(load_registry()))
    assert subjects(found, Verdict.WRONG) == ["packages", "computing"]
    assert "the disk is on fire" in found[-1].found and len(found) > 6
