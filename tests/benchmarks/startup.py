"""How long ``blt`` takes to answer: processor seconds, the least of several runs.

    python tests/benchmarks/startup.py [REPEATS]

Wall clock says little on a busy machine. Processor time is spent by the command alone, and its minimum over runs in
turns is the time without interruptions. The first run of each command, which fills caches, is not counted. Bytecode is
kept in a folder of this run, as Python does for users, whatever PYTHONDONTWRITEBYTECODE says.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from resource import RUSAGE_CHILDREN, getrusage

#: The commands, and the processor seconds that each may take.
LIMITS = {
    ("--help",): 0.20,
    ("list",): 0.30,
    ("validate", "denoise"): 0.35,
}


def processor_seconds(arguments: tuple[str, ...], bytecode: str) -> float:
    """Of one ``blt`` command, in user and system mode."""
    command = [sys.executable, "-m", "bltoolbox", *arguments]
    environment = os.environ | {"PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
    before = getrusage(RUSAGE_CHILDREN)
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    after = getrusage(RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def least_seconds(repeats: int) -> dict[tuple[str, ...], float]:
    """The least of each command over ``repeats`` runs, in turns."""
    best = dict.fromkeys(LIMITS, float("inf"))
    with tempfile.TemporaryDirectory() as bytecode:
        for turn in range(repeats + 1):
            for arguments in LIMITS:
                seconds = processor_seconds(arguments, bytecode)
                if turn:
                    best[arguments] = min(best[arguments], seconds)
    return best


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    print(f"processor seconds, the least of {repeats} runs, on {os.cpu_count()} cores")
    for arguments, seconds in least_seconds(repeats).items():
        verdict = "" if seconds <= LIMITS[arguments] else "  above the limit"
        print(f"blt {' '.join(arguments):18} {seconds:.3f} s  (at most {LIMITS[arguments]:.2f}){verdict}")


if __name__ == "__main__":
    main()
