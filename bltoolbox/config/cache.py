"""Signatures on disk, so that ``validate`` and ``show`` need not import torch a second time.

An entry contains the hashes of the files it was read from (the class, its bases, its settings) and is valid only
while they are unchanged. A cache that cannot be read or written is silently ignored.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bltoolbox
from bltoolbox.config.reading import open_file, read_json
from bltoolbox.config.signatures import Signature
from bltoolbox.errors import MissingError

#: Increase it whenever the description of an unchanged class changes.
FORMAT = 3


def cache_folder() -> Path:
    """``$BLT_CACHE``, else ``$XDG_CACHE_HOME/bltoolbox``, else ``~/.cache/bltoolbox``."""
    if own := os.environ.get("BLT_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "bltoolbox"


def cached_signature(target: str, load: Callable[[], type[Any]], owner: str) -> Signature:
    """The signature of a component, from the cache if its files are unchanged, else from the imported class.

    ``owner`` is its name in messages.
    """
    module = target.partition(":")[0]
    # A class imported before its file was edited is described but not cached.
    fresh = module not in sys.modules or _untouched(module)
    entry = _entry(target)
    if entry is not None and (signature := _read(entry)) is not None:
        return signature
    from bltoolbox.config.describe import Undescribable, describe

    cls = load()
    try:
        signature = describe(cls)
    except Undescribable as error:
        raise MissingError(f"{owner} cannot be used: {error}") from error
    if entry is not None and fresh:
        files = {file: _digest(file) for file in _files(cls)}
        write_entry(entry, {"files": files, "signature": signature.to_json()})
    return signature


def remembered_signature(target: str) -> Signature | None:
    """The signature of a component if it is cached; never imports the component."""
    entry = _entry(target)
    return None if entry is None else _read(entry)


def _source(module: str) -> str | None:
    """The file of a module, which is not imported; its parent packages are, and are light by contract."""
    try:
        spec = importlib.util.find_spec(module)
    except (Exception, SystemExit):
        return None  # importing it will report the reason
    return spec.origin if spec is not None and spec.has_location else None


def _untouched(module: str) -> bool:
    """Whether an imported module still matches its file: a component is imported after this package."""
    file = getattr(sys.modules.get(module), "__file__", None)
    try:
        return file is not None and os.path.getmtime(file) < bltoolbox.IMPORTED_AT
    except OSError:
        return False


def _entry(target: str) -> Path | None:
    source = _source(target.partition(":")[0])
    if source is None:
        return None
    key = json.dumps([FORMAT, sys.version_info[:2], target, os.path.abspath(source)])
    return cache_folder() / "signatures" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _read(entry: Path) -> Signature | None:
    try:
        data = read_json(entry)
        files: dict[str, str] = data["files"]
        if not files or any(_digest(file) != digest for file, digest in files.items()):
            return None
        return Signature.from_json(data["signature"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def write_entry(entry: Path, content: Any) -> None:
    """Replace a file of the cache atomically; nothing happens where that is impossible."""
    try:
        text = json.dumps(content)
        entry.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=entry.parent, suffix=".tmp")
    except (OSError, TypeError, ValueError):
        return
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, entry)
    except OSError:
        Path(name).unlink(missing_ok=True)


def _files(cls: type[Any]) -> set[str]:
    """The files whose change may change the signature."""
    modules = {base.__module__ for base in _classes(cls)} | {__package__ + ".describe"}
    files = (getattr(sys.modules.get(module), "__file__", None) for module in modules)
    return {file for file in files if file}


def _classes(cls: type[Any]) -> Iterator[type[Any]]:
    from bltoolbox.config.describe import nested_settings

    for base in cls.__mro__:
        if base.__module__ not in sys.stdlib_module_names:
            yield base
    for settings in nested_settings(cls):
        yield from _classes(settings)


def _digest(file: str) -> str:
    with open_file(file) as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
