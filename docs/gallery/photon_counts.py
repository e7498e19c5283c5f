# %% [markdown]
# # Photon counts
#
# With few photons, dark places are measured better than bright ones. The Poisson data term knows it, least squares does not; everything else is the
# same, and the regularizer is learned for each.
# %%
from bltoolbox import run

noise = {"name": "poisson", "peak": 20, "background": 0.02}
recipe = {
    "color": "gray",
    "device": "cpu",
    "data": {"name": "dead-leaves", "count": 12, "size": 24},
    "evaluation": {"name": "photos", "size": 48},
    "noise": noise,
    "regularizer": {"name": "foe", "filters": 6, "kernel_size": 3, "weight": 1},
    "lower_solver": "lbfgs",
    "strong_convexity": 0.1,
    "sampler": {"name": "epoch", "size": 4},
    "upper_optimizer": {"name": "iadam", "step": 0.15, "tol": 0.5},
    "validation": {"count": 4, "checks": 1},
    "budget": {"steps": 10},
}
results = {
    "Poisson": run(recipe | {"data_term": noise}),
    "least squares": run(
        recipe | {"regularizer": {"name": "foe", "filters": 6, "kernel_size": 3, "weight": 0.05}}
    ),
}
for name, result in results.items():
    print(f"{name}: {result.evaluation.mean('psnr'):.2f} dB on four photographs")
# %%
from bltoolbox import show_images

show_images(results["Poisson"])
