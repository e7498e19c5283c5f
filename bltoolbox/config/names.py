"""Names of files: those that a run directory uses, those that a recipe may choose, and those that cannot be written.

Without torch. ``runs`` reads and writes what is named here.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from bltoolbox.errors import UsageError

#: The longest name that common file systems accept, in bytes.
_LONGEST = 255

LOCK_FILE = "lock"
MANIFEST = "files.json"
#: The recipe as it was given, and with every default written out: a folder that has the latter is a run.
GIVEN_FILE = "recipe.yaml"
RECIPE_FILE = "resolved.yaml"
#: One line per step, its time, one line per check, and lines for people.
METRICS_LOG = "metrics.jsonl"
TIMINGS_LOG = "timings.jsonl"
CHECKS_LOG = "checks.jsonl"
LOG_FILE = "log.txt"
LOGS = (METRICS_LOG, TIMINGS_LOG, CHECKS_LOG, LOG_FILE)
STATUS_FILE = "status.json"
ENV_FILE = "env.json"
THETA_FILE = "theta.safetensors"
REPORT_FILE = "report.html"
TRACE_FILE = "trace.json"
SWEEP_FILE = "sweep.json"
#: The files of a sweep besides its cells.
#: The identifiers of its jobs on a cluster, a script that would submit them, and the trials of a search.
JOBS_FILE = "jobs.json"
SCRIPT_FILE = "array.sh"
TRIALS_FILE = "trials.log"
SWEEP_NAMES = (SWEEP_FILE, LOCK_FILE, JOBS_FILE, SCRIPT_FILE, TRIALS_FILE, "logs", "set-aside", "slurm")
#: Files that every run writes, and files that only some runs write.
FILES = (
    GIVEN_FILE,
    RECIPE_FILE,
    *LOGS,
    STATUS_FILE,
    ENV_FILE,
    THETA_FILE,
    REPORT_FILE,
)
EXTRA_FILES = (TRACE_FILE,)
CHECKPOINTS, THETAS, PICTURES = "checkpoints", "thetas", "images"
BEST_THETA = f"{CHECKPOINTS}/best.safetensors"
LAST_THETA = f"{CHECKPOINTS}/last.safetensors"
#: What the pictures of the evaluation images show.
PICTURES_INDEX = f"{PICTURES}/evaluation.json"
#: The name of a checkpoint, and its number.
CHECKPOINT_NAME = re.compile(r"state-([0-9]{8,18})\.ckpt")
#: State to continue from, θ at each check, pictures; and the names of the files in them.
FOLDERS = {
    CHECKPOINTS: re.compile(
        r"(state|warm|own)-[0-9]{8,}(-p[0-9]+)?(-[0-9]+of[0-9]+)?\.ckpt|(best|last)\.safetensors"
    ),
    THETAS: re.compile(r"[0-9]{6,}\.safetensors"),
    PICTURES: re.compile(
        r"(restored|curves|filters|maps)\.png|evaluation\.json|evaluation-[0-9]+-[a-z]+\.png"
    ),
}


def theta_name(step: int) -> str:
    """The file with the θ of a check."""
    return f"{THETAS}/{step:06d}.safetensors"


def is_component(name: object) -> bool:
    """Whether ``name`` is the name of one file or folder: not a path, and without special or invisible characters."""
    if not isinstance(name, str) or not 0 < len(name.encode("utf-8", "replace")) <= _LONGEST:
        return False
    return name not in (".", "..") and not re.search(
        r"[/\\\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", name
    )


def is_reserved(path: Path) -> bool:
    """Whether a relative path is one that a run itself writes to."""
    first = path.parts[0].casefold() if path.parts else ""
    return first in FOLDERS or first in (*FILES, *EXTRA_FILES, MANIFEST, LOCK_FILE)


def refuse_unusable_name(path: Path | str) -> None:
    """Refuse a name that is not UTF-8, which no log or JSON file can contain, or too long for a file system."""
    text = os.fspath(path)
    shown = text.encode("utf-8", "backslashreplace").decode()
    if shown != text:
        raise UsageError(f"{shown} is not a UTF-8 name; choose another one")
    if "\0" in text:
        raise UsageError(f"{text!r} contains a null character; choose another name")
    for name in Path(text).parts:
        if (size := len(name.encode())) > _LONGEST:
            raise UsageError(
                f"the name {name[:30]}… has {size} bytes, but file systems allow {_LONGEST}; choose a shorter one"
            )
