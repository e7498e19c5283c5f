"""Warm starts: transactions, files without a name, memory that does not grow, and rows that arrive late."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bltoolbox.bilevel import warm_starts as stores
from bltoolbox.bilevel.transfers import Arrival
from bltoolbox.bilevel.warm_starts import StepStore, Store, Stores, mapped_copy

SHAPE = (3, 5, 4)


def rows(*values: float) -> Tensor:
    return torch.stack([torch.full(SHAPE, float(value)) for value in values])


def values(store: Store, *samples: int) -> list[float]:
    return [float(row.mean()) for row in store.get(samples, rows(*[-1.0] * len(samples)))]


@pytest.fixture(params=["memory", "mapped"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Store:
    if request.param == "mapped":
        monkeypatch.setattr(stores, "MAPPED", 1)
    return Store(4, folder=tmp_path)


def test_what_is_rolled_back_never_was(store: Store) -> None:
    store.put([0, 1], rows(1, 2))
    store.mark_saved()
    for _ in range(3):
        store.begin()
        store.put([1, 2], rows(7, 8))
        assert values(store, 0, 1, 2, 3) == [1, 7, 8, -1], "a transaction sees what it wrote"
        store.put([1], rows(9))
        assert values(store, 1) == [9]
        store.rollback()
        assert values(store, 0, 1, 2, 3) == [1, 2, -1, -1]
        assert store.changes == 0 and store.present.tolist() == [True, True, False, False]


def test_a_store_made_within_a_transaction_is_part_of_it(tmp_path: Path) -> None:
    kept = Stores(3)
    kept["solutions"].put([0], rows(1))
    kept.lie_in(tmp_path)
    with pytest.raises(RuntimeError), kept.transaction():
        kept["solutions"].put([0], rows(2))
        kept["memory.adjoint"].put([0, 1], rows(3, 4))
        raise RuntimeError
    assert values(kept["solutions"], 0) == [1]
    assert values(kept["memory.adjoint"], 0, 1) == [-1, -1] and kept["memory.adjoint"].changes == 0
    with kept.transaction():
        kept["memory.adjoint"].put([1], rows(5))
    assert values(kept["memory.adjoint"], 0, 1) == [-1, 5]
    assert {store.folder for store in kept.values()} == {tmp_path}


def test_what_is_committed_stays_through_later_rollbacks(store: Store) -> None:
    for number in range(5):
        store.begin()
        store.put([0, 1], rows(number, 10 + number))
        store.commit()
        store.begin()
        store.put([0], rows(99))
        store.rollback()
        assert values(store, 0, 1) == [number, 10 + number]
    store.put([0], rows(50))
    assert values(store, 0, 1) == [50, 14]


def test_changes_come_in_parts_that_fit_into_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stores, "MAPPED", 4 * rows(1).nbytes)
    store = Store(7, folder=tmp_path)
    store.put(range(7), rows(*range(7)))
    store.mark_saved()
    store.put([6, 1, 3], rows(60, 10, 30))
    parts = list(store.changed())
    assert [part["ids"].tolist() for part in parts] == [[1, 3], [6]]
    assert [float(row.mean()) for part in parts for row in part["rows"]] == [10, 30, 60]
    assert sum(len(part["ids"]) for part in store.everything()) == 7
    other = Store(7)
    for part in store.everything():
        other.restore(part)
    assert values(other, *range(7)) == [0, 10, 2, 30, 4, 5, 60]


def test_a_mapped_store_leaves_no_file_and_keeps_the_layout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stores, "MAPPED", 1)
    store = Store(3, folder=tmp_path)
    image = rows(1, 2).contiguous(memory_format=torch.channels_last)
    store.put([0, 2], image)
    assert not list(tmp_path.iterdir())
    found = store.get([0, 2], torch.zeros_like(image))
    assert torch.equal(found, image) and found.is_contiguous(memory_format=torch.channels_last)
    copied = mapped_copy(image, tmp_path)
    assert torch.equal(copied, image) and not list(tmp_path.iterdir())


def test_a_full_disk_is_an_error_and_not_a_crash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(stores, "MAPPED", 1)
    monkeypatch.setattr(stores.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        Store(3, folder=tmp_path).put([0], rows(1))
    assert not list(tmp_path.iterdir())


def test_rows_that_arrive_late_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a CUDA device: nothing may read a row, or write over it, before it has arrived."""
    landed: list[bool] = []

    class Late(Arrival):
        def wait(self) -> Tensor:
            landed.append(True)
            return self.tensor

    monkeypatch.setattr(stores, "to_host", lambda tensor: Late(tensor.clone()))
    monkeypatch.setattr(Store, "_lands_at_once", staticmethod(lambda rows: False))
    store = Store(4)
    store.begin()
    store.put([0, 1], rows(1, 2))
    assert not landed, "the device goes on"
    store.put([1], rows(3))
    assert len(landed) == 1
    assert values(store, 0, 1) == [1, 3] and len(landed) == 2
    store.put([2], rows(4))
    store.rollback()
    assert values(store, 0, 1, 2) == [-1, -1, -1]
    store.put([3], rows(5))
    assert [part["rows"].mean().item() for part in store.changed()] == [5]


class TestHalfPrecision:
    """Rows in float16 with a power of two."""

    def test_every_entry_has_eleven_bits_of_the_largest(self) -> None:
        sizes = torch.tensor([1e-9, 1.0, 3e7, 0.0]).view(-1, 1, 1, 1)
        exact = sizes * torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        store = Store(4, half=True)
        store.put(range(4), exact)
        assert store.rows is not None and store.rows.dtype == torch.float16
        error = (store.get(range(4), torch.zeros_like(exact)) - exact).abs().amax((1, 2, 3))
        assert bool((error <= 2**-11 * exact.abs().amax((1, 2, 3))).all())

    def test_a_checkpoint_returns_the_same_bits(self) -> None:
        exact = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        store, other = Store(5, half=True), Store(5, half=True)
        store.put(range(5), exact)
        (part,) = store.everything()
        assert part["rows"].nbytes == exact.nbytes / 4
        other.restore(part)
        cold = torch.zeros_like(exact)
        assert torch.equal(store.get(range(5), cold), other.get(range(5), cold))
        (again,) = other.everything()
        assert all(torch.equal(value, again[name]) for name, value in part.items())

    def test_a_few_numbers_stay_as_they_are(self) -> None:
        constants = torch.rand(3, 2, dtype=torch.float64)
        store = Store(3, half=True)
        store.put(range(3), constants)
        assert torch.equal(store.get(range(3), torch.zeros_like(constants)), constants)


class TestStepStore:
    """Rows until the end of a step."""

    def test_memory_is_that_of_the_largest_step(self) -> None:
        store = StepStore()
        for first in range(0, 10**6, 10**5):
            store.put([first, first + 7, first + 3], rows(1, 2, 3))
            assert values(store, first + 3, first, first + 1) == [3, 1, -1]
            store.forget()
            assert values(store, first) == [-1] and store.changes == 0
            store.forget()
        assert store.rows is not None and len(store.rows) <= 12

    def test_it_grows_within_a_transaction(self) -> None:
        store = StepStore()
        store.put([5], rows(1))
        store.begin()
        store.put([5, *range(20, 40)], rows(2, *range(20, 40)))
        assert values(store, 5, 39) == [2, 39]
        store.rollback()
        assert values(store, 5, 39) == [1, -1]
        (part,) = store.everything()
        assert part["ids"].tolist() == [5] and float(part["rows"].mean()) == 1


MEMORY = """
import ctypes, gc, sys
import torch
from blt_builtins.hypergradients.neumann import Neumann
from blt_builtins.regularizers.foe import FieldOfExperts
from blt_builtins.lower_solvers.gd import GradientDescent
from bltoolbox.bilevel.oracle import BilevelOracle
from bltoolbox.bilevel.records import Accuracy, Batch
from bltoolbox.restoration.roles import Data
from bltoolbox.restoration.data_loading import Samples
from bltoolbox.restoration.variational import VariationalTasks
from bltoolbox.restoration.theta import join
from bltoolbox.testing import White, variational
from blt_builtins.operators.identity import Identity

torch.set_num_threads(1)

class Endless(Data):
    def __init__(self, count):
        self.count = count
    def __len__(self):
        return self.count
    def clean(self, ids):
        return torch.stack([torch.full((3, 256, 256), (i % 7) / 7) for i in ids])

def anonymous():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed is not counted, whatever the allocator keeps for later
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024

def work(m):
    foe = FieldOfExperts(filters=1, kernel_size=2, weight=1e-3)
    samples = Samples(Endless(m), Identity(), White(0.1), seed=0)
    problem = variational(Identity(), foe)
    tasks = VariationalTasks(problem, samples)
    oracle = BilevelOracle(problem, tasks, GradientDescent(), Neumann(terms=1), chunk=8, bound="none")
    theta = {k: v.float() for k, v in join(regularizer=foe.init_params(samples.shape, torch.Generator())).items()}
    asked = oracle.on(Batch(range(m), [1.0] * m))
    y = samples.batch(range(1)).y
    tol = 0.5 * float(problem.at(theta, samples.shape).on(y).residual(y))  # one step of 1/L meets it
    asked.hypergradient(theta, Accuracy(tol), Accuracy(1e9))
    asked.accept(asked.value(theta, Accuracy(tol)))
    return oracle, anonymous()

count = int(sys.argv[1])
few = work(count // 16)[1]
oracle, many = work(count)
assert oracle.cost.lower_iterations == count, oracle.cost
print(few, many)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is told by Linux only")
@pytest.mark.parametrize("count", [192, pytest.param(1024, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_the_data_set(count: int, tmp_path: Path) -> None:
    """Solutions and adjoints of 192 (1024) images of 256² are 0.3 (1.6) GB; the process keeps none of it to itself.

    Samples, 0.3 (1.6) GB with their true images, are kept up to a limit of their own, and no further. The limit is set
    to 32 MiB here, so that 64 MB beside it are less than anything that grew with the images would take.
    """
    limit = 2**25
    room = os.statvfs(tmp_path)
    if room.f_bavail * room.f_frsize < 8e6 * count:
        pytest.skip(f"needs {8e-3 * count:.0f} GB of free disk")
    environment = os.environ | {
        "TMPDIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "BLT_KEPT_MEASUREMENTS": str(limit),
    }
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(count)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    few, many = map(float, done.stdout.split())
    assert many - few < limit / 2**20 + 64, (
        f"{few:.0f} MB for {count // 16} images, {many:.0f} MB for {count}"
    )
