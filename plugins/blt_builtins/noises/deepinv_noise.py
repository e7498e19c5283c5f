"""Noise models of deepinv, by name.

    y = model(t)

The names are those of deepinv, as far as they draw from a generator that is given to them: a sample then has the same
noise in every epoch, order and process. Each has some of the options.

    GaussianNoise         sigma                  t + σn
    UniformNoise          a                      t + u, u in [−a, a]
    UniformGaussianNoise  sigma_min, sigma_max   t + σn, σ drawn for each sample
    PoissonNoise          gain, normalize        γ·Poisson(t/γ), or the count itself
    PoissonGaussianNoise  gain, sigma            γ·Poisson(t/γ) + σn
    LogPoissonNoise       N0, mu                 −log(Poisson(N₀e^{−μt})/N₀)/μ, transmission tomography
    SaltPepperNoise       p, s                   0 with probability p, 1 with probability s
    LaplaceNoise          b                      t + b·Laplace
    RicianNoise           sigma                  |t + σn₁ + iσn₂|, magnitude images of MRI

When to choose it: for noise that this toolbox does not have, e.g. Rician or of a random level, or to compare with
deepinv. It needs the package deepinv, which `pip install 'bltoolbox[deepinv]'` brings.

Reference: Tachella et al., *DeepInverse: a Python package for solving imaging inverse problems with deep learning*,
2025.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from bltoolbox.plugin import MissingError, Noise

Name = Literal[
    "GaussianNoise",
    "UniformNoise",
    "UniformGaussianNoise",
    "PoissonNoise",
    "PoissonGaussianNoise",
    "LogPoissonNoise",
    "SaltPepperNoise",
    "LaplaceNoise",
    "RicianNoise",
]

#: The options of each model, with the defaults of deepinv.
_OPTIONS: dict[Name, dict[str, float | bool]] = {
    "GaussianNoise": {"sigma": 0.1},
    "UniformNoise": {"a": 0.1},
    "UniformGaussianNoise": {"sigma_min": 0.0, "sigma_max": 0.5},
    "PoissonNoise": {"gain": 1.0, "normalize": True},
    "PoissonGaussianNoise": {"gain": 1.0, "sigma": 0.1},
    "LogPoissonNoise": {"N0": 1024.0, "mu": 0.02},
    "SaltPepperNoise": {"p": 0.025, "s": 0.025},
    "LaplaceNoise": {"b": 0.1},
    "RicianNoise": {"sigma": 0.1},
}
#: The standard deviation of additive noise, from its options.
_LEVELS: dict[Name, Callable[[dict[str, Any]], float]] = {
    "GaussianNoise": lambda given: given["sigma"],
    "UniformNoise": lambda given: given["a"] / math.sqrt(3),
    "LaplaceNoise": lambda given: given["b"] * math.sqrt(2),
}
#: Models that count, for which t must not be negative.
_COUNTS = ("PoissonNoise", "PoissonGaussianNoise")


@dataclass(frozen=True)
class Options:
    """Options of the models; each has some of them, and those left out have the defaults of deepinv.

    Args:
        sigma: standard deviation; 0.1.
        a: half the width of the interval; 0.1.
        sigma_min: smallest standard deviation; 0.
        sigma_max: largest standard deviation; 0.5.
        gain: value of one photon; 1.
        normalize: whether counts are multiplied by the gain; true.
        N0: photons per detector without an object; 1024.
        mu: attenuation for t = 1; 0.02.
        p: probability of a black value; 0.025.
        s: probability of a white value; 0.025.
        b: scale of the Laplace distribution; 0.1.
    """

    sigma: Annotated[float, Ge(0)] | None = None
    a: Annotated[float, Ge(0)] | None = None
    sigma_min: Annotated[float, Ge(0)] | None = None
    sigma_max: Annotated[float, Ge(0)] | None = None
    gain: Annotated[float, Gt(0)] | None = None
    normalize: bool | None = None
    N0: Annotated[float, Gt(0)] | None = None
    mu: Annotated[float, Gt(0)] | None = None
    p: Annotated[float, Ge(0), Le(1)] | None = None
    s: Annotated[float, Ge(0), Le(1)] | None = None
    b: Annotated[float, Gt(0)] | None = None


class DeepInvNoise(Noise):
    """A noise model of deepinv.

    Args:
        model: its name.
        options: of the model; which ones it has is listed above.
    """

    def __init__(self, model: Name = "GaussianNoise", options: Options | None = None) -> None:
        try:
            from deepinv import physics
        except ImportError as error:
            raise MissingError(
                "noise 'deepinv' needs the package deepinv, which is not installed or cannot be imported;"
                " pip install 'bltoolbox[deepinv]', or use another noise"
            ) from error
        self.model = model
        self.options = _given(model, options or Options())
        self._make: Any = getattr(physics, model)
        self.level = _LEVELS[model](self.options) if model in _LEVELS else None

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        return {"model": "LaplaceNoise"}

    def sample(self, t: Tensor, generator: torch.Generator) -> Tensor:
        if self.model in _COUNTS and float(t.min()) < 0:
            raise ValueError(
                f"a mean count cannot be negative, and A x falls to {float(t.min()):.3g}; use GaussianNoise"
            )
        # Tensors, since deepinv keeps plain numbers in float32.
        given = {
            name: value if isinstance(value, bool) else torch.tensor(value, dtype=t.dtype)
            for name, value in self.options.items()
        }
        return self._make(**given, rng=generator)(t.unsqueeze(0))[0]


def _given(model: Name, options: Options) -> dict[str, Any]:
    """The options of the model; a ValueError if one was set that it does not have."""
    allowed = _OPTIONS[model]
    given = {field.name: getattr(options, field.name) for field in fields(options)}
    given = {name: value for name, value in given.items() if value is not None}
    if foreign := sorted(set(given) - set(allowed)):
        raise ValueError(f"{model} has no option {foreign[0]!r}; it has {', '.join(allowed)}")
    arguments = allowed | given
    if model == "SaltPepperNoise" and arguments["p"] + arguments["s"] > 1:
        raise ValueError(
            f"p and s are probabilities of different values, and {arguments['p']} + {arguments['s']} > 1"
        )
    if model == "UniformGaussianNoise" and arguments["sigma_min"] > arguments["sigma_max"]:
        raise ValueError("sigma_min is larger than sigma_max; exchange them")
    return arguments
