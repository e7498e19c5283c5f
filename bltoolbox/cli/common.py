"""Shared by the commands: common options and output.

Data goes to stdout and is never wrapped; messages for people go to stderr.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from bltoolbox.config.printable import printable, printable_json, printable_lines
from bltoolbox.distributed.launch import Place
from bltoolbox.errors import UsageError
from bltoolbox.runs.files import finite

if TYPE_CHECKING:
    from bltoolbox.config.registry import Registry

OVERRIDE = re.compile(r"[^/\\=]*=")


#: Whether ``--debug`` was given: known before the arguments are parsed, as parsing may fail.
DEBUGGING: ContextVar[bool] = ContextVar("DEBUGGING", default=False)

Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback on errors.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Plugins = Annotated[
    list[Path] | None,
    typer.Option("--plugin", metavar="FILE.py", help="Also load this plugin file; repeatable."),
]
RunDirectories = Annotated[
    list[Path], typer.Argument(metavar="RUN_DIR...", help="Run directories or sweeps.")
]
Labels = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="TEXT", help="The name of a run, in their order; repeatable."),
]
ProblemMetrics = Annotated[
    str | None,
    typer.Option(
        "--metric",
        metavar="NAMES",
        help="What to measure, e.g. psnr,ssim,nrmse or loss; default psnr,ssim, or all of a problem without images.",
    ),
]
MetricNames = Annotated[
    str, typer.Option("--metric", metavar="NAMES", help="What to measure, e.g. psnr,ssim,nrmse.")
]


def say(message: str, *, lines: bool = False) -> None:
    """Print a message on stderr: one line, or several with ``lines``.

    Control sequences are escaped, here and in ``show``: the text may come from someone else's file.
    """
    # Not typer.echo, which would write past a progress bar, into its line.
    print(printable_lines(message) if lines else printable(message), file=sys.stderr, flush=True)


def show(text: str = "", *, lines: bool = False, nl: bool = True, **style: Any) -> None:
    """Print data on stdout."""
    typer.secho(printable_lines(text) if lines else printable(text), nl=nl, **style)


class _MessageHandler(logging.Handler):
    """Prints what the toolbox logs as messages of the command."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"{record.levelname.lower()}: {record.getMessage()}")


def _show_warnings() -> None:
    """Print the warnings that the toolbox logs."""
    logger = logging.getLogger("bltoolbox")
    if Place.here().rank:  # rank 0 prints them
        logger.addHandler(logging.NullHandler())
        return
    if not any(isinstance(handler, _MessageHandler) for handler in logger.handlers):
        logger.addHandler(_MessageHandler())


def terminal_width(stream: TextIO | None = None) -> int | None:
    """The columns of the terminal; None if ``stream``, stdout by default, is not one: there lines are not wrapped."""
    return shutil.get_terminal_size((80, 24)).columns if (stream or sys.stdout).isatty() else None


def wrapped(text: str, indent: int, stream: TextIO | None = None) -> str:
    """A line for ``show`` or ``say``, wrapped to the terminal with its further lines indented."""
    text, width = printable(text), terminal_width(stream)
    if not width or len(text) <= width:
        return text
    room = max(width, indent + 20)
    return textwrap.fill(
        text, room, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


def print_json(data: Any) -> None:
    # NaN and Infinity are not JSON; a script gets null or a name instead of a parse error.
    text = json.dumps(finite(data, str), indent=2, ensure_ascii=False, allow_nan=False)
    typer.echo(printable_json(text))


def open_registry(files: Sequence[Path] | None, warn: bool = True) -> Registry:
    """The registry; warns about each plugin that is not used."""
    from bltoolbox.config.registry import load_registry

    _show_warnings()
    registry = load_registry(files or ())
    if warn and not Place.here().rank:
        for warning in registry.warnings():
            say(f"warning: {warning}")
    return registry


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Recipes, and KEY=VALUE overrides: arguments with a ``=`` before any path separator."""
    overrides = [argument for argument in arguments if OVERRIDE.match(argument)]
    return [argument for argument in arguments if not OVERRIDE.match(argument)], overrides


def split_one(arguments: Sequence[str], rule: str) -> tuple[str, list[str]]:
    """The same for commands that take one recipe, model or run; ``rule`` says so."""
    sources, overrides = split_overrides(arguments)
    if len(sources) != 1:
        raise UsageError(rule + (f", got {', '.join(sources)}" if sources else ""))
    return sources[0], overrides
