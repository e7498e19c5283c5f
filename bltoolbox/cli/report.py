"""``blt report``: one page about runs, to look at and to pass on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bltoolbox.cli.common import Debug, Plugins, open_registry, say

REPORT = Path("report.html")


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("report")(report)


def report(
    directories: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_DIR...", help="Run directories, or sweeps, which stand for their runs."),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="The page, an .html file.")
    ] = REPORT,
    images: Annotated[
        int, typer.Option(metavar="N", min=0, max=16, help="Evaluation images of each run on the page.")
    ] = 4,
    force: Annotated[bool, typer.Option("--force", help="Replace a page that is there.")] = False,
    plugin: Plugins = None,
    debug: Debug = False,
) -> None:
    """Write a page about one run, or about several side by side.

    For example: blt report runs/denoise/2026-01-31_12-00-00 -o denoise.html

    The page is one file that needs no network: what was run and what it found, curves to zoom into, images before and
    after under a slider, learned filters and their potentials, the cost and the recipe. A finished run has such a page
    in its directory. Runs that are not finished, or damaged, are shown as far as they can be read.
    """
    from bltoolbox.reports.html.build import write_report

    for note in write_report(directories, out, force=force, images=images, registry=open_registry(plugin)):
        say(f"note: {note}")
    say(f"{out} written")
