"""The documentation as a site: every page is in its navigation, it builds without a warning and without a network."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from browser import browser, find_browser
from conftest import ROOT

import bltoolbox
from bltoolbox import plugin

DOCS = ROOT / "docs"
#: Pages that the site takes from beside ``docs``.
OUTSIDE = {"changelog.md", "contributing.md"}
NEEDED = ("mkdocs", "material", "mkdocstrings_handlers", "latex2mathml", "black")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]


class Plain(yaml.SafeLoader):
    """Without the objects that only mkdocs can make."""


Plain.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def settings() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Plain)
    return loaded


def listed(entries: Any) -> Iterator[str]:
    """The pages of a navigation, in order."""
    if isinstance(entries, str):
        yield entries
    else:
        for entry in entries.values() if isinstance(entries, dict) else entries:
            yield from listed(entry)


def test_every_page_is_in_the_navigation_once() -> None:
    pages = list(listed(settings()["nav"]))
    assert len(set(pages)) == len(pages)
    assert set(pages) == {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} | OUTSIDE


def test_what_the_settings_name_exists() -> None:
    chosen = settings()
    assert {"search", "offline"} <= {name for name in chosen["plugins"] if isinstance(name, str)}
    assert {"default", "slate"} <= {palette.get("scheme") for palette in chosen["theme"]["palette"]}
    for name in (*chosen["extra_css"], *chosen["extra"]["polyfills"]):
        assert (DOCS / name).is_file(), name
    for name in chosen["hooks"]:
        assert (ROOT / name).is_file(), name


def test_every_public_name_has_a_place_in_the_reference() -> None:
    for module, page in ((bltoolbox, "python"), (plugin, "plugin")):
        marked = re.findall(
            r"^<!-- ::: ([\w.]+) -->$", (DOCS / "api" / f"{page}.md").read_text(), re.MULTILINE
        )
        assert set(marked) == {f"{module.__name__}.{name}" for name in module.__all__ if name[0] != "_"}


class Resources(HTMLParser):
    """What a page loads; links that a reader may follow do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        chosen = dict(attributes)
        loads = tag in ("script", "img", "iframe", "source", "video") or (
            tag == "link" and chosen.get("rel") in ("stylesheet", "preload", "icon", "preconnect")
        )
        if loads:
            self.addresses += filter(None, [chosen.get("src"), chosen.get("href")])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if MISSING:
        pytest.skip(f"pip install -e '.[docs]' for a site: {', '.join(MISSING)} not installed")
    target = tmp_path_factory.mktemp("site")
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(target)],
        cwd=ROOT,
        env={**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"},
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def test_a_reader_needs_no_network(site: Path) -> None:
    for path in site.rglob("*.html"):
        resources = Resources()
        resources.feed(path.read_text(encoding="utf-8"))
        assert resources.addresses
        for address in resources.addresses:
            assert not re.match(r"(https?:)?//", address), f"{path.relative_to(site)} loads {address}"
    for path in site.glob("*.css"):
        assert "http" not in path.read_text(encoding="utf-8")


def test_the_site_has_its_reference_and_its_mathematics(site: Path) -> None:
    reference = (site / "api" / "python.html").read_text(encoding="utf-8")
    for name in bltoolbox.__all__:
        assert f'id="bltoolbox.{name}"' in reference or name.startswith("_"), name
    assert 'id="bltoolbox.Model.restore"' in reference
    equations = (site / "mathematics.html").read_text(encoding="utf-8")
    assert equations.count("<math ") > 20
    assert "arithmatex" not in equations, "all of it is converted"
    assert not re.search(r"<m[a-z]+>[^<]*\\[a-z]+", equations), "and understood"
    for page in OUTSIDE:
        assert (site / page).with_suffix(".html").is_file(), page


def test_the_search_works_from_files(site: Path) -> None:
    if find_browser() is None:
        pytest.skip("no Chromium is installed")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, browser(Path(profile)) as page:
        page.call("Page.navigate", url=(site / "index.html").as_uri())
        page.wait("document.querySelector('.md-search__input')")
        page.run("document.querySelector('.md-search__input').focus()")
        page.call("Input.insertText", text="conjugate gradients")
        page.wait("document.querySelectorAll('.md-search-result__item').length > 2")
        assert not page.complaints
        assert not page.requests
