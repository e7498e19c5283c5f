"""The properties that each role promises, one file per role; importing this package registers them all.

May import what ``testing`` may. A change here can let a wrong component pass, or refuse a correct one.
"""

from bltoolbox.testing.checks import (
    data,
    data_term,
    data_term_claims,
    hypergradient,
    hypergradient_claims,
    logger,
    noise,
    operator,
    parameters,
    problem,
    problem_claims,
    regularizer,
    regularizer_bounds,
    sampler,
    solver,
    upper,
    upper_loss,
)
from bltoolbox.testing.checks.base import (
    PROPERTIES,
    ConformanceFailure,
    NotApplicable,
    NotVerified,
    Property,
    Subject,
)

__all__ = [
    "PROPERTIES",
    "ConformanceFailure",
    "NotApplicable",
    "NotVerified",
    "Property",
    "Subject",
    "data",
    "data_term",
    "data_term_claims",
    "hypergradient",
    "hypergradient_claims",
    "logger",
    "noise",
    "operator",
    "parameters",
    "problem",
    "problem_claims",
    "regularizer",
    "regularizer_bounds",
    "sampler",
    "solver",
    "upper",
    "upper_loss",
]
