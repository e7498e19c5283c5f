"""Properties of regularizers: initial parameters, convexity, constants, majorants, accepted images."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bltoolbox.bilevel.tensors import dot, keyed_generator
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
    for seed, length in enumerate((1e-2, 0.1, 1.0, 10.0)):
        a = case.x
        b = (
            a + length * normal(*a.shape, seed=seed)
            if seed % 2
            else noisy_images(COUNT, case.shape, 50 + seed)
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
    known = case.regularizer.lipschitz(case.theta, case.shape)
    if known is None:
        raise NotApplicable("no Lipschitz constant is known")
    bound = float(known)
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
    if not offered:
        raise NotApplicable("it has no half-quadratic structure")
    require(len(offered) == 3, f"it has {', '.join(offered)}, but a solver needs all of {', '.join(wanted)}")
    t = regularizer.analyse(theta, x)
    u = normal(*t.shape, seed=21)
    back = regularizer.synthesise(theta, u, case.shape)
    left, right = dot(t, u), dot(x, back)
    require_close(right, left, 1e-9, "⟨x, synthesise(t)⟩ against ⟨analyse(x), t⟩", "they must be adjoint")
    weights = regularizer.majorant(theta, t)
    require(bool((weights >= 0).all()), "the weights of the majorant must not be negative")
    gradient = regularizer.synthesise(theta, weights * t, case.shape)
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


@holds(KIND, "check refuses images that it cannot handle")
def check_respected(subject: Subject) -> None:
    regularizer = subject()

    def energy(shape: Sequence[int]) -> torch.Tensor:
        theta = regularizer.init_params(shape, keyed_generator("θ", 0))
        return regularizer.energy(regularizer.prepare(theta), noisy_images(2, shape))

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
        return case.regularizer.linearize(case.theta, x.expand(len(v), *x.shape[1:]))(v)

    return product


def _curvatures(case: Trial) -> list[tuple[str, tuple[float, float]]]:
    """For each image, the smallest and the largest eigenvalue of ∇²R, or numbers between the two."""
    curvatures = [(where, extreme_eigenvalues(_product(case, x), x)) for where, x in _points(case).items()]
    near = case.x + 1e-4 * case.v
    change = case.regularizer.gradient(case.theta, near) - case.regularizer.gradient(case.theta, case.x)
    quotients = dot(change, case.v) / (1e-4 * dot(case.v, case.v))
    extremes = float(quotients.min()), float(quotients.max())
    return [*curvatures, ("a noisy image, by a difference of gradients,", extremes)]
