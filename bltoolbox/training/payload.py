"""What a ``torch.save`` payload would become in memory, checked before ``torch.load`` reads it.

``weights_only=True`` keeps a payload from executing anything, but not from growing: records may be deflated, and a
tensor with a stride of zero may show terabytes of one number. That every storage has the bytes of its record is
checked here, too, whether or not the installed torch does so. The index (``data.pkl``) is therefore unpickled once
with stand-ins that only count. The payload cannot change the stand-ins, and its names are
looked up only here.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
import zipfile
from typing import Any

from bltoolbox.config.reading import CHECKPOINT_INDEX, quantity

#: Bytes of all tensors together: this many times the payload, and some for small tensors that were expanded.
SHARED, EXPANDED = 4, 2**26
_ITEM_SIZES = {
    **dict.fromkeys(("ByteStorage", "CharStorage", "BoolStorage", "UntypedStorage"), 1),
    **dict.fromkeys(("ShortStorage", "HalfStorage", "BFloat16Storage"), 2),
    **dict.fromkeys(("IntStorage", "FloatStorage"), 4),
    **dict.fromkeys(("LongStorage", "DoubleStorage", "ComplexFloatStorage"), 8),
    "ComplexDoubleStorage": 16,
}
#: Plain data besides tensors; nothing among them allocates more than it is given.
_PLAIN = {
    *("collections.OrderedDict", "collections.Counter", "collections.defaultdict"),
    *("torch.Size", "torch.device", "torch.serialization._get_layout", "_codecs.encode"),
    "torch._utils._rebuild_parameter",
    *("builtins.set", "builtins.complex", "__builtin__.set", "__builtin__.complex"),
}
_TENSORS = {f"torch._utils._rebuild_tensor{version}" for version in ("", "_v2", "_v3")}
_DTYPE = re.compile(r"(?:u?int|b?float|complex|bool)(\d*)\w*")


class PayloadError(ValueError):
    """A payload is not plain data of the size of its file; the message says why."""


class _Inert:
    """A stand-in for an object of plain data: accepts anything and keeps nothing."""

    __slots__ = ()

    def __call__(self, *arguments: Any) -> _Inert:
        return _Inert()

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class _Numbers(_Inert):
    """A stand-in for a class of storages, a storage or a dtype, with a number of bytes per element."""

    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size


class _Rebuild(_Inert):
    """A stand-in for the function that makes a tensor from a storage."""

    __slots__ = ("inspector",)

    def __init__(self, inspector: _Inspector) -> None:
        self.inspector = inspector

    def __call__(self, *arguments: Any) -> _Inert:
        return self.inspector.tensor(*arguments)


class _Inspector(pickle.Unpickler):
    """Reads the index of a payload and counts the bytes that its tensors show."""

    def __init__(self, index: bytes, records: dict[str, int]) -> None:
        super().__init__(io.BytesIO(index))
        self.records = records
        self.shown = 0

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _TENSORS:
            return _Rebuild(self)
        if module in ("torch", "torch.storage") and name in _ITEM_SIZES:
            return _Numbers(_ITEM_SIZES[name])
        if module == "torch" and (dtype := _DTYPE.fullmatch(name)):
            return _Numbers(max(1, int(dtype[1] or 8) // 8))
        if full in _PLAIN:
            return _Inert()
        raise PayloadError(f"it contains {full}, which is not plain data")

    def persistent_load(self, pid: Any) -> Any:
        match pid:
            case ("storage", _Numbers() as kind, str(key), str(), int(count)):
                record = self.records.get(f"data/{key}".lower())
                if record is None or count * kind.size != record:
                    raise PayloadError(
                        f"a storage declares {count * kind.size} bytes, its record has {record}"
                    )
                return _Numbers(kind.size)
        raise PayloadError("a storage is declared in an unknown way")

    def tensor(self, *arguments: Any) -> _Inert:
        match arguments:
            case (_Numbers() as storage, int(), tuple() as shape, tuple(), *rest):
                if not all(isinstance(side, int) and side >= 0 for side in shape):
                    raise PayloadError("a tensor has an invalid shape")
                dtype = next((argument for argument in rest if isinstance(argument, _Numbers)), storage)
                self.shown += math.prod(shape) * dtype.size
                return _Inert()
        raise PayloadError("a tensor is declared in an unknown way")


def check_payload(payload: bytes) -> None:
    """Refuse a payload that would take more memory than its size justifies."""
    try:
        index, records = _directory(payload)
        _check_memo(index)
        inspector = _Inspector(index, records)
        inspector.load()
    except PayloadError:
        raise
    except Exception as error:  # readers of damaged archives and pickles raise all kinds of errors
        raise PayloadError(
            f"it is not plain data as torch.save writes it ({type(error).__name__})"
        ) from error
    most = SHARED * len(payload) + EXPANDED
    if inspector.shown > most:
        raise PayloadError(
            f"its tensors would take {quantity(inspector.shown)}, and the limit for a file of {quantity(len(payload))}"
            f" is {quantity(most)}"
        )


def _directory(payload: bytes) -> tuple[bytes, dict[str, int]]:
    """The index, and the bytes of the records by their name without the name of the archive."""
    with zipfile.ZipFile(io.BytesIO(payload)) as archive:
        entries = archive.infolist()
        records: dict[str, int] = {}
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
                raise PayloadError(f"its record {entry.filename} is compressed, which bltoolbox never writes")
            # torch looks names up without regard to case.
            name = entry.filename.partition("/")[2].lower()
            if name in records:
                raise PayloadError(f"its record {name} occurs twice")
            records[name] = entry.file_size
        if (
            sum(records.values()) > len(payload)
            or len({entry.filename.partition("/")[0] for entry in entries}) != 1
        ):
            raise PayloadError("its records overlap or belong to several archives")
        if records.get("data.pkl", 0) > CHECKPOINT_INDEX.most:
            raise PayloadError(
                f"its index has {quantity(records['data.pkl'])}, and the limit for {CHECKPOINT_INDEX.what} is"
                f" {CHECKPOINT_INDEX}"
            )
        if "byteorder" in records and archive.read(_named(entries, "byteorder")) != b"little":
            raise PayloadError("it was written with another byte order")
        return archive.read(_named(entries, "data.pkl")), records


def _named(entries: list[zipfile.ZipInfo], name: str) -> zipfile.ZipInfo:
    return next(entry for entry in entries if entry.filename.partition("/")[2].lower() == name)


def _check_memo(index: bytes) -> None:
    """The unpickler makes room for the largest number of its memo, and for a text of any declared length."""
    for opcode, argument, _ in pickletools.genops(index):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and not 0 <= int(argument or 0) <= len(index):
            raise PayloadError("its memo is larger than its index")
