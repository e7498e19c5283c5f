"""State that is intact but does not fit: from another recipe or another version of a component.

A θ file or a checkpoint may have the right checksum and the wrong content. What can be compared is compared in
advance; other misfits are reported in one sentence when they occur.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bltoolbox.bilevel.records import Cost, Theta

if TYPE_CHECKING:
    from bltoolbox.bilevel.warm_starts import Store
    from bltoolbox.training.experiment import Experiment

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_state(content: Mapping[str, Any], experiment: Experiment, optimizer: Mapping[str, Any]) -> None:
    """Raise ValueError if a checkpoint lacks data that a run needs; ``optimizer`` is the state of a new optimizer."""
    for key, expected in (("optimizer", optimizer), ("sampler", experiment.sampler_state)):
        if lacking := sorted(set(expected) - set(content[key])):
            raise ValueError(f"the state of the {key} has no {', '.join(lacking)}")
        for name, value in expected.items():
            if not _alike(content[key][name], value):
                kind = type(content[key][name]).__name__
                raise ValueError(f"{name} in the state of the {key} is of the wrong type ({kind})")
    for cost in (content["cost"], content.get("interrupted", {})):
        Cost.unpack(cost)
    for key in ("theta", "before"):
        check_theta(content[key], experiment.theta)
        for name, value in content[key].items():
            if value.dtype != experiment.theta[name].dtype:
                raise ValueError(f"{name} is {value.dtype}, not {experiment.theta[name].dtype}")
    for key in (
        "steps",
        "seconds",
        "checking",
        "checks",
        "checked_at",
        "since_best",
        "failures",
        "recoveries",
    ):
        if not isinstance(content[key], int | float):
            raise ValueError(f"{key} is not a number")
    if (best := content["best"]) is not None:
        value, step, theta = best
        if not (isinstance(value, int | float) and isinstance(step, int)):
            raise ValueError("the best θ has no metric or no step")
        check_theta(theta, experiment.theta)
    if not isinstance(content["ended"], str | None):
        raise ValueError("the reason why the run ended is not text")
    for store in (experiment.oracle.solutions,):
        _check_rows(store, experiment.oracle.tasks.shape)


def _alike(value: Any, expected: Any) -> bool:
    """Whether a value may replace that of a new state; None may be replaced by anything, or stay."""
    if value is None or expected is None:
        return True
    if isinstance(expected, Tensor):
        return isinstance(value, Tensor) and (value.shape, value.dtype) == (expected.shape, expected.dtype)
    kinds = (bool, (int, float), str, (list, tuple), Mapping)
    kind = next((candidate for candidate in kinds if isinstance(expected, candidate)), object)
    return isinstance(value, kind)


def check_theta(theta: Mapping[str, Any], expected: Theta) -> None:
    """Raise ValueError if tensors have other names or shapes than expected, or are not real numbers."""
    if other := sorted(set(theta) ^ set(expected)):
        there = "has an unknown tensor" if other[0] in theta else "lacks the tensor"
        raise ValueError(f"θ {there} {other[0]}")
    for name, value in theta.items():
        if not isinstance(value, Tensor) or value.dtype not in _FLOATS:
            raise ValueError(f"{name} of θ is not real")
        if value.shape != expected[name].shape:
            raise ValueError(f"{name} of θ has shape {list(value.shape)}, not {list(expected[name].shape)}")


def _check_rows(store: Store, shape: tuple[int, ...]) -> None:
    if store.rows is not None and tuple(store.rows.shape[1:]) != shape:
        raise ValueError(f"warm starts have shape {list(store.rows.shape[1:])}, not {list(shape)}")
