# %% [markdown]
# # Denoise with learned filters
#
# A regularizer that adapts to the image against total variation with the best of five weights, on the same noise. The weight is
# chosen with the true image in hand, which favours total variation.
# %%
import matplotlib.pyplot as plt
import numpy as np
from skimage import data
from skimage.metrics import peak_signal_noise_ratio
from skimage.restoration import denoise_tv_chambolle

from bltoolbox import Model

x = data.camera()[60:188, 180:308] / 255
y = x + np.random.default_rng(0).normal(0, 25 / 255, x.shape)

model = Model.load("denoise-gray", device="cpu")
learned = model.restore(y.astype(np.float32), noise=25 / 255)
variation = max(
    (denoise_tv_chambolle(y, weight=weight) for weight in (0.06, 0.08, 0.1, 0.12, 0.15)),
    key=lambda image: peak_signal_noise_ratio(x, image, data_range=1),
)
# %%
images = {"true": x, "noisy": y, "total variation": variation, "learned": learned}
figure, axes = plt.subplots(1, 4, figsize=(10, 2.8))
for axis, (name, image) in zip(axes, images.items(), strict=True):
    axis.imshow(image, cmap="gray", vmin=0, vmax=1)
    axis.set_axis_off()
    quality = (
        "" if name == "true" else f", {peak_signal_noise_ratio(x, image.clip(0, 1), data_range=1):.1f} dB"
    )
    axis.set_title(name + quality, fontsize=10)
# %% [markdown]
# The learned filters, as the report of a run shows them:
# %%
from bltoolbox.plugin import shown_filters

filters = shown_filters(model.problem, model.prepared).detach()
print(f"{len(filters)} filters, {model.size} parameters")
figure, axes = plt.subplots(1, 8, figsize=(8, 1))
for axis, kernel in zip(axes.flat, filters, strict=True):
    axis.imshow(kernel.squeeze(), cmap="gray")
    axis.set_axis_off()
