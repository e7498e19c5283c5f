"""Which noise level a picture is restored for: the one given, or an estimate; and what is doubtful about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from bltoolbox.errors import BltError
from bltoolbox.restoration.noise_level import coarse_noise, estimate_noise, parse_noise, show_noise

#: A level and an estimate that differ by this factor are reported, unless they differ by less than fine texture may
#: add to an estimate.
_FACTOR, _TEXTURE = 1.5, 2.5 / 255
#: Noise that is stronger at half the resolution by this factor is correlated, if it is too strong to be texture.
_CORRELATED, _STRONG = 1.5, 12 / 255


@dataclass(frozen=True)
class NoiseChoice:
    """A noise level, None where the noise of the model has none, and whether it was estimated from the picture."""

    sigma: float | None
    estimated: bool = False
    notes: tuple[str, ...] = ()


def choose_noise(
    image: NDArray[Any], given: float | str | None, own: float | None, estimable: bool
) -> NoiseChoice:
    """For an image H×W×C: ``given`` is a level, `auto`, `model` for the model's ``own``, or None: an estimate where
    that makes sense (``estimable``) and the picture allows one, else the model's own."""
    level = parse_noise(given)
    if level == "auto":
        try:
            return NoiseChoice(estimate_noise(image), True)
        except ValueError as error:
            raise BltError(str(error)) from error
    if not estimable:
        return NoiseChoice(level if isinstance(level, float) else own)
    try:
        estimate = estimate_noise(image)
    except ValueError as error:
        if level is not None or own is None:
            return NoiseChoice(level if isinstance(level, float) else own)
        reason = str(error).split(";")[0]
        return NoiseChoice(own, False, (f"{reason}; using the model's {show_noise(own)}",))
    if level is None:
        return NoiseChoice(estimate, True)
    sigma = level if isinstance(level, float) else own
    return NoiseChoice(sigma, False, () if sigma is None else _doubts(sigma, estimate))


def _doubts(sigma: float, estimate: float) -> tuple[str, ...]:
    low, high = sorted((sigma, estimate))
    if high <= _FACTOR * low or high - low <= _TEXTURE:
        return ()
    return (
        f"warning: the noise looks like {show_noise(estimate)}, but {show_noise(sigma)} is used;"
        " compare with --noise auto",
    )


def correlation_note(image: NDArray[Any], sigma: float) -> str | None:
    """For a JPEG file whose noise was estimated: compression removes the finest noise, which the estimate measures."""
    try:
        coarse = coarse_noise(image)
    except ValueError:
        return None
    if coarse < _STRONG or coarse < _CORRELATED * sigma:
        return None
    return (
        f"JPEG: the noise may be correlated, which the estimate misses: {show_noise(coarse)} at half the resolution;"
        f" if noise is left, try --noise {255 * coarse:.0f}/255"
    )
