"""``python -m docs.generate.gallery [NAME...]``: run the scripts of docs/gallery, and write their pages and pictures.

A script is Python in cells, ``# %%`` for code and ``# %% [markdown]`` for text, as editors and jupytext know them. Its
page has the text, the code, what the code printed and the figures it drew. ``make gallery`` runs all of them.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = Path(__file__).parents[1] / "gallery"
HEADER = "<!-- Written by `make gallery` from {name}.py. Do not edit. -->"
#: Bytes of a picture; larger ones get fewer colours.
LARGEST = 100_000
_CELL = re.compile(r"^# %%( \[markdown\])?\n", re.MULTILINE)


@dataclass(frozen=True)
class Cell:
    text: str
    is_code: bool


def cells(source: str) -> list[Cell]:
    """The cells of a script; what is before the first one is not shown."""
    _, *parts = _CELL.split(source)
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [Cell(text.strip() if not kind else _uncommented(text), not kind) for kind, text in pairs]


def _uncommented(text: str) -> str:
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in text.strip().splitlines())


def run(script: Path, folder: Path) -> str:
    """The page of a script, which is run; its pictures are written to ``folder``."""
    parts, names = [HEADER.format(name=script.stem)], {"__name__": "__main__"}
    title = cells(script.read_text(encoding="utf-8"))[0].text.partition("\n")[0].removeprefix("# ")
    number = 0
    for cell in cells(script.read_text(encoding="utf-8")):
        if not cell.is_code:
            parts.append(cell.text)
            continue
        parts.append(f"```python\n{cell.text}\n```")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            drawn = _execute(cell.text, str(script), names)
        if printed.getvalue():
            parts.append(f"```text\n{printed.getvalue().rstrip()}\n```")
        for picture in _pictures(drawn):
            number += 1
            name = f"{script.stem}-{number}.png"
            (folder / name).write_bytes(picture)
            parts.append(f"![{title}]({name})")
    return "\n\n".join(parts) + "\n"


def _execute(text: str, name: str, names: dict[str, Any]) -> list[Figure]:
    """Run a cell; as in a notebook, a figure that is its last expression is shown, and so are those of pyplot."""
    from matplotlib import pyplot
    from matplotlib.figure import Figure

    tree = ast.parse(text, name)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), names)
    shown = (
        eval(compile(ast.Expression(last.value), name, "eval"), names) if isinstance(last, ast.Expr) else None
    )
    figures = [pyplot.figure(number) for number in pyplot.get_fignums()]
    pyplot.close("all")
    return figures + ([shown] if isinstance(shown, Figure) and shown not in figures else [])


def _pictures(figures: list[Figure]) -> Iterator[bytes]:
    from PIL import Image

    for figure in figures:
        drawn = io.BytesIO()
        figure.savefig(drawn, dpi=100, bbox_inches="tight", pil_kwargs={"optimize": True})
        for colours in (128, 64, 32, 16):
            if len(drawn.getvalue()) <= LARGEST:
                break
            fewer = Image.open(io.BytesIO(drawn.getvalue())).convert("RGB").quantize(colours)
            drawn = io.BytesIO()
            fewer.save(drawn, "PNG", optimize=True)
        yield drawn.getvalue()


def scripts(folder: Path = FOLDER) -> list[Path]:
    return sorted(folder.glob("*.py"))


def index(folder: Path = FOLDER) -> str:
    """All examples, with a picture and the first sentence of each."""
    parts = [
        HEADER.replace("{name}.py", "its scripts"),
        "# Gallery",
        "Short scripts with their output, made by `make gallery` in minutes on two CPU cores. Each is a Python file"
        " beside its page.",
    ]
    for script in scripts(folder):
        title, _, text = cells(script.read_text(encoding="utf-8"))[0].text.partition("\n\n")
        title = title.removeprefix("# ")
        parts.append(f"## [{title}]({script.stem}.md)")
        parts.append(text.partition("\n\n")[0])
        parts.append(f"[![{title}]({script.stem}-1.png)]({script.stem}.md)")
    return "\n\n".join(parts) + "\n"


def main(names: list[str]) -> int:
    os.environ.setdefault("MPLBACKEND", "Agg")
    chosen = [script for script in scripts() if not names or script.stem in names]
    if len(chosen) < len(names):
        print(f"there are {', '.join(script.stem for script in scripts())}", file=sys.stderr)
        return 2
    for script in chosen:
        started = time.process_time()
        text = run(script, FOLDER)
        script.with_suffix(".md").write_text(text, encoding="utf-8")
        print(f"{script.stem}: {time.process_time() - started:.0f} s of processor time", flush=True)
    (FOLDER / "index.md").write_text(index(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
