"""Two ranks of one thread each against one process of one thread, and the cost model against both.

    python -m pytest -m bench -s tests/benchmarks/test_ranks.py
    python tests/benchmarks/test_ranks.py

One hypergradient of a full batch from a cold start. The candidates take turns, and the best of several times counts.
Wall clock says what a person waits; on a machine that does other things at the same time the processor time of the
slowest rank says what it would be on a quiet one. The throughput of the model is measured on other images, fewer and
smaller.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from pathlib import Path

import pytest
import torch
from cost_model import Bank, Machine, pairs, seconds

from blt_builtins.hypergradients.cg_ift import CGIFT
from blt_builtins.lower_solvers.mm import MemoryGradient
from blt_builtins.regularizers.foe import FieldOfExperts
from bltoolbox.bilevel.records import Accuracy
from bltoolbox.bilevel.tensors import keyed_generator
from bltoolbox.distributed.launch import Place
from bltoolbox.distributed.ranks import ALONE, Group, Ranks
from bltoolbox.restoration.theta import join
from bltoolbox.testing.problems import full_batch, make_oracle, smooth_images

FORK = multiprocessing.get_context("fork")
REPEATS = 5
Times = dict[str, float]


def measure(ranks: Ranks, count: int, side: int) -> Times:
    """Wall and processor time of one hypergradient on this rank, and the pairs of convolutions of all."""
    regularizer = FieldOfExperts()
    theta = join(regularizer=regularizer.init_params((3, 8, 8), keyed_generator("theta", 0)))
    theta = {name: value.float() for name, value in theta.items()}
    found = {"wall": float("inf"), "processor": float("inf")}
    for _ in range(2):
        oracle = make_oracle(
            smooth_images(count, (3, side, side)),
            regularizer,
            MemoryGradient(),
            CGIFT(),
            dtype=torch.float32,
            ranks=ranks,
        )
        ranks.gather("go")
        wall, processor = time.perf_counter(), time.process_time()
        oracle.on(full_batch(oracle)).hypergradient(theta, Accuracy(0.05), Accuracy(0.05))
        found["wall"] = min(found["wall"], time.perf_counter() - wall)
        found["processor"] = min(found["processor"], time.process_time() - processor)
        found["pairs"] = pairs(oracle.cost.as_dict())
    return found


def on_ranks(size: int, count: int, side: int) -> Times:
    """The slowest rank's times."""
    with tempfile.TemporaryDirectory() as folder:
        queue = FORK.SimpleQueue()

        def be(rank: int) -> None:
            torch.set_num_threads(1)
            ranks = ALONE if size == 1 else Group(Place(rank, size, rank), f"file://{Path(folder)}/meet")
            queue.put(measure(ranks, count, side))

        children = [FORK.Process(target=be, args=(rank,)) for rank in range(size)]
        for child in children:
            child.start()
        found = [queue.get() for _ in children]
        for child in children:
            child.join(60)
    return {name: max(one[name] for one in found) for name in found[0]}


def compare(count: int = 32, side: int = 96) -> tuple[str, dict[str, float]]:
    """A table, and the figures that are wanted."""
    best: dict[str, Times] = {}
    settings = {"small": (1, 16, 64), "one": (1, count, side), "two": (2, count, side)}
    for _ in range(REPEATS):
        for name, (size, images, pixels) in settings.items():
            found = on_ranks(size, images, pixels)
            best[name] = {key: min(value, best.get(name, found)[key]) for key, value in found.items()}
    bank, figures, lines = Bank(), {}, []
    for clock in ("wall", "processor"):
        small = best["small"]
        machine = Machine(small["pairs"] * 64**2 * bank.flops / small[clock])
        figures[f"{clock} speed-up"] = best["one"][clock] / best["two"][clock]
        lines.append(f"{clock:9s}  1 rank {best['one'][clock]:6.3f} s, 2 ranks {best['two'][clock]:6.3f} s")
        lines[-1] += f", ratio {figures[f'{clock} speed-up']:.2f}; {machine.throughput / 1e9:.1f} GFLOP/s"
        for name, ranks in (("one", 1), ("two", 2)):
            said = seconds(best[name]["pairs"], side**2, bank, machine, ranks, samples=count)
            figures[f"{clock} model {ranks}"] = said / best[name][clock]
            lines.append(
                f"           the model says {said:6.3f} s on {ranks}: {said / best[name][clock]:.2f} of it"
            )
    return "\n".join(lines), figures


@pytest.mark.bench
def test_two_ranks_against_one() -> None:
    text, figures = compare()
    print(f"\n{text}")
    assert figures["processor speed-up"] > 1.7
    assert all(0.8 < figures[f"processor model {ranks}"] < 1.2 for ranks in (1, 2))


if __name__ == "__main__":
    print(compare()[0])
