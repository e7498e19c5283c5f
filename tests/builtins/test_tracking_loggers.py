"""Loggers of tracking services, with the real packages: wandb offline, mlflow with a local database."""

from __future__ import annotations

import json
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_loggers import QUICK, StopAt

from bltoolbox import load_recipe, resume, run
from bltoolbox.distributed.signals import Interrupted
from bltoolbox.errors import MissingError
from bltoolbox.runs.history import RunHistory

#: The packages under mlflow deprecate things that mlflow uses.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def no_service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing that these tests do leaves the machine or the folder of the test."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.chdir(tmp_path)


def interrupted_and_resumed(options: str, out: Path) -> None:
    recipe = load_recipe("smoke", [*QUICK, f"loggers=[{{{options}}}]"])
    with pytest.raises(Interrupted):
        run(recipe, out=out, listeners=[StopAt(2)])
    resume(out)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_one_that_is_missing_is_reported_before_the_run(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingError, match=rf"pip install 'bltoolbox\[{name}\]'"):
        run(load_recipe("smoke", [*QUICK, f"loggers=[{name}]"]), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_damaged_identifier_costs_the_logger_only(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip(name, reason=f"the extra {name} is not installed")
    recipe = load_recipe("smoke", [*QUICK, f"loggers=[{name}]"])
    with pytest.raises(Interrupted):
        run(recipe, out=tmp_path / "run", listeners=[StopAt(1)])
    (tmp_path / "run" / f"{name}-id.txt").write_text("../../elsewhere")
    assert resume(tmp_path / "run").steps == 4
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len([text for text in warnings if f"logger '{name}' failed" in text and "damaged" in text]) == 1


# wandb


def frames(path: Path) -> Iterator[bytes]:
    """The records of an offline file: blocks of 32 kB, each record with checksum, length and type."""
    content, place, record = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # complete, or the last piece of several
            yield record
            record = b""


def offline(out: Path, runs: int) -> list[Any]:
    """All records; wandb's own process may still write the last ones."""
    for _ in range(100):
        records = written(out)
        if sum(record.WhichOneof("record_type") == "exit" for record in records) == runs:
            return records
        time.sleep(0.1)
    raise AssertionError("wandb did not complete its files")


def written(out: Path) -> list[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    records = []
    for file in sorted(out.glob("wandb/offline-run-*/run-*.wandb")):
        for content in frames(file):
            records.append(Record())
            records[-1].ParseFromString(content)
    return records


def test_wandb_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    interrupted_and_resumed("name: wandb, run_name: first, tags: [a, b], group: g", tmp_path / "run")
    records = offline(tmp_path / "run", runs=2)
    runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert len({one.run_id for one in runs}) == 1, "a resumed run continues the same entry"
    first = runs[0]
    assert (first.project, first.display_name, list(first.tags), first.run_group) == (
        "bltoolbox",
        "first",
        ["a", "b"],
        "g",
    )
    rows: dict[int, dict[str, Any]] = defaultdict(dict)
    for record in records:
        if record.WhichOneof("record_type") == "history":
            row = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
            rows[int(float(row["_step"]))] |= row
    history = RunHistory.read(tmp_path / "run")
    assert {step: float(row["loss"]) for step, row in rows.items() if "loss" in row} == {
        one.step: one.loss for one in history.steps
    }
    assert float(rows[0]["validation_psnr"]) == history.checks[0].values["validation_psnr"]
    assert {"report", "restored images", "filters", "curves"} <= rows[4].keys()
    files = {
        entry.path
        for record in records
        if record.WhichOneof("record_type") == "artifact"
        for entry in record.artifact.manifest.contents
    }
    assert {"theta.safetensors", "report.html", "resolved.yaml"} == files
    summary = {
        item.key or item.nested_key[0]: json.loads(item.value_json)
        for record in records
        if record.WhichOneof("record_type") == "summary"
        for item in record.summary.update
    }
    assert summary["psnr_after"] == history.summary["psnr_after"] and summary["status"] == "budget spent"


def test_wandb_that_cannot_be_reached_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wandb = pytest.importorskip("wandb", reason="the extra wandb is not installed")

    def refuse(**settings: Any) -> None:
        assert settings["mode"] == "online"
        raise wandb.errors.CommError("no route to host")

    monkeypatch.setattr(wandb, "init", refuse)
    result = run(
        load_recipe("smoke", [*QUICK, "loggers=[{name: wandb, mode: online}]"]), out=tmp_path / "run"
    )
    assert result.steps == 4
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["logger 'wandb' failed (CommError: no route to host); the run continues without it"]


# mlflow


def test_mlflow_with_a_database_of_its_own(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    out = tmp_path / "run"
    interrupted_and_resumed("name: mlflow, folder: mlflow, run_name: first, tags: [a, data=leaves]", out)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{out / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("bltoolbox")
    (entry,) = client.search_runs([experiment.experiment_id])
    assert entry.info.run_id == (out / "mlflow-id.txt").read_text().strip()
    assert (entry.info.run_name, entry.info.status) == ("first", "FINISHED")
    assert entry.data.tags["data"] == "leaves" and entry.data.tags["a"] == ""
    assert entry.data.params["regularizer.name"] == "foe"
    history = RunHistory.read(out)
    losses = {one.step: one.value for one in client.get_metric_history(entry.info.run_id, "loss")}
    assert losses == {one.step: one.loss for one in history.steps}
    assert entry.data.metrics["result.psnr_after"] == history.summary["psnr_after"]
    names = {one.path for one in client.list_artifacts(entry.info.run_id)}
    assert names == {"theta.safetensors", "report.html", "resolved.yaml", "images"}
    pictures = {one.path for one in client.list_artifacts(entry.info.run_id, "images")}
    assert {"images/restored.png", "images/filters.png"} <= pictures


def test_mlflow_that_cannot_be_reached_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    result = run(load_recipe("smoke", [*QUICK, "loggers=[mlflow]"]), out=tmp_path / "run")
    assert result.steps == 4
    warnings = [record.getMessage() for record in caplog.records if record.getMessage().startswith("logger")]
    assert len(warnings) == 1 and "the run continues without it" in warnings[0]
