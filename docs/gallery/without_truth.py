# %% [markdown]
# # Learn without true images
#
# The loss `recorrupted` needs noisy images only. It is compared with training on the true ones: same images, same steps, same regularizer.
# %%
import matplotlib.pyplot as plt

from bltoolbox import run

recipe = {
    "color": "gray",
    "device": "cpu",
    "data": {"name": "dead-leaves", "count": 40, "size": 32},
    "evaluation": {"name": "photos", "size": 96},
    "noise": "25/255",
    "regularizer": {"name": "foe", "filters": 6, "kernel_size": 5},
    "lower_solver": "mm",
    "sampler": {"name": "epoch", "size": 8},
    "upper_optimizer": {"name": "iadam", "step": 0.05},
    "validation": {"count": 8, "checks": 4, "metric": "loss"},
    "budget": {"steps": 24},
}
results = {
    "with truth": run(recipe),
    "without": run(recipe | {"upper_loss": {"name": "recorrupted", "alpha": 0.5}}),
}
# %%
first = results["with truth"]
values = {"start": first.initial} | {name: result.evaluation for name, result in results.items()}
values = {name: evaluation.mean("psnr") for name, evaluation in values.items()}
for name, value in values.items():
    print(f"{name}: {value:.2f} dB on four photographs")

figure, axis = plt.subplots(figsize=(6, 2.2))
axis.plot(list(values.values()), list(values), "o")
axis.set(xlabel="PSNR in dB")
axis.grid(axis="x")
figure.tight_layout()
