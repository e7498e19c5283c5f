"""Samples that are kept or loaded ahead: the same batches, bounded memory, no thread left behind."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blt_builtins.operators.blur import Blur
from bltoolbox import resume, run
from bltoolbox.config.recipe import recipe_from_dict
from bltoolbox.errors import BltError
from bltoolbox.restoration.data_loading import Samples, reading_threads
from bltoolbox.restoration.roles import Data
from bltoolbox.restoration.sample_cache import SampleCache, SampleRow
from bltoolbox.testing import White

COUNT, SHAPE = 6, (3, 8, 9)


class Watched(Data):
    """Images that can be counted, held back and lost."""

    def __init__(self) -> None:
        self.images = torch.rand(COUNT, *SHAPE, generator=torch.Generator().manual_seed(0))
        self.read: list[int] = []
        self.lost: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()

    def __len__(self) -> int:
        return COUNT

    def clean(self, ids: Sequence[int]) -> Tensor:
        assert self.gate.wait(20)
        if gone := self.lost.intersection(ids):
            raise ValueError(f"image {min(gone)} is gone")
        self.read += ids
        return self.images[list(ids)]


def samples(workers: int = 0) -> tuple[Watched, Samples]:
    data = Watched()
    made = Samples(data, Blur(size=3), White(0.1), workers=workers)
    data.read.clear()
    return data, made


def ours() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("blt-")]


@pytest.mark.parametrize("limit", [1, 3000, 2**20])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_the_same_wherever_their_rows_come_from(
    limit: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLT_KEPT_MEASUREMENTS", str(limit))
    for order in ([0, 1, 2], [5, 2, 2, 0], range(COUNT), [3]):
        expected = samples()[1].batch(order)
        data, made = samples(workers)
        for _ in range(2):
            made.prefetch(order)
            batch = made.batch(order)
            assert torch.equal(batch.y, expected.y) and batch.y.stride() == expected.y.stride()
            assert batch.truth is not None and expected.truth is not None
            assert torch.equal(batch.truth, expected.truth)
            assert torch.equal(batch.truth, data.images[list(order)])
        assert made.cache.host_bytes <= limit
        made.close()
    assert not ours()


def test_what_is_kept_is_read_once_and_owns_its_memory() -> None:
    data, made = samples()
    for _ in range(3):
        made.batch(range(COUNT))
    assert sorted(data.read) == list(range(COUNT))
    tensors = [tensor for row in made.cache.rows.values() for tensor in (row.y, row.truth)]
    assert sum(t.untyped_storage().nbytes() for t in tensors if t is not None) == made.cache.host_bytes


class TestTiers:
    """A device with room for three rows and a host with room for two, both made up."""

    @pytest.fixture
    def cache(self, monkeypatch: pytest.MonkeyPatch) -> SampleCache:
        row = torch.zeros(SHAPE).nbytes
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (35 * row, 100 * row))
        monkeypatch.setattr(SampleRow, "to", lambda row, device: self.places.append(device.type) or row)
        monkeypatch.setattr(SampleRow, "pinned", lambda row: self.places.append("pinned") or row)
        monkeypatch.setenv("BLT_KEPT_MEASUREMENTS", str(2 * row))
        self.places: list[str] = []
        return SampleCache(torch.device("cuda"))

    def test_rows_fill_the_device_then_pinned_memory_then_nothing(self, cache: SampleCache) -> None:
        for i in range(8):
            cache.keep(i, SampleRow(torch.zeros(SHAPE)))
        assert self.places == ["cuda"] * 3 + ["cpu", "pinned"] * 2
        assert sorted(cache.rows) == [0, 1, 2, 3, 4]

    def test_the_room_on_the_device_can_be_set(
        self, cache: SampleCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("BLT_KEPT_ON_DEVICE", str(torch.zeros(SHAPE).nbytes))
        for i in range(8):
            cache.keep(i, SampleRow(torch.zeros(SHAPE)))
        assert self.places.count("cuda") == 1


class TestPrefetch:
    """The next batch, in a thread of its own."""

    def test_it_is_loaded_while_the_current_one_is_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("BLT_KEPT_MEASUREMENTS", "1")
        data, made = samples(workers=1)
        made.prefetch([1, 2])
        made._next.finish()
        assert sorted(data.read) == [1, 2]
        made.batch([2, 1])
        assert len(data.read) == 2, "not read again"
        made.close()

    def test_a_batch_that_is_kept_does_not_wait_for_it(self) -> None:
        data, made = samples(workers=1)
        made.batch([0, 1])
        data.gate.clear()
        made.prefetch([4, 5])
        made.batch([1, 0])
        assert 4 not in data.read
        data.gate.set()
        made.close()
        assert not ours()

    def test_what_fails_ahead_is_reported_where_it_is_needed(self) -> None:
        data, made = samples(workers=1)
        data.lost = {3}
        made.prefetch([2, 3])
        made.batch([0, 1])
        with pytest.raises(BltError, match="an image cannot be loaded: image 3 is gone"):
            made.batch([2, 3])
        data.lost = set()
        made.prefetch([2, 3])
        assert torch.equal(made.batch([3]).y, samples()[1].batch([3]).y)
        made.close()
        assert not ours()

    def test_without_workers_there_is_no_thread(self) -> None:
        data, made = samples()
        made.prefetch([1, 2])
        assert not data.read and not ours()


@pytest.mark.parametrize(("device", "threads"), [("cpu", 0), ("cuda", 2), ("mps", 2)])
def test_auto_reads_ahead_only_where_the_processor_is_idle(device: str, threads: int) -> None:
    assert reading_threads("auto", torch.device(device)) == threads
    assert reading_threads(5, torch.device(device)) == 5


def test_a_run_is_the_same_with_and_without_and_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLT_KEPT_MEASUREMENTS", "1")
    monkeypatch.setattr("bltoolbox.reports.writer.draw", lambda result, folder: None)

    def recipe(workers: int, steps: int) -> object:
        return recipe_from_dict(
            {
                "data": {"name": "dead-leaves", "count": 5, "size": 12},
                "regularizer": {"name": "foe", "filters": 2, "kernel_size": 3},
                "lower_solver": "mm",
                "sampler": {"name": "nice", "size": 3},
                "validation": {"count": 0, "checks": 1},
                "checkpoint": {"keep_finished": True},
                "chunk": 2,
                "workers": workers,
                "budget": {"steps": steps},
            }
        )

    run(recipe(0, 4), out=tmp_path / "plain")  # type: ignore[arg-type]
    run(recipe(2, 2), out=tmp_path / "ahead")  # type: ignore[arg-type]
    assert not ours()
    resume(tmp_path / "ahead", ["budget.steps=4"])
    logs = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("plain", "ahead")]
    assert logs[0] == logs[1] and not ours()
