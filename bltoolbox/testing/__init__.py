"""Problems with known solutions and the conformance suite, for our tests and those of plugin authors.

May import every room but ``reports``. Plugins may import it. A change here can break the tests of other people's plugins, and what ``blt
check`` accepts.
"""

from bltoolbox.testing.problems import (
    Gain,
    Images,
    SquaredDistance,
    SquaredLoss,
    SquaredMisfit,
    Tikhonov,
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
    "full_batch",
    "make_oracle",
    "smooth_images",
    "variational",
]
