"""Models that nobody trained, for tests of what is done with trained ones: the initial θ of a recipe."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bltoolbox.bilevel.tensors import keyed_generator
from bltoolbox.config.recipe import recipe_from_dict
from bltoolbox.config.registry import load_registry
from bltoolbox.restoration.from_recipe import build, build_problem
from bltoolbox.restoration.model import Model
from bltoolbox.restoration.theta import join
from bltoolbox.testing import smooth_images

torch.set_num_threads(1)


def toy_model(**settings: Any) -> Model:
    """A small Field of Experts for denoising, unless the settings say otherwise."""
    registry = load_registry()
    recipe = recipe_from_dict(
        {
            "data": {"name": "dead-leaves", "count": 4, "size": 16},
            "regularizer": {"name": "foe", "filters": 10, "kernel_size": 5, "weight": 0.05},
            "lower_solver": "mm",
            "budget": {"steps": 1},
        }
        | settings,
        registry=registry,
    )
    problem = build_problem(recipe, registry)
    shape = (1 if recipe.color == "gray" else 3, 16, 16)
    theta = join(
        **{
            role: part.init_params(shape, keyed_generator("theta"))
            for role, part in problem.components.items()
        }
    )
    dtype = getattr(torch, recipe.dtype)
    theta = {name: value.to(dtype) for name, value in theta.items()}
    return Model(problem, build(recipe, "lower_solver", registry), theta, recipe)


def clean_picture(height: int, width: int, channels: int = 3, seed: int = 0) -> NDArray[Any]:
    """Smooth shades with an edge, H×W×C in [0, 1]."""
    image = smooth_images(1, (channels, height, width), seed)[0].permute(1, 2, 0).double().numpy().copy()
    image[height // 3 : height // 2, width // 4 :] *= 0.4
    return image.clip(0, 1)


def noisy_picture(
    height: int, width: int, channels: int = 3, sigma: float = 0.1, seed: int = 0
) -> NDArray[Any]:
    noise = np.random.default_rng(seed).normal(0, sigma, (height, width, channels))
    return (clean_picture(height, width, channels, seed) + noise).astype(np.float32)


def as_bytes(image: NDArray[Any]) -> NDArray[np.uint8]:
    return (image.clip(0, 1) * 255 + 0.5).astype(np.uint8)
