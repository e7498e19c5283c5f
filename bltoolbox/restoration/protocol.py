"""One protocol for tables of denoisers: whole photographs of any size, noise that depends on seed and name only.

    y = A x* + σ n,        n ~ N(0, I), drawn in float64 from a generator of (seed, file name without its suffix)

The photographs of a folder in the order of their names; for a gray model their luma (ITU-R BT.601), rounded to the bits
of the file, as in the gray versions of the usual test sets. y is neither clipped nor rounded; x̂ is clipped to [0, 1] by
the metrics, and not rounded. So figures on BSD68, CBSD68, Kodak and the like can be compared with the literature, up to
the draw of the noise.

Baselines get the same y and the true σ: the measurements themselves, total variation and BM3D.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bltoolbox.bilevel.tensors import detached, keyed_generator
from bltoolbox.config.block import Block
from bltoolbox.config.registry import Registry
from bltoolbox.config.wording import did_you_mean
from bltoolbox.errors import MissingError, UsageError
from bltoolbox.restoration.layout import LUMA
from bltoolbox.restoration.metrics import UNIT, ImageMetric
from bltoolbox.restoration.model import Model
from bltoolbox.restoration.pictures.files import is_picture, read_picture
from bltoolbox.restoration.theta import prepare
from bltoolbox.restoration.tiles import Restorer

#: y ↦ x̂ for measurements H×W×C.
Method = Callable[[NDArray[Any]], NDArray[Any]]

#: Of total variation, relative to σ: its weight for gray and for colour, chosen on eight training crops of BSDS500 at
#: σ = 25/255 (flat within 0.1 of it), and its smoothing.
_TV_GRAY, _TV_COLOUR, _TV_SMOOTHING = 0.75, 1.1, 0.1


@dataclass(frozen=True)
class Photograph:
    """One row of a table: each metric by method, and the seconds that each took."""

    name: str
    width: int
    height: int
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def compare_on_photographs(
    model: Model,
    label: str,
    folder: Path,
    sigma: float,
    metrics: Sequence[ImageMetric],
    against: Sequence[str],
    registry: Registry,
    *,
    seed: int = 0,
    started: Callable[[int, int, str], None] = lambda number, count, name: None,
) -> Iterator[Photograph]:
    """The rows of the table, one after the other."""
    paths = find_photographs(folder)
    restorer = Restorer(model)
    around = restorer.around
    if around is None or around.scale != 1 or around.margin != (0, 0):
        name = model.recipe.operator.name
        raise UsageError(
            f"operator {name!r} cannot be simulated on photographs of any size; use blt evaluate without --images"
        )
    methods = {label: _restoring(restorer, sigma)}
    methods |= {name: _baseline(name, model, sigma, registry) for name in against}
    _refuse_misfits(paths, model.channels)
    for number, path in enumerate(paths):
        started(number, len(paths), path.name)
        truth = _truth(path, model.channels)
        with detached():
            y = _measure(restorer, truth, sigma, seed, path.stem)
            yield _row(path.name, truth, y, methods, metrics)


def find_photographs(folder: Path) -> list[Path]:
    """The pictures of a folder by name; two that differ only in their suffix would have the same noise."""
    if not folder.is_dir():
        raise UsageError(f"--images: {folder} is not a folder")
    paths = sorted(path for path in folder.iterdir() if path.is_file() and is_picture(path))
    if not paths:
        raise UsageError(f"--images: there is no picture in {folder}")
    return paths


def _refuse_misfits(paths: Sequence[Path], channels: int) -> None:
    """Before anything is restored: the means of some of the pictures would look like those of all."""
    misfits = [f"{path.name} is {kind}" for path in paths if (kind := _misfit(path, channels)) is not None]
    if misfits:
        fits = {1: "gray models take gray or RGB pictures", 3: "colour models take RGB pictures"}
        raise UsageError(
            f"--images: {len(misfits)} of {len(paths)} pictures cannot be used: {', '.join(misfits)};"
            f" {fits.get(channels, f'the model takes {channels} channels')}, so move or convert these"
        )


def _misfit(path: Path, channels: int) -> str | None:
    """What kind of picture it is, if the model cannot take it; unreadable files are an error of their own."""
    picture = read_picture(path)
    count = picture.colours.shape[2]
    if picture.kind == "cmyk":
        return "CMYK"
    if count == channels or (channels, count) == (1, 3):
        return None
    return {1: "gray", 3: "RGB"}.get(count, f"of {count} channels")


def _truth(path: Path, channels: int) -> NDArray[np.float64]:
    """x* in [0, 1], H×W×C."""
    pixels = read_picture(path).colours
    top = float(np.iinfo(pixels.dtype).max) if pixels.dtype.kind == "u" else 1.0
    if channels == 1 and pixels.shape[2] == 3:
        luma = (pixels.astype(np.float64) @ np.array(LUMA))[..., None]
        return (np.floor(luma + 0.5) if top > 1 else luma) / top
    return pixels.astype(np.float64) / top


def _measure(
    restorer: Restorer, truth: NDArray[np.float64], sigma: float, seed: int, name: str
) -> NDArray[np.float64]:
    x = torch.from_numpy(truth).permute(2, 0, 1).unsqueeze(0)
    theta = {key: value.double().cpu() for key, value in restorer.model.theta.items()}
    clean = restorer.problem.operator.apply(x, prepare(restorer.problem, theta)["operator"], {})
    generator = keyed_generator("photographs", seed, name)
    noise = torch.randn(clean.shape, generator=generator, dtype=torch.float64)
    return (clean + sigma * noise)[0].permute(1, 2, 0).numpy()


def _row(
    name: str,
    truth: NDArray[np.float64],
    y: NDArray[np.float64],
    methods: Mapping[str, Method],
    metrics: Sequence[ImageMetric],
) -> Photograph:
    row = Photograph(name, truth.shape[1], truth.shape[0])
    for method, restore in methods.items():
        began = time.perf_counter()
        restored = restore(y)
        row.seconds[method] = time.perf_counter() - began
        row.metrics[method] = {metric.name: metric.of(restored, truth, UNIT) for metric in metrics}
    return row


def _restoring(restorer: Restorer, sigma: float) -> Method:
    return lambda y: restorer.run(y.astype(np.float32), sigma)[0]


def _baseline(name: str, model: Model, sigma: float, registry: Registry) -> Method:
    if name == "noisy":
        return lambda y: y
    if name not in BASELINES:
        hint = did_you_mean(name, BASELINES) or f"; choose from {', '.join(BASELINES)}"
        raise UsageError(f"--against: there is no baseline {name!r}{hint}")
    if model.recipe.operator.name != "identity":
        raise UsageError(
            f"--against {name}: it removes noise, but the model's operator is {model.recipe.operator.name!r};"
            " compare with noisy"
        )
    return _bm3d(model.channels, sigma) if name == "bm3d" else _total_variation(model, sigma, registry)


def _total_variation(model: Model, sigma: float, registry: Registry) -> Method:
    weight = (_TV_GRAY if model.channels == 1 else _TV_COLOUR) * sigma
    block = Block("regularizer", "tv", {"weight": weight, "nu": _TV_SMOOTHING * sigma})
    regularizer = registry.build(block)
    params = regularizer.init_params((model.channels, 16, 16), keyed_generator("tv"))
    like = next(iter(model.theta.values()))
    theta = {f"regularizer.{key}": value.to(like) for key, value in params.items()}
    problem = replace(model.problem, regularizer=regularizer)
    solver = registry.build(Block("lower_solver", "mm"))
    recipe = replace(model.recipe, regularizer=block)
    # The model's own level, so that the weight is used as it is.
    own = Restorer(Model(problem, solver, theta, recipe, model.shape))
    return lambda y: own.run(y.astype(np.float32), "model")[0]


def _bm3d(channels: int, sigma: float) -> Method:
    try:
        import bm3d
    except ImportError as error:
        raise MissingError(
            "--against bm3d needs the package bm3d; run pip install 'bltoolbox[bm3d]'"
        ) from error

    def restore(y: NDArray[Any]) -> NDArray[Any]:
        restored = bm3d.bm3d(y[..., 0], sigma) if channels == 1 else bm3d.bm3d_rgb(y, sigma)
        return np.asarray(restored).reshape(y.shape)

    return restore


#: What ``--against`` takes.
BASELINES = ("noisy", "tv", "bm3d")


def means(rows: Sequence[Photograph], name: str) -> dict[str, float]:
    """The mean of a metric over all photographs, by method."""
    return {
        method: math.fsum(row.metrics[method][name] for row in rows) / len(rows) for method in rows[0].metrics
    }
