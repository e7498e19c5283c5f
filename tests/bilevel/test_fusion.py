"""Fused pointwise work: the same numbers, and no need of a compiler."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import initial, normal, small_foe

from blt_builtins.lower_solvers.mm import MemoryGradient, compact_gram, gram
from blt_builtins.operators.identity import Identity
from blt_builtins.regularizers.pooled import PooledExperts
from blt_builtins.regularizers.tv import TotalVariation
from blt_builtins.regularizers.weakly_convex import WeaklyConvexExperts
from bltoolbox.bilevel.fusion import Fused
from bltoolbox.bilevel.lower_loop import solve
from bltoolbox.plugin import Regularizer
from bltoolbox.restoration.theta import join
from bltoolbox.restoration.theta_file import read_theta
from bltoolbox.testing import variational


def test_both_ways_to_sum_products_agree() -> None:
    weights, a, b = normal(3, 2, 5, 4).abs(), normal(3, 2, 5, 4, seed=1), normal(3, 2, 5, 4, seed=2)
    torch.testing.assert_close(gram(a, b, weights), compact_gram(a, b, weights))


def test_without_a_compiler_it_goes_on_with_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        def fail(*_: Any) -> None:
            raise RuntimeError("no C++ compiler\nand much more")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    fused = Fused(torch.add)
    with caplog.at_level(logging.WARNING, logger="bltoolbox"):
        assert [float(fused(torch.ones(()), torch.ones(()))) for _ in range(2)] == [2.0, 2.0]
    assert [record.getMessage() for record in caplog.records] == [
        "torch.compile failed; continuing without it: no C++ compiler"
    ]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_solves_are_the_plain_ones(caplog: pytest.LogCaptureFixture) -> None:
    foe = small_foe("symmetric")
    y = normal(4, 3, 12, 10) * torch.tensor([1.0, 0.1, 3.0, 0.3], dtype=torch.float64).view(-1, 1, 1, 1)
    lower = variational(Identity(), foe).at(join(regularizer=initial(foe)), y.shape[1:]).on(y)
    plain, compiled = (solve(MemoryGradient(compile), lower, y, 1e-9) for compile in (False, True))
    assert not [record for record in caplog.records if record.name.startswith("bltoolbox")], "it was compiled"
    torch.testing.assert_close(compiled.x, plain.x, rtol=0, atol=1e-8)


RECIPE = """\
data: {name: dead-leaves, count: 8, size: 24}
regularizer: {name: foe, filters: 3, kernel_size: 3}
lower_solver: {name: mm, compile: true}
sampler: {size: 3}
upper_optimizer: {name: isgd, step: 5e-3, tol: 0.1}
validation: {count: 2}
checkpoint: {every: 0.0, keep_finished: true}
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_runs_resume_exactly(tmp_path: Path) -> None:
    """Although the second process compiles anew, and for another size first: batches have 3, 3 and 2 images."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)

    def blt(command: str, *arguments: str) -> None:
        # With an empty cache of compiled code, so that nothing is inherited.
        cache = f"compiled-{command}-{arguments[-1].rpartition('=')[2]}"
        fresh = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / cache)}
        words = [sys.executable, "-m", "bltoolbox", command, *arguments]
        done = subprocess.run(words, env=os.environ | fresh, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "torch.compile failed" not in done.stderr

    whole, parts, recipe = (str(tmp_path / name) for name in ("whole", "parts", "recipe.yaml"))
    blt("run", recipe, "--out", whole, "budget.steps=5")
    blt("run", recipe, "--out", parts, "budget.steps=2")
    blt("resume", parts, "budget.steps=5")
    one, other = (read_theta(Path(folder) / "theta.safetensors")[0] for folder in (whole, parts))
    assert all(torch.equal(one[name], other[name]) for name in one)
    first, second = (
        [json.loads(line)["loss"] for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        for folder in (whole, parts)
    )
    assert len(first) > 1 and first == second


@pytest.mark.parametrize(
    "regularizer",
    [small_foe("symmetric"), WeaklyConvexExperts(3, 3), PooledExperts(3, 3), TotalVariation()],
    ids=lambda regularizer: type(regularizer).__name__,
)
def test_fused_passes_are_the_plain_ones(regularizer: Regularizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is given to the compiler computes the same, with and without a majorant that can be compiled."""
    given: set[str] = set()

    def compiled(function: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
        given.add(function.__name__)
        return function

    monkeypatch.setattr(torch, "compile", compiled)
    y = normal(3, 3, 12, 10)
    lower = variational(Identity(), regularizer).at(join(regularizer=initial(regularizer)), y.shape[1:]).on(y)
    plain, fused = (solve(MemoryGradient(compile), lower, y, 1e-7) for compile in (False, True))
    assert given == {
        "compact_gram",
        "advance" if type(regularizer) in (PooledExperts, TotalVariation) else "advance_and_touch",
    }
    torch.testing.assert_close(fused.x, plain.x, rtol=0, atol=1e-7)
