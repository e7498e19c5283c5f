"""Hooks of mkdocs (``mkdocs.yml``): what the site has beyond the pages as GitHub shows them.

* Mathematics between dollar signs becomes MathML when the site is built, so that a reader needs neither a network nor
  a script.
* A comment ``<!-- ::: bltoolbox.run -->`` becomes the reference of that name, in place of the summary below it.
* The changelog and the guide for contributors lie outside ``docs``, where GitHub looks for them.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
#: Pages of the site from files beside ``docs``.
OUTSIDE = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}

REPOSITORY = "https://github.com/bltoolbox/bltoolbox"

#: A comment with a name, between its heading and what GitHub shows instead: everything up to the next heading.
_REFERENCE = re.compile(r"^## \w+\n\n<!-- (::: [\w.]+) -->\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
_DISPLAY = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)
_LINK = re.compile(r"\]\((?!\w+:)([^)]+)\)")


def on_files(files: Files, config: Any) -> Files:
    for name, source in OUTSIDE.items():
        content = _moved((ROOT / source).read_text(encoding="utf-8"))
        files.append(File.generated(config, name, content=content))
    return files


def _moved(text: str) -> str:
    """A page from the root: links into ``docs`` lose that folder, others lead to the repository."""

    def moved(match: re.Match[str]) -> str:
        target = match[1]
        for name, source in OUTSIDE.items():
            target = re.sub(rf"^{re.escape(source)}", f"docs/{name}", target)
        if target.startswith("docs/"):
            return f"]({target.removeprefix('docs/')})"
        return match[0] if target.startswith("#") else f"]({REPOSITORY}/blob/main/{target})"

    return _LINK.sub(moved, text)


def on_page_markdown(markdown: str, **_: Any) -> str:
    return _REFERENCE.sub(r"\1\n\n", markdown)


def on_page_content(content: str, **_: Any) -> str:
    content = _INLINE.sub(lambda match: mathml(match[1], "inline"), content)
    return _DISPLAY.sub(lambda match: mathml(match[1], "block"), content)


def mathml(text: str, display: str) -> str:
    """TeX, as Markdown has escaped it, as MathML; bars of a norm keep the height of a letter."""
    result = convert(html.unescape(text).strip(), display=display)
    return result.replace("<mo>&#x02016;</mo>", '<mo stretchy="false" form="prefix">&#x02016;</mo>')
