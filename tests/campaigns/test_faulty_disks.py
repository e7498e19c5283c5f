"""A disk that fails, a process that is killed, a power cut, at every single operation of a run.

Afterwards the run is taken up as a person would, and must end with the very bytes of a run that nothing happened to.
The ordinary tests try a sample of the operations; ``pytest -m slow tests/campaigns/test_faulty_disks.py`` tries all.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from crash import MODES, Mode, State, restore, tree
from disk import Disk, Fault, Kind

from bltoolbox.cli import main
from bltoolbox.errors import BltError
from bltoolbox.reports import writer
from bltoolbox.runs import files
from bltoolbox.training.checkpoint import read_checked

torch.set_num_threads(1)
FORK = multiprocessing.get_context("fork")
#: Of each series, the ordinary tests try so many operations.
SAMPLE = 5
THETAS = ("theta.safetensors", "checkpoints/last.safetensors", "checkpoints/best.safetensors")
LOGS = ("metrics.jsonl", "checks.jsonl")

METHODS = {
    "isgd": [
        "upper_optimizer={name: isgd, step: 1e-2}",
        "sampler={name: epoch, size: 2}",
        "budget={steps: 2}",
    ],
    "maid": [
        "upper_optimizer={name: maid, step: 1e-2, tol: 5e-4}",
        "sampler={name: full}",
        "budget={steps: 2}",
        "color=gray",
    ],
}
TINY = [
    "data={name: dead-leaves, count: 4, size: 12}",
    "regularizer={name: foe, filters: 2, kernel_size: 3}",
    "lower_solver={name: mm}",
    "validation={count: 1, checks: 2}",
    "evaluation=null",
    "baseline=null",
    "checkpoint={every: 0, keep_finished: true}",
    "device=cpu",
    "budget={steps: 2}",
]


def draw(result: Any, folder: Path) -> list[Path]:
    """Figures in no time, written as the real ones are."""
    files.write_bytes(folder / "curves.png", b"curves")
    return [folder / "curves.png"]


def _child(words: Sequence[str], said: Path, disk: Disk | None, record: Path | None) -> None:
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    writer.draw = draw
    if disk is not None:
        disk.install()
    try:
        main(words)
    finally:
        if record is not None and disk is not None:
            record.write_bytes(pickle.dumps((disk.count, disk.operations)))


def command(
    words: Sequence[str], folder: Path, disk: Disk | None = None, record: Path | None = None
) -> tuple[int, str]:
    """``blt words`` in a child on a disk of its own: its exit code (minus the signal) and what it said."""
    said = folder / "said.txt"
    child = FORK.Process(target=_child, args=(words, said, disk, record))
    child.start()
    child.join(60)
    if child.is_alive():
        child.kill()
        pytest.fail(f"blt {' '.join(words)} does not end: {said.read_text()}")
    assert child.exitcode is not None
    return child.exitcode, said.read_text()


def begin(method: str, out: Path, *more: str) -> list[str]:
    return ["run", "smoke", *TINY, *METHODS[method], "-o", str(out), "-q", *more]


class Reference:
    """A run that nothing happened to: what it did to the disk, and what came out."""

    def __init__(self, method: str, folder: Path) -> None:
        self.method = method
        disk, record = Disk(folder), folder.with_suffix(".record")
        code, said = command(begin(method, folder / "run"), folder.parent, disk, record)
        assert code == 0, said
        self.count, self.operations = pickle.loads(record.read_bytes())
        self.folder = folder
        self.tree = tree(folder / "run")
        self.results = results(folder / "run")

    def lost(self, out: Path) -> list[str]:
        """Results in which another run differs."""
        held = results(out)
        return [name for name, content in self.results.items() if held[name] != content]


def results(out: Path) -> dict[str, bytes | None]:
    """What must not depend on what happened, to the byte; None where a file is missing."""
    paths = {name: out / name for name in (*THETAS, *LOGS)}
    return {name: path.read_bytes() if path.is_file() else None for name, path in paths.items()}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    folder = tmp_path_factory.mktemp("references")
    # Everything is imported before the children are forked, so that none of them has to.
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(writer, "draw", draw)
        main(begin("isgd", folder / "imports"))
    (folder / "isgd").mkdir()
    (folder / "maid").mkdir()
    return {method: Reference(method, folder / method) for method in METHODS}


def usable(out: Path) -> bool:
    """Whether a checkpoint reached the disk."""
    for path in out.glob("checkpoints/state-*.ckpt"):
        try:
            manifest = read_checked(path)
            for name, _ in manifest["segments"]:
                read_checked(path.with_name(name))
        except BltError:
            continue
        return (out / "resolved.yaml").is_file()
    return False


def claims_success(out: Path) -> bool:
    try:
        return bool(json.loads((out / "status.json").read_text()).get("finished"))
    except (OSError, ValueError):
        return False


def go_on(reference: Reference, out: Path, where: str) -> str:
    """Take a run up again, as a person would, and see that nothing is lost; how it was done."""
    if claims_success(out):
        assert not reference.lost(out), f"{where}: status.json claims a success that is none"
    had_checkpoint, way = usable(out), "resumed"
    code, said = command(["resume", str(out), "-q"], out.parent)
    assert_sentence(code, said, where)
    if code:
        assert not had_checkpoint, f"{where}: there is a whole checkpoint, but {said}"
        way = "run again"
        code, said = command(begin(reference.method, out, "--overwrite"), out.parent)
    assert code == 0, f"{where}: {said}"
    assert not reference.lost(out), f"{where}, {way}: {reference.lost(out)} differ"
    return way


def assert_sentence(code: int, said: str, where: str) -> None:
    assert "Traceback" not in said and "unexpected" not in said, f"{where}: {said}"
    assert code <= 0 or said.strip(), f"{where}: ended with {code} and no word"


def fault_at(reference: Reference, kind: Kind, at: int, folder: Path) -> str:
    """A run with a fault, and what came of it."""
    where, out = f"{reference.method}, {kind} at {at} of {reference.count}", folder / f"{kind}-{at}" / "run"
    out.parent.mkdir()
    code, said = command(begin(reference.method, out), out.parent, Disk(out.parent, Fault(kind, at)))
    if kind == "kill":
        assert code == -signal.SIGKILL, f"{where}: ended with {code}: {said}"
    assert_sentence(code, said, where)
    if code == 0:
        assert not reference.lost(out), f"{where}: reported a success that is none"
        way = "finished"
    else:
        way = go_on(reference, out, where)
    shutil.rmtree(out.parent)
    return way


def crash_after(reference: Reference, count: int, mode: Mode, folder: Path, seen: set[str]) -> str:
    """What a power cut after some operations leaves, and what comes of it. States that were tried are passed over."""
    chance = random.Random(f"{reference.method} {count} {mode}")
    held = State(reference.operations[:count]).after_crash(mode, chance)
    digest = hashlib.sha256(repr(sorted(held.items())).encode()).hexdigest()
    if digest in seen:
        return "as before"
    seen.add(digest)
    where, place = f"{reference.method}, {mode} after {count} operations", folder / f"{mode}-{count}"
    restore(held, place)
    way = go_on(reference, place / "run", where)
    shutil.rmtree(place)
    return way


def report(ways: Counter[str], what: str) -> None:
    print(f"{what}: {ways.total()} tried: " + ", ".join(f"{count} {way}" for way, count in ways.items()))


def sampled(count: int, offset: int) -> Iterable[int]:
    """A few numbers from 1 to ``count``, spread evenly, others for each offset."""
    return sorted({1 + (offset + k * count) // SAMPLE % count for k in range(SAMPLE)})


@pytest.mark.parametrize("method", sorted(METHODS))
def test_the_record_tells_all_that_was_written(method: str, references: dict[str, Reference]) -> None:
    reference = references[method]
    held = State(reference.operations).after_crash("kept", random.Random(0))
    assert {
        name.removeprefix("run/"): content for name, content in held.items() if name != "run"
    } == reference.tree


@pytest.mark.parametrize(("method", "kind"), [("isgd", "full"), ("isgd", "error"), ("maid", "kill")])
def test_some_operations_fail(
    method: str, kind: Kind, references: dict[str, Reference], tmp_path: Path
) -> None:
    reference = references[method]
    ways = Counter(fault_at(reference, kind, at, tmp_path) for at in sampled(reference.count, len(kind)))
    report(ways, f"{method}, {kind}")


@pytest.mark.parametrize("log", LOGS)
def test_a_line_that_a_log_lacks_is_in_no_checkpoint(
    log: str, references: dict[str, Reference], tmp_path: Path
) -> None:
    reference = references["isgd"]
    writes = [one.number for one in reference.operations if one.kind == "write" and one.path.endswith(log)]
    assert fault_at(reference, "error", writes[0], tmp_path) in ("resumed", "run again")


def test_a_start_that_was_killed_at_once_can_be_repeated(
    references: dict[str, Reference], tmp_path: Path
) -> None:
    """Before there is a list of what the run has written."""
    reference = references["isgd"]
    created = [one.number for one in reference.operations if one.kind == "create"]
    for number in created[:3]:
        assert fault_at(reference, "kill", number + 1, tmp_path) == "run again"


def test_some_power_cuts(references: dict[str, Reference], tmp_path: Path) -> None:
    seen: set[str] = set()
    for number, mode in enumerate(MODES):
        reference = references["isgd" if number % 2 else "maid"]
        counts = list(sampled(len(reference.operations), number))[::2]
        report(Counter(crash_after(reference, count, mode, tmp_path, seen) for count in counts), mode)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "error", "kill"])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_operation_fails(
    method: str, kind: Kind, references: dict[str, Reference], tmp_path: Path
) -> None:
    reference = references[method]
    report(
        collect(fault_at, reference, [(kind, at, tmp_path) for at in range(1, reference.count + 1)]),
        f"{method}, {kind}",
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_power_cut(method: str, mode: Mode, references: dict[str, Reference], tmp_path: Path) -> None:
    reference = references[method]
    seen: set[str] = set()
    counts = range(len(reference.operations) + 1)
    report(
        collect(crash_after, reference, [(count, mode, tmp_path, seen) for count in counts]),
        f"{method}, {mode}",
    )


def collect(
    attempt: Callable[..., str], reference: Reference, cases: Iterable[tuple[Any, ...]]
) -> Counter[str]:
    """What came of each case; all that go wrong are told together."""
    ways: Counter[str] = Counter()
    wrong: list[str] = []
    for case in cases:
        try:
            ways[attempt(reference, *case)] += 1
        except AssertionError as error:
            wrong.append(str(error).partition("\nassert ")[0])
    assert not wrong, f"{len(wrong)} of {ways.total() + len(wrong)} went wrong:\n" + "\n".join(wrong)
    return ways
