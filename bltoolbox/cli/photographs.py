"""``blt evaluate --images``: a trained model and baselines on whole photographs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bltoolbox.cli.common import print_json, say, show
from bltoolbox.cli.display.tables import print_rows
from bltoolbox.errors import UsageError

if TYPE_CHECKING:
    from bltoolbox.config.registry import Registry
    from bltoolbox.restoration.metrics import ImageMetric
    from bltoolbox.restoration.protocol import Photograph


def evaluate_on_photographs(
    source: str,
    folder: Path,
    noise: str | None,
    metric: str,
    against: str,
    seed: int,
    registry: Registry,
    as_json: bool,
) -> None:
    """Print a table for each metric, or all figures as JSON."""
    from bltoolbox.restoration.metrics import pick_listed
    from bltoolbox.restoration.model import Model
    from bltoolbox.restoration.noise_level import parse_noise, show_noise
    from bltoolbox.restoration.protocol import compare_on_photographs, find_photographs

    metrics = pick_listed(metric)
    level = parse_noise(noise)
    if isinstance(level, str):
        raise UsageError(f"--noise {level} is not a level to simulate; give one, e.g. 25/255")
    find_photographs(folder)
    model = Model.load(source, registry=registry)
    sigma = model.problem.noise_level if level is None else level
    if sigma is None:
        raise UsageError("the noise of the model has no level; give one, e.g. --noise 25/255")
    label = Path(source).stem or source
    names = [name.strip() for name in against.split(",") if name.strip()]

    def started(number: int, count: int, name: str) -> None:
        if not as_json:
            say(f"{number + 1} of {count}: {name}")

    rows = list(
        compare_on_photographs(
            model, label, folder, sigma, metrics, names, registry, seed=seed, started=started
        )
    )
    if as_json:
        print_json(_facts(source, folder, sigma, seed, rows, metrics))
        return
    for chosen in metrics:
        _print(rows, chosen, f"{chosen.title}, noise {show_noise(sigma)}, seed {seed}")
    spent = {
        method: sum(row.seconds[method] for row in rows) for method in rows[0].metrics if method != "noisy"
    }
    show("seconds: " + ", ".join(f"{method} {seconds:.1f}" for method, seconds in spent.items()))


def _print(rows: Sequence[Photograph], metric: ImageMetric, title: str) -> None:
    from bltoolbox.restoration.protocol import means

    methods = list(rows[0].metrics)
    table = [["image", "size", *methods]]
    for row in rows:
        figures = [metric.number(row.metrics[method][metric.name]) for method in methods]
        table.append([row.name, f"{row.width}×{row.height}", *figures])
    table.append(["mean", "", *(metric.number(value) for value in means(rows, metric.name).values())])
    print_rows(table, left=2, title=title)


def _facts(
    source: str,
    folder: Path,
    sigma: float,
    seed: int,
    rows: Sequence[Photograph],
    metrics: Sequence[ImageMetric],
) -> dict[str, Any]:
    from bltoolbox.restoration.protocol import means

    return {
        "model": source,
        "images": str(folder),
        "noise": sigma,
        "seed": seed,
        "mean": {metric.name: means(rows, metric.name) for metric in metrics},
        "seconds": {method: sum(row.seconds[method] for row in rows) for method in rows[0].metrics},
        "photographs": [
            {
                "image": row.name,
                "width": row.width,
                "height": row.height,
                "metrics": row.metrics,
                "seconds": row.seconds,
            }
            for row in rows
        ],
    }
