"""Properties of data terms: values and their derivatives, entry by entry.

D is a sum over entries, so that one entry changed in a copy of the measurements shows d of that entry alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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
from bltoolbox.testing.checks.numerics import (
    best_difference,
    best_entries,
    cast,
    fitting_shape,
    parameters,
    require_batch_independent,
    require_initial_parameters,
    require_same,
    shifted,
)
from bltoolbox.testing.problems import smooth_images

KIND = "data_term"
COUNT = 3
#: Entries that are looked at one by one.
ENTRIES = 48


@dataclass(frozen=True)
class Trial:
    """A data term with θ, measurements y that it accepts, and images t = A x of them."""

    term: DataTerm
    #: As the component named them; ``theta`` is prepared.
    raw: dict[str, Tensor]
    theta: Theta
    t: Tensor
    y: Tensor

    @property
    def scale(self) -> float:
        """The size of the measurements."""
        return float(self.y.square().mean().sqrt())

    def value(self, t: Tensor, y: Tensor | None = None) -> Tensor:
        return self.term.value(self.theta, t, self.y if y is None else y)

    def gradient(self, t: Tensor, y: Tensor | None = None) -> Tensor:
        return self.term.gradient(self.theta, t, self.y if y is None else y)

    def curvature(self, t: Tensor, y: Tensor | None = None) -> Tensor:
        return entries(self.term.curvature(self.theta, t, self.y if y is None else y), t)


def candidates(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """Measurements to try: of any sign, not negative, counts with zeros among them, and positive counts."""
    images = smooth_images(COUNT, shape).double()
    noisy = images + 0.2 * normal(COUNT, *shape, seed=1)
    counts = (20 * noisy).clamp_min(0).round()
    found = {"signed": noisy, "not negative": noisy.abs(), "counts": counts, "positive counts": counts + 1}
    return {name: y.to(dtype) for name, y in found.items()}


def trial(subject: Subject, dtype: torch.dtype = torch.float64) -> Trial:
    """With the first measurements that ``check_measurements`` accepts."""
    term = subject()
    shape = fitting_shape(term)
    tried = candidates(shape, dtype)
    y = next((y for y in tried.values() if term.check_measurements(y) is None), None)
    if y is None:
        fail(
            f"check_measurements refuses all measurements tried ({', '.join(tried)}: images with noise, and counts"
            " up to about 20); it must accept what the term is for"
        )
    raw = cast(parameters(term, shape), dtype)
    scale = float(y.square().mean().sqrt())
    t = y + 0.3 * scale * normal(*y.shape, seed=2, dtype=dtype)
    return Trial(term, raw, term.prepare(raw), t, y)


def entries(value: Tensor | float, like: Tensor) -> Tensor:
    """One number per entry."""
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).expand_as(like)


def places(one: Trial) -> dict[str, Tensor]:
    """Arguments t to try: solvers may come anywhere."""
    return {
        "t near y": one.t,
        "t = y": one.y.clone(),
        "t = 0": torch.zeros_like(one.y),
        "t far from y": one.y + 10 * one.scale * normal(*one.y.shape, seed=3),
        "t very far from y": one.y + 1e3 * one.scale * normal(*one.y.shape, seed=4),
    }


def chosen(one: Trial) -> Tensor:
    """Indices of entries of the first sample, the whole sample where it is small."""
    return torch.randperm(one.y[0].numel(), generator=keyed_generator("entries"))[:ENTRIES]


def single(one: Trial, t: Tensor, index: Tensor, offset: Tensor) -> Tensor:
    """d(t_k + offset_k; y_k) − d(t_k; y_k) for the entries ``index`` of the first sample, one copy for each."""
    copies = t[:1].flatten(1).repeat(len(index), 1)
    copies[torch.arange(len(index)), index] += offset
    y = one.y[:1].expand(len(index), *one.y.shape[1:])
    return one.value(copies.view(y.shape), y) - one.value(t[:1], one.y[:1])


def everything(one: Trial, index: Tensor | None = None) -> dict[str, Tensor]:
    """All that a data term says, by what a report calls it."""
    t, y = (part if index is None else part[index] for part in (one.t, one.y))
    found = {
        "value": one.value(t, y),
        "gradient": one.gradient(t, y),
        "curvature": one.curvature(t, y),
    }
    if one.term.offers("majorant"):
        found["majorant"] = entries(one.term.majorant(one.theta, t, y), t)
    if one.term.offers("prox"):
        found["prox"] = one.term.prox(one.theta, t, y, 0.5)
    return found


@holds(KIND, "value is one number per sample")
def value_shape(subject: Subject) -> None:
    one = trial(subject)
    what = f"value of {COUNT} measurements (sum over entries, not over the batch)"
    require_like(one.value(one.t), one.t, what, (COUNT,))


@holds(KIND, "defined for every t")
def defined(subject: Subject) -> None:
    one = trial(subject)
    for where, t in places(one).items():
        for name, number in (
            ("value", one.value(t)),
            ("gradient", one.gradient(t)),
            ("curvature", one.curvature(t)),
        ):
            require(
                bool(torch.isfinite(number).all()),
                f"{name} is not finite at {where}; a solver may come there, so continue the term beyond where its"
                " formula holds, e.g. by the parabola with the same slope and curvature",
            )


@holds(KIND, "same input, same result")
def deterministic(subject: Subject) -> None:
    require_same(everything(trial(subject)), everything(trial(subject)), "t, y and θ")


@holds(KIND, "a sample's result does not depend on its batch")
def batch_independent(subject: Subject) -> None:
    require_batch_independent(partial(everything, trial(subject)), COUNT)


@holds(KIND, "float32 and float64 are kept")
def dtype_kept(subject: Subject) -> None:
    for dtype in (torch.float32, torch.float64):
        one = trial(subject, dtype)
        kind = str(dtype)[6:]
        require_like(one.value(one.t), one.t, f"value of {kind} measurements", (COUNT,))
        require_like(one.gradient(one.t), one.t, f"gradient of {kind} measurements")
        for name in ("curvature", "majorant"):
            if name == "curvature" or one.term.offers(name):
                number = getattr(one.term, name)(one.theta, one.t, one.y)
                if isinstance(number, Tensor):
                    require_like(number, one.t, f"{name} of {kind} measurements", tuple(number.shape))
        if one.term.offers("prox"):
            require_like(one.term.prox(one.theta, one.t, one.y, 0.5), one.t, f"prox of {kind} measurements")


@holds(KIND, "inputs are left untouched")
def untouched(subject: Subject) -> None:
    one = trial(subject)
    calls: dict[str, Callable[[], object]] = {
        "value": lambda: one.value(one.t),
        "gradient": lambda: one.gradient(one.t).zero_(),
        "curvature": lambda: one.term.curvature(one.theta, one.t, one.y),
        "spectrum": lambda: one.term.spectrum(one.theta, one.y),
        "third": lambda: one.term.third(one.theta, one.y),
        "check_measurements": lambda: one.term.check_measurements(one.y),
    }
    if one.term.offers("majorant"):
        calls["majorant"] = lambda: one.term.majorant(one.theta, one.t, one.y)
    if one.term.offers("prox"):
        calls["prox"] = lambda: one.term.prox(one.theta, one.t, one.y, 0.5)
    for name, call in calls.items():
        guard = Untouched(theta=dict(one.theta), t=one.t, y=one.y)
        call()
        guard.verify("writing to what gradient returned" if name == "gradient" else name)


@holds(KIND, "gradient matches finite differences of the value")
def gradient(subject: Subject) -> None:
    one = trial(subject)
    index = chosen(one)
    for where in ("t near y", "t far from y"):
        t = places(one)[where]
        claimed = one.gradient(t)[0].flatten()[index]

        def along(h: float, t: Tensor = t) -> Tensor:
            return single(one, t, index, torch.full((len(index),), h * one.scale, dtype=t.dtype)) / one.scale

        _agree(along, claimed, f"gradient at {where}", "differences of the value in one entry")
        with torch.enable_grad():
            leaf = t.clone().requires_grad_()
            total = one.value(leaf).sum()
        if not total.requires_grad:
            fail(
                "value is not differentiable in t; compute it with torch operations, without detach or .item()"
            )
        automatic = torch.autograd.grad(total, leaf)[0]
        cause = "value must be differentiable in t, without detach or no_grad"
        require_close(
            one.gradient(t), automatic, 1e-9, f"gradient at {where} against autograd of value", cause
        )


@holds(KIND, "curvature matches finite differences of the gradient")
def curvature(subject: Subject) -> None:
    one = trial(subject)
    other = one.t + one.scale * normal(*one.t.shape, seed=5) * _checkerboard(one.t)
    kept = (one.gradient(other) - one.gradient(one.t)) * (1 - _checkerboard(one.t))
    require(
        float(kept.abs().max()) <= 1e-12 * (1 + float(one.gradient(one.t).abs().max())),
        "gradient of an entry changes with other entries of t; a data term is a sum of d(t_k; y_k) over entries",
    )
    for where in ("t near y", "t far from y"):
        t = places(one)[where]

        def along(h: float, t: Tensor = t) -> Tensor:
            return one.gradient(t + h * one.scale) / one.scale

        _agree(along, one.curvature(t), f"curvature at {where}", "differences of the gradient in t")


@holds(KIND, "gradient is differentiable in t, y and θ")
def differentiable(subject: Subject) -> None:
    one = trial(subject)
    u = normal(*one.t.shape, seed=6)
    with torch.enable_grad():
        t, y = one.t.clone().requires_grad_(), one.y.clone().requires_grad_()
        slope = one.gradient(t, y)
        if not slope.requires_grad:
            fail("gradient is not differentiable in t and y; avoid detach, .item() and no_grad")
        by = torch.autograd.grad(slope.sum(), [t, y], allow_unused=True)
    in_t, in_y = (torch.zeros_like(one.t) if part is None else part for part in by)
    cause = "the derivative of gradient in t is the curvature"
    require_close(in_t, one.curvature(one.t), 1e-9, "autograd of gradient in t", cause)

    def along_y(h: float) -> Tensor:
        return one.gradient(one.t, one.y + h * one.scale) / one.scale

    _agree(along_y, in_y, "autograd of gradient in y", "differences of the gradient in y")
    for name in one.raw:
        direction = {n: normal(*v.shape, seed=7) * (n == name) for n, v in one.raw.items()}

        def value(theta: Theta) -> Tensor:
            return one.term.value(one.term.prepare(theta), one.t, one.y).sum()

        def pairing(theta: Theta) -> Tensor:
            return (one.term.gradient(one.term.prepare(theta), one.t, one.y) * u).sum()

        for what, function in (("value", value), ("gradient", pairing)):
            _theta_agrees(one.raw, name, direction, function, what)


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
    quotient, error = best_difference(lambda h: function(shifted(raw, direction, h)), claimed.detach())
    require(
        error <= 1e-5 or abs(float(quotient - claimed)) <= 1e-9,
        f"autograd of {what} in θ[{name!r}]: expected {float(quotient):.6g} from finite differences in θ, got"
        f" {float(claimed):.6g}; a part of it may not depend on θ for autograd",
    )


@holds(KIND, "initial parameters are float64 and depend on the generator alone")
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
        f" {float(claimed.flatten()[worst]):.6g} where they differ most{factor}",
    )


def _checkerboard(like: Tensor) -> Tensor:
    """1 at every other entry, 0 elsewhere."""
    return (torch.arange(like[0].numel()) % 2).to(like.dtype).view(like.shape[1:]).expand_as(like)
