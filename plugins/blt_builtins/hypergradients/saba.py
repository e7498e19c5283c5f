"""SABA: SOBA with the variance reduction of SAGA, for all three directions.

    D = d_j − T_j + 1/n Σ_l T_l,   then T_j ← d_j

for each of d_j = ∇h_j(x), ∇²h_j(x) q, ∂_θ⟨∇_x h_j, q⟩ and, with the blocks k of the loss, ∇g_k(x), ∂_θ g_k.

T stores for each block the value of its last draw, so that the variance vanishes as (x, q, θ) converge: with
fixed steps the method converges as fast as its deterministic counterpart, at the price of a stochastic step. Tables
start with the values at the first (x, 0, θ), which costs one whole gradient. x ← x − ρD_x, q ← q − ρD_q as in `soba`.

Memory per task: n (2·size of x + size of θ) numbers and m (size of x) more for the loss. The tables of a task that has
not been visited for long are out of date, so the method works best with few tasks, all visited often.

When to choose it: finite sums that fit in memory, and an accurate θ. Otherwise `soba` or `amigo`. If the problem is not
a finite sum, it is `soba` with a table that is never used.

References: Dagréou, Ablin, Vaiter & Moreau, *A framework for bilevel optimization that enables stochastic and global
variance reduction algorithms*, NeurIPS 2022; Defazio, Bach & Lacoste-Julien, *SAGA*, NeurIPS 2014.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blt_builtins.hypergradients.finite_sum import (
    FiniteSumEstimator,
    StepLength,
    each,
    empty_rows,
    hessian_product,
    step_length,
    unmeasured,
)
from bltoolbox.plugin import Ask, BiasLimit, BlockDraws, Estimate, Lower, Rows, Upper, expand


class SABA(FiniteSumEstimator):
    """Simultaneous steps with variance reduction.

    Args:
        step: ρ, the length of the steps on x and q; `auto` is 1/(3L) with L a bound for all blocks.
    """

    limit = BiasLimit(calls=(15, 45, 135))

    def __init__(self, step: StepLength = "auto") -> None:
        self.step = step

    def keeps(self, lower: Lower, upper: Upper) -> Rows:
        n, m, filled = lower.blocks, upper.blocks, lower.mu.new_empty(0)
        rows = {"adjoint": empty_rows(lower), "filled": filled, "slope": empty_rows(lower, m)}
        rows |= {name: empty_rows(lower, n) for name in ("gradient", "product")}
        for name, value in lower.theta.items():
            rows[f"mixed {name}"] = value.new_empty((0, n, *value.shape))
            if upper.depends_on_theta:
                rows[f"direct {name}"] = value.new_empty((0, m, *value.shape))
        return rows

    def estimate(self, ask: Ask) -> Estimate:
        whole, x = ask.lower, ask.solution
        memory = ask.memory or {
            name: row.new_zeros(len(x), *row.shape[1:]) for name, row in self.keeps(whole, ask.upper).items()
        }
        draws = BlockDraws(ask.seed, ask.call, whole.ids)
        j, k = (
            draws.blocks(purpose, count, 1)[0]
            for purpose, count in (("step", whole.blocks), ("loss", ask.upper.blocks))
        )
        tables, q = _filled(ask, memory), memory["adjoint"]
        lower, upper = whole.sampled(j), ask.upper.sampled(k)
        news = {
            "gradient": lower.gradient(x),
            "product": hessian_product(lower.linearize(x), q),
            "slope": upper.gradient(x),
            **{f"mixed {name}": rows.detach() for name, rows in lower.mixed_each(x, q).items()},
            **{f"direct {name}": rows for name, rows in upper.theta_gradient_each(x).items()},
        }
        reduced = {}
        for name, new in news.items():
            block = k if name == "slope" or name.startswith("direct ") else j
            reduced[name], tables[name] = _saga(tables[name], block, new)
        rho = expand(step_length(ask, self.step, "saba", "step", 1 / 3), x)
        return Estimate(
            {name: _gradient(reduced, name, ask.weights) for name in whole.theta},
            unmeasured(whole),
            each(whole, 1),
            memory=tables
            | {
                "adjoint": q - rho * (reduced["product"] - reduced["slope"]),
                "filled": torch.ones_like(whole.mu),
            },
            x=whole.project(x - rho * reduced["gradient"]),
            blocks=whole.blocks,
            lower_iterations=each(whole, 1),
        )


def _saga(table: Tensor, block: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """The direction with reduced variance, and the table with the new entry."""
    rows = torch.arange(len(new), device=new.device)
    direction = new - table[rows, block] + table.mean(1)
    table = table.clone()
    table[rows, block] = new
    return direction, table


def _gradient(reduced: Rows, name: str, weights: Tensor) -> Tensor:
    each_task = -reduced[f"mixed {name}"]
    if (direct := reduced.get(f"direct {name}")) is not None:
        each_task = each_task + direct
    return torch.tensordot(weights, each_task, dims=1)


def _filled(ask: Ask, memory: Rows) -> dict[str, Tensor]:
    """The tables, with those of new tasks at x and q = 0: products with q are zero."""
    tables = {name: table for name, table in memory.items() if name not in ("adjoint", "filled")}
    new = torch.nonzero(memory["filled"] == 0).flatten()
    if not len(new):
        return tables
    lower, upper, x = ask.lower.take(new), ask.upper.take(new), ask.solution[new]
    numbers = torch.arange(max(lower.blocks, upper.blocks), device=x.device)
    values: dict[str, list[Tensor]] = {}
    for j in numbers[: lower.blocks]:
        values.setdefault("gradient", []).append(lower.sampled(j.expand(len(new))).gradient(x))
    for k in numbers[: upper.blocks]:
        block = upper.sampled(k.expand(len(new)))
        values.setdefault("slope", []).append(block.gradient(x))
        for name, gradients in block.theta_gradient_each(x).items():
            values.setdefault(f"direct {name}", []).append(gradients)
    for name, parts in values.items():
        tables[name] = tables[name].index_copy(0, new, torch.stack(parts, dim=1).to(tables[name]))
    return tables
