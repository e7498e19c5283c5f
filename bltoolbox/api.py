"""Training from Python, where the rooms are combined.

    from bltoolbox import load_recipe, resume, run

Figures and reports of a run are added here; ``training`` does not know about them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from bltoolbox.bilevel.events import Listener
from bltoolbox.config.recipe import Recipe, load_recipe, with_data
from bltoolbox.config.registry import load_registry
from bltoolbox.distributed.ranks import ALONE, Ranks
from bltoolbox.errors import UsageError
from bltoolbox.reports.notebook import progress as progress_display
from bltoolbox.reports.writer import ReportWriter
from bltoolbox.restoration.given import as_data, stand_in
from bltoolbox.restoration.results import RunResult
from bltoolbox.restoration.roles import Data
from bltoolbox.training.assemble import assemble
from bltoolbox.training.driver import resume_in, run_in
from bltoolbox.training.resume import reopen
from bltoolbox.training.run_dir import RunDirectory

#: What ``run`` takes as data.
GivenData = Tensor | NDArray[Any] | tuple[Any, Any] | Dataset[Any] | Data


def run(
    recipe: Recipe | str | Path,
    overrides: Sequence[str] = (),
    *,
    data: GivenData | None = None,
    evaluation: GivenData | None = None,
    out: Path | str | None = None,
    listeners: Sequence[Listener] = (),
    ranks: Ranks = ALONE,
    progress: bool = False,
) -> RunResult:
    """Run a recipe: an object, a file or the name of a shipped recipe. Writes only if ``out`` is given.

    ``data`` and ``evaluation`` replace the sections of the recipe, which then needs no ``data``: a tensor or an array
    of images, a pair (x, y) of images and recorded measurements (x may be None), a ``torch.utils.data.Dataset`` of
    images or pairs, or ``bltoolbox.Images``, which also takes a range of values and context. To images alone the noise
    of the recipe is added; a recipe with ``noise`` is refused for recorded measurements.

    ``progress`` shows a bar on the terminal or in the notebook.

    On several ranks (``with ranks.joined() as ranks``) each process calls this; rank 0 writes and reports.
    """
    given = _given(data, evaluation)
    if not isinstance(recipe, Recipe):
        recipe, overrides = load_recipe(recipe, overrides, data_given=data is not None), ()
    if given or overrides:
        sections = {key: stand_in(one) for key, one in given.items()}
        recorded = "data" in given and given["data"].offers("measured")
        recipe = with_data(recipe, sections, overrides, recorded)
    experiment = assemble(recipe, ranks=ranks, given=given)
    with progress_display(progress and ranks.first) as display:
        if out is None:
            return experiment.run([*display, *listeners])
        directory = RunDirectory(out, ranks=ranks)
        return run_in(directory, experiment, [*display, *listeners, ReportWriter(directory.path)])


def resume(
    path: Path | str,
    overrides: Sequence[str] = (),
    *,
    data: GivenData | None = None,
    evaluation: GivenData | None = None,
    listeners: Sequence[Listener] = (),
    ranks: Ranks = ALONE,
) -> RunResult:
    """Continue the run in ``path``, on any number of ranks; only budgets may be overridden, and only grow.

    ``data`` and ``evaluation`` that came from Python must be given again.
    """
    with reopen(Path(path), overrides, load_registry(), ranks, _given(data, evaluation)) as reopened:
        if reopened.summary is not None:
            status = reopened.summary["status"]
            raise UsageError(f"{path} is finished: {status}; raise its budget to continue")
        directory = reopened.directory
        return resume_in(directory, reopened.experiment, [*listeners, ReportWriter(directory.path)])


def _given(data: GivenData | None, evaluation: GivenData | None) -> dict[str, Data]:
    sections = {"data": data, "evaluation": evaluation}
    return {key: as_data(value) for key, value in sections.items() if value is not None}
