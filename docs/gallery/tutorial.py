# %% [markdown]
# # The tutorial in one page
#
# From nothing to a learned regularizer that restores a photograph, in a minute: train, look at what was learned, use it.
# %%
from bltoolbox import load_recipe, plot, run, show_images

recipe = load_recipe(
    "smoke", {"device": "cpu", "upper_optimizer": "iadam", "upper_optimizer.step": 0.05, "budget.steps": 20}
)
result = run(recipe)
print(f"start {result.initial.mean('psnr'):.2f} dB, learned {result.evaluation.mean('psnr'):.2f} dB")
# %% [markdown]
# The loss of the batches, and the PSNR of images that were held out:
# %%
plot(result)
# %% [markdown]
# Photographs that took no part in training:
# %%
show_images(result)
# %% [markdown]
# `blt run denoise` is the same with larger images and more steps. [The tutorial](../tutorial.md) explains each part.
