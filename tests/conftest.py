"""Fixtures for all tests: a cache of their own, and distributions that exist only for one test."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import preloaded
import pytest
from figures import sketch
from hypothesis import settings
from preloaded import BLT as BLT

# Before torch is imported, and for the processes that tests start: the images are tiny, and a second thread costs more
# than it brings. The same number of threads also makes results comparable bit for bit.
os.environ["OMP_NUM_THREADS"] = "1"
# Nothing is measured, so that the last bits of results do not depend on how busy the machine was.
os.environ["BLT_FORMS"] = "default"

# Python as users have it. Without bytecode, each of the hundreds of processes would compile the toolbox anew.
for variable in ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"):
    os.environ.pop(variable, None)
sys.dont_write_bytecode = False

# The same examples in every run, however busy the machine; explore with --hypothesis-profile=default.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")

# A shell script starts its background jobs with Ctrl-C ignored; the commands of tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parents[1]


def pytest_collection_finish() -> None:
    """What has been imported stays: neither tests nor the processes that they fork look for garbage in it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _preloaded_commands() -> Iterator[None]:
    """``blt`` processes are forked from one that has imported torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", preloaded.Popen)
        yield


@pytest.fixture(scope="session", autouse=True)
def _sketched_figures() -> Iterator[None]:
    """Drawing figures takes longer than most runs here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bltoolbox.reports.writer.draw", sketch)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_disks() -> Iterator[None]:
    """The power does not fail during tests; tests/campaigns simulate that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """``blt`` processes that start and import everything as they do for users."""
    monkeypatch.setattr(subprocess, "Popen", preloaded.Popen.__base__)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_surroundings(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the user's cache nor the user's choice of plugins."""
    monkeypatch.setenv("BLT_CACHE", str(cache))
    monkeypatch.delenv("BLT_PLUGINS", raising=False)


@pytest.fixture
def blt() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run ``blt`` in a process of its own."""

    def call(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*BLT, *arguments],
            text=True,
            encoding="utf-8",
            capture_output=True,
            timeout=120,
            **options,  # type: ignore[call-overload]
        )

    return call


Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Make a distribution with entry points and modules, as pip would leave it, and put it on the path."""
    site = tmp_path / "site"
    site.mkdir()
    before = set(sys.modules)

    def make(
        distribution: str, points: Mapping[str, str], modules: Mapping[str, str], version: str = "1.0"
    ) -> Path:
        info = site / f"{distribution}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        lines = [f"{name} = {target}" for name, target in points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[bltoolbox]", *lines, ""]))
        for name, source in modules.items():
            (site / f"{name}.py").write_text(source, encoding="utf-8")
        importlib.invalidate_caches()
        return site

    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    )
    yield make
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
