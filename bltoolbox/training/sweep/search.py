"""A search instead of a grid: Optuna proposes the next cell from the results so far.

The value of a cell is its best metric on the held-out images, never on the test images. While a cell runs, its checks
are reported, and a cell that is worse than the median of the others at the same check is stopped (pruned). The trials
are lines of JSON in ``trials.log`` in the sweep directory; a repeated command continues with them.

Reference: Akiba, Sano, Yanase, Ohta, Koyama, *Optuna: a next-generation hyperparameter optimization framework*, KDD
2019; the sampler is TPE, Bergstra et al., *Algorithms for hyper-parameter optimization*, NeurIPS 2011.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bltoolbox.config.names import SWEEP_FILE, TRIALS_FILE
from bltoolbox.config.reading import read_json
from bltoolbox.errors import BltError, MissingError, RecipeError, UsageError
from bltoolbox.runs.files import append_to
from bltoolbox.runs.history import RunHistory, is_run, refuse_paths
from bltoolbox.runs.metric import Metric
from bltoolbox.training.sweep.grid import Cell
from bltoolbox.training.sweep.jobs import Jobs, Watcher, _Job
from bltoolbox.training.sweep.plan import Planned, State, Sweep, plan
from bltoolbox.training.sweep.space import Space

#: Seconds between two readings of the checks, and trials before any is pruned.
_PAUSE, _STARTUP = 1.0, 5
#: Proposals of points that were tried before, after which the space counts as exhausted.
_REPEATS = 20
_CELL = "cell"


def recorded_cells(path: Path, space: Space) -> list[Cell]:
    """The cells of an earlier command with the same search; refuses a directory with another one."""
    file = path / SWEEP_FILE
    if not file.is_file():
        return []
    try:
        content = read_json(file, follow=False)
        cells = [
            Cell(str(cell["name"]), dict(cell["settings"]), [str(text) for text in cell["overrides"]])
            for cell in content["cells"]
        ]
        grid = content["grid"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BltError(f"{file} cannot be read ({error}); restore it, or choose another directory") from error
    refuse_paths(file, [cell.name for cell in cells])
    if grid != space.grid.values:
        raise UsageError(f"{path} contains another sweep or search; choose another directory with -o")
    return cells


class Study:
    """The trials of a search, in Optuna's own words."""

    def __init__(self, sweep: Sweep, metric: Metric, seed: int) -> None:
        self.optuna = optuna = _optuna()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        append_to(sweep.path / TRIALS_FILE, within=sweep.path).close()  # refuses a link
        backend = optuna.storages.journal.JournalFileBackend(str(sweep.path / TRIALS_FILE))
        try:
            storage = optuna.storages.JournalStorage(backend)
            before = optuna.study.get_all_study_names(storage)
            count = len(optuna.load_study(study_name=before[0], storage=storage).trials) if before else 0
            self.study = optuna.create_study(
                study_name=sweep.plan.name,
                storage=storage,
                direction="maximize" if metric.higher else "minimize",
                # Another seed for every continuation, or it would propose the same points once more.
                sampler=optuna.samplers.TPESampler(seed=seed + count, constant_liar=True),
                pruner=optuna.pruners.MedianPruner(n_startup_trials=_STARTUP),
                load_if_exists=True,
            )
        except Exception as error:
            raise BltError(
                f"{sweep.path / TRIALS_FILE} cannot be read ({type(error).__name__}: {error}); restore it, or choose"
                " another directory"
            ) from error

    def trial_of(self, name: str) -> Any:
        """The trial of a cell; None if it has none."""
        for frozen in self.study.get_trials(deepcopy=False):
            if frozen.user_attrs.get(_CELL) == name:
                return frozen
        return None

    def open_trial(self, number: int) -> Any:
        """A trial that has not ended, to report to."""
        frozen = self.study.trials[number]
        return self.optuna.trial.Trial(self.study, frozen._trial_id)

    @property
    def ended(self) -> int:
        """Trials with a result, and those that were pruned or failed."""
        return sum(trial.state.is_finished() for trial in self.study.get_trials(deepcopy=False))


class SearchJobs(Jobs):
    """Runs the cells that a study proposes until ``trials`` have ended."""

    def __init__(
        self,
        sweep: Sweep,
        count: int,
        plugins: Sequence[Path],
        watcher: Watcher,
        study: Study,
        space: Space,
        trials: int,
        metric: Metric,
    ) -> None:
        super().__init__(sweep, count, plugins, watcher)
        self.study, self.space, self.trials, self.metric = study, space, trials, metric
        self.looked_at = 0.0
        self.reported: dict[str, int] = {}
        self.repeats = 0
        for planned in list(self.waiting):
            self._take_up(planned)

    def _take_up(self, planned: Planned) -> None:
        """A cell of an earlier command: continue it unless its trial has ended."""
        trial = self.study.trial_of(planned.name)
        if trial is not None and not trial.state.is_finished():
            return
        self.waiting.remove(planned)
        pruned = trial is not None and trial.state.name == "PRUNED"
        planned.state = State.PRUNED if pruned else State.FAILED
        planned.reason = planned.reason or ("pruned" if pruned else "it has no trial")

    def _refill(self) -> None:
        if time.monotonic() - self.looked_at >= _PAUSE:
            self.looked_at = time.monotonic()
            for job in self.running:
                self._report(job)
        while not self.signals and len(self.waiting) + len(self.running) < self.count:
            if self.study.ended + len(self.running) + len(self.waiting) >= self.trials:
                return
            if self.repeats >= _REPEATS:
                self.watcher.say("the search proposes only points that were tried before; it ends here")
                self.trials = 0
                return
            self._propose()

    def _propose(self) -> None:
        """Ask for one more cell."""
        trial = self.study.study.ask()
        cell = self.space.ask(trial)
        try:
            planned = plan(str(self.sweep.recipe_file), self.space.grid, self.sweep.registry, [cell]).cells[0]
        except RecipeError as error:
            self.study.study.tell(trial, state=self.study.optuna.trial.TrialState.FAIL)
            self.watcher.say(f"{cell.name}: left out: {error}")
            self.repeats += 1
            return
        key = json.dumps(planned.recipe, sort_keys=True)
        if any(json.dumps(other.recipe, sort_keys=True) == key for other in self.sweep.cells):
            self.study.study.tell(trial, state=self.study.optuna.trial.TrialState.FAIL)
            self.repeats += 1
            self.trials += 1  # it was not run
            return
        self.repeats = 0
        self.sweep.add(planned)
        trial.set_user_attr(_CELL, planned.name)
        self.waiting.append(planned)

    def _report(self, job: _Job) -> None:
        """Report the checks of a running cell, and stop it if it should be pruned."""
        planned = job.planned
        frozen = self.study.trial_of(planned.name)
        if job.process is None or frozen is None or planned.state is State.PRUNED or not is_run(planned.path):
            return
        checks = RunHistory.read(planned.path).values("validation", self.metric)
        trial = self.study.open_trial(frozen.number)
        for number in range(self.reported.get(planned.name, 0), len(checks)):
            if number not in frozen.intermediate_values:
                trial.report(checks[number][1], number)
            self.reported[planned.name] = number + 1
            if number > 0 and trial.should_prune():
                planned.state = State.PRUNED
                job.process.terminate()
                return

    def _end(self, job: _Job) -> None:
        pruned = job.planned.state is State.PRUNED
        super()._end(job)
        planned, frozen = job.planned, self.study.trial_of(job.planned.name)
        if frozen is None or frozen.state.is_finished():
            return
        states = self.study.optuna.trial.TrialState
        value = None
        if planned.state is State.FINISHED:
            value = RunHistory.read(planned.path).validated(self.metric)
        if value is not None:
            self.study.study.tell(frozen.number, value)
        elif pruned:
            planned.state, planned.reason, planned.code = State.PRUNED, None, None
            self.study.study.tell(frozen.number, state=states.PRUNED)
            self.sweep.save()
        elif planned.state in (State.FINISHED, State.FAILED):
            self.study.study.tell(frozen.number, state=states.FAIL)
        # An interrupted or killed cell keeps its trial, and is resumed by the next command.


def deciding_metric(source: str, cell: Cell, sweep_registry: Any) -> tuple[Metric, int]:
    """The metric that a search compares, and the seed of the recipe; refuses recipes without held-out images."""
    from bltoolbox.config.recipe import load_recipe
    from bltoolbox.training.assemble import assemble

    recipe = load_recipe(source, cell.overrides, sweep_registry)
    experiment = assemble(replace(recipe, device="cpu", workers=0, loggers=()), sweep_registry)
    if experiment.validation is None:
        raise UsageError(
            "--search chooses by the held-out images, and the recipe has none; set validation.count, e.g. 16"
        )
    return experiment.metric, recipe.seed


def _optuna() -> Any:
    try:
        import optuna
        import optuna.storages.journal
    except ImportError as error:
        raise MissingError(
            "--search needs the package optuna, which is not installed or cannot be imported;"
            " run pip install 'bltoolbox[optuna]', or give a grid of values"
        ) from error
    return optuna
