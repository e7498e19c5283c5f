"""A CSV file of all figures, one a line.

    step,computations,seconds,name,value

Steps do not all have the same figures, so each figure is a line of its own: a pivot table, or
`pandas.read_csv(…).pivot(index="step", columns="name", values="value")`, makes columns of them. A run that goes on cuts
the file where it goes on from, as it does with its own logs.

When to choose it: for spreadsheets and other programs that read CSV; the run directory has the same figures as JSON.

Reference: Shafranovich, *Common format and MIME type for comma-separated values*, RFC 4180, 2005.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from bltoolbox.experiment import Experiment
from bltoolbox.files import write_text
from bltoolbox.interfaces import Logger
from bltoolbox.listeners import Check
from bltoolbox.reading import LOG, read_text

HEADING = ("step", "computations", "seconds", "name", "value")


class CsvLog(Logger):
    """Writes while the run goes on.

    Args:
        path: The file; a relative one is meant from the run directory, or from the current folder where there is none.
    """

    def __init__(self, path: Path = Path("figures.csv")) -> None:
        self.path = path
        self.seconds = 0.0

    def started(self, experiment: Experiment) -> None:
        self.file = Path(experiment.run_dir or ".") / self.path
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.fresh = True

    def resumed(self, step: int) -> None:
        if not self.file.is_file():
            return
        heading, *lines = read_text(self.file, LOG, follow=False).splitlines(keepends=True)
        # What a kill left half written has no newline, and comes again.
        kept = [line for line in lines if line.endswith("\n") and int(line.partition(",")[0]) <= step]
        write_text(self.file, "".join([heading, *kept]))
        self.fresh = False

    def stepped(self, record: Mapping[str, Any], seconds: float, fraction: float) -> None:
        self.seconds = seconds
        figures = {name: value for name, value in record.items() if name not in HEADING}
        self._write(record["step"], record["computations"], figures)

    def checked(self, check: Check, theta: Mapping[str, Tensor]) -> None:
        # A step reports the check behind it; the one before the first step has no step to do so.
        if check.step == 0:
            psnrs = {"validation_psnr": check.validation_psnr, "evaluation_psnr": check.evaluation_psnr}
            self._write(0, check.computations, psnrs)

    def _write(self, step: int, computations: int, figures: Mapping[str, Any]) -> None:
        rows: Iterable[tuple[Any, ...]] = (
            (step, computations, f"{self.seconds:.3f}", name, value)
            for name, value in figures.items()
            if value is not None
        )
        with self.file.open("w" if self.fresh else "a", encoding="utf-8", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            if self.fresh:
                table.writerow(HEADING)
            table.writerows(rows)
        self.fresh = False
