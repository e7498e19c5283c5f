"""The steps in recipes/compare: for every method the same number of candidates, judged on data that is held out.

    python tests/benchmarks/tune_steps.py RECIPE LOG.jsonl [KEY=VALUE]...

Each variant of the recipe whose optimizer has a step (or, without gradients, a radius) is run at 1/3, 1, 3 and 10 times
that of the recipe, rounded to the ladder …, 1, 3, 10, 30, …. If the best of the four is the first or the last, two more
on that side follow, once. Runs are judged by the metric of the held-out data; the evaluation data is not loaded. A run
that fails is worse than any other. Repeat the command to continue: what LOG.jsonl contains is not run again.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bltoolbox import load_recipe, run
from bltoolbox.config.recipe import recipe_variants
from bltoolbox.errors import BltError

#: Positions on the ladder relative to the step of the recipe.
FIRST = (-1, 0, 1, 2)
#: How many follow on the side of a best step at an end.
MORE = 2


def rung(step: float) -> int:
    """The position of a step on the ladder 1, 3, 10, 30, …."""
    return round(2 * math.log10(step))


def value(position: int) -> float:
    decade, odd = divmod(position, 2)
    return float(f"{3 if odd else 1}e{decade}")


def tuned_key(upper_optimizer: dict[str, Any]) -> str | None:
    """The option to tune; None for a method that chooses its steps."""
    numbers = [key for key in ("step", "radius") if isinstance(upper_optimizer.get(key), float | int)]
    return numbers[0] if numbers else None


class Tuning:
    """The candidates of one recipe, with a log that a repeated command continues."""

    def __init__(self, recipe: str, log: Path, overrides: Sequence[str]) -> None:
        self.recipe, self.log, self.overrides = recipe, log, list(overrides)
        lines = log.read_text().splitlines() if log.exists() else []
        self.records = [json.loads(line) for line in lines]

    def measure(self, variant: str, key: str, step: float) -> dict[str, Any]:
        """The held-out metric of one run, higher is better; −∞ for a run that fails."""
        for record in self.records:
            if (record["variant"], record["step"]) == (variant, step):
                return record
        settings = ["evaluation=null", "validation.evaluation=false"] if self.has_images else []
        began, score, note = time.process_time(), -math.inf, ""
        try:
            overrides = [*self.overrides, *settings, f"variant={variant}", f"upper_optimizer.{key}={step}"]
            result = run(self.recipe, overrides)
            note, best = result.status, result.validation
            if best is not None and math.isfinite(best):
                score = best if result.metric.higher else -best
        except BltError as error:
            note = str(error)
        seconds = round(time.process_time() - began, 1)
        record = {"variant": variant, "step": step, "score": score, "note": note, "cpu": seconds}
        self.records.append(record)
        with self.log.open("a") as log:
            log.write(json.dumps(record) + "\n")
        print(record, flush=True)
        return record

    def tune(self, variant: str) -> None:
        recipe = load_recipe(self.recipe, [*self.overrides, f"variant={variant}"])
        self.has_images = recipe.evaluation is not None
        options = recipe.upper_optimizer.options
        key = tuned_key(options)
        if key is None:
            return
        centre = rung(options[key])
        positions = [centre + offset for offset in FIRST]
        best = self._best(variant, key, positions)
        if best in (positions[0], positions[-1]):
            side = -1 if best == positions[0] else 1
            positions += [best + side * (k + 1) for k in range(MORE)]
            best = self._best(variant, key, positions)
        end = {min(positions): " ↓", max(positions): " ↑"}.get(best, "")
        tried = ", ".join(f"{value(position):g}" for position in sorted(positions))
        print(f"{variant}: {tried}: {value(best):g}{end}", flush=True)

    def _best(self, variant: str, key: str, positions: Sequence[int]) -> int:
        scores = {position: self.measure(variant, key, value(position))["score"] for position in positions}
        return max(scores, key=lambda position: scores[position])


def main() -> None:
    recipe, log, *overrides = sys.argv[1:]
    tuning = Tuning(recipe, Path(log), overrides)
    for variant in recipe_variants(recipe):
        tuning.tune(variant)


if __name__ == "__main__":
    main()
