"""Arrays in a file, of which only the requested parts are read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Mapped:
    """A memory-mapped array of images, with a guard against a file that is truncated while it is in use.

    Accessing a page of a mapping beyond the end of its file would kill the process.
    """

    def __init__(self, path: Path, array: NDArray[Any]) -> None:
        self.path = path
        self.array = array
        status = os.stat(path)
        self.inode, self.size = status.st_ino, status.st_size

    def take(self, index: NDArray[np.int64]) -> NDArray[Any]:
        """A copy of the images at ``index``."""
        try:
            status = os.stat(self.path)
        except OSError:
            pass  # deleted or replaced: the mapping still has the old content
        else:
            if status.st_ino == self.inode and status.st_size < self.size:
                raise ValueError(f"{self.path} was cut short while it was in use; put the whole file back")
        return self.array[index]
