"""Ritz vectors recycled from system to system, against warm starts alone and against a preconditioner.

    python tests/benchmarks/recycling.py CROPS.npy [--count 4] [--steps 16] [--tol 0.1] [--largest]

Denoising with ten filters (`foe`) of the first crops, (N, H, W, 3) uint8, along the θ of gradient descent. At each θ
the adjoint systems ∇²h q = ∇g of all crops are solved by conjugate gradients from the last q,

* plain;
* preconditioned by the spectral approximation of ∇²h: mean curvatures of the filters, one 3×3 block for each frequency
  of a cosine transform;
* deflated by the k Ritz vectors W of the smallest (or largest) Ritz values of the last system of the same crop. Since
  ∇²h has changed, ∇²h W costs k Hessian products for each system.

Printed per system: iterations, Hessian products, and milliseconds of the processor.

Reference: Ehrhardt, Gazzola & Scott, *Efficient gradient-based methods for bilevel learning via recycling Krylov
subspaces*, 2024.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from blt_builtins.hypergradients.cg_ift import CGIFT
from blt_builtins.lower_solvers.mm import MemoryGradient
from blt_builtins.regularizers.foe import FieldOfExperts, amplitudes
from bltoolbox.bilevel.records import Accuracy, Counter, Theta
from bltoolbox.plugin import join, split
from bltoolbox.testing import full_batch, make_oracle

#: Search directions stored for the next Ritz vectors.
STORED = 40
#: First systems that are not counted, since nothing is recycled yet.
BURN_IN = 2
#: Factor of the mean curvatures in the preconditioner.
ALPHA = 0.1
Map = Callable[[Tensor], Tensor]


def cosine_matrix(n: int) -> Tensor:
    """The orthonormal DCT-II."""
    k, i = torch.arange(n, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64)
    matrix = torch.cos(math.pi * (2 * i + 1) * k / (2 * n)) * math.sqrt(2 / n)
    matrix[0] /= math.sqrt(2)
    return matrix


def preconditioner(foe: FieldOfExperts, theta: Theta, x: Tensor) -> Map:
    """r ↦ P⁻¹r for one crop, P = I + α Σ_j mean(a_jφ''_j)·½Re[G_j(u, v) + G_j(u, −v)], G_j = ĉ_jĉ_jᴴ."""
    height, width = x.shape[-2:]
    kernels, nu = foe.kernels(theta), theta["log_smoothing"].exp()
    t = foe.analyse(theta, x)
    curvature = amplitudes(theta).view(1, -1, 1, 1) * nu**2 * (t.square() + nu**2).pow(-1.5)
    offsets = torch.arange(kernels.shape[-1], dtype=torch.float64)
    rows, columns = (
        torch.exp(-1j * math.pi / n * torch.arange(n, dtype=torch.float64)[:, None] * offsets)
        for n in (height, width)
    )
    symbol = torch.zeros((), dtype=torch.float64)
    for side in (columns, columns.conj()):
        c = torch.einsum("ua,jcab,vb->jcuv", rows, kernels.to(rows.dtype), side)
        symbol = (
            symbol
            + 0.5 * torch.einsum("j,jcuv,jduv->uvcd", curvature.mean((0, 2, 3)).to(c.dtype), c, c.conj()).real
        )
    inverse = torch.linalg.inv(torch.eye(kernels.shape[1], dtype=torch.float64) + ALPHA * symbol)
    down, across = cosine_matrix(height), cosine_matrix(width)

    def apply(r: Tensor) -> Tensor:
        image = torch.einsum("uvcd,bduv->bcuv", inverse, down @ r @ across.T)
        return down.T @ image @ across

    return apply


@dataclass
class Method:
    """One way to solve the systems, what it remembers of each crop, and its totals."""

    name: str
    preconditioned: bool = False
    vectors: int = 0
    largest: bool = False
    adjoints: dict[int, Tensor] = field(default_factory=dict)
    spaces: dict[int, Tensor] = field(default_factory=dict)
    iterations: int = 0
    products: int = 0
    seconds: float = 0.0

    def solve(self, crop: int, hvp: Map, right: Tensor, inverse: Map | None, tol: float) -> tuple[int, int]:
        """Iterations and Hessian products; q and the Ritz vectors are kept."""
        q = self.adjoints.get(crop, torch.zeros_like(right))
        space = self.spaces.get(crop)
        image = None if space is None else torch.stack([hvp(w.view_as(q)).flatten() for w in space])
        r = right - hvp(q)
        directions: list[Tensor] = []
        products: list[Tensor] = []
        correct = _correction(space, image)
        q = q + correct(r, space)
        r = r if image is None else r - correct(r, image)
        iterations = 0
        p, rz = torch.zeros_like(r), torch.tensor(math.inf)
        while float(r.norm()) > tol:
            z = r if inverse is None else inverse(r)
            new = (r * z).sum()
            p = z - correct(z, space, image) + (new / rz) * p
            rz, product = new, hvp(p)
            if self.vectors and len(directions) < STORED:
                directions.append(p.flatten())
                products.append(product.flatten())
            alpha = rz / (p * product).sum()
            q, r, iterations = q + alpha * p, r - alpha * product, iterations + 1
        self.adjoints[crop] = q
        if self.vectors and len(directions) >= self.vectors:
            pairs = [(space, image)] if space is not None and image is not None else []
            self.spaces[crop] = _ritz(
                [*pairs, (torch.stack(directions), torch.stack(products))], self.vectors, self.largest
            )
        return iterations, iterations + 1 + (0 if space is None else len(space))


def _correction(space: Tensor | None, image: Tensor | None) -> Callable[..., Tensor]:
    """v ↦ V(WᵀHW)⁻¹Uᵀv with U = W unless given."""
    if space is None or image is None:
        return lambda v, along, against=None: torch.zeros_like(v)
    factor = torch.linalg.cholesky(image @ space.T)

    def correct(v: Tensor, along: Tensor, against: Tensor | None = None) -> Tensor:
        against = space if against is None else against
        return (torch.cholesky_solve((against @ v.flatten())[:, None], factor)[:, 0] @ along).view_as(v)

    return correct


def _ritz(pairs: list[tuple[Tensor, Tensor]], count: int, largest: bool) -> Tensor:
    """The Ritz vectors of the smallest or largest Ritz values on the span of all rows; the second of a pair are ∇²h
    times the first."""
    basis, image = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    length = basis.norm(dim=1, keepdim=True)
    basis, image = basis / length, image / length
    values, vectors = torch.linalg.eigh(basis @ basis.T)
    independent = values > 1e-10 * values.max()
    change = vectors[:, independent] / values[independent].sqrt()
    product = basis @ image.T
    _, ritz = torch.linalg.eigh(change.T @ (0.5 * (product + product.T)) @ change)
    return (change @ (ritz[:, -count:] if largest else ritz[:, :count])).T @ basis


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("crops")
    parser.add_argument("--count", type=int, default=4)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--tol", type=float, default=0.1, help="residual norm of the systems")
    parser.add_argument("--largest", action="store_true", help="Ritz vectors of the largest Ritz values")
    parser.add_argument("--step", type=float, default=0.01, help="length of a step on θ")
    given = parser.parse_args()
    torch.set_num_threads(1)
    crops = np.load(given.crops, mmap_mode="r", allow_pickle=False)[: given.count]
    images = (torch.tensor(np.array(crops)).float() / 255).permute(0, 3, 1, 2).contiguous()
    foe, shape = FieldOfExperts(filters=10), tuple(images.shape[1:])
    oracle = make_oracle(images, foe, MemoryGradient(), CGIFT(), noise=25 / 255)
    theta: Theta = join(regularizer=foe.init_params(shape, torch.Generator().manual_seed(0)))
    methods = [Method("plain"), Method("preconditioned", preconditioned=True)]
    methods += [Method(f"recycled, k = {k}", vectors=k, largest=given.largest) for k in (2, 5, 10, 20)]
    for step in range(given.steps):
        asked = oracle.on(full_batch(oracle)).hypergradient(
            theta, Accuracy(min(given.tol, 0.1)), Accuracy(given.tol)
        )
        oracle.journal.clear()
        lower, upper = oracle.tasks.at(theta, Counter()).on(range(len(images)))
        x = oracle.solutions.get(range(len(images)), lower.start())
        for crop in range(len(images)):
            index = torch.tensor([crop])
            hvp, right = lower.take(index).linearize(x[index]).product, upper.take(index).gradient(x[index])
            for method in methods:
                began = time.process_time()
                inverse = (
                    preconditioner(foe, split(theta, "regularizer"), x[index])
                    if method.preconditioned
                    else None
                )
                iterations, products = method.solve(crop, hvp, right, inverse, given.tol)
                if step >= BURN_IN:
                    method.iterations += iterations
                    method.products += products
                    method.seconds += time.process_time() - began
        theta = oracle.problem.project(
            {name: v - given.step * asked.gradient[name] for name, v in theta.items()}
        )
    systems = len(images) * (given.steps - BURN_IN)
    print(f"{systems} systems, residual {given.tol:g}, last loss {asked.value.value:.2f}")
    for method in methods:
        means = method.iterations / systems, method.products / systems, 1e3 * method.seconds / systems
        print(f"{method.name:18} {means[0]:7.1f} iterations {means[1]:7.1f} products {means[2]:8.0f} ms")


if __name__ == "__main__":
    main()
