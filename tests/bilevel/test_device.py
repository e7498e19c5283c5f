"""Nothing mixes devices: on pretended CUDA tensors everywhere, and on a real device where there is one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass, replace
from typing import Any
from unittest.mock import patch

import cuda_stand_in
import pytest
import torch
from helpers import BOUNDARIES, SOLVERS, initial, noisy, oracle_for, relative_error, small_foe, small_tv
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from blt_builtins.lower_solvers.gd import GradientDescent
from blt_builtins.lower_solvers.lbfgs import LBFGS
from blt_builtins.lower_solvers.newton_cg import NewtonCG
from blt_builtins.regularizers.crr import ConvexRidge
from blt_builtins.regularizers.filters import norm_bound
from blt_builtins.regularizers.icnn import InputConvexNetwork
from blt_builtins.regularizers.tikhonov import Tikhonov
from blt_builtins.regularizers.weakly_convex import WeaklyConvexExperts
from bltoolbox.bilevel import linear
from bltoolbox.bilevel.problem import Lower
from bltoolbox.bilevel.records import Accuracy
from bltoolbox.bilevel.roles import LowerSolver
from bltoolbox.restoration.data_loading import Samples
from bltoolbox.restoration.roles import Regularizer
from bltoolbox.restoration.theta import join, split
from bltoolbox.testing import Gain, Images, SquaredDistance, White, full_batch, smooth_images, variational

SHAPE = (3, 8, 9)
PRIORS: dict[str, Callable[[], Regularizer]] = {
    **{f"foe-{boundary}": (lambda boundary=boundary: small_foe(boundary)) for boundary in BOUNDARIES},
    "foe-pixel": lambda: small_foe("periodic", basis="pixel", smoothing="per-filter"),
    "wcfoe": lambda: WeaklyConvexExperts(filters=3, kernel_size=3),
    "crr": lambda: ConvexRidge(filters=3, kernel_size=3),
    "tikhonov": Tikhonov,
    "tv": small_tv,
    "tv-separate": lambda: small_tv("separate"),
}
every_prior = pytest.mark.parametrize("prior", PRIORS)
METHODS: dict[str, Callable[[], LowerSolver]] = SOLVERS | {
    "gd": GradientDescent,
    "lbfgs": LBFGS,
    "newton-cg": NewtonCG,
}


@contextlib.contextmanager
def pretended(device: str) -> Iterator[torch.device]:
    """Tensors without memory that refuse to meet those of another device.

    ``cuda`` is as strict as the real one, but its backward pass needs a driver; ``meta`` has one everywhere.
    """
    with patch("blt_builtins.regularizers.weakly_convex.mirrored_norm", _norm_without_looking):
        if device != "cuda":
            yield torch.device(device)
            return
        with _fake():
            yield torch.device(device)


def _norm_without_looking(kernels: Tensor, weights: Tensor, shape: Sequence[int]) -> Tensor:
    """In place of a norm by Lanczos, which looks at numbers; these tensors have none."""
    return norm_bound(kernels, weights, "symmetric")


@contextlib.contextmanager
def _fake() -> Iterator[None]:
    # Tensors without memory cannot be pinned. Constants that a component computed before, on the CPU, may be moved to
    # the device.
    with (
        patch.object(Tensor, "pin_memory", lambda tensor: tensor),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield


def parameters(regularizer: Regularizer) -> dict[str, tuple[int, ...]]:
    """Shapes, from real parameters, so that what a component keeps is filled with real numbers."""
    return {name: tuple(value.shape) for name, value in initial(regularizer).items()}


def level(
    regularizer: Regularizer, shapes: dict[str, tuple[int, ...]], device: torch.device, **options: object
) -> Lower:
    problem = variational(Gain(), regularizer, **options)  # type: ignore[arg-type]
    theta = {name: torch.empty(shape, device=device) for name, shape in shapes.items()}
    return problem.at(join(regularizer=theta), SHAPE).on(torch.empty(2, *SHAPE, device=device))


def check(results: dict[str, Any], device: str) -> None:
    for name, value in results.items():
        if is_dataclass(value):
            check({f"{name}.{entry}": part for entry, part in vars(value).items()}, device)
        elif not isinstance(value, int):
            assert isinstance(value, Tensor) and value.device.type == device, name
            assert value.dtype in (torch.float32, torch.bool), name


@every_prior
@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_regularizers_stay_on_the_device(prior: str, device: str) -> None:
    regularizer = PRIORS[prior]()
    shapes = parameters(regularizer)
    with pretended(device) as place:
        theta = {name: torch.empty(shape, device=place) for name, shape in shapes.items()}
        x, q = torch.empty(2, *SHAPE, device=place), torch.empty(2, *SHAPE, device=place)
        results = {
            "energy": regularizer.energy(theta, x),
            "gradient": regularizer.gradient(theta, x),
            "hvp": regularizer.linearize(theta, x)(q),
            "pairing": regularizer.pairing(theta, x, q),
            "lipschitz": regularizer.lipschitz(theta, SHAPE),
            **regularizer.project(theta),
            **regularizer.project_gradient(theta),
        }
        if regularizer.offers("majorant"):
            t = regularizer.analyse(theta, x)
            results |= {
                "analyse": t,
                "synthesise": regularizer.synthesise(theta, t, SHAPE),
                "majorant": regularizer.majorant(theta, t),
            }
        if device == "meta":
            results |= regularizer.pairing_gradients(theta, x, q)
        check(results, device)


@every_prior
@pytest.mark.parametrize("solver", METHODS)
@pytest.mark.parametrize("ridge", [0.0, 0.5])
def test_solvers_start_and_step_on_the_device(
    prior: str, solver: str, ridge: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in computes: what has fewer launches on a device gives what the CPU gives."""
    # Inner systems end in the same iteration.
    monkeypatch.setattr(linear, "look_every", lambda like: 1)
    regularizer, method = PRIORS[prior](), METHODS[solver]()
    if not all(regularizer.offers(name) for name in method.requires.get("regularizer", ())):
        pytest.skip(f"{solver} needs what {prior} has not")
    problem = variational(Gain(), regularizer, strong_convexity=ridge)
    theta, y = join(regularizer=initial(regularizer, SHAPE)), noisy(2, SHAPE)

    def states(lower: Lower) -> Any:
        state = method.init(lower, lower.start(), {})
        for _ in range(2):
            state = method.step(lower, state)
        return state

    with torch.no_grad():
        expected = states(problem.at(theta, SHAPE).on(y)).x
        with cuda_stand_in.device():
            there = states(problem.at(cuda_stand_in.move(theta), SHAPE).on(cuda_stand_in.move(y)))
    for name, value in vars(there).items():
        assert not isinstance(value, Tensor) or value.device.type == "cuda", name
    torch.testing.assert_close(cuda_stand_in.back(there.x), expected, rtol=1e-9, atol=1e-11)


@every_prior
@pytest.mark.parametrize("constraint", ["none", "box"])
@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_linearisation_and_mixed_derivative_stay_on_the_device(
    prior: str, constraint: str, device: str
) -> None:
    regularizer = PRIORS[prior]()
    shapes = parameters(regularizer)
    with pretended(device) as place:
        lower = level(regularizer, shapes, place, constraint=constraint)
        x, q = lower.start(), torch.empty(2, *SHAPE, device=place)
        system, upper = lower.linearize(x), SquaredDistance(torch.empty(2, *SHAPE, device=place))
        index = torch.empty(1, dtype=torch.long, device=place)
        results = {
            "hvp": system.hvp(q),
            "part": system.take(index).hvp(q[:1]),
            "residual": lower.residual(x),
            "energy": lower.energy(x),
            "slope": upper.gradient(x),
        }
        if device == "meta":
            results |= lower.mixed(x, q, torch.empty(2, device=place)) | lower.mixed_each(x, q)
        check(results, device)


def test_a_regularizer_by_autograd_alone_stays_on_the_device() -> None:
    network = InputConvexNetwork(layers=2, filters=4, kernel_size=3)
    shapes = parameters(network)
    with pretended("meta") as place:
        lower = level(network, shapes, place)
        x, q = lower.start(), torch.empty(2, *SHAPE, device=place)
        results = {
            "energy": lower.energy(x),
            "gradient": lower.gradient(x),
            "hvp": lower.linearize(x).hvp(q),
            **lower.mixed(x, q, torch.empty(2, device=place)),
            **network.project(split(lower.theta, "regularizer")),
        }
        check(results, "meta")


cuda = pytest.mark.cuda
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@cuda
@needs_cuda
@every_prior
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_device_gives_what_the_cpu_gives(prior: str, solver: str) -> None:
    theta = join(regularizer=initial(PRIORS[prior]()))
    results = []
    for device in ("cpu", "cuda"):
        oracle = oracle_for(PRIORS[prior](), solver)
        samples = Samples(
            Images(smooth_images(3, SHAPE)), Gain(), White(0.1), dtype=torch.float64, device=device
        )
        oracle.tasks = replace(oracle.tasks, samples=samples)  # type: ignore[type-var]
        there = {name: value.to(device) for name, value in theta.items()}
        result = oracle.on(full_batch(oracle)).hypergradient(
            there, Accuracy(1e-9), Accuracy(1e-9), bound=True
        )
        assert all(part.device.type == device for part in result.gradient.values())
        rows = oracle.solutions.rows
        assert rows is not None and rows.device.type == "cpu", "warm starts take no device memory"
        results.append(result)
    on_cpu, on_gpu = results
    assert relative_error({k: v.cpu() for k, v in on_gpu.gradient.items()}, on_cpu.gradient) < 1e-6
    assert on_gpu.value.value == pytest.approx(on_cpu.value.value, rel=1e-8)


@cuda
@needs_cuda
def test_noise_is_the_same_on_a_device() -> None:
    pair = [
        Samples(Images(smooth_images(2)), Gain(), White(0.1), device=device) for device in ("cpu", "cuda")
    ]
    torch.testing.assert_close(pair[0].batch([0, 1]).y, pair[1].batch([0, 1]).y.cpu(), rtol=0, atol=1e-6)
