"""What one cell of a sweep asks a cluster for, and the same as a script for ``sbatch``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bltoolbox.errors import UsageError

#: Seconds before a time limit at which a run is asked for its checkpoint; for short limits a quarter of them.
_NOTICE = 120

_TIME = re.compile(r"(?:(\d{1,4})-)?(\d{1,6}(?::\d\d){0,2})")
_KEY = re.compile(r"[a-z][a-z-]*")


@dataclass(frozen=True)
class Resources:
    """Of each job."""

    partition: str | None = None
    #: Minutes; None is the default of the partition.
    minutes: int | None = None
    gpus: int = 0
    cpus: int = 1
    #: Jobs at a time; None is as many as the cluster allows.
    parallel: int | None = None
    #: Further options of sbatch, e.g. ``{"account": "imaging"}``.
    further: Mapping[str, str] = field(default_factory=dict)

    @property
    def notice(self) -> int:
        """Seconds before the time limit at which a run is asked for its checkpoint."""
        return _NOTICE if self.minutes is None else min(_NOTICE, 15 * self.minutes)

    def directives(self, name: str, count: int, output: str) -> list[str]:
        """The lines of an array script."""
        options = {
            "job-name": name,
            "array": f"0-{count - 1}" + (f"%{self.parallel}" if self.parallel else ""),
            "output": output,
            "cpus-per-task": str(self.cpus),
            **({"partition": self.partition} if self.partition else {}),
            **({"time": str(self.minutes)} if self.minutes else {}),
            **({"gpus-per-node": str(self.gpus)} if self.gpus else {}),
            "signal": f"B:TERM@{self.notice}",
            **self.further,
        }
        lines = [f"#SBATCH --{key}={shlex.quote(value)}" for key, value in options.items()]
        return [*lines, "#SBATCH --requeue", "#SBATCH --open-mode=append"]


def minutes_of(text: str) -> int:
    """``90``, ``1:30:00`` and ``2-12:00:00`` in minutes, rounded up; as sbatch reads them."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--time {text}: expected minutes, H:MM:SS or D-HH:MM:SS, e.g. 90 or 12:00:00")
    days, clock = int(match[1] or 0), [int(number) for number in match[2].split(":")]
    if match[1] is None and len(clock) < 3:
        clock.insert(0, 0)  # minutes, or minutes and seconds
    hours, minutes, seconds = [*clock, 0, 0][:3]
    total = 1440 * days + 60 * hours + minutes + (seconds > 0)
    if total < 1:
        raise UsageError(f"--time {text}: a job needs at least a minute")
    return total


def further_options(texts: Sequence[str]) -> dict[str, str]:
    """Options ``KEY=VALUE`` of sbatch."""
    options = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not _KEY.fullmatch(key) or "\n" in value:
            raise UsageError(f"--slurm {text}: expected KEY=VALUE, an option of sbatch, e.g. account=imaging")
        options[key] = value
    return options


_BODY = """
# Each task runs one cell. A cell that was stopped resumes from its checkpoint.
case "$SLURM_ARRAY_TASK_ID" in
{cases}
esac
if ls "$out"/checkpoints/state-*.ckpt > /dev/null 2>&1; then
  set -- resume "$out"
elif [ -e "$out/resolved.yaml" ]; then
  set -- "$@" --overwrite
fi
stop() {{ # before the time limit: write a checkpoint, and queue the cell once more
  kill -TERM "$child"
  wait "$child"
  scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}"
  exit 143
}}
trap stop TERM
{blt} "$@" --verbose{flags} &
child=$!
wait "$child"
"""


def array_script(
    directives: Sequence[str],
    cells: Sequence[tuple[Path, Sequence[str]]],
    blt: Sequence[str],
    flags: Sequence[str],
) -> str:
    """A script for ``sbatch`` that runs every cell, given as its directory and the command that starts it."""
    cases = "\n".join(
        f"  {number}) out={shlex.quote(str(path))}; set -- {shlex.join(start)} ;;"
        for number, (path, start) in enumerate(cells)
    )
    more = f" {shlex.join(flags)}" if flags else ""
    return "\n".join(["#!/bin/bash", *directives, _BODY.format(cases=cases, blt=shlex.join(blt), flags=more)])
