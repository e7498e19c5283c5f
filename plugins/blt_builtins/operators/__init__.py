"""Forward operators A_θ, which turn an image into its measurements."""

from __future__ import annotations

from bltoolbox.plugin import Component, hookimpl

BLT_API = 2


@hookimpl
def blt_components() -> list[Component]:
    """The components of this folder; their modules are imported only when they are used."""
    return [
        Component(
            "operator",
            "identity",
            "blt_builtins.operators.identity:Identity",
            "A = I: denoising.",
        ),
        Component(
            "operator",
            "blur",
            "blt_builtins.operators.blur:Blur",
            "Convolution with a Gaussian or any kernel, which may be learned: deblurring.",
        ),
        Component(
            "operator",
            "inpainting",
            "blt_builtins.operators.inpainting:Inpainting",
            "Some pixels are missing, at random or by a mask: inpainting.",
        ),
        Component(
            "operator",
            "downsampling",
            "blt_builtins.operators.downsampling:Downsampling",
            "The mean of each block of pixels: super-resolution.",
        ),
        Component(
            "operator",
            "mri",
            "blt_builtins.operators.mri:MRI",
            "Some lines of the Fourier transform, seen by one coil or several: accelerated MRI.",
        ),
        Component(
            "operator",
            "composed",
            "blt_builtins.operators.composed:Composed",
            "Operators one after the other, e.g. a blur, then downsampling.",
        ),
        Component(
            "operator",
            "ct",
            "blt_builtins.operators.ct:CT",
            "Computed tomography, parallel or fan beam; sparse views and limited angles.",
        ),
        Component(
            "operator",
            "deepinv",
            "blt_builtins.operators.deepinv_physics:DeepInv",
            "A linear physics of the package deepinv, by name.",
        ),
    ]
