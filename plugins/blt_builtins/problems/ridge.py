"""Ridge regression with a ridge learned by cross-validation.

    h_i(x, θ) = 1/n_i Σ_{k ∉ fold i} ½(⟨a_k, x⟩ − b_k)² + ½ Σ_j e^{θ_j} x_j²

g_i is the mean of ½(⟨a_k, x⟩ − b_k)² over fold i. h_i is strongly convex with modulus
λ_min(Σ a_k a_kᵀ/n_i) + min_j e^{θ_j}.
With one exponent for each feature, irrelevant features are switched off, which no search over a single ridge can do.

When to choose it: many features, of which few matter; or as the smallest problem to try a method on, since everything
has a closed form.

Reference: Bengio, *Gradient-based optimization of hyperparameters*, Neural Computation 2000.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Lt

from blt_builtins.problems.cross_validation import CrossValidated
from blt_builtins.problems.linear_tasks import MSE, R2, mse, r2
from blt_builtins.problems.row_losses import Squared
from blt_builtins.problems.tables import Files, Generated, divide, draw, read

_DATA = Generated()


class Ridge(CrossValidated):
    """Linear regression with learned ridges.

    Args:
        data: Generated examples, or files of your own.
        folds: Number of parts of the training rows, each left out once.
        per_feature: Learn one ridge for each feature instead of one for all.
        initial: θ at the beginning, the logarithm of the ridge.
        validation: Share of the examples on which the best θ is chosen.
        test: Share of the examples for the final evaluation.
        blocks: Number of blocks of each sum over examples, for stochastic methods.
    """

    metrics: ClassVar = {"mse": MSE, "r2": R2}
    measures: ClassVar = {"mse": mse, "r2": r2}
    loss: ClassVar = Squared()

    def __init__(
        self,
        data: Generated | Files = _DATA,
        folds: Annotated[int, Ge(2)] = 5,
        per_feature: bool = True,
        initial: float = -2.0,
        validation: Annotated[float, Ge(0), Lt(1)] = 0.15,
        test: Annotated[float, Ge(0), Lt(1)] = 0.6,
        blocks: Annotated[int, Gt(0)] = 1,
    ) -> None:
        table = draw(data, 1, lambda t: t.squeeze(1)) if isinstance(data, Generated) else read(data)
        split = divide(table, validation, test, data.seed)
        super().__init__(table, split, folds, blocks, per_feature, initial)

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        data = {"examples": 40, "features": 4, "relevant": 2, "noise": 0.5, "seed": 0}
        return {"data": data, "folds": 3, "blocks": 3}
