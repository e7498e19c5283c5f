"""What the report shows: every metric, dots on an axis, constants as facts, differences, labels that can be read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from test_report import TINY

from bltoolbox import load_recipe, run
from bltoolbox.errors import UsageError
from bltoolbox.reports.compare.comparison import compare
from bltoolbox.reports.html.build import write_report
from bltoolbox.reports.html.curves import constants, curves
from bltoolbox.reports.html.facts import gather
from bltoolbox.reports.html.tables import columns, ladder
from bltoolbox.runs.history import RunHistory
from bltoolbox.runs.labels import given_labels, run_names, short_labels
from bltoolbox.runs.settings import shown


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "first"
    run(load_recipe("smoke", TINY), out=out)
    return out


@pytest.fixture(scope="module")
def second(first: Path) -> Path:
    """A run that differs in much."""
    out = first.parent / "second"
    settings = [
        "seed=3",
        "regularizer.filters=3",
        "sampler.size=3",
        "upper_optimizer.step=1e-3",
        "baseline=null",
    ]
    run(load_recipe("smoke", [*TINY, *settings]), out=out)
    return out


def test_the_ladder_has_every_metric_on_a_true_axis(first: Path) -> None:
    (facts,) = gather([RunHistory.read(first)])
    found = ladder(facts)
    assert found is not None and [metric.label for metric in found.others] == ["SSIM", "NRMSE"]
    summary = json.loads((first / "status.json").read_text())
    whens = {"measured": "before", "initial": "initial", "baseline": "baseline", "learned": "after"}
    values = {row.key: summary[f"psnr_{whens[row.key]}"] for row in found.rows}
    places = {row.key: float(row.place) for row in found.rows}
    low, high = min(values.values()), max(values.values())
    for key, value in values.items():
        assert places[key] == pytest.approx(4 + 92 * (value - low) / (high - low), abs=0.01)
    for row in found.rows:
        assert row.others[0] == f"{summary[f'ssim_{whens[row.key]}']:.4f}"
    assert (found.low, found.high) == (f"{low:.2f}", f"{high:.2f}")


def test_the_pictures_come_first_and_have_every_metric(first: Path) -> None:
    page = (first / "report.html").read_text()
    assert page.index('id="images"') < page.index("id='result'") < page.index('id="curves"')
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    learned = next(one for one in data["runs"][0]["scenes"][0]["variants"] if one["key"] == "learned")
    assert learned["values"].keys() == {"psnr", "ssim", "nrmse"}
    assert [metric["name"] for metric in data["metrics"]] == ["psnr", "ssim", "nrmse"]


def test_what_is_constant_is_a_fact_and_not_a_plot(first: Path) -> None:
    history = RunHistory.read(first)
    found = constants([curves(history, history.metric)], history.metric)
    assert found["steps"] == [("Step size", "0.01")] and "iterations" not in found
    page = (first / "report.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    keys = [chart["key"] for chart in data["charts"]]
    assert "loss" in keys and "steps" not in keys and "tolerances" not in keys
    assert "<dt>Step size</dt><dd>0.01, at every step</dd>" in page


def test_noise_levels_are_fractions(first: Path) -> None:
    page = (first / "report.html").read_text()
    assert "noise: {name: gaussian, level: 25/255}" in page and "0.0980392" not in page
    assert shown([5 / 255, 50 / 255]) == "[5/255, 50/255]" and shown([1, 2]) == "[1, 2]"


def test_several_runs_have_a_table_of_differences(first: Path, second: Path, tmp_path: Path) -> None:
    write_report([first, second], tmp_path / "both.html")
    page = (tmp_path / "both.html").read_text()
    assert "<summary>Differences: " in page and "regularizer.<wbr>filters" in page
    names = [column.name for column in columns(gather([RunHistory.read(first), RunHistory.read(second)]))]
    assert names[:3] == ["Test PSNR", "Test SSIM", "Test NRMSE"]


def test_runs_that_differ_in_much_go_by_their_names(first: Path, second: Path) -> None:
    runs = [RunHistory.read(first), RunHistory.read(second)]
    assert [facts.label for facts in gather(runs)] == ["first", "second"]
    assert [group.label for group in compare(runs).groups] == ["first", "second"]
    given = given_labels(["A", "B"], [first, second])
    assert [facts.label for facts in gather(runs, given)] == ["A", "B"]
    assert [group.label for group in compare(runs, given=given).groups] == ["A", "B"]
    with pytest.raises(UsageError, match="2 runs but 1 labels"):
        given_labels(["A"], [first, second])


def test_short_labels_are_kept_and_names_are_distinct(tmp_path: Path) -> None:
    paths = [tmp_path / "a" / "x", tmp_path / "b" / "x"]
    assert short_labels(["step=1", "step=2"], paths) == ["step=1", "step=2"]
    assert short_labels(["step=1, size=2, seed=3, a=4", "step=2"], paths) == ["a/x", "b/x"]
    for path, recipe in zip(paths, ("denoise", "deblur"), strict=True):
        path.mkdir(parents=True)
        (path / "env.json").write_text(json.dumps({"recipe": recipe}))
    assert run_names(paths) == ["denoise", "deblur"]
