"""The examples that tasks are made of: rows of features and targets, of equal number for all tasks of a chunk.

    Σ_k w_k ℓ(⟨a_k, x⟩; b_k),        w_k = 1/n on the n rows of a task and 0 on the rows that fill it up

Block j contains every ``blocks``-th row, with weights ``blocks``·w_k, so that the mean over blocks is the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

#: Relative error of eigenvalues computed in float64, generously.
_ROUNDING = 1e-10


@dataclass(frozen=True)
class Examples:
    """Rows of B tasks: features (B, n, p), targets, weights and numbers in the table (B, n).

    ``spectrum`` (B, 2) contains valid bounds of the eigenvalues of Σ_k w_k a_k a_kᵀ from below and from above, and
    ``block_spectra`` (B, blocks, 2) those of every block.
    """

    features: Tensor
    targets: Tensor
    weights: Tensor
    rows: Tensor
    spectrum: Tensor
    block_spectra: Tensor

    @property
    def blocks(self) -> int:
        return self.block_spectra.shape[1]

    def __len__(self) -> int:
        return len(self.features)

    def take(self, index: Tensor) -> Examples:
        """Of some of the tasks."""
        return Examples(*(getattr(self, name)[index] for name in self.__dataclass_fields__))

    def block(self, j: Tensor) -> Examples:
        """Block j of each task."""
        tasks = torch.arange(len(self), device=self.features.device)
        j = j.to(tasks)
        spectrum = self.block_spectra[tasks, j]
        rows = (
            self._rows_of_block(values, tasks, j) for values in (self.features, self.targets, self.weights)
        )
        features, targets, weights = rows
        return Examples(
            features,
            targets,
            weights * self.blocks,
            self._rows_of_block(self.rows, tasks, j),
            spectrum,
            spectrum.unsqueeze(1),
        )

    def _rows_of_block(self, values: Tensor, tasks: Tensor, j: Tensor) -> Tensor:
        return values.unflatten(1, (-1, self.blocks))[tasks, :, j]


def collect(features: Tensor, targets: Tensor, rows: Sequence[Tensor], blocks: int = 1) -> Examples:
    """Tasks from the table (N, p) of features and (N,) of targets; one tensor of row numbers for each task."""
    least = min(len(numbers_of_task) for numbers_of_task in rows)
    if blocks > least:
        raise ValueError(f"blocks is {blocks}, but a task has only {least} examples; choose at most {least}")
    count = -(-max(len(numbers_of_task) for numbers_of_task in rows) // blocks) * blocks
    numbers = torch.stack(
        [
            torch.cat([numbers_of_task, numbers_of_task.new_zeros(count - len(numbers_of_task))])
            for numbers_of_task in rows
        ]
    )
    weights = features.new_zeros(len(rows), count)
    for task, numbers_of_task in enumerate(rows):
        weights[task, : len(numbers_of_task)] = 1 / len(numbers_of_task)
    empty = features.new_zeros(len(rows), blocks, 2)
    examples = Examples(features[numbers], targets[numbers], weights, numbers, empty[:, 0], empty)
    return with_spectra(examples, blocks)


def with_spectra(examples: Examples, blocks: int) -> Examples:
    """With the eigenvalue bounds of all rows and of each block."""
    whole = spectrum(examples.features, examples.weights)
    if blocks == 1:
        return replace(examples, spectrum=whole, block_spectra=whole.unsqueeze(1))
    features, weights = (
        values.unflatten(1, (-1, blocks)).transpose(1, 2) for values in (examples.features, examples.weights)
    )
    each = spectrum(features.flatten(0, 1), weights.flatten(0, 1) * blocks)
    return replace(examples, spectrum=whole, block_spectra=each.unflatten(0, (-1, blocks)))


def spectrum(features: Tensor, weights: Tensor) -> Tensor:
    """Bounds of the eigenvalues of Σ_k w_k a_k a_kᵀ of each task, (B, 2)."""
    n, p = features.shape[1:]
    scaled = features.detach().double() * weights.double().sqrt().unsqueeze(-1)
    gram = scaled.mT @ scaled if p <= n else scaled @ scaled.mT
    values = torch.linalg.eigvalsh(gram)
    margin = 4 * torch.finfo(features.dtype).eps + _ROUNDING
    most = values[:, -1] * (1 + margin)
    # With fewer rows than features, the matrix is singular.
    least = (values[:, 0] - margin * most).clamp_min(0) if p <= n else torch.zeros_like(most)
    return torch.stack([least, most], 1).to(features.dtype)
