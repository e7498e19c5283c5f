"""The GPUs of this machine as other processes will see them. Imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
DEVICES = Path("/dev")


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Names for ``CUDA_VISIBLE_DEVICES``, one per GPU; those that it lists already, if it is set."""
    given = environment.get(VISIBLE)
    if given is not None:
        names = [name.strip() for name in given.split(",")]
        end = next((place for place, name in enumerate(names) if name in ("", "-1")), len(names))
        return names[:end]  # CUDA, too, ignores what follows a name that is not one
    try:
        files = [file.name for file in DEVICES.iterdir()]
    except OSError:
        return []
    return sorted((name[6:] for name in files if re.fullmatch(r"nvidia[0-9]+", name)), key=int)


def least_busy(gpus: Sequence[str], busy: Sequence[str | None]) -> str | None:
    """The GPU that fewest of the ``busy`` ones are, the first of several; None if there is none."""
    return min(gpus, key=busy.count) if gpus else None
