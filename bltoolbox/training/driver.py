"""A run in a directory, from its beginning or from its newest checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bltoolbox.bilevel.events import Listener
from bltoolbox.config.names import METRICS_LOG
from bltoolbox.restoration.forms import FORMS
from bltoolbox.restoration.results import RunResult
from bltoolbox.runs.logs import LARGEST, read_lines
from bltoolbox.training.experiment import Experiment
from bltoolbox.training.keeper import CheckpointKeeper
from bltoolbox.training.recorder import Recorder
from bltoolbox.training.run_dir import RunDirectory


def run_in(directory: RunDirectory, experiment: Experiment, listeners: Sequence[Listener] = ()) -> RunResult:
    """Run an experiment from its beginning into a directory."""
    experiment.run_dir = directory.path
    with directory.begun(experiment.recipe), directory.writing(resumable=True):
        keeper = CheckpointKeeper(directory, experiment)
        return _run(directory, experiment, keeper, listeners, None, {})


def resume_in(
    directory: RunDirectory, experiment: Experiment, listeners: Sequence[Listener] = ()
) -> RunResult:
    """Resume a run from its newest usable checkpoint. Call it while the directory is ``held``."""
    experiment.run_dir = directory.path
    with directory.writing(resumable=True):
        keeper = CheckpointKeeper(directory, experiment)
        directory.ranks.each("resuming", directory.claim)
        content, lengths, passed = keeper.load()
        _report(directory, listeners, passed)
        return _run(directory, experiment, keeper, listeners, content, lengths)


def _run(
    directory: RunDirectory,
    experiment: Experiment,
    keeper: CheckpointKeeper,
    listeners: Sequence[Listener],
    content: Mapping[str, Any] | None,
    lengths: Mapping[str, int],
) -> RunResult:
    recorder = Recorder(directory, experiment)
    with directory.logging(experiment.recipe, lengths), FORMS.recorded(recorder.forms_chosen):
        history: list[dict[str, Any]] = []
        if content is not None and directory.ranks.first:
            history, notes = _history(directory)
            _report(directory, [recorder, *listeners], notes)
        result = experiment.run([recorder, *listeners], keeper, content, history)
    return replace(result, run_dir=directory.path)


def _history(directory: RunDirectory) -> tuple[list[dict[str, Any]], list[str]]:
    """The steps so far; damaged lines are missing in the curves but do not stop the run."""
    notes: list[str] = []
    lines = read_lines(directory.path / METRICS_LOG, notes)
    steps = [
        line for line in lines if all(_is_figure(line.get(key)) for key in ("step", "computations", "loss"))
    ]
    if len(steps) < len(lines):
        left_out = len(lines) - len(steps)
        notes.append(f"{METRICS_LOG}: {left_out} lines do not describe a step and are left out")
    return steps, notes


def _report(directory: RunDirectory, listeners: Sequence[Listener], sentences: Sequence[str]) -> None:
    for sentence in sentences if directory.ranks.first else ():
        for listener in listeners:
            listener.phase(sentence)


def _is_figure(value: Any) -> bool:
    """Whether a curve can show it; a step may have no loss."""
    return value is None or (isinstance(value, int | float) and abs(value) < LARGEST)
