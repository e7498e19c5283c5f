"""``blt doctor``: what this installation has, what it lacks, and whether it computes what it should."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from bltoolbox.cli.common import Debug, Json, Plugins, open_registry, print_json, say, show

if TYPE_CHECKING:
    from bltoolbox.cli.diagnosis import Finding


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("doctor")(doctor)


def doctor(as_json: Json = False, plugin: Plugins = None, debug: Debug = False) -> None:
    """Look at this installation: packages, plugins, folders, devices, and whether they compute what they should.

    A finding is ok, a note (it works, but you may want to know) or wrong; what can be done about it is said. Exit code
    4 if anything is wrong. It takes a few seconds. For example: blt doctor --json, to go with a question or a report
    of a bug.
    """
    from bltoolbox.cli.diagnosis import Verdict, examine

    found: list[Finding] = []
    for finding in examine(open_registry(plugin, warn=False)):
        found.append(finding)
        if not as_json:
            _print(finding)
    wrong = sum(finding.verdict is Verdict.WRONG for finding in found)
    if as_json:
        print_json([finding.as_dict() for finding in found])
    else:
        say(
            "nothing is wrong" if not wrong else f"{wrong} {'thing is' if wrong == 1 else 'things are'} wrong"
        )
    raise typer.Exit(4 if wrong else 0)


_COLORS = {"ok": typer.colors.GREEN, "note": typer.colors.YELLOW, "wrong": typer.colors.RED}


def _print(finding: Finding) -> None:
    show(f"{finding.verdict:5}", fg=_COLORS[finding.verdict], nl=False)
    remedy = f" -> {finding.remedy}" if finding.remedy else ""
    show(f"  {finding.subject:17}  {finding.found}{remedy}")
    sys.stdout.flush()  # the last findings take seconds
