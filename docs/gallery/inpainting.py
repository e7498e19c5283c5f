# %% [markdown]
# # Fill in missing pixels with a denoiser's prior
#
# A regularizer learned for denoising is a prior: its proximal map, alternated with the known pixels, fills in the half that is missing. The loop knows
# nothing of the toolbox but `prior.prox`.
# %%
import matplotlib.pyplot as plt
import torch
from skimage import data

from bltoolbox import Model

x = torch.from_numpy(data.camera()[90:154, 190:254]).float()[None, None] / 255
mask = (torch.rand(x.shape, generator=torch.manual_seed(0)) < 0.5).float()
y = mask * x

prior = Model.load("denoise-gray-foe", device="cpu").prior()
u = torch.where(mask > 0, y, y.sum() / mask.sum())
with torch.no_grad():
    for step in (1.0, 0.3, 0.1):
        for _ in range(15):
            u = prior.prox(u - mask * (u - y), step)


# %%
def psnr(image):
    return f"{-10 * (image - x).square().mean().log10().item():.1f} dB"


figure, axes = plt.subplots(1, 3, figsize=(8, 2.9))
for axis, (name, image) in zip(
    axes, {"true": x, "half of it": y, f"filled in, {psnr(u)}": u}.items(), strict=True
):
    axis.imshow(image[0, 0], cmap="gray", vmin=0, vmax=1)
    axis.set_axis_off()
    axis.set_title(name, fontsize=10)
# %%
print(f"R(x): filled in {prior.energy(u).item():.2f}, true image {prior.energy(x).item():.2f}")
