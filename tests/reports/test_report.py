"""``blt report``: what stands on the page, whatever the run directory is like; nothing in it can be executed."""

from __future__ import annotations

import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Call, caller
from helpers import initial
from safetensors.torch import save_file
from test_compare import make_run

from blt_builtins.regularizers.crr import ConvexRidge
from blt_builtins.regularizers.foe import FieldOfExperts
from blt_builtins.regularizers.tv import TotalVariation
from bltoolbox import load_recipe, run
from bltoolbox.config.names import REPORT_FILE
from bltoolbox.reports.html.build import write_report
from bltoolbox.reports.html.curves import POINTS, curves
from bltoolbox.reports.html.facts import duration, gather
from bltoolbox.reports.html.pictures import encode_png, read_scenes
from bltoolbox.restoration.model import read_theta
from bltoolbox.restoration.roles import Regularizer
from bltoolbox.runs.history import RunHistory
from bltoolbox.runs.metric import UNDESCRIBED

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"
TINY = [
    "data={name: dead-leaves, count: 6, size: 16}",
    "evaluation={name: dead-leaves, count: 5, size: 16, seed: 1}",
    "baseline=tv",
    "regularizer={name: foe, filters: 2, kernel_size: 3}",
    "sampler.size=2",
    "validation={count: 2, checks: 2, evaluation: true}",
    "budget={steps: 4}",
    "device=cpu",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of a few steps, with the page it made itself."""
    path = tmp_path_factory.mktemp("trained") / "run"
    run(load_recipe("smoke", TINY), out=path)
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """``blt report`` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return caller("report", capfd)


class Elements(HTMLParser):
    """The elements of a page with their attributes, and the text of those that a browser would show or run."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.inside = tag if tag in ("script", "style", "title", "h1") else ""

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.texts[self.inside] = self.texts.get(self.inside, "") + data

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def payload(page: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match
    data: dict[str, Any] = json.loads(match[1])
    return data


# A finished run


def test_a_finished_run_has_its_page(trained: Path) -> None:
    page = (trained / REPORT_FILE).read_text(encoding="utf-8")
    history = RunHistory.read(trained)
    assert history.tested(history.metric) is not None
    for text in (
        "Finished",
        f"{history.tested(history.metric):.2f} dB",
        "tv, tuned",
        "Hessian products",
        "kernel_size: 3",
    ):
        assert text in page, text
    assert "Worth knowing" not in page
    data = payload(page)
    (found,) = data["runs"]
    assert {"loss", "tol", "lower", "linear", "distance_mean", "step_size"} <= set(found["curves"]["steps"])
    assert found["curves"]["checks"]["test"][-1] == pytest.approx(
        history.checks[-1].values["evaluation_psnr"], abs=1e-4
    )
    scene = found["scenes"][0]
    assert [one["key"] for one in scene["variants"]] == ["measured", "baseline", "learned", "clean"]
    assert (len(found["scenes"]), scene["width"], scene["height"]) == (4, 16, 16)
    assert len(found["learned"]["filters"]) == len(found["learned"]["potentials"]) == 2
    assert all(uri.startswith("data:image/png;base64,") for uri in data["assets"].values())


def test_the_page_needs_nothing_from_outside(trained: Path) -> None:
    page = (trained / REPORT_FILE).read_text(encoding="utf-8")
    elements = Elements(page)
    for tag in ("link", "iframe", "object", "embed", "base"):
        assert not elements.all(tag), tag
    assert all("src" not in one for one in elements.all("script"))
    assert {one.get("href") for one in elements.all("a")} == {"#main"}
    assert "@import" not in elements.texts["style"] and "url(" not in elements.texts["style"]
    (policy,) = [one["content"] for one in elements.all("meta") if one.get("http-equiv")]
    assert policy and policy.startswith("default-src 'none'; img-src data:; style-src 'sha256-")
    assert "unsafe" not in policy
    assert all("style" not in attributes for _, attributes in elements.found), "the policy forbids them"


def test_the_page_of_a_run_is_cheap(trained: Path, tmp_path: Path) -> None:
    """It is made from what the run has in its hands: the end of the log is not far from the last evaluation."""
    log = (trained / "log.txt").read_text().splitlines()
    assert "finished" in log[-1]
    assert (trained / REPORT_FILE).stat().st_size < 2_000_000
    index = read_scenes(trained)
    assert [one.label for one in index] == ["#0", "#1", "#2", "#3"]
    assert index[0].variants[-1].png.startswith(b"\x89PNG")


def test_a_page_that_fails_does_not_harm_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> str:
        raise RuntimeError("no page today")

    monkeypatch.setattr("bltoolbox.reports.html.page.build_page", broken)
    result = run(load_recipe("smoke", [*TINY, "budget={steps: 1}", "baseline=null"]), out=tmp_path / "run")
    assert result.status == "budget spent" and RunHistory.read(tmp_path / "run").finished
    assert not (tmp_path / "run" / REPORT_FILE).exists()
    assert "no page today" in caplog.text


# The command


def test_the_command_writes_and_refuses(trained: Path, here: Call, tmp_path: Path) -> None:
    done = here(str(trained))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "report.html written\n")
    again = here(str(trained))
    assert again.returncode == 2 and "report.html exists" in again.stderr
    assert here(str(trained), "--force", "--images", "1").returncode == 0
    assert len(payload((tmp_path / "report.html").read_text())["runs"][0]["scenes"]) == 1
    nowhere = here(str(trained), "-o", "missing/page.html")
    assert nowhere.returncode == 1 and "cannot write missing/page.html" in nowhere.stderr
    assert here("nothing").returncode == 2


def test_several_runs_stand_side_by_side(trained: Path, here: Call, tmp_path: Path) -> None:
    other = shutil.copytree(trained, tmp_path / "other")
    text = (other / "resolved.yaml").read_text()
    (other / "resolved.yaml").write_text(text.replace("step: 0.01", "step: 0.02"))
    make_run(tmp_path / "third", finished=False)
    done = here(str(trained), "other", "third", "-o", "all.html")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "all.html").read_text()
    data = payload(page)
    assert len(data["runs"]) == 3 and "Side by side" in page and "<h1>3 runs of " in page
    assert "upper_optimizer.<wbr>step" in page
    assert [one["colour"] for one in data["runs"]] == [0, 1, 2]
    # What two runs have in common stands in the page once.
    assert data["runs"][0]["scenes"] == data["runs"][1]["scenes"]
    assert "did not finish (killed)" in done.stderr and "did not finish (killed)" in page


def test_a_sweep_stands_for_its_runs(here: Call, tmp_path: Path) -> None:
    for name, noise in (("a", 0.1), ("b", 0.2)):
        make_run(tmp_path / "sweep" / name, noise=noise)
    cells = [{"name": name} for name in ("a", "b", "c")]
    (tmp_path / "sweep" / "sweep.json").write_text(json.dumps({"cells": cells}))
    done = here("sweep")
    assert done.returncode == 0 and "c has not been started" in done.stderr
    assert [one["label"] for one in payload((tmp_path / "report.html").read_text())["runs"]] == [
        "noise=0.1",
        "noise=0.2",
    ]


# What is missing or damaged


def test_what_is_damaged_is_said_and_the_rest_is_shown(trained: Path, here: Call, tmp_path: Path) -> None:
    bad = shutil.copytree(trained, tmp_path / "bad")
    (bad / "status.json").write_text("{")
    (bad / "metrics.jsonl").write_bytes((bad / "metrics.jsonl").read_bytes()[:-40])
    (bad / "theta.safetensors").write_bytes(b"nothing")
    (bad / "env.json").write_text("[]")
    (bad / "images" / "evaluation.json").write_text('[{"label": "x"}]')
    done = here("bad")
    assert done.returncode == 0
    page = (tmp_path / "report.html").read_text()
    for text in ("status.json is missing or damaged", "metrics.jsonl: line 4 cannot be read", "Unknown"):
        assert text in page, text
    (found,) = payload(page)["runs"]
    assert found["curves"]["steps"]["step"] == [1, 2, 3]
    assert found["learned"]["filters"], "of another θ that is there"
    assert [one["key"] for one in found["scenes"][0]["variants"]] == ["measured", "learned", "clean"], (
        "restored"
    )


def test_a_run_without_noise_has_a_page(tmp_path: Path) -> None:
    """The measured images are perfect, so their PSNR is no number of JSON."""
    run(load_recipe("smoke", [*TINY, "noise=0", "baseline=null"]), out=tmp_path / "run")
    (found,) = payload((tmp_path / "run" / REPORT_FILE).read_text())["runs"]
    assert found["scenes"][0]["variants"][0]["values"].get("psnr") is None


def test_files_of_other_content_than_expected(trained: Path, here: Call, tmp_path: Path) -> None:
    theta, metadata = read_theta(trained)
    not_finite = {name: value * math.nan for name, value in theta.items()}
    other = {"regularizer.something": torch.zeros(3)}
    for number, (tensors, given) in enumerate(
        [
            (theta, {"recipe": "not JSON"}),
            (theta, {"recipe": "[1]"}),
            (not_finite, metadata),
            (other, metadata),
        ]
    ):
        bad = shutil.copytree(trained, tmp_path / f"bad{number}")
        for folder in ("checkpoints", "thetas", "images"):
            shutil.rmtree(bad / folder, ignore_errors=True)
        save_file(tensors, bad / "theta.safetensors", given)
        status = json.loads((bad / "status.json").read_text()) | {"steps": "twenty"}
        (bad / "status.json").write_text(json.dumps(status))
        environment = json.loads((bad / "env.json").read_text()) | {"images": {"evaluation": []}}
        (bad / "env.json").write_text(json.dumps(environment))
        done = here(bad.name, "-o", f"{number}.html")
        assert done.returncode == 0, done.stderr
        assert payload((tmp_path / f"{number}.html").read_text())["runs"]


def test_hardly_anything_is_there(here: Call, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "resolved.yaml").write_text("")
    assert here("empty").returncode == 0
    page = (tmp_path / "report.html").read_text()
    assert "the run has not completed a step yet" in page and "Nothing has been spent yet." in page


def test_an_index_of_pictures_cannot_name_other_files(trained: Path, tmp_path: Path) -> None:
    evil = shutil.copytree(trained, tmp_path / "evil")
    index = json.loads((evil / "images" / "evaluation.json").read_text())
    index[0]["variants"][0]["file"] = "../env.json"
    (evil / "images" / "evaluation.json").write_text(json.dumps(index))
    assert read_scenes(evil) == []


@pytest.mark.parametrize("change", [{"psnr": 10**400}, {"width": 1e999}])
def test_pictures_with_a_number_beyond_floats_are_left_out(
    change: dict[str, float], trained: Path, tmp_path: Path
) -> None:
    damaged = shutil.copytree(trained, tmp_path / "damaged")
    index = json.loads((damaged / "images" / "evaluation.json").read_text())
    entry = index[0] if "width" in change else index[0]["variants"][0]
    entry.update(change)
    (damaged / "images" / "evaluation.json").write_text(json.dumps(index))
    assert read_scenes(trained) and read_scenes(damaged) == []


def test_nothing_of_a_run_becomes_part_of_the_page(trained: Path, here: Call, tmp_path: Path) -> None:
    folder = tmp_path / "a<b>&'\"c"
    shutil.copytree(trained, folder)
    (folder / "recipe.yaml").write_text(f"# {EVIL}\n@@style@@\n")
    text = (folder / "resolved.yaml").read_text()
    (folder / "resolved.yaml").write_text(text.replace("name: agd", f"name: '{EVIL}'"))
    status = json.loads((folder / "status.json").read_text()) | {
        "status": EVIL,
        "theta": EVIL,
        "finished": False,
    }
    (folder / "status.json").write_text(json.dumps(status))
    env = {"recipe": f"</title>{EVIL}", "command": [EVIL], "torch": EVIL, "device": EVIL}
    (folder / "env.json").write_text(json.dumps(env))
    (folder / "log.txt").write_text(EVIL)
    index = json.loads((folder / "images" / "evaluation.json").read_text())
    index[0]["label"] = f"</script>{EVIL}"
    (folder / "images" / "evaluation.json").write_text(json.dumps(index))
    for arguments in ([str(folder)], [str(folder), str(trained)]):
        assert here(*arguments, "--force").returncode == 0
        page = (tmp_path / "report.html").read_text()
        elements = Elements(page)
        assert len(elements.all("script")) == 2 and not elements.all("img")
        assert "<script>alert" not in page and "<img" not in page
        assert not any(key.startswith("on") for _, attributes in elements.found for key in attributes)
        assert any(scene["label"] == f"</script>{EVIL}" for scene in payload(page)["runs"][0]["scenes"])


# Figures


def test_curves_are_thinned_and_counted_per_sample(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", psnrs=[20.0 + k / 1000 for k in range(1001)])
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {
            "batch": 4,
            "lower_iterations": 40 * line["step"],
            "loss": float("inf") if line["step"] == 1 else 1,
        }
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = curves(RunHistory.read(path), UNDESCRIBED)["steps"]
    assert len(found["step"]) == POINTS and (found["step"][0], found["step"][-1]) == (1, 5000)
    assert set(found["lower"]) == {10}
    assert found["loss"][0] is None and found["loss"][1] == 1


def test_labels_are_short_and_apart(tmp_path: Path) -> None:
    settings: list[dict[str, Any]] = [
        {"sampler": {"name": "epoch", "size": 2}},
        {"sampler": {"name": "epoch", "size": 8}},
        {"sampler": {"name": "epoch", "size": 8}},
    ]
    runs = [RunHistory.read(make_run(tmp_path / "x" / str(k), **one)) for k, one in enumerate(settings)]
    assert [one.label for one in gather(runs)] == ["size=2", "size=8 (x/1)", "size=8 (x/2)"]
    assert [duration(one) for one in (3.14159, 65.0, 7384.0)] == ["3.1 s", "1 min 5 s", "2 h 3 min"]


@pytest.mark.parametrize(
    "regularizer",
    [
        FieldOfExperts(3, 3, smoothing="per-filter"),
        TotalVariation(),
        ConvexRidge(3, 3),
        ConvexRidge(3, 3, symmetry="free"),
    ],
    ids=["foe", "tv", "crr", "crr-free"],
)
def test_potentials_are_those_of_the_energy(regularizer: Regularizer) -> None:
    """By their slope: on a ramp all responses of one filter are the same, and the energy is a sum of ψ_j of them."""
    theta = initial(regularizer)
    found = regularizer.potentials(theta)
    assert found is not None
    middle = len(found.t) // 2
    assert found.t[middle].abs() < 1e-12 and found.values[:, middle].abs().max() < 1e-12
    slope = (found.values[:, -1] - found.values[:, -2]) / (found.t[-1] - found.t[-2])
    pictures = regularizer.pictures(theta)
    size = torch.ones_like(slope) if pictures is None else pictures.flatten(1).norm(dim=1)
    assert torch.allclose(slope * size, found.weights, rtol=0.01)
    assert found.weights.diff().le(0).all()


def test_odd_images_become_pictures() -> None:
    assert encode_png(torch.full((2, 3, 5), float("nan"))).startswith(b"\x89PNG")
    assert encode_png(torch.rand(1, 4, 4)).startswith(b"\x89PNG")


def test_too_many_runs_have_curves_only(tmp_path: Path) -> None:
    for k in range(25):
        make_run(tmp_path / f"run{k}", noise=k / 100)
    notes = write_report([tmp_path / f"run{k}" for k in range(25)], tmp_path / "page.html")
    assert any("at most 24 runs" in note for note in notes)
