"""Hooks of mkdocs (``mkdocs.yml``): what the site has beyond the pages as GitHub shows them.

* Mathematics between dollar signs becomes MathML when the site is built, so that a reader needs neither a network nor
  a script.
* A comment ``<!-- ::: bltoolbox.run -->`` becomes the reference of that name, in place of the summary below it.
* The changelog and the guide for contributors lie outside ``docs``, where GitHub looks for them; links to other files
  there lead to the repository.
"""

from __future__ import annotations

import html
import posixpath
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
        content = relinked((ROOT / source).read_text(encoding="utf-8"), "")
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri not in OUTSIDE:
        markdown = relinked(markdown, posixpath.dirname(f"docs/{page.file.src_uri}"))
    return _REFERENCE.sub(r"\1\n\n", markdown)


def relinked(text: str, folder: str) -> str:
    """A page from ``folder``: links to files outside ``docs`` lead to their page of the site, or to the repository."""
    home = folder.removeprefix("docs").removeprefix("/") if folder else ""

    def relinked_target(match: re.Match[str]) -> str:
        path, mark, anchor = match[1].partition("#")
        target = posixpath.normpath(posixpath.join(folder, path))
        page = {source: f"docs/{name}" for name, source in OUTSIDE.items()}.get(target, target)
        if not path or (page == target and folder and page.startswith("docs/")):
            return match[0]
        if page.startswith("docs/"):
            return f"]({posixpath.relpath(page.removeprefix('docs/'), home or '.')}{mark}{anchor})"
        return f"]({REPOSITORY}/blob/main/{page}{mark}{anchor})"

    return _LINK.sub(relinked_target, text)


def on_page_content(content: str, **_: Any) -> str:
    content = _INLINE.sub(lambda match: mathml(match[1], "inline"), content)
    return _DISPLAY.sub(lambda match: mathml(match[1], "block"), content)


def mathml(text: str, display: str) -> str:
    """TeX, as Markdown has escaped it, as MathML; bars of a norm keep the height of a letter."""
    result = convert(html.unescape(text).strip(), display=display)
    return result.replace("<mo>&#x02016;</mo>", '<mo stretchy="false" form="prefix">&#x02016;</mo>')
