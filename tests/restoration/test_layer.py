"""The implicit layer: gradients against finite differences, and the manners of a module of PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import noisy, normal
from torch import Tensor, nn
from toy_models import toy_model

import bltoolbox
from blt_builtins.hypergradients.cg_ift import CGIFT
from blt_builtins.lower_solvers.lbfgs import LBFGS
from bltoolbox import layer
from bltoolbox.errors import BltError, MissingError, NumericalError, UsageError
from bltoolbox.restoration.layer import ImplicitLayer
from bltoolbox.testing import Gain, Tikhonov, variational

FOE = {"name": "foe", "filters": 3, "kernel_size": 3, "nu": 0.05, "weight": 0.1}
TV = {"name": "tv", "nu": 0.1}
SHAPE = (1, 5, 6)
EXACT = {"tol": 1e-11, "adjoint_tol": 1e-11}


def recipe(**settings: Any) -> dict[str, Any]:
    """Of which the data do not matter here."""
    return {
        "regularizer": FOE,
        "color": "gray",
        "dtype": "float64",
        "device": "cpu",
        "iteration_limit": 20_000,
        "lower_solver": "lbfgs",
    } | settings


def measurements(count: int = 2, seed: int = 0) -> Tensor:
    return noisy(count, SHAPE, seed=seed)


def check_gradients(module: ImplicitLayer, y: Tensor) -> bool:
    """Of all of θ and of y, against central differences."""
    theta = {name: value.detach().clone() for name, value in module.theta.items()}
    for number, name in enumerate(theta):  # somewhere in general, e.g. not at a flat kernel
        theta[name] += 0.1 * normal(*theta[name].shape, seed=number)
    leaves = [value.requires_grad_() for value in theta.values()]

    def function(y: Tensor, *values: Tensor) -> Tensor:
        return module(y, theta=dict(zip(theta, values, strict=True)))

    y = y.clone().requires_grad_()
    return torch.autograd.gradcheck(function, (y, *leaves), eps=1e-4, atol=1e-6, rtol=1e-4, fast_mode=True)


CASES: dict[str, dict[str, Any]] = {
    "foe": {},
    "tv": {"regularizer": TV},
    "learned blur": {"regularizer": TV, "operator": {"name": "blur", "size": 3, "learned": True}},
    "learned weight": {"regularizer": TV, "data_term": {"name": "least-squares", "learned": True}},
    "weight map": {"data_term": {"name": "weight-map", "grid": 3}},
    "huber": {"data_term": {"name": "huber", "delta": 0.1}},
    "auxiliary channels": {"regularizer": {"name": "tgv", "nu": 0.1}},
    "strong convexity": {"strong_convexity": 0.3},
}


@pytest.mark.parametrize("case", CASES)
def test_gradcheck(case: str) -> None:
    assert check_gradients(layer(recipe(**CASES[case]), **EXACT), measurements())


@pytest.mark.parametrize(
    "hypergradient",
    [
        *("cg-ift", "minres", {"name": "neumann", "terms": 600}, {"name": "unrolled", "steps": 120}, CGIFT()),
        {"name": "shine", "refinement": 200},
    ],
    ids=["cg-ift", "minres", "neumann", "unrolled", "component", "shine"],
)
def test_any_hypergradient_that_fits(hypergradient: Any) -> None:
    settings = recipe(regularizer={"name": "tv", "weight": 0.1, "nu": 0.3})
    assert check_gradients(layer(settings, hypergradient=hypergradient, **EXACT), measurements())


def test_a_hypergradient_from_gradients_alone() -> None:
    """f2sa minimises h ± ⟨v, x⟩/λ; its error is O(1/λ²)."""
    y, grads = measurements(), []
    for choice in ("cg-ift", {"name": "f2sa", "penalty": 1000.0, "difference": "central"}):
        at = y.clone().requires_grad_()
        module = layer(recipe(), hypergradient=choice, tol=1e-8, adjoint_tol=1e-6)
        module(at).square().sum().backward()
        grads.append([at.grad, *(value.grad for value in module.parameters())])
    for exact, found in zip(*grads, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-4)


def test_a_regularizer_that_is_not_smooth() -> None:
    """It is differentiated by piggyback; ∂x̂/∂y of a shift of all pixels is that shift."""
    settings = recipe(regularizer="tv-nonsmooth", lower_solver="pdhg", hypergradient="piggyback")
    module = layer(settings, tol=1e-6, adjoint_tol=1e-5)
    y = measurements().requires_grad_()
    module(y).sum().backward()
    torch.testing.assert_close(y.grad, torch.ones_like(y), rtol=0, atol=1e-4)
    with pytest.raises(UsageError, match="is not smooth; use piggyback"):
        layer(settings, hypergradient="cg-ift")


def test_a_box_constraint() -> None:
    module = layer(recipe(constraint="box", lower_solver="agd"), **EXACT)
    y = (2 * measurements() - 0.5).requires_grad_()
    x = module(y)
    held = (x == 0) | (x == 1)
    assert bool(held.any()) and not bool(held.all())
    assert check_gradients(module, y.detach())
    x.sum().backward()
    assert y.grad is not None and not bool(y.grad[held].any()), "held pixels do not move with their own y"


def test_a_closed_form() -> None:
    """x̂ = y/(1 + e^θ) for R = ½e^θ‖x‖²."""
    theta = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    module = layer(
        variational(Gain(), Tikhonov()), {"regularizer.log_weight": theta}, solver=LBFGS(), tol=1e-12
    )
    y = measurements().requires_grad_()
    x = module(y)
    torch.testing.assert_close(x, y / 2)
    (x * y.detach()).sum().backward()
    torch.testing.assert_close(y.grad, y.detach() / 2)
    torch.testing.assert_close(theta.grad, -0.25 * y.detach().square().sum().reshape(1))


def test_it_computes_what_the_model_computes() -> None:
    model = toy_model(color="gray", dtype="float64", regularizer=FOE)
    y = measurements()
    expected = model.solve(y, tol=1e-9)
    torch.testing.assert_close(layer(model, tol=1e-9)(y), expected, rtol=0, atol=1e-8)
    torch.testing.assert_close(layer(model, tol=1e-9)(y[0]), expected[0], rtol=0, atol=1e-8)
    torch.testing.assert_close(model(y), model.solve(y), rtol=0, atol=1e-10)


def test_gradients_do_not_depend_on_the_batch_nor_on_the_size_of_the_loss() -> None:
    # Rounding depends on the batch and may change the number of iterations: solves are as accurate as the comparison.
    module, y = layer(recipe(), tol=1e-12, adjoint_tol=1e-10), measurements(3)

    def gradients(y: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        y = y.clone().requires_grad_()
        module.zero_grad()
        (module(y) * v).sum().backward()
        assert y.grad is not None
        return y.grad, module.get_parameter("regularizer.log_weights").grad.clone()  # type: ignore[union-attr]

    v = normal(3, *SHAPE) * torch.tensor([1.0, 1e-9, 1e6], dtype=torch.float64).view(3, 1, 1, 1)
    together, total = gradients(y, v)
    alone = [gradients(y[i : i + 1], v[i : i + 1]) for i in range(3)]
    for i, (one, _) in enumerate(alone):
        torch.testing.assert_close(together[i], one[0], rtol=1e-9, atol=0)
    torch.testing.assert_close(total, sum(part for _, part in alone), rtol=1e-9, atol=0)


def test_several_backward_passes() -> None:
    module = layer(recipe(), **EXACT)
    y = measurements().requires_grad_()
    x = module(y)
    v, w = normal(*x.shape, seed=1), normal(*x.shape, seed=2)
    first = torch.autograd.grad(x, y, v, retain_graph=True)[0]
    again = torch.autograd.grad(x, y, v, retain_graph=True)[0]
    assert torch.equal(first, again)
    both = torch.autograd.grad(x, y, v + w, retain_graph=True)[0]
    torch.testing.assert_close(both, first + torch.autograd.grad(x, y, w)[0], rtol=0, atol=1e-9)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(x, y, v)


def test_a_second_derivative_is_refused() -> None:
    module = layer(recipe())
    y = measurements().requires_grad_()
    for loss in (module(y).square().sum(), module(y).sum()):
        slope = torch.autograd.grad(loss, y, create_graph=True)[0]
        assert torch.isfinite(slope).all(), "the first one is not"
        with pytest.raises(BltError, match="first derivatives only"):
            torch.autograd.grad(slope.sum(), y, retain_graph=True)
        with pytest.raises(BltError, match="first derivatives only"):
            slope.square().sum().backward()


def test_parameters_that_change_before_the_backward_pass_are_noticed() -> None:
    module = layer(recipe())
    x = module(measurements())
    with torch.no_grad():
        module.get_parameter("regularizer.log_scale").add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.sum().backward()


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_without_gradients(mode: str) -> None:
    module, y = layer(recipe()), measurements()
    expected = module(y).detach()
    with MODES[mode]():
        inside = module(y.requires_grad_())
        made = layer(recipe())
        noise = measurements()
    assert not inside.requires_grad
    torch.testing.assert_close(inside, expected)
    x = made(noise)  # module and measurements of that mode, used outside
    assert x.requires_grad
    x.sum().backward()
    assert all(torch.isfinite(value.grad).all() for value in made.parameters())  # type: ignore[arg-type]


def test_autocast_does_not_reach_the_iterations() -> None:
    module = layer(recipe(dtype="float32"), tol=1e-4)
    y = measurements().float()

    def gradient(context: AbstractContextManager[Any]) -> tuple[Tensor, Tensor]:
        at = y.clone().requires_grad_()
        with context:
            x = module(at)
            x.sum().backward()
        assert at.grad is not None
        return x.detach(), at.grad

    plain, mixed = gradient(nullcontext()), gradient(torch.autocast("cpu", dtype=torch.bfloat16))
    assert torch.equal(plain[0], mixed[0]) and torch.equal(plain[1], mixed[1])


def test_a_warm_start_saves_iterations_and_changes_nothing() -> None:
    module, y = layer(recipe(), tol=1e-9), measurements()
    cold = module(y).detach()
    iterations = []
    step = module.method.solver.step

    def counted(*arguments: Any) -> Any:
        iterations.append(1)
        return step(*arguments)

    module.method.solver.step = counted  # type: ignore[method-assign]
    warm = module(y, start=cold)
    assert not iterations
    torch.testing.assert_close(warm.detach(), cold, rtol=0, atol=1e-8)
    with pytest.raises(UsageError, match="the start has images of shape"):
        module(y, start=cold[:, :, 1:])


def test_it_is_a_module() -> None:
    settings = recipe(operator={"name": "blur", "size": 3, "learned": True}, freeze=["operator"])
    module = layer(settings)
    state = module.state_dict()
    assert set(state) == {
        f"regularizer.{name}" for name in ("kernels", "log_weights", "log_scale", "log_smoothing")
    } | {"operator.log_kernel"}
    assert not module.get_parameter("operator.log_kernel").requires_grad, "it is frozen"
    state["regularizer.log_scale"] = torch.full((1,), -3.0)
    other = layer(settings)
    other.load_state_dict(state)
    assert other.theta["regularizer.log_scale"].item() == -3
    y = measurements()
    assert module.float()(y).dtype == torch.float64, "the dtype of y"
    assert all(value.dtype == torch.float32 for value in module.parameters())
    assert "hypergradient=CGIFT" in repr(module)


def test_theta_may_be_given() -> None:
    own = nn.Parameter(torch.full((1,), -2.0, dtype=torch.float64))
    module = layer(recipe(), {"regularizer.log_scale": own})
    assert module.get_parameter("regularizer.log_scale") is own
    module(measurements()).sum().backward()
    assert own.grad is not None
    network = nn.Linear(3, 1).double()
    made = {"regularizer.log_scale": network(torch.ones(3, dtype=torch.float64))}
    module(measurements(), theta=made).square().sum().backward()
    assert network.weight.grad is not None and bool(network.weight.grad.any())
    with pytest.raises(UsageError, match=r"is not an nn\.Parameter"):
        layer(recipe(), made)
    for call in (
        lambda: layer(recipe(), {"weights": own}),
        lambda: module(measurements(), theta={"weights": own}),
    ):
        with pytest.raises(UsageError, match="θ has no parameter 'weights'"):
            call()


def test_steps_are_projected() -> None:
    module = layer(recipe())
    kernels = module.get_parameter("regularizer.kernels")
    with torch.no_grad():
        kernels.add_(1.0)
    module.project_()
    assert not bool(kernels[..., 0, 0].any()), "zero mean is a zero first cosine"
    assert module.penalty() is None
    penalised = layer(recipe(data_term={"name": "weight-map", "grid": 3, "smoothness": 0.5}))
    with torch.no_grad():
        penalised.get_parameter("data_term.log_weights").copy_(normal(3, 3))
    penalty = penalised.penalty()
    assert penalty is not None and penalty.requires_grad and penalty.item() > 0


REFUSED: dict[str, tuple[Mapping[str, Any], dict[str, Any], type[Exception], str]] = {
    "moves x": ({}, {"hypergradient": "soba"}, UsageError, "has no derivative of x̂; use cg-ift"),
    "requires": (
        {},
        {"hypergradient": "piggyback"},
        UsageError,
        "needs a regularizer with .*, which FieldOfExperts does not have",
    ),
    "solver": (
        {"lower_solver": "agd"},
        {"hypergradient": "shine"},
        UsageError,
        "needs a lower_solver with inverse, which AGD does not have",
    ),
    "unknown": ({}, {"hypergradient": "cg-itf"}, UsageError, "did you mean 'cg-ift'"),
    "option": ({}, {"hypergradient": {"name": "unrolled", "step": 3}}, UsageError, "has no parameter 'step'"),
    "tol": ({}, {"tol": 0.0}, UsageError, "greater than 0"),
    "size": (
        {"data_term": {"name": "weight-map", "grid": None}},
        {},
        UsageError,
        r"θ depends on the size of the images; give shape=\(C, H, W\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    settings, options, error, sentence = REFUSED[case]
    with pytest.raises((error, MissingError), match=sentence):
        layer(recipe(**settings), **options)


def test_what_it_is_called_with() -> None:
    module = layer(recipe(data_term={"name": "weight-map", "grid": None}), shape=SHAPE)
    assert module(measurements()).shape == (2, *SHAPE)
    with pytest.raises(BltError, match="use images of that size"):
        module(noisy(1, (1, 8, 8)))
    with pytest.raises(BltError, match=r"seem to be \(H, W, C\).*y.permute\(2, 0, 1\)"):
        module(torch.zeros(16, 20, 3))
    with pytest.raises(BltError, match=r"y.permute\(0, 3, 1, 2\)"):
        module(torch.zeros(2, 16, 20, 1))
    with pytest.raises(BltError, match="expected images of shape"):
        module(torch.zeros(16, 20))
    with pytest.raises(UsageError, match="neither solver nor θ"):
        layer(variational(Gain(), Tikhonov()))


def test_a_tolerance_that_is_not_reached_is_an_error() -> None:
    with pytest.raises(NumericalError, match="LBFGS, 2 of 2 samples: the iteration limit was reached"):
        layer(recipe(), tol=1e-10, iteration_limit=2)(measurements())


def test_recipes_and_models_may_be_named(tmp_path: Path) -> None:
    assert isinstance(layer("denoise"), ImplicitLayer)
    assert bltoolbox.layer is layer
    model = toy_model(color="gray")
    model.save(tmp_path / "theta.safetensors")
    state = layer(tmp_path / "theta.safetensors").cpu().state_dict()
    assert all(torch.equal(state[name], value) for name, value in model.theta.items())
    assert layer("denoise-gray").state_dict()
    with pytest.raises(UsageError, match="which problem 'ridge' has not"):
        layer("ml/ridge")


def test_tools_of_pytorch_understand_it() -> None:
    module, y = layer(recipe(), tol=1e-8), measurements()
    twin = copy.deepcopy(module)
    assert torch.equal(twin(y), module(y))
    other = {name: value + 0.1 for name, value in module.named_parameters()}
    x = torch.func.functional_call(module, other, (y,))
    torch.testing.assert_close(x, module(y, theta=other))
    assert not torch.allclose(x, module(y))
