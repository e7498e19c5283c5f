"""When checkpoints are written, and which one a run is resumed from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from bltoolbox.config.names import CHECKPOINTS
from bltoolbox.training.checkpoint import Checkpoints
from bltoolbox.training.experiment import Experiment
from bltoolbox.training.run_dir import RunDirectory

#: The largest share of the time spent on checkpoints, however often they are requested.
_SHARE = 0.05


class CheckpointKeeper:
    """The checkpoints of one run, as often as its recipe requests and their share of the time allows."""

    def __init__(self, directory: RunDirectory, experiment: Experiment) -> None:
        self.directory = directory
        self.experiment = experiment
        self.ranks = directory.ranks
        folder = directory.path / CHECKPOINTS
        self.checkpoints = Checkpoints(folder, experiment.oracle.stores, self.ranks)
        self.wanted = self.every = experiment.recipe.checkpoint.every
        self.kept_at = self.ranks.now()
        #: The content of the last checkpoint.
        self.last: dict[str, Any] = {}

    def due(self) -> bool:
        """Whether a checkpoint is due and within the share of time allowed."""
        return self.ranks.now() - self.kept_at >= self.every

    def keep(self, content: Mapping[str, Any]) -> None:
        """Write a checkpoint, with the lengths of the logs."""
        began = self.ranks.now()
        run = dict(content)
        lengths = self.directory.log_lengths()
        self.last = {"own": run.pop("own", None), "run": run, "lengths": lengths}
        self.checkpoints.save(self.last)
        self.kept_at = self.ranks.now()
        if self.wanted:
            self.every = max(self.wanted, (self.kept_at - began) * (1 - _SHARE) / _SHARE)

    def finish(self) -> None:
        """Replace the checkpoints by the last one without warm starts, unless they are asked for or needed."""
        if self.experiment.recipe.checkpoint.keep_finished or self.experiment.needs_memory or not self.last:
            return
        run = dict(self.last["run"]) | {"dropped": True}
        self.checkpoints.save(dict(self.last) | {"own": None, "run": run}, warm_starts=False)

    def load(self) -> tuple[dict[str, Any], dict[str, int], list[str]]:
        """The state of the newest usable checkpoint, the lengths of the logs, and why newer ones were skipped."""
        content, passed = self.checkpoints.load(self._flaw)
        return content["run"] | {"own": content["own"]}, content["lengths"], passed

    def _flaw(self, content: Mapping[str, Any]) -> str | None:
        """Why an intact checkpoint cannot be resumed from; None if it can."""
        run = content["run"]
        best = run.get("best") or (0.0, 0, run.get("theta"))
        if not isinstance(best, list | tuple) or len(best) != 3:
            return "contains a best θ of another form"
        for theta in (run.get("theta"), run.get("before"), best[2]):
            if not isinstance(theta, Mapping) or not all(
                isinstance(value, Tensor) for value in theta.values()
            ):
                return "contains no θ"
            if (flaw := self.experiment.find_flaw(theta)) is not None:
                return f"contains an unusable θ: {flaw}"
        return None
