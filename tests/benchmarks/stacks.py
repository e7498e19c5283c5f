"""What stacks of small convolutions save: processor time of a gradient and of a Hessian product, per megapixel.

    python tests/benchmarks/stacks.py [--filters 24 48] [--channels 1 3] [--repeats 7]

`foe` with full kernels of 7×7 and 13×13 against `general` with stacks that see 13×13 pixels, and with mixtures of three
smoothed absolute values. Initial filters, eight images of 128², one thread, float32; candidates take turns, and the
smallest processor time counts. Multiplications are those of C for one pixel.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from timing import interleaved

from blt_builtins.regularizers.foe import FieldOfExperts
from blt_builtins.regularizers.general import GeneralExperts
from bltoolbox import keep_freed_memory
from bltoolbox.plugin import Regularizer, image_layout, keyed_generator

COUNT, SIDE, PASSES = 8, 128, 3
STACKS = (((11, 3), (4,)), ((11, 3), (8,)), ((9, 3, 3), (4, 8)), ((5, 5, 5), (4, 8)))


def candidates(filters: int, channels: int) -> dict[str, tuple[Regularizer, int]]:
    """Regularizers, and the multiplications of C for one pixel."""
    found: dict[str, tuple[Regularizer, int]] = {
        f"foe {side}×{side}": (FieldOfExperts(filters, side), filters * channels * side**2)
        for side in (7, 13)
    }
    for layers, between in STACKS:
        counts = (channels, *between, filters)
        products = sum(
            seen * made * side**2 for seen, made, side in zip(counts[:-1], counts[1:], layers, strict=True)
        )
        name = "stack " + ", ".join(map(str, layers)) + " of " + ", ".join(map(str, counts[1:]))
        found[name] = GeneralExperts(filters, layers, between, components=1, smoothing="shared"), products
    mixture = GeneralExperts(filters, (7,), (), components=3, smoothing="shared")
    found["foe 7×7, mixtures of 3"] = mixture, filters * channels * 49
    return found


def timed(regularizer: Regularizer, channels: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """A gradient and a Hessian product, several times."""
    shape = (channels, SIDE, SIDE)
    raw = regularizer.init_params(shape, keyed_generator("stacks"))
    theta = regularizer.prepare({name: value.float() for name, value in raw.items()})
    x, v = (image_layout(torch.rand(COUNT, *shape, generator=keyed_generator("stacks", k))) for k in range(2))
    product = regularizer.linearize(theta, x)

    def gradients() -> None:
        for _ in range(PASSES):
            regularizer.gradient(theta, x)

    def products() -> None:
        for _ in range(PASSES):
            product(v)

    return gradients, products


def measure(filters: int, channels: int, repeats: int) -> None:
    found = candidates(filters, channels)
    runs = {}
    for name, (regularizer, _) in found.items():
        for kind, run in zip(("gradient", "product"), timed(regularizer, channels), strict=True):
            runs[f"{name} {kind}"] = (lambda: None, run)
    times = interleaved(runs, repeats)
    megapixels = COUNT * SIDE**2 * PASSES / 1e6
    print(f"\n{filters} filters, {'gray' if channels == 1 else 'colour'}; ms of CPU per megapixel")
    for name, (_, products) in found.items():
        gradient, product = (
            1e3 * times[f"{name} {kind}"].cpu / megapixels for kind in ("gradient", "product")
        )
        print(
            f"{name:34} {products:7} products   gradient {gradient:7.0f}   Hessian product {product:7.0f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--filters", type=int, nargs="+", default=[24, 48])
    parser.add_argument("--channels", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    for channels in options.channels:
        for filters in options.filters:
            measure(filters, channels, options.repeats)


if __name__ == "__main__":
    main()
