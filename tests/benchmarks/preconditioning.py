"""What the spectral preconditioner saves: iterations and processor time without and with it.

    python tests/benchmarks/preconditioning.py CROPS.npy [--first 1000] [--count 8] [--repeats 2] [--models NAME …]

Crops are (N, H, W, 3) uint8. For each shipped model, and for the initial filters of a regularizer (`foe`, `wcfoe`): CG
for the adjoint from zero, `mm` from the linear estimate (*cold*), and `mm` after θ has moved by 1 % (*warm*), at two
tolerances. ``ratio`` is the largest entry of P over its smallest, by which `auto` decides: its smallest and largest
value over the samples. One thread, float32; runs take turns, and the smallest processor time counts.

The limits in ``bltoolbox/restoration/spectral.py`` were chosen on crops 600 to 607; docs/performance.md reports 1000 to
1007.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import torch
from timing import interleaved
from torch import Tensor

from blt_builtins.hypergradients.cg_ift import CGIFT
from blt_builtins.lower_solvers.mm import MemoryGradient
from blt_builtins.operators.identity import Identity
from blt_builtins.regularizers.foe import FieldOfExperts
from blt_builtins.regularizers.weakly_convex import WeaklyConvexExperts
from bltoolbox import Model
from bltoolbox.bilevel.linear import ConjugateGradients, solve_linear
from bltoolbox.bilevel.lower_loop import solve
from bltoolbox.bilevel.memory import keep_freed_memory
from bltoolbox.bilevel.problem import Lower
from bltoolbox.bilevel.records import Counter, Theta
from bltoolbox.plugin import Operator, Preconditioning, Regularizer, join
from bltoolbox.testing import make_oracle

NOISE, MOVE = 25 / 255, 0.01
INITIAL: dict[str, Callable[[], Regularizer]] = {"foe": FieldOfExperts, "wcfoe": WeaklyConvexExperts}
NAMES = ("foe", "wcfoe", "denoise-color-foe", "denoise-color", "deblur-color-foe", "denoise-gray")
MODES: tuple[Preconditioning, ...] = ("none", "auto", "spectral")


def problem(name: str) -> tuple[Regularizer, Operator, dict[str, Tensor], float, bool]:
    """Regularizer, operator, θ in float32, noise, and whether it is for gray images."""
    if name in INITIAL:
        regularizer = INITIAL[name]()
        theta = join(regularizer=regularizer.init_params((3, 8, 8), torch.Generator().manual_seed(0)))
        return regularizer, Identity(), {key: value.float() for key, value in theta.items()}, NOISE, False
    model = Model.load(name)
    theta = {key: value.float() for key, value in model.theta.items()}
    level = model.problem.noise_level
    return (
        model.problem.regularizer,
        model.problem.operator,
        theta,
        NOISE if level is None else level,
        name.endswith("gray"),
    )


def spread(lower: Lower, x: Tensor) -> str:
    """The smallest and the largest ratio of the entries of P, at the Hessian and at the majorant."""
    shown = []
    composite = lower.composite()
    assert composite is not None
    _, curvatures = composite.touch(composite.forward(x))
    for made in (
        lower.linearize(x).preconditioner(True),
        composite.preconditioner(tuple(curvatures), True),
    ):
        gains = made.inverse.diagonal(dim1=1, dim2=2).flatten(1)
        ratios = gains.amax(1) / gains.amin(1)
        shown.append(f"{float(ratios.min()):.1f}–{float(ratios.max()):.1f}")
    return f"ratio {shown[0]} (CG), {shown[1]} (mm)"


def compare(what: str, run: Callable[[Preconditioning], Tensor], repeats: int) -> None:
    counts: dict[str, float] = {}

    def timed(mode: Preconditioning) -> Callable[[], None]:
        return lambda: counts.update({mode: float(run(mode).float().mean())})

    times = interleaved({mode: (lambda: None, timed(mode)) for mode in MODES}, repeats)
    entries = [
        f"{mode} {counts[mode]:5.1f} its {times[mode].cpu:6.3f} s"
        f" (×{times['none'].cpu / times[mode].cpu:4.2f})"
        for mode in MODES
    ]
    print(f"  {what:20}" + "   ".join(entries), flush=True)


def moved(theta: Theta) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    noise = {key: torch.randn(value.shape, generator=generator) for key, value in theta.items()}
    return {key: value + MOVE * value.norm() / noise[key].norm() * noise[key] for key, value in theta.items()}


def measure(name: str, images: Tensor, repeats: int) -> None:
    regularizer, operator, theta, noise, gray = problem(name)
    if gray:
        images = images.mean(1, keepdim=True)
    oracle = make_oracle(
        images, regularizer, MemoryGradient(), CGIFT(), operator, noise=noise, dtype=torch.float32
    )
    ids = range(len(images))
    lower, upper = oracle.tasks.at(theta, Counter()).on(ids)
    after, _ = oracle.tasks.at(oracle.problem.project(moved(theta)), Counter()).on(ids)
    cold, y = lower.estimate(), lower.start()
    x = solve(MemoryGradient(), lower, cold, 0.05).x
    print(f"{name}: {spread(lower, x)}")
    for tol in (0.5, 0.1):

        def adjoint(mode: Preconditioning, tol: float = tol) -> Tensor:
            right = upper.gradient(x)
            limits = torch.full((len(x),), tol)
            method = ConjugateGradients("CG", mode)
            return solve_linear(method, lower.linearize(x), right, torch.zeros_like(right), limits, 500)[2]

        def minimise(
            mode: Preconditioning, at: Lower, start: Callable[[], Tensor], tol: float = tol
        ) -> Tensor:
            return solve(MemoryGradient(preconditioner=mode), at, start(), tol).iterations

        compare(f"CG {tol:g}", adjoint, repeats)
        compare(f"mm warm {tol:g}", lambda mode: minimise(mode, after, lambda: x), repeats)
        compare(f"mm cold {tol:g}", lambda mode: minimise(mode, lower, lower.estimate), repeats)
        compare(f"mm from Aᵀy {tol:g}", lambda mode: minimise(mode, lower, lambda: y), repeats)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("crops")
    parser.add_argument("--first", type=int, default=1000)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--models", nargs="*", default=NAMES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    pixels = np.load(options.crops, mmap_mode="r")[options.first : options.first + options.count]
    images = torch.from_numpy(pixels / np.float32(255)).permute(0, 3, 1, 2).contiguous()
    with torch.no_grad():
        for name in options.models:
            measure(name, images, options.repeats)


if __name__ == "__main__":
    main()
