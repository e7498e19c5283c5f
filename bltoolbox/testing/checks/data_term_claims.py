"""Properties of data terms: bounds, majorants, proximal maps, and what their class attributes claim."""

from __future__ import annotations

import torch
from torch import Tensor

from bltoolbox.bilevel.records import Bound
from bltoolbox.testing.checks.base import NotApplicable, Subject, fail, holds, normal, require, require_close
from bltoolbox.testing.checks.data_term import (
    COUNT,
    KIND,
    Trial,
    candidates,
    chosen,
    entries,
    places,
    single,
    trial,
)
from bltoolbox.testing.checks.numerics import fitting_shape

#: Distances from a touching point, in units of the measurements.
OFFSETS = (1e-3, 0.1, 0.5, 1.0, 3.0, 10.0, 1e3)


@holds(KIND, "spectrum holds true bounds")
def spectrum(subject: Subject) -> None:
    one = trial(subject)
    least, most = one.term.spectrum(one.theta, one.y)
    if least is None and most is None:
        raise NotApplicable("no bounds of the curvature are known")
    for where, t in places(one).items():
        found = one.curvature(t)
        slack = 1e-9 * (1 + found.abs())
        low, high = (found.flatten(1).amin(1), found.flatten(1).amax(1))
        if least is not None:
            require(
                bool((found >= _column(least, found) - slack).all()),
                f"spectrum claims d'' ≥ {_shown(least)}, but at {where} it is {float(low.min()):.6g}; accuracies would"
                " be called certified that are not",
            )
        if most is not None:
            require(
                bool((found <= _column(most, found) + slack).all()),
                f"spectrum claims d'' ≤ {_shown(most)}, but at {where} it is {float(high.max()):.6g}; a solver that"
                " trusts it will diverge",
            )


@holds(KIND, "third is a true bound")
def third(subject: Subject) -> None:
    one = trial(subject)
    bound = one.term.third(one.theta, one.y)
    if bound is None:
        raise NotApplicable("no bound of the third derivative is known")
    for where, t in places(one).items():
        for length in (1e-4, 1e-2, 1.0):
            step = length * one.scale * normal(*t.shape, seed=11)
            change = (one.curvature(t + step) - one.curvature(t)).abs()
            # The mean value theorem: a bound of the derivative bounds every difference quotient.
            allowed = _column(bound, t) * step.abs() * (1 + 1e-6) + 1e-11 * (1 + one.curvature(t).abs())
            quotient = float((change / step.abs()).max())
            require(
                bool((change <= allowed).all()),
                f"third claims |d'''| ≤ {_shown(bound)}, but near {where} the curvature changes by {quotient:.6g} per"
                " unit of t; error bounds would be called certified that are not",
            )


@holds(KIND, "the majorant lies above")
def majorant(subject: Subject) -> None:
    one = trial(subject)
    if not one.term.offers("majorant"):
        raise NotApplicable("it has no majorant")
    index = chosen(one)
    for where, t in places(one).items():
        weights = entries(one.term.majorant(one.theta, t, one.y), t)
        fine = bool(torch.isfinite(weights).all()) and bool((weights >= 0).all())
        require(
            fine, f"the curvature of the majorant must be finite and not negative, which it is not at {where}"
        )
        slope, weight = (part[0].flatten()[index] for part in (one.gradient(t), weights))
        size = float(one.value(t[:1], one.y[:1]).abs())
        for length in OFFSETS:
            for sign in (1.0, -1.0):
                offset = torch.full_like(slope, sign * length * one.scale)
                parabola = slope * offset + 0.5 * weight * offset.square()
                over = single(one, t, index, offset) - parabola
                slack = 1e-10 * (size + float(parabola.abs().max()))
                require(
                    bool((over <= slack).all()),
                    f"the majorant is not above: for {where} and an argument {sign * length * one.scale:.3g} away d is"
                    f" {float(over.max()):.3g} above the parabola, so that a majorise–minimise solver may climb",
                )


@holds(KIND, "prox minimises")
def prox(subject: Subject) -> None:
    one = trial(subject)
    if not one.term.offers("prox"):
        raise NotApplicable("it has no proximal map")
    index = chosen(one)
    each = torch.linspace(0.5, 2.0, COUNT, dtype=one.t.dtype).view(-1, *(1,) * (one.t.ndim - 1))
    steps: tuple[Tensor | float, ...] = (1e-2, 1.0, 30.0, each)
    for where, t in places(one).items():
        for step in steps:
            u = one.term.prox(one.theta, t, one.y, step)
            _stationary(one, t, u, step, where)
            length = float(step[0].flatten()[0]) if isinstance(step, Tensor) else step
            rest = (u - t)[0].flatten()[index]
            for distance in (1e-2, 1.0, 100.0):
                for sign in (1.0, -1.0):
                    offset = torch.full_like(rest, sign * distance * one.scale)
                    rise = rest * offset + 0.5 * offset.square() + length * single(one, u, index, offset)
                    slack = 1e-9 * (
                        1 + float(offset.square().max()) + length * float(one.value(u[:1], one.y[:1]).abs())
                    )
                    require(
                        bool((rise >= -slack).all()),
                        f"prox(t, y, {length:g}) at {where} is not the minimiser: ½(u − t)² + step·d(u; y) is smaller"
                        f" {sign * distance * one.scale:.3g} away from it",
                    )


def _stationary(one: Trial, t: Tensor, u: Tensor, step: Tensor | float, where: str) -> None:
    residual = (u - t + step * one.gradient(u)).abs()
    size = (u - t).abs() + t.abs() + one.scale
    worst = int((residual / size).flatten().argmax())
    require(
        bool((residual <= 1e-7 * size).all()),
        f"prox at {where} with step {'one per sample' if isinstance(step, Tensor) else f'{step:g}'} is not stationary:"
        f" u − t + step·d'(u; y) is {float(residual.flatten()[worst]):.3g}, not 0; it is the minimiser of"
        " ½(u − t)² + step·d(u; y)",
    )


@holds(KIND, "convex as declared")
def convex(subject: Subject) -> None:
    if not subject.cls.convex:
        raise NotApplicable("it declares convex = False")
    one = trial(subject)
    all_places = places(one)
    for where, t in all_places.items():
        smallest = float(one.curvature(t).min())
        require(
            smallest >= 0,
            f"d'' is {smallest:.6g} at {where}, so that it is not convex; declare convex = False",
        )
        for other in all_places.values():
            for length in (1e-3, 1.0):
                moved = t + length * (other - t)
                rise = (one.gradient(moved) - one.gradient(t)) * (moved - t)
                size = (one.gradient(moved).abs() + one.gradient(t).abs()) * (moved - t).abs()
                require(
                    bool((rise >= -1e-12 * size).all()),
                    f"d' decreases somewhere between {where} and another argument, so that d is not convex; declare"
                    " convex = False",
                )


@holds(KIND, "quadratic as declared")
def quadratic(subject: Subject) -> None:
    if not subject.cls.quadratic:
        raise NotApplicable("it does not declare quadratic = True")
    one = trial(subject)
    expected, slope = one.curvature(one.t), one.gradient(one.t)
    for where, t in places(one).items():
        cause = "quadratic says that d'' does not depend on t"
        require_close(one.curvature(t), expected, 1e-12, f"curvature at {where} against that near y", cause)
        line = slope + expected * (t - one.t)
        require_close(one.gradient(t), line, 1e-9, f"gradient at {where} against a straight line", cause)


@holds(KIND, "rescales as declared")
def rescales(subject: Subject) -> None:
    if not subject.cls.rescales:
        raise NotApplicable("it does not declare rescales = True")
    one = trial(subject)
    for where, t in places(one).items():
        for s in (0.1, 0.5, 3.0):
            expected = s**2 * one.value(t)
            require_close(
                one.value(s * t, s * one.y),
                expected,
                1e-9,
                f"D({s:g}·t; {s:g}·y) against {s:g}²·D(t; y) at {where}",
                "rescales says that D is homogeneous of degree 2",
            )


@holds(KIND, "check_measurements speaks for measurements that cannot be used")
def check_measurements(subject: Subject) -> None:
    term = subject()
    one = trial(subject)
    for name, y in candidates(fitting_shape(term), torch.float64).items():
        sentence = term.check_measurements(y)
        if sentence is not None:
            good = isinstance(sentence, str) and bool(sentence.strip())
            require(good, f"check_measurements must return None or a sentence, got {sentence!r}")
            continue
        try:
            found = torch.cat([one.value(y, y), one.gradient(y, y).flatten(), one.curvature(y, y).flatten()])
        except Exception as error:
            reason = str(error).partition("\n")[0]
            fail(
                f"check_measurements accepts {name} measurements, but the term raises {type(error).__name__} for them"
                f" ({reason})"
            )
        require(
            bool(torch.isfinite(found).all()),
            f"check_measurements accepts {name} measurements, but value, gradient or curvature is not finite for them;"
            " let it return a sentence",
        )


def _column(bound: Bound, like: Tensor) -> Tensor:
    """A bound for all samples or one per sample, to compare with entries."""
    value = torch.as_tensor(bound, dtype=like.dtype)
    return (value if value.ndim == 0 else value.view(-1, *(1,) * (like.ndim - 1))).expand_as(like)


def _shown(bound: Bound) -> str:
    value = torch.as_tensor(bound)
    return f"{float(value):.6g}" if value.numel() == 1 else str([f"{v:.4g}" for v in value.tolist()])
