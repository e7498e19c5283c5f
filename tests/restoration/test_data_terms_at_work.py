"""Every data term with solvers, constraints, certificates, other noise levels and tiles: right, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import caller
from PIL import Image
from torch import Tensor
from toy_models import as_bytes, clean_picture, toy_model

from blt_builtins.data_terms.huber import Huber
from blt_builtins.data_terms.least_squares import LeastSquares
from blt_builtins.data_terms.poisson import Poisson
from blt_builtins.data_terms.student_t import StudentT
from blt_builtins.data_terms.transmission import Transmission
from blt_builtins.hypergradients.cg_ift import CGIFT
from blt_builtins.lower_solvers.agd import AGD
from blt_builtins.lower_solvers.mm import MemoryGradient
from blt_builtins.lower_solvers.newton_cg import NewtonCG
from blt_builtins.operators.blur import Blur
from blt_builtins.regularizers.foe import FieldOfExperts
from blt_builtins.upper_losses.recorrupted import Recorrupted
from blt_builtins.upper_losses.squared_error import SquaredError
from blt_builtins.upper_losses.whiteness import Whiteness
from bltoolbox import load_recipe
from bltoolbox.bilevel.bounds import certified_bound
from bltoolbox.bilevel.lower_loop import solve
from bltoolbox.bilevel.records import Accuracy, Ask
from bltoolbox.bilevel.tensors import keyed_generator
from bltoolbox.errors import BltError, RecipeError
from bltoolbox.plugin import DataTerm, LowerSolver, UpperLoss
from bltoolbox.restoration.image_lower import ImageLower
from bltoolbox.restoration.image_upper import BoundOperator
from bltoolbox.restoration.model import Model
from bltoolbox.restoration.rescaled import Rescaled
from bltoolbox.restoration.roles import Sample
from bltoolbox.restoration.theta import join
from bltoolbox.restoration.tiles import Restorer
from bltoolbox.restoration.variational import Constraint, Variational
from bltoolbox.testing import smooth_images
from bltoolbox.training.assemble import assemble

SHAPE = (1, 10, 11)
TERMS: dict[str, DataTerm] = {
    "least-squares": LeastSquares(),
    "huber": Huber(delta=0.1),
    "poisson": Poisson(peak=5.0, background=0.5),
    "student-t": StudentT(kappa=1.0),
    "transmission": Transmission(attenuation=2.0),
}
#: The noise that each is meant for, as recipes write it.
NOISES: dict[str, Any] = {
    "least-squares": 0.1,
    "huber": {"name": "salt-and-pepper", "fraction": 0.05},
    "poisson": {"name": "poisson", "peak": 50.0, "background": 0.2},
    "student-t": {"name": "salt-and-pepper", "fraction": 0.05},
    "transmission": {"name": "transmission", "photons": 500.0, "attenuation": 2.0},
}


def measurements() -> Tensor:
    truth = smooth_images(2, SHAPE).double()
    noise = torch.randn(truth.shape, dtype=torch.float64, generator=keyed_generator("work"))
    return (truth + 0.05 * noise).clamp_min(0.01)


def lower_level(
    term: DataTerm,
    constraint: Constraint = "none",
    strong_convexity: float = 0.5,
    loss: UpperLoss | None = None,
    theta: dict[str, Tensor] | None = None,
) -> ImageLower:
    problem = Variational(
        Blur(size=3), FieldOfExperts(3, 3), term, loss or SquaredError(), constraint, strong_convexity
    )
    if theta is None:
        theta = join(regularizer=problem.regularizer.init_params(SHAPE, keyed_generator("theta")))
    return problem.at(theta, SHAPE).on(measurements())


# Solvers and constraints


@pytest.mark.parametrize("solver", [AGD(), MemoryGradient()], ids=["agd", "mm"])
@pytest.mark.parametrize("term", TERMS)
def test_solvers_reach_a_point_without_slope(term: str, solver: LowerSolver) -> None:
    lower = lower_level(TERMS[term])
    found = solve(solver, lower, lower.start(), 1e-6, limit=20_000)
    exact = solve(NewtonCG(), lower, lower.start(), 1e-10, limit=100)
    slope = torch.autograd.functional.jacobian(lambda x: lower.energy(x).sum(), found.x)
    assert float(slope.flatten(1).norm(dim=1).max()) <= 1.01e-6
    assert float((found.x - exact.x).flatten(1).norm(dim=1).max()) <= 2e-6 / float(
        lower.mu.clamp_min(0.3).min()
    )


@pytest.mark.parametrize("constraint", ["box", "nonnegative"])
@pytest.mark.parametrize("term", TERMS)
def test_constrained_minimisers_and_their_hypergradients(term: str, constraint: Constraint) -> None:
    """With measurements moved so that the constraint holds some pixels at its limits."""

    def bound(theta: dict[str, Tensor] | None = None) -> ImageLower:
        lower = lower_level(TERMS[term], constraint, theta=theta)
        moved = (3 * (lower.y - 0.5) + 0.5).clamp_min(0 if term == "poisson" else -2)
        return lower.problem.at(lower.theta, SHAPE).on(moved)

    def minimiser(lower: ImageLower) -> Tensor:
        return solve(AGD(), lower, lower.start(), 1e-10, limit=50_000).x

    lower = bound()
    x = minimiser(lower)
    slope = lower.gradient(x)
    low, high = x <= 0, (x >= 1) & torch.tensor(constraint == "box")
    assert bool(low.any()) or bool(high.any()), "the constraint holds something"
    assert float(x.min()) >= 0 and (constraint != "box" or float(x.max()) <= 1)
    assert float(slope[~low & ~high].abs().max()) < 1e-8
    assert bool((slope[low & ~high] >= -1e-8).all()) and bool((slope[high & ~low] <= 1e-8).all())
    weights, truth = torch.ones(2, dtype=torch.float64), smooth_images(2, SHAPE).double()
    upper = SquaredError().bind(Sample([0, 1], lower.y, truth), BoundOperator(lower))
    z = CGIFT().estimate(Ask(lower, upper, x, x, weights, Accuracy(1e-10))).gradient
    d = {
        name: torch.randn(value.shape, dtype=torch.float64, generator=keyed_generator(name))
        for name, value in lower.theta.items()
    }
    ends = []
    for t in (1e-5, -1e-5):
        moved = bound({name: value + t * d[name] for name, value in lower.theta.items()})
        ends.append(float(upper.value(minimiser(moved)).sum()))
    quotient, claimed = (ends[0] - ends[1]) / 2e-5, float(sum((z[name] * d[name]).sum() for name in d))
    assert claimed == pytest.approx(quotient, rel=1e-4)


@pytest.mark.parametrize("term", TERMS)
def test_mm_and_a_constraint_are_refused_together(term: str) -> None:
    overrides = [f"data_term={term}", "lower_solver=mm", "constraint=box"]
    with pytest.raises(RecipeError, match="'mm' cannot keep x in the constraint 'box'; use agd"):
        load_recipe("smoke", overrides)
    load_recipe("smoke", overrides[:2])


@pytest.mark.parametrize(("strong_convexity", "warned"), [(0.0, True), (0.1, True), (0.2, False)])
def test_a_data_term_that_is_not_convex_is_told(
    strong_convexity: float, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its curvature is above −1/8."""
    words = ["data_term=student-t", f"strong_convexity={strong_convexity}", "device=cpu", "evaluation=null"]
    assemble(load_recipe("smoke", [*words, "baseline=null"]))
    told = [record.getMessage() for record in caplog.records if "not convex" in record.getMessage()]
    assert [text.partition(":")[0] for text in told] == ["data term 'student-t' is not convex"] * warned


# Certificates


LOSSES: dict[str, UpperLoss] = {
    "squared-error": SquaredError(),
    "recorrupted": Recorrupted(0.5, sigma=0.05),
    "whiteness": Whiteness(),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("term", TERMS)
def test_certified_bounds_hold_where_there_are_any(term: str, loss: str) -> None:
    def bound(lower: ImageLower, upper: Any, distance: float) -> tuple[Tensor | None, dict[str, Tensor]]:
        """ω and z at a point that is not quite the minimiser."""
        exact = solve(NewtonCG(), lower, lower.start(), 1e-11, limit=100).x
        direction = torch.randn(exact.shape, dtype=torch.float64, generator=keyed_generator("off"))
        x = exact + distance * direction / direction.norm()
        weights = torch.ones(len(x), dtype=torch.float64)
        estimate = CGIFT().estimate(Ask(lower, upper, x, x, weights, Accuracy(1e-9)))
        assert estimate.adjoint is not None
        omega = certified_bound(lower, upper, x, estimate.adjoint, lower.residual(x), estimate.residual)
        return omega, estimate.gradient

    lower = lower_level(TERMS[term], loss=LOSSES[loss]).take(torch.tensor([0]))
    target = lower.y + 0.1 if loss == "recorrupted" else None
    sample = Sample([0], lower.y, smooth_images(1, SHAPE).double(), target)
    upper = LOSSES[loss].bind(sample, BoundOperator(lower))
    omega, z = bound(lower, upper, 1e-4)
    if loss == "whiteness":
        assert omega is None, "nothing bounds how fast its gradient changes"
        return
    assert omega is not None
    _, reference = bound(lower, upper, 0.0)
    error = sum(float((z[name] - reference[name]).square().sum()) for name in z) ** 0.5
    assert 1e-8 < error <= float(omega) < 1e8


@pytest.mark.parametrize("term", ["huber", "poisson", "student-t", "transmission"])
def test_nothing_is_certified_where_no_strong_convexity_is_known(term: str) -> None:
    lower = lower_level(TERMS[term], strong_convexity=0.0)
    assert not bool((lower.mu > 0).any())
    truth = smooth_images(2, SHAPE).double()
    upper = SquaredError().bind(Sample([0, 1], lower.y, truth), BoundOperator(lower))
    x = lower.start()
    assert certified_bound(lower, upper, x, x, lower.residual(x), torch.zeros(2)) is None


# Models at work


def model_of(term: str, **changes: Any) -> Model:
    counts = term == "poisson"
    settings = {"poisson": {"peak": 50.0, "background": 0.2}, "transmission": {"attenuation": 2.0}}.get(
        term, {}
    )
    return toy_model(
        **{
            "data_term": {"name": term, **settings},
            "noise": NOISES[term],
            "regularizer": {"name": "tv", "weight": 5.0 if counts else 0.3, "nu": 0.1},
            "strong_convexity": 0.5,
            "color": "gray",
            "dtype": "float64",
            **changes,
        }
    )


def noisy_of(model: Model, height: int, width: int) -> np.ndarray[Any, Any]:
    clean = torch.from_numpy(clean_picture(height, width, 1)).double()
    assert model.problem.noise is not None
    return model.problem.noise.sample(clean, keyed_generator("picture")).numpy()


@pytest.mark.parametrize("term", TERMS)
def test_another_noise_level(term: str) -> None:
    model = model_of(term)
    image = noisy_of(model, 20, 22)
    y = torch.from_numpy(image).permute(2, 0, 1)
    whole, report = Restorer(model, tol=1e-8).run(image)
    expected = model.solve(y, 1e-7).permute(1, 2, 0).numpy()
    np.testing.assert_allclose(whole, expected, atol=1e-6)
    if term == "least-squares":
        assert report.noise == 0.1
        at = Variational(
            model.problem.operator,
            Rescaled(model.problem.regularizer, 0.5),
            model.problem.data_term,
            model.problem.upper_loss,
            strong_convexity=0.5,
        ).at(model.theta, y.shape)
        lower = at.on(y.unsqueeze(0))
        other = solve(NewtonCG(), lower, lower.start(), 1e-8, limit=100).x[0].permute(1, 2, 0).numpy()
        np.testing.assert_allclose(Restorer(model, tol=1e-8).run(image, 0.05)[0], other, atol=1e-6)
        return
    assert report.noise is None
    for noise in (0.05, "auto"):
        with pytest.raises(
            BltError, match=f"trained with noise '{NOISES[term]['name']}', which has no known level; omit the"
        ):
            Restorer(model).run(image, noise)
    if term == "poisson":
        return
    known = model_of(term, noise=0.1)
    np.testing.assert_allclose(Restorer(known, tol=1e-8).run(image, 0.1)[0], expected, atol=1e-6)
    sentence = (
        f"a model with data term '{term}' cannot be carried to another noise level; omit the noise level"
    )
    with pytest.raises(BltError, match=sentence):
        Restorer(known).run(image, 0.05)


def test_a_gray_picture_needs_no_other_level_that_nobody_asked_for() -> None:
    """In the colour model it is noisier in one direction, for which only some data terms can be rescaled."""
    model = model_of("huber", noise=0.1, color="rgb")
    image = noisy_of(model, 16, 16)
    found, report = Restorer(model).run(image)
    assert found.shape == image.shape and "gray picture" in report.notes[0]


@pytest.mark.parametrize("term", TERMS)
def test_tiles_are_the_whole(term: str) -> None:
    model = model_of(term)
    image = noisy_of(model, 24, 400)
    whole, _ = Restorer(model, tol=1e-7).run(image)
    tiled, report = Restorer(model, tol=1e-7, tile=90).run(image)
    assert report.tiles > 1 and report.overlap < 128
    assert np.abs(tiled - whole).max() < 1e-4


def test_measurements_that_a_data_term_cannot_use_are_refused() -> None:
    model = model_of("poisson")
    image = noisy_of(model, 12, 12) - 0.5
    sentence = "counts cannot be negative, but the smallest measurement is"
    with pytest.raises(BltError, match=sentence):
        model.solve(image.transpose(2, 0, 1))
    with pytest.raises(BltError, match=sentence):
        Restorer(model).run(image)


@pytest.mark.parametrize("term", ["huber", "poisson"])
def test_blt_apply(term: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = model_of(term, dtype="float32")
    model.save(tmp_path / "theta.safetensors")
    clean = clean_picture(40, 48, 1)
    noisy = as_bytes(noisy_of(model, 40, 48))[..., 0]
    Image.fromarray(noisy).save(tmp_path / "noisy.png")
    blt = caller("", capfd)
    arguments = ("apply", str(tmp_path / "theta.safetensors"), str(tmp_path / "noisy.png"))
    done = blt(*arguments, "--device", "cpu", "-o", str(tmp_path / "restored.png"))
    assert done.returncode == 0, done.stderr
    trained = "poisson noise" if term == "poisson" else "salt-and-pepper noise"
    assert f"operator identity, trained for {trained}; on cpu" in done.stderr
    assert "None" not in done.stdout + done.stderr
    restored = np.asarray(Image.open(tmp_path / "restored.png")) / 255
    background = 0.2 if term == "poisson" else 0.0
    errors = [np.square(one - clean[..., 0]).mean() for one in (restored, noisy / 255 - background)]
    assert errors[0] < 0.7 * errors[1], "closer to the truth than the measurements are"
    refused = blt(*arguments, "--device", "cpu", "--noise", "25/255", "-o", str(tmp_path / "other.png"))
    assert refused.returncode == 1 and "which has no known level; omit the noise level" in refused.stderr
    assert not (tmp_path / "other.png").exists()
