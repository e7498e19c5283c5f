"""The environment of a run: versions, machine, command and images."""

from __future__ import annotations

import platform
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

import bltoolbox
from bltoolbox.bilevel.precision import deterministic
from bltoolbox.training.experiment import Experiment


def environment(experiment: Experiment) -> dict[str, Any]:
    """The versions, machine, command and images of a run."""
    return {
        "recipe": experiment.recipe.name,
        "bltoolbox": bltoolbox.__version__,
        "git": _git_state(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        **arithmetic(experiment),
        "ranks": experiment.oracle.ranks.size,
        "command": sys.argv,
        "images": image_sets(experiment),
    }


def arithmetic(experiment: Experiment) -> dict[str, Any]:
    """What the last bits of a run depend on, and whether they are the same if it is resumed."""
    device = experiment.train.device
    on_cuda = device.type == "cuda"
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if on_cuda else platform.processor(),
        "precision": "tf32" if experiment.recipe.tf32 and on_cuda else "ieee",
        "exact_resume": not on_cuda or deterministic(),
    }


def image_sets(experiment: Experiment) -> dict[str, list[Any]]:
    """The number of images of each split, and a digest that changes with them."""
    sets = {
        "training": experiment.train,
        "validation": experiment.validation,
        "evaluation": experiment.evaluation,
    }
    return {name: [len(samples), samples.digest()] for name, samples in sets.items() if samples is not None}


@cache
def _git_state() -> str | None:
    """Commit of the checkout this package runs from, if it is one; asked once, as the code is loaded once."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
