"""Runs in Weights & Biases: figures, restored images, learned filters, θ and the report.

    loggers: [{name: wandb, project: denoising, tags: [foe, baseline]}]

Each step is one row with the figures of `metrics.jsonl`; the result has the metrics of the test images. θ, report and
recipe are an artifact. A resumed run continues the same entry. Offline entries are in the folder `wandb` of the run
directory; `wandb sync` uploads them later. Account, team and server come from the settings of wandb (`wandb login`,
`WANDB_ENTITY`, `WANDB_BASE_URL`), never from a recipe.

When to choose it: to compare runs of a group in a browser. It needs the package wandb:
`pip install 'bltoolbox[wandb]'`.

Reference: Biewald, *Experiment tracking with Weights and Biases*, 2020, software available from wandb.com.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Gt

from blt_builtins.loggers.tracked import FILES, Tracked, client_package, results
from bltoolbox.plugin import RunResult

#: Seconds to wait for the service: before the first step, and for uploads after the last one.
_START, _END = 30, 120


class WandbLog(Tracked):
    """Log to Weights & Biases.

    Args:
        project: The project that the run belongs to.
        run_name: The name of the run; by default those of the recipe and of the run directory.
        tags: Labels to filter runs by.
        group: Runs of one group are shown together.
        mode: ``auto`` is ``WANDB_MODE`` if that is set, else online after ``wandb login`` and offline before it.
        every: Number of steps between two that are logged; checks are always logged.
    """

    identifier_file: ClassVar[str] = "wandb-id.txt"

    def __init__(
        self,
        project: str = "bltoolbox",
        run_name: str = "",
        tags: tuple[str, ...] = (),
        group: str = "",
        mode: Literal["auto", "online", "offline", "disabled"] = "auto",
        every: Annotated[int, Gt(0)] = 1,
    ) -> None:
        super().__init__(run_name, every)
        self.wandb = client_package("wandb")
        self.project, self.tags, self.group, self.mode = project, tags, group, mode

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        return {"mode": "offline"}

    def begin(self, earlier: str | None) -> str:
        # Without a console of wandb's own, which would print through the progress bar.
        settings = {"silent": True, "console": "off", "init_timeout": _START, "finish_timeout": _END}
        self.run: Any = self.wandb.init(
            project=self.project,
            name=self.name,
            tags=list(self.tags),
            group=self.group or None,
            config=self.recipe.to_dict(),
            dir=str(self.root or Path()),
            id=earlier,
            resume="allow",
            mode=self._mode(),
            reinit="create_new",
            allow_val_change=True,  # the budget of a resumed run may have grown
            settings=self.wandb.Settings(**settings),
        )
        return str(self.run.id)

    def _mode(self) -> str:
        """Never one that asks for a password in the middle of a run."""
        if self.mode != "auto":
            return self.mode
        if chosen := os.environ.get("WANDB_MODE"):
            return chosen
        return "online" if self.wandb.login(prompt=False) else "offline"

    def send(self, figures: Mapping[str, float], step: int) -> None:
        self.run.log(dict(figures), step=step)

    def attach(self, result: RunResult) -> None:
        self.run.summary.update({**results(result), "status": result.status})
        for title, path in self.pictures().items():
            self.run.log({title: self.wandb.Image(str(path))}, step=self.step)
        for path in self.files(("report.html",)):
            self.run.log({"report": self.wandb.Html(str(path))}, step=self.step)
        artifact = self.wandb.Artifact(
            re.sub(r"[^\w.-]+", "-", f"{self.recipe.name}-{self.run.id}"), type="model"
        )
        for path in self.files(FILES):
            artifact.add_file(str(path))
        if self.files(FILES):
            self.run.log_artifact(artifact)

    def close(self, outcome: str) -> None:
        if outcome == "interrupted":
            self.run.mark_preempting()
        self.run.finish(exit_code=0 if outcome == "finished" else 1)
        self.is_open = False
