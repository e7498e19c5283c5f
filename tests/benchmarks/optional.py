"""Rows of the benchmarks for packages that may be installed: torchopt, bm3d, deepinv."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import torch
from assembled import Assembled
from torch import Tensor

#: The penalty of deepinv's total variation, relative to the standard deviation of the noise; not tuned.
_TV = 0.75


def differentiate(
    method: Assembled, x_true: Tensor, start: Tensor, tol: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """x by L-BFGS of torch and z by implicit differentiation of torchopt, with its conjugate gradients."""
    torchopt = import_module("torchopt")
    names = list(method.theta)
    leaves = tuple(method.theta[name].detach().requires_grad_() for name in names)

    def optimality(x: Tensor, *theta: Tensor) -> Tensor:
        at = dict(zip(names, theta, strict=True))
        return torch.func.grad(lambda point: method.energy(point, at))(x)

    argnums = tuple(range(1, 1 + len(names)))
    solve = torchopt.linear_solve.solve_cg(maxiter=500, rtol=0.0, atol=tol)

    @torchopt.diff.implicit.custom_root(optimality, argnums=argnums, solve=solve)  # type: ignore[untyped-decorator]
    def minimiser(x: Tensor, *theta: Tensor) -> Tensor:
        return method.minimise(x.detach(), tol)[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torchopt still calls functorch
        x = minimiser(start, *leaves)
        loss = (x - x_true).square().sum() / len(x)
        parts = torch.autograd.grad(loss, leaves)
    return x.detach(), dict(zip(names, parts, strict=True))


def restorers(noise: float) -> dict[str, Callable[[Tensor], Tensor]]:
    """How the installed packages restore a batch of colour images with noise."""
    methods: dict[str, Callable[[Tensor], Tensor]] = {}
    if find_spec("bm3d"):
        bm3d = import_module("bm3d")

        def block_matching(y: Tensor) -> Tensor:
            images = [bm3d.bm3d_rgb(image.permute(1, 2, 0).double().numpy(), noise) for image in y]
            return torch.stack([torch.as_tensor(image).permute(2, 0, 1).float() for image in images])

        methods["bm3d"] = block_matching
    if find_spec("deepinv"):
        models = import_module("deepinv.models")
        tv = models.TVDenoiser(n_it_max=500, crit=1e-5)

        def total_variation(y: Tensor) -> Tensor:
            with torch.no_grad():
                return torch.as_tensor(tv(y, ths=_TV * noise))

        methods["deepinv, TV"] = total_variation
    return methods
