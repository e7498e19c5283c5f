"""Problems with known answers, for our tests and for those of plugin authors."""

from bltoolbox.testing.problems import Gain, Images, Tikhonov, full_batch, make_oracle, smooth_images

__all__ = ["Gain", "Images", "Tikhonov", "full_batch", "make_oracle", "smooth_images"]
