"""What loggers of experiment-tracking services share: the figures to send, the files to attach, and the identifier by
which a resumed run finds its earlier entry.

The identifier is a line of text in the run directory, written when the entry is created. Where to send a run is never
read from a recipe, which may come from someone else, but from the settings of the service itself.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from bltoolbox.plugin import (
    LOG,
    BltError,
    Check,
    Experiment,
    Logger,
    MissingError,
    RunResult,
    read_text,
    write_text,
)

#: Pictures that a run with a directory draws, by what they show.
PICTURES = {
    "restored images": "images/restored.png",
    "curves": "images/curves.png",
    "filters": "images/filters.png",
    "learned maps": "images/maps.png",
}
#: Files that describe the result: θ, the page for people, and the recipe with all defaults.
FILES = ("theta.safetensors", "report.html", "resolved.yaml")

_IDENTIFIER = re.compile(r"[A-Za-z0-9_-]{1,64}")


def client_package(name: str) -> Any:
    """The package of a service, which is also the name of its logger and of its extra."""
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingError(
            f"logger {name!r} needs the package {name}, which is not installed or cannot be imported;"
            f" run pip install 'bltoolbox[{name}]', or remove the logger from the recipe"
        ) from error


class Tracked(Logger):
    """Collects what a service receives; a subclass sends it.

    Args:
        run_name: The name of the run; by default those of the recipe and of the run directory.
        every: Number of steps between two that are logged; checks are always logged.
    """

    #: The file in the run directory with the identifier of the entry.
    identifier_file: ClassVar[str]

    def __init__(self, run_name: str, every: int) -> None:
        self.run_name = run_name
        self.every = every

    @abstractmethod
    def begin(self, earlier: str | None) -> str:
        """Create an entry, or continue the one called ``earlier``; returns its identifier."""

    @abstractmethod
    def send(self, figures: Mapping[str, float], step: int) -> None:
        """Send numbers of one step."""

    @abstractmethod
    def attach(self, result: RunResult) -> None:
        """Send results, pictures and files of a finished run."""

    @abstractmethod
    def close(self, outcome: str) -> None:
        """End the entry: ``finished``, ``interrupted`` or ``failed``."""

    def started(self, experiment: Experiment) -> None:
        self.root = experiment.run_dir
        self.recipe = experiment.recipe
        self.earlier: str | None = None
        self.is_open = False
        self.step = 0

    def resumed(self, step: int) -> None:
        self.step = step
        self.earlier = self._identifier()

    def stepped(self, record: Mapping[str, Any], seconds: float, fraction: float) -> None:
        self.step = record["step"]
        self._ensure_open()
        if self.step % self.every == 0:
            self.send(numbers({**record, "seconds": seconds}), self.step)

    def checked(self, check: Check, theta: Mapping[str, Tensor]) -> None:
        self._ensure_open()
        self.send(numbers(check.figures()), check.step)

    def aborted(self, theta: Mapping[str, Tensor], reason: str) -> None:
        if self.is_open:
            self.close("interrupted" if reason == "interrupted" else "failed")

    def finished(self, result: RunResult) -> None:
        self._ensure_open()
        self.attach(result)
        self.close("finished")

    @property
    def name(self) -> str:
        """The name of the run in the service."""
        if self.run_name:
            return self.run_name
        return self.recipe.name if self.root is None else f"{self.recipe.name} {self.root.absolute().name}"

    def files(self, names: tuple[str, ...] = FILES) -> list[Path]:
        """Those of the given files that the run has written."""
        if self.root is None:
            return []
        return [path for path in (self.root / name for name in names) if path.is_file()]

    def pictures(self) -> dict[str, Path]:
        """The pictures that the run has drawn, by what they show."""
        return {title: path for title, name in PICTURES.items() for path in self.files((name,))}

    def _ensure_open(self) -> None:
        if self.is_open:
            return
        identifier = self.begin(self.earlier)
        self.is_open = True
        if self.root is not None:
            write_text(self.root / self.identifier_file, identifier + "\n", within=self.root)

    def _identifier(self) -> str | None:
        """The identifier that the run left in its directory; None if there is none."""
        if self.root is None:
            return None
        file = self.root / self.identifier_file
        try:
            text = read_text(file, LOG, follow=False, errors="replace").strip()
        except FileNotFoundError:
            return None
        if not _IDENTIFIER.fullmatch(text):
            raise BltError(f"{file} is damaged; delete it, and the run is logged under a new entry")
        return text


def numbers(figures: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among the figures; services do not accept others."""
    return {
        name: float(value)
        for name, value in figures.items()
        if name != "step"
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
    }


def results(result: RunResult) -> dict[str, float]:
    """The figures of a finished run, e.g. ``psnr_after``."""
    return numbers(result.as_dict())
