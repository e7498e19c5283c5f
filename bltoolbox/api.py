"""Training and layers from Python, where the rooms are combined.

    from bltoolbox import layer, load_recipe, resume, run

Figures and reports of a run are added here; ``training`` does not know about them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from bltoolbox.bilevel.device import DTYPES, pick_device
from bltoolbox.bilevel.events import Listener
from bltoolbox.bilevel.records import Theta
from bltoolbox.bilevel.roles import LowerSolver
from bltoolbox.config.overrides import Overrides
from bltoolbox.config.recipe import Recipe, load_recipe, with_data
from bltoolbox.config.registry import Plugins, Registry, registry_with
from bltoolbox.distributed.ranks import ALONE, Ranks
from bltoolbox.errors import UsageError
from bltoolbox.reports.notebook import progress as progress_display
from bltoolbox.reports.writer import ReportWriter
from bltoolbox.restoration.from_recipe import build_evaluation_solver, build_problem
from bltoolbox.restoration.layer import Choice, ImplicitLayer, method_for
from bltoolbox.restoration.model import Model
from bltoolbox.restoration.python_data import as_data, stand_in
from bltoolbox.restoration.results import RunResult
from bltoolbox.restoration.roles import Data
from bltoolbox.restoration.shipped import shipped_models
from bltoolbox.restoration.theta import upgraded
from bltoolbox.restoration.theta_file import read_theta
from bltoolbox.restoration.usable import initial_theta
from bltoolbox.restoration.variational import Variational
from bltoolbox.training.assemble import assemble as assemble_recipe
from bltoolbox.training.driver import resume_in, run_in
from bltoolbox.training.experiment import Experiment
from bltoolbox.training.resume import reopen
from bltoolbox.training.run_dir import RunDirectory

#: What ``run`` takes as data.
GivenData = Tensor | NDArray[Any] | tuple[Any, Any] | Dataset[Any] | Data
#: What it takes as a recipe: an object, a file, the name of a shipped recipe, or its sections.
GivenRecipe = Recipe | str | Path | Mapping[str, Any]
#: Accuracy and iteration limit of a layer of a problem that comes without a recipe, as recipes have them by default.
_TOL, _LIMIT = 1e-2, 2000


def run(
    recipe: GivenRecipe,
    overrides: Overrides = (),
    *,
    data: GivenData | None = None,
    evaluation: GivenData | None = None,
    plugins: Plugins = (),
    out: Path | str | None = None,
    listeners: Sequence[Listener] = (),
    ranks: Ranks = ALONE,
    progress: bool = False,
) -> RunResult:
    """Run a recipe: an object, a file, the name of a shipped recipe, or a mapping of its sections. Writes only if
    ``out`` is given.

    Overrides are texts such as ``sampler.size=8``, or a mapping ``{"sampler.size": 8}``.

    ``data`` and ``evaluation`` replace the sections of the recipe, which then needs no ``data``: a tensor or an array
    of images, a pair (x, y) of images and recorded measurements (x may be None), a ``torch.utils.data.Dataset`` of
    images or pairs, or ``bltoolbox.Images``, which also takes a range of values and context. To images alone the noise
    of the recipe is added; a recipe with ``noise`` is refused for recorded measurements.

    ``plugins`` adds components that are not installed: files, or modules with a ``blt_components`` hook. ``progress``
    shows a bar on the terminal or in the notebook.

    On several ranks (``with ranks.joined() as ranks``) each process calls this; rank 0 writes and reports.
    """
    experiment = assemble(recipe, overrides, data=data, evaluation=evaluation, plugins=plugins, ranks=ranks)
    with progress_display(progress and ranks.first) as display:
        if out is None:
            return experiment.run([*display, *listeners])
        directory = RunDirectory(out, ranks=ranks)
        return run_in(directory, experiment, [*display, *listeners, ReportWriter(directory.path, display)])


def assemble(
    recipe: GivenRecipe,
    overrides: Overrides = (),
    *,
    data: GivenData | None = None,
    evaluation: GivenData | None = None,
    plugins: Plugins = (),
    ranks: Ranks = ALONE,
) -> Experiment:
    """Everything that a recipe describes, ready to run: problem, initial θ, and the oracle of f and its hypergradient.

    For a training loop of one's own; the arguments are those of ``run``.
    """
    registry, given = registry_with(plugins), _given(data, evaluation)
    if not isinstance(recipe, Recipe):
        recipe, overrides = load_recipe(recipe, overrides, registry, data_given=data is not None), ()
    if given or overrides:
        sections = {key: stand_in(value) for key, value in given.items()}
        recorded = "data" in given and given["data"].offers("measured")
        recipe = with_data(recipe, sections, overrides, recorded, registry)
    return assemble_recipe(recipe, registry, ranks, given)


def resume(
    path: Path | str,
    overrides: Overrides = (),
    *,
    data: GivenData | None = None,
    evaluation: GivenData | None = None,
    plugins: Plugins = (),
    listeners: Sequence[Listener] = (),
    ranks: Ranks = ALONE,
) -> RunResult:
    """Continue the run in ``path``, on any number of ranks; only budgets may be overridden, and only grow.

    ``data``, ``evaluation`` and ``plugins`` that came from Python must be given again.
    """
    given = _given(data, evaluation)
    with reopen(Path(path), overrides, registry_with(plugins), ranks, given) as reopened:
        if reopened.summary is not None:
            status = reopened.summary["status"]
            raise UsageError(f"{path} is finished: {status}; raise its budget to continue")
        directory = reopened.directory
        return resume_in(directory, reopened.experiment, [*listeners, ReportWriter(directory.path)])


def layer(
    source: Model | Variational | GivenRecipe,
    theta: Theta | None = None,
    *,
    hypergradient: Choice | None = None,
    tol: float | None = None,
    adjoint_tol: float | None = None,
    iteration_limit: int | None = None,
    solver: LowerSolver | None = None,
    shape: Sequence[int] | None = None,
    plugins: Plugins = (),
) -> ImplicitLayer:
    """y ↦ x̂ as an ``nn.Module`` that is differentiable in θ, y and the parameters of operator and data term.

    ``source`` is a model, its file or run directory, a recipe (its components, not its data), or a problem with a
    ``solver``. ``theta`` replaces the parameters of the model or the initial ones of the recipe, all or some by their
    names; an ``nn.Parameter`` is used as it is, other tensors are copied.

    ``hypergradient`` is how backward passes are computed: the name of a component, a mapping with its options, or a
    component; ``cg-ift`` by default, or ``piggyback`` where the regularizer is not smooth. ``tol`` is the distance of
    x̂ to the exact minimiser, by default the recipe's ``evaluation_tol``; ``adjoint_tol`` the residual of the linear
    system of a backward pass relative to the gradient that arrives, by default as small as ``tol`` and at most 1e-3.
    ``shape`` (C, H, W) is needed only for a recipe whose θ depends on the size of images.
    """
    registry = registry_with(plugins)
    options: dict[str, Any] = {
        "hypergradient": hypergradient,
        "adjoint_tol": adjoint_tol,
        "registry": registry,
    }
    if isinstance(source, Variational):
        if solver is None or theta is None:
            raise UsageError(
                "a problem alone has neither solver nor θ; give solver=… and theta=…, or a model"
            )
        options |= {"tol": tol or _TOL * source.unit, "iteration_limit": iteration_limit or _LIMIT}
        return ImplicitLayer(source, method_for(source, solver, **options), theta, shape)
    if isinstance(source, str | Path) and _is_model(source):
        source = Model.load(source, registry=registry)
    model = source if isinstance(source, Model) else _initial_model(source, registry, shape)
    if unknown := sorted(set(theta or {}) - set(model.theta)):
        raise UsageError(f"θ has no parameter {unknown[0]!r}; it has {', '.join(model.theta)}")
    model = replace(model, theta={**model.theta, **(theta or {})}, solver=solver or model.solver)
    return model.module(tol=tol, iteration_limit=iteration_limit, **options)


def _initial_model(source: GivenRecipe, registry: Registry, shape: Sequence[int] | None) -> Model:
    """The components of a recipe with the θ that training would start from."""
    if isinstance(source, Mapping):
        source = {"budget": {"steps": 1}} | dict(source)  # not needed here
    recipe = source if isinstance(source, Recipe) else load_recipe(source, (), registry, data_given=True)
    if not recipe.of_images:
        name = recipe.problem.name
        raise UsageError(
            f"a layer is made of operator, data term and regularizer, which problem {name!r} has not"
        )
    problem = build_problem(recipe, registry)
    if recipe.init is None:
        theta = initial_theta(problem, recipe.color, recipe.seed, shape)
    else:
        theta = problem.project(upgraded(read_theta(recipe.init)[0], problem))
    place, dtype = pick_device(recipe.device), DTYPES[recipe.dtype]
    theta = {name: value.to(place, dtype) for name, value in theta.items()}
    solver = build_evaluation_solver(recipe, registry)
    return Model(problem, solver, theta, recipe, None if shape is None else tuple(shape))


def _is_model(source: str | Path) -> bool:
    """Whether a text or a path names a θ file, a run directory or a shipped model rather than a recipe."""
    path = Path(source)
    return path.is_dir() or path.suffix == ".safetensors" or str(source) in shipped_models()


def _given(data: GivenData | None, evaluation: GivenData | None) -> dict[str, Data]:
    sections = {"data": data, "evaluation": evaluation}
    return {key: as_data(value) for key, value in sections.items() if value is not None}
