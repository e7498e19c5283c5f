# %% [markdown]
# # A ridge for each feature of a logistic regression
#
# Sixty features, of which six matter. One ridge per feature, sixty hyperparameters, is learned by cross-validation: too many for a grid,
# easy for a hypergradient. The first six features are those that matter.
# %%
import matplotlib.pyplot as plt

from bltoolbox import run

result = run("ml/logistic", {"device": "cpu", "budget.computations": 5000, "validation.checks": 4})
print(result.evaluation.summary)
(ridge,) = (value.flatten().cpu() for value in result.theta.values())
# %%
figure, axis = plt.subplots(figsize=(8, 2.6))
axis.bar(range(len(ridge)), (-ridge).exp(), color="tab:blue")
axis.set(xlabel="feature", ylabel="1 / ridge", yscale="log")
figure.tight_layout()
