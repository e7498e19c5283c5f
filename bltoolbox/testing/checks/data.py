"""Properties of data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bltoolbox.restoration.roles import Data
from bltoolbox.testing.checks.base import Subject, fail, holds, require, same
from bltoolbox.testing.checks.hidden_state import stateless

KIND = "data"
#: Number of images that are tested.
MOST = 4

Reader = Callable[[Sequence[int]], Tensor]


def _ids(data: Data) -> list[int]:
    return list(range(min(len(data), MOST)))


def _readers(data: Data) -> dict[str, Reader]:
    """The methods that read images or measurements, by name, and one for each entry of the context."""
    readers: dict[str, Reader] = {
        name: getattr(data, name) for name in ("clean", "measured") if data.offers(name)
    }
    for key in data.context(_ids(data)):
        readers[f"context {key!r}"] = partial(_entry, data, key)
    return readers


def _entry(data: Data, key: str, ids: Sequence[int]) -> Tensor:
    return data.context(ids)[key]


@holds(KIND, "has a length")
def length(subject: Subject) -> None:
    data = subject()
    require(len(data) > 0, "len(data) is 0; data must contain at least one image")
    last = len(data) - 1
    require(
        data.offers("clean") or data.offers("measured"),
        "data must define clean (true images), measured (recorded measurements) or both",
    )
    for name, read in _readers(data).items():
        require(len(read([last])) == 1, f"{name}([{last}]), the last image, must return one image")
    require(isinstance(data.label(last), str), f"label({last}) must return text")
    group = data.group(last)
    require(group is None or isinstance(group, str), f"group({last}) must return text or None")
    require(data.group(last) == group, f"group({last}) differed between two calls")


@holds(KIND, "images are float32 in their range")
def images(subject: Subject) -> None:
    data = subject()
    ids = _ids(data)
    for name, read in _readers(data).items():
        rows = read(ids)
        if not isinstance(rows, Tensor):
            fail(f"{name}({ids}) must return a tensor, not a {type(rows).__name__}")
        require(rows.device.type == "cpu", f"{name}({ids}): expected a CPU tensor, got one on {rows.device}")
        require(len(rows) == len(ids), f"{name}({ids}): expected {len(ids)} rows, got {len(rows)}")
        require(bool(torch.isfinite(rows).all()), f"{name}({ids}) contains NaN or infinity")
        if name in ("clean", "measured"):
            kind = str(rows.dtype)[6:]
            require(rows.dtype == torch.float32, f"{name}({ids}): expected float32, got {kind}")
    if data.offers("clean"):
        _check_range(data, [id for id in {*ids, len(data) - 1} if not data.derived(id)])


def _check_range(data: Data, ids: Sequence[int]) -> None:
    images, (least, most) = data.clean(ids), data.range
    require(
        images.ndim == 4, f"clean({ids}): expected shape ({len(ids)}, C, H, W), got {tuple(images.shape)}"
    )
    require(least < most, f"range is [{least:g}, {most:g}]; it must be [lowest, highest]")
    low, high = float(images.min()), float(images.max())
    hint = "; divide by 255" if most == 1 and high > 1.5 else ""
    require(
        low >= least and high <= most,
        f"clean({ids}): expected values in [{least:g}, {most:g}], got [{low:.4g}, {high:.4g}]{hint}",
    )


@holds(KIND, "same id, same image")
def deterministic(subject: Subject) -> None:
    first, second = subject(), subject()
    ids = _ids(first)
    others = _readers(second)
    for name, read in _readers(first).items():
        require(
            same(read(ids), others[name](ids)) and same(read(ids), read(ids)),
            f"{name}({ids}) differed between two calls; an image must depend only on its id (and options): no random"
            " crops",
        )


@stateless(KIND)
def use(subject: Subject, data: Data, problem: int) -> Iterator[tuple[str, Any]]:
    ids = _ids(data)[:: -1 if problem else 1]
    for name, read in _readers(data).items():
        for id in ids:
            yield f"{name}([{id}])", read([id])
    for id in ids:
        yield f"label({id})", data.label(id)
        yield f"group({id})", data.group(id)
        yield f"derived({id})", data.derived(id)


@holds(KIND, "an image does not depend on its batch")
def batch_independent(subject: Subject) -> None:
    data = subject()
    ids = _ids(data)
    for name, read in _readers(data).items():
        together = read(ids)
        for position, id in enumerate(ids):
            alone = read([id])[0]
            require(
                same(alone, together[position]), f"{name}([{id}]) differs from the image in {name}({ids})"
            )
        backwards = read(ids[::-1])
        require(
            same(backwards.flip(0), together), f"{name}({ids[::-1]}) is not {name}({ids}) in reverse order"
        )


@holds(KIND, "returned images are copies")
def copies(subject: Subject) -> None:
    data = subject()
    ids = _ids(data)
    for name, read in _readers(data).items():
        given = list(ids)
        first = read(given)
        require(given == ids, f"{name} changed the list of ids passed to it")
        kept = first.clone()
        first.zero_()
        message = f"writing into the tensor that {name} returned changed the images; return a copy"
        require(same(read(ids), kept), message)
