"""Properties of regularizers: initial parameters, convexity, constants, majorants, images that they accept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bltoolbox.bilevel.tensors import dot, keyed_generator
from bltoolbox.testing.checks.base import NotApplicable, Subject, holds, normal, require, require_close
from bltoolbox.testing.checks.numerics import (
    extreme_eigenvalues,
    noisy_images,
    require_check_speaks,
    require_initial_parameters,
)
from bltoolbox.testing.checks.regularizer import COUNT, KIND, Trial, trial

#: Strengths of noise at which a regularizer that is not convex is looked at.
NOISE = (1e-2, 0.1, 1.0, 10.0)


@holds(KIND, "initial parameters are float64 and depend on the generator alone")
def initial_parameters(subject: Subject) -> None:
    require_initial_parameters(subject(), subject())


@holds(KIND, "convex along segments")
def convex(subject: Subject) -> None:
    if not subject.cls.convex:
        raise NotApplicable("it declares convex = False")
    one = trial(subject)
    for seed, length in enumerate((1e-2, 0.1, 1.0, 10.0)):
        a = one.x
        b = (
            a + length * normal(*a.shape, seed=seed)
            if seed % 2
            else noisy_images(COUNT, one.shape, 50 + seed)
        )
        for t in (0.25, 0.5, 0.75):
            inner = one.regularizer.energy(one.theta, (1 - t) * a + t * b)
            ends = (one.regularizer.energy(one.theta, p) for p in (a, b))
            chord = (1 - t) * next(ends) + t * next(ends)
            above = float((inner - chord).max())
            scale = float(chord.abs().max()) + float(inner.abs().max())
            require(
                above <= 1e-11 * scale,
                f"R is not convex in x: at {t} of a segment of noisy images it lies {above:.3g} above the chord, which"
                " should be at or below it; constrain the parameters, or declare convex = False",
            )


@holds(KIND, "lipschitz is a true bound")
def lipschitz(subject: Subject) -> None:
    one = trial(subject)
    known = one.regularizer.lipschitz(one.theta, one.shape)
    if known is None:
        raise NotApplicable("no Lipschitz constant is known")
    bound = float(known)
    for where, extremes in _curvatures(one):
        largest = max(extremes, key=abs)
        require(
            abs(largest) <= bound * (1 + 1e-6) + 1e-12,
            f"lipschitz(θ, {one.shape}) is {bound:.6g}, but at {where} ∇²R has the eigenvalue {largest:.6g}:"
            " it must bound ‖∇²R‖ for every image; a solver that trusts it will diverge",
        )


@holds(KIND, "strong_convexity is a true bound")
def strong_convexity(subject: Subject) -> None:
    one = trial(subject)
    claimed = one.regularizer.strong_convexity(one.theta, one.shape)
    if claimed is None:
        raise NotApplicable("no bound is known")
    bound = float(claimed)
    require(
        bound >= 0 or not one.regularizer.convex,
        f"strong_convexity of a convex regularizer must not be negative, got {bound:.6g}; 0 holds for every convex one",
    )
    if bound == 0 and one.regularizer.convex:
        raise NotApplicable("it claims to be convex and no more")
    for where, (smallest, largest) in _curvatures(one):
        require(
            smallest >= bound - 1e-6 * abs(bound) - 1e-12 * abs(largest),
            f"strong_convexity is {bound:.6g}, but at {where} ∇²R has the eigenvalue {smallest:.6g}:"
            " it must be a lower bound for every image, else accuracies are called certified that are not;"
            " return None if no bound is known",
        )


@holds(KIND, "analyse, synthesise and majorant belong to the energy")
def majorant(subject: Subject) -> None:
    one = trial(subject)
    regularizer, theta, x = one.regularizer, one.theta, one.x
    wanted = ("analyse", "synthesise", "majorant")
    offered = [method for method in wanted if regularizer.offers(method)]
    if not offered:
        raise NotApplicable("it has no half-quadratic structure")
    require(len(offered) == 3, f"it has {', '.join(offered)}, but a solver needs all of {', '.join(wanted)}")
    t = regularizer.analyse(theta, x)
    u = normal(*t.shape, seed=21)
    back = regularizer.synthesise(theta, u, one.shape)
    left, right = dot(t, u), dot(x, back)
    require_close(right, left, 1e-9, "⟨x, synthesise(t)⟩ against ⟨analyse(x), t⟩", "they must be adjoint")
    weights = regularizer.majorant(theta, t)
    require(bool((weights >= 0).all()), "majorant weights must not be negative")
    gradient = regularizer.synthesise(theta, weights * t, one.shape)
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
            f"the majorant is not above R: a step of size {length:g} gets {over:.3g} above the parabola, so that a"
            " majorise–minimise solver may climb; ψ'(t)/t must decrease in |t|",
        )


@holds(KIND, "check speaks for the images that cannot be treated")
def check_respected(subject: Subject) -> None:
    regularizer = subject()

    def energy(shape: Sequence[int]) -> torch.Tensor:
        theta = regularizer.init_params(shape, keyed_generator("θ", 0))
        return regularizer.energy(theta, noisy_images(2, shape))

    require_check_speaks(regularizer, energy, "energy")


def _points(one: Trial) -> dict[str, torch.Tensor]:
    """Where curvature is looked at: smoothed absolute values are steepest at flat images."""
    points = {
        "a noisy image": one.x[:1],
        "the zero image": torch.zeros_like(one.x[:1]),
        "a nearly flat image": 0.5 + 1e-3 * one.v[:1],
    }
    if one.regularizer.convex:
        return points
    # At which scale potentials that flatten curve downwards most is theirs to know.
    return points | {f"noise of strength {scale:g}": scale * one.v[:1] for scale in NOISE}


def _product(one: Trial, x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    def product(v: torch.Tensor) -> torch.Tensor:
        return one.regularizer.linearize(one.theta, x.expand(len(v), *x.shape[1:]))(v)

    return product


def _curvatures(one: Trial) -> list[tuple[str, tuple[float, float]]]:
    """The smallest and the largest eigenvalue of ∇²R, or numbers between the two, by where they were found."""
    found = [(where, extreme_eigenvalues(_product(one, x), x)) for where, x in _points(one).items()]
    near = one.x + 1e-4 * one.v
    change = one.regularizer.gradient(one.theta, near) - one.regularizer.gradient(one.theta, one.x)
    quotients = dot(change, one.v) / (1e-4 * dot(one.v, one.v))
    extremes = float(quotients.min()), float(quotients.max())
    return [*found, ("a noisy image, by a difference of gradients,", extremes)]
