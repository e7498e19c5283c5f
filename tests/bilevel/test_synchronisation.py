"""Where a host would wait for a device: the loop looks at residuals now and then, and iterations never do.

Counted on the CPU, through a dispatch mode: reading a number (`.item()`, `bool`), and indices of unknown number.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import lower_level, noisy, small_foe
from torch.utils._python_dispatch import TorchDispatchMode

from blt_builtins.lower_solvers.agd import AGD
from blt_builtins.lower_solvers.gd import GradientDescent
from blt_builtins.lower_solvers.mm import MemoryGradient
from bltoolbox.bilevel.linear import ConjugateGradients
from bltoolbox.bilevel.roles import LowerSolver
from bltoolbox.config.registry import load_registry

WAITS = (
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::is_nonzero",
    "aten::equal",
    "aten::masked_select",
)
SOLVERS: dict[str, LowerSolver] = {"agd": AGD(), "mm": MemoryGradient(), "gd": GradientDescent()}


class Waits(TorchDispatchMode):
    """Counts what would make the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split(".")[0]
        if name in WAITS:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        return sum(self.seen.values())


def test_the_counter_sees_what_it_is_meant_to_see() -> None:
    with Waits() as waits:
        x = torch.arange(4.0)
        assert bool((x > 1).any()) and x[0].item() == 0 and len(torch.nonzero(x)) == 3
    assert waits.total == 3


@pytest.mark.parametrize("solver", SOLVERS)
def test_an_iteration_makes_no_host_wait(solver: str) -> None:
    lower, method = lower_level(small_foe(), noisy(3)), SOLVERS[solver]
    with torch.no_grad():
        state = method.init(lower, lower.start(), {})
        with Waits() as waits:
            for _ in range(3):
                state = method.step(lower, state)
    assert not waits.seen


def test_derivatives_make_no_host_wait() -> None:
    lower = lower_level(small_foe(), noisy(3))
    x = lower.start()
    with torch.no_grad(), Waits() as waits:
        hessian = lower.linearize(x)
        hessian.hvp(x)
        lower.gradient(x)
        lower.mixed(x, x, torch.ones(len(x), dtype=x.dtype))
    assert not waits.seen


def test_conjugate_gradients_make_no_host_wait_in_an_iteration() -> None:
    lower, method = lower_level(small_foe(), noisy(3)), ConjugateGradients()
    x = lower.start()
    with torch.no_grad():
        hessian = lower.linearize(x)
        state = method.init(hessian, x, torch.zeros_like(x), torch.zeros(len(x), dtype=x.dtype))
        with Waits() as waits:
            for _ in range(4):
                state = method.step(hessian, state)
    assert not waits.seen


@pytest.mark.parametrize("name", ["blur", "inpainting", "mri"])
def test_what_an_operator_holds_is_copied_once(name: str, tmp_path: Path) -> None:
    """From the host to a device that would be a wait in every product; here, from float64 to float32."""
    np.save(tmp_path / "mask.npy", np.eye(8, dtype=np.float32))
    options = {} if name == "blur" else {"mask": str(tmp_path / "mask.npy")}
    operator = load_registry().get("operator", name).load()(**options)
    x = torch.rand(2, 2 if name == "mri" else 3, 8, 8)
    first = operator.apply(x, {}, {})
    with Copies() as counted:
        again = operator.adjoint(operator.apply(x, {}, {}), {}, {})
    assert counted.count == 0 and first.dtype == again.dtype == torch.float32
    with torch.inference_mode():
        operator.apply(x.double(), {}, {})
    operator.apply(x.double().requires_grad_(), {}, {}).square().sum().backward()


class Copies(TorchDispatchMode):
    """Counts changes of dtype or device of matrices: kernels and masks, not images."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default and args[0].ndim == 2
        return func(*args, **(kwargs or {}))
