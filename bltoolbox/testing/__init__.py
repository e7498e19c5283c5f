"""Problems with known answers, for our tests and for those of plugin authors."""

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
