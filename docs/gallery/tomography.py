# %% [markdown]
# # Tomography from few views
#
# Sixteen views of 32×32 images. A Field of Experts is learned from generated images in a few steps; the test image is a phantom that looks
# different from all of them.
# %%
import matplotlib.pyplot as plt
import torch
from skimage.data import shepp_logan_phantom
from skimage.transform import resize

from bltoolbox import run

recipe = {
    "color": "gray",
    "device": "cpu",
    "data": {"name": "dead-leaves", "count": 20, "size": 32},
    "operator": {"name": "ct", "size": 32, "views": 16},
    "noise": 0.01,
    "strong_convexity": 3e-5,
    "regularizer": {"name": "foe", "filters": 6, "kernel_size": 3, "weight": 1e-3},
    "lower_solver": "lbfgs",
    "sampler": {"name": "epoch", "size": 4},
    "upper_optimizer": {"name": "iadam", "step": 0.15, "tol": 0.5},
    "validation": {"count": 4, "checks": 2},
    "budget": {"steps": 12},
}
result = run(recipe)
print(f"{result.steps} steps; held-out images: {result.validation:.2f} dB")
# %%
x = torch.from_numpy(resize(shepp_logan_phantom(), (32, 32), anti_aliasing=True)).float()[None, None]
operator = result.model.problem.operator
y = operator.apply(x, {}, {})
y = y + 0.01 * torch.randn(y.shape, generator=torch.manual_seed(0))
start = operator.start(y, {}, {})
learned = result.solve(y)


# %%
def psnr(image):
    return f"{-10 * (image.clamp(0, 1) - x).square().mean().log10().item():.1f} dB"


panels = {
    "true": x,
    "sinogram": y,
    f"back projection, {psnr(start)}": start,
    f"learned, {psnr(learned)}": learned,
}
figure, axes = plt.subplots(1, 4, figsize=(10, 2.8))
for axis, (name, image) in zip(axes, panels.items(), strict=True):
    axis.imshow(image[0, 0], cmap="gray", aspect="auto" if name == "sinogram" else "equal")
    axis.set_axis_off()
    axis.set_title(name, fontsize=10)
