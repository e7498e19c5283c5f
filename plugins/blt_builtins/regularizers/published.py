"""Published ridge regularizers as `spline-ridge`: what their checkpoints contain, and what it means.

CRR (Goujon et al. 2023), with W a stack of convolutions with zero-mean kernels:

    ∇R(x) = λ Wᵀ a(μ W x),        a_j a linear spline, slopes clipped to be at least 0 and 0 in the two outer intervals

    state_dict: lmbd, mu, conv_layer.conv_layers.i.parametrizations.weight.original, activation.coefficients_vect
    config:     activation_params.knots_range, sigma

WCRR (Goujon et al. 2024), with one spline pair for all filters, a scaling σ_j(s) = e^{γ_j(s)}/(s + 10⁻⁵) for each
filter and noise level s (of 255), and W divided by its norm:

    ∇R(x) = Wᵀ [ (e^m a₊ − ρ a₋)(σ_j W x)/σ_j ],        slopes of a₊ and a₋ clipped to [0, 1], both odd

    state_dict: mu_, conv_layer.conv_layers.i.…, activation_cvx.coefficients, activation_ccv.coefficients,
                spline_scaling.coefficients
    config:     spline_activation.x_max, noise_range, noise_val, rho_wcvx

Both are Σ_j ψ_j(c_j ⋆ x) with a linear spline ψ_j': the stack is composed to one kernel for each filter, and factors of
responses go to kernels and slopes. The authors pad every layer of the stack with zeros; with one kernel and another
border, the regularizer is the same except near the border.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

#: Sides, filters and knots beyond which a file is not one of these models.
_LARGEST, _FILTERS, _KNOTS, _LAYERS = 63, 4096, 4096, 16
_LAYER = re.compile(r"conv_layer\.conv_layers\.(\d{1,2})\.(parametrizations\.weight\.original|weight)")
#: Sides of the grid of frequencies on which the authors compute the norm of W, for a margin of 0.
_GRID = 255


@dataclass(frozen=True)
class Published:
    """Options of `spline-ridge`, its θ, and the noise level that it is for."""

    options: dict[str, Any]
    theta: dict[str, Tensor]
    noise: float


def read_crr(tensors: Mapping[str, Tensor], config: Mapping[str, Any], noise: float | None) -> Published:
    """A convex ridge regularizer; a ValueError says what the file lacks."""
    kernels = _kernels(tensors)
    weight = float(_entry(tensors, "lmbd", 1).clamp_min(1e-4))
    scale = float(_entry(tensors, "mu", 1).clamp_min(0.01))
    values = _splines(_entry(tensors, "activation.coefficients_vect"), len(kernels))
    reach = _number(config, "activation_params", "knots_range")
    slopes = values.diff(dim=1).clamp_min(0) * ((values.shape[1] - 1) / (2 * reach))
    slopes[:, 0] = slopes[:, -1] = 0
    theta = {"kernels": scale * kernels, "slopes": weight / scale * slopes}
    return Published(_options(kernels, values, reach, "free"), theta, _level(config, "sigma", noise))


def read_wcrr(tensors: Mapping[str, Tensor], config: Mapping[str, Any], noise: float | None) -> Published:
    """A weakly convex ridge regularizer at one noise level."""
    kernels = _kernels(tensors)
    kernels = kernels / _norm(kernels)
    convex, concave = (
        _splines(_entry(tensors, f"activation_{name}.coefficients"), 1) for name in ("cvx", "ccv")
    )
    if convex.shape != concave.shape:
        raise ValueError("the two splines of its activation have different numbers of knots")
    level = _level(config, "noise_val", noise)
    reach = _number(config, "spline_activation", "x_max")
    rho = _number(config, "rho_wcvx", least=0.0)
    common = _entry(tensors, "mu_", 1).exp() * _odd_slopes(convex, reach) - rho * _odd_slopes(concave, reach)
    scaling = _scaling(tensors, config, len(kernels), 255 * level)
    theta = {
        "kernels": scaling.view(-1, 1, 1, 1) * kernels,
        "slopes": common / scaling.square().unsqueeze(1),
    }
    return Published(_options(kernels, convex, reach, "odd"), theta, level)


FORMATS = {"crr": read_crr, "wcrr": read_wcrr}


def _options(kernels: Tensor, values: Tensor, reach: float, symmetry: str) -> dict[str, Any]:
    return {
        "filters": len(kernels),
        "kernel_size": kernels.shape[-1],
        "knots": values.shape[1],
        "range": reach,
        "symmetry": symmetry,
    }


def _kernels(tensors: Mapping[str, Tensor]) -> Tensor:
    """The stack of convolutions as one kernel for each filter, (J, 1, K, K)."""
    layers: dict[int, Tensor] = {}
    for name, value in tensors.items():
        if match := _LAYER.fullmatch(name):
            weight = _entry(tensors, name)
            if weight.ndim != 4 or weight.shape[2] != weight.shape[3] or weight.shape[2] % 2 == 0:
                raise ValueError(
                    f"{name} has the shape {tuple(value.shape)}, but must be (out, in, K, K) with odd K"
                )
            free = match[2] != "weight"
            layers[int(match[1])] = weight - weight.mean((1, 2, 3), keepdim=True) if free else weight
    if not layers or sorted(layers) != list(range(len(layers))) or len(layers) > _LAYERS:
        raise ValueError("it has no complete stack of kernels conv_layer.conv_layers.0.…")
    kernels = layers[0]
    if kernels.shape[1] != 1:
        raise ValueError(f"its first kernels see {kernels.shape[1]} channels; only gray models are imported")
    for number in range(1, len(layers)):
        following = layers[number]
        if following.shape[1] != len(kernels):
            raise ValueError(
                f"layer {number} of its stack has {following.shape[1]} inputs for {len(kernels)} outputs"
            )
        side = kernels.shape[-1] + following.shape[-1] - 1
        if side > _LARGEST:
            raise ValueError(f"its stack has kernels of {side} pixels, more than {_LARGEST}")
        flipped, margin = following.flip(2, 3), following.shape[-1] - 1
        kernels = F.conv2d(kernels.transpose(0, 1), flipped, padding=margin).transpose(0, 1)
    if len(kernels) > _FILTERS or kernels.shape[-1] > _LARGEST:
        raise ValueError(f"it has {len(kernels)} filters of {kernels.shape[-1]} pixels, which is too large")
    return kernels


def _norm(kernels: Tensor) -> Tensor:
    """√‖WᵀW‖ of W on ℤ², on the grid of frequencies of the authors."""
    grid = _GRID + kernels.shape[-1] - 1
    power = torch.fft.rfft2(kernels[:, 0], s=(grid, grid)).abs().square().sum(0).max()
    if not float(power) > 0:
        raise ValueError("all of its kernels are zero")
    return power.sqrt()


def _scaling(tensors: Mapping[str, Tensor], config: Mapping[str, Any], filters: int, level: float) -> Tensor:
    """σ_j at a noise level of 255, by linear interpolation between the knots and extrapolation beyond."""
    values = _splines(_entry(tensors, "spline_scaling.coefficients"), filters, least=2)
    span = config.get("noise_range")
    if not (isinstance(span, list) and len(span) == 2 and all(isinstance(end, int | float) for end in span)):
        raise ValueError("noise_range in its config is not a pair of numbers")
    low, high = map(float, span)
    if not -math.inf < low < high < math.inf:
        raise ValueError("noise_range in its config is not an interval")
    place = (level - low) / (high - low) * (values.shape[1] - 1)
    left = min(max(math.floor(place), 0), values.shape[1] - 2)
    between = values[:, left] + (place - left) * (values[:, left + 1] - values[:, left])
    return between.exp() / (level + 1e-5)


def _odd_slopes(values: Tensor, reach: float) -> Tensor:
    """Of an increasing and non-expansive odd spline, on the intervals of positive responses."""
    slopes = (values.diff(dim=1) * ((values.shape[1] - 1) / (2 * reach))).clamp(0, 1)
    slopes[:, 0] = slopes[:, -1] = 0
    return (slopes + slopes.flip(1))[:, slopes.shape[1] // 2 :] / 2


def _splines(values: Tensor, count: int, least: int = 3) -> Tensor:
    """The values of ``count`` splines at their knots, (count, knots)."""
    knots = values.numel() // count
    if values.numel() != count * knots or not least <= knots <= _KNOTS:
        raise ValueError(f"it has {values.numel()} spline coefficients for {count} splines")
    if least > 2 and knots % 2 == 0:
        raise ValueError(f"its splines have {knots} knots; only odd numbers are supported, with a knot at 0")
    return values.reshape(count, knots)


def _entry(tensors: Mapping[str, Tensor], name: str, size: int | None = None) -> Tensor:
    """A tensor of the file in float64."""
    value = tensors.get(name)
    if value is None:
        raise ValueError(f"it has no {name}; is this the format that was named?")
    value = value.detach().double()
    if not bool(torch.isfinite(value).all()):
        raise ValueError(f"{name} contains NaN or Inf")
    if size is not None and value.numel() != size:
        raise ValueError(f"{name} has {value.numel()} entries instead of {size}")
    return value.reshape(()) if size == 1 else value


def _level(config: Mapping[str, Any], key: str, given: float | None) -> float:
    """The noise level that is given, else that of the config."""
    if given is None and config.get(key) is None:
        raise ValueError("it does not say for which noise level it is; give it with --noise, e.g. 25/255")
    return _number(config, key) / 255 if given is None else given


def _number(config: Mapping[str, Any], *keys: str, least: float = math.ulp(0.0)) -> float:
    """A number of the config."""
    value: Any = config
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    if value is None:
        raise ValueError(f"it has no {'.'.join(keys)}; give the config.json of its authors with --config")
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        raise ValueError(f"{'.'.join(keys)} in its config is {value!r}, which is not a valid number")
    return float(value)
