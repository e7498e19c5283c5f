"""blt evaluate: the figures of a run again, other images, and what cannot be measured."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from commands import caller

from bltoolbox.cli import main

RUN = [
    "run", "smoke", "data={name: dead-leaves, count: 6, size: 16}", "regularizer.filters=2",
    "evaluation={name: dead-leaves, count: 3, size: 20, seed: 5}", "baseline=null", "sampler.size=2",
    "validation.count=2", "budget={steps: 2}", "-q", "--json",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate") / "run"
    with pytest.raises(SystemExit) as done:
        main([*RUN, "-o", str(folder)])
    assert done.value.code == 0
    return folder


def call(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    done = caller("evaluate", capfd)(*arguments)
    return done.returncode, done.stdout, done.stderr


def test_the_figures_of_the_run_are_found_again(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call([str(trained), "--json"], capsys)
    found, status = json.loads(out), json.loads((trained / "status.json").read_text())
    assert code == 0 and len(found["images"]) == 3
    assert found["psnr"] == pytest.approx(status["psnr_after"], abs=1e-9)
    assert found["psnr_before"] == pytest.approx(status["psnr_before"], abs=1e-9)
    assert all(0 < image["ssim"] <= 1 for image in found["images"])
    assert found["psnr"] == pytest.approx(sum(image["psnr"] for image in found["images"]) / 3)


def test_the_metrics_that_are_asked_for(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call([str(trained), "--metric", "nrmse,psnr"], capsys)
    assert code == 0 and out.splitlines()[0] == "NRMSE, PSNR in dB" and "SSIM" not in out
    found = json.loads(call([str(trained), "--metric", "nrmse", "--json"], capsys)[1])
    assert found["nrmse"] < found["nrmse_before"] and "psnr" not in found
    code, out, said = call([str(trained), "--metric", "psnr,lpips"], capsys)
    assert code == 2 and not out and "there is no metric 'lpips'; choose from psnr, ssim, nrmse" in said


def test_other_images_another_operator_and_no_training_images(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = np.random.default_rng(0).integers(256, size=(2, 24, 18, 3), dtype=np.uint8)
    np.save(tmp_path / "test.npy", images)
    gone = "data={name: array, path: gone.npy}"
    others = f"evaluation={{name: array, path: {tmp_path / 'test.npy'}}}"
    code, out, _ = call([str(trained), gone, others], capsys)
    assert code == 0 and [line.split()[0] for line in out.splitlines()[2:]] == ["#0", "#1", "mean"]
    _, plain, _ = call([str(trained), others, "--json"], capsys)
    _, blurred, _ = call([str(trained), others, "operator={name: blur, size: 3, sigma: 1}", "--json"], capsys)
    assert json.loads(plain)["psnr_before"] != json.loads(blurred)["psnr_before"]


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["evaluation=null"], 2, "no evaluation images"),
        (["regularizer=tv"], 2, "cannot be overridden: θ was trained for 'foe'"),
        (["evaluation={name: array, path: gone.npy}"], 3, "there is no file gone.npy"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(
    trained: Path, arguments: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, out, said = call([str(trained), *arguments], capsys)
    assert found == code and sentence in said and not out


def test_one_model_at_a_time(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call([str(trained), str(trained)], capsys)[0] == 2
    assert call(["no-such-model"], capsys)[0] in (2, 4)
