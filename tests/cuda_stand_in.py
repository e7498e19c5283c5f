"""Tensors that claim to be on a CUDA device and compute on the CPU, so that launches and waits can be counted.

Every branch that a GPU would take is taken, with real numbers: loops converge as they would, and results can be
compared with those of the CPU. What is counted, by a dispatch mode:

- A *launch* is one operator of ATen that has a tensor of the device among its arguments or results, unless it only
  makes a view or allocates. Some take more than one kernel (a Fourier transform, indices of a mask), few of them none.
- A *wait* is whatever stops the host until the device has caught up: a number read from the device (`.item()`,
  `bool`), indices whose number depends on values (`nonzero`, masks), comparisons of whole tensors, a copy to pageable
  memory of the host, the synchronisation of an event, and a copy from pageable memory of the host.

Copies between device and pinned memory are launches and not waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from bltoolbox.bilevel.tensors import Constant

CUDA = torch.device("cuda:0")
#: Operators that read a value, or whose result has a size that depends on values.
READS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_dim"}
#: Operators that launch nothing: they allocate, or are views that their schema does not call one.
FREE = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "_unsafe_view",
    "alias",
}
FREE |= {"_local_scalar_dense", "_reshape_alias", "lift_fresh", "is_pinned"}

#: Operators that take tensors of the host and of the device.
MIXING = {"copy_", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_"}


class OnDevice(Tensor):
    """A tensor of the CPU, ``inner``, that claims to be on the device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnDevice:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=CUDA,
        )
        made.inner = inner
        return made

    def tolist(self) -> Any:
        return self.cpu().tolist()  # which torch refuses for a tensor of another class

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OnDevice({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} met a tensor of the device outside of Launches")


class Launches(TorchDispatchMode):
    """Serves tensors of the device, and counts launches and waits."""

    # Torch then does not look for a driver.
    _mode_key = torch._C._TorchDispatchModeKey.FAKE

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        #: Memory of the host that claims to be pinned.
        self.pinned: set[int] = set()

    @property
    def total(self) -> int:
        return self.launches.total()

    def reset(self) -> None:
        self.launches.clear()
        self.waits.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.name().removeprefix("aten::").partition(".")[0]
        flat = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        here = any(isinstance(leaf, OnDevice) for leaf in flat)
        if name == "_pin_memory":
            return self._pin(args[0].clone())
        if here and name not in MIXING and any(not isinstance(leaf, OnDevice) and leaf.ndim for leaf in flat):
            raise RuntimeError(f"{name} met tensors of the host and of the device")
        wanted = kwargs.get("device")
        goes = wanted is not None and torch.device(wanted).type == "cuda"
        pins = kwargs.pop("pin_memory", None)
        stays = wanted is None and here
        if goes or here:
            self._count(func, name, args, kwargs, here, goes or stays)
        if wanted is not None:
            kwargs["device"] = torch.device("cpu")
        plain_args, plain = tree_map(_inner, args), tree_map(_inner, kwargs)
        # A tensor of the device has no mark that its memory is to be read conjugated.
        result = plain_args[0].conj_physical() if name == "_conj" and here else func(*plain_args, **plain)
        if name in ("copy_", "set_") or _in_place(func):
            return args[0] if not isinstance(result, tuple | list) else result
        if name in ("_local_scalar_dense", "is_nonzero", "equal", "is_pinned"):
            return result
        if goes or stays:
            return tree_map(lambda leaf: OnDevice(leaf) if isinstance(leaf, Tensor) else leaf, result)
        return self._pin(result) if pins else result

    def _pin(self, tensor: Tensor) -> Tensor:
        self.pinned.add(tensor.untyped_storage().data_ptr())
        return tensor

    def _count(self, func: Any, name: str, args: Any, kwargs: Any, here: bool, stays: bool) -> None:
        if name not in FREE and not func.is_view:
            self.launches[name] += 1
        if name in READS:
            self.waits[name] += 1
        if name in ("index", "index_put", "index_put_"):
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            self.waits["mask"] += len(masks)
            host = [i for i in args[1] if i is not None and not isinstance(i, OnDevice)]
            self.waits["host index"] += len(host)
        if name == "copy_":
            source, target = args[1], args[0]
        elif name == "_to_copy":
            source, target = args[0], None if not stays else OnDevice
        else:
            return
        up = not isinstance(source, OnDevice)
        down = not up and not (isinstance(target, OnDevice) or target is OnDevice)
        host = source if up else target
        if (up and source.numel() > 0 and source.ndim > 0) or down:
            pinned = isinstance(host, Tensor) and host.untyped_storage().data_ptr() in self.pinned
            if not pinned:
                self.waits["copy to host" if down else "copy from host"] += 1


def _inner(leaf: Any) -> Any:
    return leaf.inner if isinstance(leaf, OnDevice) else leaf


def _in_place(func: Any) -> bool:
    return bool(func._schema.name.endswith("_") and not func._schema.name.endswith("__"))


class Event:
    """An event that has happened; waiting for it is counted."""

    counted: Launches | None = None

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None:
        if Event.counted is not None:
            Event.counted.waits["event"] += 1


@contextmanager
def device() -> Iterator[Launches]:
    """A CUDA device that counts."""
    torch._C._ensureCUDADeviceGuardSet()
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # numbers go to the device through the mode
    with pytest.MonkeyPatch.context() as patch, Launches() as counted:
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "current_stream", lambda *_: None)
        patch.setattr(Event, "counted", counted)
        patch.setattr(Constant, "_copy", _kept_copies())
        try:
            yield counted
        finally:
            torch._C._set_only_lift_cpu_tensors(before)


def _kept_copies() -> Callable[[Constant, torch.dtype, torch.device], Tensor]:
    """``Constant._copy`` with copies on the device that are kept until the end, as a real device would keep them."""
    plain, kept = Constant._copy, dict[tuple[Constant, torch.dtype], Tensor]()

    def copy(constant: Constant, dtype: torch.dtype, place: torch.device) -> Tensor:
        if place.type != "cuda":
            return plain(constant, dtype, place)
        if (constant, dtype) not in kept:
            kept[constant, dtype] = constant.value.to(dtype=dtype, device=place)
        return kept[constant, dtype]

    return copy


def move(value: Any) -> Any:
    """A copy of tensors on the device."""
    return tree_map(lambda leaf: OnDevice(leaf.clone()) if isinstance(leaf, Tensor) else leaf, value)


def back(value: Any) -> Any:
    """The numbers of tensors of the device."""
    return tree_map(_inner, value)
