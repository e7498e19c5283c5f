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

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bltoolbox.bilevel.linear import ConjugateGradients, solve_linear
from bltoolbox.bilevel.records import Theta
from bltoolbox.bilevel.tensors import keyed_generator, norm
from bltoolbox.errors import BltError
from bltoolbox.restoration.cuts import FADE
from bltoolbox.restoration.image_lower import ImageLower
from bltoolbox.restoration.roles import Operator
from bltoolbox.restoration.theta import prepare
from bltoolbox.restoration.variational import Variational

#: Part of a change of the measurements that may be left in front of the line, and for results of 8 bits: what replaces
#: the surroundings of a tile differs from them by less than 1, and as far as that matters tiles fade into each other.
LEVEL, COARSE_LEVEL = 1e-4, 1e-3
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


@dataclass(frozen=True)
class Geometry:
    """How large x is: ``scale`` times as large as y, and by ``margin`` rows and columns more."""

    scale: int = 1
    margin: tuple[int, int] = (0, 0)
    #: Whether A differs from place to place, so that each tile has its own.
    positional: bool = False

    def image(self, height: int, width: int) -> tuple[int, int]:
        """The smallest image of at least this size that measurements may have."""
        rows, columns = (
            self.scale * max(1, -(-(length - margin) // self.scale)) + margin
            for length, margin in zip((height, width), self.margin, strict=True)
        )
        return rows, columns


def smallest_side(problem: Variational, channels: int, positional: bool = False) -> int | None:
    """The side of the smallest square image that the components treat; None if there is none of ordinary size.

    A ``positional`` operator has no say, since it is cut to any size.
    """
    roles = {"operator"} if positional else set()
    for side in range(1, 513):
        if problem.check((channels, side, side), without=roles) is None:
            return side
    return None


def is_positional(operator: Operator, channels: int) -> bool:
    """Whether the operator of a part of an image is another one."""
    if not operator.offers("crop"):
        return False
    try:
        cut = operator.crop(slice(0, 8), slice(0, 8), (channels, 16, 16))
    except ValueError:  # of one size only, and not of this one
        return True
    return cut is not operator


def depends_on_size(problem: Variational, channels: int, side: int) -> bool:
    """Whether θ has another shape for larger images, so that it is for images of one size."""
    shapes = []
    for size in (4 * side, 8 * side):
        generator = keyed_generator("size")
        theta = [
            component.init_params((channels, size, size), generator)
            for component in problem.components.values()
        ]
        shapes.append([{name: value.shape for name, value in params.items()} for params in theta])
    return shapes[0] != shapes[1]


def geometry(
    problem: Variational, theta: Theta, channels: int, side: int, picture: Sequence[int] | None = None
) -> Geometry | None:
    """How large x is, given y; None if that depends on the size or on the place.

    An operator with a geometry is local, so that a part of y tells about a part of x. It is the same everywhere, or it
    is one of a ``picture`` (H, W), of which its ``crop`` is tried.
    """
    inner = 4 * side * -(-(2 * side + 32) // (4 * side))
    first, outer = inner // 2, 2 * inner
    if picture is not None and min(picture) < outer:
        return None
    operator, reference = problem.operator, next(iter(theta.values()))
    generator = keyed_generator("margin")
    x = torch.rand(1, channels, outer, outer, generator=generator, dtype=torch.float64).to(reference)
    middle = slice(first, first + inner)
    corner = slice(0, outer)
    try:
        around = operator if picture is None else operator.crop(corner, corner, (channels, *picture))
        inside = None if around is None else around.crop(middle, middle, (channels, outer, outer))
        if around is None or inside is None:
            return None
        prepared = prepare(problem, theta)["operator"]
        whole = around.apply(x, prepared, {})
        cropped = inside.apply(x[:, :, middle, middle], prepared, {})
    except (ValueError, KeyError, RuntimeError):
        return None
    steps = {large - small for large, small in zip(whole.shape[2:], cropped.shape[2:], strict=True)}
    step = steps.pop()
    if steps or step <= 0 or first % (scale := inner // step) or scale * step != inner:
        return None
    rows, columns = (inner - scale * length for length in cropped.shape[2:])
    if min(rows, columns) < 0 or (picture is not None and (scale, rows, columns) != (1, 0, 0)):
        return None
    # The middle of the part, which sees nothing of what was cut away, lies at the same place in both.
    place, shift = cropped.shape[2] // 2, first // scale
    seen, expected = slice(place, place + 2), slice(place + shift, place + shift + 2)
    same = torch.allclose(cropped[:, :, seen, seen], whole[:, :, expected, expected], rtol=1e-4, atol=1e-5)
    return Geometry(scale, (rows, columns), picture is not None) if same else None


def photographs(
    problem: Variational,
    theta: Theta,
    size: tuple[int, int, int],
    restore: Callable[[Tensor], Tensor],
) -> Tensor:
    """Strips of what photographs are made of; ``restore`` solves the problem for measurements."""
    flat, rough = _flat_and_rough(theta, size)
    clean = problem.operator.apply(flat, prepare(problem, theta)["operator"], {})
    if problem.noise is not None:
        generator = keyed_generator("influence", "noise")
        noisy = [problem.noise.sample(t, generator) for t in clean.double().cpu()]
        clean = torch.stack(noisy).to(clean)
    return torch.cat([restore(clean), _GRAY + _TEXTURE * rough])


def extremes(theta: Theta, size: tuple[int, int, int]) -> Tensor:
    """Strips where pixels reach as far as they ever do."""
    return torch.cat(_flat_and_rough(theta, size))


def strip_size(channels: int, side: int, around: Geometry) -> tuple[int, int, int]:
    """Of strips that are long enough for the largest overlap."""
    width = max(16, side)
    return channels, *around.image(width, max(_BEYOND + MOST + 8, width))


def measure_overlap(
    problem: Variational,
    theta: Theta,
    strips: Tensor,
    around: Geometry | None = None,
    level: float = LEVEL,
) -> Overlap:
    """The smallest overlap that leaves less than ``level`` of a change in all of these pictures."""
    if level <= LEVEL:  # in float32 the rounding of H may be larger than what is asked for
        theta, strips = {name: value.double() for name, value in theta.items()}, strips.double()
    left = _reach(problem, theta, strips, around or Geometry(), level)
    below = [distance for distance in range(len(left)) if float(left[distance:].max()) <= level]
    # What a network sees ends abruptly, and tiles fade into each other beyond their cores.
    beyond = FADE if problem.regularizer.offers("guide") else 0
    pixels = min(MOST, 8 * -(-(below[0] + beyond) // 8)) if below else MOST
    return Overlap(pixels, float(left[pixels:].max()))


def _flat_and_rough(theta: Theta, size: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """A strip of one value, and one of noise."""
    reference = next(iter(theta.values()))
    noise = torch.randn(1, *size, generator=keyed_generator("influence")).to(reference)
    return torch.full_like(noise, _GRAY), noise


def response(lower: ImageLower, x: Tensor, change: Tensor) -> Tensor:
    """−∂_y∇_x h · change: how a change of y acts on x, also through what the regularizer reads off y."""
    inputs = lower.wrt("y")
    with torch.enable_grad():
        y, q = lower.y.detach().requires_grad_(), torch.zeros_like(x).requires_grad_()
        paired = inputs.pairing({**inputs.theta, "y": y}, x, q).sum()  # linear in q
        slope = torch.autograd.grad(paired, y, create_graph=True)[0]
        return -torch.autograd.grad((slope * change).sum(), q)[0]


def _reach(
    problem: Variational, theta: Theta, strips: Tensor, around: Geometry, level: float = LEVEL
) -> Tensor:
    """The largest change of x̂ at each distance in front of a line, when y is changed by at most 1 beyond it."""
    if not problem.regularizer.smooth:  # H does not exist, and the largest overlap is taken
        return torch.ones(MOST + 1)
    x = strips.repeat_interleave(2, dim=0)
    at = problem.at(theta, x.shape[1:])
    with torch.no_grad():
        y = problem.operator.apply(x, at.prepared["operator"], {})
        if problem.data_term.check_measurements(y):  # strips of noise are darker than any picture
            x = x.clamp_min(0)
            y = problem.operator.apply(x, at.prepared["operator"], {})
        generator = keyed_generator("influence", "signs")
        signs = torch.randint(0, 2, y.shape[1:], generator=generator).to(y) * 2 - 1
        change = torch.stack([torch.ones_like(signs), signs] * len(strips))
        beyond = -(-_BEYOND // around.scale)
        change[..., :-beyond] = 0
        lower = at.on(y)
        system, rhs = lower.linearize(lower.embed(x)), response(lower, lower.embed(x), change)
        # What is asked for is a small part of the change.
        tol = torch.clamp(0.01 * level * norm(rhs), min=0.1 * level)
        method = ConjugateGradients("the reach of a pixel", "auto")
        try:
            influence, residual, _ = solve_linear(
                method, system, rhs, torch.zeros_like(rhs), tol, _ITERATIONS
            )
        except BltError:  # not definite
            return torch.ones(MOST + 1)
    if bool((residual > 10 * tol).any()):  # nothing is known, and the largest overlap is taken
        return torch.ones(MOST + 1)
    line = around.scale * (y.shape[3] - beyond) + around.margin[1] // 2
    return lower.view(influence).abs().amax((0, 1, 2))[:line].flip(0).cpu()
