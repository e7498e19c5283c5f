"""Properties of data terms: values and their derivatives, entry by entry.

D is a sum over entries, so changing one entry in a copy of the measurements isolates the d of that entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bltoolbox.bilevel.records import Theta
from bltoolbox.bilevel.tensors import keyed_generator
from bltoolbox.restoration.roles import DataTerm
from bltoolbox.testing.checks.base import (
    Subject,
    Untouched,
    fail,
    holds,
    normal,
    require,
    require_close,
    require_like,
    same,
)
from bltoolbox.testing.checks.hidden_state import stateless
from bltoolbox.testing.checks.numerics import (
    best_entries,
    cast,
    fitting_shape,
    parameters,
    require_batch_independent,
    require_initial_parameters,
    require_same,
    require_theta_derivative,
    two_shapes,
)
from bltoolbox.testing.problems import smooth_images

KIND = "data_term"
COUNT = 3
#: Number of entries that are tested one by one.
ENTRIES = 48


@dataclass(frozen=True)
class Trial:
    """A data term with θ, measurements y that it accepts, and arguments t = A x."""

    term: DataTerm
    #: The parameters as ``init_params`` returns them; ``theta`` has passed through ``prepare``.
    raw: dict[str, Tensor]
    theta: Theta
    t: Tensor
    y: Tensor

    @property
    def scale(self) -> float:
        """The root mean square of the measurements."""
        return float(self.y.square().mean().sqrt())

    def value(self, t: Tensor, y: Tensor | None = None) -> Tensor:
        return self.term.value(self.theta, t, self.y if y is None else y)

    def gradient(self, t: Tensor, y: Tensor | None = None) -> Tensor:
        return self.term.gradient(self.theta, t, self.y if y is None else y)

    def curvature(self, t: Tensor, y: Tensor | None = None) -> Tensor:
        return entries(self.term.curvature(self.theta, t, self.y if y is None else y), t)


def candidates(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Measurements to try: of either sign, non-negative, counts that include zeros, and positive counts."""
    images = smooth_images(COUNT, shape, seed).double()
    noisy = images + 0.2 * normal(COUNT, *shape, seed=1)
    counts = (20 * noisy).clamp_min(0).round()
    measurements = {
        "signed": noisy,
        "not negative": noisy.abs(),
        "counts": counts,
        "positive counts": counts + 1,
    }
    return {name: y.to(dtype) for name, y in measurements.items()}


def trial(subject: Subject, dtype: torch.dtype = torch.float64) -> Trial:
    """A trial with the first measurements that ``check_measurements`` accepts."""
    term = subject()
    return trial_of(term, fitting_shape(term), dtype)


def trial_of(
    term: DataTerm, shape: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 0
) -> Trial:
    tried = candidates(shape, dtype, seed)
    y = next((y for y in tried.values() if term.check_measurements(y) is None), None)
    if y is None:
        fail(
            f"check_measurements refuses all measurements tried ({', '.join(tried)}: images with noise, and counts"
            " up to about 20); it must accept the measurements that the term is meant for"
        )
    raw = cast(parameters(term, shape, seed), dtype)
    scale = float(y.square().mean().sqrt())
    t = y + 0.3 * scale * normal(*y.shape, seed=2, dtype=dtype)
    return Trial(term, raw, term.prepare(raw), t, y)


def entries(value: Tensor | float, like: Tensor) -> Tensor:
    """One number per entry."""
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).expand_as(like)


def places(case: Trial) -> dict[str, Tensor]:
    """Arguments t to try: iterates of a solver may be anywhere."""
    return {
        "t near y": case.t,
        "t = y": case.y.clone(),
        "t = 0": torch.zeros_like(case.y),
        "t far from y": case.y + 10 * case.scale * normal(*case.y.shape, seed=3),
        "t very far from y": case.y + 1e3 * case.scale * normal(*case.y.shape, seed=4),
    }


def chosen(case: Trial) -> Tensor:
    """Indices of entries of the first sample: all of them if the sample is small."""
    return torch.randperm(case.y[0].numel(), generator=keyed_generator("entries"))[:ENTRIES]


def single(case: Trial, t: Tensor, index: Tensor, offset: Tensor) -> Tensor:
    """d(t_k + offset_k; y_k) − d(t_k; y_k) for the entries ``index`` of the first sample, one copy for each."""
    copies = t[:1].flatten(1).repeat(len(index), 1)
    copies[torch.arange(len(index)), index] += offset
    y = case.y[:1].expand(len(index), *case.y.shape[1:])
    return case.value(copies.view(y.shape), y) - case.value(t[:1], case.y[:1])


def everything(case: Trial, index: Tensor | None = None) -> dict[str, Tensor]:
    """Every result of a data term, by the name that a report uses."""
    t, y = (batch if index is None else batch[index] for batch in (case.t, case.y))
    results = {
        "value": case.value(t, y),
        "gradient": case.gradient(t, y),
        "curvature": case.curvature(t, y),
    }
    if case.term.offers("majorant"):
        results["majorant"] = entries(case.term.majorant(case.theta, t, y), t)
    if case.term.offers("prox"):
        results["prox"] = case.term.prox(case.theta, t, y, 0.5)
    return results


@holds(KIND, "value is one number per sample")
def value_shape(subject: Subject) -> None:
    case = trial(subject)
    what = f"value of {COUNT} measurements (sum over entries, not over the batch)"
    require_like(case.value(case.t), case.t, what, (COUNT,))


@holds(KIND, "defined for every t")
def defined(subject: Subject) -> None:
    case = trial(subject)
    for where, t in places(case).items():
        for name, number in (
            ("value", case.value(t)),
            ("gradient", case.gradient(t)),
            ("curvature", case.curvature(t)),
        ):
            require(
                bool(torch.isfinite(number).all()),
                f"{name} is not finite at {where}; iterates of a solver may reach it, so extend the term beyond the"
                " domain of its formula, e.g. by the parabola with the same slope and curvature",
            )


@holds(KIND, "same input, same result")
def deterministic(subject: Subject) -> None:
    require_same(everything(trial(subject)), everything(trial(subject)), "t, y and θ")


@holds(KIND, "a sample's result does not depend on its batch")
def batch_independent(subject: Subject) -> None:
    require_batch_independent(partial(everything, trial(subject)), COUNT)


@stateless(KIND)
def use(subject: Subject, term: DataTerm, problem: int) -> Iterator[tuple[str, Any]]:
    shape = two_shapes(term)[problem]
    case = trial_of(term, shape, seed=problem)
    yield "the initial θ", term.init_params(shape, keyed_generator("θ", problem))
    yield "check_measurements", term.check_measurements(case.y)
    yield from everything(case).items()
    yield "project", term.project(case.raw)
    yield "spectrum", term.spectrum(case.theta, case.y)
    yield "third", term.third(case.theta, case.y)


@holds(KIND, "float32 and float64 are kept")
def dtype_kept(subject: Subject) -> None:
    for dtype in (torch.float32, torch.float64):
        case = trial(subject, dtype)
        kind = str(dtype)[6:]
        require_like(case.value(case.t), case.t, f"value of {kind} measurements", (COUNT,))
        require_like(case.gradient(case.t), case.t, f"gradient of {kind} measurements")
        for name in ("curvature", "majorant"):
            if name == "curvature" or case.term.offers(name):
                number = getattr(case.term, name)(case.theta, case.t, case.y)
                if isinstance(number, Tensor):
                    require_like(number, case.t, f"{name} of {kind} measurements", tuple(number.shape))
        if case.term.offers("prox"):
            require_like(
                case.term.prox(case.theta, case.t, case.y, 0.5), case.t, f"prox of {kind} measurements"
            )


@holds(KIND, "inputs are left untouched")
def untouched(subject: Subject) -> None:
    case = trial(subject)
    calls: dict[str, Callable[[], object]] = {
        "value": lambda: case.value(case.t),
        "gradient": lambda: case.gradient(case.t).zero_(),
        "curvature": lambda: case.term.curvature(case.theta, case.t, case.y),
        "spectrum": lambda: case.term.spectrum(case.theta, case.y),
        "third": lambda: case.term.third(case.theta, case.y),
        "check_measurements": lambda: case.term.check_measurements(case.y),
    }
    if case.term.offers("majorant"):
        calls["majorant"] = lambda: case.term.majorant(case.theta, case.t, case.y)
    if case.term.offers("prox"):
        calls["prox"] = lambda: case.term.prox(case.theta, case.t, case.y, 0.5)
    for name, call in calls.items():
        guard = Untouched(theta=dict(case.theta), t=case.t, y=case.y)
        call()
        guard.verify("writing to the result of gradient" if name == "gradient" else name)


@holds(KIND, "gradient matches finite differences of the value")
def gradient(subject: Subject) -> None:
    case = trial(subject)
    index = chosen(case)
    for where in ("t near y", "t far from y"):
        t = places(case)[where]
        claimed = case.gradient(t)[0].flatten()[index]

        def along(h: float, t: Tensor = t) -> Tensor:
            return (
                single(case, t, index, torch.full((len(index),), h * case.scale, dtype=t.dtype)) / case.scale
            )

        _agree(along, claimed, f"gradient at {where}", "differences of the value in one entry")
        with torch.enable_grad():
            leaf = t.clone().requires_grad_()
            total = case.value(leaf).sum()
        if not total.requires_grad:
            fail(
                "value is not differentiable in t; compute it with torch operations, without detach or .item()"
            )
        automatic = torch.autograd.grad(total, leaf)[0]
        cause = "value must be differentiable in t, without detach or no_grad"
        require_close(
            case.gradient(t), automatic, 1e-9, f"gradient at {where} against autograd of value", cause
        )


@holds(KIND, "curvature matches finite differences of the gradient")
def curvature(subject: Subject) -> None:
    case = trial(subject)
    other = case.t + case.scale * normal(*case.t.shape, seed=5) * _checkerboard(case.t)
    kept = (case.gradient(other) - case.gradient(case.t)) * (1 - _checkerboard(case.t))
    require(
        float(kept.abs().max()) <= 1e-12 * (1 + float(case.gradient(case.t).abs().max())),
        "gradient of an entry changes with other entries of t; a data term is a sum of d(t_k; y_k) over entries",
    )
    for where in ("t near y", "t far from y"):
        t = places(case)[where]

        def along(h: float, t: Tensor = t) -> Tensor:
            return case.gradient(t + h * case.scale) / case.scale

        _agree(along, case.curvature(t), f"curvature at {where}", "differences of the gradient in t")


@holds(KIND, "gradient is differentiable in t, y and θ")
def differentiable(subject: Subject) -> None:
    case = trial(subject)
    u = normal(*case.t.shape, seed=6)
    with torch.enable_grad():
        t, y = case.t.clone().requires_grad_(), case.y.clone().requires_grad_()
        slope = case.gradient(t, y)
        if not slope.requires_grad:
            fail("gradient is not differentiable in t and y; avoid detach, .item() and no_grad")
        by = torch.autograd.grad(slope.sum(), [t, y], allow_unused=True)
    in_t, in_y = (torch.zeros_like(case.t) if gradient is None else gradient for gradient in by)
    cause = "the derivative of gradient in t is the curvature"
    require_close(in_t, case.curvature(case.t), 1e-9, "autograd of gradient in t", cause)

    def along_y(h: float) -> Tensor:
        return case.gradient(case.t, case.y + h * case.scale) / case.scale

    _agree(along_y, in_y, "autograd of gradient in y", "differences of the gradient in y")
    for name in case.raw:
        direction = {n: normal(*v.shape, seed=7) * (n == name) for n, v in case.raw.items()}

        def value(theta: Theta) -> Tensor:
            return case.term.value(case.term.prepare(theta), case.t, case.y).sum()

        def pairing(theta: Theta) -> Tensor:
            return (case.term.gradient(case.term.prepare(theta), case.t, case.y) * u).sum()

        for what, function in (("value", value), ("gradient", pairing)):
            _theta_agrees(case.raw, name, direction, function, what)


def _theta_agrees(
    raw: dict[str, Tensor], name: str, direction: Theta, function: Callable[[Theta], Tensor], what: str
) -> None:
    leaves = {n: v.clone().requires_grad_() for n, v in raw.items()}
    with torch.enable_grad():
        total = function(leaves)
    derivative = None
    if total.requires_grad:
        derivative = torch.autograd.grad(total, leaves[name], allow_unused=True)[0]
    claimed = total.new_zeros(()) if derivative is None else (derivative * direction[name]).sum()
    cause = "part of the computation may be hidden from autograd"
    require_theta_derivative(
        function, raw, direction, claimed.detach(), f"autograd of {what} in θ[{name!r}]", cause
    )


@holds(KIND, "initial parameters are float64 and depend only on the generator")
def initial_parameters(subject: Subject) -> None:
    first = subject()
    theta = require_initial_parameters(first, subject())
    require(same(first.project(theta), theta), "project changes the initial θ, which must be admissible")


def _agree(function: Callable[[float], Tensor], claimed: Tensor, what: str, than: str) -> None:
    """Each entry of a claimed derivative against difference quotients."""
    quotient, error = best_entries(function, claimed.detach())
    scale = float(quotient.abs().max())
    allowed = 1e-5 * torch.maximum(quotient.abs(), claimed.abs()) + 1e-7 * scale + 1e-12
    worst = int((error / allowed).flatten().argmax())
    ratio = (claimed / quotient).flatten()
    mean = float(ratio.mean())
    constant = float((ratio - mean).abs().max()) < 1e-3 * abs(mean)
    factor = f"; it is {mean:.4g} times too large, so a constant factor is wrong" if constant else ""
    require(
        bool((error <= allowed).all()),
        f"{what}: expected {float(quotient.flatten()[worst]):.6g} from {than}, got"
        f" {float(claimed.flatten()[worst]):.6g} at the largest difference{factor}",
    )


def _checkerboard(like: Tensor) -> Tensor:
    """1 at every other entry, 0 elsewhere."""
    return (torch.arange(like[0].numel()) % 2).to(like.dtype).view(like.shape[1:]).expand_as(like)
