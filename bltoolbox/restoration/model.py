"""A trained model of images: θ with its recipe. It restores without training."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from bltoolbox.bilevel.device import DTYPES
from bltoolbox.bilevel.records import Theta
from bltoolbox.bilevel.tasks import Tasks
from bltoolbox.bilevel.tensors import full_precision
from bltoolbox.config.block import Block
from bltoolbox.config.compatibility import listed
from bltoolbox.config.reading import PIXELS, parse_json
from bltoolbox.config.registry import Plugins, Registry, load_registry, registry_with
from bltoolbox.errors import BltError, RecipeError, UsageError, refusing_misfits
from bltoolbox.restoration.evaluation import solve_cold
from bltoolbox.restoration.from_recipe import build_evaluation_solver, build_problem
from bltoolbox.restoration.layer import Choice, ImplicitLayer, method_for
from bltoolbox.restoration.layout import image_layout
from bltoolbox.restoration.measurements import as_batch, bind, context_rows, size_misfit
from bltoolbox.restoration.metrics import Range
from bltoolbox.restoration.pictures.kernels import kernel_matrix, parse_kernel
from bltoolbox.restoration.prior import Prior
from bltoolbox.restoration.roles import Operator
from bltoolbox.restoration.theta import prepare, split, upgraded
from bltoolbox.restoration.theta_file import encode, one_precision, read_range, read_theta
from bltoolbox.restoration.trained import Trained, load_other
from bltoolbox.restoration.usable import any_size, find_flaw, initial_thetas
from bltoolbox.restoration.variational import Variational

if TYPE_CHECKING:
    from bltoolbox.config.recipe import Recipe

ImageLike = TypeVar("ImageLike", Tensor, np.ndarray, Image.Image)


@dataclass(frozen=True, repr=False)
class Model(Trained):
    """x̂(θ) as a function of y."""

    problem: Variational
    #: Of the images that θ was learned from, (C, H, W); None where it is not known.
    shape: tuple[int, ...] | None = None

    @property
    def learned(self) -> str:
        """What was learned: ``82 parameters of foe and 64 of sampled-least-squares``."""
        counts = {}
        for role in self.problem.components:
            size = sum(value.numel() for value in split(self.theta, role).values())
            if size and role not in self.problem.frozen:
                counts[getattr(self.recipe, role).name] = size
        sizes = [
            f"{size:,}{' parameters' * (not number)} of {name}"
            for number, (name, size) in enumerate(counts.items())
        ]
        return listed(sizes, "and")

    def __repr__(self) -> str:
        names = self.recipe.regularizer.name, self.recipe.operator.name
        return f"Model(regularizer={names[0]!r}, operator={names[1]!r}, parameters={self.size})"

    @property
    def range(self) -> Range:
        """The values between which images lie: [0, 1] unless the training data have another range."""
        return self.problem.range

    def __call__(
        self, y: Tensor | np.ndarray, *, context: Mapping[str, Tensor | np.ndarray] | None = None
    ) -> Tensor:
        """x̂ of measurements, as ``solve`` computes it; differentiable in ``y`` and θ where they require gradients."""
        if not isinstance(y, Tensor):
            y = torch.from_numpy(np.array(y))
        return self._module(y, context=context, theta=self.theta)

    @cached_property
    def _module(self) -> ImplicitLayer:
        return replace(self, theta={name: value.detach() for name, value in self.theta.items()}).module()

    def module(
        self,
        *,
        hypergradient: Choice | None = None,
        tol: float | None = None,
        adjoint_tol: float | None = None,
        iteration_limit: int | None = None,
        registry: Registry | None = None,
    ) -> ImplicitLayer:
        """y ↦ x̂ as an ``nn.Module``: its parameters are a copy of θ, and its state_dict has the names of θ files.

        ``hypergradient`` is how backward passes are computed: a component or its name, with options as in a recipe;
        ``cg-ift`` by default, or ``piggyback`` where the regularizer is not smooth. ``tol`` is as in ``solve``,
        ``adjoint_tol`` the accuracy of a backward pass relative to the gradient that arrives.
        """

        method = method_for(
            self.problem,
            self.solver,
            hypergradient,
            registry or load_registry(),
            tol=self.default_tol if tol is None else tol,
            adjoint_tol=adjoint_tol,
            iteration_limit=iteration_limit or self.recipe.iteration_limit,
        )
        return ImplicitLayer(self.problem, method, self.theta, self.shape)

    def prior(self, *, hypergradient: Choice | None = None, tol: float | None = None) -> Prior:
        """The regularizer by itself as an ``nn.Module``, with energy, gradient and proximal map.

        ``tol`` is the accuracy of the proximal map, and ``hypergradient`` how it is differentiated, as in ``module``.
        """
        method = self.module(hypergradient=hypergradient, tol=tol).method
        return Prior(self.problem.restoring, method, self.theta)

    def deepinv(self, **options: Any) -> Any:
        """A ``deepinv.models.Reconstructor``, (y, physics) ↦ x̂ with this regularizer; needs the extra ``deepinv``.

        Options are those of ``module``.
        """
        from bltoolbox.restoration.for_deepinv import reconstructor_of

        return reconstructor_of(self.module(**options))

    def to(self, *args: Any, **options: Any) -> Model:
        """A model that computes elsewhere or in another precision, by the arguments of ``Tensor.to``: a device, a
        dtype, or both."""
        theta = {name: value.to(*args, **options) for name, value in self.theta.items()}
        if wrong := {value.dtype for value in theta.values()} - set(DTYPES.values()):
            raise UsageError(f"models compute in float32 or float64, not in {str(wrong.pop())[6:]}")
        return replace(self, theta=theta)

    def solve(
        self,
        y: Tensor | np.ndarray,
        tol: float | None = None,
        *,
        context: Mapping[str, Tensor | np.ndarray] | None = None,
    ) -> Tensor:
        """Restore measurements ``(C, H, W)`` or ``(B, C, H, W)`` of images with values in ``range``.

        The result has the dtype and device of ``y``, and its shape where the operator keeps it; ``tol`` is its
        distance to the exact minimiser, by default ``evaluation_tol`` times the width of the range. ``context`` is
        what the components need to know about each measurement, e.g. masks, kernels or a class: one row each, or for
        a single measurement the entry itself. Not differentiable: the result is detached from ``y`` and θ; a call,
        ``model(y)``, and ``module`` are differentiable.
        """
        with full_precision(self._reference):
            return self._solve(y, tol, context)

    def _solve(
        self,
        y: Tensor | np.ndarray,
        tol: float | None,
        context: Mapping[str, Tensor | np.ndarray] | None,
    ) -> Tensor:
        # A copy of an array: torch takes neither negative strides nor, without a warning, read-only memory.
        given = y.detach() if isinstance(y, Tensor) else torch.from_numpy(np.array(y))
        batch = image_layout(as_batch(given).to(self._reference))
        rows = context_rows(context, len(batch), given.ndim == 3, self._reference)
        lower = bind(self.problem.restoring, self.theta, batch, rows, self.shape)
        tol = self.default_tol if tol is None else tol
        x = lower.view(solve_cold(self.solver, lower, tol, self.recipe.iteration_limit).x)
        kind = given.dtype if given.is_floating_point() else x.dtype
        return (x if given.ndim == 4 else x[0]).to(given.device, kind)

    @property
    def default_tol(self) -> float:
        """The accuracy of ``solve``, a distance to the exact minimiser: that of the recipe's evaluations."""
        return self.recipe.evaluation_tol * self.problem.unit

    def check_size(self, shape: Sequence[int]) -> str | None:
        """A sentence if θ is for images of one size only, and not for ``shape`` (C, H, W)."""
        return size_misfit(self.problem, self.theta, self.shape, shape)

    @cached_property
    def channels(self) -> int:
        """Of the images that θ is for: 1 or 3, or what the data had."""
        if self.shape is not None:
            return self.shape[0]
        if self.recipe.color == "gray":
            return 1
        theta = self.prepared["regularizer"]
        for channels in (3, 1, 2, 4):
            for side in (16, 64, 256):
                shape = (channels, side, side)
                if self.problem.regularizer.check(shape):
                    continue
                with contextlib.suppress(Exception), torch.no_grad():
                    zeros = torch.zeros(1, *self.problem.variable_shape(shape)).to(self._reference)
                    self.problem.regularizer.energy(theta, zeros)
                    return channels
                break
        return 3

    @property
    def prepared(self) -> dict[str, Theta]:
        """θ by role, as the methods of its component receive it."""
        return prepare(self.problem, self.theta)

    @property
    def _reference(self) -> Tensor:
        """Something of the dtype and the device that are computed with."""
        return next(iter(self.theta.values()))

    @overload
    def restore(
        self,
        image: str | Path,
        noise: float | str | None = None,
        *,
        tol: float | None = None,
        tile: int | None = None,
    ) -> Image.Image: ...

    @overload
    def restore(
        self,
        image: ImageLike,
        noise: float | str | None = None,
        *,
        tol: float | None = None,
        tile: int | None = None,
    ) -> ImageLike: ...

    def restore(
        self,
        image: Any,
        noise: float | str | None = None,
        *,
        tol: float | None = None,
        tile: int | None = None,
    ) -> Any:
        """Restore a picture of any size, keeping its kind, dtype and range.

        A NumPy array H×W or H×W×C, or a tensor H×W, C×H×W or B×C×H×W, of uint8, uint16 or floats for [0, 1]; an image
        of Pillow, or the path of a file, which becomes one. A second or fourth channel is an alpha channel and kept as
        it is. ``noise`` is the standard deviation for values in
        [0, 1], "25/255", 25 (of 255) or "auto", which estimates it; the model's own by default. ``tol`` is the root
        mean square distance to the exact minimiser, ``tile`` the side of the tiles in which large pictures are cut.
        Not differentiable: the result is detached.
        """
        from bltoolbox.restoration.arrays import restore_array
        from bltoolbox.restoration.tiles import Restorer

        with full_precision(self._reference):
            return restore_array(Restorer(self, tol=tol, tile=tile), image, noise)

    def with_operator(self, operator: Operator | str, **options: Any) -> Model:
        """The same regularizer with another operator, e.g. ``with_operator("blur", kernel="kernel.npy")``.

        A component, or the name of one with its options. A kernel is a file, "gaussian:SIGMA[:SIZE]" or a matrix, and
        is divided by its sum.
        """
        if isinstance(operator, str):
            kernel = options.pop("kernel", None)
            if kernel is not None:
                options |= parse_kernel(kernel) if isinstance(kernel, str) else kernel_matrix(kernel)
            return replace_operator(self, {"name": operator} | options)
        block = Block("operator", type(operator).__name__)
        return _with_operator(self, operator, replace(self.recipe, operator=block))

    def encoded(self) -> bytes:
        return encode(self.theta, self.recipe, self.range, self.shape)

    def find_flaw(self, expected: Theta, tasks: Tasks | None, constants: bool = True) -> str | None:
        channels = (3, 1, 2, 4) if self.shape is None else self.shape[:1]
        return find_flaw(self.problem, self.theta, [expected], channels, constants, self.shape)

    @classmethod
    def load(
        cls,
        source: Path | str,
        device: str = "auto",
        registry: Registry | None = None,
        *,
        plugins: Plugins = (),
    ) -> Model:
        """From a run directory, a θ file or the name of a shipped model (``blt models``).

        ``plugins`` adds components that are not installed: files, or modules with a ``blt_components`` hook.
        """
        model = load_trained(source, device, registry_with(plugins) if plugins else registry)
        if not isinstance(model, Model):
            raise UsageError(
                f"{source} was learned for problem {model.recipe.problem.name!r}, which has no images to restore;"
                " measure it with blt evaluate"
            )
        return model

    @classmethod
    def of_recipe(
        cls,
        source: Path | str,
        recipe: Recipe,
        theta: Theta,
        metadata: Mapping[str, str],
        device: str,
        registry: Registry,
    ) -> Model:
        """From the content of a θ file."""
        from bltoolbox.bilevel.device import pick_device

        try:
            problem = replace(build_problem(recipe, registry), range=read_range(metadata, source))
            solver = build_evaluation_solver(recipe, registry)
        except RecipeError as error:  # e.g. the file of a kernel is on another machine
            sentences = "; ".join(problem.message for problem in error.problems)
            raise BltError(f"{source}: the components of its recipe cannot be built: {sentences}") from error
        with refusing_misfits(str(source)):
            theta = upgraded(theta, problem)
        theta = one_precision(theta, DTYPES[recipe.dtype])
        shape = _read_shape(metadata, source)
        channels = (1,) if recipe.color == "gray" else (3, *range(1, 33))
        shapes = any_size(channels) if shape is None else [shape]
        expected = initial_thetas(problem, shapes, any(name.startswith("operator.") for name in theta))
        if (flaw := find_flaw(problem, theta, expected, channels, shape=shape)) is not None:
            raise BltError(f"{source}: its θ cannot be used: {flaw}; train it again or choose another θ file")
        place = pick_device(device)
        theta = {name: value.to(place) for name, value in theta.items()}
        return cls(problem, solver, theta, recipe, shape)


def load_trained(source: Path | str, device: str = "auto", registry: Registry | None = None) -> Trained:
    """θ with its recipe, from a run directory, a θ file or the name of a shipped model: a ``Model`` where it is for
    images."""
    from bltoolbox.config.recipe import recipe_from_dict

    theta, metadata = read_theta(source)
    if "recipe" not in metadata or not theta:
        raise BltError(f"{source}: contains no θ with its recipe, so it is not a θ file of bltoolbox")
    registry = registry or load_registry()
    try:
        settings = dict(parse_json(metadata["recipe"], source))
    except (TypeError, ValueError) as error:
        raise BltError(f"{source}: its recipe is damaged, so it cannot be used") from error
    recipe = recipe_from_dict(settings, registry=registry, trained=True)
    if recipe.of_images:
        return Model.of_recipe(source, recipe, theta, metadata, device, registry)
    return load_other(source, recipe, theta, device, registry)


def _read_shape(metadata: Mapping[str, str], source: Path | str) -> tuple[int, ...] | None:
    """Of the images of training; None in files of earlier versions, which do not contain it."""
    if "shape" not in metadata:
        return None
    try:
        shape = tuple(parse_json(metadata["shape"], source))
    except (TypeError, ValueError) as error:
        raise BltError(f"{source}: its image shape is damaged, so it cannot be used") from error
    if len(shape) != 3 or not all(type(side) is int and side > 0 for side in shape):
        raise BltError(f"{source}: its image shape is damaged, so it cannot be used")
    PIXELS.check(source, math.prod(shape))
    return shape


def solve(
    y: Tensor | np.ndarray,
    theta: Model | Path | str,
    tol: float | None = None,
    *,
    context: Mapping[str, Tensor | np.ndarray] | None = None,
) -> Tensor:
    """Restore ``y`` with a trained θ: a model, a θ file or a run directory. No training, and not differentiable."""
    model = theta if isinstance(theta, Model) else Model.load(theta)
    return model.solve(y, tol, context=context)


def replace_operator(model: Model, section: dict[str, Any], registry: Registry | None = None) -> Model:
    """The model with the operator that a section of a recipe describes."""
    from bltoolbox.config.recipe import recipe_from_dict

    registry = registry or load_registry()
    try:
        settings = model.recipe.to_dict() | {"operator": section}
        recipe = recipe_from_dict(settings, registry=registry, trained=True)
        return _with_operator(model, registry.build(recipe.operator), recipe)
    except RecipeError as error:
        raise UsageError("; ".join(problem.message for problem in error.problems)) from error
    except ValueError as error:
        raise UsageError(f"operator {section['name']!r}: {error}") from error


def _with_operator(model: Model, operator: Operator, recipe: Recipe) -> Model:
    regularizer, own = model.problem.regularizer, model.problem.operator
    if regularizer.offers("guide") and type(operator) is not type(own):
        raise UsageError(
            f"regularizer {model.recipe.regularizer.name!r} reads measurements of operator"
            f" {model.recipe.operator.name!r} and knows no others; use a model that does not adapt, such as"
            " denoise-color-foe, or train one with this operator"
        )
    theta = {name: value for name, value in model.theta.items() if not name.startswith("operator.")}
    return replace(model, problem=replace(model.problem, operator=operator), theta=theta, recipe=recipe)
