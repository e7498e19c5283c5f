"""Measurements as a caller has them, bound to a problem at θ; whatever does not fit is one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bltoolbox.bilevel.records import Rows, Theta
from bltoolbox.errors import BltError
from bltoolbox.restoration.data_loading import converted
from bltoolbox.restoration.image_lower import ImageLower
from bltoolbox.restoration.usable import find_size_misfit
from bltoolbox.restoration.variational import Variational

_COLOURS = (1, 3)


def as_batch(y: Tensor) -> Tensor:
    """Measurements (C, H, W) or (B, C, H, W) with their batch dimension."""
    if y.ndim not in (3, 4):
        raise BltError(f"expected images of shape (C, H, W) or (B, C, H, W), got {tuple(y.shape)}")
    if looks_turned(y.shape):
        axes = "2, 0, 1" if y.ndim == 3 else "0, 3, 1, 2"
        raise BltError(
            f"measurements of shape {tuple(y.shape)} seem to be (H, W, C), but (C, H, W) is needed; give"
            f" y.permute({axes}), or for an array y.transpose({axes})"
        )
    return y if y.ndim == 4 else y.unsqueeze(0)


def looks_turned(shape: Sequence[int]) -> bool:
    """Whether the channels come last: where they should be are more than any picture has, and behind them 1 or 3."""
    return shape[-1] in _COLOURS and shape[-3] > 4 and shape[-2] > 4


def context_rows(
    context: Mapping[str, Tensor | np.ndarray[Any, Any]] | None, count: int, single: bool, like: Tensor
) -> dict[str, Tensor]:
    """What components need to know about each measurement, on the device and in the precision of ``like``."""
    given = {
        name: entry.detach() if isinstance(entry, Tensor) else torch.from_numpy(np.array(entry))
        for name, entry in (context or {}).items()
    }
    rows = {name: entry.unsqueeze(0) if single else entry for name, entry in given.items()}
    for name, entry in rows.items():
        if entry.ndim == 0 or len(entry) != count:
            length = 0 if entry.ndim == 0 else len(entry)
            raise BltError(f"context {name!r} has {length} rows for {count} measurements; give one for each")
    return converted(rows, like.dtype, like.device)


def bind(
    problem: Variational, theta: Theta, y: Tensor, rows: Rows, shape: Sequence[int] | None = None
) -> ImageLower:
    """The lower level of a batch of measurements; ``shape`` is that of the images that θ was learned from, if known."""
    try:
        images = problem.image_shape(theta, y, rows)
    except ValueError as error:
        raise BltError(str(error)) from error
    except KeyError as error:
        raise BltError(f"the operator needs context: {error}; give one row for each measurement") from error
    if sentence := size_misfit(problem, theta, shape, images) or problem.data_term.check_measurements(y):
        raise BltError(sentence)
    try:
        return problem.at(theta, images).on(y, rows)
    except ValueError as error:
        raise BltError(str(error)) from error


def size_misfit(
    problem: Variational, theta: Theta, learned: Sequence[int] | None, shape: Sequence[int]
) -> str | None:
    """A sentence if θ is for images of one size only, ``learned``, and not for ``shape`` (C, H, W)."""
    misfit = learned and find_size_misfit(problem, theta, learned, shape)
    return f"{misfit[1]}; use images of that size" if misfit else None
