"""Whiteness of the residual: a loss without true images.

    g(x) = mean over channels of Σ_{l≠0} a_l²/a_0²,        a = r ⋆ r,   r = A x − y

the autocorrelation a of each channel taken periodically, by FFT. In terms of the power spectrum P = |r̂|² at N
frequencies

    g = N ΣP²/(ΣP)² − 1,        ∇_r g = 4N² [F⁻¹(P r̂)/(ΣP)² − ΣP² r/(ΣP)³],   ∇g = Aᵀ∇_r g

lies between 0, where the spectrum is flat, and N − 1. White noise gives about 1: it takes the average of many residuals
to be flat. Not convex, and no Lipschitz constant of its gradient is known. Scaling r changes nothing, so that the
noise level is neither needed nor found. A residual of exactly zero has no spectrum; it counts as the worst one, N − 1,
with zero gradient, so that a reconstruction which copies its measurements is never chosen.

When to choose it: white noise of an unknown level, and few parameters to learn, such as the weights of `tv`. What
remains of the image in the residual is correlated, and is what this loss sees.

Reference: Lanza, Pragliola & Sgallari, *Residual whiteness principle for parameter-free image restoration*, ETNA 2020.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bltoolbox.plugin import Forward, Sample, Upper, UpperLoss


class Whiteness(UpperLoss):
    """How far the residual is from white noise."""

    needs_truth = False

    def check_noise(self, level: float | None) -> str | None:
        return "the measurements have no noise that could be white; use another loss" if level == 0 else None

    def bind(self, sample: Sample, forward: Forward) -> Upper:
        return _Correlation(forward, sample.y)


@dataclass(frozen=True)
class _Correlation(Upper):
    forward: Forward
    y: Tensor

    convex = False
    lipschitz = None
    infimum = 0.0

    def value(self, x: Tensor) -> Tensor:
        power = _power(_spectrum(self._residual(x))).flatten(2)
        count, total = power.shape[2], power.sum(2)
        ratio = count * power.square().sum(2) / torch.where(total > 0, total, 1.0).square()
        return torch.where(total > 0, ratio, float(count)).mean(1) - 1

    def gradient(self, x: Tensor) -> Tensor:
        residual = self._residual(x)
        spectrum = _spectrum(residual)
        power, lags = _power(spectrum), _lags(residual)
        total, squares = (powers.sum(lags, keepdim=True) for powers in (power, power.square()))
        total = torch.where(total > 0, total, 1.0)
        filtered = torch.fft.ifftn(power * spectrum, dim=lags).real
        slope = filtered / total.square() - squares * residual / total.pow(3)
        count, channels = residual[0, 0].numel(), residual.shape[1]
        return self.forward.adjoint((4 * count**2 / channels * slope).view_as(self.y).to(x))

    def take(self, index: Tensor) -> Upper:
        return _Correlation(self.forward.take(index), self.y[index])

    def _residual(self, x: Tensor) -> Tensor:
        """r in float64, samples and channels first."""
        residual = (self.forward(x) - self.y).double()
        return residual if residual.ndim > 2 else residual.unsqueeze(1)


def _lags(residual: Tensor) -> tuple[int, ...]:
    """The dimensions of a channel."""
    return tuple(range(2, residual.ndim))


def _spectrum(residual: Tensor) -> Tensor:
    return torch.fft.fftn(residual, dim=_lags(residual))


def _power(spectrum: Tensor) -> Tensor:
    return spectrum.real.square() + spectrum.imag.square()
