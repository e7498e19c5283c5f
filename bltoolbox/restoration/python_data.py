"""Images and measurements that are given from Python instead of being named in a recipe.

    run("recipe.yaml", data=x)                    true images, N×C×H×W; measurements are simulated
    run("recipe.yaml", data=(x, y))               true images and recorded measurements
    run("recipe.yaml", data=(None, y))            recorded measurements alone
    run("recipe.yaml", data=dataset)              a torch Dataset of images or of pairs (x, y)
    run("recipe.yaml", data=Images(x, y, range=(0, 4095), context={"mask": masks}))

The recipe of such a run names a stand-in with the number of images and a digest of their values. It says what was
given, and refuses to be built: whoever resumes the run gives the same data again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence, Sized
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from bltoolbox.config.block import Block
from bltoolbox.errors import UsageError
from bltoolbox.restoration.metrics import UNIT, Range
from bltoolbox.restoration.roles import Data

_CHANNELS = (1, 3)
#: Samples of a data set whose values are part of its digest, evenly spread; of tensors all are.
_SAMPLED = 64


class Images(Data):
    """Tensors or arrays as data: true images, recorded measurements, or both.

    Args:
        clean: True images: a tensor N×C×H×W or N×H×W, or an array, which may also be N×H×W×C. Floats in ``range``;
            uint8 and uint16 stand for values in [0, 1].
        measured: Recorded measurements, N×…, in the layout of the images; simulated when left out.
        range: The values between which images lie.
        context: What the operator needs to know about each sample: one row per sample.
        groups: What each image was taken from, e.g. a photograph; images of one group stay on one side of a split.
    """

    def __init__(
        self,
        clean: Tensor | np.ndarray | None = None,
        measured: Tensor | np.ndarray | None = None,
        *,
        range: Range = UNIT,
        context: Mapping[str, Tensor | np.ndarray] | None = None,
        groups: Sequence[str] | None = None,
    ) -> None:
        if clean is None and measured is None:
            raise UsageError("there are neither true images nor measurements; give at least one of them")
        if not range[0] < range[1]:
            raise UsageError(f"range {tuple(range)} is empty; give (lowest, highest)")
        self.range = (float(range[0]), float(range[1]))
        turned = _channels_last(clean if clean is not None else measured)
        self._clean = None if clean is None else _batch(clean, turned, "the true images")
        self._measured = (
            None if measured is None else _batch(measured, turned, "the measurements", images=False)
        )
        self._context = {name: _tensor(rows).cpu() for name, rows in (context or {}).items()}
        self._groups = None if groups is None else [str(group) for group in groups]
        sizes = {"clean": self._clean, "measured": self._measured, "groups": self._groups} | {
            f"context {name!r}": rows for name, rows in self._context.items()
        }
        counts = {name: len(images) for name, images in sizes.items() if images is not None}
        self.count = next(iter(counts.values()))
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise UsageError(f"the numbers of samples differ: {listed}")

    def offers(self, method: str) -> bool:
        there = {"clean": self._clean, "measured": self._measured, "group": self._groups}
        return super().offers(method) and (method not in there or there[method] is not None)

    def __len__(self) -> int:
        return self.count

    def clean(self, ids: Sequence[int]) -> Tensor:
        assert self._clean is not None
        return _floats(self._clean[list(ids)])

    def measured(self, ids: Sequence[int]) -> Tensor:
        assert self._measured is not None
        return _floats(self._measured[list(ids)])

    def context(self, ids: Sequence[int]) -> dict[str, Tensor]:
        return {name: rows[list(ids)] for name, rows in self._context.items()}

    def group(self, id: int) -> str | None:
        return None if self._groups is None else self._groups[id]


class DatasetImages(Data):
    """A torch Dataset as data: its items are images, or pairs of a true image and its measurement."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
            raise UsageError(
                f"{type(dataset).__name__} has no length; give a data set with __len__ and __getitem__"
            )
        if len(dataset) == 0:
            raise UsageError(f"{type(dataset).__name__} is empty")
        self.dataset: Any = dataset
        self.count = len(dataset)
        first, again = self._item(0), self._item(0)
        self._shapes = [tensor.shape for tensor in first]
        if not all(torch.equal(before, other) for before, other in zip(first, again, strict=True)):
            raise UsageError(
                f"item 0 of {type(dataset).__name__} differs between two reads; an image must depend on its index"
                " alone, so leave random crops and noise out"
            )

    def offers(self, method: str) -> bool:
        return super().offers(method) and (method != "measured" or len(self._shapes) == 2)

    def __len__(self) -> int:
        return self.count

    def clean(self, ids: Sequence[int]) -> Tensor:
        return torch.stack([self._read(i, 0) for i in ids])

    def measured(self, ids: Sequence[int]) -> Tensor:
        return torch.stack([self._read(i, 1) for i in ids])

    def _read(self, i: int, place: int) -> Tensor:
        tensor = self._item(i)[place]
        if tensor.shape != self._shapes[place]:
            raise ValueError(
                f"item {i} of {type(self.dataset).__name__} is {_by(tensor.shape)}, but item 0 is"
                f" {_by(self._shapes[place])}; all must have the same shape"
            )
        return tensor

    def _item(self, i: int) -> tuple[Tensor, ...]:
        """An image, or an image and a measurement."""
        name, item = type(self.dataset).__name__, self.dataset[i]
        parts = tuple(item) if isinstance(item, tuple | list) else (item,)
        if len(parts) > 2 or not all(isinstance(array, Tensor | np.ndarray) for array in parts):
            kinds = ", ".join(type(array).__name__ for array in parts)
            raise UsageError(
                f"item {i} of {name} is ({kinds}); give a data set whose items are an image tensor, or a pair (x, y)"
                " of a true image and its measurement"
            )
        batches = [array[None] for array in parts]
        turned = _channels_last(batches[0])
        clean = _batch(batches[0], turned, f"item {i} of {name}", single=True)
        measured = [
            _batch(array, turned, f"item {i} of {name}", images=False, single=True) for array in batches[1:]
        ]
        return tuple(_floats(array)[0] for array in (clean, *measured))


def as_data(given: Any) -> Data:
    """What a caller of ``run`` gives as data."""
    if isinstance(given, Data):
        return given
    if isinstance(given, Tensor | np.ndarray):
        return Images(given)
    if isinstance(given, Dataset):
        return DatasetImages(given)
    if isinstance(given, tuple) and len(given) == 2:
        return Images(*given)
    raise UsageError(
        f"data of type {type(given).__name__} cannot be used; give a tensor or an array of images, a pair (x, y), a"
        " torch Dataset or bltoolbox.Images"
    )


def stand_in(data: Data) -> Block:
    """What a recipe says about data that were given from Python."""
    clean, measured = data.offers("clean"), data.offers("measured")
    name = "python" if not measured else "python-pairs" if clean else "python-measured"
    return Block("data", name, {"count": len(data), "digest": _digest(data)})


def _digest(data: Data) -> str:
    """Changes with the values of the samples, as far as they are looked at."""
    count = len(data)
    step = 1 if isinstance(data, Images) else max(1, count // _SAMPLED)
    hashed = hashlib.blake2b(repr((count, data.range)).encode(), digest_size=16)
    for i in range(0, count, step):
        rows = [getattr(data, name)([i]) for name in ("clean", "measured") if data.offers(name)]
        for tensor in [*rows, *data.context([i]).values()]:
            hashed.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
            hashed.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


class _StandIn(Data):
    """Of data that were given from Python.

    Args:
        count: Number of samples.
        digest: Of their values.
    """

    def __init__(self, count: int | None = None, digest: str | None = None) -> None:
        raise ValueError(
            "the data of this recipe were given from Python; give them again, by run(recipe, data=…) or"
            " resume(run_dir, data=…)"
        )

    def __len__(self) -> int:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotImplementedError("data from Python have no images in a recipe")


class FromPython(_StandIn):
    """True images."""

    def clean(self, ids: Sequence[int]) -> Tensor:
        self._refuse()


class PairsFromPython(FromPython):
    """True images and recorded measurements."""

    def measured(self, ids: Sequence[int]) -> Tensor:
        self._refuse()


class MeasuredFromPython(_StandIn):
    """Recorded measurements."""

    def measured(self, ids: Sequence[int]) -> Tensor:
        self._refuse()


def _channels_last(images: Any) -> bool:
    """Whether an array is N×H×W×C; tensors have their channels first."""
    if not isinstance(images, np.ndarray) or images.ndim != 4:
        return False
    first, last = (images.shape[axis] in _CHANNELS for axis in (1, 3))
    if first == last:
        raise UsageError(
            f"an array of shape {_by(images.shape)} may be N×C×H×W or N×H×W×C; give a tensor, which is N×C×H×W, e.g."
            " torch.from_numpy(x)"
        )
    return last


def _batch(
    given: Tensor | np.ndarray, turned: bool, what: str, images: bool = True, single: bool = False
) -> Tensor:
    """Samples with their channels first, as they are stored."""
    rows = _tensor(given).cpu()
    if images and rows.ndim not in (3, 4):
        raise UsageError(f"{what} have shape {_by(rows.shape)}; N×C×H×W is needed")
    if (
        images
        and rows.ndim == 3
        and not single
        and (rows.shape[0] in _CHANNELS or rows.shape[2] in _CHANNELS)
    ):
        raise UsageError(f"{what} have shape {_by(rows.shape)}, which may be one image; give N×C×H×W")
    if isinstance(given, Tensor) and images and rows.ndim == 4 and _looks_turned(rows.shape):
        raise UsageError(
            f"{what} have shape {_by(rows.shape)}, which seems to be N×H×W×C; give x.permute(0, 3, 1, 2)"
        )
    if rows.dtype not in (torch.uint8, torch.uint16) and not (rows.is_floating_point() or rows.is_complex()):
        raise UsageError(
            f"{what} are {str(rows.dtype)[6:]}; give floats, or uint8 or uint16 for values in [0, 1]"
        )
    if rows.dtype == torch.uint16:  # torch can do little with it
        rows = (rows.double() / 65535).float()
    if rows.ndim == 3:
        return rows.unsqueeze(1)
    return rows.permute(0, 3, 1, 2) if turned and rows.ndim == 4 else rows


def _looks_turned(shape: Sequence[int]) -> bool:
    return shape[3] in _CHANNELS and shape[1] not in _CHANNELS


def _tensor(given: Tensor | np.ndarray) -> Tensor:
    # A copy of an array: torch takes neither negative strides nor, without a warning, read-only memory.
    return given.detach() if isinstance(given, Tensor) else torch.from_numpy(np.array(given))


def _floats(rows: Tensor) -> Tensor:
    """In float32; complex numbers as pairs of channels, real parts first."""
    if rows.is_complex():
        rows = torch.cat([rows.real, rows.imag], dim=1)
    if not rows.is_floating_point():
        rows = rows.double() / torch.iinfo(rows.dtype).max
    floats = rows.to(torch.float32, copy=True).contiguous()
    if not bool(torch.isfinite(floats).all()):
        raise ValueError("the data contain NaN or infinity")
    return floats


def _by(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))
