"""Resuming a run with its original recipe, of which only the budget may grow."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from packaging.version import Version

import bltoolbox
from bltoolbox.bilevel.precision import VARIABLE
from bltoolbox.config.block import Block
from bltoolbox.config.hooks import STAND_INS
from bltoolbox.config.names import GIVEN_FILE, RECIPE_FILE
from bltoolbox.config.overrides import Overrides
from bltoolbox.config.recipe import Recipe, parse_recipe, read_recipe
from bltoolbox.config.registry import Registry
from bltoolbox.config.sections import Budget
from bltoolbox.distributed.ranks import ALONE, Ranks
from bltoolbox.errors import BltError, UsageError
from bltoolbox.restoration.forms import FORMS, given_answers
from bltoolbox.restoration.forms import VARIABLE as FORMS_VARIABLE
from bltoolbox.restoration.python_data import stand_in
from bltoolbox.restoration.roles import Data
from bltoolbox.runs.history import is_run
from bltoolbox.runs.logs import read_environment, read_source, read_status
from bltoolbox.training.assemble import assemble
from bltoolbox.training.environment import arithmetic, image_sets
from bltoolbox.training.experiment import Experiment
from bltoolbox.training.run_dir import RunDirectory

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reopened:
    """A run directory with its experiment, or with the ``summary`` of a run that is finished."""

    directory: RunDirectory
    experiment: Experiment
    summary: dict[str, Any] | None


@contextlib.contextmanager
def reopen(
    path: Path,
    overrides: Overrides,
    registry: Registry,
    ranks: Ranks = ALONE,
    given: Mapping[str, Data] | None = None,
) -> Iterator[Reopened]:
    """Assemble the experiment of a run directory, which is locked before its recipe is read.

    Data that the run was ``given`` from Python must be given again.
    """
    directory = RunDirectory(path, ranks=ranks)
    # Before the lock, which would leave a file in a folder that is not a run directory.
    ranks.each("run directory there", lambda: _refuse_other(path))
    with directory.held(), FORMS.restored():
        assembled = ranks.in_step(
            "reopening", lambda: _assemble(path, overrides, registry, ranks, given or {})
        )
        yield Reopened(directory, *assembled)


def _assemble(
    path: Path, overrides: Overrides, registry: Registry, ranks: Ranks, given: Mapping[str, Data]
) -> tuple[Experiment, dict[str, Any] | None]:
    """The experiment, and its summary if it is finished."""
    resolved = path / RECIPE_FILE
    content = read_recipe(resolved, follow=False)
    _refuse_newer(path)
    before = parse_recipe(content, str(resolved), (), registry)
    recipe = parse_recipe(content, str(resolved), overrides, registry)
    _only_budgets_grow(before, recipe)
    for key, data in given.items():
        _refuse_other_data(path, key, getattr(before, key), data)
    text = read_source(path / GIVEN_FILE)
    name = str(read_environment(path).get("recipe") or path.resolve().parent.name)
    recipe = replace(recipe, text=text, name=name)
    summary = _summary(path) if recipe.budget == before.budget else None
    _use_same_forms(path, ranks)
    experiment = assemble(recipe, registry, ranks, given)
    if summary is None:
        _refuse_other_images(path, experiment)
        _warn_unless_exact(path, experiment)
    return experiment, summary


def _refuse_other_data(path: Path, key: str, block: Block | None, data: Data) -> None:
    """Data from Python must be those that the run was started with."""
    if block is None or (block.kind, block.name) not in STAND_INS:
        raise UsageError(f"the {key} of {path} did not come from Python; leave {key}=… out")
    now = stand_in(data)
    if now != block:
        before, count = block.options["count"], now.options["count"]
        change = (
            f"there were {before} samples, now there are {count}" if before != count else "they have changed"
        )
        raise UsageError(f"the {key} are not those {path} was started with: {change}; give the same again")


def _refuse_other(path: Path) -> None:
    if not is_run(path):
        raise UsageError(f"{path} is not a run directory: it has no {RECIPE_FILE}")


def _refuse_newer(path: Path) -> None:
    """Refuse a newer version, which may interpret the same recipe differently."""
    written = str(read_environment(path).get("bltoolbox", "0"))
    if _version(written) > _version(bltoolbox.__version__):
        raise BltError(
            f"{path} was written by bltoolbox {written}, newer than this one ({bltoolbox.__version__});"
            " update to resume it"
        )


def _refuse_other_images(path: Path, experiment: Experiment) -> None:
    """Sampler, warm starts and noise refer to images by id, so the images must be the same."""
    before, now = read_environment(path).get("images"), image_sets(experiment)
    if not isinstance(before, dict):
        return
    of_images = experiment.recipe.of_images
    noun, same = ("images", "some have other names") if of_images else ("tasks", "their data have changed")
    for name, (count, digest) in now.items():
        recorded = before.get(name)
        if isinstance(recorded, list) and len(recorded) == 2 and recorded != [count, digest]:
            was = recorded[0]
            change = f"there were {was}, now there are {count}" if was != count else same
            raise BltError(
                f"the {name} {noun} are not those {path} was started with: {change}; restore them,"
                " or start a new run"
            )


def _warn_unless_exact(path: Path, experiment: Experiment) -> None:
    """A resumed run repeats the interrupted one to the last bit only with deterministic kernels on the same device."""
    before, now = read_environment(path), arithmetic(experiment)
    names = ("device_name", "torch", "threads")
    changed = [name for name in names if name in before and before[name] != now[name]]
    if before.get("exact_resume", True) is not True or not now["exact_resume"]:
        log.warning(
            "%s: kernels without a fixed order of summation are allowed (%s=0), so the resumed run agrees with an"
            " uninterrupted one up to rounding only",
            path,
            VARIABLE,
        )
    elif changed and experiment.train.device.type == "cuda":
        log.warning(
            "%s: another %s than before, so the resumed run agrees with an uninterrupted one up to rounding only",
            path,
            " and ".join(name.replace("_", " ") for name in changed),
        )
    elif "threads" in changed and before.get("forms"):
        log.warning(
            "%s: another number of threads than before, for which forms are chosen anew, so the resumed run agrees with"
            " an uninterrupted one up to rounding only",
            path,
        )


def _use_same_forms(path: Path, ranks: Ranks) -> None:
    """Forms are part of a run; one that recorded none used the defaults."""
    recorded = read_environment(path).get("forms")
    forms = {str(key): str(form) for key, form in recorded.items()} if isinstance(recorded, dict) else {}
    FORMS.adopt(forms, closed=recorded is None or ranks.size > 1)
    wanted = given_answers().items()
    if changed := [question for question, form in wanted if forms.get(question, form) != form]:
        log.warning(
            "%s: the resumed run uses the form it was started with for %s, whatever %s says",
            path,
            " and ".join(changed),
            FORMS_VARIABLE,
        )


def _version(text: str) -> Version:
    """An entry of env.json, which may contain anything."""
    try:
        return Version(text)
    except ValueError:  # not a version, or a number of more digits than Python reads
        return Version("0")


def _only_budgets_grow(before: Recipe, after: Recipe) -> None:
    if replace(after, budget=before.budget) != before:
        raise UsageError("a resumed run may only change its budget; start a new run for anything else")
    for field in fields(Budget):
        old, new = getattr(before.budget, field.name), getattr(after.budget, field.name)
        if old != new and new is not None and (old is None or new < old):
            raise UsageError(
                f"budget.{field.name} may only grow in a resumed run: it is {old or 'unlimited'}"
            )


def _summary(path: Path) -> dict[str, Any] | None:
    """The report of a finished run; None if it is unfinished or its status is damaged, since the checkpoint then
    decides."""
    status = read_status(path) or {}
    return status if status.get("finished") else None
