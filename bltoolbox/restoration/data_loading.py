"""Loading batches: the true images of a split, with measurements that were recorded or are simulated.

    y_i = noise(A x*_i)

A measurement is simulated one sample at a time, on the CPU, in float64, with a generator keyed by (seed, stream, id):
a sample has the same y in every epoch, order, batch size, process and device, and after a resume. Measurements are not
clipped. A loss that compares with measurements splits y in the same way, in training and where the loss itself is
measured.

Images are read and measurements are simulated in ``workers`` threads or in the calling one; both depend on the id
alone, so the result is the same. With workers, one more thread loads the next batch while the current one is
solved (``prefetch``). Samples are kept up to a limit, so that few are loaded twice: this is the one part of memory that
grows with the number of images, until the limit is reached.
"""

from __future__ import annotations

import copy
import hashlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from typing import Literal, TypeVar

import torch
from torch import Tensor

from bltoolbox.bilevel.records import Rows, Theta
from bltoolbox.bilevel.tensors import keyed_generator
from bltoolbox.errors import BltError
from bltoolbox.restoration.layout import image_layout, to_gray
from bltoolbox.restoration.next_batch import NextBatch
from bltoolbox.restoration.roles import Data, Noise, Operator, Sample, UpperLoss
from bltoolbox.restoration.sample_cache import SampleCache, SampleRow, stacked

Color = Literal["rgb", "gray"]
Item = TypeVar("Item")
Result = TypeVar("Result")
#: y and, where the loss has made one, the target.
Measured = tuple[Tensor, Tensor | None]
#: Data components need not be prepared for two callers at a time, and splits may share one.
_LOADING = threading.Lock()


class Samples:
    """Images of a data component with their measurements, on the device and in the dtype of the run.

    ``loss`` may split the measurements of samples for ``training``. ``check`` returns a sentence about measurements
    that cannot be used.
    """

    def __init__(
        self,
        data: Data,
        operator: Operator,
        noise: Noise | None = None,
        *,
        loss: UpperLoss | None = None,
        training: bool = False,
        check: Callable[[Tensor], str | None] | None = None,
        seed: int = 0,
        color: Color = "rgb",
        stream: str = "train",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        operator_theta: Theta | None = None,
        ids: Sequence[int] | None = None,
        workers: int = 0,
    ) -> None:
        self.data = data
        self.operator = operator
        self.noise = noise
        self.loss = loss
        self.training = training
        self.check = check
        self.seed = seed
        self.color = color
        self.stream = stream
        self.dtype = dtype
        self.device = torch.device(device)
        exact = {name: value.double().cpu() for name, value in (operator_theta or {}).items()}
        self.operator_theta = operator.prepare(exact)
        self.ids = range(len(data)) if ids is None else ids
        self.workers = workers
        self._pool: ThreadPoolExecutor | None = None
        self.recorded = data.offers("measured")
        self.has_truth = data.offers("clean")
        self.cache = SampleCache(self.device)
        self._next = NextBatch()
        self.shape = self._find_shape()

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def range(self) -> tuple[float, float]:
        """The values between which images lie."""
        return self.data.range

    @property
    def splits(self) -> bool:
        """Whether the loss splits the measurements of these samples."""
        return self.training and self.loss is not None and self.loss.offers("split")

    @cached_property
    def as_in_training(self) -> Samples:
        """The same samples with measurements that the loss has split, if it does so."""
        if self.training or self.loss is None or not self.loss.offers("split"):
            return self
        other = copy.copy(self)
        other.training, other.cache, other._next = True, SampleCache(self.device), NextBatch()
        other._pool = None
        return other

    def label(self, position: int) -> str:
        """The label of a sample in tables and figures."""
        return self.data.label(self.ids[position])

    def digest(self) -> str:
        """Changes when images are added, removed or renamed, as far as their labels show it."""
        digest = hashlib.blake2b(digest_size=16)
        for position, i in enumerate(self.ids):
            separator = "\n" if position else ""
            digest.update(f"{separator}{self.data.label(i)}".encode("utf-8", "replace"))
        return digest.hexdigest()

    def batch(self, positions: Sequence[int]) -> Sample:
        """The samples at ``positions`` of this set, with their measurements."""
        ids = [self.ids[position] for position in positions]
        with self._loading(ids):
            try:
                context = dict(self.data.context(ids))
                rows = self._rows(ids, context)
            except (ValueError, OSError) as error:
                raise BltError(f"an image cannot be loaded: {error}") from error
        return Sample(
            positions,
            self._stacked([row.y for row in rows]),
            truth=self._stacked([row.truth for row in rows]) if self.has_truth else None,
            target=self._stacked([row.target for row in rows])
            if rows and rows[0].target is not None
            else None,
            context=converted(context | self._levels(ids), self.dtype, self.device),
            range=self.data.range,
        )

    def _levels(self, ids: Sequence[int]) -> dict[str, Tensor]:
        """The noise level of each sample, where it differs from sample to sample and measurements are simulated."""
        noise = self.noise
        if noise is None or self.recorded or not noise.offers("level_of"):
            return {}
        levels = [noise.level_of(self._noise_generator(i)) for i in ids]
        return {"noise": torch.tensor(levels, dtype=torch.float64)}

    def _noise_generator(self, i: int) -> torch.Generator:
        """Of the noise of one sample, the same whenever it is asked for."""
        return keyed_generator("noise", self.stream, self.seed, i)

    def prefetch(self, positions: Sequence[int]) -> None:
        """Load samples that are needed soon in a thread of their own; does nothing without workers.

        What fails there is tried again, and then reported, when the batch is needed.
        """
        ids = [self.ids[position] for position in positions]
        if not self.workers or all(i in self.cache.rows for i in ids):
            return
        self._next.start(lambda: self._load_ahead(ids), self.device)

    def close(self) -> None:
        """End all threads; the samples can still be used."""
        self._next.finish()
        self._next.rows = {}
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        other = vars(self).get("as_in_training")
        if other is not None and other is not self:
            other.close()

    @contextmanager
    def _loading(self, ids: Sequence[int]) -> Iterator[None]:
        """While the data component may be asked; a batch that is kept need not wait for the next one."""
        if all(i in self.cache.rows for i in ids) and not self.data.offers("context"):
            yield
            return
        self._next.finish()
        with _LOADING:
            yield

    def _load_ahead(self, ids: Sequence[int]) -> dict[int, SampleRow]:
        with _LOADING:
            rows = self._rows(ids, dict(self.data.context(ids)))
            return {i: row.to(self.device) for i, row in zip(ids, rows, strict=True)}

    def _rows(self, ids: Sequence[int], context: Rows) -> list[SampleRow]:
        """The samples ``ids``; those that are neither kept nor loaded ahead are read and simulated."""
        rows = {i: row for i in ids if (row := self.cache.get(i) or self._next.rows.get(i)) is not None}
        places = {i: place for place, i in enumerate(ids) if i not in rows}
        missing = list(places)
        if missing:
            truth = self._clean(missing) if self.has_truth else None
            some = {name: entry[list(places.values())] for name, entry in context.items()}
            for number, (i, (y, target)) in enumerate(
                zip(missing, self._measured(missing, truth, some), strict=True)
            ):
                shown = None if truth is None else truth[number].to(self.dtype)
                rows[i] = SampleRow(y, shown, target)
        for i, row in rows.items():
            self.cache.keep(i, row)
        return [rows[i] for i in ids]

    def _stacked(self, rows: Sequence[Tensor | None]) -> Tensor:
        tensors = [row for row in rows if row is not None]
        return image_layout(stacked(tensors, self.device))

    def _find_shape(self) -> tuple[int, ...]:
        """Of the images, from the last one, which no other one is derived from after it; refuses recorded measurements
        that the operator cannot have made."""
        ids = self.ids[-1:]
        exact = converted(self.data.context(ids), torch.float64)
        truth = self._clean(ids) if self.has_truth else None
        if truth is not None:
            _refuse_other_range(truth, self.data.range)
            if not self.recorded:
                return tuple(truth.shape[1:])
        recorded = self._in_color(self.data.measured(ids)).double()
        try:
            if truth is None:
                return tuple(self.operator.start(recorded, self.operator_theta, exact).shape[1:])
            made = self.operator.apply(truth.double(), self.operator_theta, exact).shape[1:]
        except (RuntimeError, LookupError) as error:
            given = recorded if truth is None else truth
            what = "measurements" if truth is None else "images"
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"the operator cannot treat the {what}, which are {_by(given.shape[1:])}: {reason}"
            ) from error
        if made != recorded.shape[1:]:
            raise ValueError(
                f"the recorded measurements are {_by(recorded.shape[1:])}, but the operator makes {_by(made)} of the"
                " true images; choose its options, or the layout of the data, so that both agree"
            )
        return tuple(truth.shape[1:])

    def _clean(self, ids: Sequence[int]) -> Tensor:
        return self._in_color(self._read(self.data.clean, ids))

    def _in_color(self, images: Tensor) -> Tensor:
        return to_gray(images) if self.color == "gray" else images

    def _read(self, read: Callable[[Sequence[int]], Tensor], ids: Sequence[int]) -> Tensor:
        if not self.workers or len(ids) < 2:
            return read(ids)
        return torch.cat(list(self._each(lambda i: read([i]), ids)))

    def _measured(self, ids: Sequence[int], truth: Tensor | None, context: Rows) -> list[Measured]:
        """The measurements of some samples, read or simulated."""
        recorded = self._in_color(self._read(self.data.measured, ids)) if self.recorded else None

        def measure(place: int) -> Measured:
            row = {name: rows[place : place + 1] for name, rows in context.items()}
            if recorded is not None:
                y = recorded[place].double()
            else:
                assert truth is not None
                y = self._simulate(ids[place], truth[place : place + 1], row)
            return self._split(ids[place], y, row)

        return list(self._each(measure, range(len(ids))))

    def _each(self, work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        if not self.workers:
            return map(work, items)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="blt-images")
        return self._pool.map(work, items)

    def _simulate(self, i: int, truth: Tensor, context: Rows) -> Tensor:
        """y of one sample, without its batch dimension."""
        exact = converted(context, torch.float64)
        t = self.operator.apply(truth.double(), self.operator_theta, exact)
        if self.noise is None:
            return t[0]
        y = self.noise.sample(t[0], self._noise_generator(i))
        return self._where_measured(y, t[0], exact)

    def _where_measured(self, changed: Tensor, y: Tensor, context: Rows) -> Tensor:
        """``changed`` where y contains measurements, and y elsewhere."""
        mask = self.operator.measured(y.unsqueeze(0), context)
        return changed if mask is None else torch.where(mask.expand(1, *y.shape)[0] != 0, changed, y)

    def _split(self, i: int, y: Tensor, context: Rows) -> Measured:
        """What the lower level sees, in the dtype of the run, and the target where the loss makes one."""
        target = None
        if self.splits:
            assert self.loss is not None
            level = None if self.noise is None else self.noise.level
            used, held_back = self.loss.split(y, level, keyed_generator("split", self.stream, self.seed, i))
            exact = converted(context, torch.float64)
            target = None if held_back is None else self._where_measured(held_back, y, exact)
            y = self._where_measured(used, y, exact)
        if self.check is not None and (sentence := self.check(y.unsqueeze(0))) is not None:
            raise BltError(f"measurement {self.data.label(i)}: {sentence}")
        return y.to(self.dtype), None if target is None else target.to(self.dtype)


def reading_threads(workers: int | Literal["auto"], device: torch.device) -> int:
    """How many threads read samples; on the CPU they would only take turns with the solver."""
    if workers == "auto":
        return 0 if device.type == "cpu" else 2
    return workers


def _refuse_other_range(images: Tensor, span: tuple[float, float]) -> None:
    """Noisy targets lie around the range, but not as far from it as counts from [0, 1]."""
    (low, high), least, most = span, float(images.min()), float(images.max())
    if least < 2 * low - high or most > 2 * high - low:
        raise ValueError(
            f"an image has values from {least:g} to {most:g}, far outside the range [{low:g}, {high:g}] of the"
            f" data; give the range, e.g. [{math.floor(least)}, {math.ceil(most)}], or scale the images"
        )


def _by(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


def converted(
    context: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Real and complex entries in the precision of ``dtype``; whole numbers and masks as they are."""

    def convert(rows: Tensor) -> Tensor:
        if rows.is_complex():
            return rows.to(device, dtype.to_complex())
        return rows.to(device, dtype) if rows.is_floating_point() else rows.to(device)

    return {name: convert(rows) for name, rows in context.items()}
