"""Regularizers R_θ(x): what is expected of an image before it is measured."""

from __future__ import annotations

from bltoolbox.plugin import Component, hookimpl

BLT_API = 2


@hookimpl
def blt_components() -> list[Component]:
    """The components of this folder; their modules are imported only when they are used."""
    return [
        Component(
            "regularizer",
            "foe",
            "blt_builtins.regularizers.foe:FieldOfExperts",
            "Field of Experts: learned filters and weights, smoothed absolute values. Expressive, yet convex.",
        ),
        Component(
            "regularizer",
            "general",
            "blt_builtins.regularizers.general:GeneralExperts",
            "Field of Experts with stacks of small convolutions and learned potentials. Convex.",
        ),
        Component(
            "regularizer",
            "wcfoe",
            "blt_builtins.regularizers.weakly_convex:WeaklyConvexExperts",
            "Field of Experts with flattening potentials: weakly convex. The most accurate for denoising.",
        ),
        Component(
            "regularizer",
            "pooled-foe",
            "blt_builtins.regularizers.pooled:PooledExperts",
            "Field of Experts whose potentials see the neighbourhood of a response. Convex.",
        ),
        Component(
            "regularizer",
            "pooled-wcfoe",
            "blt_builtins.regularizers.pooled:WeaklyConvexPooledExperts",
            "Weakly convex Field of Experts whose potentials see the neighbourhood of a response. Certified.",
        ),
        Component(
            "regularizer",
            "tv",
            "blt_builtins.regularizers.tv:TotalVariation",
            "Smoothed total variation with a learned weight; the baseline to beat.",
        ),
        Component(
            "regularizer",
            "tv-nonsmooth",
            "blt_builtins.regularizers.tv_nonsmooth:NonsmoothTotalVariation",
            "Total variation without smoothing, with a learned weight; for pdhg and piggyback.",
        ),
        Component(
            "regularizer",
            "foe-nonsmooth",
            "blt_builtins.regularizers.foe_nonsmooth:NonsmoothFieldOfExperts",
            "Field of Experts without smoothing: learned filters, absolute values; for pdhg and piggyback.",
        ),
        Component(
            "regularizer",
            "tgv",
            "blt_builtins.regularizers.tgv:TotalGeneralizedVariation",
            "Smoothed total generalized variation: like tv, but without steps in smooth shading.",
        ),
        Component(
            "regularizer",
            "tikhonov",
            "blt_builtins.regularizers.tikhonov:Tikhonov",
            "Squared gradient (or image) with a learned weight; quadratic, one parameter, exact constants.",
        ),
        Component(
            "regularizer",
            "weighted",
            "blt_builtins.regularizers.weighted:Weighted",
            "Another regularizer with a learned weight at every pixel of the image.",
        ),
        Component(
            "regularizer",
            "adaptive",
            "blt_builtins.regularizers.adaptive:Adaptive",
            "Another regularizer that adapts to each image: a small network reads weights and a guess off it.",
        ),
        Component(
            "regularizer",
            "noise-aware",
            "blt_builtins.regularizers.noise_aware:NoiseAware",
            "Another regularizer whose potentials are learned functions of the noise level.",
        ),
        Component(
            "regularizer",
            "crr",
            "blt_builtins.regularizers.crr:ConvexRidge",
            "Convex ridge regularizer: learned filters and learned potentials, as splines.",
        ),
        Component(
            "regularizer",
            "spline-ridge",
            "blt_builtins.regularizers.spline_ridge:SplineRidge",
            "Learned filters and splines of any slope: the form of imported CRR and WCRR models.",
        ),
        Component(
            "regularizer",
            "icnn",
            "blt_builtins.regularizers.icnn:InputConvexNetwork",
            "Input-convex network: the most general and the most expensive.",
        ),
    ]
