"""Properties of regularizers: initial parameters, convexity, constants, majorants, accepted images."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bltoolbox.bilevel.tensors import dot, keyed_generator
from bltoolbox.restoration.image_saddle import METHODS
from bltoolbox.restoration.layout import with_channels
from bltoolbox.testing.checks.base import NotApplicable, Subject, holds, normal, require, require_close
from bltoolbox.testing.checks.numerics import (
    extreme_eigenvalues,
    noisy_images,
    require_check_refuses,
    require_initial_parameters,
)
from bltoolbox.testing.checks.regularizer import COUNT, KIND, Trial, trial

#: Noise levels of the images on which a non-convex regularizer is tested.
NOISE = (1e-2, 0.1, 1.0, 10.0)


@holds(KIND, "initial parameters are float64 and depend only on the generator")
def initial_parameters(subject: Subject) -> None:
    require_initial_parameters(subject(), subject())


@holds(KIND, "convex along segments")
def convex(subject: Subject) -> None:
    if not subject.cls.convex:
        raise NotApplicable("it declares convex = False")
    case = trial(subject)
    extra = case.regularizer.extra_channels(case.shape[0])
    for seed, length in enumerate((1e-2, 0.1, 1.0, 10.0)):
        a = case.x
        b = (
            a + length * normal(*a.shape, seed=seed)
            if seed % 2
            else with_channels(noisy_images(COUNT, case.shape, 50 + seed), extra)
        )
        for t in (0.25, 0.5, 0.75):
            inner = case.regularizer.energy(case.theta, (1 - t) * a + t * b)
            ends = (case.regularizer.energy(case.theta, p) for p in (a, b))
            chord = (1 - t) * next(ends) + t * next(ends)
            above = float((inner - chord).max())
            scale = float(chord.abs().max()) + float(inner.abs().max())
            require(
                above <= 1e-11 * scale,
                f"R is not convex in x: at {t} of a segment between noisy images it lies {above:.3g} above the chord;"
                " constrain the parameters, or declare convex = False",
            )


@holds(KIND, "lipschitz is a valid bound")
def lipschitz(subject: Subject) -> None:
    case = trial(subject)
    claim = case.regularizer.lipschitz(case.theta, case.shape)
    if claim is None:
        raise NotApplicable("no Lipschitz constant is known")
    bound = float(claim)
    for where, extremes in _curvatures(case):
        largest = max(extremes, key=abs)
        require(
            abs(largest) <= bound * (1 + 1e-6) + 1e-12,
            f"lipschitz(θ, {case.shape}) is {bound:.6g}, but at {where} ∇²R has the eigenvalue {largest:.6g}:"
            " it must bound ‖∇²R‖ for every image; a solver that trusts it will diverge",
        )


@holds(KIND, "strong_convexity is a valid bound")
def strong_convexity(subject: Subject) -> None:
    case = trial(subject)
    claimed = case.regularizer.strong_convexity(case.theta, case.shape)
    if claimed is None:
        raise NotApplicable("no bound is known")
    bound = float(claimed)
    require(
        bound >= 0 or not case.regularizer.convex,
        f"strong_convexity of a convex regularizer must not be negative, got {bound:.6g}; 0 is valid for"
        " every convex one",
    )
    if bound == 0 and case.regularizer.convex:
        raise NotApplicable("it claims nothing beyond convexity")
    for where, (smallest, largest) in _curvatures(case):
        require(
            smallest >= bound - 1e-6 * abs(bound) - 1e-12 * abs(largest),
            f"strong_convexity is {bound:.6g}, but at {where} ∇²R has the eigenvalue {smallest:.6g}:"
            " it must be a lower bound for every image, or accuracies are wrongly called certified;"
            " return None if no bound is known",
        )


@holds(KIND, "analyse, synthesise and majorant match the energy")
def majorant(subject: Subject) -> None:
    case = trial(subject)
    regularizer, theta, x = case.regularizer, case.theta, case.x
    wanted = ("analyse", "synthesise", "majorant")
    offered = [method for method in wanted if regularizer.offers(method)]
    if not regularizer.smooth or not offered:
        raise NotApplicable("it has no half-quadratic structure")
    require(len(offered) == 3, f"it has {', '.join(offered)}, but a solver needs all of {', '.join(wanted)}")
    t, offset = regularizer.analyse(theta, x), regularizer.offset(theta)
    adjoint(case, t)
    t = t if offset is None else t - offset
    weights = regularizer.majorant(theta, t)
    require(bool((weights >= 0).all()), "the weights of the majorant must not be negative")
    if (pointwise := regularizer.pointwise_majorant(theta)) is not None:
        same = torch.equal(pointwise(t), weights)
        require(same, "pointwise_majorant(theta) must give what majorant(theta, t) gives")
    gradient = regularizer.synthesise(theta, weights * t, x.shape[1:])
    expected = regularizer.gradient(theta, x)
    require_close(
        gradient, expected, 1e-8, "synthesise(majorant(t)·t)", "w(t) = ψ'(t)/t makes it the gradient of R"
    )
    for length in (1e-2, 0.1, 1.0):
        step = length * normal(*x.shape, seed=22)
        t_step = regularizer.analyse(theta, step)
        parabola = regularizer.energy(theta, x) + dot(gradient, step) + 0.5 * dot(weights * t_step, t_step)
        over = float((regularizer.energy(theta, x + step) - parabola).max())
        require(
            over <= 1e-10 * float(parabola.abs().max()),
            f"the majorant is not an upper bound: a step of size {length:g} is {over:.3g} above the parabola, so a"
            " majorise–minimise solver may climb; ψ'(t)/t must decrease in |t|",
        )


def adjoint(case: Trial, t: torch.Tensor) -> None:
    u = normal(*t.shape, seed=21)
    back = case.regularizer.synthesise(case.theta, u, case.x.shape[1:])
    left, right = dot(t, u), dot(case.x, back)
    require_close(right, left, 1e-9, "⟨x, synthesise(t)⟩ against ⟨analyse(x), t⟩", "they must be adjoint")


@holds(KIND, "proximal maps, conjugate and analysis_norm match the energy")
def primal_dual(subject: Subject) -> None:
    case = trial(subject)
    regularizer, theta, x = case.regularizer, case.theta, case.x
    offered = [method for method in METHODS if regularizer.offers(method)]
    if "prox_potential" not in offered:
        raise NotApplicable("it has no proximal map")
    require(
        len(offered) == len(METHODS),
        f"it has {', '.join(offered)}, but a solver needs all of {', '.join(METHODS)}",
    )
    t = regularizer.analyse(theta, x)
    adjoint(case, t)
    energy, value = regularizer.energy(theta, x), regularizer.potential_sum(theta, t)
    require_close(
        value, energy.double(), 1e-10, "potential_sum(analyse(x))", "it must be the energy of x, in float64"
    )
    product = _analysis_product(case)
    largest = extreme_eigenvalues(product, x[:1])[1]
    bound = float(torch.as_tensor(regularizer.analysis_norm(theta, case.shape)))
    require(
        largest <= bound * (1 + 1e-6),
        f"analysis_norm is {bound:.6g}, but CᵀC has the eigenvalue {largest:.6g}: it must bound ‖C‖²",
    )
    for step in (0.1, 1.0, 10.0):
        u = regularizer.prox_potential(theta, t, step)
        least = 0.5 * (u - t).square().flatten(1).sum(1) + step * regularizer.potential_sum(theta, u)
        for length in (1e-3, 1e-1, 10.0):
            other = u + length * normal(*u.shape, seed=23)
            above = 0.5 * (other - t).square().flatten(1).sum(1) + step * regularizer.potential_sum(
                theta, other
            )
            require(
                bool((above >= least * (1 - 1e-10)).all()),
                f"prox_potential(t, {step:g}) is not the minimiser of ½(u − t)² + step·ψ(u): there is a smaller value"
                f" {length:g} away from it",
            )
        p = regularizer.prox_conjugate(theta, t, step)
        moreau = t - step * regularizer.prox_potential(theta, t / step, 1 / step)
        require_close(
            p, moreau, 1e-9, f"prox_conjugate(p, {step:g})", "p = prox_ψ*(p) + step·prox_ψ(p/step)/step"
        )
        # At p = t − step·v, v = prox(t/step), Fenchel and Young's inequality is an equation.
        v = (t - p) / step
        both = regularizer.conjugate(theta, p) + regularizer.potential_sum(theta, v)
        require_close(
            both, dot(p, v), 1e-8, "conjugate(p) + potential_sum(v)", "it must be ⟨p, v⟩ for p in ∂ψ(v)"
        )


def _analysis_product(case: Trial) -> Callable[[torch.Tensor], torch.Tensor]:
    """v ↦ CᵀC v."""

    def product(v: torch.Tensor) -> torch.Tensor:
        t = case.regularizer.analyse(case.theta, v)
        return case.regularizer.synthesise(case.theta, t, v.shape[1:])

    return product


@holds(KIND, "check refuses images that it cannot handle")
def check_respected(subject: Subject) -> None:
    regularizer = subject()

    def energy(shape: Sequence[int]) -> torch.Tensor:
        theta = regularizer.init_params(shape, keyed_generator("θ", 0))
        x = with_channels(noisy_images(2, shape), regularizer.extra_channels(shape[0]))
        return regularizer.energy(regularizer.prepare(theta), x)

    require_check_refuses(regularizer, energy, "energy")


def _points(case: Trial) -> dict[str, torch.Tensor]:
    """Images at which the curvature is computed: that of smoothed absolute values is largest at flat images."""
    points = {
        "a noisy image": case.x[:1],
        "the zero image": torch.zeros_like(case.x[:1]),
        "a nearly flat image": 0.5 + 1e-3 * case.v[:1],
    }
    if case.regularizer.convex:
        return points
    # The scale at which flattening potentials have their most negative curvature is not known here.
    return points | {f"noise of strength {scale:g}": scale * case.v[:1] for scale in NOISE}


def _product(case: Trial, x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    def product(v: torch.Tensor) -> torch.Tensor:
        theta = case.bound(case.raw, torch.zeros(len(v), dtype=torch.long))
        return case.regularizer.linearize(theta, x.expand(len(v), *x.shape[1:]))(v)

    return product


def _curvatures(case: Trial) -> list[tuple[str, tuple[float, float]]]:
    """For each image, the smallest and the largest eigenvalue of ∇²R, or numbers between the two."""
    curvatures = [(where, extreme_eigenvalues(_product(case, x), x)) for where, x in _points(case).items()]
    near = case.x + 1e-4 * case.v
    change = case.regularizer.gradient(case.theta, near) - case.regularizer.gradient(case.theta, case.x)
    quotients = dot(change, case.v) / (1e-4 * dot(case.v, case.v))
    extremes = float(quotients.min()), float(quotients.max())
    return [*curvatures, ("a noisy image, by a difference of gradients,", extremes)]
