"""Chunks of an HDF5 dataset, checked before HDF5 decodes them.

HDF5 makes room for whatever a compressed chunk expands to, which may be a thousand times its bytes, and then takes it
for a chunk of the size that the dataset declares: one that expands to less is read beyond its end. So every chunk is
first decompressed here, piece by piece and without keeping the pieces, and must expand to exactly the declared bytes.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from h5py import Dataset

_DEFLATE, _SHUFFLE, _CHECKSUM, _LZF = 1, 2, 3, 32000
#: Filters whose work is understood here. Others (szip, n-bit, scale–offset) allocate what their own parameters declare.
_FILTERS = frozenset({_DEFLATE, _SHUFFLE, _CHECKSUM, _LZF})
_PART_OF_HDF5 = _FILTERS | {4, 5, 6}
#: Bytes that a checksum adds to a chunk.
_CHECKSUM_BYTES = 4
#: Chunks of one sample; each costs a look-up.
_CHUNKS = 2**16
_PIECE = 2**20


class Chunks:
    """The chunks of a dataset N×…, of which a sample is one row."""

    def __init__(self, dataset: Dataset, name: str) -> None:
        settings = dataset.id.get_create_plist()
        self.filters: list[int] = [settings.get_filter(i)[0] for i in range(settings.get_nfilters())]
        if set(self.filters) - _FILTERS:
            plugin = any(number not in _PART_OF_HDF5 for number in self.filters)
            reason = (
                "by a plugin of HDF5, which reading it would execute"
                if plugin
                else "neither by gzip nor by LZF"
            )
            raise ValueError(
                f"{name} is refused: it is compressed {reason}; save it with gzip or without compression"
            )
        if sum(number in (_DEFLATE, _LZF) for number in self.filters) > 1:
            raise ValueError(f"{name} is refused: it is compressed twice; save it with gzip once")
        self.name = name
        self._id: Any = dataset.id
        self._shape: tuple[int, ...] = dataset.shape
        self._chunk: tuple[int, ...] | None = dataset.chunks
        self._bytes = math.prod(self._chunk or ()) * dataset.dtype.itemsize
        if self._chunk and (count := math.prod(map(len, self._offsets(0)))) > _CHUNKS:
            raise ValueError(
                f"{name} is refused: a sample consists of {count} chunks, and the limit is {_CHUNKS}; save it with"
                " larger chunks"
            )

    def check(self, row: int) -> None:
        """Refuse a row whose chunks are not what the dataset declares."""
        if self._chunk is None:
            return
        for offset in itertools.product(*self._offsets(row)):
            self._check_chunk(offset)

    def _offsets(self, row: int) -> list[Sequence[int]]:
        """Where the chunks of a row begin, in each dimension."""
        assert self._chunk is not None
        first = row - row % self._chunk[0]
        others = zip(self._shape[1:], self._chunk[1:], strict=True)
        return [(first,), *(range(0, side, step) for side, step in others)]

    def _check_chunk(self, offset: tuple[int, ...]) -> None:
        try:
            skipped, stored = self._id.read_direct_chunk(offset)
        except RuntimeError:
            if self._id.get_chunk_info_by_coord(offset).byte_offset is None:
                return  # it was never written, so it contains the fill value
            raise
        used = [number for i, number in enumerate(self.filters) if not skipped >> i & 1]
        try:
            size = _decoded_size(stored, reversed(used), self._bytes)
        except zlib.error as error:
            raise ValueError(f"{self.name}: a chunk cannot be decompressed ({error})") from error
        if size != self._bytes:
            raise ValueError(
                f"{self.name} is refused: a chunk contains {'more' if size > self._bytes else 'fewer'} than the"
                f" {self._bytes} bytes that the dataset declares; copy or save it again"
            )


def _decoded_size(stored: bytes, filters: Iterable[int], expected: int) -> int:
    """Bytes of a chunk after its filters, in the order of reading; not counted far beyond ``expected``."""
    size = len(stored)
    for number in filters:
        if number == _CHECKSUM:
            size -= _CHECKSUM_BYTES
            stored = stored[: max(size, 0)]
        elif number == _DEFLATE:
            size = _inflated_size(stored, expected + _CHECKSUM_BYTES)
        elif number == _LZF:
            size = _lzf_size(stored)
    return size


def _inflated_size(stored: bytes, most: int) -> int:
    """Bytes of a deflate stream; counting ends beyond ``most``, and 0 stands for a stream that does not end."""
    stream, size, rest = zlib.decompressobj(), 0, stored
    while not stream.eof and size <= most:
        piece = stream.decompress(rest, _PIECE)
        if not piece and not stream.eof:
            return 0
        rest, size = stream.unconsumed_tail, size + len(piece)
    return size


def _lzf_size(stored: bytes) -> int:
    """Bytes of LZF data: runs of literal bytes and references to earlier ones, each with its length."""
    place, size, end = 0, 0, len(stored)
    while place < end:
        control = stored[place]
        if control < 32:  # literal bytes follow
            place += control + 2
            size += control + 1
            continue
        length = control >> 5
        if length == 7:  # a longer reference
            place += 1
            length += stored[place] if place < end else 0
        place += 2
        size += length + 2
    return size
