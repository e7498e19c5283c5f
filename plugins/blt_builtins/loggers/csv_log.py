"""A CSV file of all figures, one per line.

    step,computations,seconds,name,value

Steps do not all have the same figures, so each figure is a line of its own: a pivot table, or
`pandas.read_csv(…).pivot(index="step", columns="name", values="value")`, makes columns of them. A resumed run
truncates the file to where it resumes, like its own logs.

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
    """Writes during the run.

    Args:
        path: The file, in the run directory, or in the current folder where there is none.
    """

    def __init__(self, path: Path = Path("figures.csv")) -> None:
        self.path = path
        self.seconds = 0.0

    def started(self, experiment: Experiment) -> None:
        self.root = experiment.run_dir or Path()
        self.file = self.root / self.path
        make_folder(self.file.parent, within=self.root)
        self.fresh = True

    def resumed(self, step: int) -> None:
        text = self._text()
        if not text:
            return
        heading, *lines = text.splitlines(keepends=True)
        # What a kill left half written has no newline, and comes again.
        kept = [line for line in lines if line.endswith("\n") and int(line.partition(",")[0]) <= step]
        write_text(self.file, "".join([heading, *kept]), within=self.root)
        self.fresh = False

    def stepped(self, record: Mapping[str, Any], seconds: float, fraction: float) -> None:
        self.seconds = seconds
        figures = {name: value for name, value in record.items() if name not in HEADING}
        self._write(record["step"], record["computations"], figures)

    def checked(self, check: Check, theta: Mapping[str, Tensor]) -> None:
        # A step reports the check behind it; the one before the first step has no step to do so.
        if check.step == 0:
            self._write(0, check.computations, check.figures())

    def _write(self, step: int, computations: int, figures: Mapping[str, Any]) -> None:
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
        """What an earlier run left; a file that is not one of this logger's is not touched."""
        try:
            text = read_text(self.file, LOG, follow=False, errors="replace")
        except FileNotFoundError:
            return ""
        if text and not text.startswith(",".join(HEADING) + "\n"):
            raise BltError(f"{self.file} is there and was not written by this logger; choose another path")
        return text
