"""Writes the events of a run to its directory: steps, checks, θ, status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import bltoolbox
from bltoolbox.bilevel.events import Listener
from bltoolbox.bilevel.records import Theta
from bltoolbox.config.names import (
    BEST_THETA,
    CHECKS_LOG,
    ENV_FILE,
    LAST_THETA,
    METRICS_LOG,
    STATUS_FILE,
    THETA_FILE,
    TIMINGS_LOG,
    theta_name,
)
from bltoolbox.restoration.forms import FORMS
from bltoolbox.restoration.results import Check, RunResult
from bltoolbox.runs.files import json_line
from bltoolbox.training.environment import environment
from bltoolbox.training.experiment import Experiment
from bltoolbox.training.run_dir import RunDirectory


class Recorder(Listener):
    """Writes a run to disk as it happens."""

    def __init__(self, directory: RunDirectory, experiment: Experiment) -> None:
        self.directory = directory
        self.experiment = experiment
        self._environment: dict[str, Any] | None = None

    def started(self, experiment: Experiment) -> None:
        self._environment = environment(experiment)
        self.forms_chosen(FORMS.answers)
        self._status({"status": "running"})
        self.directory.log(
            f"started: {experiment.recipe.name}, {experiment.train.device},"
            f" {len(experiment.train)} training {'images' if experiment.recipe.of_images else 'tasks'}"
        )

    def forms_chosen(self, answers: Mapping[str, str]) -> None:
        """Forms are chosen when they are first needed, and a resumed run uses them from the start."""
        if self._environment is not None:
            self.directory.write_json(ENV_FILE, self._environment | {"forms": dict(answers)})

    def phase(self, sentence: str) -> None:
        self.directory.log(sentence)

    def stepped(self, record: Mapping[str, Any], seconds: float, fraction: float) -> None:
        self.directory.append(METRICS_LOG, json_line(record))
        timing = {"step": record["step"], "seconds": round(seconds, 6)}
        self.directory.append(TIMINGS_LOG, json_line(timing))

    def checked(self, check: Check, theta: Theta) -> None:
        self.directory.log(str(check))
        self.directory.append(CHECKS_LOG, json_line(check.as_dict()))
        self._save(theta_name(check.step), theta)
        self._save(LAST_THETA, theta)
        if check.best:
            self._save(BEST_THETA, theta)

    def aborted(self, theta: Theta, reason: str) -> None:
        self._save(LAST_THETA, theta)
        self._status({"status": reason})
        self.directory.log(reason)

    def finished(self, result: RunResult) -> None:
        self._save(LAST_THETA, result.last)
        self._save(THETA_FILE, result.theta)
        self.directory.log(f"finished: {result.status}")
        self._status(result.as_dict() | {"run_dir": str(self.directory.path), "finished": True})

    def _status(self, content: Mapping[str, Any]) -> None:
        described = {"metrics": [self.experiment.metric.as_dict()]}
        self.directory.write_json(STATUS_FILE, {**described, **content, "bltoolbox": bltoolbox.__version__})

    def _save(self, name: str, theta: Theta) -> None:
        self.directory.write_bytes(name, self.experiment.model(theta).encoded())
