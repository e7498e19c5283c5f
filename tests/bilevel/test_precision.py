"""Solves compute in full float32 with a fixed order of summation, and leave the switches of torch as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import lower_level, noisy, oracle_for, small_foe

from blt_builtins.lower_solvers.agd import AGD
from bltoolbox.bilevel import precision
from bltoolbox.bilevel.linear import ConjugateGradients, solve_linear
from bltoolbox.bilevel.lower_loop import solve
from bltoolbox.bilevel.precision import computing, deterministic
from bltoolbox.bilevel.records import Accuracy
from bltoolbox.bilevel.tensors import full_precision
from bltoolbox.errors import BltError
from bltoolbox.restoration.theta import join
from bltoolbox.testing import full_batch

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def switches() -> dict[str, Any]:
    """All switches; None where torch refuses to read an older one."""
    backends = torch.backends
    read: dict[str, Callable[[], Any]] = {
        "cudnn": lambda: backends.cudnn.allow_tf32,
        "matmul": lambda: backends.cuda.matmul.allow_tf32,
        "precision": torch.get_float32_matmul_precision,
        "deterministic": lambda: backends.cudnn.deterministic,
        "benchmark": lambda: backends.cudnn.benchmark,
        "algorithms": torch.are_deterministic_algorithms_enabled,
        "warn": torch.is_deterministic_algorithms_warn_only_enabled,
        "fill": lambda: torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    }
    if hasattr(backends.cudnn, "conv"):
        owners = {"all": backends, "conv": backends.cudnn.conv, "rnn": backends.cudnn.rnn}
        owners |= {"mm": backends.cuda.matmul, "cpu mm": backends.mkldnn.matmul, "cpu": backends.mkldnn.conv}
        read |= {f"new {name}": (lambda owner=owner: owner.fp32_precision) for name, owner in owners.items()}
    values = {}
    for name, one in read.items():
        try:
            values[name] = one()
        except RuntimeError:
            values[name] = None
    return values


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """What a test sets is taken back, and its own solves are outermost."""
    with computing(CPU, tf32=False):
        precision._active = False
        yield


def is_full() -> bool:
    now = switches()
    return now["cudnn"] is False and now["matmul"] is False and now["deterministic"] and not now["benchmark"]


def lax() -> None:
    """What a user may have set for other work."""
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = True, False


def newer_and_lax() -> None:
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def general_and_lax() -> None:
    torch.backends.fp32_precision = "tf32"  # type: ignore[attr-defined]


def contradictory() -> None:
    """Older and newer switches mixed, so that torch refuses to read the older ones."""
    lax()
    if hasattr(torch.backends.cudnn, "conv"):
        torch.backends.cudnn.conv.fp32_precision = "ieee"


SETTINGS = {"older": lax, "newer": newer_and_lax, "general": general_and_lax, "mixed": contradictory}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("error", [False, True])
def test_switches_are_set_consistently_and_restored(setting: str, error: bool) -> None:
    if setting in ("newer", "general") and not hasattr(torch.backends.cudnn, "conv"):
        pytest.skip("torch has only the older switches")
    SETTINGS[setting]()
    before = switches()
    with pytest.raises(KeyError) if error else computing(CPU, None):
        if error:
            with computing(CPU):
                assert is_full()
                raise KeyError
        assert is_full()
        if hasattr(torch.backends.cudnn, "conv"):
            precisions = (torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision)
            assert "tf32" not in precisions
            assert torch.backends.mkldnn.conv.fp32_precision == "ieee"
    assert switches() == before


def test_a_solve_in_a_run_with_tf32_uses_it_and_others_do_not() -> None:
    lax()
    with computing(CPU, tf32=True, run=True):
        with computing(CPU):
            assert torch.backends.cudnn.allow_tf32 and torch.backends.cuda.matmul.allow_tf32
        with computing(CPU, tf32=False):
            assert is_full()
        assert torch.backends.cudnn.allow_tf32
    with full_precision(torch.zeros(())):
        assert is_full()


def test_every_way_to_solve_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle, the lower level and linear systems; layers and models use ``full_precision``."""
    lax()
    before, seen = switches(), []
    lower = lower_level(small_foe(), noisy(2))
    gradient = type(lower).gradient

    def watched(self: Any, x: Any) -> Any:
        seen.append(is_full())
        return gradient(self, x)

    monkeypatch.setattr(type(lower), "gradient", watched)
    solve(AGD(), lower, lower.start(), 1e-2)
    oracle = oracle_for(small_foe(), "agd")
    theta = join(regularizer=small_foe().init_params((3, 10, 12), torch.Generator()))
    oracle.on(full_batch(oracle)).hypergradient(theta, Accuracy(1e-2), Accuracy(1e-2))
    assert seen and all(seen)
    monkeypatch.undo()
    system = lower.linearize(lower.start())
    product = type(system).hvp
    monkeypatch.setattr(type(system), "hvp", lambda self, v: seen.append(is_full()) or product(self, v))
    solve_linear(ConjugateGradients(), system, lower.y, lower.y * 0, torch.full_like(lower.mu, 1e-2), 50)
    assert all(seen) and switches() == before


def test_a_run_on_cuda_refuses_kernels_without_a_fixed_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = switches()
    with computing(CUDA, False, run=True):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    assert switches() == before
    with pytest.raises(BltError, match="BLT_DETERMINISTIC=0"), computing(CUDA, False, run=True):
        raise RuntimeError("put_ does not have a deterministic implementation, but you set …")
    monkeypatch.setenv("BLT_DETERMINISTIC", "0")
    with computing(CUDA, False, run=True):
        assert not torch.are_deterministic_algorithms_enabled() and not deterministic()


def test_outside_of_runs_other_kernels_are_allowed() -> None:
    with computing(CUDA):
        assert torch.backends.cudnn.deterministic and not torch.are_deterministic_algorithms_enabled()


def test_a_switch_that_is_as_it_should_be_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Setting this one imports torch's compiler: seconds, at the end of every command and after every Ctrl-C."""
    calls: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda mode, **options: calls.append(mode))
    with computing(CPU, False, run=True):
        pass
    assert not calls
