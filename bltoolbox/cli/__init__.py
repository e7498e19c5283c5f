"""The command line. Each file here contains one group of commands and adds them in its ``register(app)``.

May import everything; nothing imports it. Commands raise; this file alone turns an error into one line on stderr and
an exit code, and shows a traceback only with ``--debug``. Nothing slow is imported before a command runs. A change
here can break scripts that call ``blt``: options, exit codes, JSON on stdout.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, NoReturn

import typer

from bltoolbox.cli.common import DEBUGGING, Debug, say, show
from bltoolbox.cli.display.problems import described
from bltoolbox.cli.grouping import Commands, GroupedCommands
from bltoolbox.cli.streams import CLOSED, OutputFailed
from bltoolbox.distributed.signals import Interrupted, announce
from bltoolbox.errors import BltError, RecipeError, explain, is_out_of_memory

#: Characters of a file name in a message.
_LONGEST = 200

#: The modules of this room that define commands, in the order of the help (Train, Look, Use, Extend), and the commands
#: of each: a command imports its own module only.
MODULES = {
    "run": ("run", "resume"),
    "sweep": ("sweep",),
    "recipes": ("validate", "recipes", "cp"),
    "check": ("check",),
    "watch": ("watch",),
    "report": ("report",),
    "compare": ("compare",),
    "estimators": ("estimators",),
    "theory": ("theory",),
    "components": ("list", "show"),
    "models": ("models",),
    "apply": ("apply",),
    "evaluate": ("evaluate",),
    "import_model": ("import",),
    "plugins": ("plugins",),
    "new_plugin": ("new-plugin",),
    "schema": ("schema",),
    "doctor": ("doctor",),
}


def _version(value: bool) -> None:
    if value:
        from bltoolbox import __version__

        show(f"bltoolbox {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Debug = False,
) -> None:
    pass


def application(words: Sequence[str] = ()) -> Commands:
    """The application with the commands of the module that ``words`` asks for, or with all if they name no command."""
    app = Commands(
        name="blt",
        help="Bilevel learning for imaging, assembled from plugins.",
        cls=GroupedCommands,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    command = next((word for word in words if not word.startswith("-")), None)
    for module in [name for name, commands in MODULES.items() if command in commands] or MODULES:
        import_module(f"{__name__}.{module}").register(app)
    return app


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The ``blt`` command."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that lacks a character shows a question mark instead of a traceback.
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    words = sys.argv[1:] if arguments is None else list(arguments)
    DEBUGGING.set("--debug" in words)
    try:
        application(words)(args=words, prog_name="blt")
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else int(done.code is not None)
    except KeyboardInterrupt:
        code = 130
    except Interrupted as stop:
        announce()
        code = stop.exit_code
    except Exception as error:
        code = _report(error)
    else:
        code = 0
    sys.exit(_flush(code))


def _report(error: Exception) -> int:
    if DEBUGGING.get():
        say("".join(traceback.format_exception(error)).rstrip(), lines=True)
    if isinstance(error, OutputFailed) and error.exit_code == CLOSED:
        return CLOSED
    if isinstance(error, BltError):
        say(described(error) if isinstance(error, RecipeError) else f"error: {error}", lines=True)
        return error.exit_code
    if isinstance(error, OSError) and error.filename is not None and not is_out_of_memory(error):
        say(f"error: cannot use {_shown(error.filename)}: {error.strerror or error}")
        return 2 if error.errno == errno.ENAMETOOLONG else 1
    hint = "" if DEBUGGING.get() or is_out_of_memory(error) else " (unexpected; --debug shows the traceback)"
    say(f"error: {explain(error)}{hint}")
    return 1


def _shown(name: object) -> str:
    text = os.fsdecode(name) if isinstance(name, str | bytes | os.PathLike) else str(name)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _flush(code: int) -> int:
    """Write what is still buffered; returns the exit code, or that of the failure if it was 0."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OutputFailed as error:
        return code or _report(error)
    return code
