"""``blt list`` and ``blt show``: which components are available, and their parameters."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bltoolbox.cli.common import Debug, Json, Plugins, open_registry, print_json, show, terminal_width
from bltoolbox.cli.completion import complete_component, complete_kind
from bltoolbox.config.hooks import KINDS, LISTS

if TYPE_CHECKING:
    from bltoolbox.config.registry import Registered
    from bltoolbox.config.signatures import Parameter, Signature

PAGE = 80


def register(app: typer.Typer) -> None:
    """Register the commands of this file."""
    app.command("list", rich_help_panel="Look")(list_components)
    app.command("show", rich_help_panel="Look")(show_component)


def list_components(
    kind: Annotated[
        str | None,
        typer.Argument(metavar="[KIND]", help=f"One of {', '.join(KINDS)}.", autocompletion=complete_kind),
    ] = None,
    as_json: Json = False,
    plugin: Plugins = None,
    debug: Debug = False,
) -> None:
    """List the available components."""
    components = open_registry(plugin).components(kind)
    if as_json:
        print_json([_facts(registered) for registered in components])
        return
    rows = [("kind", "name", "summary", "from")]
    rows += [
        (registered.kind, registered.name, registered.component.summary, _source(registered))
        for registered in components
    ]
    _print_table(rows)


def show_component(
    name: Annotated[
        str,
        typer.Argument(
            metavar="[KIND/]NAME",
            help="For example agd or lower_solver/agd.",
            autocompletion=complete_component,
        ),
    ],
    as_json: Json = False,
    plugin: Plugins = None,
    debug: Debug = False,
) -> None:
    """Describe a component and its parameters."""
    from bltoolbox.config.problem_keys import LOSS

    registered = open_registry(plugin, warn=False).find(name)
    signature = registered.signature()
    snippet = _snippet(registered, signature)
    if as_json:
        print_json(_facts(registered) | signature.to_json() | {"snippet": snippet})
        return
    show(f"{registered.kind}/{registered.name}", bold=True, lines=True)
    shown = registered.component.summary
    _paragraph(shown)
    for text in (signature.doc, signature.about):
        if text and text.rstrip(".").lower() not in shown.lower():  # the same sentence, once
            show(f"\n{_reflow(text)}", lines=True)
            shown += f"\n{text}"
    show("\nParameters", bold=True, lines=True)
    for parameter in signature.parameters:
        _print_parameter(parameter)
    if not signature.parameters:
        show("  none", lines=True)
    if metrics := signature.traits.metrics:
        show("\nMetrics", bold=True, lines=True)
        show(f"  {', '.join((*metrics, LOSS))}", lines=True)
    show("\nIn a recipe", bold=True, lines=True)
    show(textwrap.indent(snippet, "  ").rstrip(), lines=True)
    show(f"\nFrom {registered.plugin.origin}, {registered.component.target}", lines=True)


def _facts(registered: Registered) -> dict[str, Any]:
    return {
        "kind": registered.kind,
        "name": registered.name,
        "summary": registered.component.summary,
        "distribution": registered.distribution,
        "version": registered.version,
        "plugin": registered.plugin.name,
        "target": registered.component.target,
    }


def _source(registered: Registered) -> str:
    return f"{registered.distribution} {registered.version}".strip()


def _print_table(rows: Sequence[tuple[str, str, str, str]]) -> None:
    """Columns; on a terminal the summary is wrapped to its width, elsewhere there is one line per component.

    A terminal has no room for a column that says the same in each row.
    """
    width = terminal_width()
    if width and len({source for *_, source in rows[1:]}) == 1:
        rows = [(kind, name, summary, "") for kind, name, summary, _ in rows]
    kinds, names, summaries, sources = (max(map(len, column)) for column in zip(*rows, strict=True))
    if width:
        summaries = max(20, min(summaries, width - kinds - names - sources - 6))
    for number, (kind, name, summary, source) in enumerate(rows):
        lines = textwrap.wrap(summary, summaries) or [""]
        for first, line in enumerate(lines):
            cells = (kind, name, line, source) if first == 0 else ("", "", line, "")
            text = f"{cells[0]:{kinds}}  {cells[1]:{names}}  {cells[2]:{summaries}}  {cells[3]}".rstrip()
            show(text, bold=True if number == 0 else None, lines=True)


def _print_parameter(parameter: Parameter, indent: str = "  ") -> None:
    from bltoolbox.config.yaml_text import dump_inline

    default = "required" if parameter.required else f"default {dump_inline(parameter.default)}"
    show(f"{indent}{parameter.name}: {parameter.type.label()}; {default}", lines=True)
    if parameter.doc:
        _paragraph(parameter.doc, indent + "    ")
    for option in (parameter.type, *parameter.type.items):
        for nested in option.parameters:
            _print_parameter(nested, indent + "    ")


def _paragraph(text: str, indent: str = "") -> None:
    show(textwrap.fill(text, PAGE, initial_indent=indent, subsequent_indent=indent), lines=True)


def _reflow(text: str) -> str:
    """Wrap prose; keep equations, lists and other text that is laid out by hand."""
    paragraphs = text.split("\n\n")
    by_hand = [
        any(line[:1] in (" ", "*", "-", "|", "#") for line in paragraph.splitlines())
        for paragraph in paragraphs
    ]
    pairs = zip(paragraphs, by_hand, strict=True)
    return "\n\n".join(paragraph if kept else textwrap.fill(paragraph, PAGE) for paragraph, kept in pairs)


def _snippet(registered: Registered, signature: Signature) -> str:
    """The component with its defaults, to paste into a recipe; required values are marked by a comment."""
    from bltoolbox.config.yaml_text import dump_inline

    listed = registered.kind in LISTS
    lines = [
        f"{LISTS.get(registered.kind, registered.kind)}:",
        f"{'- ' if listed else '  '}name: {registered.name}",
    ]
    for parameter in signature.parameters:
        if parameter.required:
            lines.append(f"  {parameter.name}:  # required: {parameter.type.expected()}")
        else:
            lines.append(f"  {parameter.name}: {dump_inline(parameter.default)}")
    return "\n".join(lines) + "\n"
