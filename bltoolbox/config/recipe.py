"""Recipes: a YAML file, validated against the signatures of the components it names.

Every problem of a file is reported at once, with its line and column. Overrides are dotted keys with YAML values,
``sampler.size=8`` or ``budget={steps: 2}``. Overriding a component's name, ``regularizer=tv`` or
``regularizer.name=tv``, switches to that component and drops the options of the old one;
the order of overrides does not matter, except that the last one for a key wins.

A component without options may be written as its name alone, ``operator: identity``, and options without a name mean
the default component of that section. Validation needs no torch once the signatures are cached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from bltoolbox.config.block import Block, plain
from bltoolbox.config.compatibility import find_misfits
from bltoolbox.config.describe import NO_SETTING, OfKind, construct, describe
from bltoolbox.config.overrides import Overrides, apply_overrides, choose_variant, variant_names
from bltoolbox.config.problem_keys import IMAGE_KEYS, check_metric, foreign_keys, named_problem, own_settings
from bltoolbox.config.reading import RECIPE, FileRefused, open_file
from bltoolbox.config.registry import load_registry
from bltoolbox.config.sections import Budget, Certificates, Checkpoint, Validation
from bltoolbox.config.shipped_recipes import find_recipe
from bltoolbox.config.shown import Shown
from bltoolbox.config.signatures import Traits, Type
from bltoolbox.config.training_keys import TRAINING_KEYS, excuse
from bltoolbox.config.validation import Checker, Issue
from bltoolbox.config.yaml_text import Document, Spot, dump, parse
from bltoolbox.errors import MissingError, Problem, RecipeError, UsageError

if TYPE_CHECKING:
    from bltoolbox.config.registry import Registry

__all__ = [
    "Block",
    "Budget",
    "Certificates",
    "Checkpoint",
    "Recipe",
    "Validation",
    "load_recipe",
    "parse_recipe",
    "recipe_from_dict",
]


#: The recipe format that this toolbox writes; it grows when an old key gets a new meaning.
FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class Recipe(Shown):
    """One experiment: the problem, the methods and the budget.

    The keys ``color`` to ``baseline`` and ``workers`` belong to the problem ``variational``: a recipe that names
    another problem has none of them, and its sections are then None.

    Args:
        version: Version of the recipe format; newer versions than this toolbox knows are refused.
        variant: The variant of a recipe that has several, or any label that distinguishes a run from others.
        seed: Seed of the noise, the initial θ and the sampler.
        dtype: Precision of all computations.
        device: Where to compute: auto, cpu, cuda or cuda:1.
        tf32: Let CUDA round factors of float32 products to 10 bits: faster, but tolerances below about 1e-2 stall.
        problem: What is learned and judged. The default, variational, is made of the sections for images; any other
            problem is one component with options of its own.
        color: Colour or gray images.
        data: The training images.
        evaluation: Test images, never trained on; none by default.
        operator: The forward operator A.
        noise: What happens to A x when it is measured; a number is the standard deviation of Gaussian noise, for
            images in [0, 1]. Null where measurements were recorded.
        data_term: How far a reconstruction is from its measurements.
        constraint: What a restored image must satisfy; box is the range of values of the data, [0, 1] for most.
        strong_convexity: μ of a term (μ/2)‖x‖² added to the lower level.
        regularizer: R_θ, whose parameters are learned.
        upper_loss: The loss of a reconstruction, minimised over θ.
        init: A saved θ to start from.
        freeze: Sections whose parameters stay as they are while the others are learned, e.g. [regularizer].
        baseline: A regularizer of at most two parameters, tuned on the training data and reported beside the learned
            one. If the operator or the data term has parameters, the baseline uses their standard values.
        lower_solver: How x̃ ≈ argmin h is computed.
        evaluation_solver: The solver for everything except training steps: checks, evaluation, baseline, restoring
            pictures. By default the lower_solver, or lbfgs (agd with a constraint) if that does not converge.
        hypergradient: How z ≈ ∇f is computed.
        sampler: Which training images enter a step.
        upper_optimizer: How θ moves.
        budget: How much the run may spend.
        validation: How the best θ is chosen.
        on_divergence: What to do when a step fails numerically: stop, go back and take shorter steps, or skip the
            batch.
        certificates: What is logged about accuracy.
        checkpoint: How often the run is saved.
        loggers: Components that follow the run, e.g. [csv]; they do not affect the result.
        chunk: Samples solved at once. auto fits half of the free memory, at most 32 on the CPU, and is halved once if
            memory runs out; the size is part of checkpoints, so that a resumed run continues exactly.
        workers: Threads that read images and simulate measurements, with one more that loads the next batch while the
            current one is solved; 0 does all of it in the main thread. auto is 2 on a GPU and 0 on the CPU, which is
            busy anyway. They do not affect the result.
        iteration_limit: Maximum number of iterations of one lower-level solve.
        evaluation_tol: Accuracy of the restored images when evaluating, relative to the width of their range of values.
    """

    version: Annotated[int, Ge(1), Le(FORMAT)] = FORMAT
    variant: str | None = None
    seed: Annotated[int, Ge(0)] = 0
    dtype: Literal["float32", "float64"] = "float32"
    device: str = "auto"
    tf32: bool = False
    problem: Annotated[Block, OfKind("problem")] = Block("problem", "variational")
    color: Literal["rgb", "gray"] = "rgb"
    data: Annotated[Block, OfKind("data")]
    evaluation: Annotated[Block, OfKind("data")] | None = None
    operator: Annotated[Block, OfKind("operator")] = Block("operator", "identity")
    noise: Annotated[Block, OfKind("noise")] | None = Block("noise", "gaussian")
    data_term: Annotated[Block, OfKind("data_term")] = Block("data_term", "least-squares")
    constraint: Literal["none", "nonnegative", "box"] = "none"
    strong_convexity: Annotated[float, Ge(0)] = 0.0
    regularizer: Annotated[Block, OfKind("regularizer")]
    upper_loss: Annotated[Block, OfKind("upper_loss")] = Block("upper_loss", "squared-error")
    init: str | None = None
    freeze: tuple[Literal["operator", "data_term", "regularizer"], ...] = ()
    baseline: Annotated[Block, OfKind("regularizer")] | None = None
    lower_solver: Annotated[Block, OfKind("lower_solver")] = Block("lower_solver", "agd")
    evaluation_solver: Annotated[Block, OfKind("lower_solver")] | None = None
    hypergradient: Annotated[Block, OfKind("hypergradient")] = Block("hypergradient", "cg-ift")
    sampler: Annotated[Block, OfKind("sampler")] = Block("sampler", "epoch")
    upper_optimizer: Annotated[Block, OfKind("upper_optimizer")] = Block("upper_optimizer", "isgd")
    budget: Budget
    validation: Validation = Validation()
    on_divergence: Literal["stop", "shrink-step", "skip-batch"] = "stop"
    certificates: Certificates = Certificates()
    checkpoint: Checkpoint = Checkpoint()
    loggers: tuple[Annotated[Block, OfKind("logger")], ...] = ()
    chunk: Annotated[int, Gt(0)] | Literal["auto"] = 32
    workers: Annotated[int, Ge(0)] | Literal["auto"] = "auto"
    iteration_limit: Annotated[int, Gt(0)] = 2000
    evaluation_tol: Annotated[float, Gt(0)] = 1e-2

    #: The text as given, with comments.
    text: str = field(default="", compare=False, repr=False, metadata=NO_SETTING)
    #: The stem of its file.
    name: str = field(default="recipe", compare=False, metadata=NO_SETTING)
    #: The folder that relative paths may refer to; None if the recipe is not a file.
    folder: Path | None = field(default=None, compare=False, repr=False, metadata=NO_SETTING)
    document: Document | None = field(default=None, compare=False, repr=False, metadata=NO_SETTING)

    def __repr__(self) -> str:
        parts = ("data", "operator", "regularizer") if self.of_images else ("problem",)
        names = (*parts, "lower_solver", "hypergradient", "sampler", "upper_optimizer")
        return f"Recipe({self.name!r}: {', '.join(getattr(self, name).name for name in names)})"

    @property
    def of_images(self) -> bool:
        """Whether the problem is made of the sections for images."""
        return self.data is not None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, every default written out."""
        names = [field.name for field in fields(self) if field.metadata.get("setting", True)]
        settings = {name: plain(getattr(self, name)) for name in names}
        return settings if self.of_images else own_settings(settings)

    def to_yaml(self) -> str:
        """The resolved recipe: loading it gives an equal Recipe."""
        return dump(self.to_dict())

    def problem_at(self, where: str, message: str) -> Problem:
        """A problem found later, e.g. during assembly, at the position of a dotted key such as ``sampler.size``."""
        spot = (self.document or Document(None, Spot("<recipe>"))).spot(tuple(where.split(".")))
        return spot.problem(f"{where}: {message}")


def load_recipe(
    source: str | Path | Mapping[str, Any],
    overrides: Overrides = (),
    registry: Registry | None = None,
    *,
    data_given: bool = False,
) -> Recipe:
    """Read a recipe: a file, the name of a shipped recipe, or its sections as a mapping.

    Overrides are texts such as ``sampler.size=8``, or a mapping ``{"sampler.size": 8}``.

    With ``data_given`` it may lack its section ``data``, and have ``noise: null``, because ``run`` is given data from
    Python.
    """
    if isinstance(source, Mapping):
        return recipe_from_dict(source, overrides, registry, data_given=data_given)
    path = find_recipe(source)
    return parse_recipe(read_recipe(path), str(path), overrides, registry, data_given=data_given)


def recipe_variants(source: str | Path) -> list[str]:
    """The names of the variants of a recipe; none if it has none, or cannot be parsed."""
    path = find_recipe(source)
    return variant_names(parse(read_recipe(path), Spot(str(path))))


def read_recipe(path: Path, *, follow: bool = True) -> str:
    """The text of a recipe file; without ``follow`` a symbolic link is refused."""
    file = str(path)
    try:
        with open_file(path, follow=follow) as stream:
            raw = stream.read(RECIPE.most + 1)
    except FileRefused as error:
        if not follow:  # a flaw of the run directory, not of the command
            raise
        raise UsageError(f"recipe {error}") from error
    except OSError as error:
        raise UsageError(f"recipe {file} cannot be read: {error.strerror or error}") from error
    if len(raw) > RECIPE.most:
        message = f"the file is larger than {RECIPE.most // 1000} kB; is it a recipe?"
        raise RecipeError([Problem(message, file)])
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start].decode("utf-8-sig", "replace").split("\n")
        problem = Problem("the file is not UTF-8 text", file, len(before), len(before[-1]) + 1)
        raise RecipeError([problem]) from error


def parse_recipe(
    text: str,
    file: str = "<recipe>",
    overrides: Overrides = (),
    registry: Registry | None = None,
    *,
    data_given: bool = False,
) -> Recipe:
    """Read a recipe from its text; ``file`` is its name in messages, and determines name and folder."""
    document = parse(text, Spot(file))
    if not document.problems and not isinstance(document.data, dict):
        empty = document.data is None
        what = "the recipe is empty" if empty else "a recipe is a mapping of keys to values"
        message = f"{what}; it needs at least data, regularizer and budget, or a problem and budget"
        raise RecipeError([document.root.problem(message)])
    if not isinstance(document.data, dict):
        raise RecipeError(document.problems)
    if data_given and "problem" not in document.data:
        document.data.setdefault("data", {"name": "python"})
    path = None if file.startswith("<") else Path(file)
    name = path.stem if path else "recipe"
    extra: dict[str, Any] = {"text": text, "name": name, "folder": path.parent if path else None}
    return _resolve(document, overrides, registry, data_given=data_given, **extra)


def recipe_from_dict(
    settings: Mapping[str, Any],
    overrides: Overrides = (),
    registry: Registry | None = None,
    *,
    data_given: bool = False,
    trained: bool = False,
) -> Recipe:
    """A recipe from plain data, as ``to_dict`` returns it; may contain blocks and settings objects.

    With ``trained`` it is that of a finished θ: what only training needs may be unknown here, and is kept as it is.
    """
    document = Document({key: plain(value) for key, value in settings.items()}, Spot("<recipe>"))
    if data_given and "problem" not in document.data:
        document.data.setdefault("data", {"name": "python"})
    return _resolve(document, overrides, registry, data_given=data_given, trained=trained, text="")


def with_data(
    recipe: Recipe,
    sections: Mapping[str, Block],
    overrides: Overrides = (),
    recorded: bool = False,
    registry: Registry | None = None,
) -> Recipe:
    """A recipe with other data, checked again; ``recorded`` measurements have no noise, unless the recipe gives
    some, which is refused."""
    settings = recipe.to_dict() | {key: block.to_dict() for key, block in sections.items()}
    given = recipe.document.data if recipe.document else {}
    if recorded and given.get("noise") is None:
        del settings["noise"]
    changed = recipe_from_dict(settings, overrides, registry)
    document = recipe.document or changed.document  # where the problems of a file are
    return replace(changed, text=recipe.text, name=recipe.name, folder=recipe.folder, document=document)


def _resolve(
    document: Document,
    overrides: Overrides,
    registry: Registry | None,
    *,
    data_given: bool = False,
    trained: bool = False,
    **extra: Any,
) -> Recipe:
    """Apply overrides, check everything, and raise all problems together."""
    choose_variant(document, overrides)
    apply_overrides(document, overrides)
    _refuse_newer(document)
    _upgrade(document)
    registry = registry or load_registry()
    checker = Checker(registry)
    traits = _problem_traits(document.data, registry)
    foreign = () if traits is None or "from_sections" in traits.flags else IMAGE_KEYS
    values = checker.parameters(
        [parameter for parameter in describe(Recipe).parameters if parameter.name not in foreign],
        {key: value for key, value in document.data.items() if key not in foreign},
        (),
        "a recipe",
    )
    issues = [_with_hint(issue, document.data) for issue in checker.issues]
    if foreign:
        issues += foreign_keys(named_problem(document.data), document.data)
        values |= _absent()
    for name, cls in (("budget", Budget), ("validation", Validation)):
        if not any(issue.where[:1] == (name,) for issue in issues):
            try:
                cls(**values[name])
            except ValueError as error:
                issues.append(Issue((name,), f"{name}: {error}"))
    checks = values.get("validation")
    if traits and isinstance(checks, dict) and isinstance(checks.get("metric"), str | None):
        checks["metric"], issue = check_metric(checks.get("metric"), traits)
        issues += [] if issue is None else [issue]
    wanted = isinstance(checks, dict) and checks.get("evaluation") is True and not foreign
    if wanted and document.data.get("evaluation") is None:
        message = "evaluation: there are no evaluation images; add a section evaluation, e.g. {name: photos}"
        issues.append(Issue(("validation", "evaluation"), f"validation.{message}"))
    issues += _check_noise(values, document.data, registry, data_given)
    for misfit in find_misfits(values, registry):
        # A default that does not fit has no position in the file; its partner has one.
        place = misfit.section if misfit.section in document.data else misfit.partner
        if not trained or misfit.section not in TRAINING_KEYS:
            issues.append(Issue((place,), f"{misfit.section}: {misfit.message}"))
    if trained:
        issues = excuse(issues, values, document.data)
    _raise(document, issues)
    recipe: Recipe = construct(Recipe, values, lambda block: block)
    return replace(recipe, document=document, **extra)


def _problem_traits(given: Mapping[str, Any], registry: Registry) -> Traits | None:
    """Of the problem that a recipe names; None where there is no such problem."""
    try:
        return registry.get("problem", named_problem(given)).signature().traits
    except MissingError:
        return None  # reported elsewhere


def _absent() -> dict[str, Any]:
    """The keys for images where there are none: no component, and the default of everything else."""
    defaults = {field.name: field.default for field in fields(Recipe) if field.name in IMAGE_KEYS}
    blocks = {
        parameter.name for parameter in describe(Recipe).parameters if "component" in _names(parameter.type)
    }
    return {key: None if key in blocks else default for key, default in defaults.items()}


def _names(type: Type) -> set[str]:
    return {type.name, *(item.name for item in type.items)}


def _with_hint(issue: Issue, given: Mapping[str, Any]) -> Issue:
    """Noise is often given for pixel values of 8 or 16 bits."""
    noise = given.get("noise")
    if issue.where != ("noise",) or not isinstance(noise, int | float) or not 1 < noise <= 65535:
        return issue
    largest = 255 if noise <= 255 else 65535
    return replace(issue, message=f"{issue.message}; images are in [0, 1], did you mean {noise:g}/{largest}?")


def _check_noise(
    values: dict[str, Any], given: Mapping[str, Any], registry: Registry, data_given: bool
) -> list[Issue]:
    """Recorded measurements have no noise in ``values``; noise that is given with them is an issue, and so is none
    where measurements are simulated, unless other data replace them."""
    data, noise = values.get("data"), given.get("noise")
    if not isinstance(data, Block):
        return []
    try:
        traits = registry.get("data", data.name).signature().traits
    except MissingError:
        return []  # reported elsewhere
    if "measured" in traits.offers:
        values["noise"] = None
        if noise is None:
            return []
        message = (
            f"the measurements of {data.name!r} were recorded, and nothing is added to them; remove noise, or set it"
            " to null"
        )
    elif "noise" in given and noise is None and not data_given:
        message = f"the measurements of {data.name!r} are simulated; give their noise, e.g. 25/255, or none"
    else:
        return []
    return [Issue(("noise",), f"noise: {message}")]


def _refuse_newer(document: Document) -> None:
    """A newer format explains whatever else seems wrong with a recipe."""
    version = document.data.get("version")
    if isinstance(version, int) and version > FORMAT:
        message = f"version: the recipe has format {version}, but this bltoolbox reads up to {FORMAT}; update bltoolbox"
        raise RecipeError([document.spot(("version",)).problem(message)])


def _upgrade(document: Document) -> None:
    """Keys of format 1 that have moved."""
    settings = document.data
    if "loss_scale" in settings:
        scale = settings.pop("loss_scale")
        if scale != 1 and "upper_loss" not in settings:
            settings["upper_loss"] = {"name": "squared-error", "scale": scale}
    if settings.get("version") == 1:
        settings["version"] = FORMAT


def _raise(document: Document, issues: list[Issue]) -> None:
    reported = {(problem.file, problem.line, problem.column) for problem in document.problems}
    problems = list(document.problems)
    for issue in issues:
        problem = document.spot(issue.where, issue.at_key).problem(issue.message)
        # Problems of the text itself are already reported.
        if (problem.file, problem.line, problem.column) not in reported:
            problems.append(problem)
    if not problems:
        return
    if not document.problems and all(issue.missing for issue in issues):
        raise MissingError("\n".join(map(str, problems)))
    raise RecipeError(sorted(problems, key=lambda problem: (problem.file, problem.line, problem.column)))
