"""Where to compute."""

from __future__ import annotations

import torch

from bltoolbox.distributed.ranks import ALONE, Ranks
from bltoolbox.errors import MissingError

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def pick_device(name: str, ranks: Ranks = ALONE) -> torch.device:
    """`auto` is the first CUDA device if there is one, else the CPU. Ranks take the devices of a machine in turn."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if ranks.size > 1 and name.startswith("cuda"):
        if name != "cuda":
            raise MissingError(
                f"device {name!r} cannot be shared by {ranks.size} ranks; use cuda, so that each rank gets its own"
            )
        name = f"cuda:{ranks.local % max(1, torch.cuda.device_count())}"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise MissingError(f"device {name!r} is not known to torch; use auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        try:
            torch.zeros(1, device=device, dtype=torch.float64).sum().item()
        except Exception as error:
            raise MissingError(
                f"device {name!r} cannot be used: it does not compute in float64 here; use auto, cpu or cuda"
            ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise MissingError(
            f"device {name!r} is not available: torch sees no CUDA device here; use device=cpu or auto"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise MissingError(
            f"device {name!r} is not available: there are {torch.cuda.device_count()} CUDA devices"
        )
    return device
