"""Inverses of millions of tiny positive definite blocks, on whole planes: much faster than LAPACK, and without pivots.

    A⁻¹ = adj(A) / det(A) for three channels,        by Gauss–Jordan elimination otherwise

The adjugate of a 3×3 block consists of 2×2 minors, with rows and columns counted cyclically. Its relative error is that
of rounding times the condition number, which is at most 1e4 where this is used. On a CPU each of its six different
entries is a plane of its own, which fits into the cache; on a GPU all nine are made at once, in a few launches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bltoolbox.bilevel.tensors import Constant

#: The entries of a 3×3 block with rows and columns 0, 1, 2, 0, 1, so that minors have neighbouring factors.
_CYCLE = Constant(torch.tensor([3 * i + j for i in (0, 1, 2, 0, 1) for j in (0, 1, 2, 0, 1)]))


def inverted(blocks: Tensor) -> Tensor:
    """The inverses of symmetric positive definite blocks (B, C, C, …), which are overwritten."""
    channels = blocks.shape[1]
    if channels == 1:
        return blocks.reciprocal_()
    if channels == 3:
        return _by_planes(blocks) if blocks.device.type == "cpu" else _by_minors(blocks)
    return _eliminated(blocks)


def _by_planes(blocks: Tensor) -> Tensor:
    a, b, c, d, e, f = (blocks[:, i, j] for i in range(3) for j in range(i, 3))
    minors = [
        torch.addcmul(d * f, e, e, value=-1),
        torch.addcmul(c * e, b, f, value=-1),
        torch.addcmul(b * e, c, d, value=-1),
        torch.addcmul(a * f, c, c, value=-1),
        torch.addcmul(b * c, a, e, value=-1),
        torch.addcmul(a * d, b, b, value=-1),
    ]
    over = torch.mul(a, minors[0]).addcmul_(b, minors[1]).addcmul_(c, minors[2]).reciprocal_()
    places = [(i, j) for i in range(3) for j in range(i, 3)]
    for (i, j), minor in zip(places, minors, strict=True):
        torch.mul(minor, over, out=blocks[:, i, j])
        if i != j:
            blocks[:, j, i] = blocks[:, i, j]
    return blocks


def _by_minors(blocks: Tensor) -> Tensor:
    cyclic = blocks.flatten(1, 2).index_select(1, _CYCLE.beside(blocks)).unflatten(1, (5, 5))
    here, there = slice(1, 4), slice(2, 5)
    adjugate = torch.addcmul(
        cyclic[:, here, here] * cyclic[:, there, there],
        cyclic[:, here, there],
        cyclic[:, there, here],
        value=-1,
    )
    return adjugate.div_((blocks[:, :1] * adjugate[:, :1]).sum(2, keepdim=True))


def _eliminated(blocks: Tensor) -> Tensor:
    for k in range(blocks.shape[1]):
        row, column = blocks[:, k].clone(), blocks[:, :, k].clone()
        pivot = row[:, k].reciprocal()
        row[:, k], column[:, k] = 1.0, -1.0
        blocks[:, k] = 0.0
        blocks[:, :, k] = 0.0
        blocks.sub_(column.unsqueeze(2) * (row * pivot.unsqueeze(1)).unsqueeze(1))
    return (blocks + blocks.transpose(1, 2)) / 2
