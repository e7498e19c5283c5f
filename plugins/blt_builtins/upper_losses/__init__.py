"""Upper losses: the quality of a reconstruction."""

from __future__ import annotations

from bltoolbox.plugin import Component, hookimpl

BLT_API = 2


@hookimpl
def blt_components() -> list[Component]:
    """The components of this folder; their modules are imported only when they are used."""
    return [
        Component(
            "upper_loss",
            "squared-error",
            "blt_builtins.upper_losses.squared_error:SquaredError",
            "The squared distance to the true image; what PSNR measures. The default.",
        ),
        Component(
            "upper_loss",
            "huber",
            "blt_builtins.upper_losses.huber:HuberLoss",
            "Smoothed absolute error; a few bad pixels do not dominate.",
        ),
        Component(
            "upper_loss",
            "ssim",
            "blt_builtins.upper_losses.ssim:SSIMLoss",
            "One minus the structural similarity; rewards texture and contrast. Not convex.",
        ),
        Component(
            "upper_loss",
            "recorrupted",
            "blt_builtins.upper_losses.recorrupted:Recorrupted",
            "Noisy measurements instead of true images: y is made noisier in two independent ways.",
        ),
        Component(
            "upper_loss",
            "whiteness",
            "blt_builtins.upper_losses.whiteness:Whiteness",
            "The correlations in the residual A x − y; needs neither true images nor a noise level. Not convex.",
        ),
    ]
