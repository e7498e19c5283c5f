"""The properties that each role promises; importing this package registers them all."""

from bltoolbox.testing.checks import (
    data,
    data_term,
    data_term_claims,
    hypergradient,
    logger,
    noise,
    operator,
    parameters,
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
    Property,
    Subject,
)

__all__ = [
    "PROPERTIES",
    "ConformanceFailure",
    "NotApplicable",
    "Property",
    "Subject",
    "data",
    "data_term",
    "data_term_claims",
    "hypergradient",
    "logger",
    "noise",
    "operator",
    "parameters",
    "regularizer",
    "regularizer_bounds",
    "sampler",
    "solver",
    "upper",
    "upper_loss",
]
