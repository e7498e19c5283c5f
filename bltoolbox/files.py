"""Writing files so that a reader never sees half of one."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_bytes(path: Path, content: bytes) -> None:
    """Replace ``path`` atomically: write beside it, flush to disk, rename."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # mkstemp makes files that only their owner can read
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_text(path: Path, content: str) -> None:
    """Replace ``path`` atomically."""
    write_bytes(path, content.encode())


def write_json(path: Path, content: Any) -> None:
    """Replace ``path`` atomically with JSON that a person can read."""
    write_text(path, json.dumps(finite(content), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def finite(data: Any, word: Callable[[float], str | None] = lambda number: None) -> Any:
    """Data for JSON, which has no infinite numbers: null, or a word for them. The PSNR of a perfect image is one."""
    if isinstance(data, dict):
        return {key: finite(value, word) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value, word) for value in data]
    return word(data) if isinstance(data, float) and not math.isfinite(data) else data
