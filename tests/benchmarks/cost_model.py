"""How long a run takes on how many ranks, from the convolutions that it needs. No imports but the standard library's.

    python tests/benchmarks/cost_model.py        an estimate for a million images on 64 GPUs (nobody has measured it)

    seconds of a step = pairs · pixels · 4 J K² c / (throughput · ranks) · imbalance
                        + samples · preparing / (ranks · threads)
                        + 3 meetings + moved bytes / bandwidth

A pair is one C and one Cᵀ of a bank of J filters of K×K on c channels, at 2 operations a multiply-add: an iteration of
the lower level, a Hessian product. ``tests/benchmarks/test_ranks.py`` compares this with what 1 and 2 ranks take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Bank:
    """The filters of a Field of Experts."""

    filters: int = 10
    kernel: int = 7
    channels: int = 3

    @property
    def flops(self) -> int:
        """Of a pair, a pixel."""
        return 4 * self.filters * self.kernel**2 * self.channels


@dataclass(frozen=True)
class Machine:
    """What one rank achieves."""

    #: Operations a second in the convolutions, all vector operations of the solvers included in their time.
    throughput: float
    #: Seconds for the meeting of all ranks.
    meeting: float = 0.0
    #: Bytes a second between ranks.
    bandwidth: float = float("inf")
    #: Seconds of one thread to read an image and draw its noise, which nothing is computed beside, and such threads.
    preparing: float = 0.0
    threads: int = 1


def pairs(ledger: Mapping[str, int]) -> float:
    """Pairs of convolutions behind a ledger: a linearisation takes half of one, a mixed derivative about three."""
    return (
        ledger["gradients"]
        + ledger["hessian_products"]
        + 0.5 * ledger["linearisations"]
        + 3 * ledger["mixed_products"]
    )


def seconds(
    work: float,
    pixels: int,
    bank: Bank,
    machine: Machine,
    ranks: int = 1,
    *,
    samples: int = 0,
    travelling: float = 0.0,
    itemsize: int = 4,
) -> float:
    """Of one hypergradient with ``work`` pairs, of whose ``samples`` a fraction is ``travelling`` there and back."""
    even = -(-samples // ranks) * ranks / samples if samples else 1.0
    computing = work * pixels * bank.flops / (machine.throughput * ranks) * even
    preparing = samples * machine.preparing / (ranks * machine.threads)
    moved = 4 * travelling * samples / ranks * pixels * bank.channels * itemsize
    meetings = 0.0 if ranks == 1 else 3 * machine.meeting
    return computing + preparing + meetings + moved / machine.bandwidth


def estimate() -> str:
    """A million images of 512² on 64 GPUs."""
    count, side, ranks, batch, iterations = 1_000_000, 512, 64, 2048, 40
    bank, pixels = Bank(), side * side
    machine = Machine(throughput=5e12, meeting=2e-3, bandwidth=1e9, preparing=25e-3, threads=12)
    # Besides its iterations a sample takes a start, a check, a linearisation and a mixed derivative.
    work = batch * (iterations + 5.5)
    step = seconds(work, pixels, bank, machine, ranks, samples=batch, travelling=0.07)
    alone = replace(machine, preparing=0.0)
    compute = seconds(work, pixels, bank, alone, ranks, samples=batch)
    epoch = step * count / batch
    small = [
        1e3 * seconds(32 * (iterations + 5.5), 96**2, bank, replace(alone, meeting=meeting), n, samples=32)
        for n, meeting in ((1, 0.0), (8, 2e-3))
    ]
    # Solution and adjoint, two places each.
    rows = 4 * count * pixels * bank.channels * 4 / ranks
    lines = (
        "ASSUMED, NOT MEASURED: 5 TFLOP/s a GPU, 25 ms to read an image and draw its noise, 12 threads a GPU,",
        "2 ms a meeting, 1 GB/s between ranks for warm starts, 7 % of a batch travels",
        f"{count:,} images of {side}², batches of {batch} on {ranks} GPUs, {iterations} iterations a sample:",
        f"  a step {step:8.3f} s, of which computing {compute:.3f} s",
        f"  an epoch {epoch / 60:6.1f} min, ten of them {epoch / 360:.1f} h",
        f"  warm starts {rows / 2**30:5.0f} GiB a rank, in mapped files; z {8 * 1482 * ranks / 1024:.0f} KiB a step",
        f"  checkpoint {rows * ranks / 2 / 1e12:.1f} TB, {rows * ranks / 4 / 1e12:.1f} TB in float16",
        f"32 images of 96²: a step {small[0]:.1f} ms on one GPU, {small[1]:.1f} ms on eight, launches not counted",
    )
    return "\n".join(lines)


if __name__ == "__main__":
    print(estimate())
