"""What all properties share: how they are declared, what they are tested on, and how they fail.

A property is a function of a ``Subject``, which builds a new component each time it is called. It returns if the
property holds, and otherwise raises a ``ConformanceFailure`` whose message tells the author of the component which
input was used, what was expected, what was returned, and the likely cause.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from bltoolbox.bilevel.tensors import keyed_generator
from bltoolbox.config.signatures import Type
from bltoolbox.config.validation import Checker

if TYPE_CHECKING:
    from bltoolbox.config.registry import Registered, Registry


class ConformanceFailure(AssertionError):
    """A component does not have a property that its role promises."""

    def __init__(self, property: str, message: str) -> None:
        super().__init__(f"{property}: {message}" if property else message)
        self.property = property
        self.message = message


class NotApplicable(Exception):
    """The property does not apply to this component, for the given reason."""


class NotVerified(Exception):
    """Nothing is known to be wrong, but the property cannot be tested, for the given reason."""


@dataclass(frozen=True)
class Subject:
    """A component under test: each call builds a new one from its example options, overridden by those given."""

    registered: Registered
    registry: Registry
    folder: Path
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cls(self) -> type[Any]:
        return self.registered.load()

    def having(self, options: Mapping[str, Any]) -> Subject:
        """The same component with other options."""
        return replace(self, given={**self.given, **options})

    def options(self) -> dict[str, Any]:
        """The options of its example, in a folder that exists."""
        self.folder.mkdir(parents=True, exist_ok=True)
        options = self.cls.example(self.folder)
        if not isinstance(options, Mapping):
            fail(f"example() must return a mapping of options, not {_a(options)}")
        return {**options, **self.given}

    def __call__(self) -> Any:
        if getattr(self.cls, "from_sections", False):
            raise NotApplicable("it is made of the sections of a recipe: check a recipe")
        checker = Checker(self.registry)
        given = {"name": self.registered.name, **self.options()}
        block = checker.value(Type("component", role=self.registered.kind), given, ())
        if checker.issues:
            hint = "give every parameter a default, or return options for the check from a classmethod example(folder)"
            fail(f"{'; '.join(issue.message for issue in checker.issues)}: {hint}")
        return self.registry.build(block)


Check = Callable[[Subject], None]


@dataclass(frozen=True)
class Property:
    """A property, with the name that reports use."""

    kind: str
    name: str
    check: Check

    def __call__(self, subject: Subject) -> None:
        """Return, or raise ``ConformanceFailure``, ``NotApplicable`` or ``NotVerified``."""
        __tracebackhide__ = True
        try:
            self.check(subject)
        except ConformanceFailure as failure:
            raise ConformanceFailure(self.name, failure.message) from None


#: All properties by kind, in the order in which they are declared.
PROPERTIES: dict[str, list[Property]] = {}


def holds(kind: str, name: str) -> Callable[[Check], Check]:
    """Declare a property of all components of a kind."""

    def declare(check: Check) -> Check:
        PROPERTIES.setdefault(kind, []).append(Property(kind, name, check))
        return check

    return declare


def fail(message: str) -> NoReturn:
    raise ConformanceFailure("", message)


def require(condition: bool, message: str) -> None:
    if not condition:
        fail(message)


def require_close(actual: Tensor, expected: Tensor, tol: float, message: str, cause: str) -> None:
    """Fail unless ``actual`` is within ``tol`` times the norm of ``expected``, and report both and the likely cause."""
    require_shape(actual, expected.shape, message)
    difference = (actual.detach().double() - expected.detach().double()).flatten()
    size = float(expected.detach().double().flatten().norm())
    error = float(difference.norm()) / max(size, 1e-300) if size else float(difference.norm())
    if not error <= tol:
        at = int(difference.abs().nan_to_num(float("inf")).argmax()) if difference.numel() else 0
        got, wanted = float(actual.flatten()[at]), float(expected.flatten()[at])
        fail(
            f"{message}: expected {wanted:.6g}, got {got:.6g} at the largest difference"
            f" (relative error {error:.1e}, allowed {tol:.0e}); {cause}"
        )


def require_shape(actual: Any, shape: torch.Size | tuple[int, ...], what: str) -> None:
    if not isinstance(actual, Tensor):
        fail(f"{what}: expected a tensor, got {_a(actual)}")
    require(
        tuple(actual.shape) == tuple(shape),
        f"{what}: expected shape {tuple(shape)}, got {tuple(actual.shape)}",
    )


def require_like(actual: Any, like: Tensor, what: str, shape: tuple[int, ...] | None = None) -> None:
    """Fail unless ``actual`` has the dtype, the device and (unless another is given) the shape of ``like``."""
    require_shape(actual, tuple(like.shape) if shape is None else shape, what)
    require(
        actual.dtype == like.dtype,
        f"{what}: expected {_short(like.dtype)} like the input, got {_short(actual.dtype)};"
        " create constants with x.new_tensor(…) or .to(x), and do not convert x itself",
    )
    require(
        actual.device == like.device,
        f"{what}: expected a tensor on {like.device}, got one on {actual.device}",
    )


class Untouched:
    """Copies of the arguments of a call, to be compared with them afterwards."""

    def __init__(self, **inputs: Any) -> None:
        self.inputs = inputs
        self.copies = {name: snapshot(value) for name, value in inputs.items()}

    def verify(self, by: str) -> None:
        for name, value in self.inputs.items():
            require(
                same(value, self.copies[name]),
                f"{by} changed its argument {name} in place; work on a copy, and avoid methods that end in _",
            )


def snapshot(value: Any) -> Any:
    """A deep copy of tensors and containers."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: snapshot(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [snapshot(item) for item in value]
    return value


def same(a: Any, b: Any) -> bool:
    """Bitwise equality of nested data; NaN equals NaN."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.shape != b.shape or a.dtype != b.dtype:
            return False
        return torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers that depend only on the seed."""
    return torch.randn(shape, dtype=torch.float64, generator=keyed_generator("check", seed)).to(dtype)


def _a(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
