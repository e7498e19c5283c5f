"""Properties of data."""

from __future__ import annotations

import torch
from torch import Tensor

from bltoolbox.restoration.roles import Data
from bltoolbox.testing.checks.base import Subject, fail, holds, require, same

KIND = "data"
#: Number of images that are tested.
MOST = 4


def _ids(data: Data) -> list[int]:
    return list(range(min(len(data), MOST)))


@holds(KIND, "has a length")
def length(subject: Subject) -> None:
    data = subject()
    require(len(data) > 0, "len(data) is 0; data must contain at least one image")
    last = len(data) - 1
    require(len(data.clean([last])) == 1, f"clean([{last}]), the last image, must return one image")
    require(isinstance(data.label(last), str), f"label({last}) must return text")
    group = data.group(last)
    require(group is None or isinstance(group, str), f"group({last}) must return text or None")
    require(data.group(last) == group, f"group({last}) differed between two calls")


@holds(KIND, "images are float32 in [0, 1]")
def images(subject: Subject) -> None:
    data = subject()
    ids = _ids(data)
    batch = data.clean(ids)
    if not isinstance(batch, Tensor):
        fail(f"clean({ids}) must return a tensor, not a {type(batch).__name__}")
    require(
        batch.ndim == 4 and len(batch) == len(ids),
        f"clean({ids}): expected shape ({len(ids)}, C, H, W), got {tuple(batch.shape)}",
    )
    require(batch.dtype == torch.float32, f"clean({ids}): expected float32, got {str(batch.dtype)[6:]}")
    require(batch.device.type == "cpu", f"clean({ids}): expected a CPU tensor, got one on {batch.device}")
    require(bool(torch.isfinite(batch).all()), f"clean({ids}) contains NaN or infinity")
    low, high = float(batch.min()), float(batch.max())
    hint = "; divide by 255" if high > 1.5 else ""
    require(
        low >= 0 and high <= 1, f"clean({ids}): expected values in [0, 1], got [{low:.4g}, {high:.4g}]{hint}"
    )


@holds(KIND, "same id, same image")
def deterministic(subject: Subject) -> None:
    first, second = subject(), subject()
    ids = _ids(first)
    require(
        same(first.clean(ids), second.clean(ids)) and same(first.clean(ids), first.clean(ids)),
        f"clean({ids}) differed between two calls; an image must depend only on its id (and options): no random crops",
    )


@holds(KIND, "an image does not depend on its batch")
def batch_independent(subject: Subject) -> None:
    data = subject()
    ids = _ids(data)
    together = data.clean(ids)
    for position, id in enumerate(ids):
        alone = data.clean([id])[0]
        require(same(alone, together[position]), f"clean([{id}]) differs from the image in clean({ids})")
    backwards = data.clean(ids[::-1])
    require(same(backwards.flip(0), together), f"clean({ids[::-1]}) is not clean({ids}) in reverse order")


@holds(KIND, "returned images are copies")
def copies(subject: Subject) -> None:
    data = subject()
    ids = _ids(data)
    given = list(ids)
    first = data.clean(given)
    require(given == ids, "clean changed the list of ids passed to it")
    kept = first.clone()
    first.zero_()
    message = "writing into the tensor that clean returned changed the images; return a copy"
    require(same(data.clean(ids), kept), message)
