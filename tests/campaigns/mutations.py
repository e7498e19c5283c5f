"""Mutations of files: of their bytes, and of what the bytes mean, put together again with lengths and checksums right.

Everything is drawn from the generator that is passed, so that a case can be repeated by its number.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import csv
import hashlib
import io
import json
import random
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from bltoolbox.training.checkpoint import MAGIC

#: Takes the bytes of a file and gives those of another.
Mutation = Callable[[bytes, random.Random], bytes]

NUMBERS: list[Any] = [
    0, 1, -1, 2, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 10**400,
    0.0, -0.0, 0.5, -1.5, 1e-320, 1e300, float("inf"), float("-inf"), float("nan"),
]  # fmt: skip
WORDS = [
    "",
    "x",
    "name",
    "foe",
    "\x00",
    "\ufeff",
    "é𝔘",
    "../../outside",
    "/dev/zero",
    "nan",
    "1e999",
    "9" * 400,
    "a" * 5000,
]


def values() -> list[Any]:
    """Of every type, to be put where another is expected; new ones each time, as they are changed."""
    deep: Any = []
    for _ in range(60):
        deep = [deep]
    return [*NUMBERS, *WORDS, None, True, False, [], {}, [[]], {"": {}}, [1, "x"], {"name": "tv"}, deep]


def of_bytes(data: bytes, chance: random.Random, pieces: Sequence[bytes] = ()) -> bytes:
    """Bits turned over, bytes lost, doubled and put in; numbers of any size at any place."""
    found = bytearray(data)
    for _ in range(chance.choice([1, 1, 1, 2, 4, 16])):
        place = chance.randrange(len(found) + 1)
        stop = min(len(found), place + chance.choice([1, 2, 4, 8, 40, 1000]))
        match chance.randrange(8):
            case 0 if place < len(found):
                found[place] ^= 1 << chance.randrange(8)
            case 1 if place < len(found):
                found[place] = chance.choice([0, 1, 0x7F, 0x80, 0xFF])
            case 2:
                del found[place:]
            case 3:
                del found[place:stop]
            case 4:
                found[place:place] = found[place:stop] * chance.choice([1, 2, 50])
            case 5:
                size = chance.choice([2, 4, 8])
                number = int(chance.choice([0, 1, 2**31 - 1, 2**31, 2**63 - 1, -1])) % 256**size
                found[place : place + size] = number.to_bytes(size, chance.choice(["little", "big"]))
            case 6 if pieces:
                found[place:stop] = chance.choice(pieces)
            case _:
                other = chance.randrange(len(found) + 1)
                found[place:stop] = found[other : other + chance.choice([1, 8, 200])]
    return bytes(found)


def of_data(data: Any, chance: random.Random) -> Any:
    """Plain data of which a few places hold something else, are lost or have another name."""
    holder = [copy.deepcopy(data)]
    for _ in range(chance.choice([1, 1, 2, 3])):
        container, key = chance.choice(list(_places(holder)))
        value = container[key]
        match chance.randrange(6):
            case 0 if container is not holder and isinstance(container, dict):
                del container[key]
            case 1 if container is not holder and isinstance(container, dict):
                container[chance.choice(WORDS)] = container.pop(key)
            case 2 if isinstance(value, list):
                value.extend(copy.deepcopy(value) * chance.choice([1, 3]))
            case 3:
                container[key] = chance.choice([[value], {"value": value}, str(value), [value] * 3])
            case 4 if isinstance(value, Tensor):
                container[key] = chance.choice(
                    [value.flatten(), value.long(), value.flatten()[:0], value * float("nan"), value[None]]
                )
            case _:
                container[key] = chance.choice(values())
    return holder[0]


def _places(data: Any) -> Any:
    """Every container and key in plain data."""
    if isinstance(data, dict | list):
        for key in list(data) if isinstance(data, dict) else range(len(data)):
            yield data, key
            yield from _places(data[key])


def of_json(data: bytes, chance: random.Random) -> bytes:
    return json.dumps(of_data(json.loads(data), chance), default=str).encode(errors="surrogatepass")


def of_lines(data: bytes, chance: random.Random) -> bytes:
    """JSON lines, one of them changed."""
    lines = data.splitlines()
    place = chance.randrange(len(lines))
    lines[place] = of_json(lines[place], chance)
    chance.shuffle(lines)
    return b"\n".join(lines)


def of_yaml(data: bytes, chance: random.Random) -> bytes:
    return yaml.safe_dump(of_data(yaml.safe_load(data), chance), allow_unicode=True).encode(errors="replace")


def of_csv(data: bytes, chance: random.Random) -> bytes:
    rows = of_data(list(csv.reader(io.StringIO(data.decode()))), chance)
    text = io.StringIO()
    csv.writer(text).writerows(row if isinstance(row, list) else [row] for row in (rows or []))
    return text.getvalue().encode()


def of_npy(data: bytes, chance: random.Random) -> bytes:
    """Another header: type, order and shape."""
    size = struct.unpack("<H", data[8:10])[0]
    header = ast.literal_eval(data[10 : 10 + size].decode())
    kinds = [
        "|O",
        "<f8",
        ">f4",
        "<f2",
        "<u2",
        "|u1",
        "<i8",
        "<c16",
        "<U3",
        "|V7",
        "<M8[s]",
        "|b1",
        "x",
        [("a", "<f4")],
    ]
    shapes: list[Any] = [
        (),
        (0,),
        (2**40, 2**40, 3),
        (2**62,),
        (-1, 4, 4),
        (1,) * 70,
        (10**30,),
        (3, 3),
        "x",
        (2.5,),
    ]
    match chance.randrange(4):
        case 0:
            header["descr"] = chance.choice(kinds)
        case 1:
            header["shape"] = chance.choice(shapes)
        case 2:
            header["descr"], header["shape"] = chance.choice(kinds), chance.choice(shapes)
        case _:
            header = of_data({**header, "shape": list(header["shape"])}, chance)
    text = repr(header).encode() + b"\n"
    return data[:8] + struct.pack("<H", len(text) % 65536) + text + data[10 + size :]


def of_safetensors(data: bytes, chance: random.Random) -> bytes:
    """Another header, another recipe in it, or other numbers."""
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    kind = chance.randrange(3)
    if kind == 0:
        numbers = bytearray(data[8 + size :])
        place = 4 * chance.randrange(len(numbers) // 4)
        numbers[place : place + 4] = struct.pack(
            "<f", chance.choice([0, -1, 1e-30, 1e30, float("nan"), float("inf")])
        )
        return data[: 8 + size] + bytes(numbers)
    if kind == 1:
        changed = of_data(json.loads(header["__metadata__"]["recipe"]), chance)
        header["__metadata__"]["recipe"] = json.dumps(changed, default=str)
    else:
        header = of_data(header, chance)
    text = json.dumps(header, default=str).encode(errors="surrogatepass")
    return struct.pack("<Q", len(text)) + text + data[8 + size :]


def signed(payload: bytes) -> bytes:
    """A checkpoint file around any payload, its checksum right."""
    return MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload


def of_checkpoint(data: bytes, chance: random.Random) -> bytes:
    """Other content with the right checksum."""
    payload = data[len(MAGIC) :].partition(b"\n")[2]
    if chance.random() < 0.3:
        return signed(of_bytes(payload, chance))
    content = torch.load(io.BytesIO(payload), weights_only=True)
    changed = of_data(content, chance)
    # What its state means inside only a component knows, and no file that it wrote has it otherwise.
    for name in ("optimizer", "sampler"):
        with contextlib.suppress(KeyError, TypeError):
            if isinstance(changed["content"]["run"][name], dict):
                changed["content"]["run"][name] = content["content"]["run"][name]
    buffer = io.BytesIO()
    torch.save(changed, buffer)
    return signed(buffer.getvalue())


def of_png(data: bytes, chance: random.Random) -> bytes:
    """Chunks changed, lost, doubled and in another order, their checksums right."""
    chunks, place = [], 8
    while place + 8 <= len(data):
        size = struct.unpack(">I", data[place : place + 4])[0]
        chunks.append([data[place + 4 : place + 8], data[place + 8 : place + 8 + size]])
        place += 12 + size
    number = chance.randrange(len(chunks))
    match chance.randrange(5):
        case 0:
            chunks.insert(chance.randrange(len(chunks)), list(chunks[number]))
        case 1:
            del chunks[number]
        case 2:
            kind = chance.choice(
                [b"tRNS", b"PLTE", b"zTXt", b"iCCP", b"eXIf", b"acTL", b"fcTL", b"fdAT", b"gAMA"]
            )
            bomb = b"x\x00\x00" + zlib.compress(bytes(3_000_000))
            chunks.insert(1, [kind, chance.choice([b"", chance.randbytes(20), bomb])])
        case 3:
            head = chunks[0]
            sides = [0, 1, 7, 2**15, 2**20, 2**31 - 1, 2**32 - 1]
            bits = bytes(chance.choice([0, 1, 2, 3, 4, 6, 8, 16, 255]) for _ in range(5))
            head[1] = struct.pack(">II", chance.choice(sides), chance.choice(sides)) + bits
        case _:
            chunks[number][1] = of_bytes(chunks[number][1], chance)
    body = (struct.pack(">I", len(c)) + k + c + struct.pack(">I", zlib.crc32(k + c)) for k, c in chunks)
    return data[:8] + b"".join(body)


def of_tiff(data: bytes, chance: random.Random) -> bytes:
    """Tags of the first directory changed: their number, type, count or value."""
    found = bytearray(data)
    order = "<" if data[:2] == b"II" else ">"
    start = struct.unpack(order + "I", data[4:8])[0]
    count = struct.unpack(order + "H", data[start : start + 2])[0]
    for _ in range(chance.randint(1, 3)):
        entry = start + 2 + 12 * chance.randrange(count)
        offset, kind = chance.choice([(0, "H"), (2, "H"), (4, "I"), (8, "I")])
        numbers = [0, 1, 2, 3, 5, 8, 16, 32, 256, 259, 273, 65535, len(data)] + [2**31, 2**32 - 1] * (
            kind == "I"
        )
        struct.pack_into(order + kind, found, entry + offset, chance.choice(numbers))
    return bytes(found)


def of_jpeg(data: bytes, chance: random.Random) -> bytes:
    """Segments before the scan changed, lost, doubled and put in, their lengths right."""
    place, segments = 2, []
    while data[place : place + 2] != b"\xff\xda":
        size = struct.unpack(">H", data[place + 2 : place + 4])[0]
        segments.append([data[place : place + 2], data[place + 4 : place + 2 + size]])
        place += 2 + size
    number = chance.randrange(len(segments))
    match chance.randrange(4):
        case 0:
            segments.insert(number, list(segments[number]))
        case 1:
            del segments[number]
        case 2:
            exif = b"Exif\x00\x00II*\x00\x08\x00\x00\x00" + chance.randbytes(40)
            kinds = [b"\xff\xe1", b"\xff\xe2", b"\xff\xee", b"\xff\xc2", b"\xff\xdd"]
            segments.insert(0, [chance.choice(kinds), chance.choice([exif, chance.randbytes(30)])])
        case _:
            segments[number][1] = of_bytes(segments[number][1], chance)[:65000]
    body = (mark + struct.pack(">H", len(content) + 2) + content for mark, content in segments)
    return data[:2] + b"".join(body) + data[place:]


def of_hdf5(data: bytes, chance: random.Random) -> bytes:
    """One dataset replaced by another of any shape, type and storage, or by something else."""
    import h5py

    shapes = [(), (0, 12, 12), (4,), (4, 12), (3, 12, 12), (4, 12, 13), (2**40, 12, 12), (4, 2**20, 2**20)]
    kinds = ["u1", ">u2", "i8", "f2", ">f8", "c16", "?", "S4", "M8[s]", [("a", "f4")], h5py.string_dtype()]
    file = io.BytesIO(data)
    with h5py.File(file, "r+") as root:
        name = chance.choice(["low", "masks"])
        shape = chance.choice([root[name].shape, root[name].shape, *shapes])
        del root[name]
        match chance.randrange(8):
            case 7:
                root.create_dataset(
                    name, (4, 12, 12), "u1", chunks=(1, 12, 12), compression=chance.choice(["gzip", "lzf"])
                )
                chunks = [
                    b"",
                    b"\x00a",
                    zlib.compress(b"few"),
                    zlib.compress(bytes(2**24)),
                    chance.randbytes(144),
                ]
                root[name].id.write_direct_chunk((0, 0, 0), chance.choice(chunks), chance.choice([0, 1]))
            case 0:
                root.create_group(name)
            case 1:
                root[name] = chance.choice([h5py.SoftLink("/other"), h5py.ExternalLink("/etc/passwd", "/x")])
            case 2:
                root.create_dataset(name, shape, "u1", external=[("/etc/passwd", 0, h5py.h5f.UNLIMITED)])
            case 3:
                layout = h5py.VirtualLayout((4, 12, 12), "u1")
                layout[:] = h5py.VirtualSource("/etc/passwd", "x", (4, 12, 12))
                root.create_virtual_dataset(name, layout)
            case 4:
                root.create_dataset(name, shape, chance.choice(kinds))
            case 5:
                chunk = chance.choice([(1, 12, 12), (4, 1, 1), (4, 2**14, 2**13), (1, 2**15, 2**14)])
                root.create_dataset(
                    name, (4, 2**15, 2**14), "u1", chunks=chunk, compression=chance.choice(["gzip", "lzf"])
                )
            case _:
                root[name] = np.full((4, 12, 12), chance.choice([float("nan"), 1e300, -1.0]))
    return file.getvalue()
