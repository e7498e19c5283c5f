"""Problems with known answers and the conformance suite, for our tests and for those of plugin authors.

May import every room except reports and the command line; only ``blt check`` and tests import it. A change here can
let a wrong component pass, or make a correct one fail, in the tests of every author: for each property,
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
