"""A model in the hands of a PyTorch user: called, moved, as a module, and its regularizer by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import noisy, normal
from PIL import Image
from torch import Tensor
from toy_models import as_bytes, noisy_picture, toy_model

from bltoolbox import Model
from bltoolbox.errors import BltError, UsageError

SHAPE = (1, 5, 6)
FOE = {"name": "foe", "filters": 3, "kernel_size": 3, "nu": 0.05, "weight": 0.1}


def gray_model(**settings: Any) -> Model:
    return toy_model(**({"color": "gray", "dtype": "float64", "regularizer": FOE} | settings))


def test_a_call_is_solve_and_differentiable() -> None:
    model, y = gray_model(), noisy(2, SHAPE)
    assert torch.equal(model(y), model.solve(y)) and not model(y).requires_grad
    assert torch.equal(model(y.numpy()), model.solve(y))
    y.requires_grad_()
    x = model(y)
    assert x.requires_grad and not model.solve(y).requires_grad
    x.sum().backward()
    assert y.grad is not None and bool(y.grad.any())
    model.theta["regularizer.log_scale"].requires_grad_()
    model(y.detach()).square().sum().backward()
    assert bool(model.theta["regularizer.log_scale"].grad.any())  # type: ignore[union-attr]


def test_a_model_of_inference_mode_can_be_differentiated() -> None:
    with torch.inference_mode():
        model, y = gray_model(), noisy(1, SHAPE)
    at = y.clone().requires_grad_()
    model(at).sum().backward()
    assert at.grad is not None


def test_it_moves_to_another_precision() -> None:
    model, y = gray_model(), noisy(2, SHAPE)
    single = model.to(torch.float32)
    assert {value.dtype for value in single.theta.values()} == {torch.float32}
    assert {value.dtype for value in model.theta.values()} == {torch.float64}, "the model itself stays"
    assert single.to("cpu", torch.float64).solve(y).dtype == torch.float64
    torch.testing.assert_close(single.solve(y), model.solve(y), rtol=0, atol=2e-2)
    assert model.to(y.float()).theta.keys() == model.theta.keys()
    with pytest.raises(UsageError, match="float32 or float64, not in float16"):
        model.to(torch.float16)


def test_the_module_has_theta_as_its_state(tmp_path: Path) -> None:
    model = gray_model()
    module = model.module(tol=1e-6)
    assert {name: value.shape for name, value in module.state_dict().items()} == {
        name: value.shape for name, value in model.theta.items()
    }
    torch.save(module.state_dict(), tmp_path / "state.pt")
    other = gray_model(regularizer=FOE | {"weight": 0.3}).module(tol=1e-6)
    y = noisy(2, SHAPE)
    assert not torch.allclose(other(y), module(y))
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(other(y), module(y))
    with torch.no_grad():
        module.get_parameter("regularizer.log_scale").add_(1)
    assert not torch.equal(module.theta["regularizer.log_scale"], model.theta["regularizer.log_scale"]), (
        "a copy"
    )


def prior_of(regularizer: dict[str, Any] = FOE, **options: Any) -> Any:
    return gray_model(regularizer=regularizer).prior(**({"tol": 1e-11} | options))


def test_energy_and_gradient_of_the_prior() -> None:
    model, x = gray_model(), noisy(2, SHAPE)
    prior = model.prior()
    theta = {name.partition(".")[2]: value for name, value in model.theta.items()}
    torch.testing.assert_close(prior.energy(x), model.problem.regularizer.energy(theta, x))
    torch.testing.assert_close(prior(x[0]), prior.energy(x)[0])
    x.requires_grad_()
    by_autograd = torch.autograd.grad(prior.energy(x).sum(), x)[0]
    torch.testing.assert_close(prior.gradient(x), by_autograd)
    with torch.no_grad():
        torch.testing.assert_close(prior.gradient(x), by_autograd)
        torch.testing.assert_close(prior.gradient(x[0]), by_autograd[0])
    assert set(prior.state_dict()) == set(theta)


def test_the_gradient_of_the_prior_is_differentiable() -> None:
    prior, x = prior_of(), noisy(1, SHAPE).requires_grad_()
    assert torch.autograd.gradcheck(prior.gradient, x, eps=1e-5, atol=1e-6, fast_mode=True)
    v = normal(1, *SHAPE)
    (prior.gradient(x.detach()) * v).sum().backward()
    assert all(bool(value.grad.any()) for value in prior.parameters())


@pytest.mark.parametrize("step", [0.2, torch.tensor([0.2, 3.0], dtype=torch.float64)])
def test_the_proximal_map_satisfies_its_equation(step: float | Tensor) -> None:
    """u + step·∇R(u) = x."""
    prior, x = prior_of(), noisy(2, SHAPE)
    u = prior.prox(x, step).detach()
    steps = torch.as_tensor(step, dtype=torch.float64).expand(2).view(2, 1, 1, 1)
    torch.testing.assert_close(u + steps * prior.gradient(u).detach(), x, rtol=0, atol=1e-9)
    torch.testing.assert_close(prior.prox(x[1], steps[1, 0, 0, 0]).detach(), u[1], rtol=0, atol=1e-9)


def test_the_proximal_map_is_differentiable_in_everything() -> None:
    prior, x = prior_of(), noisy(2, SHAPE).requires_grad_()
    for step in (0.5, [0.5, 2.0]):
        steps = torch.tensor(step, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(prior.prox, (x, steps), eps=1e-4, atol=1e-6, fast_mode=True)
    weights = prior.get_parameter("log_weights")
    v = normal(2, *SHAPE)

    def value(change: float) -> float:
        with torch.no_grad():
            weights[0] += change
            found = (prior.prox(x, 0.5) * v).sum().item()
            weights[0] -= change
        return found

    (prior.prox(x.detach(), 0.5) * v).sum().backward()
    assert weights.grad is not None
    assert weights.grad[0].item() == pytest.approx((value(1e-4) - value(-1e-4)) / 2e-4, rel=1e-5)


def test_priors_that_are_not_smooth_or_have_auxiliary_variables() -> None:
    """The proximal map of a nonsmooth R, and of R(x) = min_w R(x, w)."""
    x = noisy(1, SHAPE)
    settings = {"regularizer": "tv-nonsmooth", "lower_solver": "pdhg", "hypergradient": "piggyback"}
    prior = gray_model(**settings).prior(tol=1e-7)
    flat = prior.prox(x, 50.0).detach()
    torch.testing.assert_close(flat, x.mean().expand_as(x), rtol=0, atol=1e-5)
    tgv = prior_of({"name": "tgv", "nu": 0.1})
    assert tgv.prox(x, 0.5).shape == x.shape
    with pytest.raises(BltError, match="minimum over auxiliary variables, which has no formula; use prox"):
        tgv.energy(x)


def test_a_step_must_be_positive() -> None:
    with pytest.raises(BltError, match="steps greater than 0"):
        prior_of().prox(noisy(1, SHAPE), 0.0)


@pytest.fixture(scope="module")
def colour() -> Model:
    return toy_model()


def test_images_of_pillow_and_paths(colour: Model, tmp_path: Path) -> None:
    pixels = as_bytes(noisy_picture(12, 14))
    expected = colour.restore(pixels)
    restored = colour.restore(Image.fromarray(pixels))
    assert isinstance(restored, Image.Image) and restored.mode == "RGB"
    assert np.array_equal(np.asarray(restored), expected)
    for name in (tmp_path / "a.png", str(tmp_path / "a.png")):
        Image.fromarray(pixels).save(name)
        from_file = colour.restore(name)
        assert isinstance(from_file, Image.Image) and np.array_equal(np.asarray(from_file), expected)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "F", "I;16"])
def test_modes_of_pillow(colour: Model, mode: str) -> None:
    pixels = as_bytes(noisy_picture(9, 10))
    image = Image.fromarray(pixels)
    if mode == "I;16":
        image = Image.fromarray(pixels[..., 0].astype(np.uint16) * 257)
    elif mode == "F":
        image = Image.fromarray(pixels[..., 0].astype(np.float32) / 255)
    elif mode == "LA":
        image = image.convert("L").convert("LA")
    else:
        image = image.convert(mode)
    restored = colour.restore(image)
    kept = {"1": "L", "P": "RGB", "CMYK": "RGB"}
    assert restored.mode == kept.get(mode, mode) and restored.size == (10, 9)


def test_what_cannot_be_restored(colour: Model, tmp_path: Path) -> None:
    with pytest.raises(BltError, match="there is no file"):
        colour.restore(tmp_path / "none.png")
    with pytest.raises(BltError, match="an image of Pillow or a path, got list"):
        colour.restore([1, 2])  # type: ignore[call-overload]
    with pytest.raises(BltError, match=r"seems to be \(H, W, C\), but tensors are \(C, H, W\)"):
        colour.restore(torch.zeros(12, 14, 3))
    with pytest.raises(BltError, match=r"seem to be \(H, W, C\), but \(C, H, W\) is needed"):
        colour.solve(np.zeros((12, 14, 3)))
    Image.fromarray(as_bytes(noisy_picture(9, 10))).convert("CMYK").save(tmp_path / "inks.jpg")
    with pytest.raises(BltError, match=r"has the colours CMYK.*use blt apply"):
        colour.restore(tmp_path / "inks.jpg")


def test_a_model_saved_in_half_precision_is_half_as_large_and_restores_alike(tmp_path: Path) -> None:
    whole = gray_model(
        regularizer={"name": "adaptive", "base": FOE, "features": 24, "layers": 2}, dtype="float32"
    )
    for half in (False, True):
        whole.save(tmp_path / f"{half}.safetensors", half=half)
    sizes = [(tmp_path / f"{half}.safetensors").stat().st_size for half in (False, True)]
    assert sizes[1] < 0.6 * sizes[0]
    halved = Model.load(tmp_path / "True.safetensors", device="cpu")
    assert {value.dtype for value in halved.theta.values()} == {torch.float32}
    for name, value in halved.theta.items():
        exact = value.numel() < 1000
        torch.testing.assert_close(
            value, whole.theta[name], rtol=0 if exact else 1e-3, atol=0 if exact else 1e-7
        )
    y = noisy(1, (1, 16, 16)).float()
    torch.testing.assert_close(halved.solve(y, 1e-4), whole.solve(y, 1e-4), rtol=0, atol=2e-3)
