"""How fast the toolbox is against published style, and against the machine.

    make bench                          a few minutes on 2 cores
    python tests/benchmarks/speed.py --json speed.json [--count 8] [--slow] [--threads 2]

One batch of colour images of 96² (BSDS500 crops if $BLT_DATA names a folder with bsd-train-96, else crops of the
photographs of scikit-image), a trained Field of Experts, float32, the same threads, tolerances and stopping rule for
both. Candidates take turns, and the best of several times counts. Wanted ratios are printed as met or missed; nothing
is asserted, as these figures depend on the machine. ``difference`` is relative for derivatives; for whole solves it is
the largest distance of two solutions as a part of the tolerance: two solutions to ε differ by at most 2ε.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from published import Published, norms
from timing import PRODUCT_FLOPS, best_times, product
from torch import Tensor

from blt_builtins.data.photos import Photos
from blt_builtins.hypergradients.cg_ift import CGIFT
from blt_builtins.lower_solvers.agd import AGD
from blt_builtins.lower_solvers.mm import MemoryGradient
from blt_builtins.operators.identity import Identity
from blt_builtins.regularizers.foe import FieldOfExperts
from bltoolbox import Model
from bltoolbox.bilevel.lower_loop import solve
from bltoolbox.bilevel.memory import keep_freed_memory
from bltoolbox.bilevel.oracle import BilevelOracle
from bltoolbox.bilevel.precision import computing
from bltoolbox.bilevel.records import Accuracy, Batch, Theta
from bltoolbox.bilevel.roles import LowerSolver
from bltoolbox.restoration.metrics import METRICS, measure
from bltoolbox.restoration.theta import join, split
from bltoolbox.restoration.variational import VariationalTasks
from bltoolbox.testing import full_batch, make_oracle, variational

COUNT, SIDE, NOISE = 8, 96, 25 / 255
#: What each ratio should be.
WANTED = {
    "gradient": 2.2,
    "Hessian product": 7.0,
    "hypergradient, tol 0.1, mm": 8.0,
    "hypergradient, tol 0.01, mm": 8.0,
    "hypergradient, tol 0.1, agd": 5.0,
    "hypergradient, tol 0.01, agd": 5.0,
    "warm training step, tol 0.1, mm": 10.0,
    "training to a test PSNR": 10.0,
}
ROOFLINE = 2.5
#: Images of a step of training.
_BATCH = 32


def crops(count: int = 32, test: bool = False) -> Tensor:
    folder = Path(os.environ.get("BLT_DATA", "")) / "bsd-train-96"
    if folder.is_dir():
        images = np.load(folder / ("test.npy" if test else "train.npy"), mmap_mode="r")[:count]
        return torch.from_numpy(images / np.float32(255)).permute(0, 3, 1, 2).contiguous()
    photos = Photos(size=288).clean(range(4))
    tiles = photos.unfold(2, SIDE, SIDE).unfold(3, SIDE, SIDE).permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
    return tiles[-count:] if test else tiles[:count]


def measured(oracle: BilevelOracle, ids: range) -> tuple[Tensor, Tensor]:
    """True images and measurements, as published code has them."""
    assert isinstance(oracle.tasks, VariationalTasks)
    sample = oracle.tasks.samples.batch(ids)
    assert sample.truth is not None
    return sample.truth.contiguous(), sample.y.contiguous()


class Bench:
    """The problem, in both ways of writing it."""

    def __init__(self, model: str, count: int = COUNT) -> None:
        self.count = count
        trained = Model.load(model)
        foe = trained.problem.regularizer
        assert isinstance(foe, FieldOfExperts)
        own = split(trained.theta, "regularizer")
        self.foe = FieldOfExperts(foe.filters, foe.kernel_size, basis="pixel")
        self.theta = {name: value.float() for name, value in own.items()} | {
            "kernels": foe.kernels(own).float()
        }
        self.images = crops(count)
        self.oracle = self.new_oracle(MemoryGradient())
        self.x_true, self.y = measured(self.oracle, range(count))
        self.lower = (
            variational(Identity(), self.foe)
            .at(join(regularizer=self.theta), self.x_true.shape[1:])
            .on(self.y)
        )
        assert self.lower.bounded
        self.lipschitz = float(self.lower.lipschitz[0])
        self.published = Published(self.y, self.theta)
        self.rows: list[dict[str, Any]] = []

    def new_oracle(self, solver: LowerSolver) -> BilevelOracle:
        return make_oracle(
            self.images,
            self.foe,
            solver,
            CGIFT(),
            operator=Identity(),
            noise=NOISE,
            dtype=torch.float32,
            estimates=True,
        )

    def report(self, what: str, ours: float, theirs: float, agree: float) -> None:
        ratio = theirs / ours
        verdict = "met" if ratio >= WANTED[what] else "missed"
        row = {"what": what, "ours": ours, "published": theirs, "ratio": ratio, "wanted": WANTED[what]}
        self.rows.append(row | {"verdict": verdict, "difference": agree})
        print(
            f"{what:34}{1e3 * ours:10.1f} ms{1e3 * theirs:11.1f} ms{ratio:8.1f}×   wanted {WANTED[what]:4.1f}×"
            f"  {verdict:7}  difference {agree:.1e}",
            flush=True,
        )

    def derivatives(self, repeats: int) -> None:
        x = self.x_true + 0.02 * torch.randn(self.x_true.shape, generator=torch.Generator().manual_seed(0))
        ours = x.contiguous(memory_format=torch.channels_last)
        times = best_times(
            {"ours": lambda: self.lower.gradient(ours), "published": lambda: self.published.gradient(x)},
            repeats,
        )
        difference = relative(self.lower.gradient(ours), self.published.gradient(x))
        self.report("gradient", times["ours"], times["published"], difference)
        v = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
        v_ours = v.contiguous(memory_format=torch.channels_last)
        hessian = self.lower.linearize(ours)
        times = best_times(
            {"ours": lambda: hessian.hvp(v_ours), "published": lambda: self.published.hvp(x, v)}, repeats
        )
        difference = relative(hessian.hvp(v_ours), self.published.hvp(x, v))
        self.report("Hessian product", times["ours"], times["published"], difference)

    def hypergradients(self, repeats: int) -> None:
        theta, zeros = join(regularizer=self.theta), torch.zeros_like(self.y)
        for tol in (0.1, 0.01):
            found: dict[str, Any] = {}

            def ours(solver: LowerSolver, name: str, tol: float = tol, found: dict[str, Any] = found) -> None:
                oracle = self.new_oracle(solver)
                oracle.on(full_batch(oracle)).hypergradient(theta, Accuracy(tol), Accuracy(tol))
                found[name] = oracle.solutions.get(range(self.count), zeros)

            def theirs(tol: float = tol, found: dict[str, Any] = found) -> None:
                found["published"] = self.published.hypergradient(
                    self.x_true, self.y, zeros, self.lipschitz, tol
                )[1]

            candidates: dict[str, Callable[[], object]] = {
                "mm": lambda ours=ours: ours(MemoryGradient(), "mm"),
                "agd": lambda ours=ours: ours(AGD(), "agd"),
                "published": theirs,
            }
            times = best_times(candidates, repeats)
            for name in ("mm", "agd"):
                difference = float(norms(found[name] - found["published"]).max()) / tol
                self.report(
                    f"hypergradient, tol {tol:g}, {name}", times[name], times["published"], difference
                )

    def training_step(self, repeats: int) -> None:
        """θ has moved by one step of ISGD; x̃ and the adjoint of the θ before are at hand for both."""
        tol, theta, zeros = 0.1, join(regularizer=self.theta), torch.zeros_like(self.y)
        z, x_before, q_before = self.published.hypergradient(self.x_true, self.y, zeros, self.lipschitz, tol)
        moved = {name: value - 1e-2 * z[name] for name, value in self.theta.items()}
        after = Published(self.y, moved)
        lipschitz = float(self.foe.lipschitz(moved, self.y.shape[1:])) + 1
        oracle = self.new_oracle(MemoryGradient())
        batch = oracle.on(full_batch(oracle))
        found: dict[str, Any] = {}

        def ours() -> None:
            batch.hypergradient(join(regularizer=moved), Accuracy(tol), Accuracy(tol))
            found["ours"] = oracle.solutions.get(range(self.count), zeros)

        def theirs() -> None:
            found["published"] = after.hypergradient(self.x_true, x_before, q_before, lipschitz, tol)[1]

        times = best_times(
            {"ours": ours, "published": theirs},
            repeats,
            lambda: batch.hypergradient(theta, Accuracy(tol), Accuracy(tol)),
        )
        difference = float(norms(found["ours"] - found["published"]).max()) / tol
        self.report("warm training step, tol 0.1, mm", times["ours"], times["published"], difference)

    def training(self, level: float = 28.2, most: int = 40) -> None:
        """From the same filters on the same batches, until the test images have ``level`` dB.

        Each in its own way: the toolbox in its scaled coordinates with the step of its recipes, published style in
        pixels with the better of the steps 3e-3 and 1e-2. The PSNR is measured after each step, outside of the time.
        """
        train, test = crops(1024), crops(68, test=True)
        noisy = test + NOISE * torch.randn(test.shape, generator=torch.Generator().manual_seed(0))
        foe, tol = FieldOfExperts(), 0.5
        start = {name: value.float() for name, value in foe.init_params((3, 8, 8), torch.Generator()).items()}
        samples = make_oracle(
            train,
            foe,
            MemoryGradient(),
            CGIFT(),
            operator=Identity(),
            noise=NOISE,
            dtype=torch.float32,
            estimates=True,
        )

        def ours(theta: Theta, ids: range) -> dict[str, Tensor]:
            batch = samples.on(Batch(ids, [len(samples.tasks) / _BATCH] * _BATCH))
            z = split(
                batch.hypergradient(join(regularizer=theta), Accuracy(tol), Accuracy(tol)).gradient,
                "regularizer",
            )
            return foe.project({name: value - 1e-2 * z[name] for name, value in theta.items()})

        def theirs(theta: Theta, ids: range) -> dict[str, Tensor]:
            x_true, y = measured(samples, ids)
            lipschitz = float(self.foe.lipschitz(theta, y.shape[1:])) + 1
            z, _, _ = Published(y, theta).hypergradient(x_true, y, torch.zeros_like(y), lipschitz, tol)
            return self.foe.project({name: value - 3e-3 * z[name] for name, value in theta.items()})

        def until(
            step: Callable[[Theta, range], dict[str, Tensor]], regularizer: FieldOfExperts, theta: Theta
        ) -> tuple[float, float]:
            spent, quality = 0.0, 0.0
            for k in range(most):
                began = time.perf_counter()
                first = k * _BATCH % (len(train) - _BATCH + 1)
                theta = step(theta, range(first, first + _BATCH))
                spent += time.perf_counter() - began
                quality = self._quality(regularizer, theta, test, noisy)
                if quality >= level:
                    break
            print(f"  {quality:.2f} dB on the test images after {k + 1} steps")
            return spent, quality

        time_ours, quality_ours = until(ours, foe, start)
        pixels = start | {"kernels": foe.kernels(start)}
        time_theirs, quality_theirs = until(theirs, self.foe, pixels)
        self.report("training to a test PSNR", time_ours, time_theirs, abs(quality_ours - quality_theirs))

    def _quality(self, regularizer: FieldOfExperts, theta: Theta, test: Tensor, noisy: Tensor) -> float:
        lower = variational(Identity(), regularizer).at(join(regularizer=theta), test.shape[1:]).on(noisy)
        restored = solve(MemoryGradient(), lower, lower.start(), 0.1).x
        values = measure([METRICS["psnr"]], restored, test)["psnr"]
        return sum(values) / len(values)

    def roofline(self, repeats: int) -> None:
        """One iteration of each solver against the time its two convolutions take at the speed of a matrix product."""
        filters, channels, size, _ = self.theta["kernels"].shape
        flops = 2 * 2 * self.count * SIDE**2 * filters * channels * size**2
        solvers: dict[str, LowerSolver] = {
            "mm": MemoryGradient(),
            "mm, compiled": MemoryGradient(compile=True),
            "agd": AGD(),
        }

        def stepping(solver: LowerSolver) -> Callable[[], object]:
            solve(solver, self.lower, self.lower.start(), 10.0)  # compiled, and memory at hand
            state = solver.step(self.lower, solver.init(self.lower, self.lower.start(), {}))
            return lambda: solver.step(self.lower, state)

        with torch.no_grad(), computing(self.y.device):
            steps = {name: stepping(solver) for name, solver in solvers.items()}
            times = best_times(steps | {"product": product}, 8 * repeats)
        speed = PRODUCT_FLOPS / times["product"]
        for name in solvers:
            ratio = times[name] / (flops / speed)
            verdict = "met" if ratio <= ROOFLINE else "missed"
            row = {"what": f"roofline, {name}", "ours": times[name], "gemm": flops / speed, "ratio": ratio}
            self.rows.append(row | {"wanted": ROOFLINE, "verdict": verdict, "gemm_gflops": speed / 1e9})
            print(
                f"{'one iteration of ' + name:34}{1e3 * times[name]:10.1f} ms{1e3 * flops / speed:11.1f} ms"
                f"{ratio:8.2f}×   wanted {ROOFLINE:4.1f}× at most  {verdict}  (products: {speed / 1e9:.0f} GFLOP/s)",
                flush=True,
            )


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--slow", action="store_true", help="also train to a test PSNR with both")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--count", type=int, default=COUNT, help="images in the batch")
    parser.add_argument("--model", default="denoise-color-foe", help="a trained Field of Experts")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    bench = Bench(options.model, options.count)
    print(f"{options.count} images of {SIDE}², {options.threads} threads, torch {torch.__version__}")
    print(f"{'':34}{'bltoolbox':>13}{'published':>14}{'ratio':>9}")
    bench.roofline(options.repeats)
    bench.derivatives(2 * options.repeats)
    bench.hypergradients(max(2, options.repeats // 2))
    bench.training_step(max(2, options.repeats // 2))
    if options.slow:
        bench.training()
    if options.json:
        options.json.write_text(json.dumps({"threads": options.threads, "rows": bench.rows}, indent=2) + "\n")
    sys.exit(0)


if __name__ == "__main__":
    main()
