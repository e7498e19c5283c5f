"""``blt doctor``: check the installation and run a self-test."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from bltoolbox.cli.common import Debug, Json, Plugins, open_registry, print_json, say, show, wrapped

if TYPE_CHECKING:
    from bltoolbox.cli.diagnosis import Finding


def register(app: typer.Typer) -> None:
    """Register the commands of this file."""
    app.command("doctor", rich_help_panel="Extend")(doctor)


def doctor(as_json: Json = False, plugin: Plugins = None, debug: Debug = False) -> None:
    """Check the installation and run a self-test.

    Examines packages, plugins, folders and devices, and restores a small test picture; takes a few seconds. A finding
    is ok, a note (it works, but you may want to know) or wrong, with a remedy where there is one. Exit code 4 if
    anything is wrong. For example, attach the output of blt doctor --json to a bug report.
    """
    from bltoolbox.cli.diagnosis import Verdict, examine

    findings: list[Finding] = []
    for finding in examine(open_registry(plugin, warn=False)):
        findings.append(finding)
        if not as_json:
            _print(finding)
    wrong = sum(finding.verdict is Verdict.WRONG for finding in findings)
    if as_json:
        print_json([finding.as_dict() for finding in findings])
    else:
        say("no problems found" if not wrong else f"{wrong} problem{'s' * (wrong > 1)} found")
    raise typer.Exit(4 if wrong else 0)


_COLORS = {"ok": typer.colors.GREEN, "note": typer.colors.YELLOW, "wrong": typer.colors.RED}


def _print(finding: Finding) -> None:
    remedy = f" -> {finding.remedy}" if finding.remedy else ""
    line = f"{finding.verdict:5}  {finding.subject:17}  {finding.found}{remedy}"
    show(f"{finding.verdict:5}", fg=_COLORS[finding.verdict], nl=False)
    show(wrapped(line, 26)[5:], lines=True)
    sys.stdout.flush()  # the last findings take seconds
