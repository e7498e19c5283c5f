"""Properties of regularizers: energies and their derivatives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from bltoolbox.bilevel.records import Theta
from bltoolbox.bilevel.tensors import dot, keyed_generator
from bltoolbox.restoration.roles import Regularizer
from bltoolbox.testing.checks.base import (
    NotApplicable,
    Subject,
    Untouched,
    fail,
    holds,
    normal,
    require,
    require_close,
    require_like,
)
from bltoolbox.testing.checks.hidden_state import stateless
from bltoolbox.testing.checks.numerics import (
    best_difference,
    cast,
    derivative_fails,
    fitting_shape,
    noisy_images,
    parameters,
    require_batch_independent,
    require_same,
    shifted,
    two_shapes,
)

KIND = "regularizer"
COUNT = 3


@dataclass(frozen=True)
class Trial:
    """A regularizer with θ, noisy images x, directions, and the starts that it may read something off."""

    regularizer: Regularizer
    #: As the component named them.
    raw: dict[str, Tensor]
    x: Tensor
    v: Tensor
    q: Tensor
    start: Tensor
    #: Of the image, without auxiliary channels.
    shape: tuple[int, ...]

    @cached_property
    def theta(self) -> Theta:
        """θ as methods receive it: prepared, and for these samples."""
        return self.bound(self.raw)

    def bound(self, raw: Theta, index: Tensor | None = None) -> Theta:
        """Another θ, or that of some of the samples."""
        prepared = self.regularizer.prepare(raw)
        start = self.start if index is None else self.start[index]
        return self.regularizer.select(prepared, self.regularizer.guide(prepared, start))


def trial(subject: Subject, dtype: torch.dtype = torch.float64) -> Trial:
    regularizer = subject()
    return trial_of(regularizer, fitting_shape(regularizer), dtype)


def trial_of(
    regularizer: Regularizer, shape: Sequence[int], dtype: torch.dtype = torch.float64, seed: int = 0
) -> Trial:
    raw = cast(parameters(regularizer, shape, seed), dtype)
    image = noisy_images(COUNT, shape, seed).to(dtype)
    extra = (regularizer.extra_channels(shape[0]), *shape[1:])
    x = torch.cat([image, 0.1 * normal(COUNT, *extra, seed=10, dtype=dtype)], dim=1)
    v, q = (normal(*x.shape, seed=key, dtype=dtype) for key in (11, 12))
    start = noisy_images(COUNT, shape, seed + 1).to(dtype)
    return Trial(regularizer, raw, x, v, q, start, tuple(shape))


def everything(case: Trial, index: Tensor | None = None) -> dict[str, Tensor]:
    """Every result of a regularizer for images, by the name that a report uses."""
    x, v, q = (batch if index is None else batch[index] for batch in (case.x, case.v, case.q))
    theta = case.bound(case.raw, index)
    return {
        "energy": case.regularizer.energy(theta, x),
        "gradient": case.regularizer.gradient(theta, x),
        "linearize(x)(v)": case.regularizer.linearize(theta, x)(v),
        "pairing": case.regularizer.pairing(theta, x, q),
    }


@holds(KIND, "energy is one number per sample")
def energy_shape(subject: Subject) -> None:
    case = trial(subject)
    energy = case.regularizer.energy(case.theta, case.x)
    require_like(energy, case.x, f"energy of {COUNT} images (sum over pixels, not over the batch)", (COUNT,))
    require(
        bool(torch.isfinite(energy).all()),
        f"energy of noisy images in [0, 1] is not finite: {energy.tolist()}",
    )


@holds(KIND, "same input, same result")
def deterministic(subject: Subject) -> None:
    require_same(everything(trial(subject)), everything(trial(subject)), "x and θ")


@holds(KIND, "a sample's result does not depend on its batch")
def batch_independent(subject: Subject) -> None:
    require_batch_independent(partial(everything, trial(subject)), COUNT)


@stateless(KIND)
def use(subject: Subject, regularizer: Regularizer, problem: int) -> Iterator[tuple[str, Any]]:
    shape = two_shapes(regularizer)[problem]
    case = trial_of(regularizer, shape, seed=problem)
    yield "the initial θ", regularizer.init_params(shape, keyed_generator("θ", problem))
    yield from everything(case).items()
    yield "project", regularizer.project(case.raw)
    yield "lipschitz", regularizer.lipschitz(case.theta, shape)
    yield "strong_convexity", regularizer.strong_convexity(case.theta, shape)
    if all(regularizer.offers(method) for method in ("analyse", "synthesise", "majorant")):
        t = regularizer.analyse(case.theta, case.x)
        yield "analyse", t
        yield "majorant", regularizer.majorant(case.theta, t)
        yield "synthesise", regularizer.synthesise(case.theta, t.clone(), case.x.shape[1:])


@holds(KIND, "float32 and float64 are kept")
def dtype_kept(subject: Subject) -> None:
    for dtype in (torch.float32, torch.float64):
        case = trial(subject, dtype)
        for name, value in everything(case).items():
            shape = tuple(case.x.shape) if value.ndim > 1 else (COUNT,)
            require_like(value, case.x, f"{name} of {str(dtype)[6:]} images", shape)


@holds(KIND, "inputs are left untouched")
def untouched(subject: Subject) -> None:
    case = trial(subject)
    for name in ("energy", "gradient", "linearize", "pairing", "project", "project_gradient"):
        guard = Untouched(theta=dict(case.theta), x=case.x, v=case.v, q=case.q)
        if name == "linearize":
            case.regularizer.linearize(case.theta, case.x)(case.v)
        elif name == "pairing":
            case.regularizer.pairing(case.theta, case.x, case.q)
        elif name.startswith("project"):
            getattr(case.regularizer, name)(case.raw)
        else:
            getattr(case.regularizer, name)(case.theta, case.x)
        guard.verify(name)


@holds(KIND, "the energies of all places add up")
def density(subject: Subject) -> None:
    case = trial(subject)
    if not case.regularizer.offers("density"):
        raise NotApplicable("it has no energy by place")
    density = case.regularizer.density(case.theta, case.x)
    require(
        density.ndim == 3, f"density has shape {tuple(density.shape)}, but must be (samples, rows, columns)"
    )
    expected = case.regularizer.energy(case.theta, case.x)
    require_close(
        density.sum((1, 2)), expected, 1e-9, "density(θ, x), summed over places", "it must be energy(θ, x)"
    )
    if case.regularizer.offers("analyse"):
        places = tuple(case.regularizer.analyse(case.theta, case.x).shape[-2:])
        sentence = (
            f"density has places {tuple(density.shape[1:])}, but the last dimensions of analyse are {places}"
        )
        require(tuple(density.shape[1:]) == places, sentence)


@holds(KIND, "gradient matches finite differences of the energy")
def gradient(subject: Subject) -> None:
    case = trial(subject)
    claimed = dot(case.regularizer.gradient(case.theta, case.x), case.v)

    def along(t: float) -> Tensor:
        return case.regularizer.energy(case.theta, case.x + t * case.v)

    quotient, error = best_difference(along, claimed)
    if not error <= 1e-5:
        derivative_fails(
            "⟨gradient(θ, x), v⟩ of noisy images", "differences of the energy along v", claimed, quotient
        )


@holds(KIND, "Hessian products match finite differences of the gradient")
def hessian(subject: Subject) -> None:
    _smooth(subject)
    case = trial(subject)
    claimed = case.regularizer.linearize(case.theta, case.x)(case.v)

    def along(t: float) -> Tensor:
        return case.regularizer.gradient(case.theta, case.x + t * case.v)

    quotient, error = best_difference(along, claimed)
    if not error <= 1e-4:
        derivative_fails("⟨v, linearize(θ, x)(v)⟩ of noisy images", "differences of the gradient along v",
                          dot(case.v, claimed), dot(case.v, quotient))  # fmt: skip


@holds(KIND, "Hessian products are linear and symmetric, and can be split")
def hessian_symmetric(subject: Subject) -> None:
    _smooth(subject)
    case = trial(subject)
    product = case.regularizer.linearize(case.theta, case.x)
    of_v, of_q = product(case.v), product(case.q)
    require_close(
        product(2 * case.v - 3 * case.q), 2 * of_v - 3 * of_q, 1e-9, "linearize(θ, x)(2v − 3q)",
        "a Hessian product must be linear in v; whatever depends on x must be computed before it",
    )  # fmt: skip
    left, right = dot(of_v, case.q), dot(case.v, of_q)
    size = float(of_v.norm() * case.q.norm()) + 1e-300
    require(
        float((left - right).abs().max()) <= 1e-9 * size,
        f"the Hessian is not symmetric: ⟨Hv, q⟩ = {left.tolist()}, ⟨v, Hq⟩ = {right.tolist()};"
        " the adjoint of a filter or its boundary rule may be wrong",
    )
    if hasattr(product, "take"):
        index = torch.tensor([2, 0])
        require_close(
            product.take(index)(case.v[index]), of_v[index], 1e-10, "linearize(θ, x).take([2, 0])",
            "take must select the stored rows of the samples",
        )  # fmt: skip


@holds(KIND, "pairing is ⟨gradient, q⟩, linear in q")
def pairing(subject: Subject) -> None:
    _smooth(subject)
    case = trial(subject)
    regularizer, theta = case.regularizer, case.theta
    expected = dot(regularizer.gradient(theta, case.x), case.q)
    paired = regularizer.pairing(theta, case.x, case.q)
    require_close(paired, expected, 1e-8, "pairing(θ, x, q)", "it must be ⟨∇R_θ(x), q⟩ for each sample")
    mixed = regularizer.pairing(theta, case.x, 2 * case.q - 3 * case.v)
    parts = 2 * paired - 3 * regularizer.pairing(theta, case.x, case.v)
    require_close(mixed, parts, 1e-8, "pairing(θ, x, 2q − 3v)", "pairing must be linear in q")


@holds(KIND, "the θ-derivative of pairing matches finite differences")
def mixed_derivative(subject: Subject) -> None:
    _smooth(subject)
    case = trial(subject)
    derivative = _pairing_derivative(case)
    for k, (name, value) in enumerate(case.raw.items()):
        direction = {other: torch.zeros_like(entry) for other, entry in case.raw.items()}
        direction[name] = normal(*value.shape, seed=40 + k) / value.numel() ** 0.5
        claimed = (derivative[name] * direction[name]).sum()

        def along(t: float, d: Theta = direction) -> Tensor:
            theta = case.bound(shifted(case.raw, d, t))
            return dot(case.regularizer.gradient(theta, case.x), case.q).sum()

        quotient, error = best_difference(along, claimed)
        absolute = abs(float(quotient - claimed))
        if not (error <= 1e-4 or absolute <= 1e-9):
            what = f"the derivative of pairing of noisy images in θ[{name!r}]"
            than = "differences of ⟨gradient(θ, x), q⟩ in θ"
            derivative_fails(what, than, claimed.reshape(1), quotient.reshape(1))
    if case.regularizer.offers("guide"):  # its derivatives per sample are those of the whole lower level
        return
    each = case.regularizer.pairing_gradients(case.raw, case.x, case.q)
    for name, whole in derivative.items():
        cause = (
            "each entry needs a leading sample dimension; their sum is the derivative of the summed pairing"
        )
        require_close(
            each[name].sum(0), whole, 1e-8, f"pairing_gradients[{name!r}] summed over samples", cause
        )


@holds(KIND, "pictures and potentials can be drawn")
def shows(subject: Subject) -> None:
    case = trial(subject)
    guard = Untouched(theta=dict(case.theta))
    pictures, curves = case.regularizer.pictures(case.theta), case.regularizer.potentials(case.theta)
    guard.verify("pictures and potentials")
    if pictures is None and curves is None:
        raise NotApplicable("it returns neither pictures nor potentials")
    if pictures is not None:
        fine = pictures.ndim == 4 and len(pictures) > 0 and bool(torch.isfinite(pictures).all())
        require(fine, f"pictures must be finite, of shape (N, C, H, W), got {tuple(pictures.shape)}")
    if curves is not None:
        count, places = len(curves.values), len(curves.t)
        shapes = [tuple(tensor.shape) for tensor in (curves.t, curves.values, curves.weights)]
        fine = shapes == [(places,), (count, places), (count,)] and places > 1
        require(fine, f"t, values and weights of potentials must be (N,), (J, N) and (J,), got {shapes}")
        require(bool((curves.t.diff() > 0).all()), "t of potentials must increase")
        require(bool(torch.isfinite(curves.values).all()), "values of potentials must be finite")
        if pictures is not None:
            message = (
                f"there are {len(pictures)} pictures and {count} potentials; their numbers must be equal"
            )
            require(len(pictures) == count, message)


def _smooth(subject: Subject) -> None:
    if not subject.cls.smooth:
        raise NotApplicable("it declares smooth = False")


def _pairing_derivative(case: Trial) -> dict[str, Tensor]:
    leaves = {name: value.clone().requires_grad_() for name, value in case.raw.items()}
    total = case.regularizer.pairing(case.bound(leaves), case.x, case.q).sum()
    if not total.requires_grad:
        fail(
            "pairing is not differentiable in θ; compute it from θ with torch operations, without detach or .item()"
        )
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    pairs = zip(leaves.items(), gradients, strict=True)
    return {
        name: torch.zeros_like(leaf) if gradient is None else gradient for (name, leaf), gradient in pairs
    }
