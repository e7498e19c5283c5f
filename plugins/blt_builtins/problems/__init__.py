"""Problems other than images: regression, classification, data cleaning, few-shot learning."""

from __future__ import annotations

from bltoolbox.plugin import Component, hookimpl

BLT_API = 2

_HOME = "blt_builtins.problems"


@hookimpl
def blt_components() -> list[Component]:
    """The components of this folder; their modules are imported only when they are used."""
    return [
        Component(
            "problem",
            "ridge",
            f"{_HOME}.ridge:Ridge",
            "Linear regression; learns the ridge by cross-validation, one for each feature or one in all.",
        ),
        Component(
            "problem",
            "logistic-regression",
            f"{_HOME}.logistic_regression:LogisticRegression",
            "Two classes; learns the ridge by cross-validation, one for each feature or one in all.",
        ),
        Component(
            "problem",
            "softmax-regression",
            f"{_HOME}.softmax_regression:SoftmaxRegression",
            "Several classes; learns the ridge by cross-validation, one for each feature or one in all.",
        ),
        Component(
            "problem",
            "data-cleaning",
            f"{_HOME}.data_cleaning:DataCleaning",
            "Classification with wrong labels; learns a weight for each training example.",
        ),
        Component(
            "problem",
            "few-shot",
            f"{_HOME}.few_shot:FewShot",
            "Many small regressions; learns the features that they share.",
        ),
    ]
