"""Data terms: how far a reconstruction is from its measurements."""

from __future__ import annotations

from bltoolbox.plugin import Component, hookimpl

BLT_API = 2

_HOME = "blt_builtins.data_terms"


@hookimpl
def blt_components() -> list[Component]:
    """The components of this folder; their modules are imported only when they are used."""
    return [
        Component(
            "data_term",
            "least-squares",
            f"{_HOME}.least_squares:LeastSquares",
            "Half the squared distance, plain or weighted; for Gaussian noise. The default.",
        ),
        Component(
            "data_term",
            "huber",
            f"{_HOME}.huber:Huber",
            "Smoothed absolute distance; for outliers such as salt and pepper.",
        ),
        Component(
            "data_term", "poisson", f"{_HOME}.poisson:Poisson", "Likelihood of photon counts; for low light."
        ),
        Component(
            "data_term",
            "transmission",
            f"{_HOME}.transmission:Transmission",
            "Likelihood of X-ray counts; for tomography at low dose.",
        ),
        Component(
            "data_term",
            "student-t",
            f"{_HOME}.student_t:StudentT",
            "Logarithmic distance that ignores gross outliers; not convex.",
        ),
        Component(
            "data_term",
            "weight-map",
            f"{_HOME}.weight_map:WeightMap",
            "Least squares with a learned weight at every place; for noise that depends on it.",
        ),
        Component(
            "data_term",
            "sampled-least-squares",
            f"{_HOME}.sampled:SampledLeastSquares",
            "Learns which columns, lines or points of a transform to measure; for MRI.",
        ),
    ]
