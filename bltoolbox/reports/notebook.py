"""For notebooks: small tables of what the toolbox returns, and progress where there is no terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from bltoolbox.config.problem_keys import start_noun
from bltoolbox.config.shown import renders

if TYPE_CHECKING:
    from bltoolbox.bilevel.events import Listener
    from bltoolbox.config.recipe import Recipe
    from bltoolbox.restoration.evaluation import Evaluation
    from bltoolbox.restoration.model import Model
    from bltoolbox.restoration.results import RunResult
    from bltoolbox.restoration.trained import Trained

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
    names = {
        start_noun(result.model.recipe.to_dict()): "before",
        "initial θ": "initial",
        "baseline": "baseline",
        "learned θ": "after",
    }
    facts, metric = result.as_dict(), result.metric
    for name, when in {**names, "validation": "validation"}.items():
        if (value := facts[f"{metric.name}_{when}"]) is not None:
            rows.append((f"{metric.label}, {name}", metric.show(value)))
    rows.append(("cost", f"{result.cost.computations:,.0f} computations, {result.steps:,} steps"))
    rows.append(("time", f"{result.seconds:.1f} s"))
    rows.append(("learned", result.model.learned))
    rows.append(("θ kept", result.chosen))
    if result.run_dir is not None:
        rows.append(("run directory", str(result.run_dir)))
    return html_table("Run", rows)


@renders("Evaluation")
def evaluation_html(evaluation: Evaluation) -> str:
    metrics = evaluation.metrics
    pairs = [(m, evaluation.before[m.name], evaluation.after[m.name]) for m in metrics]
    means = [m.number(mean(m.name)) for m in metrics for mean in (evaluation.mean_before, evaluation.mean)]
    rows = [["mean", *means]] if means else []
    for number, label in enumerate(evaluation.labels[:_SHOWN]):
        rows.append([label, *(m.number(values[number]) for m, *both in pairs for values in both)])
    if (more := len(evaluation.labels) - _SHOWN) > 0:
        rows.append([f"and {more} more", *("" for _ in means)])
    heading = [f"{m.title}, {when}" for m in metrics for when in ("before", "after")]
    return html_table("Evaluation", rows, ("image" if evaluation.of_images else "task", *heading))


@renders("Model")
def model_html(model: Model) -> str:
    shapes = [(name, "×".join(map(str, value.shape))) for name, value in model.theta.items()]
    rows = [("regularizer", model.recipe.regularizer.name), ("operator", model.recipe.operator.name)]
    return html_table(f"Model of {model.size:,} parameters", [*rows, *shapes])


@renders("Trained")
def trained_html(trained: Trained) -> str:
    shapes = [(name, "×".join(map(str, value.shape))) for name, value in trained.theta.items()]
    return html_table(f"{trained.size:,} parameters", [("problem", trained.recipe.problem.name), *shapes])


@renders("Recipe")
def recipe_html(recipe: Recipe) -> str:
    return (
        f"<details><summary>{escape(repr(recipe))}</summary><pre>{escape(recipe.to_yaml())}</pre></details>"
    )


@contextlib.contextmanager
def progress(wanted: bool) -> Iterator[list[Listener]]:
    """A bar on a terminal and in a notebook; elsewhere a line for every check, on stderr."""
    if not wanted:
        yield []
        return
    from rich.console import Console

    from bltoolbox.reports.notebook_progress import NotebookProgress, in_notebook
    from bltoolbox.reports.progress import Log, Progress

    if in_notebook():
        with NotebookProgress() as display:
            yield [display]
        return
    with Progress() if Console(stderr=True).is_terminal else Log() as lines:
        yield [lines]
