"""For notebooks: small tables of what the toolbox returns, and progress where there is no terminal."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from bltoolbox.config.shown import renders

if TYPE_CHECKING:
    from bltoolbox.bilevel.events import Listener
    from bltoolbox.config.recipe import Recipe
    from bltoolbox.restoration.evaluation import Evaluation
    from bltoolbox.restoration.model import Model
    from bltoolbox.restoration.results import RunResult

#: Images that a table names one by one.
_SHOWN = 12


def html_table(title: str, rows: Iterable[Sequence[str]], heading: Sequence[str] = ()) -> str:
    """Plain HTML in the notebook's own style; everything is escaped."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heading)
    body = "".join(
        "<tr>" + f"<th>{escape(first)}</th>" + "".join(f"<td>{escape(cell)}</td>" for cell in rest) + "</tr>"
        for first, *rest in rows
    )
    top = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f"<table><caption>{escape(title)}</caption>{top}<tbody>{body}</tbody></table>"


@renders("RunResult")
def result_html(result: RunResult) -> str:
    rows = [("status", result.status)]
    names = {"measured": "psnr_before", "initial θ": "psnr_initial", "baseline": "psnr_baseline"}
    facts = result.as_dict()
    for name, key in {**names, "learned θ": "psnr_after", "validation": "psnr_validation"}.items():
        if facts[key] is not None:
            rows.append((f"PSNR, {name}", f"{facts[key]:.2f} dB"))
    rows.append(("cost", f"{result.cost.computations:,} computations, {result.steps:,} steps"))
    rows.append(("time", f"{result.seconds:.1f} s"))
    rows.append(("learned", f"{result.model.size:,} parameters of {result.model.recipe.regularizer.name}"))
    rows.append(("θ kept", result.chosen))
    if result.run_dir is not None:
        rows.append(("run directory", str(result.run_dir)))
    return html_table("Run", rows)


@renders("Evaluation")
def evaluation_html(evaluation: Evaluation) -> str:
    rows = [("mean", f"{evaluation.psnr_before:.2f}", f"{evaluation.psnr:.2f}")]
    figures = zip(evaluation.labels, evaluation.before, evaluation.after, strict=True)
    rows += [(label, f"{before:.2f}", f"{after:.2f}") for label, before, after in figures][:_SHOWN]
    if (more := len(evaluation.after) - _SHOWN) > 0:
        rows.append((f"and {more} more", "", ""))
    return html_table("PSNR in dB", rows, ("image", "before", "after"))


@renders("Model")
def model_html(model: Model) -> str:
    shapes = [(name, "×".join(map(str, value.shape))) for name, value in model.theta.items()]
    rows = [("regularizer", model.recipe.regularizer.name), ("operator", model.recipe.operator.name)]
    return html_table(f"Model of {model.size:,} parameters", [*rows, *shapes])


@renders("Recipe")
def recipe_html(recipe: Recipe) -> str:
    return (
        f"<details><summary>{escape(repr(recipe))}</summary><pre>{escape(recipe.to_yaml())}</pre></details>"
    )


@contextlib.contextmanager
def progress(wanted: bool) -> Iterator[list[Listener]]:
    """A bar on a terminal and in a notebook that has ipywidgets; elsewhere a line for every check, on stderr."""
    if not wanted:
        yield []
        return
    from rich.console import Console

    from bltoolbox.reports.progress import Log, Progress

    console = Console(stderr=True)
    widgets = console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None
    with Progress() if console.is_terminal or widgets else Log() as display:
        yield [display]
