"""A trained model: θ with the recipe that says what θ means. It restores without training.

Saved as one safetensors file: the tensors, and in its metadata the resolved recipe. Nothing in it can execute.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

import bltoolbox
from bltoolbox.errors import BltError, MissingError
from bltoolbox.evaluation import solve_cold
from bltoolbox.interfaces import LowerSolver, Theta
from bltoolbox.problem import Problem, split
from bltoolbox.tensors import image_layout

if TYPE_CHECKING:
    from bltoolbox.recipe import Recipe
    from bltoolbox.registry import Registry

THETA_FILE = "theta.safetensors"


@dataclass(frozen=True)
class Model:
    """x̂(θ) as a function of y."""

    problem: Problem
    solver: LowerSolver
    theta: dict[str, Tensor]
    recipe: Recipe

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(value.numel() for value in self.theta.values())

    def __repr__(self) -> str:
        names = self.recipe.regularizer.name, self.recipe.operator.name
        return f"Model(regularizer={names[0]!r}, operator={names[1]!r}, parameters={self.size})"

    def solve(self, y: Tensor | np.ndarray, tol: float | None = None) -> Tensor:
        """Restore measurements ``(C, H, W)`` or ``(B, C, H, W)``, scaled for images with values in [0, 1].

        The result has the dtype and device of ``y``, and its shape where the operator keeps it; ``tol`` is its
        distance to the exact minimiser.
        """
        # A copy of an array: torch takes neither negative strides nor, without a warning, read-only memory.
        given = y if isinstance(y, Tensor) else torch.from_numpy(np.array(y))
        if given.ndim not in (3, 4):
            raise BltError(f"expected images of shape (C, H, W) or (B, C, H, W), got {tuple(given.shape)}")
        reference = next(iter(self.theta.values()))
        batch = image_layout((given if given.ndim == 4 else given.unsqueeze(0)).to(reference))
        try:
            shape = self.problem.operator.start(batch, split(self.theta, "operator")).shape[1:]
        except ValueError as error:
            raise BltError(str(error)) from error
        for component in (self.problem.operator, self.problem.regularizer):
            if sentence := component.check(shape):
                raise BltError(sentence)
        at = self.problem.at(self.theta, shape)
        tol = self.recipe.evaluation_tol if tol is None else tol
        x = solve_cold(self.solver, at.on(batch), tol, self.recipe.iteration_limit).x
        kind = given.dtype if given.is_floating_point() else x.dtype
        return (x if given.ndim == 4 else x[0]).to(given.device, kind)

    def save(self, path: Path | str) -> None:
        """Write θ and the recipe to one file, atomically."""
        from bltoolbox.files import write_bytes

        write_bytes(Path(path), encode(self.theta, self.recipe))

    @classmethod
    def load(cls, source: Path | str, device: str = "auto", registry: Registry | None = None) -> Model:
        """From a θ file or a run directory."""
        from bltoolbox.assemble import pick_device
        from bltoolbox.recipe import recipe_from_dict
        from bltoolbox.registry import load_registry

        theta, metadata = read_theta(source)
        if "recipe" not in metadata:
            raise BltError(f"{source}: holds no recipe, so it is not a θ file of bltoolbox")
        registry = registry or load_registry()
        recipe = recipe_from_dict(json.loads(metadata["recipe"]), registry=registry)
        problem = Problem(
            recipe.operator.build(registry),
            recipe.regularizer.build(registry),
            recipe.constraint,
            recipe.strong_convexity,
        )
        place = pick_device(device)
        theta = {name: value.to(place) for name, value in theta.items()}
        return cls(problem, recipe.lower_solver.build(registry), theta, recipe)


def solve(y: Tensor | np.ndarray, theta: Model | Path | str, tol: float | None = None) -> Tensor:
    """Restore ``y`` with a trained θ: a model, a θ file or a run directory. No training."""
    model = theta if isinstance(theta, Model) else Model.load(theta)
    return model.solve(y, tol)


def encode(theta: Theta, recipe: Recipe) -> bytes:
    """The bytes of a θ file."""
    from safetensors.torch import save

    tensors = {name: value.detach().cpu().contiguous() for name, value in theta.items()}
    metadata = {"bltoolbox": bltoolbox.__version__, "recipe": json.dumps(recipe.to_dict())}
    return save(tensors, metadata)


def read_theta(source: Path | str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and metadata of a θ file, or of the one in a run directory."""
    from safetensors import SafetensorError, safe_open

    path = Path(source)
    path = path / THETA_FILE if path.is_dir() else path
    if not path.is_file():
        raise MissingError(f"{path}: there is no such θ file")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise BltError(f"{path}: is not a readable θ file ({error})") from error
