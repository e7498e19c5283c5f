"""A CSV file of all figures, one per line.

    step,computations,seconds,name,value

Steps do not all have the same figures, so each figure is on its own line: a pivot table, or
`pandas.read_csv(…).pivot(index="step", columns="name", values="value")`, turns them into columns. A resumed run
truncates the file to the step from which it resumes, like its own logs.

When to choose it: for spreadsheets and other programs that read CSV; the run directory has the same figures as JSON.

Reference: Shafranovich, *Common format and MIME type for comma-separated values*, RFC 4180, 2005.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from bltoolbox.plugin import (
    LOG,
    BltError,
    Check,
    Experiment,
    Logger,
    append_to,
    make_folder,
    read_text,
    write_text,
)

HEADING = ("step", "computations", "seconds", "name", "value")


class CsvLog(Logger):
    """Write the figures during the run.

    Args:
        path: The file, relative to the run directory, or to the current folder if there is none.
    """

    def __init__(self, path: Path = Path("figures.csv")) -> None:
        self.path = path

    def started(self, experiment: Experiment) -> None:
        self.seconds = 0.0
        self.root = experiment.run_dir or Path()
        self.file = self.root / self.path
        make_folder(self.file.parent, within=self.root)
        self.fresh = True

    def resumed(self, step: int) -> None:
        text = self._text()
        if not text:
            return
        heading, *lines = text.splitlines(keepends=True)
        # A line that a killed run left incomplete has no newline, and is written again.
        kept = [line for line in lines if line.endswith("\n") and self._step(line) <= step]
        write_text(self.file, "".join([heading, *kept]), within=self.root)
        self.fresh = False

    def _step(self, line: str) -> int:
        """Of a line that this logger has written."""
        number = line.partition(",")[0]
        if not (number.isascii() and number.isdigit() and len(number) < 19):
            raise BltError(f"{self.file} has a damaged line; delete the file, or choose another path")
        return int(number)

    def stepped(self, record: Mapping[str, Any], seconds: float, fraction: float) -> None:
        self.seconds = seconds
        figures = {name: value for name, value in record.items() if name not in HEADING}
        self._write(record["step"], record["computations"], figures)

    def checked(self, check: Check, theta: Mapping[str, Tensor]) -> None:
        # A step reports the check that follows it; the check before the first step is reported here.
        if check.step == 0:
            self._write(0, check.computations, check.figures())

    def _write(self, step: int, computations: float, figures: Mapping[str, Any]) -> None:
        rows: Iterable[tuple[Any, ...]] = (
            (step, computations, f"{self.seconds:.3f}", name, value)
            for name, value in figures.items()
            if value is not None
        )
        lines = io.StringIO()
        csv.writer(lines, lineterminator="\n").writerows(rows)
        if self.fresh:
            self._text()
            write_text(self.file, ",".join(HEADING) + "\n", within=self.root)
        self.fresh = False
        with append_to(self.file, within=self.root) as file:
            file.write(lines.getvalue().encode())

    def _text(self) -> str:
        """The text that an earlier run left; refuses a file that this logger did not write."""
        try:
            text = read_text(self.file, LOG, follow=False, errors="replace")
        except FileNotFoundError:
            return ""
        if text and not text.startswith(",".join(HEADING) + "\n"):
            raise BltError(f"{self.file} exists and was not written by this logger; choose another path")
        return text
