"""Noise: what happens to A x when it is measured."""

from __future__ import annotations

from bltoolbox.plugin import Component, hookimpl

BLT_API = 2


@hookimpl
def blt_components() -> list[Component]:
    """The components of this folder; their modules are imported only when they are used."""
    return [
        Component(
            "noise",
            "gaussian",
            "blt_builtins.noises.gaussian:Gaussian",
            "The same standard deviation everywhere; a number in a recipe means this. The default.",
        ),
        Component(
            "noise",
            "gaussian-range",
            "blt_builtins.noises.gaussian_range:GaussianRange",
            "Gaussian noise of another level in every image: for models of a range of levels.",
        ),
        Component(
            "noise",
            "poisson",
            "blt_builtins.noises.poisson:PoissonNoise",
            "Photon counts: bright places are noisier.",
        ),
        Component(
            "noise",
            "poisson-gaussian",
            "blt_builtins.noises.poisson_gaussian:PoissonGaussian",
            "Photon counts read out with Gaussian noise, as cameras do.",
        ),
        Component(
            "noise",
            "transmission",
            "blt_builtins.noises.transmission:TransmissionNoise",
            "X-ray counts behind an object, as line integrals: dense places are noisier.",
        ),
        Component(
            "noise",
            "salt-and-pepper",
            "blt_builtins.noises.salt_and_pepper:SaltAndPepper",
            "Some values are lost and read as the darkest or the brightest one.",
        ),
        Component(
            "noise",
            "uniform",
            "blt_builtins.noises.uniform:Uniform",
            "An error of rounding, equally likely within an interval.",
        ),
        Component(
            "noise",
            "speckle",
            "blt_builtins.noises.speckle:Speckle",
            "A random factor for every value, as in radar and ultrasound images.",
        ),
        Component(
            "noise",
            "none",
            "blt_builtins.noises.none:NoNoise",
            "Exact measurements.",
        ),
        Component(
            "noise",
            "deepinv",
            "blt_builtins.noises.deepinv_noise:DeepInvNoise",
            "A noise model of the package deepinv, by name.",
        ),
    ]
