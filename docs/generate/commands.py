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
    commands = command_line().commands
    contents = [
        (command.rich_help_panel if first else "", f"[{name}](#{name})", _first_line(command))
        for _, group in groupby(commands.items(), key=lambda pair: pair[1].rich_help_panel)
        for first, (name, command) in zip(chain([True], repeat(False)), group, strict=False)
    ]
    parts = [INTRODUCTION.strip(), table(("", "command", "what it does"), contents), COMPLETION.strip()]
    parts += ["## Exit codes", table(("code", "meaning"), exit_codes().items())]
    parts += [_command(name, command) for name, command in commands.items()]
    return "\n\n".join(parts)


def command_line() -> Any:
    """``blt`` as Typer builds it: a group with its ``commands``, each with its ``params``."""
    from bltoolbox.cli import application

    return typer.main.get_command(application())


def exit_codes() -> dict[str, str]:
    """Exit codes and their meanings, from the docstrings of the errors."""
    classes = [
        error
        for error in vars(errors).values()
        if inspect.isclass(error) and issubclass(error, errors.BltError)
    ]
    codes = {"0": "Success."}
    for error in sorted(
        (error for error in classes if "exit_code" in vars(error)), key=lambda error: error.exit_code
    ):
        text = re.sub(r"\s*\(exit code \d\)", "", inspect.cleandoc(error.__doc__ or "").partition("\n")[0])
        codes[str(error.exit_code)] = sentence(text.partition(";")[0].rstrip("."))
    stopped = [str(128 + number) for number in (signal.SIGINT, signal.SIGTERM)]
    codes[", ".join(stopped)] = (
        "Interrupted (Ctrl-C, SIGTERM); a run that had started has written a checkpoint: `blt resume`."
    )
    codes[str(CLOSED)] = "The reader of the output has closed it, as when `blt list` is piped to `head -1`."
    return codes


def _command(name: str, command: Any) -> str:
    shown = [param for param in command.params if not getattr(param, "hidden", False)]
    arguments = [param for param in shown if param.param_type_name == "argument"]
    options = [param for param in shown if param.param_type_name == "option" and "--help" not in param.opts]
    usage = " ".join(["blt", name, "[OPTIONS]" if options else "", *map(_metavar, arguments)])
    parts = [f"## {name}", f"```text\n{' '.join(usage.split())}\n```", prose(command.help or "")]
    if arguments:
        rows = [(code(_metavar(param)), _help(param)) for param in arguments]
        parts.append(table(("argument", "meaning"), rows))
    if options:
        rows = [(_spelling(param), _help(param)) for param in options]
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
