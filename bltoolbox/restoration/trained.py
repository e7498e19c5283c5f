"""The result of learning, for any problem: θ with the recipe it was learned with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from torch import Tensor

from bltoolbox.bilevel.device import DTYPES, pick_device
from bltoolbox.bilevel.records import Theta
from bltoolbox.bilevel.roles import LowerSolver, Problem
from bltoolbox.bilevel.tasks import Tasks
from bltoolbox.bilevel.tensors import keyed_generator
from bltoolbox.config.shown import Shown
from bltoolbox.errors import BltError, RecipeError
from bltoolbox.restoration.from_recipe import build, build_evaluation_solver
from bltoolbox.restoration.theta_file import encode, halved, one_precision
from bltoolbox.restoration.usable import find_misfit, find_overflow_in_task
from bltoolbox.runs.files import write_bytes

if TYPE_CHECKING:
    from bltoolbox.config.recipe import Recipe
    from bltoolbox.config.registry import Registry


@dataclass(frozen=True, repr=False)
class Trained(Shown):
    """θ of a problem; ``solver`` is that of everything that is not a step of training."""

    problem: Problem
    solver: LowerSolver
    theta: dict[str, Tensor]
    recipe: Recipe

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(value.numel() for value in self.theta.values())

    @property
    def learned(self) -> str:
        """What was learned: ``40 parameters of ridge``."""
        return f"{self.size:,} parameters of {self.recipe.problem.name}"

    def __repr__(self) -> str:
        return f"Trained(problem={self.recipe.problem.name!r}, parameters={self.size})"

    def with_theta(self, theta: Theta) -> Self:
        """The same problem with another θ."""
        return replace(self, theta=dict(theta))

    def encoded(self) -> bytes:
        """The bytes of the θ file."""
        return encode(self.theta, self.recipe, None)

    def save(self, path: Path | str, half: bool = False) -> None:
        """Write θ and the recipe to one file, atomically; with ``half``, the weights of networks in half precision,
        which halves the file."""
        written = self.with_theta(halved(self.theta)) if half else self
        write_bytes(Path(path), written.encoded())

    def find_flaw(self, expected: Theta, tasks: Tasks | None, constants: bool = True) -> str | None:
        """Why θ, which has names and shapes of ``expected``, cannot be used for ``tasks``; None if it can."""
        flaw = find_misfit(self.theta, [expected])
        return flaw if flaw or tasks is None else find_overflow_in_task(tasks, self.theta, constants)


def load_other(source: Path | str, recipe: Recipe, theta: Theta, device: str, registry: Registry) -> Trained:
    """From the content of a θ file that is not for images."""
    try:
        problem: Problem = build(recipe, "problem", registry)
        solver = build_evaluation_solver(recipe, registry)
        expected = problem.init_params(keyed_generator("theta", recipe.seed))
    except RecipeError as error:  # e.g. a file is on another machine
        sentences = "; ".join(entry.message for entry in error.problems)
        raise BltError(f"{source}: the components of its recipe cannot be built: {sentences}") from error
    except ValueError as error:
        raise BltError(f"{source}: its problem {recipe.problem.name!r} cannot be built: {error}") from error
    place = pick_device(device)
    theta = {name: value.to(place) for name, value in one_precision(theta, DTYPES[recipe.dtype]).items()}
    trained = Trained(problem, solver, theta, recipe)
    if (flaw := trained.find_flaw(expected, None)) is not None:
        raise BltError(f"{source}: its θ cannot be used: {flaw}; train it again or choose another θ file")
    return trained
