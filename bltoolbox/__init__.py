"""bltoolbox: bilevel learning for imaging, assembled from plugins.

The package itself is light: importing it imports no torch. The names below are loaded on first use.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bltoolbox.api import assemble, layer, resume, run
    from bltoolbox.bilevel.memory import keep_freed_memory
    from bltoolbox.config.recipe import load_recipe
    from bltoolbox.reports.figures import plot, show_images
    from bltoolbox.restoration.model import Model, solve
    from bltoolbox.restoration.python_data import Images
    from bltoolbox.restoration.results import RunResult
    from bltoolbox.training.experiment import Experiment

__version__ = "0.1.0"

#: When this package was imported: components are imported later, so a file older than this has not changed since.
IMPORTED_AT = time.time()

__all__ = [
    "Experiment",
    "Images",
    "Model",
    "RunResult",
    "__version__",
    "assemble",
    "keep_freed_memory",
    "layer",
    "load_recipe",
    "plot",
    "resume",
    "run",
    "show_images",
    "solve",
]

_HOMES = {
    "Experiment": "bltoolbox.training.experiment",
    "Images": "bltoolbox.restoration.python_data",
    "Model": "bltoolbox.restoration.model",
    "RunResult": "bltoolbox.restoration.results",
    "assemble": "bltoolbox.api",
    "keep_freed_memory": "bltoolbox.bilevel.memory",
    "layer": "bltoolbox.api",
    "load_recipe": "bltoolbox.config.recipe",
    "plot": "bltoolbox.reports.figures",
    "resume": "bltoolbox.api",
    "run": "bltoolbox.api",
    "show_images": "bltoolbox.reports.figures",
    "solve": "bltoolbox.restoration.model",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bltoolbox' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    if "IPython" in sys.modules:  # a notebook, which shows tables of results
        import_module("bltoolbox.reports.notebook")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
