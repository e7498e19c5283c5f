"""Per-sample algebra: the first dimension is always the sample."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from bltoolbox.bilevel.precision import computing

State = TypeVar("State")
Key = TypeVar("Key", bound=Hashable)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """⟨a_i, b_i⟩, shape (B,)."""
    return (a * b).sum(dim=tuple(range(1, a.ndim)))


def norm(a: Tensor) -> Tensor:
    """‖a_i‖, shape (B,)."""
    return torch.linalg.vector_norm(a, dim=tuple(range(1, a.ndim)))


def lasting() -> AbstractContextManager[Any]:
    """A context for creating tensors that are kept: inference tensors could not be used in derivatives later."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


@contextmanager
def detached() -> Iterator[None]:
    """Where nothing is recorded for autograd, also inside ``torch.inference_mode``.

    Components may still differentiate by themselves under ``torch.enable_grad``, which inference mode would forbid.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def full_precision(like: Tensor) -> Iterator[None]:
    """Detached, without autocast on the device of ``like`` and without TF32: iterations to a tolerance need the
    precision of θ."""
    with detached(), computing(like.device), torch.autocast(like.device.type, enabled=False):
        yield


def ordinary(value: Tensor) -> Tensor:
    """``value``, or a copy where it is a tensor of inference mode, which no derivative could go through."""
    if not value.is_inference():
        return value
    with torch.inference_mode(False):
        return value.clone()


class Constant:
    """A tensor that is copied once to each dtype and device that asks for it, so that no iteration waits for a copy."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self._copies: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def like(self, x: Tensor) -> Tensor:
        """With the dtype and on the device of ``x``."""
        return self._copy(x.dtype, x.device)

    def beside(self, x: Tensor) -> Tensor:
        """On the device of ``x``, with its own dtype: indices and masks."""
        return self._copy(self.value.dtype, x.device)

    def _copy(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        copy = self._copies.get((dtype, device))
        if copy is None:
            with lasting():
                copy = self.value.to(dtype=dtype, device=device)
            if type(copy) is Tensor:  # not one that stands for others, as under fake tensors
                self._copies[dtype, device] = copy
        return copy


class ConstantsByKey(Generic[Key]):
    """Constant tensors by a key such as a size, made when first asked for; the last few are kept."""

    def __init__(self, make: Callable[[Key], Tensor], kept: int = 8) -> None:
        self._make = make
        self._most = kept
        self._kept: dict[Key, Constant] = {}

    def __getitem__(self, key: Key) -> Constant:
        constant = self._kept.get(key)
        if constant is None:
            with lasting():
                constant = Constant(self._make(key))
            if type(constant.value) is Tensor:  # not one that stands for others, as under fake tensors
                if len(self._kept) >= self._most:  # pictures and tiles have many different sizes
                    self._kept.clear()
                self._kept[key] = constant
        return constant


def expand(scalars: Tensor, like: Tensor) -> Tensor:
    """Per-sample scalars (B,), shaped to multiply ``like``."""
    return scalars.view(-1, *(1,) * (like.ndim - 1))


def look_every(like: Tensor) -> int:
    """Iterations between two looks at numbers of the device of ``like``: each makes the host wait for a GPU."""
    return 1 if like.device.type == "cpu" else 4


def beside(numbers: Tensor, like: Tensor) -> Tensor:
    """Numbers of the host on the device of ``like``, without waiting for it."""
    if like.device.type != "cuda":
        return numbers.to(like.device)
    return numbers.pin_memory().to(like.device, non_blocking=True)


def take(state: State, index: Tensor) -> State:
    """The rows ``index`` of every tensor in a dataclass of tensors, and of such dataclasses in it."""
    changes: dict[str, Any] = {}
    for f in dataclasses.fields(state):  # type: ignore[arg-type]
        value = getattr(state, f.name)
        if isinstance(value, Tensor):
            changes[f.name] = value[index]
        elif dataclasses.is_dataclass(value):
            changes[f.name] = take(value, index)
    return dataclasses.replace(state, **changes)  # type: ignore[type-var]


def put(state: State, index: Tensor, update: State) -> State:
    """``state`` with the rows ``index`` of every tensor replaced by those of ``update``.

    What ``update`` does not have, such as a preconditioner that would not pay for its samples alone, stays as it is.
    """
    changes: dict[str, Any] = {}
    for f in dataclasses.fields(state):  # type: ignore[arg-type]
        value, given = getattr(state, f.name), getattr(update, f.name)
        if given is None:
            continue
        if isinstance(value, Tensor):
            value = value.clone()
            value[index] = given
            changes[f.name] = value
        elif dataclasses.is_dataclass(value):
            changes[f.name] = put(value, index, given)
    return dataclasses.replace(state, **changes)  # type: ignore[type-var]


def keyed_generator(*key: object) -> torch.Generator:
    """A CPU generator that depends only on the key, not on earlier draws."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Of the bytes of all tensors, in their order; wherever they are stored."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def theta_norm(tensors: Iterable[Tensor]) -> float:
    """Euclidean norm of a collection of tensors as one vector, summed in float64."""
    return float(sum(float(t.detach().double().square().sum()) for t in tensors) ** 0.5)
