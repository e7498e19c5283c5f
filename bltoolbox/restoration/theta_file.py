"""θ files: the tensors in safetensors, and in its metadata the resolved recipe and what else θ is for.

Nothing in such a file can execute.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import bltoolbox
from bltoolbox.bilevel.records import Theta
from bltoolbox.config.reading import THETA, THETA_HEADER, file_size, open_file, parse_json
from bltoolbox.errors import BltError
from bltoolbox.restoration.metrics import UNIT, Range
from bltoolbox.restoration.shipped import find_model

if TYPE_CHECKING:
    from bltoolbox.config.recipe import Recipe


#: Entries from which a tensor is one of a network.
_MANY = 1000


def encode(
    theta: Theta, recipe: Recipe, span: Range | None = UNIT, shape: Sequence[int] | None = None
) -> bytes:
    """The bytes of a θ file; ``span`` is the range of values and ``shape`` that of the images that θ is for, None where
    it is not for images."""
    from safetensors.torch import save

    tensors = {name: value.detach().cpu().contiguous() for name, value in theta.items()}
    # A model does not need the loggers of its training.
    settings = {key: value for key, value in recipe.to_dict().items() if key != "loggers"}
    metadata = {"bltoolbox": bltoolbox.__version__, "recipe": json.dumps(settings)}
    if span is not None:
        metadata["range"] = json.dumps([float(value) for value in span])
    if shape is not None:
        metadata["shape"] = json.dumps(list(shape))
    return _in_order(save(tensors, metadata))


def _in_order(content: bytes) -> bytes:
    """The same safetensors file with its metadata sorted: the library writes them in an order that is random."""
    start = 8 + int.from_bytes(content[:8], "little")
    header = parse_json(content[8:start], "θ")
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # tensors begin at a multiple of eight bytes
    return len(text).to_bytes(8, "little") + text + content[start:]


def halved(theta: Theta) -> dict[str, Tensor]:
    """θ with its large tensors in half precision, for files; ``one_precision`` takes that back. Tensors that would
    overflow stay as they are."""
    largest = torch.finfo(torch.float16).max
    return {
        name: value.half() if value.numel() >= _MANY and float(value.abs().max()) <= largest else value
        for name, value in theta.items()
    }


def read_range(metadata: Mapping[str, Any], source: Path | str) -> Range:
    """The range of values of the images that θ is for; files of earlier versions have none, and mean [0, 1]."""
    if "range" not in metadata:
        return UNIT
    try:
        low, high = map(float, parse_json(metadata["range"], source))
    except (TypeError, ValueError, OverflowError):
        low = high = 0.0
    if not -math.inf < low < high < math.inf:
        raise BltError(f"{source}: its range of values is damaged, so it cannot be used")
    return low, high


def read_theta(source: Path | str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and metadata of a θ file, of the one in a run directory, or of a shipped model."""
    from safetensors import SafetensorError, safe_open

    path = find_model(source)
    _check_theta_file(path, follow=not Path(source).is_dir())
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise BltError(f"{path}: is not a readable θ file ({error})") from error


def _check_theta_file(path: Path, follow: bool) -> None:
    """Refuse a file that is too large, or whose header claims to be; links only where the user named the file."""
    try:
        with open_file(path, follow=follow) as file:
            size, header = file_size(file), int.from_bytes(file.read(8), "little")
            THETA.check(path, size)
            if header > size - 8:
                raise BltError(f"{path}: is not a readable θ file (its header is longer than the file)")
            THETA_HEADER.check(path, header)
    except OSError as error:
        raise BltError(f"{path}: is not a readable θ file ({error.strerror or error})") from error


def one_precision(theta: Theta, otherwise: torch.dtype) -> dict[str, Tensor]:
    """θ in the precision it has, or in that of its recipe: torch computes with one at a time, and hardly with
    half."""
    kinds = {value.dtype for value in theta.values()}
    if kinds in ({torch.float32}, {torch.float64}) or not all(kind.is_floating_point for kind in kinds):
        return dict(theta)
    return {name: value.to(otherwise) for name, value in theta.items()}
