"""Training steps from warm starts, today and in an earlier version of the toolbox, in turns.

    python tests/benchmarks/before.py CHECKOUT [--steps 4] [--move 0.003] [--side 64] [--count 16] [--target 28.5]

CHECKOUT is a folder with the earlier version (``git worktree add CHECKOUT e457f5d``). Each version runs in a process of
its own; the two take turns, step by step. Crops of BSDS500 ($BLT_DATA), ten filters, `mm` and `cg-ift`, float32, one
thread, tolerance 0.1. *Warm*: shipped filters of `denoise-color-foe`, all crops in each step, θ moves along −z by a
fixed part of its norm; the first step is not counted. With ``--target``, training from the initial filters instead, on
new crops in each step, with the step of `isgd` in the recipes, until 16 other crops of the training set have that PSNR.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any, cast

ROOT = Path(__file__).parents[2]
#: Crops that measure the PSNR in training.
HELD_OUT = 16


class Version:
    """A process that computes one step when asked."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        paths = f"{folder}{os.pathsep}{folder / 'plugins'}"
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", *arguments],
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def step(self) -> dict[str, Any]:
        channel = cast("IO[str]", self.process.stdin)
        channel.write("step\n")
        channel.flush()
        return cast("dict[str, Any]", json.loads(cast("IO[str]", self.process.stdout).readline()))


def work(options: argparse.Namespace) -> None:
    """The side of the process: one step per line of input."""
    import numpy as np
    import torch

    from blt_builtins.hypergradients.cg_ift import CGIFT
    from blt_builtins.lower_solvers.mm import MemoryGradient
    from blt_builtins.operators.identity import Identity
    from blt_builtins.regularizers.foe import FieldOfExperts
    from bltoolbox import Model
    from bltoolbox.bilevel.lower_loop import solve
    from bltoolbox.bilevel.memory import keep_freed_memory
    from bltoolbox.bilevel.oracle import BilevelOracle
    from bltoolbox.bilevel.records import Accuracy, Batch
    from bltoolbox.plugin import join
    from bltoolbox.testing import make_oracle, variational

    torch.set_num_threads(1)
    keep_freed_memory()
    pixels = np.load(Path(os.environ["BLT_DATA"]) / "bsd-train-96" / "train.npy", mmap_mode="r")
    first = (pixels.shape[1] - options.side) // 2
    inner = slice(first, first + options.side)
    training = options.target is not None
    count = 512 if training else options.count
    images = torch.from_numpy(pixels[: count + HELD_OUT, inner, inner] / np.float32(255)).permute(0, 3, 1, 2)
    images, others = images[:count].contiguous(), images[count:].contiguous()
    noisy = others + 25 / 255 * torch.randn(others.shape, generator=torch.Generator().manual_seed(0))
    foe, arguments = FieldOfExperts(), {}
    if training:
        theta = join(regularizer=foe.init_params((3, 8, 8), torch.Generator()))
    else:
        theta = dict(Model.load("denoise-color-foe").theta)
    theta = {name: value.float() for name, value in theta.items()}
    if "estimates" in BilevelOracle.__init__.__code__.co_varnames:
        arguments["estimates"] = True  # as runs do
    oracle = make_oracle(
        images,
        foe,
        MemoryGradient(),
        CGIFT(),
        Identity(),
        noise=25 / 255,
        dtype=torch.float32,
        **arguments,  # type: ignore[arg-type]
    )
    position = 0
    for _ in sys.stdin:
        ids = [(position + k) % count for k in range(options.count)]
        position += options.count if training else 0
        batch = oracle.on(Batch(ids, [count / options.count] * options.count))
        before, wall, cpu = oracle.cost, time.perf_counter(), time.process_time()
        answer = batch.hypergradient(theta, Accuracy(0.1), Accuracy(0.1))
        spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        cost = oracle.cost - before
        sizes = [
            sum(float(entry.square().sum()) for entry in both.values()) ** 0.5
            for both in (theta, answer.gradient)
        ]
        step = options.step if training else options.move * sizes[0] / sizes[1]
        theta = oracle.problem.project(
            {name: value - step * answer.gradient[name] for name, value in theta.items()}
        )
        quality = None
        if training:
            lower = variational(Identity(), foe).at(theta, others.shape[1:]).on(noisy)
            error = (solve(MemoryGradient(), lower, noisy, 0.1).x - others).square().flatten(1).mean(1)
            quality = float((-10 * error.log10()).mean())
        row = spent | {
            "mm": cost.lower_iterations / options.count,
            "cg": cost.linear_iterations / options.count,
        }
        print(json.dumps(row | {"psnr": quality}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, nargs="?")
    parser.add_argument("--steps", type=int, help="at most; 4, or 100 with --target")
    parser.add_argument("--move", type=float, default=0.003)
    parser.add_argument("--step", type=float, default=1e-2)
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--target", type=float)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    if options.checkout is None:
        parser.error("name the folder of the earlier version")
    arguments = [word for word in sys.argv[1:] if word != str(options.checkout)]
    versions = {"now": Version(ROOT, arguments), "before": Version(options.checkout.resolve(), arguments)}
    totals = {name: {"wall": 0.0, "cpu": 0.0, "mm": 0.0, "cg": 0.0} for name in versions}
    running, count = set(versions), dict.fromkeys(versions, 0)
    most = options.steps or (4 if options.target is None else 100)
    for number in range(most + 1):
        for name in sorted(running):
            row = versions[name].step()
            if number or options.target is not None:
                count[name] += 1
                for key in totals[name]:
                    totals[name][key] += row[key]
            if options.target is not None and number % 5 == 0:
                spent = totals[name]["cpu"]
                print(
                    f"  {name:7}{count[name]:4} steps {row['psnr']:.2f} dB {spent:.2f} s of CPU", flush=True
                )
            if options.target is not None and row["psnr"] >= options.target:
                running.discard(name)
                print(f"{name}: {row['psnr']:.2f} dB after {count[name]} steps", flush=True)
        if not running:
            break
    for name, total in totals.items():
        shown = ", ".join(f"{key} {value / count[name]:.3g}" for key, value in total.items())
        print(f"{name:7} {count[name]} steps, in all {total['cpu']:.2f} s of CPU; per step: {shown}")
    print(f"ratio: {totals['before']['cpu'] / totals['now']['cpu']:.2f} in CPU time")


if __name__ == "__main__":
    main()
