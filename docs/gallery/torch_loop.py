# %% [markdown]
# # The layer inside a PyTorch loop
#
# `bltoolbox.layer` is an `nn.Module` like any other. Here its parameters are trained by `torch.optim.Adam` with a loss of our own, the absolute
# error; no optimizer of the toolbox takes part.
# %%
import matplotlib.pyplot as plt
import torch
from torch.nn import functional as F

from bltoolbox import layer

generator = torch.manual_seed(0)
x = F.interpolate(torch.rand(8, 1, 6, 6, generator=generator), size=24)
y = x + 0.15 * torch.randn(x.shape, generator=generator)

module = layer(
    {
        "regularizer": {"name": "foe", "filters": 6, "kernel_size": 3},
        "color": "gray",
        "device": "cpu",
        "lower_solver": "mm",
        "budget": {"steps": 1},
    },
    tol=1e-2,
)
optimizer = torch.optim.Adam(module.parameters(), lr=0.08)
losses, start = [], None
for _ in range(40):
    optimizer.zero_grad()
    restored = module(y, start=start)
    loss = (restored - x).abs().mean()
    loss.backward()
    optimizer.step()
    module.project_()
    losses.append(loss.item())
    start = restored.detach()
print(f"mean absolute error: noisy {(y - x).abs().mean():.4f}, first {losses[0]:.4f}, last {losses[-1]:.4f}")
# %%
figure, axes = plt.subplots(1, 4, figsize=(11, 2.6), width_ratios=(1.4, 1, 1, 1))
axes[0].plot(losses)
axes[0].set(xlabel="step", ylabel="mean |x̂ − x*|")
for axis, (name, image) in zip(
    axes[1:], {"true": x, "noisy": y, "restored": restored.detach()}.items(), strict=True
):
    axis.imshow(image[0, 0], cmap="gray", vmin=0, vmax=1)
    axis.set_axis_off()
    axis.set_title(name, fontsize=10)
figure.tight_layout()
