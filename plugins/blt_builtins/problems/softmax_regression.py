"""Multinomial logistic regression with a ridge learned by cross-validation.

    h_i(x, θ) = 1/n_i Σ_{k ∉ fold i} [log Σ_c e^{⟨a_k, x_c⟩} − ⟨a_k, x_{b_k}⟩] + ½ Σ_j e^{θ_j} Σ_c x_jc²

x has the shape (p, classes); g_i is the mean of the same loss over fold i. A ridge belongs to a feature and is shared
by all classes. ∇h_i is Lipschitz with λ_max(Σ a_k a_kᵀ/n_i)/2 + max_j e^{θ_j}.

When to choose it: more than two classes and many features, of which few matter.

Reference: Bengio, *Gradient-based optimization of hyperparameters*, Neural Computation 2000.
Böhning, *Multinomial logistic regression algorithm*, AISM 1992 (the bound ½ of the Hessian).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Lt

from blt_builtins.problems.cross_validation import CrossValidated
from blt_builtins.problems.linear_tasks import ACCURACY, class_accuracy
from blt_builtins.problems.row_losses import Softmax
from blt_builtins.problems.tables import Files, GeneratedClasses, class_count, divide, draw, read

_DATA = GeneratedClasses()


class SoftmaxRegression(CrossValidated):
    """Several classes, with learned ridges.

    Args:
        data: Generated examples, or files of your own with classes 0, 1, ….
        folds: Number of parts of the training rows, each left out once.
        per_feature: Learn one ridge for each feature instead of one for all.
        initial: θ at the beginning, the logarithm of the ridge.
        validation: Share of the examples on which the best θ is chosen.
        test: Share of the examples for the final evaluation.
        blocks: Number of blocks of each sum over examples, for stochastic methods.
    """

    metrics: ClassVar = {"accuracy": ACCURACY}
    measures: ClassVar = {"accuracy": class_accuracy}
    loss: ClassVar = Softmax()

    def __init__(
        self,
        data: GeneratedClasses | Files = _DATA,
        folds: Annotated[int, Ge(2)] = 5,
        per_feature: bool = True,
        initial: float = -2.0,
        validation: Annotated[float, Ge(0), Lt(1)] = 0.15,
        test: Annotated[float, Ge(0), Lt(1)] = 0.6,
        blocks: Annotated[int, Gt(0)] = 1,
    ) -> None:
        if isinstance(data, GeneratedClasses):
            table = draw(data, data.classes, lambda t: t.argmax(1).double())
            self.columns = data.classes
        else:
            table = read(data)
            self.columns = class_count(table)
        split = divide(table, validation, test, data.seed)
        super().__init__(table, split, folds, blocks, per_feature, initial)

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        data = {"examples": 40, "features": 4, "relevant": 2, "classes": 3, "noise": 0.5, "seed": 0}
        return {"data": data, "folds": 3, "blocks": 3}
