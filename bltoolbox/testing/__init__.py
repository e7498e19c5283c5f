"""The conformance suite, problems with known answers, and measured errors of hypergradients, for us and for authors.

``problems``, ``finite_sum`` and ``regression`` have answers in closed form, ``checks`` the properties of each kind of
component, ``limits`` the declared limits of biased hypergradients, ``estimators`` the comparison of their errors and
costs, ``theory`` the convergence theorem of ISGD in numbers. May import every room except reports and the command line;
only ``blt check``, ``blt estimators``, ``blt theory`` and tests import it. A change here can let a wrong component
pass, or make a correct one fail, in the tests of every author: for each property,
tests/testing/test_conformance_catches.py has a component that violates it.
"""

from bltoolbox.testing.problems import (
    Gain,
    Images,
    SquaredDistance,
    SquaredLoss,
    SquaredMisfit,
    Tikhonov,
    White,
    full_batch,
    make_oracle,
    smooth_images,
    variational,
)

__all__ = [
    "Gain",
    "Images",
    "SquaredDistance",
    "SquaredLoss",
    "SquaredMisfit",
    "Tikhonov",
    "White",
    "full_batch",
    "make_oracle",
    "smooth_images",
    "variational",
]
