# %% [markdown]
# # How wrong is a hypergradient, and how wrong does it say it is?
#
# At looser and tighter accuracies ε, the true error of z is measured against a z computed in float64 to 1e-9, beside the two
# bounds that the oracle can report with it.
# %%
import matplotlib.pyplot as plt

from bltoolbox import assemble
from bltoolbox.plugin import Accuracy, Batch, theta_norm

recipe = {
    "data": {"name": "dead-leaves", "count": 4, "size": 24},
    "noise": "25/255",
    "regularizer": {"name": "foe", "filters": 4, "kernel_size": 3},
    "color": "gray",
    "device": "cpu",
    "dtype": "float64",
    "lower_solver": "mm",
    "sampler": "full",
    "validation": {"count": 0},
    "budget": {"steps": 1},
}


def hypergradient(tol, bound):
    """z from a cold start, and the mean of the bounds over the four images."""
    experiment = assemble(recipe | {"certificates": {"bound": bound, "every": 1}})
    oracle = experiment.oracle.on(Batch(range(4), [1.0] * 4))
    z = oracle.hypergradient(experiment.theta, Accuracy(tol), Accuracy(tol))
    assert z.certificate["bound_kind"] == bound
    return z.gradient, z.certificate["bound_mean"]


exact, _ = hypergradient(1e-9, "estimated")
accuracies = [10.0**-k for k in range(6)]
curves = {"certified": [], "estimated": [], "true error": []}
for tol in accuracies:
    for bound in ("certified", "estimated"):
        z, value = hypergradient(tol, bound)
        curves[bound].append(value)
    curves["true error"].append(theta_norm([z[name] - exact[name] for name in exact]))
for row in zip(accuracies, *curves.values(), strict=True):
    print("ε = {:.0e}: certified {:.1e}, estimated {:.1e}, true {:.1e}".format(*row))
# %%
figure, axis = plt.subplots(figsize=(6, 3.2))
for (name, values), style in zip(curves.items(), ("^-", "o-", "s-"), strict=True):
    axis.loglog(accuracies, values, style, label=name)
axis.set(xlabel="accuracy ε = δ", ylabel="‖z − ∇f‖")
axis.invert_xaxis()
axis.legend()
figure.tight_layout()
# %% [markdown]
# The certified bound is never exceeded, and larger by many orders of magnitude: it is for verification. The estimated one follows the
# error; adaptive methods use it.
