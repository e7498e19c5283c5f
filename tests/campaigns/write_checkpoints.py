"""Write the row of one release in the matrix of checkpoints: runs that it stopped, and what came of them.

    PYTHONPATH=.:plugins python tests/campaigns/write_checkpoints.py . NAME

in the checkout of the release writes ``tests/data/checkpoints/NAME``.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
import tarfile
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from processes import Processes, run_on, spoil

import bltoolbox
from bltoolbox import Model, run
from bltoolbox.config.recipe import Recipe, recipe_from_dict
from bltoolbox.distributed.ranks import ALONE, Ranks
from bltoolbox.distributed.signals import Interrupted, handled
from bltoolbox.reports import writer
from bltoolbox.restoration.shipped import shipped_models
from bltoolbox.training.assemble import assemble
from bltoolbox.training.driver import run_in
from bltoolbox.training.run_dir import RunDirectory

DATA = Path(__file__).parents[1] / "data" / "checkpoints"
METHODS: dict[str, dict[str, object]] = {
    "isgd": {"upper_optimizer": {"name": "isgd", "step": 5e-3, "tol": 0.1}, "sampler": {"size": 2}},
    "maid": {"upper_optimizer": {"name": "maid", "step": 1e-2, "tol": 2e-4}, "sampler": {"name": "full"}},
    #: Solver and hypergradient keep rows of their own for each image.
    "rows": {
        "upper_optimizer": {"name": "isgd", "step": 5e-3, "tol": 0.1},
        "sampler": {"size": 2},
        "regularizer": {"name": "tv-nonsmooth"},
        "lower_solver": "pdhg",
        "hypergradient": "piggyback",
        "strong_convexity": 0.1,
    },
}
#: Method, ranks, and the oracle's calls in one of which the run is stopped; for MAID in the middle of a step.
STOPPED: dict[str, tuple[str, int, range]] = {
    "isgd": ("isgd", 1, range(5, 20)),
    "maid": ("maid", 1, range(10, 11)),
    "maid-2-ranks": ("maid", 2, range(10, 11)),
    "rows": ("rows", 1, range(5, 20)),
}
#: Left out of the archives: what nobody resumes from.
_NOT_KEPT = ("report.html", "lock")


def recipe(method: str, steps: int = 8) -> Recipe:
    settings: dict[str, object] = {
        "data": {"name": "dead-leaves", "count": 5, "size": 8},
        "dtype": "float64",
        "color": "gray",
        "regularizer": {"name": "foe", "filters": 2, "kernel_size": 3},
        "lower_solver": "mm",
        "validation": {"count": 1, "checks": 2},
        "checkpoint": {"every": 3600},
        "budget": {"steps": steps},
    }
    return recipe_from_dict(settings | METHODS[method])


def stop(method: str, size: int, calls: range, out: Path) -> None:
    """Begin a run and stop it by a signal."""

    def work(ranks: Ranks) -> None:
        experiment = assemble(recipe(method), ranks=ranks)
        spoil(experiment, int(signal.SIGTERM), sample=None, calls=calls)
        run_in(RunDirectory(out, ranks=ranks), experiment)

    if size > 1:
        ends = Processes(out.parent, size, work).wait()
        assert [kind for kind, _ in ends] == ["Interrupted"] * size, ends
        return
    try:
        with handled():
            work(ALONE)
    except Interrupted:
        return
    raise AssertionError(f"{method} was not stopped")


def pack(folder: Path, target: Path) -> None:
    with tarfile.open(target, "w:xz") as archive:
        for path in sorted(folder.rglob("*")):
            if path.name not in _NOT_KEPT:
                archive.add(path, path.relative_to(folder), recursive=False)


def write_runs(target: Path) -> None:
    for name, (method, size, calls) in STOPPED.items():
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "packed"
            folder.mkdir()
            stop(method, size, calls, Path(place) / "stopped")
            if size > 1:
                run_on(Path(place), size, recipe(method), Path(place) / "whole")
            else:
                run(recipe(method), out=Path(place) / "whole")
            shutil.copytree(Path(place) / "stopped", folder / "stopped")
            (folder / "whole").mkdir()
            for kept in ("theta.safetensors", "metrics.jsonl", "checks.jsonl"):
                shutil.copy(Path(place) / "whole" / kept, folder / "whole" / kept)
            pack(folder, target / f"{name}.tar.xz")


def write_models(target: Path) -> None:
    """The shipped models, and what each of them makes of a few pixels."""
    pixels = np.random.default_rng(0).random((3, 12, 12)).astype(np.float32)
    with tempfile.TemporaryDirectory() as place:
        for path in shipped_models().values():
            model = Model.load(path, device="cpu")
            y = torch.from_numpy(pixels[: model.channels])
            buffer = io.BytesIO()
            np.savez(buffer, y=y.numpy(), x=model.solve(y, tol=1e-3).numpy())
            (Path(place) / f"{path.stem}.npz").write_bytes(buffer.getvalue())
            shutil.copy(path, place)
        pack(Path(place), target / "models.tar.xz")


def main() -> None:
    source, name = Path(sys.argv[1]).resolve(), sys.argv[2]
    assert Path(bltoolbox.__file__).is_relative_to(source), f"the code that runs is {bltoolbox.__file__}"
    sys.argv = ["blt", "run"]  # a run notes its command
    torch.set_num_threads(1)
    writer.draw = lambda result, folder: []
    target = DATA / name
    target.mkdir(parents=True, exist_ok=True)
    write_runs(target)
    write_models(target)
    for path in sorted(target.iterdir()):
        print(path, path.stat().st_size)


if __name__ == "__main__":
    main()
