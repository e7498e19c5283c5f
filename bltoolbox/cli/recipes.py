"""``blt validate``: is this recipe all right?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from bltoolbox.cli.common import Debug, Json, Plugins, open_registry, print_json, say, split_overrides
from bltoolbox.errors import BltError, RecipeError, UsageError

if TYPE_CHECKING:
    from bltoolbox.registry import Registry


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("validate")(validate)


def validate(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE... [KEY=VALUE]...",
            help="Files or names of shipped recipes; overrides apply to all.",
        ),
    ],
    as_json: Json = False,
    plugin: Plugins = None,
    debug: Debug = False,
) -> None:
    """Check recipes against the components they name, and report every problem.

    For example: blt validate denoise sampler.size=8
    """
    sources, overrides = split_overrides(arguments)
    if not sources:
        raise UsageError("no recipe given, only overrides; name a file or a shipped recipe")
    registry = open_registry(plugin)
    results = [_check(source, overrides, registry) for source in sources]
    if as_json:
        print_json([result for result, _ in results])
    code = next((error.exit_code for _, error in results if error is not None), 0)
    for result, error in results if not as_json else []:
        if error is None:
            typer.echo(f"{result['recipe']}: valid")
        else:
            say(str(error) if isinstance(error, RecipeError) else f"error: {error}")
    raise typer.Exit(code)


def _check(source: str, overrides: list[str], registry: Registry) -> tuple[dict[str, Any], BltError | None]:
    """What JSON says of a recipe, and what is wrong with it."""
    from bltoolbox.recipe import load_recipe

    try:
        load_recipe(source, overrides, registry)
    except RecipeError as error:
        problems = [
            {"file": one.file, "line": one.line, "column": one.column, "message": one.message}
            for one in error.problems
        ]
        return {"recipe": source, "valid": False, "problems": problems}, error
    except BltError as error:
        problem = {"file": source, "line": 1, "column": 1, "message": str(error)}
        return {"recipe": source, "valid": False, "problems": [problem]}, error
    return {"recipe": source, "valid": True, "problems": []}, None
