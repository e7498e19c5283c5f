"""``blt compare``: histories read from whole and damaged directories, groups, levels, figures and refusals."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import Call, caller

from bltoolbox.config.yaml_text import dump
from bltoolbox.reports.compare.comparison import band, compare, default_levels, running_mean
from bltoolbox.runs.history import RunHistory
from bltoolbox.runs.metric import UNDESCRIBED, Metric

RECIPE: dict[str, Any] = {
    "seed": 0,
    "noise": 0.1,
    "sampler": {"name": "epoch", "size": 2},
    "upper_optimizer": {"name": "isgd", "step": 0.01},
    "budget": {"computations": None, "steps": 10, "seconds": None},
}


def make_run(
    path: Path,
    psnrs: Sequence[float] = (20.0, 25.0, 27.0),
    *,
    test: bool = True,
    finished: bool = True,
    losses: Sequence[float | None] | None = None,
    **settings: Any,
) -> Path:
    """A run directory as a run leaves it: five steps between two checks, 100 computations and half a second each."""
    path.mkdir(parents=True)
    (path / "resolved.yaml").write_text(dump(RECIPE | settings))
    name = "evaluation_psnr" if test else "validation_psnr"
    steps = 5 * (len(psnrs) - 1)
    values = losses or [10.0 / step for step in range(1, steps + 1)]
    rows: dict[str, list[dict[str, Any]]] = {"metrics": [], "timings": [], "checks": []}
    for step in range(steps + 1):
        if step:
            rows["metrics"].append({"step": step, "computations": 100 * step, "loss": values[step - 1]})
            rows["timings"].append({"step": step, "seconds": 0.5 * step})
        if step % 5 == 0:
            check = {"step": step, "computations": 100 * step, name: psnrs[step // 5], "best": True}
            rows["checks"].append(check)
    for kind, lines in rows.items():
        (path / f"{kind}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    status: dict[str, Any] = {"status": "running"}
    if finished:
        status = {"status": "budget spent", "finished": True, "steps": steps, "computations": 100 * steps}
        status |= {"seconds": 0.5 * steps, "psnr_after": psnrs[-1], "psnr_validation": psnrs[-1]}
    (path / "status.json").write_text(json.dumps(status))
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """``blt compare`` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return caller("compare", capfd)


def histories(*paths: Path) -> list[RunHistory]:
    return [RunHistory.read(path) for path in paths]


# Reading


def test_a_history_lines_up_steps_times_and_checks(tmp_path: Path) -> None:
    run = RunHistory.read(make_run(tmp_path / "run"))
    assert run.finished and run.status == "budget spent" and run.notes == []
    assert (run.step_count, run.computations, run.seconds, run.tested(run.metric)) == (10, 1000, 5.0, 27.0)
    assert [(one.step, one.computations, one.seconds) for one in run.checks] == [
        (0, 0, 0.0),
        (5, 500, 2.5),
        (10, 1000, 5.0),
    ]
    assert run.has("evaluation", run.metric) and not run.has("validation", run.metric)
    reached = run.reached(25.0, "evaluation", run.metric)
    assert reached is not None and (reached.computations, reached.seconds) == (500, 2.5)
    assert run.reached(27.1, "evaluation", run.metric) is None
    steps = [check.step for cost in (0, 499, 500, 1e9) if (check := run.check_at(cost))]
    assert steps == [0, 0, 5, 10]
    assert run.theta_file(run.checks[1]) == tmp_path / "run" / "thetas" / "000005.safetensors"


def test_what_is_damaged_is_left_out_and_said(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", finished=False, losses=[None, *[3.0] * 9])
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[3] = "\x00\x00"
    (run / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 11, "comp']))
    (run / "checks.jsonl").unlink()
    (run / "timings.jsonl").write_bytes(b'{"step": 1, "seconds": 0.5}\n[1, 2]\n{"step": "x"}\n\xff\xfe\n')
    (run / "status.json").write_text("{")
    history = RunHistory.read(run)
    assert [one.step for one in history.steps] == [1, 2, 3, 5, 6, 7, 8, 9, 10]
    assert history.steps[0].loss is None and history.steps[0].seconds == 0.5
    assert history.steps[1].seconds is None and history.seconds == 0.5
    assert not history.finished and history.status == "unknown"
    assert history.notes == [
        "status.json is missing or damaged",
        "timings.jsonl: lines 2, 4 cannot be read and are left out",
        "metrics.jsonl: lines 4, 11 cannot be read and are left out",
    ]
    (run / "resolved.yaml").write_text("a: [")
    (run / "metrics.jsonl").unlink()
    empty = RunHistory.read(run)
    assert empty.steps == [] and empty.recipe == {} and empty.computations == 0
    assert "resolved.yaml is damaged, so its settings are unknown" in empty.notes
    assert "metrics.jsonl is missing" in empty.notes


def test_a_run_without_checks_of_its_own_has_those_in_its_metrics(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "checks.jsonl").unlink()
    with (run / "metrics.jsonl").open("a") as log:
        log.write('{"step": 11, "computations": 1100, "loss": NaN, "validation_psnr": 28.5}\n')
    history = RunHistory.read(run)
    assert [(check.step, dict(check.values)) for check in history.checks] == [(11, {"validation_psnr": 28.5})]
    assert history.steps[-1].loss is None, "NaN is no loss"


def test_a_run_that_was_killed_is_told_from_one_that_goes_on(tmp_path: Path) -> None:
    import fcntl

    run = make_run(tmp_path / "run", finished=False)
    assert RunHistory.read(run).status == "killed"
    with (run / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert RunHistory.read(run).status == "running"
    assert RunHistory.read(run).status == "killed"


def test_reading_needs_no_torch() -> None:
    script = (
        "import sys, bltoolbox.runs.history, bltoolbox.reports.compare.comparison, bltoolbox.cli.compare\n"
        "print([name for name in ('torch', 'numpy', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, check=True)
    assert done.stdout.strip() == "[]"


# Comparing


def test_a_longer_run_with_more_checks_is_no_other_setting(tmp_path: Path) -> None:
    longer = {"budget": {"steps": 99}, "validation": {"count": 4, "checks": 20}}
    runs = histories(
        make_run(tmp_path / "a", seed=1, validation={"count": 4}),
        make_run(tmp_path / "b", seed=2, **longer),
        make_run(tmp_path / "c", seed=2, validation={"count": 5}),
    )
    assert [len(group.runs) for group in compare(runs).groups] == [2, 1]


def test_other_draws_of_the_data_of_a_problem_are_one_group(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / f"{seed}-{rows}", seed=seed, problem={"data": {"seed": seed, "examples": rows}})
        for seed in range(3)
        for rows in (40, 80)
    ]
    groups = compare(histories(*runs)).groups
    assert [len(group.runs) for group in groups] == [3, 3]
    assert [group.title for group in groups] == [
        "problem.data.examples=40 (3 runs)",
        "problem.data.examples=80 (3 runs)",
    ]


def test_seeds_are_one_group_and_labels_name_what_differs(tmp_path: Path) -> None:
    long = {"name": "isgd", "step": 0.1}
    runs = histories(
        make_run(tmp_path / "a", seed=1),
        make_run(tmp_path / "b", upper_optimizer=long),
        make_run(tmp_path / "c", seed=0),
        make_run(tmp_path / "d", upper_optimizer={"name": "maid", "eps": 1}),
    )
    groups = compare(runs).groups
    assert [[run.path.name for run in group.runs] for group in groups] == [["c", "a"], ["b"], ["d"]]
    assert [group.title for group in groups] == [
        "upper_optimizer=isgd, upper_optimizer.step=0.01 (2 runs)",
        "upper_optimizer=isgd, upper_optimizer.step=0.1",
        "upper_optimizer=maid",
    ]
    assert [group.label for group in compare([runs[0], runs[2]]).groups] == ["seed=0, 1"]
    assert [group.label for group in compare(runs[:1]).groups] == ["a"], (
        "where nothing differs, the directory"
    )
    shutil.copytree(tmp_path / "a", tmp_path / "again")
    same = compare([*runs[:1], RunHistory.read(tmp_path / "again")]).groups
    assert [group.label for group in same] == ["a, again"]
    damaged = make_run(tmp_path / "damaged")
    (damaged / "resolved.yaml").write_text("[")
    labels = [group.label for group in compare([*runs[:2], RunHistory.read(damaged)]).groups]
    assert labels == ["upper_optimizer.step=0.01", "upper_optimizer.step=0.1", "damaged"]


def test_levels_are_round_and_reached_by_someone(tmp_path: Path) -> None:
    slow, fast = histories(
        make_run(tmp_path / "slow", (20.1, 21.0, 22.0)), make_run(tmp_path / "fast", (20.3, 25.0, 28.4))
    )
    assert default_levels([slow, fast], "evaluation", UNDESCRIBED) == [24.0, 26.0, 28.0]
    assert default_levels([slow], "evaluation", UNDESCRIBED) == [21.0, 21.5, 22.0]
    assert (
        default_levels(
            [RunHistory.read(make_run(tmp_path / "down", (20.0, 19.0)))], "evaluation", UNDESCRIBED
        )
        == []
    )
    assert default_levels([], "evaluation", UNDESCRIBED) == []
    comparison = compare([slow, fast], [28.0, 21.0])
    assert comparison.levels == [21.0, 28.0]


NRMSE = Metric("nrmse", "NRMSE", "", 4, higher=False)


def described(path: Path, metric: Metric) -> Path:
    """The run of ``make_run``, as one that chose by another metric records it."""
    for file in path.glob("*.json*"):
        file.write_text(file.read_text().replace("psnr", metric.name))
    status = json.loads((path / "status.json").read_text()) | {"metrics": [metric.as_dict()]}
    (path / "status.json").write_text(json.dumps(status))
    return path


def test_less_may_be_better(tmp_path: Path) -> None:
    run = RunHistory.read(described(make_run(tmp_path / "run", (0.5, 0.31, 0.22)), NRMSE))
    assert run.metric == NRMSE and run.best("evaluation", run.metric) == 0.22
    comparison = compare([run])
    assert comparison.quality == "test NRMSE"
    assert all(0.22 <= level < 0.5 for level in comparison.levels) and len(comparison.levels) == 3
    reached = run.reached(0.4, "evaluation", NRMSE)
    assert reached is not None and reached.step == 5, "0.31 is better than 0.4, and 0.5 is not"
    assert run.reached(0.2, "evaluation", NRMSE) is None


def test_runs_that_chose_by_different_metrics(tmp_path: Path) -> None:
    runs = histories(
        make_run(tmp_path / "a"),
        make_run(tmp_path / "b", seed=1),
        described(make_run(tmp_path / "c", (0.5, 0.31, 0.22), seed=2), NRMSE),
    )
    comparison = compare(runs)
    assert comparison.metric == UNDESCRIBED
    assert any("c: no check has a test PSNR" in note for note in comparison.notes)


def test_a_metric_that_is_damaged_is_not_believed(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    status = json.loads((path / "status.json").read_text())
    good = UNDESCRIBED.as_dict()
    changes = [{"digits": 10**9}, {"digits": True}, {"name": "../x"}, {"more": 1}]
    for wrong in ({}, [], [1], *([good | change] for change in changes)):
        (path / "status.json").write_text(json.dumps(status | {"metrics": wrong}))
        assert RunHistory.read(path).metrics == (UNDESCRIBED,)


def test_test_psnr_only_where_all_runs_have_it(tmp_path: Path) -> None:
    test, held_out = histories(make_run(tmp_path / "a"), make_run(tmp_path / "b", test=False, noise=0.2))
    assert compare([test]).quality == "test PSNR"
    assert compare([held_out]).quality == "validation PSNR"
    mixed = compare([test, held_out])
    assert mixed.quality == "test PSNR"
    assert any("b: no check has a test PSNR" in note for note in mixed.notes)


def test_running_means_and_bands() -> None:
    assert running_mean([4.0, 2.0, 0.0, 2.0], 1) == [4.0, 2.0, 0.0, 2.0]
    assert running_mean([4.0, 2.0, 0.0, 2.0], 3) == [4.0, 2.0, pytest.approx(4 / 3), 1.0]
    assert running_mean([], 3) == []
    low, high = [(0.0, 0.0), (2.0, 2.0)], [(1.0, 3.0), (4.0, 6.0)]
    found = band([low, high, []])
    assert found is not None
    assert (found.x[0], found.x[-1]) == (1.0, 2.0), "where both are known"
    assert (found.low[0], found.mean[0], found.high[0]) == (1.0, 2.0, 3.0)
    assert (found.low[-1], found.mean[-1], found.high[-1]) == (2.0, 3.0, 4.0)
    assert band([[(0.0, 1.0)], [(2.0, 1.0)]]) is None and band([[]]) is None
    logarithmic = band([[(1.0, 0.0), (100.0, 2.0)]] * 2, log=True)
    assert logarithmic is not None
    for x, y in zip(logarithmic.x, logarithmic.mean, strict=True):
        assert y == pytest.approx(math.log10(x))


def test_until_its_first_step_a_run_is_as_good_as_at_its_start(tmp_path: Path) -> None:
    comparison = compare(histories(make_run(tmp_path / "run")))
    curve = comparison.qualities(comparison.runs[0], "computations")
    assert [y for _, y in curve] == [20.0, 20.0, 25.0, 27.0]
    assert [x for x, _ in curve] == pytest.approx([0, 100, 500, 1000]) and curve[1][0] < 100


# The command


def test_json_has_figures_levels_and_curves(here: Call, tmp_path: Path) -> None:
    make_run(tmp_path / "a", (20.0, 25.0, 27.0))
    make_run(tmp_path / "b", (20.0, 26.0, 28.0), seed=1)
    make_run(tmp_path / "c", (20.0, 24.0, 24.5), noise=0.2)
    done = here("a", "b", "c", "a", "--level", "26", "--level", "24", "--smooth", "1", "--json")
    assert done.returncode == 0 and done.stderr == ""
    facts = json.loads(done.stdout)
    assert facts["psnr"] == "test" and facts["levels"] == [24.0, 26.0] and facts["figure"] == "compare.png"
    seeds, other = facts["groups"]
    assert [seeds["label"], other["label"]] == ["noise=0.1", "noise=0.2"]
    assert [run["run_dir"] for run in seeds["runs"]] == ["a", "b"]
    assert seeds["best_psnr"] == {"mean": 27.5, "low": 27.0, "high": 28.0, "count": 2}
    assert seeds["levels"][1]["computations"] == {"mean": 750.0, "low": 500.0, "high": 1000.0, "count": 2}
    assert seeds["levels"][1]["seconds"]["mean"] == 3.75
    assert other["levels"][1]["computations"] is None and other["final_loss"]["mean"] == 1.0
    run = other["runs"][0]
    assert run["levels"][0] == {"psnr": 24.0, "step": 5, "computations": 500.0, "seconds": 2.5}
    assert run["curves"]["loss"][0] == {"step": 1, "computations": 100.0, "seconds": 0.5, "loss": 10.0}
    assert len(run["curves"]["checks"]) == 3
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_tables_are_plain_where_nobody_looks(here: Call, tmp_path: Path) -> None:
    make_run(tmp_path / "a", (20.0, 25.0, 27.0))
    make_run(tmp_path / "b", (20.0, 26.0, 28.0), seed=1)
    make_run(tmp_path / "c", (20.0, 24.0, 24.5), finished=False, noise=0.2)
    done = here("a", "b", "c", "--level", "27.5")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    seeds = next(line for line in lines if line.startswith("noise=0.1"))
    assert seeds.split()[1:6] == ["2", "27.50", "(27.00", "to", "28.00)"]
    assert next(line for line in lines if line.startswith("noise=0.2")).split()[1:4] == ["0", "of", "1"]
    assert lines[-2].split() == ["noise=0.1", "1,000", "(1", "of", "2)", "5.0", "(1", "of", "2)"]
    assert lines[-1].split() == ["noise=0.2", "–", "–"]
    assert "note: c: the run is not finished (killed)" in done.stderr
    assert "compare.png written" in done.stderr


@pytest.mark.parametrize(
    ("name", "magic"), [("f.png", b"\x89PNG"), ("new/f.pdf", b"%PDF"), ("F.SVG", b"<?xml")]
)
def test_the_name_says_the_format(name: str, magic: bytes, here: Call, tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    assert here("a", "-o", name).returncode == 0
    content = (tmp_path / name).read_bytes()
    assert content.startswith(magic)
    if magic == b"<?xml":
        assert b"mean test PSNR in dB" in content, "letters stay letters"
    refused = here("a", "-o", name)
    assert refused.returncode == 2 and "--force" in refused.stderr
    assert here("a", "-o", name, "--force").returncode == 0


def test_a_sweep_stands_for_its_runs(here: Call, tmp_path: Path) -> None:
    for name, noise in (("noise=0.1", 0.1), ("noise=0.2", 0.2)):
        make_run(tmp_path / "sweep" / name, noise=noise)
    make_run(tmp_path / "sweep" / "set-aside" / "noise=0.1", noise=0.1)
    cells = [{"name": f"noise={noise}"} for noise in (0.2, 0.1, 0.3)]
    (tmp_path / "sweep" / "sweep.json").write_text(json.dumps({"cells": cells}))
    done = here("sweep", "--json")
    labels = [group["label"] for group in json.loads(done.stdout)["groups"]]
    assert labels == ["noise=0.2", "noise=0.1"]
    assert done.stderr.splitlines() == ["note: sweep/noise=0.3 has not been started"]
    (tmp_path / "sweep" / "sweep.json").write_text("{")
    done = here("sweep", "sweep/noise=0.1", "--json", "--force")
    assert [group["label"] for group in json.loads(done.stdout)["groups"]] == ["noise=0.1", "noise=0.2"]


def test_refusals_are_sentences(here: Call, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    empty = make_run(tmp_path / "empty", finished=False)
    for log in empty.glob("*.jsonl"):
        log.write_text("")
    (tmp_path / "none").mkdir()
    (tmp_path / "folder.png").mkdir()
    for words, sentence in (
        (["none"], "none is neither a run directory nor a sweep"),
        (["nowhere", "run"], "nowhere does not exist"),
        (["run", "-o", "figure.gif"], "a .png, .svg or .pdf file"),
        (["run", "-o", "figure"], "a .png, .svg or .pdf file"),
        (["run", "-o", "folder.png"], "is a folder"),
        (["empty"], "nothing to compare"),
    ):
        done = here(*words)
        assert done.returncode == 2, done.stderr
        assert done.stdout == "" and sentence in done.stderr.splitlines()[-1]
    assert not list(tmp_path.glob("compare*")) and run.exists()


def test_runs_without_losses_or_checks_are_drawn_as_far_as_they_go(here: Call, tmp_path: Path) -> None:
    make_run(tmp_path / "losses", losses=[None] * 10)
    checks = make_run(tmp_path / "checks", noise=0.2)
    (checks / "checks.jsonl").write_text("")
    (checks / "timings.jsonl").unlink()
    assert here("losses").returncode == 0
    assert here("checks", "--force").returncode == 0
    done = here("losses", "checks", "--force")
    assert done.returncode == 0
    assert "checks: no check has a test PSNR" in done.stderr and "timings.jsonl is missing" in done.stderr


def test_many_groups_are_told_apart(here: Call, tmp_path: Path) -> None:
    from bltoolbox.reports.compare.figures import line_style

    looks = {str(sorted(line_style(number).items())) for number in range(32)}
    assert len(looks) == 32
    for k in range(12):
        make_run(tmp_path / f"run{k}", (20.0, 22.0 + k, 23.0 + k), noise=0.1 + k / 100)
    assert here(*(f"run{k}" for k in range(12))).returncode == 0


def test_a_long_legend_and_large_costs_stay_readable(tmp_path: Path) -> None:
    from bltoolbox.reports.compare.figures import draw_curves

    comparison = compare(histories(make_run(tmp_path / "a"), make_run(tmp_path / "b", noise=0.2)))
    long = ", ".join(f"option_{k}={0.1 * k:.1f}" for k in range(16))
    groups = [replace(group, label=f"{group.label}, {long}") for group in comparison.groups]
    figure = draw_curves(replace(comparison, groups=groups))
    figure.draw_without_rendering()
    legend, page = figure.legends[0].get_window_extent(), figure.bbox
    assert legend.x0 >= page.x0 and legend.x1 <= page.x1 and legend.y1 <= page.y1
    assert all(panel.xaxis.get_offset_text().get_text() == "" for panel in figure.axes)


# Pictures


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of a few steps, with θ kept at its checks."""
    from bltoolbox import load_recipe, run

    settings = [
        "data={name: dead-leaves, count: 6, size: 16}",
        "evaluation={name: dead-leaves, count: 2, size: 16, seed: 1}",
        "regularizer={name: foe, filters: 2, kernel_size: 3}",
        "sampler.size=2",
        "validation={count: 2, checks: 2, evaluation: true}",
        "budget={steps: 4}",
        "device=cpu",
    ]
    path = tmp_path_factory.mktemp("trained") / "run"
    run(load_recipe("smoke", settings), out=path)
    return path


def test_pictures_show_what_a_cost_buys(trained: Path, here: Call, tmp_path: Path) -> None:
    history = RunHistory.read(trained)
    last = history.checks[-1]
    first_step = history.steps[0].computations
    costs = ["0", str(first_step), str(last.computations)]
    done = here(str(trained), *(word for cost in costs for word in ("--at", cost)), "--json", "-o", "f.pdf")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["images_figure"] == "f-images.pdf" and (tmp_path / "f-images.pdf").exists()
    (row,) = facts["images"]
    assert [picture["step"] for picture in row["pictures"]] == [0, 0, last.step]
    assert [picture["moved"] for picture in row["pictures"]] == [False, False, True]
    from bltoolbox.config.recipe import load_recipe
    from bltoolbox.restoration.evaluation import evaluate
    from bltoolbox.restoration.model import Model
    from bltoolbox.training.assemble import assemble

    experiment = assemble(load_recipe(trained / "resolved.yaml"))
    model = Model.load(history.theta_file(last), "cpu")
    assert experiment.evaluation is not None
    found = evaluate(model.problem, model.theta, experiment.evaluation.samples, model.solver, tol=1e-2)
    assert row["pictures"][2]["psnr"] == pytest.approx(found.after["psnr"][0], abs=1e-4)
    assert row["psnr_measured"] == pytest.approx(found.before["psnr"][0], abs=1e-4)
    again = here(str(trained), "--at", "0", "-o", "other.pdf", "--image", "1", "--json")
    assert json.loads(again.stdout)["images"][0]["psnr_measured"] == pytest.approx(
        found.before["psnr"][1], abs=1e-4
    )


def test_captions_tell_not_moved_from_not_looked(trained: Path) -> None:
    from bltoolbox.config.registry import load_registry
    from bltoolbox.reports.compare.images import draw_sheet, restore_rows

    comparison = compare(histories(trained))
    run = comparison.runs[0]
    costs = [0.0, run.steps[0].computations, 1e9]
    rows = restore_rows(comparison, costs, 0, load_registry())
    titles = [panel.get_title() for panel in draw_sheet(rows, costs).axes]
    assert titles[0] == "true" and titles[1].startswith("measured, ")
    assert titles[2].endswith(" dB, no step yet")
    assert titles[3].endswith(" dB, initial θ, no check since")
    assert titles[4].endswith(" dB")


def test_pictures_that_cannot_be_had(trained: Path, here: Call, tmp_path: Path) -> None:
    done = here(str(trained), "--at", "100", "--image", "2")
    assert done.returncode == 2 and "has 2 evaluation images" in done.stderr
    shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "thetas")
    assert here("run", "--at", "100").returncode == 0, "the sheet says that θ was not kept"
    assert (tmp_path / "compare-images.png").exists()
    recipe = tmp_path / "run" / "resolved.yaml"
    text = recipe.read_text()
    start = text.index("\nevaluation:")
    rest = text[start + 1 :].split("\n", 1)[1]
    recipe.write_text(
        f"{text[:start]}\nevaluation: null\n{rest}".replace("evaluation: true", "evaluation: false")
    )
    done = here("run", "--at", "100", "--force")
    assert done.returncode == 2 and "has no evaluation images" in done.stderr
