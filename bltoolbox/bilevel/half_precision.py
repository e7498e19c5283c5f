"""Rows in half the bytes: float16 mantissas with one power of two per row.

    row = 2^e · q,   e the exponent of max |row|,   q in float16, |q| < 1

Entries keep 11 bits relative to the largest of their row, whatever its size; plain float16 would lose adjoints below
6e-8. Powers of two make the way back exact: rows that were rounded once stay the same through any number of
checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Shorter rows, such as the constants of an error bound, take no room and stay as they are.
SHORTEST = 64


def is_halved(rows: Tensor) -> bool:
    """Whether rows like these are stored in half precision."""
    return rows.is_floating_point() and rows.dtype.itemsize > 2 and rows.shape[1:].numel() >= SHORTEST


def halve(rows: Tensor) -> tuple[Tensor, Tensor]:
    """q and e of each row."""
    largest = rows.abs().amax(dim=tuple(range(1, rows.ndim)))
    exponents = torch.frexp(largest).exponent
    return _scaled(rows, -exponents).half(), exponents.to(torch.int16)


def restored(halves: Tensor, exponents: Tensor) -> Tensor:
    """The rows, in float32."""
    return _scaled(halves.float(), exponents.int())


def _scaled(rows: Tensor, exponents: Tensor) -> Tensor:
    return torch.ldexp(rows, exponents.view(-1, *(1,) * (rows.ndim - 1)))
