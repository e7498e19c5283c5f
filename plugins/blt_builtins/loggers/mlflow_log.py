"""Runs in MLflow: parameters, figures, restored images, learned filters, θ and the report.

    loggers: [{name: mlflow, experiment: denoising, tags: [foe, baseline]}]

The settings of the recipe are parameters, the figures of `metrics.jsonl` metrics by step, and θ, report, recipe and
pictures artifacts. A resumed run continues the same entry. The server is that of `MLFLOW_TRACKING_URI`, or MLflow's
own default, a database in the current folder; with `folder`, a database in the run directory. `mlflow ui` shows them.

When to choose it: for a tracking server of one's own, or a local database without any service. It needs the package
mlflow: `pip install 'bltoolbox[mlflow]'`.

Reference: Zaharia et al., *Accelerating the machine learning lifecycle with MLflow*, IEEE Data Engineering Bulletin 41,
2018.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Gt

from blt_builtins.loggers.tracked import Tracked, client_package, results
from bltoolbox.plugin import RunResult, flatten, make_folder

#: Figures are sent in groups, at most this many at once and this many seconds apart.
_GROUP, _PAUSE = 500, 5.0
#: Parameters in one request, and the longest value.
_PARAMETERS, _LONGEST = 100, 500
#: A server that does not answer must not stop a training for the minutes that MLflow would wait.
_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}


class MlflowLog(Tracked):
    """Log to MLflow.

    Args:
        experiment: The experiment of MLflow that the run belongs to; created if it does not exist.
        run_name: The name of the run; by default those of the recipe and of the run directory.
        tags: Labels of the run; ``key=value`` is a tag with a value.
        folder: A folder for a database of this run alone, relative to the run directory.
        every: Number of steps between two that are logged; checks are always logged.
    """

    identifier_file: ClassVar[str] = "mlflow-id.txt"

    def __init__(
        self,
        experiment: str = "bltoolbox",
        run_name: str = "",
        tags: tuple[str, ...] = (),
        folder: Path | None = None,
        every: Annotated[int, Gt(0)] = 1,
    ) -> None:
        for key, value in _PATIENCE.items():
            os.environ.setdefault(key, value)
        super().__init__(run_name, every)
        self.mlflow = client_package("mlflow")
        self.experiment, self.tags, self.folder = experiment, tags, folder

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        return {"folder": "mlflow"}

    def begin(self, earlier: str | None) -> str:
        self.waiting: list[Any] = []
        self.sent_at = time.monotonic()
        logging.getLogger("mlflow").setLevel(
            logging.WARNING
        )  # its notes would print through the progress bar
        store, artifacts = self._store()
        self.client: Any = self.mlflow.MlflowClient(tracking_uri=store)
        if earlier is not None:
            self.client.update_run(earlier, status="RUNNING")
            self.run_id = earlier
            return earlier
        known = self.client.get_experiment_by_name(self.experiment)
        experiment = (
            known.experiment_id if known else self.client.create_experiment(self.experiment, artifacts)
        )
        tags = dict(tag.partition("=")[::2] for tag in self.tags)
        self.run_id = self.client.create_run(experiment, run_name=self.name, tags=tags).info.run_id
        self._send_parameters()
        return str(self.run_id)

    def _store(self) -> tuple[str | None, str | None]:
        """Where figures and artifacts are kept; None is the user's own setting of MLflow."""
        if self.folder is None:
            return None, None
        root = (self.root or Path()).absolute()
        make_folder(root / self.folder, within=root)
        folder = root / self.folder
        return f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()

    def _send_parameters(self) -> None:
        settings = flatten(self.recipe.to_dict())
        parameters = [self._parameter(key, value) for key, value in settings.items() if value is not None]
        for start in range(0, len(parameters), _PARAMETERS):
            self.client.log_batch(self.run_id, params=parameters[start : start + _PARAMETERS])

    def _parameter(self, key: str, value: Any) -> Any:
        return self.mlflow.entities.Param(key, str(value)[:_LONGEST])

    def send(self, figures: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        self.waiting += [
            self.mlflow.entities.Metric(name, value, now, step) for name, value in figures.items()
        ]
        if len(self.waiting) >= _GROUP or time.monotonic() - self.sent_at > _PAUSE:
            self._flush()

    def _flush(self) -> None:
        waiting, self.waiting = self.waiting, []
        for start in range(0, len(waiting), _GROUP):
            self.client.log_batch(self.run_id, metrics=waiting[start : start + _GROUP])
        self.sent_at = time.monotonic()

    def attach(self, result: RunResult) -> None:
        self.send({f"result.{name}": value for name, value in results(result).items()}, self.step)
        self._flush()
        self.client.set_tag(self.run_id, "status", result.status)
        for path in self.files():
            self.client.log_artifact(self.run_id, str(path))
        for path in self.pictures().values():
            self.client.log_artifact(self.run_id, str(path), "images")

    def close(self, outcome: str) -> None:
        self._flush()
        status = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}[outcome]
        self.client.set_terminated(self.run_id, status=status)
        self.is_open = False
