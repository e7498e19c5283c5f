"""The page as text: ``static/page.html`` has its structure, and escapes everything that comes from a run.

The policy of the page allows only these styles and scripts, identified by their hashes, and embedded pictures: whatever
a recipe contains, no request leaves the browser, and nothing in a recipe can be executed.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

import bltoolbox
from bltoolbox.config.problem_keys import task_noun
from bltoolbox.reports.html.curves import charts, constants, curves
from bltoolbox.reports.html.facts import RunFacts, differences
from bltoolbox.reports.html.pictures import Learned, Pictures, data_uri
from bltoolbox.reports.html.tables import columns, ladder, ledger, measured
from bltoolbox.runs.files import finite
from bltoolbox.runs.metric import most_common

PAGE = Path(__file__).parent / "static"
_SCRIPTS = ("ticks.js", "chart.js", "viewer.js", "page.js")
#: Colours of runs; further lines are also distinguished by dashes.
COLOURS = 8
_MARKS = {
    "finished": "Finished",
    "running": "Running",
    "failed": "Failed",
    "interrupted": "Interrupted",
    "unknown": "Unknown",
}


def build_page(runs: Sequence[RunFacts], pictures: Sequence[Pictures], notes: Sequence[str]) -> str:
    """The page as HTML."""
    style = _read("style.css")
    script = "\n".join(_read(name) for name in _SCRIPTS)
    several = len(runs) > 1
    all_notes = list(notes)
    for facts, seen in zip(runs, pictures, strict=True):
        prefix = f"{facts.label}: " if several else ""
        all_notes += [prefix + note for note in [*facts.notes(), *seen.notes]]
    metric = most_common([facts.metric for facts in runs])
    drawn = [curves(facts.run, metric) for facts in runs]
    constant = constants(drawn, metric)
    return _template().render(
        policy=f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'",
        style=style,
        script=script,
        data=_json(_payload(runs, pictures, drawn, constant)),
        constants=[entry for entries in constant.values() for entry in entries],
        heading=f"{len(runs)} runs of {_names(runs)}" if several else runs[0].name,
        footer=f"bltoolbox {bltoolbox.__version__} · {time.strftime('%Y-%m-%d %H:%M')}",
        runs=runs,
        several=several,
        summaries=list(dict.fromkeys(facts.summary for facts in runs if facts.summary)),
        states=[facts.state for facts in runs],
        marks=_MARKS,
        colours=COLOURS,
        notes=all_notes,
        columns=columns(runs) if several else (),
        settings=differences(runs) if several else (),
        ladder=None if several else ladder(runs[0]),
        ledger=ledger(runs),
    )


@functools.cache
def _template() -> Template:
    """Compiled once, which takes longer than to fill it in."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(_read("page.html"))


def _payload(
    runs: Sequence[RunFacts],
    pictures: Sequence[Pictures],
    drawn: Sequence[dict[str, Any]],
    constant: Collection[str],
) -> dict[str, Any]:
    """The data that the scripts draw: curves that vary, images and filters; each picture once."""
    assets: dict[str, str] = {}
    metric = most_common([facts.metric for facts in runs])

    def asset(png: bytes) -> str:
        key = hashlib.blake2b(png, digest_size=8).hexdigest()
        assets.setdefault(key, data_uri(png))
        return key

    def scenes(seen: Pictures) -> list[dict[str, Any]]:
        return [
            {
                "label": scene.label,
                "width": scene.width,
                "height": scene.height,
                "variants": [
                    {
                        "key": variant.key,
                        "name": variant.name,
                        "values": dict(variant.values),
                        "asset": asset(variant.png),
                    }
                    for variant in scene.variants
                ],
            }
            for scene in seen.scenes
        ]

    def learned(result: Learned) -> dict[str, Any]:
        return {
            "filters": [asset(png) for png in result.filters],
            "weights": result.weights,
            "places": result.places,
            "potentials": result.potentials,
            "maps": [
                {
                    "caption": picture.caption,
                    "scale": picture.scale,
                    "assets": [asset(png) for png in picture.images],
                }
                for picture in result.maps
            ],
        }

    return {
        "metric": metric.as_dict(),
        "metrics": [entry.as_dict() for entry in measured(runs)],
        "charts": [
            chart for chart in charts(metric, task_noun(runs[0].run.recipe)) if chart["key"] not in constant
        ],
        "runs": [
            {
                "label": facts.label,
                "colour": number % COLOURS,
                "curves": drawn[number],
                "scenes": scenes(seen),
                "learned": learned(seen.learned),
            }
            for number, (facts, seen) in enumerate(zip(runs, pictures, strict=True))
        ],
        "assets": assets,
    }


def _names(runs: Sequence[RunFacts]) -> str:
    names = list(dict.fromkeys(facts.name for facts in runs))
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def _json(data: Any) -> str:
    """JSON that cannot close the element that contains it."""
    text = json.dumps(finite(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _read(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
