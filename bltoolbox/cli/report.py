"""``blt report``: one self-contained HTML page about runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bltoolbox.cli.common import Debug, Labels, Plugins, RunDirectories, open_registry, say
from bltoolbox.config.names import REPORT_FILE

REPORT = Path(REPORT_FILE)


def register(app: typer.Typer) -> None:
    """Register the commands of this file."""
    app.command("report", rich_help_panel="Look")(report)


def report(
    directories: RunDirectories,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="The .html file to write.")
    ] = REPORT,
    images: Annotated[
        int, typer.Option(metavar="N", min=0, max=16, help="Number of evaluation images per run.")
    ] = 4,
    label: Labels = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing page.")] = False,
    plugin: Plugins = None,
    debug: Debug = False,
) -> None:
    """Write an HTML report about one or more runs.

    For example: blt report runs/denoise/2026-01-31_12-00-00 -o denoise.html

    The page is a single file that works offline: settings and results, zoomable curves, a before/after slider for
    images, learned filters and their potentials, the cost and the recipe. Several runs are shown side by side. A
    finished run already has a report in its directory. Unfinished or damaged runs are shown as far as they can be read.
    """
    from bltoolbox.reports.html.build import write_report

    registry, labels = open_registry(plugin), label or ()
    for note in write_report(directories, out, force=force, images=images, registry=registry, labels=labels):
        say(f"note: {note}")
    say(f"{out} written")
