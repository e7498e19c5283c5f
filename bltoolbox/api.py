"""Training from Python, where the rooms are combined.

    from bltoolbox import load_recipe, resume, run

Figures and reports of a run are added here; ``training`` does not know about them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bltoolbox.bilevel.events import Listener
from bltoolbox.config.recipe import Recipe, load_recipe, recipe_from_dict
from bltoolbox.config.registry import load_registry
from bltoolbox.distributed.ranks import ALONE, Ranks
from bltoolbox.errors import UsageError
from bltoolbox.reports.notebook import progress as progress_display
from bltoolbox.reports.writer import ReportWriter
from bltoolbox.restoration.results import RunResult
from bltoolbox.training.assemble import assemble
from bltoolbox.training.driver import resume_in, run_in
from bltoolbox.training.resume import reopen
from bltoolbox.training.run_dir import RunDirectory


def run(
    recipe: Recipe | str | Path,
    overrides: Sequence[str] = (),
    *,
    out: Path | str | None = None,
    listeners: Sequence[Listener] = (),
    ranks: Ranks = ALONE,
    progress: bool = False,
) -> RunResult:
    """Run a recipe: an object, a file or the name of a shipped recipe. Writes only if ``out`` is given.

    ``progress`` shows a bar on the terminal or in the notebook.

    On several ranks (``with ranks.joined() as ranks``) each process calls this; rank 0 writes and reports.
    """
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, overrides)
    elif overrides:
        recipe = replace(recipe_from_dict(recipe.to_dict(), overrides), text=recipe.text, name=recipe.name)
    experiment = assemble(recipe, ranks=ranks)
    with progress_display(progress and ranks.first) as display:
        if out is None:
            return experiment.run([*display, *listeners])
        directory = RunDirectory(out, ranks=ranks)
        return run_in(directory, experiment, [*display, *listeners, ReportWriter(directory.path)])


def resume(
    path: Path | str,
    overrides: Sequence[str] = (),
    *,
    listeners: Sequence[Listener] = (),
    ranks: Ranks = ALONE,
) -> RunResult:
    """Continue the run in ``path``, on any number of ranks; only budgets may be overridden, and only grow."""
    with reopen(Path(path), overrides, load_registry(), ranks) as reopened:
        if reopened.summary is not None:
            status = reopened.summary["status"]
            raise UsageError(f"{path} is finished: {status}; raise its budget to continue")
        directory = reopened.directory
        return resume_in(directory, reopened.experiment, [*listeners, ReportWriter(directory.path)])
