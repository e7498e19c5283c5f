"""The images that losses compare with."""

from __future__ import annotations

from torch import Tensor

from bltoolbox.plugin import Sample


def target_of(sample: Sample, name: str) -> Tensor:
    """The target of a sample, else its true images; an error if it has neither."""
    target = sample.truth if sample.target is None else sample.target
    if target is None:
        raise ValueError(
            f"{name} compares with true images, and the data have none; give some, or pairs of measurements"
        )
    return target
