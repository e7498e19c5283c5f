"""``blt check``: test components against their roles, and the hypergradient of a recipe against finite differences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bltoolbox.cli.common import Debug, Json, Plugins, open_registry, print_json, say, show, split_overrides
from bltoolbox.cli.completion import complete_component, complete_recipe
from bltoolbox.errors import UsageError

if TYPE_CHECKING:
    from bltoolbox.config.registry import Registered, Registry
    from bltoolbox.testing.conformance import Outcome
    from bltoolbox.testing.recipe_check import RecipeCheck


def register(app: typer.Typer) -> None:
    """Register the commands of this file."""
    app.command("check", rich_help_panel="Train")(check)


def _complete(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    return complete_component(ctx, incomplete) + complete_recipe(ctx, incomplete)


def check(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PLUGIN|DISTRIBUTION|KIND/NAME|NAME|RECIPE]... [KEY=VALUE]...",
            help="What to check; default everything. Overrides apply to recipes.",
            autocompletion=_complete,
        ),
    ] = None,
    as_json: Json = False,
    plugin: Plugins = None,
    debug: Debug = False,
) -> None:
    """Test components, or the hypergradient of a recipe.

    Components are tested by the conformance suite: all that are installed by default, or with --plugin those of the
    given files. For a recipe (a .yaml file or the name of a shipped recipe), the hypergradient is compared with central
    differences on a few of its samples, and the source of any error is located. Exit code 1 if anything fails, 4 if a
    plugin is broken.

    For example: blt check regularizer/tv, or blt check denoise regularizer=tv
    """
    targets, overrides = split_overrides(arguments or [])
    registry = open_registry(plugin, warn=not as_json)
    recipes = [target for target in targets if _is_recipe(target, registry, bool(overrides))]
    if overrides and not recipes:
        raise UsageError(f"{overrides[0]} is an override for a recipe, but no recipe is given")
    names = [target for target in targets if target not in recipes]
    components, broken = _selection(registry, names, plugin or [], everything=not targets)
    outcomes = _check_components(components, registry, quiet=as_json)
    checks = [_check_recipe(recipe, overrides, registry, quiet=as_json) for recipe in recipes]
    code = _code(outcomes, checks, broken)
    if as_json:
        answer = {
            "components": [outcome.to_json() for outcome in outcomes],
            "recipes": [check.to_json() for check in checks],
        }
        print_json({"passed": code == 0} | answer | {"broken": broken})
    raise typer.Exit(code)


def _is_recipe(target: str, registry: Registry, overridden: bool) -> bool:
    """A YAML file, or the name of a shipped recipe; if a component has that name, too, overrides decide."""
    from bltoolbox.config.shipped_recipes import shipped_recipes

    path = Path(target)
    if path.suffix in (".yaml", ".yml"):
        return True
    return target in shipped_recipes() and (
        overridden or all(entry.name != target for entry in registry.components())
    )


def _selection(
    registry: Registry, names: Sequence[str], files: Sequence[Path], everything: bool
) -> tuple[list[Registered], list[str]]:
    """The components to check, and sentences about the plugins that are broken."""
    from bltoolbox.testing.conformance import select

    names = [*names] if not everything else [file.name for file in files]
    if names:
        return list(dict.fromkeys(entry for name in names for entry in select(registry, name))), []
    return (registry.components(), registry.warnings()) if everything else ([], [])


def _check_components(components: Sequence[Registered], registry: Registry, quiet: bool) -> list[Outcome]:
    from bltoolbox.testing.conformance import check_component

    outcomes: list[Outcome] = []
    width = max((len(f"{component.kind}/{component.name}") for component in components), default=0)
    for component in components:
        results = check_component(component, registry)
        outcomes += results
        if not quiet:
            _print_component(f"{component.kind}/{component.name}", width, results)
    if components and not quiet:
        say(_summary(outcomes, len(components)))
    return outcomes


def _summary(outcomes: Sequence[Outcome], count: int) -> str:
    """How many components conform, and how many of them only as far as could be tested."""
    bad, open_ = (
        {(outcome.kind, outcome.name) for outcome in outcomes if outcome.status == status}
        for status in ("failed", "unverified")
    )
    aside = f", {len(open_ - bad)} of them not verified" if open_ - bad else ""
    return f"{count - len(bad)} of {count} components conform{aside}"


def _print_component(name: str, width: int, outcomes: Sequence[Outcome]) -> None:
    failed, unverified = (
        [outcome for outcome in outcomes if outcome.status == status] for status in ("failed", "unverified")
    )
    skipped = sum(outcome.status == "skipped" for outcome in outcomes)
    tried = len(outcomes) - skipped - len(unverified)
    aside = f" ({skipped} do not apply)" if skipped else ""
    mark, verdict = "✓", f"{tried} properties"
    if failed:
        mark, verdict = "✗", f"{len(failed)} of {tried} properties fail"
    elif unverified:
        mark, verdict = "?", f"{tried} properties, {len(unverified)} not verified"
    show(f"{mark} {name:{width}}  {verdict}{aside}", lines=True)
    for outcome in failed:
        show(f"    {outcome.property}: {outcome.message}", lines=True)
    for outcome in unverified:
        show(f"    {outcome.property}: not verified: {outcome.message}", lines=True)


def _check_recipe(source: str, overrides: Sequence[str], registry: Registry, quiet: bool) -> RecipeCheck:
    from bltoolbox.config.recipe import load_recipe
    from bltoolbox.testing.recipe_check import check_recipe

    recipe = load_recipe(source, overrides, registry)
    if not quiet:
        say(f"{source}: comparing the hypergradient with central differences, in float64 …")
    result = check_recipe(recipe, registry)
    if not quiet:
        _print_recipe(source, result)
    return result


def _print_recipe(source: str, result: RecipeCheck) -> None:
    show(f"{source}, {result.samples} samples", bold=True, lines=True)
    width = max([len(row.direction) for row in result.rows] + [len("direction")])
    if result.rows:
        show(f"  {'direction':{width}}  {'⟨z, d⟩':>14}  {'differences':>14}  {'error':>8}", lines=True)
    for row in result.rows:
        numbers = f"{row.hypergradient:14.6g}  {row.differences:14.6g}  {row.error:8.1e}"
        show(f"  {row.direction:{width}}  {numbers}  {_mark(row.ok)}", lines=True)
    width = max(len(link.what) for link in result.links)
    for link in result.links:
        numbers = f"{link.error:8.1e} of {link.allowed:.0e}"
        show(f"  {link.place:16}  {link.what:{width}}  {numbers}  {_mark(link.ok)}", lines=True)
    mark = _mark(result.passed) if result.verified else "?"
    show(f"{mark} {result.verdict}", lines=True)


def _mark(ok: bool) -> str:
    return "✓" if ok else "✗"


def _code(outcomes: Sequence[Outcome], checks: Sequence[RecipeCheck], broken: Sequence[Any]) -> int:
    """4 if anything could not be loaded, 1 if anything fails."""
    failed = [result for result in outcomes if result.status == "failed"]
    if broken or any(result.property == "can be imported" for result in failed):
        return 4
    return int(bool(failed) or not all(result.passed for result in checks))
