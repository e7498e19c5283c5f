"""Names for runs in legends and tables: what distinguishes them if that is short, else recipe or directory.

Without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bltoolbox.errors import UsageError
from bltoolbox.runs.logs import read_environment

#: A label with more settings or letters than this is read by nobody.
_SETTINGS, _LETTERS = 3, 48


def short_labels(labels: Sequence[str], paths: Sequence[Path]) -> list[str]:
    """The labels, or the names of the runs where any label is too long; the report has a table of the differences."""
    if all(label.count(", ") < _SETTINGS and len(label) <= _LETTERS for label in labels):
        return list(labels)
    return run_names(paths)


def run_names(paths: Sequence[Path]) -> list[str]:
    """The shortest of recipe, directory, and both that tells all runs apart; paths where nothing does."""
    places = [path.resolve() for path in paths]
    recipes = [str(read_environment(path).get("recipe") or path.name) for path in places]
    candidates = (
        recipes,
        [path.name for path in places],
        [f"{recipe} {path.name}" for recipe, path in zip(recipes, places, strict=True)],
        ["/".join(path.parts[-2:]) for path in places],
    )
    whole = [str(path) for path in paths]
    return next((names for names in candidates if len(set(names)) == len(names)), whole)


def given_labels(labels: Sequence[str], paths: Sequence[Path]) -> dict[Path, str]:
    """The labels of a command line, one per run in the order of the runs."""
    if labels and len(labels) != len(paths):
        runs = "\n".join(f"  {path}" for path in paths[:20])
        raise UsageError(
            f"there are {len(paths)} runs but {len(labels)} labels; give one --label per run:\n{runs}"
        )
    return dict(zip(paths, labels, strict=True)) if labels else {}
