"""Secants: what the last steps and the changes of the gradient along them say about the inverse Hessian."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bltoolbox.plugin import norm


def flat(x: Tensor) -> Tensor:
    """Images as rows, in the order of their memory: a view."""
    return x.movedim(1, -1).flatten(1)


def image(row: Tensor, like: Tensor) -> Tensor:
    """Rows as images: the inverse of ``flat``."""
    return row.view(len(row), *like.shape[2:], like.shape[1]).movedim(-1, 1)


@dataclass(frozen=True)
class Pair:
    """A step s and the change y of the gradient along it, as rows (B, N), and the pair before."""

    s: Tensor
    y: Tensor
    older: Pair | None

    def newest(self, most: int) -> Pair:
        """This pair and those before, at most ``most`` of them."""
        older = None if self.older is None or most == 1 else self.older.newest(most - 1)
        return replace(self, older=older)

    def rows(self) -> tuple[list[Tensor], list[Tensor]]:
        """All s and all y, the oldest first."""
        s, y = ([], []) if self.older is None else self.older.rows()
        return [*s, self.s], [*y, self.y]


@dataclass(frozen=True)
class Secants:
    """Limited-memory BFGS in compact form: B v from pairs (s_i, y_i), the newest last, and a first inverse γP⁻¹.

        a = R⁻¹Sᵀv,   z = γP⁻¹(v − Ya),   B v = z + S R⁻ᵀ(Da − Yᵀz),        R_ij = ⟨s_i, y_j⟩ for i ≤ j,   D = diag R

    which is the two-loop recursion. A pair of non-positive curvature (up to rounding) counts as zeros with R_ii = 1,
    which leaves B unchanged; so all samples have the same number of pairs.
    """

    newest: Pair
    #: Which pairs count, (B, m, 1), as 0 or 1, and R, (B, m, m), both in float64.
    used: Tensor
    r: Tensor
    #: γ, (B,).
    scale: Tensor

    @classmethod
    def first(cls, s: Tensor, y: Tensor) -> Secants:
        """One pair of rows; γ = 1."""
        used, corner = _corner(s, y)
        return cls(Pair(s, y, None), used, corner, torch.ones_like(corner[:, 0, 0]))

    def append(self, s: Tensor, y: Tensor, most: int) -> Secants:
        """With one more pair of rows, and at most ``most``."""
        used, corner = _corner(s, y)
        column = self.used * _inner(self.newest.rows()[0], y) * used
        above = torch.cat([self.r, column], dim=2)
        below = torch.cat([torch.zeros_like(column).mT, corner], dim=2)
        r = torch.cat([above, below], dim=1)[:, -most:, -most:]
        used = torch.cat([self.used, used], dim=1)[:, -most:]
        return replace(self, newest=Pair(s, y, self.newest).newest(most), used=used, r=r)

    def scaled(self, inverse: Callable[[Tensor], Tensor]) -> Secants:
        """With γ = ⟨s, y⟩ / ⟨y, P⁻¹y⟩ of the newest pair."""
        y = self.newest.y
        scale = self.r[:, -1, -1] / _inner([y], inverse(y)).view(-1).clamp_min(1e-300)
        return replace(self, scale=torch.where(self.used[:, -1, 0] > 0, scale, self.scale))

    @property
    def curved(self) -> Tensor:
        """Whether there is a pair of positive curvature, (B,)."""
        return self.used.amax((1, 2)) > 0

    def product(self, v: Tensor, inverse: Callable[[Tensor], Tensor]) -> Tensor:
        """B v for rows v; ``inverse`` is P⁻¹ and returns a new tensor."""
        s, y = self.newest.rows()
        a = torch.linalg.solve_triangular(self.r, self.used * _inner(s, v), upper=True)
        z = inverse(_added(v, y, -self.used * a)).mul_(self.scale.to(v.dtype).unsqueeze(1))
        rest = self.r.diagonal(dim1=1, dim2=2).unsqueeze(2) * a - _inner(y, z)
        c = torch.linalg.solve_triangular(self.r.mT, self.used * rest, upper=False)
        return _added(z, s, self.used * c)


def _corner(s: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Whether a pair counts, and its entry of R, (B, 1, 1)."""
    curvature = _inner([s], y)
    least = torch.finfo(s.dtype).eps ** 0.5 * norm(s).double() * norm(y).double()
    used = curvature > least.view(-1, 1, 1)
    return used.double(), torch.where(used, curvature, 1.0)


def _inner(rows: list[Tensor], v: Tensor) -> Tensor:
    """⟨rows_i, v⟩, (B, m, 1), in float64."""
    return torch.cat([torch.bmm(row.unsqueeze(1), v.unsqueeze(2)) for row in rows], dim=1).double()


def _added(v: Tensor, rows: list[Tensor], coefficients: Tensor) -> Tensor:
    """v + Σ_i coefficients_i rows_i, a new tensor."""
    first, *others = coefficients.to(v.dtype).unbind(1)
    total = torch.addcmul(v, rows[0], first)
    for row, coefficient in zip(rows[1:], others, strict=True):
        total.addcmul_(row, coefficient)
    return total
