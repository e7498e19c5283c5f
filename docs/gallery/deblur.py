# %% [markdown]
# # Deblur a photograph
#
# The shipped model `deblur-color` was learned for a Gaussian blur of two pixels. It restores a photograph with that blur and noise of 5/255.
# %%
import matplotlib.pyplot as plt
import numpy as np
from scipy.ndimage import gaussian_filter
from skimage import data
from skimage.metrics import peak_signal_noise_ratio

from bltoolbox import Model

x = data.astronaut()[20:148, 150:278] / 255
blurred = gaussian_filter(x, (2, 2, 0), mode="reflect")
y = blurred + np.random.default_rng(0).normal(0, 5 / 255, x.shape)

model = Model.load("deblur-color", device="cpu")
restored = model.restore(y.astype(np.float32), noise=5 / 255)
# %%
figure, axes = plt.subplots(1, 3, figsize=(9, 3.2))
for axis, (name, image) in zip(axes, {"true": x, "measured": y, "restored": restored}.items(), strict=True):
    axis.imshow(image.clip(0, 1))
    axis.set_axis_off()
    quality = (
        "" if name == "true" else f", {peak_signal_noise_ratio(x, image.clip(0, 1), data_range=1):.1f} dB"
    )
    axis.set_title(name + quality, fontsize=10)
# %% [markdown]
# Another kernel needs no training: `model.with_operator("blur", kernel="kernel.npy")`.
