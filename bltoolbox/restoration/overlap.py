"""How far a pixel of the measurements reaches in the restored image, so that large images can be cut into tiles.

To first order a change d of the measurements changes x̂ by H⁻¹Aᵀd, H = AᵀA + ∇²R. H couples neighbours only, so the
change decays with the distance, exponentially if H is definite. How fast is measured rather than bounded (bounds
by the condition of H are ten times too large): everything beyond a line is changed, by one constant and by random
signs, and the change of x̂ is looked at in front of the line.

H depends on x̂. ``photographs`` are what is met as a rule: a flat area with noise, restored, and a rough texture.
``extremes`` are an area without any noise, where potentials with a tip are stiffest and reach furthest (twice as far,
if they flatten outwards), and noise of strength 1, where they are weakest and a blur reaches furthest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bltoolbox.bilevel.linear import ConjugateGradients, solve_linear
from bltoolbox.bilevel.records import Theta
from bltoolbox.bilevel.tensors import keyed_generator, norm
from bltoolbox.errors import BltError
from bltoolbox.restoration.variational import ImageLower, Variational, prepare

#: Part of a change of the measurements that may be left in front of the line.
LEVEL = 1e-4
#: No overlap is larger; then the level is not reached.
MOST = 128
#: Pixels beyond the line; what lies further away matters less.
_BEYOND = 96
#: Where flat parts of typical images lie, and how much rough parts vary.
_GRAY, _TEXTURE = 0.5, 0.25
_ITERATIONS = 500


@dataclass(frozen=True)
class Overlap:
    """Pixels by which tiles must overlap on each side, and the part of a change that is left there."""

    pixels: int
    left: float


def smallest_side(problem: Variational, channels: int) -> int | None:
    """The side of the smallest square image that the components treat; None if there is none of ordinary size."""
    for side in range(1, 513):
        if problem.check((channels, side, side)) is None:
            return side
    return None


def margin(problem: Variational, theta: Theta, channels: int, side: int) -> tuple[int, int] | None:
    """How much larger x is than y, in rows and columns; None if that depends on the size or on the place.

    An operator with a margin is local and the same everywhere, so that a part of y tells about a part of x.
    """
    inner, outer = 2 * side + 32, 4 * side + 64
    reference = next(iter(theta.values()))
    generator = keyed_generator("margin")
    x = torch.rand(1, channels, outer, outer, generator=generator, dtype=torch.float64).to(reference)
    first = (outer - inner) // 2
    try:
        prepared = prepare(problem, theta)["operator"]
        whole = problem.operator.apply(x, prepared, {})
        part = problem.operator.apply(x[:, :, first : first + inner, first : first + inner], prepared, {})
    except (ValueError, KeyError, RuntimeError):
        return None
    found = {(outer - whole.shape[2], outer - whole.shape[3]), (inner - part.shape[2], inner - part.shape[3])}
    if len(found) != 1 or min(rows_columns := found.pop()) < 0:
        return None
    # The middle of the part, which sees nothing of what was cut away, lies at the same place in both.
    middle = slice(inner // 2 - rows_columns[0] // 2, inner // 2 - rows_columns[0] // 2 + 2)
    shifted = slice(middle.start + first, middle.stop + first)
    same = torch.allclose(part[:, :, middle, middle], whole[:, :, shifted, shifted], rtol=1e-4, atol=1e-5)
    return rows_columns if same else None


def photographs(
    problem: Variational,
    theta: Theta,
    channels: int,
    side: int,
    restore: Callable[[Tensor], Tensor],
) -> Tensor:
    """Strips of what photographs are made of; ``restore`` solves the problem for measurements."""
    flat, rough = _flat_and_rough(theta, channels, side)
    clean = problem.operator.apply(flat, prepare(problem, theta)["operator"], {})
    if problem.noise is not None:
        generator = keyed_generator("influence", "noise")
        noisy = [problem.noise.sample(t, generator) for t in clean.double().cpu()]
        clean = torch.stack(noisy).to(clean)
    return torch.cat([restore(clean), _GRAY + _TEXTURE * rough])


def extremes(theta: Theta, channels: int, side: int) -> Tensor:
    """Strips where pixels reach as far as they ever do."""
    return torch.cat(_flat_and_rough(theta, channels, side))


def measure_overlap(problem: Variational, theta: Theta, strips: Tensor) -> Overlap:
    """The smallest overlap that leaves less than ``LEVEL`` of a change in all of these pictures."""
    # In float32 the rounding of H may be larger than what is asked for.
    precise = {name: value.double() for name, value in theta.items()}
    left = _reach(problem, precise, strips.double())
    below = [distance for distance in range(len(left)) if float(left[distance:].max()) <= LEVEL]
    pixels = min(MOST, 8 * -(-below[0] // 8)) if below else MOST
    return Overlap(pixels, float(left[pixels:].max()))


def _flat_and_rough(theta: Theta, channels: int, side: int) -> tuple[Tensor, Tensor]:
    """A strip of one value, and one of noise, each long enough for the largest overlap."""
    reference = next(iter(theta.values()))
    width = max(16, side)
    length = max(_BEYOND + MOST + 8, width)
    generator = keyed_generator("influence")
    noise = torch.randn(1, channels, width, length, generator=generator).to(reference)
    return torch.full_like(noise, _GRAY), noise


def _sensitivity(lower: ImageLower) -> Tensor:
    """−∂_y d'(t; y) at t = y, entry by entry: how much of a change of y the lower level sees."""
    with torch.enable_grad():
        leaf = lower.y.detach().requires_grad_()
        theta = lower.at.prepared["data_term"]
        slope = lower.problem.data_term.gradient(theta, lower.y.detach(), leaf)
        return -torch.autograd.grad(slope.sum(), leaf)[0]


def _reach(problem: Variational, theta: Theta, strips: Tensor) -> Tensor:
    """The largest change of x̂ at each distance in front of a line, when y is changed by at most 1 beyond it."""
    x = strips.repeat_interleave(2, dim=0)
    at = problem.at(theta, x.shape[1:])
    with torch.no_grad():
        y = problem.operator.apply(x, at.prepared["operator"], {})
        generator = keyed_generator("influence", "signs")
        signs = torch.randint(0, 2, y.shape[1:], generator=generator).to(y) * 2 - 1
        change = torch.stack([torch.ones_like(signs), signs] * len(strips))
        change[..., :-_BEYOND] = 0
        lower = at.on(y)
        system, rhs = lower.linearize(x), lower.backward(_sensitivity(lower) * change)
        # What is asked for is a small part of the change.
        tol = torch.clamp(1e-6 * norm(rhs), min=0.1 * LEVEL)
        method = ConjugateGradients("the reach of a pixel")
        try:
            found, residual, _ = solve_linear(method, system, rhs, torch.zeros_like(rhs), tol, _ITERATIONS)
        except BltError:  # not definite
            return torch.ones(MOST + 1)
    if bool((residual > 10 * tol).any()):  # nothing is known, and the largest overlap is taken
        return torch.ones(MOST + 1)
    line = y.shape[3] - _BEYOND + (x.shape[3] - y.shape[3]) // 2
    return found.abs().amax((0, 1, 2))[:line].flip(0).cpu()
