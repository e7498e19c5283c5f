"""Data that another operator has measured: what is simulated, on what it depends, and the cost of a wrong belief."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from blt_builtins.data.simulated import Simulated
from blt_builtins.noises.gaussian import Gaussian
from blt_builtins.noises.none import NoNoise
from blt_builtins.operators.blur import Blur
from blt_builtins.operators.ct import CT
from blt_builtins.operators.mri import MRI
from bltoolbox import load_recipe, run
from bltoolbox.errors import RecipeError
from bltoolbox.plugin import Data
from bltoolbox.testing import Images, smooth_images

SHAPE = (3, 12, 14)
TINY = [
    "evaluation=null",
    "validation.count=0",
    "color=gray",
    "regularizer={name: tv, weight: 0.01, nu: 0.01}",
    "strong_convexity=1e-3",
    "lower_solver=mm",
    "sampler={name: epoch, size: 3}",
    "upper_optimizer={name: isgd, step: 1e-4}",
    "budget={steps: 2}",
    "device=cpu",
    "checkpoint.every=0",
]
MRI_DATA = (
    "{name: simulated, images: {name: dead-leaves, count: 6, size: 16}, operator: {name: mri}, noise: 0.01,"
    " color: gray}"
)


class Labelled(Images):
    """Images with everything that data may have."""

    range = (-1.0, 2.0)

    def context(self, ids: Sequence[int]) -> dict[str, Tensor]:
        return {"mask": torch.stack([torch.arange(14)[None] % (i + 2) == 0 for i in ids])}

    def label(self, id: int) -> str:
        return f"scan {id}"

    def group(self, id: int) -> str:
        return f"patient {id // 2}"


def images() -> Data:
    return Labelled(smooth_images(4, SHAPE))


def test_it_measures_with_its_own_operator() -> None:
    blur, data = Blur(size=3), Simulated(images(), Blur(size=3))
    theta = blur.init_params(SHAPE, torch.Generator())
    expected = blur.apply(data.clean([2, 0]).double(), theta, {})
    torch.testing.assert_close(data.measured([2, 0]), expected.float())
    assert torch.equal(data.clean([1]), images().clean([1])) and len(data) == 4


def test_a_measurement_depends_on_seed_and_id_alone() -> None:
    data = Simulated(images(), Blur(size=3), Gaussian(0.1))
    everything = data.measured(range(4))
    assert torch.equal(data.measured([3, 1]), everything[[3, 1]])
    assert torch.equal(Simulated(images(), Blur(size=3), Gaussian(0.1)).measured(range(4)), everything)
    other = Simulated(images(), Blur(size=3), Gaussian(0.1), seed=1).measured(range(4))
    noise = other - Simulated(images(), Blur(size=3)).measured(range(4))
    assert not bool((other == everything).any())
    assert float(noise.std()) == pytest.approx(0.1, rel=0.1)


def test_everything_else_is_that_of_the_images() -> None:
    data = Simulated(images(), MRI(), NoNoise(), color="gray")
    assert data.range == (-1.0, 2.0)
    assert (data.label(3), data.group(3)) == ("scan 3", "patient 1")
    assert data.clean([0]).shape == (1, 1, 12, 14)
    # Masks of the context reach the operator.
    y, mask = data.measured(range(4)), data.context(range(4))["mask"]
    assert not bool((y * ~mask.unsqueeze(1)).any()) and bool(y.any())


def test_noise_acts_where_something_is_measured() -> None:
    data = Simulated(images(), MRI(acceleration=2), Gaussian(0.1))
    y = data.measured([0])
    mask = MRI(acceleration=2).sampled(y, {"mask": data.context([0])["mask"]}).expand_as(y) != 0
    assert bool((y[mask] != 0).all()) and not bool(y[~mask].any())


class Recorded(Images):
    """With measurements of its own."""

    def measured(self, ids: Sequence[int]) -> Tensor:
        return self.clean(ids)


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: Simulated(Recorded(smooth_images(2, SHAPE)), Blur()), "were recorded"),
        (lambda: Simulated(images(), CT(size=8)), "operator: size 8 is not that of the 12×14 images"),
    ],
)
def test_what_is_refused(build: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        build()  # type: ignore[operator]


def test_a_recipe_adds_no_second_noise() -> None:
    with pytest.raises(RecipeError, match="the measurements of 'simulated' were recorded"):
        load_recipe("smoke", [*TINY, f"data={MRI_DATA}", "noise=0.1"])


def test_a_wrong_belief_costs() -> None:
    """Taking columns that were not measured for zeros: total variation cannot fill them in."""

    def loss(*overrides: str) -> float:
        recipe = load_recipe("smoke", [*TINY, f"data={MRI_DATA}", "noise=null", *overrides])
        return float(run(recipe).history[-1]["loss"])

    right, wrong = loss("operator=mri"), loss("operator={name: mri, acceleration: 1}")
    assert wrong > 1.2 * right


def test_measurements_that_the_believed_operator_cannot_have_made() -> None:
    with pytest.raises(RecipeError, match="the operator makes"):
        run(load_recipe("smoke", [*TINY, f"data={MRI_DATA}", "noise=null", "operator=identity"]))
