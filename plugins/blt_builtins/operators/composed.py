"""Operators one after the other.

    A x = A_n … A_2 A_1 x,        Aᵀ y = A_1ᵀ A_2ᵀ … A_nᵀ y

The first of `parts` acts on the image, each other one on what the one before it measures, so that their shapes must
follow from each other. Parameters of the parts are learned together, under the positions of the parts, counted from 0:
the kernel of the first part is `operator.0.log_kernel`. All parts see the same context. Noise acts where the last part
measures.

‖A‖² ≤ Π ‖A_k‖², and the smallest eigenvalue of AᵀA is at least the product of those of the parts: both bounds are the
products of the bounds of the parts, the upper one unknown where one of them is, the lower one 0 where one of them is.
A solve starts from the starts of the parts, the last part first.

When to choose it: a chain of physical effects, such as the blur of a lens before the pixels of a sensor (blur, then
downsampling), or a motion before an incomplete measurement (blur, then mri).

Reference: Elad & Feuer, *Restoration of a single superresolution image from several blurred, noisy, and undersampled
measured images*, IEEE TIP 1997.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import MinLen
from torch import Tensor

from bltoolbox.plugin import Bound, Operator, Rows, Theta, join, split


class Composed(Operator):
    """Operators one after the other, the first of them on the image.

    Args:
        parts: operators, in the order in which they act.
    """

    def __init__(self, parts: Annotated[list[Operator], MinLen(1)]) -> None:
        self.parts = {str(position): operator for position, operator in enumerate(parts)}

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        blur = {"name": "blur", "size": 3, "sigma": 0.8, "learned": True}
        return {"parts": [blur, {"name": "downsampling"}, {"name": "mri", "acceleration": 2}]}

    def example_contexts(self, shape: Sequence[int], count: int) -> list[Rows]:
        """Those of each part, with the first of the others."""
        contexts = [operator.example_contexts(seen, count) for _, operator, seen in self._walk(shape)]
        common = {name: rows for first, *_ in contexts for name, rows in first.items()}
        return [common, *({**common, **context} for each in contexts for context in each if context)]

    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        return join(
            **{
                position: operator.init_params(seen, generator)
                for position, operator, seen in self._walk(shape)
            }
        )

    def standard_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        return join(
            **{
                position: operator.standard_params(seen, generator)
                for position, operator, seen in self._walk(shape)
            }
        )

    def prepare(self, theta: Theta) -> Theta:
        return self._each(lambda operator, own: operator.prepare(own), theta)

    def upgrade(self, theta: Theta) -> dict[str, Tensor]:
        return self._each(lambda operator, own: operator.upgrade(own), theta)

    def project(self, theta: Theta) -> dict[str, Tensor]:
        return self._each(lambda operator, own: operator.project(own), theta)

    def project_gradient(self, gradient: Theta) -> dict[str, Tensor]:
        return self._each(lambda operator, own: operator.project_gradient(own), gradient)

    def penalty(self, theta: Theta) -> Tensor | None:
        penalties = [operator.penalty(split(theta, position)) for position, operator in self.parts.items()]
        present = [penalty for penalty in penalties if penalty is not None]
        return torch.stack(present).sum() if present else None

    def check(self, shape: Sequence[int]) -> str | None:
        for position, operator, seen in self._walk(shape):
            if sentence := operator.check(seen):
                return f"part {position}: {sentence}"
        return None

    def apply(self, x: Tensor, theta: Theta, context: Rows) -> Tensor:
        for position, operator in self.parts.items():
            x = operator.apply(x, split(theta, position), context)
        return x

    def adjoint(self, y: Tensor, theta: Theta, context: Rows) -> Tensor:
        for position, operator in reversed(self.parts.items()):
            y = operator.adjoint(y, split(theta, position), context)
        return y

    def start(self, y: Tensor, theta: Theta, context: Rows) -> Tensor:
        for position, operator in reversed(self.parts.items()):
            y = operator.start(y, split(theta, position), context)
        return y

    def measured(self, y: Tensor, context: Rows) -> Tensor | None:
        return list(self.parts.values())[-1].measured(y, context)

    def crop(self, rows: slice, columns: slice, shape: Sequence[int]) -> Composed | None:
        """With the first part cut; the others, which see measurements, must be the same everywhere."""
        first, *others = self.parts.values()
        cut = first.crop(rows, columns, shape)
        if cut is None or any(operator.offers("crop") for operator in others):
            return None
        return self if cut is first else Composed([cut, *others])

    def spectrum(self, theta: Theta, shape: Sequence[int], context: Rows) -> tuple[Bound, Bound]:
        least: Tensor | float = 1.0
        most: Bound = 1.0
        for position, operator, seen in self._walk(shape, context):
            low, high = operator.spectrum(split(theta, position), seen, context)
            least = least * (0.0 if low is None else low)
            most = None if most is None or high is None else most * high
        return least, most

    def symbol(self, theta: Theta, shape: Sequence[int]) -> Tensor | None:
        """The product of those of the parts, where each has one: only operators that keep the size of images do."""
        total: Tensor | None = None
        for position, operator in self.parts.items():
            if (symbol := operator.symbol(split(theta, position), shape)) is None:
                return None
            total = symbol if total is None else total * symbol
        return total

    def _each(self, change: Callable[[Operator, Theta], Theta], theta: Theta) -> dict[str, Tensor]:
        """θ changed by each part, which sees its own parameters under their names."""
        return join(
            **{
                position: change(operator, split(theta, position))
                for position, operator in self.parts.items()
            }
        )

    def _walk(
        self, shape: Sequence[int], context: Rows | None = None
    ) -> Iterator[tuple[str, Operator, tuple[int, ...]]]:
        """The parts with their positions and the shapes that they act on, for images of ``shape`` (C, H, W).

        A part is asked to measure only when the next one is wanted.
        """
        x = torch.zeros(1, *shape)
        for position, operator in self.parts.items():
            yield position, operator, tuple(x.shape[1:])
            if int(position) < len(self.parts) - 1:
                given = operator.example_contexts(x.shape[1:], 1)[0] if context is None else context
                x = operator.apply(
                    x, operator.prepare({}), {name: rows[:1].cpu() for name, rows in given.items()}
                )
