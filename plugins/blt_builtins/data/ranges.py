"""Which images of a source are used: `count` of them from `offset` on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def check_range(holder: str, total: int, offset: int, count: int | None) -> None:
    """Raise unless ``count`` images (one if None) are left from ``offset`` on; ``holder`` says how many there are."""
    wanted = offset + (1 if count is None else count)
    if wanted > total:
        asked = f"offset {offset}" + ("" if count is None else f" and count {count}")
        raise ValueError(f"{holder}, but {asked} ask for at least {wanted}")


def check_ids(ids: Sequence[int], count: int) -> NDArray[np.int64]:
    """The ids as an index; NumPy would count negative ones from the end."""
    index = np.asarray(ids, dtype=np.int64)
    if ((index < 0) | (index >= count)).any():
        raise IndexError(f"ids must be in 0 … {count - 1}")
    return index
