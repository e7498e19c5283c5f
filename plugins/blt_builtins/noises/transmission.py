"""X-ray counts behind an object, as line integrals.

    n = Poisson(I e^{−κt}),        y = −log(max(n, ½)/I)/κ        mean about t, variance about e^{κt}/(Iκ²)

I photons enter along each ray, and a line integral t = 1 lets e^{−κ} of them pass. Scanners turn the counts n into
line integrals by the logarithm, and y is the result: t with noise that grows with t. A ray without a count
is given half a count, since its logarithm would be infinite. Mean and variance hold for many counts, so that
neither is claimed.

When to choose it: X-ray tomography at low dose, with operator `ct` and the data term `transmission` of the same
attenuation. Operator `ct` measures lengths in units of the side of the image: κ is what an image of ones attenuates
along one side.

Reference: Thibault, Bouman, Sauer & Hsieh, *A recursive filter for noise reduction in statistical iterative tomographic
imaging*, SPIE 6065, 2006.
"""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Gt
from torch import Tensor

from bltoolbox.plugin import Noise


class TransmissionNoise(Noise):
    """The logarithm of photon counts.

    Args:
        photons: I, the mean count of a ray that nothing attenuates.
        attenuation: κ, by which a line integral of 1 attenuates: to e^{−κ}.
    """

    def __init__(
        self, photons: Annotated[float, Gt(0)] = 1e4, attenuation: Annotated[float, Gt(0)] = 6.0
    ) -> None:
        self.photons = photons
        self.attenuation = attenuation

    def sample(self, t: Tensor, generator: torch.Generator) -> Tensor:
        counts = torch.poisson(self.photons * (-self.attenuation * t).exp(), generator=generator)
        return -(counts.clamp_min(0.5) / self.photons).log() / self.attenuation
