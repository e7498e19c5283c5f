"""The roles of an inverse problem: images, operator, noise, data term, regularizer and loss.

    h_i(x, θ) = D_θ(A_θ x; y_i) + R_θ(x),        y_i = noise(A x*_i),        g_i(x) = loss(x; x*_i, y_i)

Operator, data term and regularizer may have parameters: together they are the θ that is learned. Every quantity is
per sample, and nothing may depend on which samples share a batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from bltoolbox.bilevel.derivatives import rows_of
from bltoolbox.bilevel.problem import Upper
from bltoolbox.bilevel.records import Bound, Constants, Rows, Theta
from bltoolbox.bilevel.roles import Parametric, Role


class Data(Role):
    """Images, addressed by id: true ones, recorded measurements, or both. The core adds splits and batches."""

    kind = "data"
    #: The values between which images lie; also the box constraint, and what metrics clip to and scale by.
    range: tuple[float, float] = (0.0, 1.0)

    @abstractmethod
    def __len__(self) -> int:
        """Number of images."""

    def clean(self, ids: Sequence[int]) -> Tensor:
        """True images ``ids`` as a float32 CPU tensor ``(B, C, H, W)``."""
        raise NotImplementedError(f"{type(self).__name__} has no true images")

    def measured(self, ids: Sequence[int]) -> Tensor:
        """Recorded measurements of the images ``ids``, float32 on the CPU; without them measurements are
        simulated."""
        raise NotImplementedError(f"{type(self).__name__} has no recorded measurements")

    def context(self, ids: Sequence[int]) -> Rows:
        """What operator and data term need to know about each image, e.g. coil maps, masks, or its class."""
        return {}

    def label(self, id: int) -> str:
        """The label of image ``id`` in tables and figures."""
        return f"#{id}"

    def group(self, id: int) -> str | None:
        """What image ``id`` was taken from, e.g. a photograph; None, the default, if the image is a group of its own.

        Images of one group are never on both sides of a split. Equal texts mean the same group, even in different
        components, so use a file name, or a data set and an index.
        """
        return None

    def derived(self, id: int) -> bool:
        """Whether image ``id`` is made from another one of its group, for training only: it is never held out."""
        return False


class Operator(Parametric):
    """The forward operator A_θ, linear in x. One with A x = x declares ``identity``: primal–dual solvers then use the
    proximal map of the data term directly."""

    kind = "operator"
    identity: bool = False

    @abstractmethod
    def apply(self, x: Tensor, theta: Theta, context: Rows) -> Tensor:
        """A x, differentiable in x and θ. Measurements are simulated with an empty θ: there A is the true
        operator."""

    @abstractmethod
    def adjoint(self, y: Tensor, theta: Theta, context: Rows) -> Tensor:
        """Aᵀ y, exact up to rounding."""

    def measured(self, y: Tensor, context: Rows) -> Tensor | None:
        """1 where y contains measurements and 0 elsewhere, to broadcast with y; None if all of y is measured.

        Noise acts only on measurements.
        """
        return None

    def start(self, y: Tensor, theta: Theta, context: Rows) -> Tensor:
        """The start of a cold solve, and the image shown as "before"."""
        return self.adjoint(y, theta, context)

    def spectrum(self, theta: Theta, shape: Sequence[int], context: Rows) -> tuple[Bound, Bound]:
        """Valid bounds on the smallest and the largest eigenvalue of AᵀA for images of ``shape``; None if
        unknown."""
        return 0.0, None

    def symbol(self, theta: Theta, shape: Sequence[int]) -> Tensor | None:
        """The eigenvalues of AᵀA by frequency πu/H, πv/W, as (H, W), if cosines (almost) diagonalise it.

        For the spectral preconditioner; None, the default, if there is none.
        """
        return None

    def crop(self, rows: slice, columns: slice, shape: Sequence[int]) -> Operator | None:
        """A for these rows and columns of images of ``shape`` (C, H, W) alone; None if they cannot be cut.

        Large pictures are restored in tiles. The operator itself, the default, is right where A acts locally and in the
        same way everywhere, which is tried out before a picture is cut. One that differs from place to place, as a mask
        does, returns what it is there; it must keep the size of images.
        """
        return self

    def example_contexts(self, shape: Sequence[int], count: int) -> list[Rows]:
        """The contexts that ``blt check`` tries the operator with, for ``count`` images of ``shape`` (C, H, W).

        Only an empty one unless overridden, for operators that use nothing of it. An operator that reads the context
        returns at least one, e.g. ``[{"mask": torch.ones(count, *shape[1:])}]``.
        """
        return [{}]


class Noise(Role):
    """The noise of measurements of A x. ``level`` is its standard deviation, or None if it has none."""

    kind = "noise"
    level: float | None = None

    @abstractmethod
    def sample(self, t: Tensor, generator: torch.Generator) -> Tensor:
        """A noisy measurement of t = A x: one sample without batch dimension, in float64, on the CPU.

        t has the shape that the operator measures, (C, H, W) for most. Whatever is random comes from the generator.
        """

    def level_of(self, generator: torch.Generator) -> float | None:
        """The standard deviation of the measurement that ``sample`` draws with an equal generator.

        Where it differs from image to image; regularizers that know the level of each, and data terms, find it in the
        row ``noise`` of the context. ``level`` by default.
        """
        return self.level

    def mean(self, t: Tensor) -> Tensor | None:
        """The mean of a measurement, entry by entry; None if it is not known."""
        return None

    def variance(self, t: Tensor) -> Tensor | None:
        """The variance of a measurement, entry by entry; None if it is not known."""
        return None


class DataTerm(Parametric):
    """D_θ(t; y) = Σ_k d(t_k; y_k), t = A x: how far an image is from its measurements, entry by entry.

    ``quadratic`` means that d'' does not depend on t, ``rescales`` that D is homogeneous of degree 2, so that a
    regularizer can be used at another noise level. A term that is not convex in t declares ``convex = False``, one
    that treats places differently, e.g. by weights, ``uniform = False``: then pictures are not cut into tiles.
    """

    kind = "data_term"
    convex: ClassVar[bool] = True
    quadratic: ClassVar[bool] = False
    rescales: ClassVar[bool] = False
    uniform: bool = True

    def check_measurements(self, y: Tensor) -> str | None:
        """A sentence if the term is not defined for the measurements y, e.g. for negative counts, else None."""
        return None

    def centre(self, theta: Theta, y: Tensor) -> Tensor:
        """The t that is most likely for y, without what the measurement adds; a cold solve starts from it."""
        return y

    def select(self, theta: Theta, context: Rows) -> Theta:
        """θ for the samples at hand, e.g. the weight of the class of each; the methods below receive the result.

        ``theta`` is prepared, and the result differentiable in it.
        """
        return theta

    @abstractmethod
    def value(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        """D of each sample, shape (B,)."""

    @abstractmethod
    def gradient(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        """d'(t_k; y_k) for every entry, a new tensor; differentiable in θ, t and y."""

    @abstractmethod
    def curvature(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor | float:
        """d''(t_k; y_k) for every entry; return the number 1.0 rather than a tensor of ones."""

    def spectrum(self, theta: Theta, y: Tensor) -> tuple[Bound, Bound]:
        """Valid lower and upper bounds on d'', of any sign, for all samples or one per sample."""
        return (0.0 if self.convex else None), None

    def third(self, theta: Theta, y: Tensor) -> Bound:
        """A valid bound on |d'''|, for error bounds of hypergradients."""
        return None

    def majorant(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor | float:
        """The curvature of a parabola that touches d at t_k and lies above it everywhere."""
        raise NotImplementedError(f"{type(self).__name__} has no majorant")

    def prox(self, theta: Theta, t: Tensor, y: Tensor, step: Tensor | float) -> Tensor:
        """argmin_u ½(u − t)² + step·d(u; y), entry by entry."""
        raise NotImplementedError(f"{type(self).__name__} has no proximal map")


@dataclass(frozen=True)
class Potentials:
    """The potentials of a regularizer: curves t ↦ ψ_j(t), one row of ``values`` each, at the points ``t``."""

    #: Shape (N,), increasing.
    t: Tensor
    #: Shape (J, N), weights included.
    values: Tensor
    #: The importance of each potential, shape (J,).
    weights: Tensor


class Regularizer(Parametric):
    """R_θ(x), convex in x. ``init_params`` and ``energy`` are required; other methods make it faster or certified.

    One that is not convex in x declares ``convex = False``; its ``strong_convexity`` is then unknown unless it
    overrides it. One that is not differentiable in x declares ``smooth = False``: only primal–dual solvers can use it,
    and ``gradient`` is any subgradient. One that treats places differently, e.g. by a map of weights, declares
    ``uniform = False``: then pictures are not cut into tiles. One whose Hessian products cost less than a cosine
    transform of the image, such as finite differences, declares ``cheap = True``: then it is not preconditioned by
    default, even if it has a ``symbol``. One whose ``guide`` should see the measurements with the operator undone
    declares ``undo``, the weight λ of (AᵀA + λ∇ᵀ∇)⁻¹Aᵀy.

    One with auxiliary variables has ``extra_channels``: x then has these channels after those of the image, in every
    method. The shapes that methods receive are those of images, except for ``synthesise``.
    """

    kind = "regularizer"
    caption: str = "Filters, the most important first"
    convex: ClassVar[bool] = True
    smooth: ClassVar[bool] = True
    uniform: bool = True
    cheap: bool = False
    undo: float | None = None

    @abstractmethod
    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        """The initial parameters for images of ``shape`` (C, H, W), as float64 CPU tensors."""

    @abstractmethod
    def energy(self, theta: Theta, x: Tensor) -> Tensor:
        """R_θ of each sample, shape (B,)."""

    def guide(self, theta: Theta, start: Tensor) -> Rows:
        """What the regularizer reads off ``start``: one row per sample, e.g. weights.

        ``start`` is the start of a cold solve, or what ``undo`` makes of it.

        R may depend on the measurements through it, R_θ(x; y), but not otherwise. ``theta`` is prepared, and the result
        differentiable in it and in ``start``. Bounds must hold for every guide. Nothing, the default, is read. What the
        context of a sample has a row for under the same name is taken from there.
        """
        return {}

    def select(self, theta: Theta, guide: Rows) -> Theta:
        """θ for the samples at hand, with their rows of ``guide``; the methods that compute with x receive the result.

        They may also receive θ without a guide, which stands for a sample of which nothing was read.
        """
        return theta

    def at_noise(self, level: float) -> Regularizer:
        """R for measurements with noise of this standard deviation, if it knows what to do at each level.

        Without this method, R is carried to another level by R_s(x) = s²R(x/s).
        """
        raise NotImplementedError(f"{type(self).__name__} does not depend on the noise level")

    def density(self, theta: Theta, x: Tensor) -> Tensor:
        """R_θ place by place, (B, H', W'), with the sum ``energy``: for weights that depend on the place.

        Where there is an analysis operator, its responses t = C x have these places as their last two dimensions, and
        ψ does not mix them.
        """
        raise NotImplementedError(f"{type(self).__name__} has no energy by place")

    def extra_channels(self, channels: int) -> int:
        """The number of channels of auxiliary variables, which follow the ``channels`` of the image in x.

        They are variables of the lower level like the image, start at zero and are not constrained.
        """
        return 0

    def gradient(self, theta: Theta, x: Tensor) -> Tensor:
        """∇R_θ(x); by autograd unless overridden."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.energy(theta, x).sum(), x)[0]

    def linearize(self, theta: Theta, x: Tensor) -> Callable[[Tensor], Tensor]:
        """v ↦ ∇²R_θ(x) v, with everything that depends only on x computed once; double backward unless overridden."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            gradient = torch.autograd.grad(self.energy(theta, x).sum(), x, create_graph=True)[0]

        def hvp(v: Tensor) -> Tensor:
            if not gradient.requires_grad:
                return torch.zeros_like(v)
            return torch.autograd.grad(gradient, x, v, retain_graph=True)[0]

        return hvp

    def pairing(self, theta: Theta, x: Tensor, q: Tensor) -> Tensor:
        """⟨∇R_θ(x), q⟩ of each sample, shape (B,), differentiable in θ and linear in q.

        Its θ-derivative is the mixed derivative that a hypergradient needs.
        """
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.energy(theta, x).sum()
            gradient = torch.autograd.grad(energy, x, create_graph=True)[0]
            return (gradient * q).flatten(1).sum(1)

    def pairing_gradients(self, theta: Theta, x: Tensor, q: Tensor) -> dict[str, Tensor]:
        """∂_θ⟨∇R_θ(x), q⟩ of each sample separately: every entry has a leading sample dimension; differentiable in q.

        Only error bounds need it; one backward pass per sample unless overridden. Receives θ itself, not prepared.
        """

        def each(leaves: dict[str, Tensor]) -> Iterator[Tensor]:
            # A graph of the whole batch would be traversed once per sample.
            prepared = self.prepare(leaves)
            for i in range(len(x)):
                yield self.pairing(prepared, x[i : i + 1], q[i : i + 1])[0]

        return rows_of(each, theta)

    def lipschitz(self, theta: Theta, shape: Sequence[int]) -> Bound:
        """A valid upper bound on ‖∇²R_θ‖ over all images of ``shape`` (C, H, W), or None if none is known.

        Separate from ``strong_convexity``, since it may be costly and most solvers never need it.
        """
        return None

    def strong_convexity(self, theta: Theta, shape: Sequence[int]) -> Bound:
        """A valid lower bound on the eigenvalues of ∇²R_θ: 0 if convex, −ρ if weakly convex, None if unknown."""
        return 0.0 if self.convex else None

    def constants(self, theta: Theta, x: Tensor, radius: Tensor) -> Constants:
        """Valid constants on the ball of ``radius`` (B,) around each x, for certified error bounds of
        hypergradients."""
        raise NotImplementedError(f"{type(self).__name__} has no certified constants")

    # R(x) = Σ ψ(t) with t = C x. Majorise–minimise solvers need the majorant of ψ; primal–dual solvers a bound of ‖C‖²,
    # and of ψ its values, its conjugate and its proximal map.

    def analyse(self, theta: Theta, x: Tensor) -> Tensor:
        """t = C x (linear in x)."""
        raise NotImplementedError(f"{type(self).__name__} has no analysis operator")

    def synthesise(self, theta: Theta, t: Tensor, shape: Sequence[int]) -> Tensor:
        """Cᵀ t, an x of ``shape`` (C, H, W), auxiliary channels included."""
        raise NotImplementedError(f"{type(self).__name__} has no analysis operator")

    def majorant(self, theta: Theta, t: Tensor) -> Tensor:
        """w(t) = ψ'(t)/t, the curvature of the parabola above ψ that touches it at t; ∇R = Cᵀ(w(t)·t)."""
        raise NotImplementedError(f"{type(self).__name__} has no majorant")

    def pointwise_majorant(self, theta: Theta) -> Callable[[Tensor], Tensor] | None:
        """t ↦ w(t) where it treats each entry of t by itself and can be compiled; None where it does not."""
        return None

    def potential(self, theta: Theta, t: Tensor) -> Tensor:
        """ψ(t), entry by entry; only where ψ does not mix entries."""
        raise NotImplementedError(f"{type(self).__name__} has no potential of single entries")

    def offset(self, theta: Theta) -> Tensor | None:
        """t_0 where R = Σ ψ(Cx − t_0), in the shape of t; None, the default, for 0. ``majorant`` and ``potential``
        receive t − t_0."""
        return None

    def analysis_norm(self, theta: Theta, shape: Sequence[int]) -> Bound:
        """A valid upper bound on ‖C‖² for images of ``shape`` (C, H, W), or None if none is known."""
        return None

    def potential_sum(self, theta: Theta, t: Tensor) -> Tensor:
        """Σ ψ(t) of each sample, shape (B,), summed in float64; R(x) at t = C x."""
        raise NotImplementedError(f"{type(self).__name__} does not evaluate its potentials")

    def conjugate(self, theta: Theta, p: Tensor) -> Tensor:
        """Σ ψ*(p) of each sample, shape (B,), summed in float64; ψ*(p) = sup_t ⟨p, t⟩ − ψ(t).

        Asked only at values of ``prox_conjugate``, so it is 0 where ψ is a norm.
        """
        raise NotImplementedError(f"{type(self).__name__} has no conjugate")

    def prox_potential(self, theta: Theta, t: Tensor, step: Tensor | float) -> Tensor:
        """argmin_u ½(u − t)² + step·ψ(u), entry by entry or group by group; ``step`` broadcasts with t."""
        raise NotImplementedError(f"{type(self).__name__} has no proximal map")

    def prox_conjugate(self, theta: Theta, p: Tensor, step: Tensor | float) -> Tensor:
        """argmin_u ½(u − p)² + step·ψ*(u); by Moreau's identity unless overridden.

        Where ψ is a norm it is a projection, and more accurate if computed as such. Differentiable in θ and p.
        """
        return p - step * self.prox_potential(theta, p / step, 1 / step)

    def symbol(self, theta: Theta, curvature: Tensor, shape: Sequence[int]) -> Tensor | None:
        """∇²R by frequency πu/H, πv/W for potentials of the same curvatures at every place, as (B, C, C, H, W).

        For the spectral preconditioner; a new tensor, symmetric and positive semidefinite. ``curvature`` has a row per
        sample and the shape of t = C x without its places, the last two dimensions. Conjugate gradients can use it if
        the product of ``linearize`` has the attribute ``curvature``, ψ'' at x in the shape of t; `mm` uses the
        majorant.
        """
        return None

    def potentials(self, theta: Theta) -> Potentials | None:
        """The potentials to plot, in the order of ``pictures`` if there are any, or None."""
        return None


@dataclass(frozen=True)
class Sample:
    """Some images of a split, bound to their measurements."""

    ids: Sequence[int]
    #: What the lower level sees.
    y: Tensor
    #: The true images; None for recorded measurements without them.
    truth: Tensor | None
    #: What the loss compares with: the true images, or measurements held back.
    target: Tensor | None = None
    context: Rows = field(default_factory=dict)
    #: The values between which images lie.
    range: tuple[float, float] = (0.0, 1.0)


class Forward(Protocol):
    """A_θ of the given samples: x ↦ A_θ x, differentiable in x."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def adjoint(self, t: Tensor) -> Tensor:
        """A_θᵀ t."""
        ...

    @property
    def squared_norm(self) -> Bound:
        """A true bound of ‖A_θ‖², the same for all samples or one each; None if it is unknown."""
        ...

    def take(self, index: Tensor) -> Forward:
        """The same for some of the samples."""
        ...


class UpperLoss(Role):
    """g(x; x*, y): the loss of a reconstruction. ``needs_truth`` is False for a loss that uses only measurements.

    ``scale`` is a factor of g; accuracies of the upper level are relative to it. ``noise_gain`` is the factor by which
    ``split`` raises the noise level of what the lower level sees.
    """

    kind = "upper_loss"
    scale: float = 1.0
    noise_gain: float = 1.0
    needs_truth: ClassVar[bool] = True

    def check_noise(self, level: float | None) -> str | None:
        """A sentence if the loss cannot be used with measurements of this noise level, None if it is unknown; else
        None."""
        return None

    def split(
        self, y: Tensor, level: float | None, generator: torch.Generator
    ) -> tuple[Tensor, Tensor | None]:
        """y for the lower level, and a target made of it; one sample at a time, in training and wherever the loss
        itself is measured."""
        return y, None

    @abstractmethod
    def bind(self, sample: Sample, forward: Forward) -> Upper:
        """g for the given samples; ``forward`` is A_θ."""
