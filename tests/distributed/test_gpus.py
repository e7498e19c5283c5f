"""Which GPUs other processes see, and how the runs of a sweep share them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bltoolbox.distributed import gpus
from bltoolbox.distributed.gpus import VISIBLE, least_busy, visible_gpus
from bltoolbox.training.sweep.jobs import Jobs, _Job
from bltoolbox.training.sweep.plan import Planned


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    monkeypatch.delenv(VISIBLE, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, ["0", "2", "10"]), ("3,1", ["3", "1"]), ("", []), ("-1", []), ("1,-1,2", ["1"]),
     ("GPU-8932f937, MIG-ab/1/0", ["GPU-8932f937", "MIG-ab/1/0"])],
)  # fmt: skip
def test_visible_gpus(given: str | None, expected: list[str], machine: Path) -> None:
    assert visible_gpus({} if given is None else {VISIBLE: given}) == expected


def test_there_may_be_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "DEVICES", tmp_path / "nowhere")
    assert visible_gpus({}) == [] and least_busy([], []) is None


class TestSweep:
    """The runs of a sweep."""

    def jobs(self, *devices: str) -> tuple[Jobs, list[Planned]]:
        cells = [Planned(cast(Any, None), {"device": device}) for device in devices]
        sweep = SimpleNamespace(cells=cells)
        return Jobs(cast(Any, sweep), 4, (), cast(Any, None)), cells

    def start(self, jobs: Jobs, planned: Planned) -> str | None:
        gpu = jobs._gpu(planned)
        jobs.running.append(_Job(planned, None, gpu))
        return jobs._environment(gpu).get(VISIBLE)

    def test_are_spread_over_the_gpus(self, machine: Path) -> None:
        jobs, cells = self.jobs(*["auto", "cuda"] * 2)
        assert [self.start(jobs, planned) for planned in cells] == ["0", "2", "10", "0"]
        del jobs.running[1]
        assert self.start(jobs, cells[0]) == "2", "the one that has become free"

    def test_stay_among_those_that_the_user_allows(
        self, machine: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(VISIBLE, "5,3")
        jobs, cells = self.jobs("auto", "auto", "auto")
        assert [self.start(jobs, planned) for planned in cells] == ["5", "3", "5"]

    def test_that_name_a_device_see_all(self, machine: Path) -> None:
        jobs, cells = self.jobs("cuda:1", "cpu")
        assert [self.start(jobs, planned) for planned in cells] == [None, None]
