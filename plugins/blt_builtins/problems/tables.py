"""Tables of examples, generated or from files, and their division into training, validation and test rows.

Generated features are drawn from a standard normal distribution. Only the first ``relevant`` of them matter, so
that one ridge for all features is a poor choice:

    regression   b = ⟨a, x*⟩ + σ n,            x*_j ~ N(0, 1) for j ≤ relevant, else 0,   n ~ N(0, 1)
    two classes  b = sign(⟨a, x*⟩ + σ n)
    classes      b = argmax_c (⟨a, x*_c⟩ + σ n_c)

The seed determines everything, in float64 on the CPU. Nothing is scaled or centred: the columns of files
should have means of 0 and similar variances.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from bltoolbox.plugin import GENERATED, RECORDED, keyed_generator, read_array

#: Sums of squares of such numbers are still finite in float64.
_LARGEST = 1e100


@dataclass(frozen=True)
class Generated:
    """Generated examples.

    Args:
        examples: Number of rows of the table.
        features: Number of columns.
        relevant: Number of columns that matter.
        noise: σ, the size of errors.
        seed: Seed of the draw.
    """

    examples: Annotated[int, Gt(0)] = 400
    features: Annotated[int, Gt(0)] = 40
    relevant: Annotated[int, Gt(0)] = 5
    noise: Annotated[float, Ge(0)] = 1.0
    seed: Annotated[int, Ge(0)] = 0


@dataclass(frozen=True)
class GeneratedClasses:
    """Generated examples of several classes.

    Args:
        examples: Number of rows of the table.
        features: Number of columns.
        relevant: Number of columns that matter.
        classes: Number of classes.
        noise: σ, the size of errors.
        seed: Seed of the draw.
    """

    examples: Annotated[int, Gt(0)] = 400
    features: Annotated[int, Gt(0)] = 40
    relevant: Annotated[int, Gt(0)] = 5
    classes: Annotated[int, Ge(2)] = 4
    noise: Annotated[float, Ge(0)] = 1.0
    seed: Annotated[int, Ge(0)] = 0


@dataclass(frozen=True)
class Files:
    """Examples in two .npy files.

    Args:
        inputs: File with an array (N, p), one row for each example.
        targets: File with an array (N,): numbers, or the numbers of classes from 0.
        seed: Seed of the division into training, validation and test rows.
    """

    inputs: Path
    targets: Path
    seed: Annotated[int, Ge(0)] = 0


@dataclass(frozen=True)
class Table:
    """Features (N, p) and targets (N,), in float64."""

    features: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Split:
    """The numbers of the rows of each part of a table."""

    training: Tensor
    validation: Tensor
    test: Tensor


def draw(source: Generated | GeneratedClasses, columns: int, answer: Callable[[Tensor], Tensor]) -> Table:
    """A table whose targets are the ``answer`` to noisy predictions (N, columns)."""
    generator = keyed_generator("table", source.seed)
    if source.relevant > source.features:
        raise ValueError(f"relevant is {source.relevant}, but there are only {source.features} features")
    GENERATED.check("the recipe", 8 * (source.examples + source.relevant) * (source.features + columns))
    features = _normal(generator, source.examples, source.features)
    truth = _normal(generator, source.relevant, columns)
    noise = source.noise * _normal(generator, source.examples, columns)
    return Table(features, answer(features[:, : source.relevant] @ truth + noise))


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def read(files: Files) -> Table:
    """The arrays of two files; a ValueError if they are not a table."""
    features, targets = (
        torch.from_numpy(read_array(path, RECORDED).astype("float64"))
        for path in (files.inputs, files.targets)
    )
    if features.ndim != 2 or targets.ndim != 1 or len(features) != len(targets):
        shapes = " and ".join(str(tuple(values.shape)) for values in (features, targets))
        raise ValueError(f"expected arrays of shapes (N, p) and (N,), got {shapes}")
    if not bool(torch.isfinite(features).all() & torch.isfinite(targets).all()):
        raise ValueError("the arrays contain NaN or infinite numbers; remove these rows")
    if (
        most := max(
            (float(values.abs().max()) for values in (features, targets) if values.numel()), default=0
        )
    ) > _LARGEST:
        raise ValueError(
            f"the arrays contain numbers up to {most:.3g}, whose squares overflow; scale the columns"
        )
    return Table(features, targets)


def class_count(table: Table) -> int:
    """The number of classes of a table; a ValueError if targets are not the numbers of classes."""
    values = table.targets.unique()
    count = len(values)  # whatever the largest number is
    if count < 2 or not torch.equal(values, torch.arange(count, dtype=values.dtype)):
        raise ValueError(
            "targets must be the numbers of classes, from 0 and without gaps, of at least two classes"
        )
    return count


def divide(table: Table, validation: float, test: float, seed: int) -> Split:
    """Rows in random order: those of training, then the given shares for validation and test."""
    count = len(table.targets)
    order = torch.randperm(count, generator=keyed_generator("split", seed))
    held, tested = math.floor(validation * count), math.floor(test * count)
    if count - held - tested < 1:
        raise ValueError(
            f"validation {validation:g} and test {test:g} leave none of the {count} examples for training"
        )
    training = count - held - tested
    return Split(order[:training], order[training : training + held], order[training + held :])


def folds_of(rows: Tensor, folds: int) -> list[tuple[Tensor, Tensor]]:
    """Each fold left out once: the other rows, and its own."""
    if folds > len(rows):
        raise ValueError(f"folds is {folds}, but there are only {len(rows)} training examples")
    parts = rows.tensor_split(folds)
    return [(torch.cat([*parts[:k], *parts[k + 1 :]]), parts[k]) for k in range(folds)]
