"""A check that samplers share: a batch must not be larger than the data set."""

from __future__ import annotations


def refuse_large(size: float, m: int) -> None:
    """Raise unless ``size`` of the ``m`` training samples can be drawn."""
    if size > m:
        raise ValueError(
            f"size {size:.12g} is larger than the {m} training samples; use a size of at most {m}"
        )
