"""Transmission: the likelihood of X-ray counts behind an object.

    D(t; y) = Σ_k [e^{−κt_k} + κ t_k e^{−κy_k} − c_k]/κ²,   t ≥ 0,        D' = (e^{−κy} − e^{−κt})/κ,   D'' = e^{−κt}

y are the line integrals −log(n/I)/κ of the counts n = Poisson(I e^{−κt}), as the noise `transmission` makes them. Iκ²D
is the negative log-likelihood of the counts up to a constant; c_k = (1 + κy_k)e^{−κy_k} makes D(y; y) = 0. In this
scale D is ½Σ e^{−κy}(t − y)² near y, least squares with the weights of the counts: rays that few photons pass count
little. The number of photons is part of the weight of the regularizer, and `strong_convexity` should be small beside
e^{−κy}.

For t < 0, which has no physical meaning, e^{−κt} continues as its second-order Taylor polynomial at 0. So D is convex
and twice differentiable everywhere, 0 ≤ D'' ≤ 1 and |D'''| ≤ κ. The constant curvature 1 majorises D, so `mm` and `agd`
are correct, but slow where little is transmitted; `lbfgs` and `newton-cg` follow the curvature that there is.

When to choose it: X-ray tomography at low dose, where some rays are nearly absorbed. With many photons on all rays
`least-squares` is as good and faster.

References: Erdoğan & Fessler, *Monotonic algorithms for transmission tomography*, IEEE TMI 1999; Sauer & Bouman, *A
local update strategy for iterative reconstruction from projections*, IEEE TSP 1993.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Gt
from torch import Tensor

from bltoolbox.plugin import DataTerm, Theta


class Transmission(DataTerm):
    """Negative log-likelihood of transmitted photons.

    Args:
        attenuation: κ, by which a line integral of 1 attenuates: to e^{−κ}; that of the noise.
    """

    def __init__(self, attenuation: Annotated[float, Gt(0)] = 6.0) -> None:
        self.attenuation = attenuation

    def value(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        kappa = self.attenuation
        below, passed = t.clamp_max(0), (-kappa * y).exp()
        # e^{−κt} − e^{−κy}, without its cancellation where t and y are close; t ≥ 0 apart from `below`.
        excess = passed * (-kappa * (t - below - y)).expm1() - kappa * below + (kappa * below).square() / 2
        return ((excess + kappa * (t - y) * passed) / kappa**2).flatten(1).sum(1)

    def gradient(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        kappa = self.attenuation
        below, passed = t.clamp_max(0), (-kappa * y).exp()
        return below - passed * (-kappa * (t - below - y)).expm1() / kappa

    def curvature(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        return (-self.attenuation * t.clamp_min(0)).exp()

    def spectrum(self, theta: Theta, y: Tensor) -> tuple[float, float]:
        return 0.0, 1.0

    def third(self, theta: Theta, y: Tensor) -> float:
        return self.attenuation

    def majorant(self, theta: Theta, t: Tensor, y: Tensor) -> float:
        return 1.0
