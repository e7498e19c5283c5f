"""Loggers: told everything, resumed with the run, harmless when they fail; csv and tensorboard."""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from conftest import Install
from test_report import TINY

from bltoolbox import Model, load_recipe, resume, run
from bltoolbox.bilevel.events import Listener
from bltoolbox.config.registry import load_registry
from bltoolbox.distributed.signals import Interrupted
from bltoolbox.errors import MissingError, RecipeError
from bltoolbox.runs.history import RunHistory
from bltoolbox.runs.settings import labels
from bltoolbox.testing.conformance import check_component
from bltoolbox.training.assemble import assemble
from bltoolbox.training.driver import resume_in
from bltoolbox.training.experiment import Experiment

QUICK = [*TINY, "baseline=null", "checkpoint.every=0"]

PLUGIN = '''
from bltoolbox.config.hooks import Component, hookimpl
from bltoolbox.bilevel.roles import Logger

class Loud(Logger):
    """Writes down what it is told.

    Args:
        fails: The event in which it raises.
    """
    def __init__(self, fails: str = "") -> None:
        if fails == "at once":
            raise ValueError("fails cannot be 'at once'; name an event")
        self.fails, self.told = fails, []

    def _note(self, event):
        self.told.append(event)
        if event == self.fails:
            raise RuntimeError("no connection")

    def started(self, experiment): self.where = experiment.run_dir; self._note("started")
    def resumed(self, step): self._note(f"resumed {step}")
    def stepped(self, record, seconds, fraction): self._note(f"step {record['step']}")
    def checked(self, check, theta): self._note(f"check {check.step}")
    def aborted(self, theta, reason): self._note("aborted")
    def finished(self, result): self._note("finished")

@hookimpl
def blt_components():
    return [Component("logger", "loud", f"{__name__}:Loud", "Loud.")]
'''


@pytest.fixture
def loud(install: Install) -> None:
    install("loud", {"loud": "loud_plugin"}, {"loud_plugin": PLUGIN})


class StopAt(Listener):
    """Interrupts a run when it draws the batch behind a step: once everybody has been told of it."""

    def __init__(self, step: int) -> None:
        self.step, self.seen = step, 0

    def started(self, experiment: Experiment) -> None:
        draw = experiment.sampler.next

        def stop(state: Mapping[str, Any]) -> Any:
            if self.seen == self.step:
                raise Interrupted(2)
            return draw(state)

        experiment.sampler.next = stop  # type: ignore[method-assign]

    def stepped(self, record: Mapping[str, Any], seconds: float, fraction: float) -> None:
        self.seen = record["step"]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# The kind


def test_loggers_are_told_everything(loud: None, tmp_path: Path) -> None:
    experiment = assemble(load_recipe("smoke", [*QUICK, "loggers=[loud, {name: loud, fails: never}]"]))
    experiment.run()
    for guarded in experiment.loggers:
        told = guarded.logger.told  # type: ignore[attr-defined]
        assert told[:2] == ["started", "check 0"] and told[-1] == "finished"
        assert [one for one in told if one.startswith("step")] == ["step 1", "step 2", "step 3", "step 4"]
        assert guarded.logger.where is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("event", ["started", "check 0", "step 2", "finished"])
def test_one_that_fails_is_left_out_and_the_run_goes_on(
    loud: None, event: str, caplog: pytest.LogCaptureFixture
) -> None:
    experiment = assemble(load_recipe("smoke", [*QUICK, f"loggers=[{{name: loud, fails: {event}}}, loud]"]))
    result = experiment.run()
    assert result.status == "budget spent" and result.steps == 4
    bad, good = (guarded.logger.told for guarded in experiment.loggers)  # type: ignore[attr-defined]
    assert bad[-1] == event and good[-1] == "finished"
    warnings = [one.message for one in caplog.records if "loud" in one.message]
    assert warnings == ["logger 'loud' failed (RuntimeError: no connection); the run continues without it"]


def test_a_resumed_run_says_where_it_goes_on(loud: None, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(load_recipe("smoke", [*QUICK, "loggers=[loud]"]), out=tmp_path / "run", listeners=[StopAt(2)])
    from bltoolbox.training.resume import reopen

    with reopen(tmp_path / "run", [], load_registry()) as reopened:
        resume_in(reopened.directory, reopened.experiment)
    (guarded,) = reopened.experiment.loggers
    told = guarded.logger.told  # type: ignore[attr-defined]
    assert told[:3] == ["started", "resumed 2", "step 3"]
    assert guarded.logger.where == tmp_path / "run"  # type: ignore[attr-defined]


def test_mistakes_are_refused_with_their_place(loud: None) -> None:
    with pytest.raises(RecipeError, match=r"loggers\[0\].*did you mean 'csv'"):
        load_recipe("smoke", ["loggers=[cvs]"])
    with pytest.raises(RecipeError, match=r"loggers: expected"):
        load_recipe("smoke", ["loggers=csv"])
    with pytest.raises(RecipeError, match="loggers: loud: fails cannot be 'at once'"):
        assemble(load_recipe("smoke", [*QUICK, "loggers=[{name: loud, fails: at once}]"]))


def test_loggers_are_of_no_consequence(loud: None, tmp_path: Path) -> None:
    plain = run(load_recipe("smoke", QUICK), out=tmp_path / "plain")
    with_one = run(load_recipe("smoke", [*QUICK, "loggers=[loud]"]), out=tmp_path / "told")
    for name, value in plain.theta.items():
        assert torch.equal(value, with_one.theta[name])
    recipes = [RunHistory.read(tmp_path / name).recipe for name in ("plain", "told")]
    assert recipes[1]["loggers"] == [{"name": "loud", "fails": ""}]
    assert labels(recipes) == ["", ""], "they do not tell runs apart"
    assert Model.load(tmp_path / "told").recipe.loggers == (), "a model needs none"


# csv


def test_csv_has_every_figure(tmp_path: Path) -> None:
    run(load_recipe("smoke", [*QUICK, "loggers=[csv]"]), out=tmp_path / "run")
    found = rows(tmp_path / "run" / "figures.csv")
    losses = {int(row["step"]): float(row["value"]) for row in found if row["name"] == "loss"}
    history = RunHistory.read(tmp_path / "run")
    assert losses == {one.step: one.loss for one in history.steps}
    tests = {int(row["step"]): float(row["value"]) for row in found if row["name"] == "evaluation_psnr"}
    assert tests == {one.step: one.values["evaluation_psnr"] for one in history.checks}
    assert float(found[-1]["seconds"]) > 0 and found[0]["step"] == "0"


def test_csv_goes_on_with_the_run(tmp_path: Path) -> None:
    recipe = load_recipe("smoke", [*QUICK, "loggers=[{name: csv, path: deep/figures.csv}]"])
    run(recipe, out=tmp_path / "whole")
    with pytest.raises(Interrupted):
        run(recipe, out=tmp_path / "parts", listeners=[StopAt(2)])
    file = tmp_path / "parts" / "deep" / "figures.csv"
    # A kill may come in the midst of a line, and behind steps that will come again.
    file.write_text(file.read_text() + "3,9,9,loss,1\n3,9,9,lo")
    resume(tmp_path / "parts")

    def key(path: Path) -> list[tuple[str, str, str]]:
        return [(row["step"], row["name"], row["value"]) for row in rows(path)]

    assert key(file) == key(tmp_path / "whole" / "deep" / "figures.csv")


def test_csv_refuses_a_damaged_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = load_recipe("smoke", [*QUICK, "loggers=[csv]"])
    with pytest.raises(Interrupted):
        run(recipe, out=tmp_path / "run", listeners=[StopAt(2)])
    file = tmp_path / "run" / "figures.csv"
    damaged = file.read_text().replace("\n1,", "\nx,", 1)
    file.write_text(damaged)
    resume(tmp_path / "run")
    assert f"logger 'csv' failed ({file} has a damaged line; delete the file" in caplog.text
    assert file.read_text() == damaged


# tensorboard


class Writer:
    """What torch's writer would be told."""

    made: ClassVar[list[Writer]] = []

    def __init__(self, folder: str, purge_step: int | None = None) -> None:
        self.folder, self.purge_step = folder, purge_step
        self.scalars: list[tuple[str, float, int]] = []
        self.images: list[tuple[str, torch.Size]] = []
        self.closed = False
        Writer.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def add_images(self, name: str, images: torch.Tensor, step: int) -> None:
        assert images.min() >= 0 and images.max() <= 1
        self.images.append((name, images.shape))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> type[Writer]:
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    Writer.made = []
    return Writer


def test_tensorboard_gets_scalars_and_filters(writer: type[Writer], tmp_path: Path) -> None:
    recipe = load_recipe("smoke", [*QUICK, "loggers=[{name: tensorboard, every: 2}]"])
    with pytest.raises(Interrupted):
        run(recipe, out=tmp_path / "run", listeners=[StopAt(2)])
    resume(tmp_path / "run")
    first, second = writer.made
    assert first.folder == second.folder == str(tmp_path / "run" / "tensorboard")
    assert (first.purge_step, second.purge_step) == (None, 3) and first.closed and second.closed
    steps = [step for name, _, step in [*first.scalars, *second.scalars] if name == "step/loss"]
    assert steps == [2, 4]
    assert {"step/seconds", "step/tol", "check/validation PSNR", "check/test PSNR", "result/test PSNR"} <= {
        name for name, _, _ in second.scalars + first.scalars
    }
    assert second.images == [("learned/filters", torch.Size([2, 3, 3, 3]))]


def test_tensorboard_that_is_missing_is_said_before_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingError, match=r"pip install 'bltoolbox\[tensorboard\]'"):
        run(load_recipe("smoke", [*QUICK, "loggers=[tensorboard]"]), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    registry = load_registry()
    outcomes = check_component(registry.get("logger", "tensorboard"), registry)
    assert [one.status for one in outcomes] == ["passed", "skipped"]
    assert "not installed" in outcomes[1].message


def test_tensorboard_writes_event_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    run(load_recipe("smoke", [*QUICK, "loggers=[tensorboard]"]), out=tmp_path / "run")
    (events,) = (tmp_path / "run" / "tensorboard").iterdir()
    assert events.name.startswith("events.out.tfevents") and events.stat().st_size > 1000


# Conformance


@pytest.mark.parametrize(
    ("body", "property", "message"),
    [
        ("def checked(self, check, theta): 1 / 0", "a complete run", "checked raised ZeroDivisionError"),
        ("def resumed(self, step): self.gone", "a resumed run", "resumed raised AttributeError"),
        ("def stepped(self, record, *_): record.clear()", "left unchanged", "stepped changed its argument"),
        ("def started(self, e): next(iter(e.theta.values())).zero_()", "left unchanged", "started changed"),
    ],
)
def test_conformance_catches(tmp_path: Path, body: str, property: str, message: str) -> None:
    file = tmp_path / "bad.py"
    head = "from bltoolbox.plugin import Component, Logger, hookimpl\n"
    hook = "    return [Component('logger', 'bad', f'{__name__}:Bad', 'Bad.')]\n"
    file.write_text(f"{head}class Bad(Logger):\n    {body}\n@hookimpl\ndef blt_components():\n{hook}")
    registry = load_registry([file])
    failed = {
        one.property: one.message
        for one in check_component(registry.get("logger", "bad"), registry)
        if one.status == "failed"
    }
    assert any(property in name and message in text for name, text in failed.items()), failed
