"""Plugins that are wrong in one way each, and the name of the property that says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bltoolbox.config.registry import load_registry
from bltoolbox.testing.conformance import BUILT, IMPORTED, check_component, properties_of

HEAD = '''
"""A plugin with one component."""
import math, random
from dataclasses import dataclass, replace
import torch
from torch import Tensor
from bltoolbox.plugin import *

@hookimpl
def blt_components():
    return [Component("{kind}", "mine", f"{{__name__}}:Mine", "Wrong.")]

'''

RIDGE = '''
class Ridge(Regularizer):
    """R = e^θ/4 Σ x⁴ + e^θ/2 Σ (x_p − x_{p+1})²"""
    def init_params(self, shape, generator):
        return {"log_weight": torch.zeros(1, dtype=torch.float64)}
    def energy(self, theta, x):
        difference = x[..., 1:] - x[..., :-1]
        return theta["log_weight"].exp() * (x.pow(4).flatten(1).sum(1) / 4 + difference.square().flatten(1).sum(1) / 2)
'''

DESCENT = '''
@dataclass(frozen=True)
class State:
    x: Tensor
    residual: Tensor

class Descent(LowerSolver):
    """Gradient descent."""
    exact_residual = True
    def init(self, lower, x0, kept):
        return State(x0, lower.residual(x0))
    def step(self, lower, state):
        x = state.x - lower.gradient(state.x) / expand(lower.lipschitz, state.x)
        return State(x, lower.residual(x))
'''

PAIRS = '''
class Pairs(Sampler):
    """Two at a time, uniformly."""
    def init(self, m, seed):
        return {"m": m, "seed": seed, "k": 0}
    def next(self, state):
        generator = keyed_generator("pairs", state["seed"], state["k"])
        ids = torch.randperm(state["m"], generator=generator)[:2].tolist()
        return Batch(ids, [state["m"] / 2] * 2), dict(state) | {"k": state["k"] + 1}
'''

SCORES = '''
class Scores(Sampler):
    """One at a time, the more often the larger its loss was."""
    def init(self, m, seed):
        return {"m": m, "seed": seed, "k": 0, "scores": torch.ones(m, dtype=torch.float64)}
    def next(self, state):
        p = self.probabilities(state)
        place = torch.rand(1, dtype=torch.float64, generator=keyed_generator("scores", state["seed"], state["k"]))
        i = min(int(torch.searchsorted(p.cumsum(0), place, right=True)), state["m"] - 1)
        return Batch([i], [1 / float(p[i])]), dict(state) | {"k": state["k"] + 1}
    def observe(self, state, batch, seen):
        scores = state["scores"].clone()
        scores[list(batch.ids)] = 0.2 + seen["loss"].clamp_max(1)
        return dict(state) | {"scores": scores}
    def probabilities(self, state):
        return state["scores"] / state["scores"].sum()
'''

GAIN = '''
class LearnedGain(Operator):
    """A = e^θ, with the penalty θ² + θ."""
    def init_params(self, shape, generator):
        return {"log_gain": torch.full((1,), 0.3, dtype=torch.float64)}
    def apply(self, x, theta, context):
        return theta["log_gain"].exp() * x if theta else 1.2 * x
    def adjoint(self, y, theta, context):
        return self.apply(y, theta, context)
    def penalty(self, theta):
        return (theta["log_gain"].square() + theta["log_gain"]).sum()
'''

SHIFT = '''
class Shift(Operator):
    """Every image moved by one pixel, zeros coming in, and halved."""
    def apply(self, x, theta, context):
        return torch.nn.functional.pad(x, (1, -1)) / 2
    def adjoint(self, y, theta, context):
        return torch.nn.functional.pad(y, (-1, 1)) / 2
    def start(self, y, theta, context):
        return 2 * y
    def spectrum(self, theta, shape, context):
        return 0.0, 0.25
'''

PLAIN = '''
class Plain(UpperOptimizer):
    """A fixed step."""
    def init(self, theta):
        return {"k": 0}
    def step(self, theta, oracle, state):
        z = oracle.hypergradient(theta, Accuracy(0.1), Accuracy(0.1))
        moved = {name: value - 0.1 * z.gradient[name] for name, value in theta.items()}
        return Step(oracle.project(moved), {"k": state["k"] + 1}, z.value.value, penalty=z.value.penalty)
'''

NEUMANN = '''
class Series(HypergradientEstimator):
    """A Neumann series, as long as it takes."""
    most = 2000
    def keeps(self, lower, upper):
        return {"adjoint": lower.mu.new_empty((0, *lower.shape))}
    def estimate(self, ask):
        lower, x, tol = ask.lower, ask.solution, ask.tol
        system, rhs = lower.linearize(x), ask.upper.gradient(x)
        q = ask.memory.get("adjoint", torch.zeros_like(rhs))
        count = torch.zeros_like(tol, dtype=torch.long)
        for _ in range(self.most):
            r = rhs - system.hvp(q)
            running = norm(r) > tol
            if not bool(running.any()):
                break
            q = q + expand(running / lower.lipschitz, r) * r
            count += running
        z = {name: -part for name, part in lower.mixed(x, q, ask.weights).items()}
        for name, part in ask.upper.theta_gradient(x, ask.weights).items():
            z[name] = z[name] + part
        return Estimate(z, norm(rhs - system.hvp(q)), count, adjoint=q, memory={"adjoint": q})
'''

GRAYS = '''
class Grays(Data):
    """Gray images."""
    def __len__(self):
        return 4
    def clean(self, ids):
        return torch.stack([torch.full((1, 6, 6), (id + 1) / 5) for id in ids])
'''

SOFT = '''
class Soft(DataTerm):
    """d = e^θ (√((t − y)² + 0.09) − 0.3)"""
    def init_params(self, shape, generator):
        return {"log_weight": torch.zeros(1, dtype=torch.float64)}
    def value(self, theta, t, y):
        return theta["log_weight"].exp() * (((t - y).square() + 0.09).sqrt() - 0.3).flatten(1).sum(1)
    def gradient(self, theta, t, y):
        return theta["log_weight"].exp() * (t - y) / ((t - y).square() + 0.09).sqrt()
    def curvature(self, theta, t, y):
        return theta["log_weight"].exp() * 0.09 * ((t - y).square() + 0.09).pow(-1.5)
    def spectrum(self, theta, y):
        return 0.0, theta["log_weight"].exp() / 0.3
    def third(self, theta, y):
        return theta["log_weight"].exp() * 1.5 / 1.25**2.5 / 0.09
    def majorant(self, theta, t, y):
        return theta["log_weight"].exp() * ((t - y).square() + 0.09).rsqrt()
'''

SQUARES = '''
class Squares(DataTerm):
    """d = e^θ (t − y)²/2 for counts."""
    quadratic = rescales = True
    def check_measurements(self, y):
        return "counts must not be negative" if bool((y < 0).any()) else None
    def init_params(self, shape, generator):
        return {"log_weight": torch.zeros(1, dtype=torch.float64)}
    def value(self, theta, t, y):
        return theta["log_weight"].exp() / 2 * (t - y).square().flatten(1).sum(1)
    def gradient(self, theta, t, y):
        return theta["log_weight"].exp() * (t - y)
    def curvature(self, theta, t, y):
        return theta["log_weight"].exp().expand_as(t)
    def prox(self, theta, t, y, step):
        weight = step * theta["log_weight"].exp()
        return (t + weight * y) / (1 + weight)
'''

ROBUST = '''
@dataclass(frozen=True)
class Judge(Upper):
    """g = e^θ Σ (√(r² + 0.01) − 0.1), r = x − x*; the columns of even and of odd number are its two blocks."""
    truth: Tensor
    theta: dict
    kept: tuple = (1.0, 1.0)
    infimum = 0.0
    blocks = 2
    @property
    def lipschitz(self): return float(self.weight) / 0.1
    @property
    def weight(self): return self.theta["loss.log_weight"].exp()
    def mask(self, x):
        mask = torch.ones_like(x)
        mask[..., 0::2] = self.kept[0]
        mask[..., 1::2] = self.kept[1]
        return mask
    def value(self, x):
        r = (x - self.truth).double()
        return self.weight * (self.mask(r) * ((r.square() + 0.01).sqrt() - 0.1)).flatten(1).sum(1)
    def gradient(self, x):
        r = x - self.truth
        return (self.weight * self.mask(r) * r / (r.square() + 0.01).sqrt()).to(x.dtype)
    def theta_gradient(self, x, weights):
        return {"loss.log_weight": (weights @ self.value(x)).reshape(1)}
    def take(self, index): return replace(self, truth=self.truth[index])
    def block(self, j): return replace(self, kept=((2.0, 0.0), (0.0, 2.0))[int(j[0])])

class Robust(UpperLoss):
    """A smoothed absolute error."""
    upper = Judge
    def bind(self, sample, forward):
        if sample.truth is None:
            raise ValueError("it compares with true images, of which there are none")
        return self.upper(sample.truth, {"loss.log_weight": torch.zeros(1, dtype=torch.float64)})
'''

WINDOW = '''
class Window(Operator):
    """y = e^θ m x, with a mask m of each image that the data must bring."""
    def init_params(self, shape, generator):
        return {"log_gain": torch.zeros(1, dtype=torch.float64)}
    def prepare(self, theta):
        return {**theta, "gain": theta["log_gain"].exp()} if theta else {}
    def example_contexts(self, shape, count):
        masks = torch.ones(count, *shape[1:], dtype=torch.float64)
        for k, mask in enumerate(masks):
            mask[: k % 2, :] = 0
        return [{"mask": masks}]
    def apply(self, x, theta, context):
        return x * context["mask"].unsqueeze(1) * theta.get("gain", 1.0)
    def adjoint(self, y, theta, context): return self.apply(y, theta, context)
    def measured(self, y, context): return context["mask"].unsqueeze(1)
    def spectrum(self, theta, shape, context):
        gain = float(theta.get("gain", 1.0)) ** 2
        return gain * context["mask"].amin((1, 2)), gain
'''

HALVES = '''
@dataclass(frozen=True)
class Fit(Upper):
    forward: object
    target: Tensor
    infimum = 0.0
    @property
    def lipschitz(self): return 2 * self.forward.squared_norm
    def value(self, x): return (self.forward(x) - self.target).double().square().flatten(1).sum(1)
    def gradient(self, x): return 2 * self.forward.adjoint(self.forward(x) - self.target)
    def take(self, index): return Fit(self.forward.take(index), self.target[index])

class Halves(UpperLoss):
    """The misfit to measurements with other noise."""
    needs_truth = False
    noise_gain = math.sqrt(2)
    def split(self, y, level, generator):
        n = level * torch.randn(y.shape, dtype=y.dtype, generator=generator)
        return y + n, y - n
    def bind(self, sample, forward): return Fit(forward, sample.target)
'''

WAVES = '''
class Waves(Noise):
    """y = t + 0.1 √2 cos u, u uniform."""
    level = 0.1
    def sample(self, t, generator):
        u = 2 * math.pi * torch.rand(t.shape, dtype=t.dtype, generator=generator)
        return t + self.level * math.sqrt(2) * u.cos()
    def mean(self, t): return t
    def variance(self, t): return torch.full_like(t, self.level**2)
'''

FITS = '''
@dataclass(frozen=True)
class FitLower(Lower):
    """h = 1/n Σ_k ½(⟨a_k, x⟩ − b_k)² + ½e^θ‖x‖², one block for each row."""
    ids: Tensor
    theta: dict
    counter: Counter
    a: Tensor
    b: Tensor
    bounded = True
    @property
    def spectrum(self): return torch.linalg.eigvalsh(self.a.mT @ self.a / self.a.shape[1]).clamp_min(0)
    @property
    def mu(self): return self.spectrum[:, 0] * (1 - 1e-6) + self.theta["log_weight"].detach().exp()
    @property
    def lipschitz(self): return self.spectrum[:, -1] * (1 + 1e-6) + self.theta["log_weight"].detach().exp()
    def start(self): return torch.zeros_like(self.a[:, 0])
    def energy(self, x):
        misfit = (self.a @ x.unsqueeze(-1)).squeeze(-1) - self.b
        return 0.5 * misfit.square().mean(1) + 0.5 * self.theta["log_weight"].exp() * x.square().sum(1)
    def take(self, index): return replace(self, ids=self.ids[index], a=self.a[index], b=self.b[index])
    @property
    def blocks(self): return self.a.shape[1]
    def block(self, j):
        rows = torch.arange(len(self.a))
        return replace(self, a=self.a[rows, j].unsqueeze(1), b=self.b[rows, j].unsqueeze(1))

@dataclass(frozen=True)
class FitUpper(Upper):
    """g = ½‖x − t‖² + ½θ²"""
    theta: dict
    target: Tensor
    lipschitz = 1.0
    infimum = 0.0
    def value(self, x):
        return 0.5 * (x - self.target).double().square().sum(1) + 0.5 * self.theta["log_weight"].double().square()
    def theta_gradient(self, x, weights): return {"log_weight": weights.sum() * self.theta["log_weight"]}
    def take(self, index): return replace(self, target=self.target[index])

class Fits(Problem):
    """Small fits."""
    metrics = {"mse": Metric("mse", "MSE", higher=False)}
    lower, upper = FitLower, FitUpper
    def init_params(self, generator):
        return {"log_weight": torch.full((), -0.3, dtype=torch.float64)}
    def draw(self, split):
        generator = keyed_generator("fits", split)
        return torch.randn(4, 5, 4, dtype=torch.float64, generator=generator)
    def tasks(self, split, like):
        drawn = self.draw(split).to(like)
        rows = {"a": drawn[..., :3], "b": drawn[..., 3], "target": drawn[:, 0, :3]}
        return TensorTasks(rows, self.bind, (3,), {"mse": self.mse})
    def bind(self, ids, theta, counter, rows):
        return self.lower(ids, theta, counter, rows["a"], rows["b"]), self.upper(theta, rows["target"])
    def mse(self, rows, x): return (x - rows["target"]).square().mean(1)
'''

#: By kind; a second example of a kind has a word after it.
BASES = {
    "problem": ("Fits", FITS),
    "data_term": ("Soft", SOFT),
    "data_term squares": ("Squares", SQUARES),
    "upper_loss": ("Robust", ROBUST),
    "upper_loss of measurements": ("Halves", HALVES),
    "noise": ("Waves", WAVES),
    "regularizer": ("Ridge", RIDGE),
    "lower_solver": ("Descent", DESCENT),
    "sampler": ("Pairs", PAIRS),
    "operator": ("Shift", SHIFT),
    "operator window": ("Window", WINDOW),
    "operator learned": ("LearnedGain", GAIN),
    "sampler observing": ("Scores", SCORES),
    "upper_optimizer": ("Plain", PLAIN),
    "hypergradient": ("Series", NEUMANN),
    "data": ("Grays", GRAYS),
}

#: Kind, what the subclass does wrong, the property that must fail, and a part of the sentence.
WRONG = {
    "problem that begins at random": (
        "problem",
        "def init_params(self, generator): return {'log_weight': torch.rand((), dtype=torch.float64)}",
        "begins with the same finite parameters every time",
        "draw only from the given generator",
    ),
    "problem whose projection moves admissible parameters": (
        "problem",
        "def project(self, theta): return {name: 0.9 * value for name, value in theta.items()}",
        "projects onto admissible parameters",
        "a projection does not move what is already admissible",
    ),
    "problem of one dtype": (
        "problem",
        "def tasks(self, split, like): return super().tasks(split, like.double())",
        "has tasks of the requested dtype, with an x of their shape",
        "convert to the dtype of `like`",
    ),
    "problem with a loss in float32": (
        "problem",
        "class upper(FitUpper):\n        def value(self, x): return super().value(x).to(x.dtype)",
        "has tasks of the requested dtype, with an x of their shape",
        "convert with .double() before the sum",
    ),
    "problem with other tasks each time": (
        "problem",
        "def draw(self, split): return torch.randn(4, 5, 4, dtype=torch.float64)",
        "draws the same tasks whenever it is asked",
        "differs between two objects with the same options",
    ),
    "problem that counts its calls": (
        "problem",
        "calls = 0\n"
        "    def tasks(self, split, like):\n"
        "        self.calls += 1\n"
        "        return super().tasks(split, like)\n"
        "    def draw(self, split): return super().draw(split) * self.calls",
        "keeps no state between calls",
        "whatever evolves must be returned",
    ),
    "problem whose energy is a mean over the batch": (
        "problem",
        "class lower(FitLower):\n        def energy(self, x): return super().energy(x) / len(x)",
        "treats each task for itself",
        "sums and means must not run over the first dimension",
    ),
    "problem whose take forgets the loss": (
        "problem",
        "class upper(FitUpper):\n        def take(self, index): return replace(self, target=self.target[: len(index)])",
        "treats each task for itself",
        "by take() differs",
    ),
    "problem with a wrong gradient": (
        "problem",
        "class lower(FitLower):\n        def gradient(self, x): return 2 * super().gradient(x)",
        "has the derivatives in x of both levels",
        "gradient() of the lower level along a random direction",
    ),
    "problem with a wrong gradient of its loss": (
        "problem",
        "class upper(FitUpper):\n        def gradient(self, x): return x - self.target + 1",
        "has the derivatives in x of both levels",
        "gradient() of the loss along a random direction",
    ),
    "problem with a wrong mixed derivative": (
        "problem",
        "class lower(FitLower):\n        def pairing(self, theta, x, q): return 3 * super().pairing(theta, x, q)",
        "has the derivatives in θ of both levels",
        "mixed()",
    ),
    "problem whose loss forgets θ": (
        "problem",
        "class upper(FitUpper):\n        def theta_gradient(self, x, weights): return {}",
        "has the derivatives in θ of both levels",
        "theta_gradient() of the loss",
    ),
    "problem that claims too much convexity": (
        "problem",
        "class lower(FitLower):\n        @property\n        def mu(self): return self.lipschitz",
        "has valid bounds of its curvature",
        "it must be a lower bound at every x",
    ),
    "problem with a small Lipschitz constant": (
        "problem",
        "class lower(FitLower):\n        @property\n        def lipschitz(self): return super().mu",
        "has valid bounds of its curvature",
        "it must be an upper bound at every x",
    ),
    "problem with a loss steeper than it says": (
        "problem",
        "class upper(FitUpper):\n        lipschitz = 0.5",
        "has valid bounds of its curvature",
        "lipschitz of the loss is 0.5",
    ),
    "problem whose blocks add up": (
        "problem",
        "class lower(FitLower):\n"
        "        def block(self, j):\n"
        "            part = super().block(j)\n"
        "            return replace(part, a=part.a / self.blocks**0.5, b=part.b / self.blocks**0.5)",
        "is the mean of its blocks",
        "the mean over all blocks, not their sum",
    ),
    "problem with one metric for all tasks": (
        "problem",
        "def mse(self, rows, x): return (x - rows['target']).square().mean().expand(len(x))",
        "measures its metrics of each task",
        "of a task alone differs from its value in a batch",
    ),
    "problem with a metric of another name": (
        "problem",
        "metrics = {'error': Metric('mse', 'MSE')}",
        "measures its metrics of each task",
        "must be a Metric with the name 'error'",
    ),
    "problem whose energy does not see all of θ": (
        "problem",
        "def bind(self, ids, theta, counter, rows):\n"
        "        lower, upper = super().bind(ids, theta, counter, rows)\n"
        "        return replace(lower, b=rows['b'] * theta['log_weight'].detach()), upper",
        "has hypergradients that agree with differences of f",
        "by central differences",
    ),
    "gradient with a wrong factor": (
        "regularizer",
        "def gradient(self, theta, x): return 2 * super().gradient(theta, x)",
        "gradient matches finite differences of the energy",
        "it is 2 times too large, so a constant factor is wrong",
    ),
    "wrong Hessian": (
        "regularizer",
        "def linearize(self, theta, x): hvp = super().linearize(theta, x); return lambda v: hvp(v) + v",
        "Hessian products match finite differences of the gradient",
        "from differences of the gradient along v",
    ),
    "Hessian that is not symmetric": (
        "regularizer",
        "def linearize(self, theta, x): hvp = super().linearize(theta, x); return lambda v: hvp(v) + v.roll(1, 3)",
        "Hessian products are linear and symmetric, and can be split",
        "⟨Hv, q⟩",
    ),
    "wrong mixed derivative": (
        "regularizer",
        "def pairing(self, theta, x, q): return super().pairing({n: v.detach() for n, v in theta.items()}, x, q)"
        " + 0 * theta['log_weight'].sum()",
        "the θ-derivative of pairing matches finite differences",
        "log_weight",
    ),
    "energy that is a mean over the batch": (
        "regularizer",
        "def energy(self, theta, x): return super().energy(theta, x) / len(x)",
        "a sample's result does not depend on its batch",
        "sample 0 alone",
    ),
    "energy of the whole batch": (
        "regularizer",
        "def energy(self, theta, x): return super().energy(theta, x).sum()",
        "energy is one number per sample",
        "expected shape (3,), got ()",
    ),
    "lying Lipschitz constant": (
        "regularizer",
        "def lipschitz(self, theta, shape): return 0.5",
        "lipschitz is a valid bound",
        "lipschitz(θ, (3, 12, 14)) is 0.5, but at",
    ),
    "lying strong convexity": (
        "regularizer",
        "def strong_convexity(self, theta, shape): return 0.5",
        "strong_convexity is a valid bound",
        "strong_convexity is 0.5",
    ),
    "not convex": (
        "regularizer",
        "def energy(self, theta, x): return -super().energy(theta, x)",
        "convex along segments",
        "declare convex = False",
    ),
    "majorant below": (
        "regularizer",
        "def analyse(self, theta, x): return x\n"
        "    def synthesise(self, theta, t, shape): return t\n"
        "    def majorant(self, theta, t): return theta['log_weight'].exp() * t.square()\n"
        "    def energy(self, theta, x): return theta['log_weight'].exp() * x.pow(4).flatten(1).sum(1) / 4",
        "analyse, synthesise and majorant match the energy",
        "the majorant is not an upper bound",
    ),
    "upgrade of a θ that is not old": (
        "regularizer",
        "def upgrade(self, theta): return {'weight': theta['log_weight'].exp()}",
        "upgrade leaves a current θ unchanged",
        "upgrade(θ) has the parameters ['weight'] instead of ['log_weight']",
    ),
    "gradient in float32": (
        "regularizer",
        "def gradient(self, theta, x): return super().gradient(theta, x).float()",
        "float32 and float64 are kept",
        "expected float64 like the input, got float32",
    ),
    "regularizer that mutates x": (
        "regularizer",
        "def energy(self, theta, x):\n"
        "        if not x.requires_grad: x.mul_(1.0001)\n"
        "        return super().energy(theta, x)",
        "inputs are left untouched",
        "energy changed its argument x in place",
    ),
    "parameters from the global generator": (
        "regularizer",
        "def init_params(self, shape, generator): return {'log_weight': torch.randn(1, dtype=torch.float64)}",
        "initial parameters are float64 and depend only on the generator",
        "draw only from the given generator",
    ),
    "a projection that goes on": (
        "regularizer",
        "def project(self, theta): return {name: 0.5 * value for name, value in theta.items()}",
        "project and project_gradient are projections",
        "project(project(θ))",
    ),
    "images too small": (
        "regularizer",
        "def energy(self, theta, x): return super().energy(theta, x[:, :, 4:, 4:]) + 0 * x[0, 0, 5, 5]",
        "check refuses images that it cannot handle",
        "check accepts images of 3×4×4",
    ),
    "solver that depends on its batch": (
        "lower_solver",
        "def step(self, lower, state):\n"
        "        g = lower.gradient(state.x)\n"
        "        x = state.x - g / lower.lipschitz.max() * (0.5 + 0.5 * lower.residual(state.x).max()"
        " / (lower.residual(state.x).max() + lower.residual(state.x).sum()))\n"
        "        return State(x, lower.residual(x))",
        "a sample's result does not depend on its batch",
        "must be per sample",
    ),
    "solver that stops short": (
        "lower_solver",
        "def step(self, lower, state): return State(state.x, 0.5 * state.residual)",
        "the residual is the gradient norm at the same x",
        "after 1 steps",
    ),
    "solver of another problem": (
        "lower_solver",
        "def init(self, lower, x0, kept): return State(x0, norm(lower.gradient(x0) + 1e-3))\n"
        "    def step(self, lower, state):\n"
        "        x = state.x - (lower.gradient(state.x) + 1e-3) / expand(lower.lipschitz, state.x)\n"
        "        return State(x, norm(lower.gradient(x) + 1e-3))",
        "reaches its tolerance on a quadratic",
        "recomputed from x",
    ),
    "solver that mutates its state": (
        "lower_solver",
        "def step(self, lower, state): after = super().step(lower, state); state.x.copy_(after.x); return after",
        "inputs are left untouched",
        "in place",
    ),
    "random solver": (
        "lower_solver",
        "def step(self, lower, state):\n"
        "        x = state.x - random.uniform(0.5, 1) * lower.gradient(state.x) / expand(lower.lipschitz, state.x)\n"
        "        return State(x, lower.residual(x))",
        "same input, same result",
        "took different steps",
    ),
    "a constraint that is not kept": (
        "lower_solver",
        "handles_constraint = True",
        "iterates stay in the constraint",
        "pass every iterate through lower.project",
    ),
    "E[v] ≠ 1": (
        "sampler",
        "def next(self, state): batch, after = super().next(state); return Batch(batch.ids, [1.0, 1.0]), after",
        "E[v_i] = 1 at each step",
        "has the mean 0.333",
    ),
    "sampler that prefers some": (
        "sampler",
        "def next(self, state):\n"
        "        batch, after = super().next(state)\n"
        "        return Batch([min(i, 4) for i in set(batch.ids)], batch.weights[:len(set(batch.ids))]), after",
        "E[v_i] = 1 at each step",
        "v of sample",
    ),
    "sampler with a state of its own": (
        "sampler",
        "calls = 0\n"
        "    def next(self, state): self.calls += 1; return super().next(dict(state) | {'k': self.calls})",
        "the state survives saving, and draws continue as before",
        "must be in the state, not in self",
    ),
    "sampler that cannot be saved": (
        "sampler",
        "def init(self, m, seed): return super().init(m, seed) | {'f': random.Random(seed)}",
        "the state survives saving, and draws continue as before",
        "cannot be saved",
    ),
    "sampler that ignores its seed": (
        "sampler",
        "def init(self, m, seed): return super().init(m, random.randrange(10**9))",
        "same seed, same draws",
        "different batches",
    ),
    "wrong adjoint": (
        "operator",
        "def adjoint(self, y, theta, context): return self.apply(y, theta, context)",
        "adjoint is exact",
        "⟨x, Aᵀy⟩ =",
    ),
    "affine operator": (
        "operator",
        "def apply(self, x, theta, context): return super().apply(x, theta, context) + 0.1",
        "linear in x",
        "A must be linear",
    ),
    "random operator": (
        "operator",
        "def apply(self, x, theta, context): return super().apply(x, theta, context) * random.uniform(0.9, 1)",
        "same input, same result",
        "differed between two calls",
    ),
    "operator that mutates x": (
        "operator",
        "def apply(self, x, theta, context): return super().apply(x.mul_(0.5), theta, context)",
        "inputs are left untouched",
        "apply changed its argument x in place",
    ),
    "a norm instead of its square": (
        "operator",
        "def spectrum(self, theta, shape, context): return 0.0, 0.1",
        "spectrum gives valid bounds",
        "spectrum claims AᵀA ≤ 0.1, but ‖A‖² is 0.25",
    ),
    "an operator that is more definite than it is": (
        "operator",
        "def spectrum(self, theta, shape, context): return 0.1, 0.25",
        "spectrum gives valid bounds",
        "spectrum claims 0.1 ≤ AᵀA, but its smallest eigenvalue is",
    ),
    "a mask of the wrong entries": (
        "operator",
        "def measured(self, y, context): mask = torch.ones_like(y); mask[..., -1] = 0; return mask",
        "measured is a mask",
        "A x must be zero where nothing is measured",
    ),
    "a mask that is no mask": (
        "operator",
        "def measured(self, y, context): return torch.full_like(y, 0.5)",
        "measured is a mask",
        "must be 1 where y contains measurements and 0 elsewhere",
    ),
    "the mask of the first image for all": (
        "operator window",
        "def adjoint(self, y, theta, context):\n"
        "        return super().adjoint(y, theta, {'mask': context['mask'][:1].expand(len(y), -1, -1)})",
        "a sample's result does not depend on its batch",
        "samples and their context must not be mixed",
    ),
    "bounds of the first image for all": (
        "operator window",
        "def spectrum(self, theta, shape, context):\n"
        "        return float(super().spectrum(theta, shape, context)[0][0]), None",
        "spectrum gives valid bounds",
        "with mask in the context claims",
    ),
    "a bound of another number of images": (
        "operator window",
        "def spectrum(self, theta, shape, context): return torch.zeros(2), None",
        "spectrum gives valid bounds",
        "must give a number, one per sample, or None",
    ),
    "an operator that writes to its context": (
        "operator window",
        "def start(self, y, theta, context): context['mask'].mul_(0.5); return y",
        "inputs are left untouched",
        "start changed its argument context in place",
    ),
    "an operator whose gain is detached": (
        "operator window",
        "def prepare(self, theta):\n"
        "        return {**theta, 'gain': theta['log_gain'].detach().exp()} if theta else {}",
        "apply is differentiable in θ",
        "does not depend on 'log_gain'",
    ),
    "an operator that is not differentiated right": (
        "operator window",
        "def prepare(self, theta):\n"
        "        gain = theta['log_gain'].exp() if theta else torch.ones(1)\n"
        "        return {**theta, 'gain': 2 * gain - gain.detach()} if theta else {}",
        "apply is differentiable in θ",
        "from finite differences, got",
    ),
    "operator parameters in single precision": (
        "operator window",
        "def init_params(self, shape, generator): return {'log_gain': torch.zeros(1)}",
        "same input, same result",
        "float64 CPU tensors",
    ),
    "contexts that are not a list": (
        "operator window",
        "def example_contexts(self, shape, count): return super().example_contexts(shape, count)[0]",
        "same input, same result",
        "example_contexts must return a list of mappings",
    ),
    "operator that reads what no example has": (
        "operator window",
        "def example_contexts(self, shape, count): return [{}]",
        "its example contexts have what it reads",
        "it reads 'mask' from the context, which its example contexts do not have; implement example_contexts",
    ),
    "hypergradient of the wrong sign": (
        "hypergradient",
        "def estimate(self, ask):\n"
        "        found = super().estimate(ask)\n"
        "        return replace(found, gradient={n: -z for n, z in found.gradient.items()})",
        "points downhill",
        "cosine of z and ∇f is -1",
    ),
    "hypergradient that forgets the loss's own derivative": (
        "hypergradient",
        "def estimate(self, ask):\n"
        "        class Plain(type(ask.upper)):\n"
        "            def theta_gradient(self, x, weights): return {}\n"
        "        upper = Plain(**vars(ask.upper))\n"
        "        return super().estimate(replace(ask, upper=upper))",
        "∂_θ g is part of z",
        "add upper.theta_gradient(x, weights) to z",
    ),
    "hypergradient that is a mean": (
        "hypergradient",
        "def estimate(self, ask): return super().estimate(replace(ask, weights=ask.weights / len(ask.weights)))",
        "z is the weighted sum over samples, whatever the batch",
        "not their mean",
    ),
    "biased hypergradient": (
        "hypergradient",
        "def estimate(self, ask):"
        " return super().estimate(replace(ask, effort=Accuracy(max(ask.effort.tol, 0.1))))",
        "the error shrinks with the tolerance",
        "asked for a residual of 0.001, it stops at",
    ),
    "hypergradient that is three times too large": (
        "hypergradient",
        "def estimate(self, ask):\n"
        "        found = super().estimate(ask)\n"
        "        return replace(found, gradient={n: 3 * z for n, z in found.gradient.items()})",
        "equals the closed form",
        "z of a quadratic problem",
    ),
    "biased hypergradient that is three times too large in its limit": (
        "hypergradient",
        "exact = False\n"
        "    limit = BiasLimit({'terms': (5, 20, 80)})\n"
        "    def __init__(self, terms: int = 50) -> None: self.most = terms\n"
        "    def estimate(self, ask):\n"
        "        found = super().estimate(ask)\n"
        "        return replace(found, gradient={n: 3 * z for n, z in found.gradient.items()})",
        "its bias vanishes in the declared limit",
        "the limit is declared in `limit` of the class",
    ),
    "biased hypergradient that ignores the weights": (
        "hypergradient",
        "exact = False\n"
        "    def estimate(self, ask): return super().estimate(replace(ask, weights=torch.ones_like(ask.weights)))",
        "z is linear in the weights",
        "z = Σ weights_i z_i",
    ),
    "hypergradient whose linear system has the weights": (
        "hypergradient",
        "def estimate(self, ask):\n"
        "        return super().estimate(replace(ask, weights=ask.weights.square() / ask.weights.sum()))",
        "z is linear in the weights",
        "the weights scale each z_i",
    ),
    "hypergradient with its adjoint in self": (
        "hypergradient",
        "last = None\n"
        "    def keeps(self, lower, upper): return {}\n"
        "    def estimate(self, ask):\n"
        "        start = self.last if self.last is not None and self.last.shape == ask.solution.shape else None\n"
        "        memory = {} if start is None else {'adjoint': start}\n"
        "        found = super().estimate(replace(ask, memory=memory))\n"
        "        self.last = found.adjoint\n"
        "        return replace(found, memory={})",
        "keeps no state between calls",
        "self.last",
    ),
    "hypergradient with its adjoint in its class": (
        "hypergradient",
        "last = {}\n"
        "    def keeps(self, lower, upper): return {}\n"
        "    def estimate(self, ask):\n"
        "        start = Mine.last.get(ask.solution.shape)\n"
        "        memory = {} if start is None else {'adjoint': start}\n"
        "        found = super().estimate(replace(ask, memory=memory))\n"
        "        Mine.last[ask.solution.shape] = found.adjoint\n"
        "        return replace(found, memory={})",
        "keeps no state between calls",
        "state is shared between objects",
    ),
    "hypergradient with a memory that it does not declare": (
        "hypergradient",
        "def keeps(self, lower, upper): return {}",
        "memory is what keeps declares",
        "only these come back in the next call",
    ),
    "optimizer that climbs": (
        "upper_optimizer",
        "def step(self, theta, oracle, state):\n"
        "        one = super().step(theta, oracle, state)\n"
        "        return replace(one, theta={n: 2 * v - one.theta[n] for n, v in theta.items()})",
        "descends on a quadratic",
        "check its sign",
    ),
    "optimizer that keeps quiet about the penalty": (
        "upper_optimizer",
        "def step(self, theta, oracle, state):\n"
        "        return replace(super().step(theta, oracle, state), penalty=None)",
        "reports the penalty of its loss",
        "pass penalty=value.penalty",
    ),
    "a penalty for each entry": (
        "regularizer",
        "def penalty(self, theta): return theta['log_weight'].exp()",
        "penalty is a finite scalar with the right derivative",
        "penalty of float32 θ: expected shape (), got (1,)",
    ),
    "a penalty that is detached": (
        "data_term",
        "def penalty(self, theta): return theta['log_weight'].detach().square().sum()",
        "penalty is a finite scalar with the right derivative",
        "penalty is not differentiable in θ",
    ),
    "a penalty that is detached in part": (
        "operator learned",
        "def penalty(self, theta): return super().penalty(theta) + theta['log_gain'].detach().sum()",
        "penalty is a finite scalar with the right derivative",
        "a part of it may not depend on θ",
    ),
    "a penalty that is infinite": (
        "operator learned",
        "def penalty(self, theta): return super().penalty(theta) / 0",
        "penalty is a finite scalar with the right derivative",
        "it must be finite",
    ),
    "a penalty in float32": (
        "operator learned",
        "def penalty(self, theta): return super().penalty(theta).float()",
        "penalty is a finite scalar with the right derivative",
        "expected float64",
    ),
    "a box around nothing": (
        "operator learned",
        "def project(self, theta): return {n: v.clamp(0.5, 1) for n, v in theta.items()}",
        "project and project_gradient are projections",
        "the initial θ must be admissible",
    ),
    "a data term that scales gradients": (
        "data_term",
        "def project_gradient(self, gradient): return {n: 0.5 * v for n, v in gradient.items()}",
        "project and project_gradient are projections",
        "projecting a second time must change nothing",
    ),
    "a data term that changes what it reads": (
        "data_term",
        "def upgrade(self, theta): return {n: v + 1 for n, v in theta.items()}",
        "upgrade leaves a current θ unchanged",
        "it must change only the θ of earlier versions",
    ),
    "weights by later scores": (
        "sampler observing",
        "def next(self, state):\n"
        "        batch, after = super().next(state)\n"
        "        later = self.observe(after, batch, {'loss': torch.ones(1, dtype=torch.float64)})\n"
        "        p = self.probabilities(later)\n"
        "        return Batch(batch.ids, [1 / float(p[i]) for i in batch.ids]), after",
        "E[v_i] = 1 at each step",
        "P must be fixed before the draw",
    ),
    "scores in self": (
        "sampler observing",
        "def observe(self, state, batch, seen):\n"
        "        self.state = super().observe(getattr(self, 'state', state), batch, seen)\n"
        "        return dict(state)\n"
        "    def probabilities(self, state): return super().probabilities(getattr(self, 'state', state))",
        "the state survives saving, and draws continue as before",
        "must be in the state, not in self",
    ),
    "scores in place": (
        "sampler observing",
        "def observe(self, state, batch, seen):\n"
        "        state['scores'][list(batch.ids)] = seen['loss'] + 1\n"
        "        return dict(state)",
        "next and observe leave their state untouched",
        "observe changed its argument state in place",
    ),
    "wants what nobody has": (
        "sampler observing",
        "wants = 'psnr'\n"
        "    def observe(self, state, batch, seen): return super().observe(state, batch, {'loss': seen['psnr']})",
        "observe takes what it wants, in the order of the batch",
        "wants must be one of loss, slope, gradient",
    ),
    "optimizer in place": (
        "upper_optimizer",
        "def step(self, theta, oracle, state):\n"
        "        one = super().step(theta, oracle, state)\n"
        "        for n, v in theta.items(): v.copy_(one.theta[n])\n"
        "        return one",
        "θ and state are left untouched",
        "step changed its argument theta in place",
    ),
    "optimizer that goes on without a budget": (
        "upper_optimizer",
        "def step(self, theta, oracle, state):\n"
        "        try: return super().step(theta, oracle, state)\n"
        "        except Exception: return Step(dict(theta), dict(state), 0.0)",
        "lets BudgetExhausted propagate",
        "the core then ends the run",
    ),
    "optimizer without a projection": (
        "upper_optimizer",
        "def step(self, theta, oracle, state):\n"
        "        oracle.project = lambda theta: dict(theta)\n"
        "        return super().step(theta, oracle, state)",
        "θ stays admissible",
        "oracle.project",
    ),
    "groups that are no text": (
        "data",
        "def group(self, id): return id",
        "has a length",
        "must return text or None",
    ),
    "data in 0 … 255": (
        "data",
        "def clean(self, ids): return 255 * super().clean(ids)",
        "images are float32 in their range",
        "divide by 255",
    ),
    "random crops": (
        "data",
        "def clean(self, ids): return super().clean(ids) * random.random()",
        "same id, same image",
        "no random crops",
    ),
    "data normalised by its batch": (
        "data",
        "def clean(self, ids): images = super().clean(ids); return images / images.max()",
        "an image does not depend on its batch",
        "clean([0]) differs",
    ),
    "data term of the whole batch": (
        "data_term",
        "def value(self, theta, t, y): return super().value(theta, t, y).sum()",
        "value is one number per sample",
        "expected shape (3,), got ()",
    ),
    "data term that ends at zero": (
        "data_term",
        "def value(self, theta, t, y): return super().value(theta, t, y) + 0 * t.sqrt().flatten(1).sum(1)",
        "defined for every t",
        "value is not finite at t",
    ),
    "random data term": (
        "data_term",
        "def value(self, theta, t, y): return super().value(theta, t, y) * random.uniform(0.9, 1)",
        "same input, same result",
        "value of the same t, y and θ differed",
    ),
    "data term that is a mean over the batch": (
        "data_term",
        "def gradient(self, theta, t, y): return super().gradient(theta, t, y) / len(t)",
        "a sample's result does not depend on its batch",
        "gradient of sample 0 alone",
    ),
    "data term in float32": (
        "data_term",
        "def curvature(self, theta, t, y): return super().curvature(theta, t, y).float()",
        "float32 and float64 are kept",
        "curvature of float64 measurements: expected float64 like the input, got float32",
    ),
    "data term that mutates t": (
        "data_term",
        "def value(self, theta, t, y):\n"
        "        if not t.requires_grad: t.mul_(1.0001)\n"
        "        return super().value(theta, t, y)",
        "inputs are left untouched",
        "value changed its argument t in place",
    ),
    "gradient that is t itself": (
        "data_term",
        "def gradient(self, theta, t, y): return t",
        "inputs are left untouched",
        "writing to the result of gradient changed its argument t",
    ),
    "slope with a wrong factor": (
        "data_term",
        "def gradient(self, theta, t, y): return 2 * super().gradient(theta, t, y)",
        "gradient matches finite differences of the value",
        "it is 2 times too large, so a constant factor is wrong",
    ),
    "value that is detached from t": (
        "data_term",
        "def value(self, theta, t, y): return super().value(theta, t.detach(), y)",
        "gradient matches finite differences of the value",
        "value is not differentiable in t",
    ),
    "curvature with a wrong factor": (
        "data_term",
        "def curvature(self, theta, t, y): return 3 * super().curvature(theta, t, y)",
        "curvature matches finite differences of the gradient",
        "it is 3 times too large, so a constant factor is wrong",
    ),
    "data term that mixes entries": (
        "data_term",
        "def gradient(self, theta, t, y): return super().gradient(theta, t + 0.1 * t.roll(1, -1), y)",
        "curvature matches finite differences of the gradient",
        "gradient of an entry changes with other entries of t",
    ),
    "slope that is detached from θ": (
        "data_term",
        "def gradient(self, theta, t, y):"
        " return super().gradient({n: v.detach() for n, v in theta.items()}, t, y)",
        "gradient is differentiable in t, y and θ",
        "autograd of gradient in θ['log_weight']: expected",
    ),
    "value that is detached from θ": (
        "data_term",
        "def value(self, theta, t, y): return super().value({n: v.detach() for n, v in theta.items()}, t, y)",
        "gradient is differentiable in t, y and θ",
        "autograd of value in θ['log_weight']: expected",
    ),
    "slope that is detached from y": (
        "data_term",
        "def gradient(self, theta, t, y): return super().gradient(theta, t, y.detach())",
        "gradient is differentiable in t, y and θ",
        "autograd of gradient in y",
    ),
    "a data term's parameters from the global generator": (
        "data_term",
        "def init_params(self, shape, generator): return {'log_weight': torch.randn(1, dtype=torch.float64)}",
        "initial parameters are float64 and depend only on the generator",
        "draw only from the given generator",
    ),
    "curvature above its spectrum": (
        "data_term",
        "def spectrum(self, theta, y): return 0.0, theta['log_weight'].exp()",
        "spectrum gives valid bounds",
        "but at t near y it is",
    ),
    "curvature below its spectrum": (
        "data_term",
        "def spectrum(self, theta, y): return torch.full((3,), 0.5, dtype=torch.float64), None",
        "spectrum gives valid bounds",
        "spectrum claims d'' ≥",
    ),
    "third derivative above its bound": (
        "data_term",
        "def third(self, theta, y): return 0.5 * super().third(theta, y)",
        "third is a valid bound",
        "third claims |d",
    ),
    "curvature for a majorant": (
        "data_term",
        "def majorant(self, theta, t, y): return self.curvature(theta, t, y)",
        "the majorant lies above the term",
        "may climb",
    ),
    "majorant that is too flat far away": (
        "data_term squares",
        "def majorant(self, theta, t, y): return 0.999 * theta['log_weight'].exp().expand_as(t)",
        "the majorant lies above the term",
        "above the parabola",
    ),
    "prox of twice the step": (
        "data_term squares",
        "def prox(self, theta, t, y, step): return super().prox(theta, t, y, 2 * step)",
        "prox minimises",
        "is not stationary",
    ),
    "data term that is concave": (
        "data_term",
        "def value(self, theta, t, y): return -super().value(theta, t, y)\n"
        "    def gradient(self, theta, t, y): return -super().gradient(theta, t, y)\n"
        "    def curvature(self, theta, t, y): return -super().curvature(theta, t, y)",
        "convex as declared",
        "declare convex = False",
    ),
    "data term that is not quadratic": (
        "data_term",
        "quadratic = True",
        "quadratic as declared",
        "quadratic = True means that d'' does not depend on t",
    ),
    "data term that does not rescale": (
        "data_term",
        "rescales = True",
        "rescales as declared",
        "homogeneous of degree 2",
    ),
    "data term for nothing": (
        "data_term",
        "def check_measurements(self, y): return 'never'",
        "value is one number per sample",
        "check_measurements refuses all measurements tried",
    ),
    "data term that refuses without a sentence": (
        "data_term",
        "def check_measurements(self, y): return True if bool((y < 0).any()) else None",
        "check_measurements refuses unusable measurements",
        "must return None or a sentence, got True",
    ),
    "data term that does not say what it cannot": (
        "data_term squares",
        "def check_measurements(self, y): return None\n"
        "    def value(self, theta, t, y): return super().value(theta, t, y) + 0 * y.sqrt().flatten(1).sum(1)",
        "check_measurements refuses unusable measurements",
        "check_measurements accepts signed measurements, but",
    ),
    "data term with pictures of no shape": (
        "data_term",
        "def pictures(self, theta): return theta['log_weight']",
        "pictures can be drawn",
        "pictures must be finite, of shape (N, C, H, W), got (1,)",
    ),
    "data term whose standard parameters are others": (
        "data_term",
        "def standard_params(self, shape, generator): return {'weight': torch.zeros(1).double()}",
        "standard_params is an admissible θ, the same each time",
        "standard_params(…) has ['weight'] instead of ['log_weight']",
    ),
    "noise in float32": (
        "noise",
        "def sample(self, t, generator): return super().sample(t, generator).float()",
        "a measurement has the shape of t, in float64",
        "expected float64 like the input, got float32",
    ),
    "noise of another shape": (
        "noise",
        "def sample(self, t, generator): return super().sample(t, generator).unsqueeze(0)",
        "a measurement has the shape of t, in float64",
        "expected shape (3, 12, 14), got (1, 3, 12, 14)",
    ),
    "noise from the global generator": (
        "noise",
        "def sample(self, t, generator): return t + 0.1 * torch.randn(t.shape, dtype=t.dtype)",
        "only the generator is random",
        "sample used a global generator",
    ),
    "noise from Python's generator": (
        "noise",
        "def sample(self, t, generator): return super().sample(t, generator) + 1e-9 * random.random()",
        "only the generator is random",
        "sample used a global generator",
    ),
    "noise from NumPy's generator": (
        "noise",
        "def sample(self, t, generator):\n"
        "        import numpy\n"
        "        return super().sample(t, generator) + 1e-9 * numpy.random.rand()",
        "only the generator is random",
        "sample used a global generator",
    ),
    "noise of its own entropy": (
        "noise",
        "def sample(self, t, generator):\n"
        "        generator = torch.Generator()\n"
        "        generator.seed()\n"
        "        return super().sample(t, generator)",
        "only the generator is random",
        "differed between two components built alike",
    ),
    "noise with a seed of its own": (
        "noise",
        "def sample(self, t, generator): return super().sample(t, torch.Generator().manual_seed(0))",
        "only the generator is random",
        "sample was the same with another generator",
    ),
    "noise with a memory": (
        "noise",
        "count = 0\n"
        "    def sample(self, t, generator):\n"
        "        self.count += 1\n"
        "        return super().sample(t, generator) + 1e-6 * (self.count - 1)",
        "keeps no state between calls",
        "using it changes self.count",
    ),
    "a data term with a memory": (
        "data_term",
        "count = 0\n"
        "    def value(self, theta, t, y):\n"
        "        self.count += 1\n"
        "        return super().value(theta, t, y) + 1e-6 * self.count",
        "keeps no state between calls",
        "using it changes self.count",
    ),
    "a loss with a memory": (
        "upper_loss",
        "seen = []\n"
        "    def bind(self, sample, forward):\n"
        "        self.seen.append(1)\n"
        "        return super().bind(replace(sample, truth=sample.truth + 1e-6 * len(self.seen)), forward)",
        "keeps no state between calls",
        "using it changes Mine.seen",
    ),
    "noise that is added to t in place": (
        "noise",
        "def sample(self, t, generator): return t.copy_(super().sample(t, generator))",
        "inputs are left untouched",
        "sample changed its argument t in place",
    ),
    "noise of half its level": (
        "noise",
        "def sample(self, t, generator): return (t + super().sample(t, generator)) / 2",
        "level is the standard deviation",
        "level claims it for every t",
    ),
    "noise with a level that depends on t": (
        "noise",
        "def sample(self, t, generator): return t + 2 * t * (super().sample(t, generator) - t)",
        "level is the standard deviation",
        "level claims it for every t",
    ),
    "noise with a level that is no number": (
        "noise",
        "level = 'loud'\n"
        "    def sample(self, t, generator): return t\n"
        "    def variance(self, t): return 0 * t",
        "level is the standard deviation",
        "must be a finite number of at least 0, or None, got 'loud'",
    ),
    "noise with a bias": (
        "noise",
        "def sample(self, t, generator): return super().sample(t, generator) + 0.005",
        "mean is that of many measurements",
        "the mean at t = 0.05: expected 0.05, got 0.05",
    ),
    "noise with a wrong variance": (
        "noise",
        "def variance(self, t): return torch.full_like(t, self.level)",
        "variance is that of many measurements",
        "the variance at t = 0.05: expected 0.1, got 0.0",
    ),
    "noise with one mean for all": (
        "noise",
        "def mean(self, t): return t.mean()",
        "mean is that of many measurements",
        "mean of t of shape (1, 1, 4): expected shape (1, 1, 4), got ()",
    ),
    "loss that forgets to divide the operator": (
        "upper_loss of measurements",
        "class Bad(Fit):\n"
        "        def take(self, index): return Fit(self.forward.take(index * 0), self.target[index])\n"
        "    def bind(self, sample, forward): return self.Bad(forward, sample.target)",
        "a sample's result does not depend on its batch",
        "by take differs",
    ),
    "loss that adds more noise than it says": (
        "upper_loss of measurements",
        "noise_gain = 1.3",
        "noise_gain is what split does to the noise",
        "noise_gain is 1.3, but split makes noise of level 1 one of level 1.4",
    ),
    "loss that splits at random": (
        "upper_loss of measurements",
        "def split(self, y, level, generator): return super().split(y, level, None)",
        "same input, same result",
        "split differed for equal generators",
    ),
    "loss in float32": (
        "upper_loss",
        "class Bad(Judge):\n        def value(self, x): return super().value(x).float()\n    upper = Bad",
        "value is one float64 number per sample",
        "expected float64 like the input, got float32",
    ),
    "random loss": (
        "upper_loss",
        "class Bad(Judge):\n"
        "        def value(self, x): return super().value(x) * random.uniform(0.9, 1)\n"
        "    upper = Bad",
        "same input, same result",
        "value of the same x differed",
    ),
    "loss that takes everything": (
        "upper_loss",
        "class Bad(Judge):\n        def take(self, index): return self\n    upper = Bad",
        "a sample's result does not depend on its batch",
        "by take differs",
    ),
    "loss that is a mean over the batch": (
        "upper_loss",
        "class Bad(Judge):\n        def value(self, x): return super().value(x) / len(x)\n    upper = Bad",
        "a sample's result does not depend on its batch",
        "value of sample 0 alone",
    ),
    "slope of a loss in float64": (
        "upper_loss",
        "class Bad(Judge):\n        def gradient(self, x): return super().gradient(x).double()\n    upper = Bad",
        "gradients have the dtype of the images",
        "expected float32 like the input, got float64",
    ),
    "loss that mutates x": (
        "upper_loss",
        "class Bad(Judge):\n        def value(self, x): return super().value(x.mul_(0.999))\n    upper = Bad",
        "inputs are left untouched",
        "value changed its argument x in place",
    ),
    "loss with a wrong gradient": (
        "upper_loss",
        "class Bad(Judge):\n        def gradient(self, x): return 2 * super().gradient(x)\n    upper = Bad",
        "gradient matches finite differences of the value",
        "it is 2 times too large",
    ),
    "loss that is steeper than it says": (
        "upper_loss",
        "class Bad(Judge):\n        lipschitz = 5.0\n    upper = Bad",
        "lipschitz is a valid bound",
        "lipschitz is 5, but near",
    ),
    "loss that is not convex": (
        "upper_loss",
        "class Bad(Judge):\n"
        "        lipschitz = None\n"
        "        gradient = Upper.gradient\n"
        "        def value(self, x): return (x - self.truth).double().square().log1p().flatten(1).sum(1)\n"
        "    upper = Bad",
        "convex as declared",
        "declare convex = False",
    ),
    "loss below its infimum": (
        "upper_loss",
        "class Bad(Judge):\n        infimum = 1.0\n    upper = Bad",
        "no value is below the infimum",
        "infimum is 1, but the value at the true images is",
    ),
    "loss that is the sum of its blocks": (
        "upper_loss",
        "class Bad(Judge):\n"
        "        def block(self, j): return replace(self, kept=((1.0, 0.0), (0.0, 1.0))[int(j[0])])\n"
        "    upper = Bad",
        "the mean of the blocks is g",
        "the mean over all blocks must be g",
    ),
    "loss with a wrong θ-gradient": (
        "upper_loss",
        "class Bad(Judge):\n"
        "        def theta_gradient(self, x, weights):\n"
        "            return {n: 2 * v for n, v in super().theta_gradient(x, weights).items()}\n"
        "    upper = Bad",
        "theta_gradient is the derivative in θ",
        "theta_gradient['loss.log_weight']: expected",
    ),
    "loss whose θ-gradient ignores the weights": (
        "upper_loss",
        "class Bad(Judge):\n"
        "        def theta_gradient(self, x, weights):\n"
        "            return super().theta_gradient(x, weights / weights.sum())\n"
        "    upper = Bad",
        "theta_gradient is the derivative in θ",
        "it must be Σ_i weights_i ∂_θ g_i",
    ),
    "loss that makes do without true images": (
        "upper_loss",
        "def bind(self, sample, forward):\n"
        "        truth = sample.y if sample.truth is None else sample.truth\n"
        "        return super().bind(replace(sample, truth=truth), forward)",
        "declares what it needs",
        "declare needs_truth = False",
    ),
    "no default and no example": (
        "data",
        "def __init__(self, path: str) -> None: self.path = path",
        "builds from its example options",
        "from a classmethod example(folder)",
    ),
}


def outcomes_of(folder: Path, kind: str, body: str) -> dict[str, tuple[str, str]]:
    """Status and message of each property of a plugin whose class is the base of its kind with ``body`` on top."""
    base, source = BASES[kind]
    kind = kind.partition(" ")[0]
    text = HEAD.format(kind=kind) + source + f"\nclass Mine({base}):\n    '''Mine.'''\n    {body}\n"
    file = folder / "mine.py"
    file.write_text(text, encoding="utf-8")
    registry = load_registry([file])
    found = check_component(registry.get(kind, "mine"), registry)
    return {one.property: (one.status, one.message) for one in found}


@pytest.mark.parametrize("kind", ["data_term", "noise", "problem", "upper_loss"])
def test_every_property_has_a_mistake_that_breaks_it(kind: str) -> None:
    broken = {name for base, _, name, _ in WRONG.values() if base.partition(" ")[0] == kind}
    assert broken | {IMPORTED, BUILT} == {one.name for one in properties_of(kind)}


@pytest.mark.parametrize("kind", BASES)
def test_the_examples_themselves_are_right(tmp_path: Path, kind: str) -> None:
    found = outcomes_of(tmp_path, kind, "pass")
    assert [message for status, message in found.values() if status == "failed"] == []
    assert list(found) == [one.name for one in properties_of(kind.partition(" ")[0])]


@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_is_caught_by_the_name_of_its_property(tmp_path: Path, name: str) -> None:
    kind, body, expected, sentence = WRONG[name]
    found = outcomes_of(tmp_path, kind, body)
    status, message = found[expected]
    assert status == "failed", found
    assert sentence in message


def test_one_context_that_is_missing_is_one_failure(tmp_path: Path) -> None:
    found = outcomes_of(tmp_path, "operator window", "def example_contexts(self, shape, count): return [{}]")
    failed = [name for name, (status, _) in found.items() if status == "failed"]
    assert failed == ["its example contexts have what it reads"]
    assert "unverified" in {status for status, _ in found.values()}


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize(("claim", "status"), [(0.13, "passed"), (0.2, "failed"), (0.09, "failed")])
def test_entries_of_a_measurement_may_depend_on_each_other(
    tmp_path: Path, dim: int, claim: float, status: str
) -> None:
    """Stripes along rows or columns: a true variance is accepted, and a wrong one is not."""
    body = f"""level = None
    def sample(self, t, generator):
        stripes = torch.randn(t.shape, dtype=t.dtype, generator=generator).mean({dim}, keepdim=True)
        noise = 0.2 * torch.randn(t.shape, dtype=t.dtype, generator=generator)
        return t + 0.3 * t.shape[{dim}] ** 0.5 * stripes + noise
    def mean(self, t): return t
    def variance(self, t): return torch.full_like(t, {claim})"""
    found = outcomes_of(tmp_path, "noise", body)
    assert found["variance is that of many measurements"][0] == status
    others = {name: one for name, one in found.items() if not name.startswith("variance")}
    assert {one[0] for one in others.values()} <= {"passed", "skipped"}


def test_a_bias_without_a_limit_is_not_verified_and_not_right(tmp_path: Path) -> None:
    """Whether it is right or three times too large: nothing shows which."""
    for factor in (1, 3):
        body = (
            "exact = False\n"
            "    def estimate(self, ask):\n"
            "        found = super().estimate(ask)\n"
            f"        return replace(found, gradient={{n: {factor} * z for n, z in found.gradient.items()}})"
        )
        found = outcomes_of(tmp_path, "hypergradient", body)
        status, message = found["its bias vanishes in the declared limit"]
        assert status == "unverified" and "declare in `limit`" in message


def test_an_exception_is_a_failure_with_its_place(tmp_path: Path) -> None:
    found = outcomes_of(tmp_path, "sampler", "def next(self, state): return state['nothing']")
    status, message = found["ids are valid and weights positive"]
    assert status == "failed"
    assert "KeyError: 'nothing'" in message
    assert "(mine.py, line" in message


def test_declarations_are_respected(tmp_path: Path) -> None:
    found = outcomes_of(
        tmp_path,
        "regularizer",
        "convex = False\n    def energy(self, theta, x): return -super().energy(theta, x)",
    )
    assert found["convex along segments"] == ("skipped", "it declares convex = False")
    assert "failed" not in {status for status, _ in found.values()}


def test_an_author_sees_sentences_and_no_traceback(tmp_path: Path) -> None:
    kind, body, expected, sentence = WRONG["wrong adjoint"]
    wrong = [status for status, _ in outcomes_of(tmp_path, kind, body).values() if status == "failed"]
    (tmp_path / "test_mine.py").write_text(
        "from bltoolbox.testing.conformance import conformance_tests\n\n"
        f"test_mine = conformance_tests(files=[{str(tmp_path / 'mine.py')!r}])\n"
        "test_missing = conformance_tests('no-such-plugin')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"],
        cwd=tmp_path,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 1
    assert f"operator/mine: {expected}" in done.stdout
    assert sentence in done.stdout
    assert "'no-such-plugin' is not a plugin, distribution, component or recipe" in done.stdout
    assert f"{len(wrong) + 1} failed" in done.stdout
    assert "Traceback" not in done.stdout
    assert "conformance.py" not in done.stdout
