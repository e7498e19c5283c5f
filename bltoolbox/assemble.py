"""From a valid recipe to an experiment: components built, checked against each other and against the data.

Nothing is written to disk here, so that a combination that cannot work costs nothing but a sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bltoolbox.errors import BltError, MissingError, RecipeError
from bltoolbox.experiment import Experiment
from bltoolbox.interfaces import Data, LowerSolver, Operator, Regularizer, Role, Sampler, UpperOptimizer
from bltoolbox.model import read_theta
from bltoolbox.oracle import BilevelOracle
from bltoolbox.problem import Problem, join
from bltoolbox.recipe import Recipe
from bltoolbox.registry import Registry, load_registry
from bltoolbox.samples import Samples
from bltoolbox.tensors import keyed_generator

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


def assemble(recipe: Recipe, registry: Registry | None = None) -> Experiment:
    """Build everything a recipe names; raises before anything runs if the parts do not fit."""
    registry = registry or load_registry()
    device = pick_device(recipe.device)
    parts = {kind: build(recipe, kind, registry) for kind in _SINGLE}
    check_partners(recipe, parts)
    operator, regularizer = parts["operator"], parts["regularizer"]
    problem = Problem(operator, regularizer, recipe.constraint, recipe.strong_convexity)
    train, validation, evaluation = _samples(recipe, registry, operator, device)
    for samples in (train, validation, evaluation):
        if samples is not None and (sentence := regularizer.check(samples.shape)):
            raise _refusal(recipe, "regularizer", f"{recipe.regularizer.name}: {sentence}")
    sampler_state = _start_sampler(recipe, parts["sampler"], parts["upper_optimizer"], len(train))
    theta = _initial_theta(recipe, operator, regularizer, train.shape[0], train.dtype, device)
    oracle = BilevelOracle(
        problem,
        train,
        parts["lower_solver"],
        parts["hypergradient"],
        chunk=recipe.chunk,
        iteration_limit=recipe.iteration_limit,
    )
    baseline = _baseline(recipe, registry, problem, parts["lower_solver"], train)
    return Experiment(
        recipe=recipe,
        oracle=oracle,
        sampler=parts["sampler"],
        sampler_state=sampler_state,
        optimizer=parts["upper_optimizer"],
        theta=theta,
        validation=validation,
        evaluation=evaluation,
        baseline=baseline,
    )


_SINGLE = ("operator", "regularizer", "lower_solver", "hypergradient", "sampler", "upper_optimizer")


def build(recipe: Recipe, key: str, registry: Registry) -> Any:
    """The component of one section of a recipe; what its constructor refuses is a problem of that section."""
    block = getattr(recipe, key)
    try:
        return block.build(registry)
    except ValueError as error:
        raise _refusal(recipe, key, f"{block.name}: {error}") from error


def pick_device(name: str) -> torch.device:
    """`auto` is the first CUDA device if there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise MissingError(f"device {name!r} is not known to torch; use auto, cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise MissingError(
            f"device {name!r} is not available: torch sees no CUDA device here; use device=cpu or auto"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise MissingError(
            f"device {name!r} is not available: there are {torch.cuda.device_count()} CUDA devices"
        )
    return device


def check_partners(recipe: Recipe, parts: dict[str, Role], regularizer_key: str = "regularizer") -> None:
    """Every component's `requires` against what its partners implement, and the constraint on x."""
    names = {kind: getattr(recipe, regularizer_key if kind == "regularizer" else kind).name for kind in parts}
    for kind, component in parts.items():
        for partner, methods in component.requires.items():
            lacking = [method for method in methods if not parts[partner].offers(method)]
            if lacking:
                mine, theirs = names[kind], names[partner]
                raise _refusal(
                    recipe,
                    kind,
                    f"{mine!r} needs a {partner} with {', '.join(lacking)}, which {theirs!r} does not have;"
                    f" choose another {kind} or another {partner}",
                )
    solver = parts["lower_solver"]
    if recipe.constraint != "none" and isinstance(solver, LowerSolver) and not solver.handles_constraint:
        raise _refusal(
            recipe,
            "lower_solver",
            f"{recipe.lower_solver.name!r} cannot keep x in the constraint {recipe.constraint!r};"
            " choose one that can, such as agd, or constraint: none",
        )


def _samples(
    recipe: Recipe, registry: Registry, operator: Operator, device: torch.device
) -> tuple[Samples, Samples | None, Samples | None]:
    data = build(recipe, "data", registry)
    held_out = recipe.validation.count
    if held_out >= len(data):
        raise _refusal(
            recipe,
            "validation",
            f"count {held_out} leaves none of the {len(data)} images of {recipe.data.name!r} for training",
        )

    def samples(source: Data, key: str, stream: str, ids: Sequence[int] | None = None) -> Samples:
        try:
            return Samples(
                source,
                operator,
                noise=recipe.noise,
                seed=recipe.seed,
                color=recipe.color,
                stream=stream,
                dtype=_DTYPES[recipe.dtype],
                device=device,
                ids=ids,
            )
        except ValueError as error:
            raise _refusal(recipe, key, f"{getattr(recipe, key).name}: {error}") from error

    m = len(data) - held_out
    train = samples(data, "data", "train", range(m))
    validation = samples(data, "data", "train", range(m, len(data))) if held_out else None
    evaluation = None
    if recipe.evaluation is not None:
        evaluation = samples(build(recipe, "evaluation", registry), "evaluation", "evaluation")
        if evaluation.shape[0] != train.shape[0]:
            raise _refusal(
                recipe,
                "evaluation",
                f"the evaluation images have {evaluation.shape[0]} channels and the training images {train.shape[0]};"
                " set color: gray to make both gray",
            )
    return train, validation, evaluation


def _start_sampler(recipe: Recipe, sampler: Sampler, optimizer: UpperOptimizer, m: int) -> dict[str, Any]:
    try:
        state = sampler.init(m, recipe.seed)
    except ValueError as error:
        raise _refusal(recipe, "sampler", f"{recipe.sampler.name}: {error}") from error
    if optimizer.full_batch:
        batch, _ = sampler.next(state)
        if sorted(batch.ids) != list(range(m)) or any(weight != 1 for weight in batch.weights):
            raise _refusal(
                recipe,
                "sampler",
                f"upper_optimizer {recipe.upper_optimizer.name!r} needs all data at each step, which sampler"
                f" {recipe.sampler.name!r} does not give; use sampler: full",
            )
    return state


def _initial_theta(
    recipe: Recipe,
    operator: Operator,
    regularizer: Regularizer,
    channels: int,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Tensor]:
    generator = keyed_generator("theta", recipe.seed)
    theta = join(
        regularizer=regularizer.init_params(channels, generator),
        operator=operator.init_params(channels, generator),
    )
    if recipe.init is not None:
        theta = _read_initial(recipe, theta)
    return {name: value.to(device, dtype) for name, value in theta.items()}


def _read_initial(recipe: Recipe, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    try:
        saved, _ = read_theta(str(recipe.init))
    except BltError as error:
        raise _refusal(recipe, "init", str(error)) from error

    def shapes(theta: dict[str, Tensor]) -> dict[str, list[int]]:
        return {name: list(value.shape) for name, value in sorted(theta.items())}

    if shapes(saved) != shapes(expected):
        raise _refusal(
            recipe,
            "init",
            f"{recipe.init} holds {shapes(saved)}, but this recipe's parameters are {shapes(expected)}",
        )
    return saved


def _baseline(
    recipe: Recipe, registry: Registry, problem: Problem, solver: LowerSolver, train: Samples
) -> tuple[Problem, dict[str, Tensor]] | None:
    if recipe.baseline is None:
        return None
    regularizer = build(recipe, "baseline", registry)
    theta = join(regularizer=regularizer.init_params(train.shape[0], keyed_generator("theta", recipe.seed)))
    if (size := sum(value.numel() for value in theta.values())) > 2:
        raise _refusal(
            recipe,
            "baseline",
            f"{recipe.baseline.name!r} has {size} parameters; a baseline has at most two, such as tv",
        )
    check_partners(recipe, {"lower_solver": solver, "regularizer": regularizer}, "baseline")
    theta = {name: value.to(train.device, train.dtype) for name, value in theta.items()}
    return Problem(problem.operator, regularizer, problem.constraint, problem.strong_convexity), theta


def _refusal(recipe: Recipe, key: str, message: str) -> RecipeError:
    return RecipeError([recipe.problem(key, message)])
