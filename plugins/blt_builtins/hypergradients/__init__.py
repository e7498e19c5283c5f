"""Hypergradient estimators: z ≈ ∇f from an approximate lower-level solution."""

from __future__ import annotations

from bltoolbox.plugin import Component, hookimpl

BLT_API = 2


@hookimpl
def blt_components() -> list[Component]:
    """The components of this folder; their modules are imported only when they are used."""
    return [
        Component(
            "hypergradient",
            "cg-ift",
            "blt_builtins.hypergradients.cg_ift:CGIFT",
            "Implicit differentiation; the Hessian system is solved by conjugate gradients to a tolerance.",
        ),
        Component(
            "hypergradient",
            "minres",
            "blt_builtins.hypergradients.minres:MINRES",
            "Implicit differentiation by MINRES; also for Hessians that are not definite.",
        ),
        Component(
            "hypergradient",
            "neumann",
            "blt_builtins.hypergradients.neumann:Neumann",
            "Implicit differentiation by a truncated Neumann series; needs more terms than cg-ift.",
        ),
        Component(
            "hypergradient",
            "unrolled",
            "blt_builtins.hypergradients.unrolled:Unrolled",
            "Reverse mode through K gradient steps; differentiates the algorithm, stores K images.",
        ),
        Component(
            "hypergradient",
            "one-step",
            "blt_builtins.hypergradients.one_step:OneStep",
            "The derivative of one gradient step; the cheapest, biased by about 1 − μ/L.",
        ),
        Component(
            "hypergradient",
            "piggyback",
            "blt_builtins.hypergradients.piggyback:Piggyback",
            "The derivative of the primal-dual iteration; for nonsmooth regularizers, with pdhg.",
        ),
        Component(
            "hypergradient",
            "stocbio",
            "blt_builtins.hypergradients.stocbio:StocBiO",
            "Stochastic steps and Neumann series on blocks of a finite sum (stocBiO, BSA).",
        ),
        Component(
            "hypergradient",
            "amigo",
            "blt_builtins.hypergradients.amigo:AmIGO",
            "Warm-started stochastic steps on x and the adjoint, in turn, for finite sums.",
        ),
        Component(
            "hypergradient",
            "soba",
            "blt_builtins.hypergradients.soba:SOBA",
            "One stochastic step on x, adjoint and θ at once; the cheapest for finite sums.",
        ),
        Component(
            "hypergradient",
            "saba",
            "blt_builtins.hypergradients.saba:SABA",
            "SOBA with variance reduction; accurate on finite sums that fit in memory.",
        ),
        Component(
            "hypergradient",
            "shine",
            "blt_builtins.hypergradients.shine:SHINE",
            "The inverse Hessian that lbfgs has built, as it is or refined by a few CG iterations.",
        ),
        Component(
            "hypergradient",
            "f2sa",
            "blt_builtins.hypergradients.f2sa:F2SA",
            "Minimisers of h and of h + g/λ compared; needs no Hessian, biased by about 1/λ.",
        ),
        Component(
            "hypergradient",
            "bome",
            "blt_builtins.hypergradients.bome:BOME",
            "One step on x and θ together that lowers loss and value function; no Hessian.",
        ),
    ]
