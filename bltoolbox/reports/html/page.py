"""The page as text: everything that comes from a run is escaped, styles and scripts stand in the page itself.

The page's own policy allows nothing but these very styles and scripts, known by their hashes, and pictures that are
part of it: whatever a recipe says, no request leaves the browser and nothing of a recipe can be executed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import bltoolbox
from bltoolbox.reports.html.curves import charts, curves
from bltoolbox.reports.html.facts import LEDGER, RunFacts, differences, duration
from bltoolbox.reports.html.pictures import Learned, Pictures, data_uri
from bltoolbox.runs.files import finite
from bltoolbox.runs.metric import most_common

PAGE = Path(__file__).parent / "static"
_SCRIPTS = ("ticks.js", "chart.js", "viewer.js", "page.js")
#: Colours of runs; beyond them lines are told apart by their dashes as well.
COLOURS = 8
_MARKS = {
    "finished": "Finished",
    "running": "Running",
    "failed": "Failed",
    "interrupted": "Interrupted",
    "unknown": "Unknown",
}


def build_page(runs: Sequence[RunFacts], pictures: Sequence[Pictures], notes: Sequence[str]) -> str:
    """The whole page."""
    style = _read("style.css")
    script = "\n".join(_read(name) for name in _SCRIPTS)
    several = len(runs) > 1
    heading = f"{len(runs)} runs of {_names(runs)}" if several else runs[0].name
    words = {
        "title": escape(f"{heading} · bltoolbox report"),
        "heading": escape(heading),
        "policy": f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'",
        "style": style,
        "script": script,
        "lead": _lead(runs),
        "notes": _notes(runs, pictures, notes),
        "overview": _comparison(runs) if several else _single(runs[0]),
        "ledger": _ledger(runs),
        "recipes": "".join(_recipe(one, number, several) for number, one in enumerate(runs)),
        "footer": escape(f"bltoolbox {bltoolbox.__version__} · {time.strftime('%Y-%m-%d %H:%M')}"),
        "data": _json(_payload(runs, pictures)),
    }
    text = _read("page.html")
    # In one pass, so that nothing within a value is taken for a placeholder.
    parts = text.split("@@")
    parts[1::2] = [words[name] for name in parts[1::2]]
    return "".join(parts)


def _payload(runs: Sequence[RunFacts], pictures: Sequence[Pictures]) -> dict[str, Any]:
    """What the scripts draw: curves, images and filters; each picture once."""
    assets: dict[str, str] = {}
    metric = most_common([one.metric for one in runs])

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
                        "key": one.key,
                        "name": one.name,
                        "value": one.values.get(metric.name),
                        "asset": asset(one.png),
                    }
                    for one in scene.variants
                ],
            }
            for scene in seen.scenes
        ]

    def learned(found: Learned) -> dict[str, Any]:
        return {
            "filters": [asset(png) for png in found.filters],
            "weights": found.weights,
            "places": found.places,
            "potentials": found.potentials,
        }

    return {
        "metric": metric.as_dict(),
        "charts": charts(metric),
        "runs": [
            {
                "label": one.label,
                "colour": number % COLOURS,
                "curves": curves(one.run, metric),
                "scenes": scenes(seen),
                "learned": learned(seen.learned),
            }
            for number, (one, seen) in enumerate(zip(runs, pictures, strict=True))
        ],
        "assets": assets,
    }


def _names(runs: Sequence[RunFacts]) -> str:
    names = list(dict.fromkeys(one.name for one in runs))
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def _lead(runs: Sequence[RunFacts]) -> str:
    summaries = list(dict.fromkeys(one.summary for one in runs if one.summary))
    text = f"<p class='lead'>{escape(summaries[0])}</p>" if len(summaries) == 1 else ""
    if len(runs) > 1:
        counts = {state: sum(one.state == state for one in runs) for state in _MARKS}
        marks = "".join(
            f"<span class='mark {state}'>{count} {_MARKS[state].lower()}</span>"
            for state, count in counts.items()
            if count
        )
        return f"{text}<p class='facts'>{marks}</p>"
    one = runs[0]
    mark = f"<span class='mark {one.state}'>{_MARKS[one.state]}</span>"
    said = f"<span>{escape(one.status)}</span>" if one.status != one.state else ""
    return f"{text}<p class='facts'>{mark}{said}<span class='path'>{escape(str(one.run.path))}</span></p>"


def _notes(runs: Sequence[RunFacts], pictures: Sequence[Pictures], notes: Sequence[str]) -> str:
    found = list(notes)
    for one, seen in zip(runs, pictures, strict=True):
        prefix = f"{one.label}: " if len(runs) > 1 else ""
        found += [prefix + note for note in [*one.notes(), *seen.notes]]
    if not found:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in found)
    return f"<section class='notes' aria-label='Notes'><h2>Worth knowing</h2><ul>{items}</ul></section>"


def _single(one: RunFacts) -> str:
    cards = "".join(
        f"<div class='card'><h3>{escape(name)}</h3><p class='figure'>{escape(figure)}</p>"
        f"<p class='remark'>{escape(remark)}</p></div>"
        for name, figure, remark in one.cards()
    )
    rows = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in one.sections())
    ladder = _ladder(one)
    summary = (
        f"<div class='panel'><h3>What was run</h3><dl class='sections'>{rows}</dl></div>" if rows else ""
    )
    return (
        "<section aria-labelledby='result'><h2 id='result'>Result</h2>"
        f"<div class='cards'>{cards}</div><div class='pair'>{ladder}{summary}</div></section>"
    )


def _ladder(one: RunFacts) -> str:
    """The metric as bars, from the measured images upwards."""
    metric, steps = one.metric, one.qualities()
    if len(steps) < 2:
        return ""
    values = [value for _, _, value in steps]
    least = 50 * 10.0**-metric.digits
    low = min(values) - 0.35 * max(max(values) - min(values), least)
    rows = "".join(
        f"<tr><th scope='row'>{escape(name)}</th><td class='bar'>"
        f"<svg viewBox='0 0 100 10' preserveAspectRatio='none' aria-hidden='true'>"
        f"<rect class='bar-{key}' width='{100 * (value - low) / (max(values) - low):.2f}' height='10' rx='1'/></svg>"
        f"</td><td class='number'>{metric.number(value)}</td></tr>"
        for key, name, value in steps
    )
    count = one.environment().get("images", {})
    sets = count.get("evaluation") if isinstance(count, dict) else None
    count = sets[0] if isinstance(sets, list) and sets else None
    where = f"mean over {count} evaluation images" if count else "mean over the evaluation images"
    return (
        f"<div class='panel'><h3>{escape(metric.title)}</h3>"
        f"<table class='ladder'><caption>{escape(where)}</caption><tbody>{rows}</tbody></table></div>"
    )


def _comparison(runs: Sequence[RunFacts]) -> str:
    """A row for each run: how it went, what it found, and the settings in which it differs."""
    columns: list[tuple[str, list[str], int | None]] = []

    metric = most_common([one.metric for one in runs])
    form = f".{metric.digits}f"

    def add(name: str, values: Iterable[float | None], form: str, best: Any = None) -> None:
        found = list(values)
        known = [value for value in found if value is not None]
        if not known:
            return
        winner = found.index(best(known)) if best and len(known) > 1 else None
        columns.append((name, ["–" if value is None else format(value, form) for value in found], winner))

    add(f"Test {metric.label}", (one.run.tested(metric) for one in runs), form, metric.best)
    add("Best at a check", (one.run.best("evaluation", metric) for one in runs), form, metric.best)
    add(f"Validation {metric.label}", (one.run.validated(metric) for one in runs), form, metric.best)
    add("Final loss", (one.final_loss() for one in runs), ".4g", min)
    add("Steps", (one.run.step_count for one in runs), ",.0f")
    add("Computations", (one.run.computations for one in runs), ",.0f")
    times = ["–" if one.run.seconds is None else duration(one.run.seconds) for one in runs]
    columns.append(("Time", times, None))
    settings = [(key, cells, None) for key, cells in differences(runs)]
    head = "".join(f"<th scope='col'>{escape(name)}</th>" for name, _, _ in columns)
    head += "".join(f"<th scope='col'><code>{_breakable(key)}</code></th>" for key, _, _ in settings)
    body = ""
    for number, one in enumerate(runs):
        mark = f"<span class='mark {one.state}' title='{escape(one.status)}'>{_MARKS[one.state]}</span>"
        cells = "".join(
            f"<td class='number{' best' if number == winner else ''}'>{escape(cells[number])}</td>"
            for _, cells, winner in [*columns, *settings]
        )
        body += f"<tr>{_row_head(one, number)}<td>{mark}</td>{cells}</tr>"
    return (
        "<section aria-labelledby='result'><h2 id='result'>Side by side</h2><div class='panel scroll' tabindex='0' "
        "role='region' aria-label='Table of the runs'><table class='grid'><thead><tr><th scope='col'>Run</th>"
        f"<th scope='col'>Status</th>{head}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def _row_head(one: RunFacts, number: int) -> str:
    return f"<th scope='row'><span class='swatch c{number % COLOURS}'></span>{escape(one.label)}</th>"


def _breakable(key: str) -> str:
    """A dotted key that may be broken behind its dots."""
    return escape(key).replace(".", ".<wbr>")


def _ledger(runs: Sequence[RunFacts]) -> str:
    found = [one.ledger() for one in runs]
    known = {key: words for key, words in LEDGER.items() if any(one.get(key) for one in found)}
    if not known:
        return "<p>Nothing has been spent yet.</p>"
    if len(runs) == 1:
        head = "<th scope='col'>What</th><th scope='col'>Count</th>"
        rows = "".join(
            f"<tr><th scope='row'><b>{escape(name)}</b> <span class='remark'>{escape(what)}</span></th>"
            f"<td class='number'>{_count(found[0].get(key))}</td></tr>"
            for key, (name, what) in known.items()
        )
    else:
        head = "<th scope='col'>Run</th>" + "".join(
            f"<th scope='col' title='{escape(what)}'>{escape(name)}</th>" for name, what in known.values()
        )
        rows = "".join(
            f"<tr>{_row_head(one, number)}"
            + "".join(f"<td class='number'>{_count(found[number].get(key))}</td>" for key in known)
            + "</tr>"
            for number, one in enumerate(runs)
        )
    return (
        "<div class='panel scroll' tabindex='0' role='region' aria-label='Cost ledger'><table class='grid'>"
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _recipe(one: RunFacts, number: int, several: bool) -> str:
    parts = [("resolved", "Resolved recipe, every default written out", one.resolved())]
    parts += [("given", "As it was given", one.given())] if one.given() else []
    if command := one.environment().get("command"):
        parts.append(("command", "Command", " ".join(map(str, command)) if isinstance(command, list) else ""))
    if log := one.log():
        parts.append(("log", "End of the log", log))
    blocks = []
    for key, title, text in parts:
        name = f"{key}-{number}"
        shown = " open" if key == "resolved" and not several else ""
        blocks.append(
            f"<details class='source'{shown}><summary>{title}</summary><div class='code'>"
            f"<button type='button' class='copy' data-copy='{name}'>Copy</button>"
            f"<pre tabindex='0' id='{name}'><code>{escape(text)}</code></pre></div></details>"
        )
    environment = {key: value for key, value in one.environment().items() if key in _SURROUNDINGS and value}
    facts = " · ".join(f"{_SURROUNDINGS[key]} {value}" for key, value in environment.items())
    about = f"<p class='remark'>{escape(facts)}</p>" if facts else ""
    inside = about + "".join(blocks)
    if not several:
        return inside
    swatch = f"<span class='swatch c{number % COLOURS}'></span>"
    path = f"<p class='remark path'>{escape(str(one.run.path))}</p>"
    return (
        f"<details class='run'><summary>{swatch}{escape(one.label)}</summary>"
        f"<div class='inside'>{path}{inside}</div></details>"
    )


_SURROUNDINGS = {
    "bltoolbox": "bltoolbox",
    "torch": "torch",
    "python": "Python",
    "device": "device",
    "threads": "threads",
    "platform": "",
}


def _json(data: Any) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(finite(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _read(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
