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


@holds(KIND, "spectrum gives valid bounds")
def spectrum(subject: Subject) -> None:
    case = trial(subject)
    least, most = case.term.spectrum(case.theta, case.y)
    if least is None and most is None:
        raise NotApplicable("no bounds on the curvature are known")
    for where, t in places(case).items():
        curvature = case.curvature(t)
        slack = 1e-9 * (1 + curvature.abs())
        low, high = (curvature.flatten(1).amin(1), curvature.flatten(1).amax(1))
        if least is not None:
            require(
                bool((curvature >= _column(least, curvature) - slack).all()),
                f"spectrum claims d'' ≥ {_shown(least)}, but at {where} it is {float(low.min()):.6g}; accuracies would"
                " be wrongly called certified",
            )
        if most is not None:
            require(
                bool((curvature <= _column(most, curvature) + slack).all()),
                f"spectrum claims d'' ≤ {_shown(most)}, but at {where} it is {float(high.max()):.6g}; a solver that"
                " trusts it will diverge",
            )


@holds(KIND, "third is a valid bound")
def third(subject: Subject) -> None:
    case = trial(subject)
    bound = case.term.third(case.theta, case.y)
    if bound is None:
        raise NotApplicable("no bound on the third derivative is known")
    for where, t in places(case).items():
        for length in (1e-4, 1e-2, 1.0):
            step = length * case.scale * normal(*t.shape, seed=11)
            change = (case.curvature(t + step) - case.curvature(t)).abs()
            # The mean value theorem: a bound on the derivative bounds every difference quotient.
            allowed = _column(bound, t) * step.abs() * (1 + 1e-6) + 1e-11 * (1 + case.curvature(t).abs())
            quotient = float((change / step.abs()).max())
            require(
                bool((change <= allowed).all()),
                f"third claims |d'''| ≤ {_shown(bound)}, but near {where} the curvature changes by {quotient:.6g} per"
                " unit of t; error bounds would be wrongly called certified",
            )


@holds(KIND, "the majorant lies above the term")
def majorant(subject: Subject) -> None:
    case = trial(subject)
    if not case.term.offers("majorant"):
        raise NotApplicable("it has no majorant")
    index = chosen(case)
    for where, t in places(case).items():
        weights = entries(case.term.majorant(case.theta, t, case.y), t)
        fine = bool(torch.isfinite(weights).all()) and bool((weights >= 0).all())
        require(fine, f"the curvature of the majorant must be finite and non-negative, but is not at {where}")
        slope, weight = (values[0].flatten()[index] for values in (case.gradient(t), weights))
        size = float(case.value(t[:1], case.y[:1]).abs())
        for length in OFFSETS:
            for sign in (1.0, -1.0):
                offset = torch.full_like(slope, sign * length * case.scale)
                parabola = slope * offset + 0.5 * weight * offset.square()
                over = single(case, t, index, offset) - parabola
                slack = 1e-10 * (size + float(parabola.abs().max()))
                require(
                    bool((over <= slack).all()),
                    f"the majorant is not an upper bound: for {where} and an argument"
                    f" {sign * length * case.scale:.3g} away, d is {float(over.max()):.3g} above the parabola,"
                    " so a majorise–minimise solver may climb",
                )


@holds(KIND, "prox minimises")
def prox(subject: Subject) -> None:
    case = trial(subject)
    if not case.term.offers("prox"):
        raise NotApplicable("it has no proximal map")
    index = chosen(case)
    each = torch.linspace(0.5, 2.0, COUNT, dtype=case.t.dtype).view(-1, *(1,) * (case.t.ndim - 1))
    steps: tuple[Tensor | float, ...] = (1e-2, 1.0, 30.0, each)
    for where, t in places(case).items():
        for step in steps:
            u = case.term.prox(case.theta, t, case.y, step)
            _stationary(case, t, u, step, where)
            length = float(step[0].flatten()[0]) if isinstance(step, Tensor) else step
            rest = (u - t)[0].flatten()[index]
            for distance in (1e-2, 1.0, 100.0):
                for sign in (1.0, -1.0):
                    offset = torch.full_like(rest, sign * distance * case.scale)
                    rise = rest * offset + 0.5 * offset.square() + length * single(case, u, index, offset)
                    slack = 1e-9 * (
                        1 + float(offset.square().max()) + length * float(case.value(u[:1], case.y[:1]).abs())
                    )
                    require(
                        bool((rise >= -slack).all()),
                        f"prox(t, y, {length:g}) at {where} is not the minimiser: ½(u − t)² + step·d(u; y) is smaller"
                        f" {sign * distance * case.scale:.3g} away from it",
                    )


def _stationary(case: Trial, t: Tensor, u: Tensor, step: Tensor | float, where: str) -> None:
    residual = (u - t + step * case.gradient(u)).abs()
    size = (u - t).abs() + t.abs() + case.scale
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
    case = trial(subject)
    all_places = places(case)
    for where, t in all_places.items():
        smallest = float(case.curvature(t).min())
        require(
            smallest >= 0,
            f"d'' is {smallest:.6g} at {where}, so d is not convex; declare convex = False",
        )
        for other in all_places.values():
            for length in (1e-3, 1.0):
                moved = t + length * (other - t)
                rise = (case.gradient(moved) - case.gradient(t)) * (moved - t)
                size = (case.gradient(moved).abs() + case.gradient(t).abs()) * (moved - t).abs()
                require(
                    bool((rise >= -1e-12 * size).all()),
                    f"d' decreases somewhere between {where} and another argument, so d is not convex; declare"
                    " convex = False",
                )


@holds(KIND, "quadratic as declared")
def quadratic(subject: Subject) -> None:
    if not subject.cls.quadratic:
        raise NotApplicable("it does not declare quadratic = True")
    case = trial(subject)
    expected, slope = case.curvature(case.t), case.gradient(case.t)
    for where, t in places(case).items():
        cause = "quadratic = True means that d'' does not depend on t"
        require_close(
            case.curvature(t), expected, 1e-12, f"curvature at {where} against the curvature near y", cause
        )
        line = slope + expected * (t - case.t)
        require_close(case.gradient(t), line, 1e-9, f"gradient at {where} against a straight line", cause)


@holds(KIND, "rescales as declared")
def rescales(subject: Subject) -> None:
    if not subject.cls.rescales:
        raise NotApplicable("it does not declare rescales = True")
    case = trial(subject)
    for where, t in places(case).items():
        for s in (0.1, 0.5, 3.0):
            expected = s**2 * case.value(t)
            require_close(
                case.value(s * t, s * case.y),
                expected,
                1e-9,
                f"D({s:g}·t; {s:g}·y) against {s:g}²·D(t; y) at {where}",
                "rescales = True means that D is homogeneous of degree 2",
            )


@holds(KIND, "check_measurements refuses unusable measurements")
def check_measurements(subject: Subject) -> None:
    term = subject()
    case = trial(subject)
    for name, y in candidates(fitting_shape(term), torch.float64).items():
        sentence = term.check_measurements(y)
        if sentence is not None:
            good = isinstance(sentence, str) and bool(sentence.strip())
            require(good, f"check_measurements must return None or a sentence, got {sentence!r}")
            continue
        try:
            results = torch.cat(
                [case.value(y, y), case.gradient(y, y).flatten(), case.curvature(y, y).flatten()]
            )
        except Exception as error:
            reason = str(error).partition("\n")[0]
            fail(
                f"check_measurements accepts {name} measurements, but the term raises {type(error).__name__} for them"
                f" ({reason})"
            )
        require(
            bool(torch.isfinite(results).all()),
            f"check_measurements accepts {name} measurements, but value, gradient or curvature is not finite for them;"
            " return a sentence that refuses them",
        )


def _column(bound: Bound, like: Tensor) -> Tensor:
    """A bound, for all samples or one per sample, in the shape of the entries."""
    value = torch.as_tensor(bound, dtype=like.dtype)
    return (value if value.ndim == 0 else value.view(-1, *(1,) * (like.ndim - 1))).expand_as(like)


def _shown(bound: Bound) -> str:
    value = torch.as_tensor(bound)
    return f"{float(value):.6g}" if value.numel() == 1 else str([f"{v:.4g}" for v in value.tolist()])
