"""Problems with known answers and the conformance suite, for our tests and for those of plugin authors.

May import every room but reports and the command line; nothing but ``blt check`` and tests imports it. A change here
can let a wrong component pass, or refuse a right one, in the tests of every author: each property has a component that
breaks it in tests/testing/test_conformance_catches.py.
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
