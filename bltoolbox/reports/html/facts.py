"""The facts of a run in the report: cards, quality, the ledger, the recipe. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bltoolbox.config.names import GIVEN_FILE, METRICS_LOG, RECIPE_FILE
from bltoolbox.config.problem_keys import is_of_images, start_noun
from bltoolbox.config.shipped_recipes import recipe_summary
from bltoolbox.config.validation import in_short
from bltoolbox.config.yaml_text import dump_inline
from bltoolbox.reports.compare.comparison import running_mean, span
from bltoolbox.runs.history import RunHistory
from bltoolbox.runs.labels import short_labels
from bltoolbox.runs.logs import log_end, log_start, number, read_environment, read_source, read_tail
from bltoolbox.runs.metric import Metric
from bltoolbox.runs.settings import differing, flatten, labels, shown

#: The entries of the ledger, in the order of the page: their names, and what they count.
LEDGER = {
    "computations": ("Computations", "lower-level and linear iterations, summed over samples"),
    "lower_iterations": ("Lower-level iterations", "of the solver for x̃, summed over samples"),
    "linear_iterations": ("Linear iterations", "of the solver for the adjoint, summed over samples"),
    "line_search": ("Line search", "lower-level iterations spent on trial values"),
    "slowest": (
        "Slowest sample",
        "iterations of the slowest sample of each chunk, times the size of the chunk",
    ),
    "power_iterations": ("Power iterations", "for error bounds"),
    "gradients": ("Gradients", "of the lower level, for any purpose"),
    "hessian_products": ("Hessian products", "of the lower level"),
    "linearisations": ("Linearisations", "of the lower level"),
    "mixed_products": ("Mixed derivatives", "of the lower level in x and θ"),
    "theta_gradients": ("Derivatives in θ", "of the lower level, for methods that compare its values"),
    "hypergradients": ("Hypergradients", "requested by the optimizer"),
    "values": ("Values", "requested by the optimizer"),
    "evaluation_iterations": (
        "Evaluation",
        "iterations for validation, evaluation and tuning the baseline; not part of the budget",
    ),
}

#: The sections of a recipe that describe the run.
_SECTIONS = (
    "problem",
    "data",
    "evaluation",
    "operator",
    "noise",
    "data_term",
    "constraint",
    "regularizer",
    "baseline",
    "upper_loss",
    "lower_solver",
    "hypergradient",
    "sampler",
    "upper_optimizer",
    "budget",
    "seed",
    "device",
)
_TAIL = 12
#: A number with more digits than a person writes.
_LONG_NUMBER = re.compile(r"(?<![\w.])0\.[0-9]{10,20}(?![\w.])")
_SURROUNDINGS = {
    "bltoolbox": "bltoolbox",
    "torch": "torch",
    "python": "Python",
    "device": "device",
    "threads": "threads",
    "platform": "",
}


@dataclass(frozen=True)
class RunFacts:
    """A run and its name on the page."""

    run: RunHistory
    label: str
    name: str
    summary: str

    @property
    def metric(self) -> Metric:
        return self.run.metric

    @property
    def status(self) -> str:
        return self.run.status

    @property
    def state(self) -> str:
        """One of finished, running, interrupted, failed and unknown, for the colour of the mark."""
        if self.run.finished:
            return "finished"
        for prefix, state in (("running", "running"), ("failed", "failed"), ("unknown", "unknown")):
            if self.status.startswith(prefix):
                return state
        return "interrupted"

    def ledger(self) -> dict[str, float]:
        """The ledger at the end of the run, or so far."""
        last = _last_record(self.run)
        entries = {key: number(self.run.summary.get(key, last.get(key))) for key in LEDGER}
        return {key: value for key, value in entries.items() if value is not None}

    def qualities(self) -> list[tuple[str, str, float]]:
        """Key, name and metric of what is compared on the evaluation images, from the measured ones upwards."""
        baseline = self.run.recipe.get("baseline")
        called = baseline.get("name") if isinstance(baseline, Mapping) else baseline
        names = {
            "before": ("measured", start_noun(self.run.recipe).capitalize()),
            "initial": ("initial", "Initial θ"),
            "baseline": ("baseline", f"Baseline {called}, tuned" if called else "Baseline"),
            "after": ("learned", "Learned θ"),
        }
        values = [(*words, self.run.tested(self.metric, when)) for when, words in names.items()]
        rows = [(key, name, value) for key, name, value in values if value is not None]
        if not any(key == "learned" for key, _, _ in rows):
            checks = self.run.values("evaluation", self.metric)
            if checks:
                rows.append(("learned", f"θ after step {checks[-1][0].step}", checks[-1][1]))
        return rows

    def cards(self) -> list[tuple[str, str, str]]:
        """Heading, figure and remark of each card."""
        metric, values = self.metric, {key: value for key, _, value in self.qualities()}
        cards: list[tuple[str, str, str]] = []
        if (learned := values.get("learned")) is not None:
            measured, baseline = values.get("measured"), values.get("baseline")
            gain = (
                f"{metric.show(learned - measured, sign=True)} over {start_noun(self.run.recipe)}"
                if measured is not None
                else ""
            )
            remark = gain if self.run.finished else "at the last check"
            cards.append((f"Test {metric.label}", metric.show(learned), remark))
            if baseline is not None:
                remark = f"{metric.show(learned - baseline, sign=True)} by learning"
                cards.append(("Baseline", metric.show(baseline), remark))
        if (best := self.run.validated(metric)) is not None:
            chosen = self.run.summary.get("theta")
            remark = f"θ kept: {chosen}" if chosen else "best so far"
            cards.append((f"Validation {metric.label}", metric.show(best), remark))
        if (loss := self.final_loss()) is not None and len(cards) < 3:
            cards.append(("Training loss", f"{loss:.4g}", "running mean at the end"))
        steps = self.run.step_count
        cards.append(("Computations", f"{self.run.computations:,.0f}", f"{steps:,} step{'s' * (steps != 1)}"))
        if (seconds := self.run.seconds) is not None:
            cards.append(("Training time", duration(seconds), self.device()))
        if (size := number(self.run.summary.get("theta_size"))) is not None:
            cards.append(("Parameters", f"{size:,.0f}", self._learned()))
        return cards

    def _learned(self) -> str:
        """Whose parameters were learned: ``82 of foe and 64 of weight-map``; older runs name one component."""
        learned = self.run.summary.get("learned")
        if isinstance(learned, str):
            return learned.replace(" parameters", "", 1)
        section = self.run.recipe.get("regularizer" if is_of_images(self.run.recipe) else "problem")
        kind = section.get("name", "") if isinstance(section, Mapping) else section or ""
        return f"of {kind}" if kind else ""

    def final_loss(self) -> float | None:
        losses = [step.loss for step in self.run.steps if step.loss is not None]
        return running_mean(losses, span(len(losses), None))[-1] if losses else None

    def device(self) -> str:
        env = self.environment()
        name = env.get("device_name") or env.get("device") or ""
        return f"on {name}" if name else ""

    def environment(self) -> dict[str, Any]:
        return read_environment(self.run.path)

    def sections(self) -> list[tuple[str, str]]:
        """The recipe in short."""
        recipe = self.run.recipe
        keys = _SECTIONS[1:] if is_of_images(recipe) else _SECTIONS
        entries = [(key, recipe[key]) for key in keys if recipe.get(key) not in (None, "none", {})]
        return [(key, _line(in_short(key, value))) for key, value in entries]

    def resolved(self) -> str:
        """The recipe with all defaults; noise levels as a person writes them, 25/255."""
        return _LONG_NUMBER.sub(_fraction, read_source(self.run.path / RECIPE_FILE))

    def given(self) -> str:
        return read_source(self.run.path / GIVEN_FILE)

    def log(self) -> str:
        """The last lines of the log."""
        return "\n".join(log_end(self.run.path)[-_TAIL:])

    def sources(self) -> list[tuple[str, str, str]]:
        """Key, title and text of each quoted file."""
        command = self.environment().get("command")
        texts = [
            ("resolved", "Resolved recipe, every default written out", self.resolved()),
            ("given", "As given", self.given()),
            ("command", "Command", " ".join(map(str, command)) if isinstance(command, list) else ""),
            ("log", "End of the log", self.log()),
        ]
        return [entry for entry in texts if entry[2] or entry[0] == "resolved"]

    def surroundings(self) -> str:
        """Versions and the machine, on one line."""
        environment = self.environment()
        entries = [(name, environment.get(key)) for key, name in _SURROUNDINGS.items()]
        return " · ".join(f"{name} {value}" for name, value in entries if value)

    def notes(self) -> list[str]:
        """Caveats for the reader."""
        notes = list(self.run.notes)
        if self.state == "running":
            notes.append("the run was still active; the page shows its progress so far")
        elif not self.run.finished:
            notes.append(f"the run did not finish ({_cut(self.status)}); the page shows it as far as it got")
        if not self.run.steps:
            notes.append("the run has not completed a step yet")
        return notes


def gather(runs: Sequence[RunHistory], given: Mapping[Path, str] | None = None) -> list[RunFacts]:
    """Runs with distinct labels, those of ``given`` by their directories."""
    complete = [run for run in runs if run.recipe]
    told = iter(short_labels(_short([run.recipe for run in complete]), [run.path for run in complete]))
    facts: list[RunFacts] = []
    for run in runs:
        label = next(told) if run.recipe else ""
        label = (given or {}).get(run.path, label)
        facts.append(
            RunFacts(run, label or run.path.resolve().name, _name(run), _summary(run.path / GIVEN_FILE))
        )
    counts: dict[str, int] = {}
    for run_facts in facts:
        counts[run_facts.label] = counts.get(run_facts.label, 0) + 1
    return [
        run_facts
        if counts[run_facts.label] == 1
        else RunFacts(
            run_facts.run,
            f"{run_facts.label} ({_place(run_facts.run.path)})",
            run_facts.name,
            run_facts.summary,
        )
        for run_facts in facts
    ]


def _short(recipes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Labels with only the last parts of their keys, if these are unique: ``step=0.1, size=8``."""
    keys = [key.removesuffix(".name") for key in differing(recipes)]
    ends = [key.rpartition(".")[2] for key in keys]
    names = labels(recipes)
    for key, end in zip(keys, ends, strict=True):
        if ends.count(end) == 1:
            names = [re.sub(rf"(^|, ){re.escape(key)}=", rf"\1{end}=", label) for label in names]
    return names


def differences(runs: Sequence[RunFacts]) -> list[tuple[str, list[str]]]:
    """The settings in which runs differ, with the value of each run."""
    recipes = [entry.run.recipe for entry in runs]
    flat = [flatten(recipe) for recipe in recipes]
    keys = differing(recipes)
    return [(key, [shown(settings[key]) if key in settings else "–" for settings in flat]) for key in keys]


def duration(seconds: float) -> str:
    """12.3 s, 4 min 5 s, 2 h 3 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"


def _line(value: Any) -> str:
    """A component with its options, as a recipe writes it on one line; what is not set is left out."""
    if isinstance(value, Mapping):
        options = {key: item for key, item in value.items() if item is not None and key != "name"}
        inside = ", ".join(f"{key} {shown(item)}" for key, item in options.items())
        name = str(value["name"]) if "name" in value else ""
        return f"{name} ({inside})" if name and inside else name or inside
    return (
        value if isinstance(value, str) else shown(value) if isinstance(value, float) else dump_inline(value)
    )


def _fraction(match: re.Match[str]) -> str:
    text = shown(float(match[0]))
    return text if text.endswith("/255") else match[0]


def _cut(text: str, length: int = 200) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _name(run: RunHistory) -> str:
    """The name of the recipe."""
    if isinstance(name := read_environment(run.path).get("recipe"), str) and name:
        return name
    log = log_start(run.path)
    if match := re.search(r"started: (.+), [^,]+, \d+ training (images|tasks)", log):
        return match[1]
    return run.path.resolve().name


def _place(path: Path) -> str:
    return "/".join(path.resolve().parts[-2:])


def _summary(path: Path) -> str:
    try:
        return recipe_summary(path)
    except OSError:
        return ""


def _last_record(run: RunHistory) -> Mapping[str, Any]:
    lines = read_tail(run.path / METRICS_LOG)
    return lines[-1] if lines else {}
