"""The page of commands, from the command line itself."""

from __future__ import annotations

import inspect
import re
import signal
from itertools import chain, groupby, repeat
from typing import Any

import typer

from bltoolbox import errors
from bltoolbox.cli.streams import CLOSED
from docs.generate.markdown import code, first_paragraph, prose, sentence, table

INTRODUCTION = """
# Commands

Data goes to stdout, messages go to stderr; `--json` is for scripts. An error is one sentence; `--debug` adds the
traceback. `blt COMMAND --help` shows the same text as this page.
"""

COMPLETION = """
`blt --install-completion` adds shell completion for commands, kinds, component names, recipes and override keys.

In the environment, `BLT_PLUGINS=a,b` restricts the plugins to those named, and `BLT_CACHE` sets the cache folder.
`BLT_NO_LOCK=1` accepts a file system without locks; then make sure that only one process writes to a directory.
"""


def page() -> str:
    found = command_line().commands
    contents = [
        (one.rich_help_panel if first else "", f"[{name}](#{name})", _first_line(one))
        for _, group in groupby(found.items(), key=lambda pair: pair[1].rich_help_panel)
        for first, (name, one) in zip(chain([True], repeat(False)), group, strict=False)
    ]
    parts = [INTRODUCTION.strip(), table(("", "command", "what it does"), contents), COMPLETION.strip()]
    parts += ["## Exit codes", table(("code", "meaning"), exit_codes().items())]
    parts += [_command(name, one) for name, one in found.items()]
    return "\n\n".join(parts)


def command_line() -> Any:
    """``blt`` as Typer builds it: a group with its ``commands``, each with its ``params``."""
    from bltoolbox.cli import app

    return typer.main.get_command(app)


def exit_codes() -> dict[str, str]:
    """Exit codes and their meanings, from the docstrings of the errors."""
    known = [
        one for one in vars(errors).values() if inspect.isclass(one) and issubclass(one, errors.BltError)
    ]
    codes = {"0": "Success."}
    for one in sorted((one for one in known if "exit_code" in vars(one)), key=lambda one: one.exit_code):
        text = re.sub(r"\s*\(exit code \d\)", "", inspect.cleandoc(one.__doc__ or "").partition("\n")[0])
        codes[str(one.exit_code)] = sentence(text.partition(";")[0].rstrip("."))
    stopped = [str(128 + number) for number in (signal.SIGINT, signal.SIGTERM)]
    codes[", ".join(stopped)] = (
        "Interrupted (Ctrl-C, SIGTERM); a run that had started has written a checkpoint: `blt resume`."
    )
    codes[str(CLOSED)] = "The reader of the output has closed it, as when `blt list` is piped to `head -1`."
    return codes


def _command(name: str, command: Any) -> str:
    shown = [one for one in command.params if not getattr(one, "hidden", False)]
    arguments = [one for one in shown if one.param_type_name == "argument"]
    options = [one for one in shown if one.param_type_name == "option" and "--help" not in one.opts]
    usage = " ".join(["blt", name, "[OPTIONS]" if options else "", *map(_metavar, arguments)])
    parts = [f"## {name}", f"```text\n{' '.join(usage.split())}\n```", prose(command.help or "")]
    if arguments:
        rows = [(code(_metavar(one)), _help(one)) for one in arguments]
        parts.append(table(("argument", "meaning"), rows))
    if options:
        rows = [(_spelling(one), _help(one)) for one in options]
        parts.append(table(("option", "meaning"), rows))
    return "\n\n".join(parts)


def _metavar(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    if argument.required or name.startswith("["):
        return str(name)
    return f"[{name}]"


def _spelling(option: Any) -> str:
    names = sorted([*option.opts, *option.secondary_opts], key=len)
    if not getattr(option, "is_flag", False):
        names[-1] += f" {option.metavar or option.name.upper()}"
    return ", ".join(map(code, names))


def _help(parameter: Any) -> str:
    text = parameter.help or ""
    default = parameter.default
    if callable(default) or default in (None, False, "", [], ()):
        return text
    return f"{text} Default {code(str(default))}."


def _first_line(command: Any) -> str:
    return first_paragraph(command.help or "")
