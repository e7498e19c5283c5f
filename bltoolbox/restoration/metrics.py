"""How close an image is to the true one: every metric, once, by name.

    PSNR = −10 log₁₀ mean ((x − x*)/r)²  dB        r = the width of the range of values
    NRMSE = ‖x − x*‖ / ‖x*‖

SSIM compares means, variances and the covariance under a Gaussian window of σ = 1.5 on 11×11 pixels, where it fits into
the image, and is averaged over places and channels (Wang, Bovik, Sheikh & Simoncelli, *Image quality assessment: from
error visibility to structural similarity*, IEEE TIP 2004).

x is clipped to the range first. A metric takes images H×W or H×W×C; uint8 and uint16 stand for values in [0, 1]. Each
image is measured for itself, in float64 and in the memory of a few rows. Loads no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bltoolbox.config.wording import did_you_mean
from bltoolbox.errors import UsageError
from bltoolbox.runs.metric import Metric

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

Range = tuple[float, float]
UNIT: Range = (0.0, 1.0)

_RADIUS = 5
_C1, _C2 = 0.01**2, 0.03**2
#: Pixels of a strip of rows.
_STRIP = 2**19


def psnr(x: NDArray[Any], x_true: NDArray[Any], span: Range = UNIT) -> float:
    """Peak signal-to-noise ratio in dB; infinite if both are equal."""
    error, _ = _squares(x, x_true, span)
    return math.inf if error == 0 else -10 * math.log10(error / x.size)


def nrmse(x: NDArray[Any], x_true: NDArray[Any], span: Range = UNIT) -> float:
    """Error relative to the true image, in the Euclidean norm; NaN where that image is zero."""
    error, size = _squares(x, x_true, span)
    return math.sqrt(error / size) if size else math.nan


def ssim(x: NDArray[Any], x_true: NDArray[Any], span: Range = UNIT) -> float:
    """Structural similarity, at most 1; NaN for images that the window does not fit into."""
    _same_shape(x, x_true)
    size = 2 * _RADIUS + 1
    if min(x.shape[:2]) < size:
        return math.nan
    total, count = 0.0, 0
    for rows in _strips(x, size - 1):
        values = _similarity(*_scaled(x[rows], x_true[rows], span))
        total += float(values.sum())
        count += values.size
    return total / count


def _measured_by_the_problem(x: NDArray[Any], x_true: NDArray[Any], span: Range) -> float:
    raise NotImplementedError("the loss is measured where it is bound to its samples")


@dataclass(frozen=True)
class ImageMetric(Metric):
    """A metric and the function that measures it: of x, x* and the range of values."""

    of: Callable[[NDArray[Any], NDArray[Any], Range], float] = psnr
    #: The smallest height and width that it takes.
    side: int = 1
    needs_truth: bool = True


METRICS = {
    metric.name: metric
    for metric in (
        ImageMetric("psnr", "PSNR", "dB", 2, of=psnr),
        ImageMetric("ssim", "SSIM", of=ssim, side=2 * _RADIUS + 1),
        ImageMetric("nrmse", "NRMSE", higher=False, of=nrmse),
    )
}

#: The mean of the upper loss g, which the problem measures itself; it may need no true images.
LOSS = ImageMetric("loss", "Loss", higher=False, of=_measured_by_the_problem, needs_truth=False)


def pick(names: Iterable[str], among: Mapping[str, Any] = METRICS) -> tuple[Any, ...]:
    """Metrics by name, each once."""
    names = list(dict.fromkeys(names))
    for name in names:
        if name not in among:
            hint = did_you_mean(name, among) or f"; choose from {', '.join(among)}"
            raise UsageError(f"there is no metric {name!r}{hint}")
    return tuple(among[name] for name in names)


def pick_listed(names: str, among: Mapping[str, Any] = METRICS) -> tuple[Any, ...]:
    """Metrics as a command line lists them: ``psnr,ssim``."""
    return pick((name.strip() for name in names.split(",")), among)


def values_in(span: Range) -> str:
    """For messages: ``values from 0 to 4095``."""
    return "values from {:g} to {:g}".format(*span)


def measure(
    metrics: Sequence[ImageMetric], x: Tensor, x_true: Tensor, span: Range = UNIT
) -> dict[str, list[float]]:
    """Each metric of each image of a batch (B, C, H, W)."""
    images, truths = (batch.detach().cpu().permute(0, 2, 3, 1).numpy() for batch in (x, x_true))
    return {
        metric.name: [metric.of(*pair, span) for pair in zip(images, truths, strict=True)]
        for metric in metrics
    }


def _squares(x: NDArray[Any], x_true: NDArray[Any], span: Range) -> tuple[float, float]:
    """‖x − x*‖² and ‖x*‖², in units of the range's width."""
    import numpy as np  # `blt validate` asks for the names of metrics alone

    _same_shape(x, x_true)
    error, size = 0.0, 0.0
    for rows in _strips(x, 0):
        a, b = _scaled(x[rows], x_true[rows], span)
        error += float(np.square(a - b).sum())
        size += float(np.square(b).sum())
    return error, size


def _scaled(x: NDArray[Any], x_true: NDArray[Any], span: Range) -> Iterator[NDArray[np.float64]]:
    """Both in units of the range's width, x within it. SSIM depends on where zero is, so nothing is shifted."""
    low, high = span
    yield _plain(x).clip(low, high) / (high - low)
    yield _plain(x_true) / (high - low)


def _similarity(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    import numpy as np

    mean_a, mean_b = _window(a), _window(b)
    product = mean_a * mean_b
    squares = mean_a * mean_a + mean_b * mean_b
    covariance = _window(a * b) - product
    variances = _window(a * a + b * b) - squares
    numerator = (2 * product + _C1) * (2 * covariance + _C2)
    return np.asarray(numerator / ((squares + _C1) * (variances + _C2)))


def _window(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Means under the window, where it fits, over the first two dimensions."""
    import numpy as np

    distance = np.arange(-_RADIUS, _RADIUS + 1)
    weights = np.exp(-0.5 * (distance / 1.5) ** 2)
    weights /= weights.sum()
    for axis in (0, 1):
        count = values.shape[axis] - 2 * _RADIUS
        parts = np.zeros([count if k == axis else n for k, n in enumerate(values.shape)])
        for k, weight in enumerate(weights):
            window = slice(k, k + count)
            parts += weight * (values[window] if axis == 0 else values[:, window])
        values = parts
    return values


def _strips(x: NDArray[Any], more: int) -> Iterator[slice]:
    """Rows of a picture in parts, each with ``more`` rows of the next one."""
    height = x.shape[0]
    step = max(1, _STRIP // max(1, x[0].size))
    for first in range(0, height - more, step):
        yield slice(first, min(first + step, height - more) + more)


def _plain(values: NDArray[Any]) -> NDArray[np.float64]:
    import numpy as np

    top = float(np.iinfo(values.dtype).max) if values.dtype.kind == "u" else 1.0
    return values.astype(np.float64) / top


def _same_shape(x: NDArray[Any], x_true: NDArray[Any]) -> None:
    if x.shape != x_true.shape:
        sizes = ("×".join(map(str, images.shape)) for images in (x, x_true))
        raise ValueError("the images differ in size: {} and {}".format(*sizes))
