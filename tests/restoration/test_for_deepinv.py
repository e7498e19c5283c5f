"""Regularizers and models in the hands of deepinv: the real package minimises what the toolbox minimises."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from helpers import noisy, normal
from toy_models import toy_model

from bltoolbox import Model
from bltoolbox.errors import BltError, MissingError

SHAPE = (1, 8, 9)


@pytest.fixture(scope="module")
def deepinv() -> Any:
    return pytest.importorskip("deepinv", reason="the extra deepinv is not installed")


@pytest.fixture(scope="module")
def model() -> Model:
    foe = {"name": "foe", "filters": 3, "kernel_size": 3, "nu": 0.1, "weight": 0.05}
    return toy_model(color="gray", dtype="float64", regularizer=foe)


def inpainting(deepinv: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    return deepinv.physics.Inpainting(SHAPE, mask=0.6, rng=generator).double()


@pytest.mark.parametrize("name, stepsize", [("PGD", 1.0), ("GD", 0.5)])
def test_algorithms_of_deepinv_reach_our_minimiser(
    deepinv: Any, model: Model, name: str, stepsize: float
) -> None:
    """By proximal steps and by gradient steps on the prior, with their own data term."""
    physics = inpainting(deepinv)
    y = physics.A(noisy(2, SHAPE))
    algorithm = getattr(deepinv.optim, name)(
        prior=model.prior(tol=1e-9).deepinv(),
        data_fidelity=deepinv.optim.L2(),
        lambda_reg=1.0,
        stepsize=stepsize,
        max_iter=600,
        early_stop=True,
        thres_conv=1e-10,
    )
    expected = model.deepinv(tol=1e-9)(y, physics)
    torch.testing.assert_close(algorithm(y, physics).detach(), expected.detach(), rtol=0, atol=1e-6)


def test_the_prior_is_one_of_theirs(deepinv: Any, model: Model) -> None:
    prior = model.prior(tol=1e-10)
    theirs, x = prior.deepinv(), noisy(2, SHAPE)
    assert isinstance(theirs, deepinv.optim.Prior) and theirs.explicit_prior
    assert [value.shape for value in theirs.parameters()] == [value.shape for value in prior.parameters()]
    torch.testing.assert_close(theirs(x, 0.05), prior.energy(x))
    by_default = deepinv.optim.Prior.grad(theirs, x.clone())
    torch.testing.assert_close(theirs.grad(x), by_default)
    gamma = torch.tensor([0.3, 2.0], dtype=torch.float64).view(2, 1, 1, 1)
    u = theirs.prox(x, 0.05, gamma=gamma).detach()
    torch.testing.assert_close(u + gamma * theirs.grad(u).detach(), x, rtol=0, atol=1e-8)


def test_the_reconstructor_is_one_of_theirs(deepinv: Any, model: Model) -> None:
    theirs = model.deepinv(tol=1e-9)
    assert isinstance(theirs, deepinv.models.Reconstructor)
    y = noisy(2, SHAPE)
    torch.testing.assert_close(theirs(y), model.solve(y, 1e-9), rtol=0, atol=1e-8)
    denoising = deepinv.physics.Denoising()
    torch.testing.assert_close(theirs(y, denoising), theirs(y), rtol=0, atol=1e-8)
    y.requires_grad_()
    theirs(y, inpainting(deepinv)).sum().backward()
    assert y.grad is not None and all(bool(value.grad.any()) for value in theirs.parameters())


def test_measurements_that_are_not_images(deepinv: Any, model: Model) -> None:
    generator = torch.Generator().manual_seed(0)
    physics = deepinv.physics.CompressedSensing(m=30, img_size=SHAPE, rng=generator, dtype=torch.float64)
    y = physics.A(noisy(2, SHAPE))
    assert y.shape == (2, 30)
    x = model.deepinv(tol=1e-8)(y, physics).detach()
    slope = physics.A_adjoint(physics.A(x) - y) + model.prior().gradient(x).detach()
    assert slope.abs().max() < 1e-7, "it minimises ½‖Ax − y‖² + R(x)"


def test_what_they_have_and_we_cannot_use(deepinv: Any, model: Model) -> None:
    reconstruct, y = model.deepinv(), noisy(2, SHAPE)
    masks = deepinv.physics.Inpainting(SHAPE, mask=(normal(2, *SHAPE) > 0).double())
    with pytest.raises(BltError, match="has a mask for each sample; reconstruct them one by one"):
        reconstruct(y, masks)
    with pytest.raises(BltError, match="Physics has no adjoint; a linear physics is needed"):
        reconstruct(y, deepinv.physics.Physics())


def test_without_the_package(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    from bltoolbox.restoration import for_deepinv

    for_deepinv._classes.cache_clear()
    for name in ("deepinv", "deepinv.models", "deepinv.optim"):
        monkeypatch.setitem(sys.modules, name, None)
    for call in (model.deepinv, model.prior().deepinv):
        with pytest.raises(MissingError, match=r"pip install 'bltoolbox\[deepinv\]'"):
            call()
