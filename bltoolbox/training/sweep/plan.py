"""Sweeps on disk: the cells of a grid, their recipes and their progress.

A sweep directory contains ``sweep.json`` (the grid), the recipe as it was when the sweep began, a run directory for
each cell, ``logs/`` with the output of each run, and ``set-aside/`` with runs that were restarted. A cell is
identified by its resolved recipe, so a grid may grow and be written differently, but its cells never change.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bltoolbox
from bltoolbox.config.names import LOCK_FILE, SWEEP_FILE, is_component, refuse_unusable_name
from bltoolbox.config.reading import read_json
from bltoolbox.errors import BltError, RecipeError, UsageError
from bltoolbox.runs.files import UnsafePath, list_folder, make_folder, write_json, write_text
from bltoolbox.runs.history import RunHistory, has_checkpoint, is_run, refuse_paths
from bltoolbox.runs.locks import is_locked, locked
from bltoolbox.runs.logs import read_status
from bltoolbox.runs.metric import Metric
from bltoolbox.runs.settings import differing, flatten
from bltoolbox.training.sweep.grid import Cell, Grid, free_name

if TYPE_CHECKING:
    from bltoolbox.config.recipe import Recipe
    from bltoolbox.config.registry import Registry


class State(StrEnum):
    """The state of a cell."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    KILLED = "killed"
    FAILED = "failed"
    #: Stopped by a search, because others were better at the same check.
    PRUNED = "pruned"


@dataclass
class Planned:
    """A cell with its resolved recipe, its directory and its state."""

    cell: Cell
    recipe: dict[str, Any] = field(repr=False)
    path: Path = Path()
    log: Path = Path()
    state: State = State.WAITING
    #: Why it has no result, in a sentence, and the exit code of the last attempt.
    reason: str | None = None
    code: int | None = None

    @property
    def name(self) -> str:
        return self.cell.name

    def history(self) -> RunHistory | None:
        """The history in its run directory, once it has one."""
        return RunHistory.read(self.path) if is_run(self.path) else None

    def as_dict(self, history: RunHistory | None, metric: Metric) -> dict[str, Any]:
        """Plain data for ``--json``, with one metric for all cells."""
        return {
            "name": self.name,
            "settings": self.cell.settings,
            "overrides": self.cell.overrides,
            "status": self.state.value,
            "reason": self.reason,
            "run_dir": str(self.path),
            "log": str(self.log) if self.log.exists() else None,
            "steps": history and history.step_count,
            "computations": history and int(history.computations),
            "seconds": history and history.seconds,
            f"{metric.name}_validation": history and history.validated(metric),
            f"{metric.name}_test": history and history.tested(metric),
        }


@dataclass(frozen=True)
class Plan:
    """A recipe and all cells of a grid, each of them valid."""

    name: str
    text: str
    grid: Grid
    cells: list[Planned]


def plan(source: str, grid: Grid, registry: Registry, cells: Sequence[Cell] | None = None) -> Plan:
    """Load and assemble every cell, by default those of the grid; reports all problems at once and writes nothing."""
    from bltoolbox.config.recipe import load_recipe

    planned: list[Planned] = []
    names: dict[str, str] = {}
    wrong: dict[str, list[str]] = {}
    codes: list[int] = []
    recipe: Recipe | None = None
    cells = grid.cells() if cells is None else cells
    for cell in cells:
        try:
            recipe = load_recipe(source, cell.overrides, registry)
            _try_out(recipe, registry)
        except UsageError:
            raise  # it is the same for all cells
        except BltError as error:
            codes.append(error.exit_code)
            for line in str(error).splitlines():
                wrong.setdefault(line, []).append(cell.name)
            continue
        same = json.dumps(recipe.to_dict(), sort_keys=True)
        if same in names:
            raise UsageError(f"the cells {names[same]} and {cell.name} are the same run; leave one out")
        names[same] = cell.name
        planned.append(Planned(cell, recipe.to_dict()))
    if wrong:
        raise _Invalid(wrong, len(cells), 3 if 3 in codes else codes[0])
    assert recipe is not None
    return Plan(recipe.name, recipe.text, grid, planned)


def _try_out(recipe: Recipe, registry: Registry) -> None:
    """Build everything and discard it; on the CPU, so that GPUs stay free for the runs."""
    from bltoolbox.bilevel.device import pick_device
    from bltoolbox.training.assemble import assemble

    pick_device(recipe.device)
    assemble(replace(recipe, device="cpu", workers=0), registry)


class _Invalid(RecipeError):
    """Problems of cells, each with the cells that have it."""

    def __init__(self, wrong: Mapping[str, Sequence[str]], count: int, exit_code: int) -> None:
        lines = [f"{_cells(names, count)}: {line}" for line, names in wrong.items()]
        super().__init__([], "\n".join(lines))
        self.exit_code = exit_code


def _cells(names: Sequence[str], count: int) -> str:
    if count > 1 and len(names) == count:
        return f"all {count} cells"
    more = f" and {len(names) - 3} more" if len(names) > 4 else ""
    return "; ".join(names[: 3 if more else 4]) + more


def fresh_sweep_directory(root: Path, name: str) -> Path:
    """``root/name/sweep-<time>``, not yet existing."""
    path = root / (name if is_component(name) else "recipe") / time.strftime("sweep-%Y-%m-%d_%H-%M-%S")
    taken = {entry.name.casefold() for entry in path.parent.iterdir()} if path.parent.is_dir() else set()
    return path.with_name(free_name(path.name, taken))


class Sweep:
    """A plan in its directory."""

    def __init__(self, path: Path, plan: Plan, registry: Registry) -> None:
        refuse_unusable_name(path)
        self.path = path
        self.plan = plan
        self.registry = registry
        self.cells = plan.cells
        #: The recipe of the runs: later edits to the original do not affect the sweep.
        self.recipe_file = path / f"{plan.name}.yaml"
        self.earlier = self._earlier()
        self._take_up()
        for planned in self.cells:
            planned.path = path / planned.name
            planned.log = path / "logs" / f"{planned.name}.log"
            self._look(planned)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Lock the directory for as long as the sweep runs."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with locked(self.path, f"{self.path} is in use by another sweep; wait for it"):
                make_folder(self.path / "logs", within=self.path)
                write_text(self.recipe_file, self.plan.text, within=self.path)
                self.save()
                yield
        except OSError as error:
            raise BltError(f"cannot write to {self.path}: {error.strerror or error}") from error

    def save(self) -> None:
        """Record the grid and the reasons of failed cells."""
        cells = [
            {
                "name": planned.name,
                "settings": planned.cell.settings,
                "overrides": planned.cell.overrides,
                "failed": None if planned.code is None else {"code": planned.code, "reason": planned.reason},
                "recipe": planned.recipe,
            }
            for planned in self.cells
        ]
        content = {
            "bltoolbox": bltoolbox.__version__,
            "recipe": self.plan.name,
            "grid": self.plan.grid.values,
            "cells": cells,
        }
        write_json(self.path / SWEEP_FILE, content, within=self.path)

    def add(self, planned: Planned) -> None:
        """One more cell, whose name is made unique."""
        taken = {other.name.casefold() for other in self.cells}
        planned.cell = replace(planned.cell, name=free_name(planned.name, taken))
        planned.path = self.path / planned.name
        planned.log = self.path / "logs" / f"{planned.name}.log"
        self.cells.append(planned)
        self.save()

    def resumable(self, planned: Planned) -> bool:
        """Whether a cell can be resumed; a failed one would fail again at the same place."""
        status = str((read_status(planned.path) or {}).get("status", ""))
        if planned.code == 1 or status.startswith("failed"):
            return False
        return is_run(planned.path) and has_checkpoint(planned.path)

    def set_aside(self, planned: Planned) -> Path | None:
        """Make room for a restarted cell; the old run is kept."""
        if not planned.path.exists() or not any(planned.path.iterdir()):
            return None
        folder = self.path / "set-aside"
        make_folder(folder, within=self.path)
        kept = folder / free_name(planned.name, {name.casefold() for name in list_folder(folder, self.path)})
        planned.path.rename(kept)
        return kept

    def _look(self, planned: Planned) -> None:
        """Read the state of a cell from its directory."""
        if planned.path.is_symlink():
            raise UnsafePath(planned.path, "is a symbolic link")
        if is_locked(planned.path):
            planned.state = State.RUNNING
            return
        if not is_run(planned.path):
            return
        history = RunHistory.read(planned.path)
        if history.recipe and differing(
            [_no_budget(self._today(history.recipe)), _no_budget(planned.recipe)]
        ):
            raise UsageError(f"{planned.path} contains a run of another recipe; choose another directory")
        if history.finished:
            planned.state, planned.reason, planned.code = State.FINISHED, None, None

    def _earlier(self) -> list[dict[str, Any]]:
        """The cells that are recorded in the directory."""
        file = self.path / SWEEP_FILE
        if not self.path.is_dir():
            if self.path.exists():
                raise UsageError(f"{self.path} is a file; choose another directory")
            return []
        if not file.is_file():
            if any(entry.name not in (LOCK_FILE, "logs") for entry in self.path.iterdir()):
                raise UsageError(f"{self.path} is not empty and not a sweep; choose another directory")
            return []
        try:
            cells = read_json(file, follow=False)["cells"]
            recorded = [{**cell, "name": str(cell["name"]), "recipe": dict(cell["recipe"])} for cell in cells]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BltError(
                f"{file} cannot be read ({error}); restore it, or choose another directory"
            ) from error
        refuse_paths(file, [cell["name"] for cell in recorded])
        return recorded

    def _take_up(self) -> None:
        """Match the cells that are recorded with those of the plan; all of them must still be in it."""
        today = {_key(planned.recipe): planned for planned in self.cells}
        kept: set[str] = set()
        for old in self.earlier:
            planned = today.pop(_key(self._today(old["recipe"])), None)
            if planned is None:
                raise UsageError(
                    f"{self.path} contains another sweep{self._difference(old)}; choose another directory with -o"
                )
            planned.cell = replace(planned.cell, name=old["name"])
            failed = old.get("failed") or {}
            planned.code, planned.reason = failed.get("code"), failed.get("reason")
            kept.add(planned.name.casefold())
        for planned in today.values():
            planned.cell = replace(planned.cell, name=free_name(planned.name, kept))
            kept.add(planned.name.casefold())

    def _difference(self, old: Mapping[str, Any]) -> str:
        """How the cell of the same name differs, if there is one."""
        for planned in self.cells:
            if planned.name == old["name"]:
                recipes = [self._today(old["recipe"]), planned.recipe]
                keys = differing(recipes)
                before, after = (flatten(recipe).get(keys[0]) for recipe in recipes) if keys else (None, None)
                return f": there, {keys[0]} of {planned.name} is {before!r}, not {after!r}" if keys else ""
        return f": its cell {old['name']} is not in this grid"

    def _today(self, recipe: Mapping[str, Any]) -> dict[str, Any]:
        """A recorded recipe, with settings that were added later at their defaults."""
        from bltoolbox.config.recipe import recipe_from_dict

        try:
            return recipe_from_dict(recipe, (), self.registry).to_dict()
        except BltError:
            return dict(recipe)


def _key(recipe: Mapping[str, Any]) -> str:
    return json.dumps(recipe, sort_keys=True)


def _no_budget(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe without its budget, which a single run may have raised."""
    return {key: value for key, value in recipe.items() if key != "budget"}
