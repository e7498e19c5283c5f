"""``chunk: auto``: sized by free memory, halved once when memory runs out, the same after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bltoolbox import assemble, resume, run
from bltoolbox.bilevel import chunk_size as sizes
from bltoolbox.bilevel.chunk_size import chunk_size, free_memory
from bltoolbox.config.recipe import Recipe, recipe_from_dict


class Some:
    """Tasks of one megabyte each."""

    shape, dtype = (256, 1024), torch.float32

    def __init__(self, count: int, device: str) -> None:
        self.count, self.device = count, torch.device(device)

    def __len__(self) -> int:
        return self.count


@pytest.mark.parametrize(
    ("device", "count", "free", "expected"),
    [("cuda", 5000, 2**33, 64), ("cuda", 20, 2**33, 20), ("cuda", 5000, 2**40, 1024), ("cuda", 9, 2**20, 1),
     ("cpu", 5000, 2**40, 32), ("cpu", 5000, 2**30, 8)],
)  # fmt: skip
def test_half_of_the_free_memory_is_used(
    device: str, count: int, free: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
    if device == "cpu":
        monkeypatch.setattr(sizes, "free_memory", lambda device: free)
    assert chunk_size("auto", Some(count, device)) == expected
    assert chunk_size(7, Some(count, device)) == 7


def test_the_memory_of_this_machine_is_known() -> None:
    assert 2**20 < free_memory(torch.device("cpu")) < 2**50


def recipe(chunk: object = "auto", steps: int = 2) -> Recipe:
    return recipe_from_dict(
        {
            "data": {"name": "dead-leaves", "count": 6, "size": 12},
            "regularizer": {"name": "foe", "filters": 2, "kernel_size": 3},
            "lower_solver": "mm",
            "sampler": {"size": 6},
            "validation": {"count": 0, "checks": 1},
            "checkpoint": {"keep_finished": True},
            "chunk": chunk,
            "device": "cpu",
            "budget": {"steps": steps},
        }
    )


class Full:
    """Runs out of memory wherever more samples than it can hold are solved at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.sizes: list[int] = []
        from blt_builtins.lower_solvers.mm import MemoryGradient as Solver

        init = Solver.init

        def limited(solver: Any, lower: Any, x0: Any, *rest: Any) -> Any:
            self.sizes.append(len(x0))
            if len(x0) > room:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return init(solver, lower, x0, *rest)

        monkeypatch.setattr(Solver, "init", limited)


class TestOutOfMemory:
    """A call that does not fit is repeated once with half of the samples."""

    def test_it_is_repeated_and_the_run_is_as_if_it_had_been_small(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        small = run(recipe(3))
        monkeypatch.setattr(sizes, "free_memory", lambda device: 2**40)
        full = Full(monkeypatch, 3)
        halved = run(recipe())
        assert full.sizes[:3] == [6, 3, 3] and 6 not in full.sizes[1:]
        assert "out of memory with chunks of 6 samples; continuing with 3" in caplog.text
        assert all(torch.equal(small.last[name], value) for name, value in halved.last.items())
        assert halved.cost.computations == small.cost.computations

    @pytest.mark.parametrize(("chunk", "room"), [("auto", 1), (6, 3)])
    def test_twice_or_with_a_chunk_of_the_user_it_is_an_error(
        self, chunk: object, room: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Full(monkeypatch, room)
        with pytest.raises(torch.OutOfMemoryError):
            run(recipe(chunk))

    def test_a_resumed_run_continues_with_the_size_that_fitted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        full = Full(monkeypatch, 3)
        run(recipe(steps=1), out=tmp_path)
        full.sizes.clear()
        resume(tmp_path, ["budget.steps=2"])
        assert max(full.sizes) == 3


def test_the_oracle_of_a_recipe_has_a_number() -> None:
    oracle = assemble(recipe()).oracle
    assert oracle.chunk == 6 and oracle.adaptive
    assert not assemble(recipe(4)).oracle.adaptive
