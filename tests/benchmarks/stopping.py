"""How accurate 8-bit results must be: what stopping at a residual of c·σ costs in decibels, for several c.

    python tests/benchmarks/stopping.py CROPS.npy [--first 0] [--count 48] [--models NAME …] [--levels 5 25 50]

Crops are (N, H, W, 3) uint8. They get noise and are rounded to 8 bits, like a picture file, and are restored from the
linear estimate, by the solver that pictures are restored with. For each c: the mean iterations, the mean of the PSNR
of the minimiser minus the PSNR where the root mean square residual first reached c·σ, and the largest distance between
the two over all crops. The minimiser is approximated by as many iterations as it takes to c = 4e-4. One thread,
float32.

The factor in ``bltoolbox/restoration/tile_solver.py`` keeps each of the training crops of 256² within 0.01 dB. Crops of
96² would need a smaller one for the weakly convex models, so pictures of fewer than 256² pixels are solved as
accurately as those of 16 bits. docs/apply.md has the figures; no test image was used.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from bltoolbox import Model
from bltoolbox.restoration.image_lower import ImageLower
from bltoolbox.restoration.rescaled import Rescaled

FACTORS = (0.06, 0.05, 0.04, 0.03, 0.025, 0.02, 0.015, 0.01)
CONVERGED, LIMIT = 4e-4, 400
NAMES = ("denoise-color-foe", "denoise-color", "denoise-color-range", "denoise-gray", "denoise-gray-foe")


def measured(model: Model, crops: Tensor, sigma: float) -> ImageLower:
    """The lower level of noisy crops at this noise level."""
    generator = torch.Generator().manual_seed(0)
    noisy = (crops + sigma * torch.randn(crops.shape, generator=generator)).clamp(0, 1)
    y = (255 * noisy).round() / 255
    problem, trained = model.problem.restoring, model.problem.noise_level
    assert trained is not None
    if not math.isclose(sigma, trained):
        problem = replace(problem, regularizer=Rescaled(problem.regularizer, sigma / trained))
    return problem.at(model.theta, tuple(crops.shape[1:])).on(y)


def psnr(x: Tensor, truth: Tensor) -> Tensor:
    return -10 * torch.log10((x.double().clamp(0, 1) - truth).square().mean((1, 2, 3)))


@torch.no_grad()
def report(name: str, crops: Tensor, sigma: float) -> None:
    model = Model.load(name, device="cpu")
    truth = crops if model.channels == 3 else crops.mean(1, keepdim=True)
    lower = measured(model, truth, sigma)
    unit = sigma * math.sqrt(truth[0].numel())
    solver = model.solver.quick()
    state = solver.init(lower, lower.estimate(), {})
    stops = {c: torch.full((len(truth),), -1) for c in FACTORS}
    reached = {c: torch.zeros(len(truth), dtype=torch.float64) for c in FACTORS}
    for iteration in range(LIMIT):
        figures = None
        for c in FACTORS:
            now = (stops[c] < 0) & (state.residual <= c * unit)
            if bool(now.any()):
                figures = psnr(state.x, truth) if figures is None else figures
                stops[c][now], reached[c][now] = iteration, figures[now]
        if bool((state.residual <= CONVERGED * unit).all()):
            break
        state = solver.step(lower, state)
    final = psnr(state.x, truth)
    print(f"{name}, σ = {255 * sigma:g}/255, PSNR {float(final.mean()):.2f} dB, {iteration} iterations")
    for c in FACTORS:
        gap = final - reached[c]
        print(
            f"  c {c:<7g} iterations {float(stops[c].double().mean()):5.1f}   mean {float(gap.mean()):+.4f} dB"
            f"   largest {float(gap.abs().max()):.4f} dB",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("crops")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=48)
    parser.add_argument("--models", nargs="+", default=NAMES)
    parser.add_argument("--levels", nargs="+", type=float, default=[5.0, 25.0, 50.0])
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = np.load(options.crops, mmap_mode="r")[options.first : options.first + options.count]
    crops = torch.from_numpy(chosen.astype(np.float32) / 255).permute(0, 3, 1, 2).contiguous()
    for name in options.models:
        for level in options.levels:
            report(name, crops, level / 255)


if __name__ == "__main__":
    main()
