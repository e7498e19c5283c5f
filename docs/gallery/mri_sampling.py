# %% [markdown]
# # Learn where to sample in MRI
#
# Which of 32 lines of the Fourier transform should a scanner measure if it has time for only some of them? Only the weights of the lines are
# learned; the regularizer is frozen. `blt run mri-sampling` is the same for 64×64 images, with figures in the results.
# %%
import matplotlib.pyplot as plt

from bltoolbox import run

result = run(
    "mri-sampling",
    {
        "device": "cpu",
        "baseline": None,
        "data": {"name": "dead-leaves", "count": 24, "size": 32},
        "evaluation": {"name": "photos", "size": 32},
        "data_term": {"name": "sampled-least-squares", "count": 8, "sparsity": 0.12},
        "sampler": {"name": "epoch", "size": 8},
        "validation": {"count": 8, "checks": 2},
        "budget": {"steps": 150},
    },
)
print(f"photographs: {result.evaluation.mean('psnr'):.2f} dB from the learned lines")
# %% [markdown]
# The weight of each line after training, from the lowest frequency at the left over the highest in the middle back to the lowest. Lines k and
# 32 − k of a real image carry the same information, and the pattern rarely takes both.
# %%
(sampling,) = (value.flatten().cpu() for name, value in result.theta.items() if "sampling" in name)
figure, axis = plt.subplots(figsize=(8, 2.2))
axis.bar(range(len(sampling)), sampling)
axis.set(xlabel="line", ylabel="weight")
figure.tight_layout()
# %% [markdown]
# How learned lines compare with the lowest frequencies and with random lines is measured in [Results](../results.md).
