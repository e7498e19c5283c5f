"""The table at the end of a run."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bltoolbox.config.names import PICTURES, REPORT_FILE
from bltoolbox.config.printable import printable
from bltoolbox.restoration.evaluation import Evaluation
from bltoolbox.restoration.results import RunResult
from bltoolbox.runs.metric import Metric


def print_summary(result: RunResult) -> None:
    """The result of the run, its cost and its directory, on stdout."""
    console = Console(highlight=False)
    if result.evaluation is not None and (metric := result.evaluation.metric) is not None:
        console.print(_quality_table(result, result.evaluation, metric))
    cost, model = result.cost, result.model
    facts = [
        ("status", result.status),
        ("learned", f"{model.learned}; θ kept: {result.chosen}"),
        ("cost", f"{cost.computations:,.0f} computations in {result.steps} steps, {result.seconds:.1f} s"),
    ]
    if result.validation is not None:
        facts.append(("validation", f"{result.metric.label} {result.metric.show(result.validation)}"))
    if result.run_dir is not None:
        facts.append(("results", str(result.run_dir)))
        if (page := result.run_dir / REPORT_FILE).is_file():
            facts.append(("report", str(page)))
        elif result.evaluation is not None and result.evaluation.images:
            facts.append(("picture", str(result.run_dir / PICTURES / "restored.png")))
    for name, value in facts:
        console.print(_text(f"{name:>10}  {value}"), soft_wrap=True)


def _quality_table(result: RunResult, evaluation: Evaluation, metric: Metric) -> Table:
    noun = "images" if evaluation.of_images else "tasks"
    rows = [("measured" if evaluation.of_images else "start", evaluation.before)]
    if result.baseline is not None and result.model.recipe.baseline is not None:
        rows.append((f"{result.model.recipe.baseline.name}, tuned", result.baseline.after))
    if result.initial is not None:
        rows.append(("initial θ", result.initial.after))
    rows.append(("learned θ", evaluation.after))
    shown = min(len(evaluation.labels), 6)
    table = Table(title=f"{metric.title} on the evaluation {noun}", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("")
    table.add_column("mean", justify="right", style="bold")
    for label in evaluation.labels[:shown]:
        table.add_column(_text(label), justify="right")
    for name, values in rows:
        each = values[metric.name]
        figures = [sum(each) / len(each), *each[:shown]]
        table.add_row(_text(name), *map(metric.number, figures))
    return table


def _text(words: str) -> Text:
    """Names and labels as they are: no markup and no control sequences."""
    return Text(printable(words))
