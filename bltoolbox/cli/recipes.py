"""``blt validate``, ``blt recipes`` and ``blt cp``: check, list and copy recipes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bltoolbox.cli.common import (
    Debug,
    Json,
    Plugins,
    open_registry,
    print_json,
    say,
    show,
    split_overrides,
    wrapped,
)
from bltoolbox.cli.completion import complete_recipe, complete_shipped
from bltoolbox.cli.display.problems import described
from bltoolbox.config.names import refuse_unusable_name
from bltoolbox.errors import BltError, RecipeError, UsageError

if TYPE_CHECKING:
    from bltoolbox.config.registry import Registry


def register(app: typer.Typer) -> None:
    """Register the commands of this file."""
    app.command("validate", rich_help_panel="Train")(validate)
    app.command("recipes", rich_help_panel="Train")(list_recipes)
    app.command("cp", rich_help_panel="Train")(copy_recipe)


def validate(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE... [KEY=VALUE]...",
            help="Recipe files or names of shipped recipes; overrides apply to all.",
            autocompletion=complete_recipe,
        ),
    ],
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Also load the data and compute one sample: device, shapes, batches."),
    ] = False,
    as_json: Json = False,
    plugin: Plugins = None,
    debug: Debug = False,
) -> None:
    """Check recipes and report every problem.

    For example: blt validate denoise sampler.size=8 --deep
    """
    sources, overrides = split_overrides(arguments)
    if not sources:
        raise UsageError("no recipe given, only overrides; name a file or a shipped recipe")
    registry = open_registry(plugin)
    results = [
        _check(source, variant, overrides, registry, deep)
        for source in sources
        for variant in _variants(source, overrides)
    ]
    if as_json:
        print_json([result for result, _ in results])
    code = next((error.exit_code for _, error in results if error is not None), 0)
    for result, error in results if not as_json else []:
        if error is None:
            variant = result.get("variant")
            show(f"{result['recipe']}{f', variant {variant}' if variant else ''}: valid")
            for name, fact in result.get("facts", {}).items():
                show(f"  {name:<18}{fact}")
        else:
            say(described(error) if isinstance(error, RecipeError) else f"error: {error}", lines=True)
    raise typer.Exit(code)


def _variants(source: str, overrides: list[str]) -> list[str | None]:
    """The variants of a recipe to check: all, unless there are none or one is chosen already."""
    from bltoolbox.config.recipe import recipe_variants

    if any(override.partition("=")[0].strip() == "variant" for override in overrides):
        return [None]
    try:
        return [*recipe_variants(source)] or [None]
    except BltError:
        return [None]  # reported when the recipe is checked


def _check(
    source: str, variant: str | None, overrides: list[str], registry: Registry, deep: bool
) -> tuple[dict[str, Any], BltError | None]:
    """The result as JSON, and the error if there is one."""
    from bltoolbox.config.recipe import load_recipe

    result: dict[str, Any] = {"recipe": source} | ({"variant": variant} if variant else {})
    try:
        chosen = [f"variant={variant}"] if variant else []
        recipe = load_recipe(source, [*overrides, *chosen], registry)
        if deep:
            from bltoolbox.training.rehearsal import rehearse

            result["facts"] = rehearse(recipe, registry)
    except RecipeError as error:
        problems = [
            {"file": problem.file, "line": problem.line, "column": problem.column, "message": problem.message}
            for problem in error.problems
        ]
        return result | {"valid": False, "problems": problems}, error
    except BltError as error:
        problem = {"file": source, "line": 1, "column": 1, "message": str(error)}
        return result | {"valid": False, "problems": [problem]}, error
    return result | {"valid": True, "problems": []}, None


def list_recipes(as_json: Json = False, debug: Debug = False) -> None:
    """List the recipes that come with the toolbox.

    blt run, blt validate, blt check and blt cp accept their names. --json adds the path of each file.
    """
    from bltoolbox.config.shipped_recipes import recipe_summary, shipped_recipes

    entries = [(name, recipe_summary(path), path) for name, path in shipped_recipes().items()]
    if as_json:
        print_json([{"name": name, "summary": text, "path": str(path)} for name, text, path in entries])
        return
    width = max((len(name) for name, _, _ in entries), default=0)
    for name, text, _ in entries:
        show(wrapped(f"{name:{width}}  {text}", width + 2), lines=True)
    say("start with smoke (seconds) or denoise (two minutes); blt cp NAME copies a recipe to edit it")


def copy_recipe(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A name from blt recipes.", autocompletion=complete_shipped),
    ],
    dest: Annotated[
        str | None, typer.Argument(metavar="[DEST]", help="A file or a folder; default NAME.yaml.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    debug: Debug = False,
) -> None:
    """Copy a shipped recipe to edit it.

    For example: blt cp denoise my-recipe.yaml
    """
    from bltoolbox.config.schema import SCHEMA_FILE
    from bltoolbox.config.shipped_recipes import shipped_recipes
    from bltoolbox.config.wording import did_you_mean
    from bltoolbox.runs.files import write_bytes

    shipped = shipped_recipes()
    if name not in shipped:
        raise UsageError(f"no shipped recipe is called {name!r}{did_you_mean(name, shipped)} (blt recipes)")
    source = shipped[name]
    target = Path(dest or source.name)
    refuse_unusable_name(target)
    if target.is_dir() or (dest or "").endswith("/"):
        target = target / source.name
    if target.exists() and not force:
        raise UsageError(f"{target} exists; choose another name, or replace it with --force")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(target, source.read_bytes())
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror or error}") from error
    show(str(target))
    if not (schema := target.parent / SCHEMA_FILE).exists():
        say(f"for completion and checks in your editor: blt schema -o {schema}")
