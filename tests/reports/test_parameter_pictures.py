"""What operator and data term show of θ, in the report and in the figures."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from figures import drawn
from PIL import Image

from blt_builtins.data_terms.sampled import SampledLeastSquares, binary_pattern
from blt_builtins.operators.blur import Blur
from blt_builtins.regularizers.weighted import Weighted
from bltoolbox import Model, run
from bltoolbox.config.names import FOLDERS, PICTURES
from bltoolbox.reports.html.pictures import show_learned
from bltoolbox.restoration.shipped import find_model
from bltoolbox.restoration.shown_parameters import ParameterPictures, shown_filters, shown_parameters


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.load(find_model("denoise-gray-foe"), "cpu")


def test_a_learned_kernel(model: Model) -> None:
    operator = Blur(size=3, learned=True)
    log_kernel = torch.tensor([[0.0, 0, 0], [0, 2, 1], [0, 0, 0]])
    theta = {**model.theta, "operator.log_kernel": log_kernel}
    blurred = replace(model, problem=replace(model.problem, operator=operator), theta=theta)
    (found,) = shown_parameters(blurred.problem, blurred.prepared)
    assert (found.role, found.caption) == ("operator", "Kernel")
    torch.testing.assert_close(found.values[0, 0].sum(), torch.tensor(1.0).double())
    assert found.shades.max() == 1 and found.values.argmax() == 4
    assert Blur(size=3).pictures({}) is None
    learned = show_learned(blurred)
    assert [one.caption for one in learned.maps] == ["Kernel"] and learned.filters
    assert show_learned(model).maps == []


def test_a_sampling_pattern(model: Model) -> None:
    s = torch.tensor([[1.0, 0.5, 0.2, 0.1, 0.9, 0.3]])
    problem = replace(model.problem, data_term=SampledLeastSquares(count=3))
    sampled = replace(model, problem=problem, theta={**model.theta, "data_term.sampling": s})
    (found,) = show_learned(sampled).maps
    assert (
        found.caption == "Sampling pattern and its binary pattern of 3 columns, zero frequency in the middle"
    )
    for png, values in zip(found.images, (s, binary_pattern(s, 3)), strict=True):
        pixels = np.asarray(Image.open(io.BytesIO(png))) / 255
        expected = torch.fft.fftshift(values, dim=(0, 1)).expand(6, 6)
        np.testing.assert_allclose(pixels, expected, atol=0.5 / 255)


def test_a_map_of_a_regularizer_is_not_a_filter(model: Model) -> None:
    weighted = Weighted(model.problem.regularizer, grid=2)
    own = {f"regularizer.base.{name.partition('.')[2]}": value for name, value in model.theta.items()}
    theta = own | {"regularizer.log_map": torch.tensor([[0.0, 1.0], [2.0, 3.0]])}
    mapped = replace(model, problem=replace(model.problem, regularizer=weighted), theta=theta)
    learned = show_learned(mapped)
    assert [one.caption for one in learned.maps] == [Weighted.caption] and not learned.filters
    (found,) = shown_parameters(mapped.problem, mapped.prepared)
    torch.testing.assert_close(found.values[0, 0], theta["regularizer.log_map"].double().exp())
    assert shown_filters(mapped.problem, mapped.prepared) is None
    assert shown_filters(model.problem, model.prepared) is not None


def test_negative_values_are_darker_than_zero() -> None:
    found = ParameterPictures("operator", "Map", torch.tensor([[[[-1.0, 0, 3]]]]))
    assert found.shades.flatten().tolist() == [0, 0.25, 1]
    assert found.scale == "black -1, white 3"


def test_figures_of_a_run(tmp_path: Path) -> None:
    with drawn():
        run(
            "smoke",
            [
                "data={name: dead-leaves, count: 4, size: 16}",
                "evaluation=null",
                "validation.count=0",
                "operator={name: blur, size: 3, learned: true}",
                "sampler.size=4",
                "strong_convexity=0.1",
                "budget={steps: 1}",
            ],
            out=tmp_path / "run",
        )
    assert (tmp_path / "run" / "images" / "maps.png").is_file()
    assert FOLDERS[PICTURES].fullmatch("maps.png"), "so that --overwrite replaces it"
    page = (tmp_path / "run" / "report.html").read_text()
    assert '"caption":"Kernel"' in page
    assert "of foe and 9 of blur" in page, "the parameters are counted by component"
