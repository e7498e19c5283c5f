"""How the cost of a training step grows: not with the data set, linearly with pixels and with the batch.

    python tests/benchmarks/growth.py --json growth.json --plot docs/images/growth.png

The step is one of ISGD with a fixed number of iterations, so that time is compared and not difficulty. Processor time
on one thread, since wall clocks would measure what else the machine does.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from timing import interleaved
from torch import Tensor

from blt_builtins.lower_solvers.mm import MemoryGradient, MMState
from blt_builtins.regularizers.foe import FieldOfExperts
from bltoolbox.bilevel.memory import keep_freed_memory
from bltoolbox.bilevel.oracle import BatchOracle
from bltoolbox.bilevel.problem import Lower
from bltoolbox.bilevel.records import Accuracy, Ask, Batch, Estimate, Rows
from bltoolbox.bilevel.roles import HypergradientEstimator
from bltoolbox.restoration.theta import join
from bltoolbox.testing import make_oracle, smooth_images

SIZES = (64, 128, 256, 512, 1024)
SIDES = (32, 48, 64, 96, 128, 192)
BATCHES = (1, 2, 4, 8, 16, 32)
ITERATIONS = 8


def step(m: int, side: int, batch: int) -> BatchOracle:
    """A batch of a problem with m images; its hypergradient takes ``ITERATIONS`` iterations a sample, twice."""
    images = smooth_images(min(m, 32), (3, side, side)).float()
    images = images.repeat(-(-m // len(images)), 1, 1, 1)[:m]
    oracle = make_oracle(images, FieldOfExperts(), Counting(), Truncated(), noise=0.1, dtype=torch.float32)
    return oracle.on(Batch(range(m - batch, m), [m / batch] * batch))


class Counting(MemoryGradient):
    """``ITERATIONS`` iterations, whatever the residual."""

    exact_residual = True

    def init(self, lower: Lower, x0: Tensor, kept: Rows) -> MMState:
        self.left = ITERATIONS
        return super().init(lower, x0, kept)

    def step(self, lower: Lower, state: MMState) -> MMState:
        self.left -= 1
        after = super().step(lower, state)
        return after if self.left else replace(after, residual=torch.zeros_like(after.residual))


class Truncated(HypergradientEstimator):
    """As many Hessian products as iterations, whatever comes out."""

    def estimate(self, ask: Ask) -> Estimate:
        lower, x = ask.lower, ask.solution
        hessian, q = lower.linearize(x), ask.upper.gradient(x)
        for _ in range(ITERATIONS):
            q = q - 1e-3 * hessian.hvp(q)
        zeros = torch.zeros_like(ask.weights)
        return Estimate(lower.mixed(x, q, ask.weights), zeros, zeros.long(), adjoint=q)


def measure(cases: dict[int, BatchOracle], repeats: int) -> dict[int, float]:
    theta = {
        k: v.float()
        for k, v in join(regularizer=FieldOfExperts().init_params((3, 8, 8), torch.Generator())).items()
    }
    runs = {
        str(key): (
            lambda: None,
            lambda asked=asked: asked.hypergradient(theta, Accuracy(1e-9), Accuracy(1e9)),
        )
        for key, asked in cases.items()
    }
    times = interleaved(runs, repeats)
    return {key: times[str(key)].cpu for key in cases}


def draw(found: dict[str, dict[int, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4), layout="constrained")
    labels = {
        "images": "images in the data set",
        "pixels": "pixels of an image",
        "batch": "images in a batch",
    }
    for axes, (name, times) in zip(figure.subplots(1, 3), found.items(), strict=True):
        x = [key**2 if name == "pixels" else key for key in times]
        y = [1e3 * value for value in times.values()]
        axes.loglog(x, y, "o-", label="measured")
        slope = [y[-1]] * len(x) if name == "images" else [y[-1] * one / x[-1] for one in x]
        axes.loglog(x, slope, "--", color="gray", label="constant" if name == "images" else "linear")
        axes.set_xlabel(labels[name])
        axes.set_ylabel("processor ms per step")
        axes.grid(True, which="both", alpha=0.2)
        axes.legend()
        axes.set_ylim(min(*y, *slope) / 1.6, max(*y, *slope) * 1.6)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    found = {
        "images": measure({m: step(m, 48, 16) for m in SIZES}, options.repeats),
        "pixels": measure({side: step(4, side, 4) for side in SIDES}, options.repeats),
        "batch": measure({size: step(32, 48, size) for size in BATCHES}, options.repeats),
    }
    for name, times in found.items():
        print(name, "  ".join(f"{key}: {1e3 * value:.1f} ms" for key, value in times.items()))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    if options.plot:
        draw(found, options.plot)


if __name__ == "__main__":
    main()
