"""Field of Experts without smoothing: learned filters under absolute values.

    R_θ(x) = e^{θ_0} Σ_j e^{θ_j} Σ_p |(c_j ⋆ x)_p|

The limit ν → 0 of `foe`, with the same kernels in the same coordinates, without log ν. R is not differentiable where a
filter response is zero, as most of them are in restored images: responses are sparse. Only `pdhg` can
minimise it, with hypergradient `piggyback`. The weights belong to the filters, C_j = e^{θ_0+θ_j} c_j, and dual
variables lie in [−1, 1], whatever θ is. With finite differences as initial kernels, responses across a mirrored
border are zero for every image, so that f has a kink at the initial θ; after one step it has none.

When to choose it: for the analysis-sparsity models of the literature. `foe` learns faster: its smoothing is a
parameter, and its solvers need fewer iterations.

References: Roth & Black, *Fields of Experts*, IJCV 2009; Bogensperger, Chambolle & Pock, *Convergence of a
piggyback-style method for the differentiation of solutions of standard saddle-point problems*, SIMODS 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from blt_builtins.regularizers.filters import Boundary, FilterBank, norm_bound
from blt_builtins.regularizers.foe import FieldOfExperts, amplitudes
from bltoolbox.plugin import Potentials, Regularizer, Theta


class NonsmoothFieldOfExperts(Regularizer):
    """Learned filters under absolute values.

    Args:
        filters: number J of filters.
        kernel_size: side K of the square kernels.
        boundary: what the filters see beyond the border: nothing, since they are applied only where they fit
            (`valid`), zeros, the opposite border, or the mirrored image (`symmetric`).
        weight: initial weight e^{θ_0 + θ_j} of a filter of unit norm.
        start: initial kernels: finite differences in the colour axes, the smoothest cosines, or Gaussian noise.
        basis: coordinates of the kernels, scaled cosines or pixels.
    """

    smooth: ClassVar[bool] = False

    def __init__(
        self,
        filters: Annotated[int, Gt(0), Le(4096)] = 10,
        kernel_size: Annotated[int, Ge(2), Le(63)] = 7,
        boundary: Boundary = "symmetric",
        weight: Annotated[float, Gt(0)] = 0.04,
        start: Literal["differences", "dct", "random"] = "differences",
        basis: Literal["dct", "pixel"] = "dct",
    ) -> None:
        self.boundary: Boundary = boundary
        #: The smooth regularizer with the same kernels.
        self.like = FieldOfExperts(filters, kernel_size, boundary, weight=weight, start=start, basis=basis)

    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        theta = self.like.init_params(shape, generator)
        del theta["log_smoothing"]
        return theta

    def prepare(self, theta: Theta) -> Theta:
        return _Prepared(theta, self._new_bank(theta))

    def check(self, shape: Sequence[int]) -> str | None:
        return self.like.check(shape)

    def project(self, theta: Theta) -> dict[str, Tensor]:
        return self.like.project(theta)

    def project_gradient(self, gradient: Theta) -> dict[str, Tensor]:
        return self.like.project_gradient(gradient)

    def energy(self, theta: Theta, x: Tensor) -> Tensor:
        return self.analyse(theta, x).abs().flatten(1).sum(1)

    def analyse(self, theta: Theta, x: Tensor) -> Tensor:
        return self._bank(theta).correlate(x)

    def synthesise(self, theta: Theta, t: Tensor, shape: Sequence[int]) -> Tensor:
        return self._bank(theta).adjoint(t, shape)

    def analysis_norm(self, theta: Theta, shape: Sequence[int]) -> Tensor:
        return norm_bound(self.like.kernels(theta), amplitudes(theta).square(), self.boundary)

    def potential_sum(self, theta: Theta, t: Tensor) -> Tensor:
        return t.abs().flatten(1).sum(1, dtype=torch.float64)

    def conjugate(self, theta: Theta, p: Tensor) -> Tensor:
        return p.new_zeros(len(p), dtype=torch.float64)

    def prox_potential(self, theta: Theta, t: Tensor, step: Tensor | float) -> Tensor:
        return t.sign() * (t.abs() - step).clamp_min(0)

    def prox_conjugate(self, theta: Theta, p: Tensor, step: Tensor | float) -> Tensor:
        return p.clamp(-1, 1)

    def pictures(self, theta: Theta) -> Tensor:
        return self.like.kernels(theta)[self._importance(theta).argsort(descending=True)]

    def potentials(self, theta: Theta) -> Potentials:
        importance, order = self._importance(theta).sort(descending=True)
        t = torch.linspace(-1, 1, 201, dtype=importance.dtype, device=importance.device)
        return Potentials(t, amplitudes(theta)[order].unsqueeze(1) * t.abs(), importance)

    def _importance(self, theta: Theta) -> Tensor:
        """The weight of each filter if its kernel had unit norm."""
        return amplitudes(theta) * self.like.kernels(theta).flatten(1).norm(dim=1)

    def _bank(self, theta: Theta) -> FilterBank:
        return theta.bank if isinstance(theta, _Prepared) else self._new_bank(theta)

    def _new_bank(self, theta: Theta) -> FilterBank:
        return FilterBank(self.like.kernels(theta) * amplitudes(theta).view(-1, 1, 1, 1), self.boundary)


class _Prepared(dict[str, Tensor]):
    """θ with its filter bank, which an iteration needs twice."""

    def __init__(self, theta: Theta, bank: FilterBank) -> None:
        super().__init__(theta)
        self.bank = bank
