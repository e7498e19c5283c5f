"""The page of a run in a real browser: it draws, zooms and slides, complains of nothing and asks nobody."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Page, browser, find_browser
from test_report import TINY

from bltoolbox import load_recipe, run
from bltoolbox.config.names import REPORT_FILE
from bltoolbox.reports.html.build import write_report

pytestmark = pytest.mark.skipif(
    find_browser() is None, reason="no Chromium is installed (chromium, google-chrome)"
)

SIZES = {"desktop": (1280, 900, False), "phone": (390, 844, True)}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page of one run, one of two, and one of a run whose test images are not restored at checks."""
    folder = tmp_path_factory.mktemp("runs")
    unwatched = ["validation.evaluation=false", "baseline=null", "budget={steps: 3}"]
    for name, more in (("one", []), ("two", ["seed=1", "baseline=null"]), ("unwatched", unwatched)):
        run(load_recipe("smoke", [*TINY, "budget={steps: 30}", *more]), out=folder / name)
    write_report([folder / "one", folder / "two"], folder / "both.html")
    reports = {name: folder / name / REPORT_FILE for name in ("one", "unwatched")}
    return {**reports, "both": folder / "both.html"}


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(window: Page) -> Iterator[Page]:
    """A page that must end without a complaint and without having asked the network."""
    window.prefer(color_scheme="light", reduced_motion="no-preference")
    yield window
    assert window.complaints == []
    assert window.requests == []


def view(page: Page, chart: str = "loss") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        page.run(f"document.querySelector('[data-chart={chart}] .plot').dataset.view")
    )
    return found


def place(page: Page) -> float:
    return float(page.run("document.querySelector('.divider').getAttribute('aria-valuenow')"))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["one", "both"])
def test_everything_is_drawn(pages: dict[str, Path], page: Page, name: str, size: str) -> None:
    width, height, mobile = SIZES[size]
    page.open(pages[name], width, height, mobile=mobile)
    assert page.run("document.documentElement.scrollWidth") <= width, "nothing sticks out at the right"
    assert page.run("document.querySelectorAll('.chart').length") >= 7
    drawn = page.run(
        "[...document.querySelectorAll('.chart')].map((c) => c.querySelectorAll('path.line[d^=M]').length)"
    )
    assert all(drawn), drawn
    ticks = "[...document.querySelectorAll('.chart')].map((c) => c.querySelectorAll('.x-tick').length)"
    assert min(page.run(ticks)) >= 2, "a single number does not show the scale"
    assert page.run("document.querySelectorAll('.filters img').length") == 2
    loaded = "[...document.images].every((i) => i.complete && i.naturalWidth > 0)"
    page.wait(loaded)
    assert page.run("[...document.images].every((i) => i.hasAttribute('alt'))")
    unnamed = (
        "[...document.querySelectorAll('button, select')].filter((e) => e.offsetParent && !("
        "e.getAttribute('aria-label') || e.textContent.trim() || e.closest('label'))).length"
    )
    assert page.run(unnamed) == 0
    large = "[...document.querySelectorAll('button, select')].every((e) => !e.offsetParent || e.offsetHeight >= 30)"
    assert page.run(large), "large enough for a finger"


def test_a_line_is_named_where_there_could_be_others(pages: dict[str, Path], page: Page) -> None:
    page.open(pages["unwatched"])
    keys = "[...document.querySelectorAll('[data-chart={}] .keys button')].map((key) => key.textContent)"
    assert page.run(keys.format("psnr")) == ["validation images"]
    assert page.run(keys.format("loss")) == []


def test_the_divider_follows_mouse_and_keys(pages: dict[str, Path], page: Page) -> None:
    page.open(pages["one"])
    clip = "document.querySelector('.layer.left').style.clipPath"
    assert place(page) == 50
    page.drag(page.place("#stage", 0.5), page.place("#stage", 0.25))
    assert place(page) == pytest.approx(25, abs=1) and "75%" in page.run(clip).replace("75.0%", "75%")[:30]
    assert page.run("document.activeElement.getAttribute('role')") == "slider"
    for key, expected in (("ArrowRight", 27), ("ArrowLeft", 25), ("End", 100), ("Home", 0), ("PageUp", 10)):
        page.press(key)
        assert place(page) == pytest.approx(expected, abs=1), key
    assert "measured" in page.run("document.querySelector('.divider').getAttribute('aria-valuetext')")


def test_images_are_chosen_zoomed_and_moved(pages: dict[str, Path], page: Page) -> None:
    page.open(pages["one"])
    source = "document.querySelector('.layer.left img').src"
    first = page.run(source)
    page.click(".thumbs button:nth-child(2)")
    assert page.run(source) != first
    page.run("(() => { const s = document.querySelector('.side select'); s.value = 'clean';"
             " s.dispatchEvent(new Event('change')); })()")  # fmt: skip
    assert page.run("document.querySelector('.tag.left').textContent") == "true"
    page.click(".side .tools button[aria-label='Zoom in']")
    transform = "document.querySelector('.layer.left img').style.transform"
    zoomed = page.run(transform)
    assert "scale(1.5)" in zoomed
    before = place(page)
    page.drag(page.place("#stage", 0.8, 0.8), page.place("#stage", 0.7, 0.6))
    assert page.run(transform) != zoomed and place(page) == before, "a zoomed image is moved, not divided"
    page.mouse("mouseWheel", page.place("#stage", 0.5, 0.5), deltaX=0, deltaY=-100)
    page.wait("document.querySelector('.side output').textContent === '188 %'")
    page.click(".side .tools button[aria-label='Reset the zoom of the image']")
    assert "scale(1)" in page.run(transform)


def test_plots_zoom_and_reset(pages: dict[str, Path], page: Page) -> None:
    page.open(pages["one"])
    plot = "[data-chart=loss] .plot"
    whole = view(page)
    ticks = "[...document.querySelectorAll('[data-chart=loss] .x-tick')].map((t) => t.textContent).join()"
    written = page.run(ticks)
    page.drag(page.place(plot, 0.4), page.place(plot, 0.6))
    near = view(page)
    assert whole["x"][0] < near["x"][0] < near["x"][1] < whole["x"][1]
    assert page.run(ticks) != written
    page.mouse("mouseWheel", page.place(plot, 0.5), deltaX=0, deltaY=-100)
    page.wait_for_frames()
    page.wait(f"JSON.parse(document.querySelector('{plot}').dataset.view).x[0] !== {near['x'][0]}")
    nearer = view(page)
    assert nearer["x"][1] - nearer["x"][0] < near["x"][1] - near["x"][0]
    page.press("0")
    assert view(page) == whole
    page.press("+", text="+")
    assert view(page) != whole
    page.click("#reset-all")
    assert view(page) == whole
    # A box zooms both axes.
    page.drag(page.place(plot, 0.4, 0.2), page.place(plot, 0.7, 0.7))
    assert view(page)["y"] != whole["y"]
    page.click("[data-chart=loss] .chart-head button:last-child")
    assert view(page) == whole


def test_values_are_told_under_the_pointer_and_by_keys(pages: dict[str, Path], page: Page) -> None:
    page.open(pages["both"])
    page.mouse("mouseMoved", page.place("[data-chart=psnr] .plot", 0.5))
    page.wait_for_frames()
    tip = page.run("document.querySelector('[data-chart=psnr] .tip').textContent")
    assert "dB" in tip and "seed=0" in tip and "seed=1" in tip
    page.run("document.querySelector('[data-chart=loss] .plot').focus()")
    page.press("ArrowRight")
    page.press("ArrowRight")
    said = page.run("document.getElementById('say').textContent")
    assert "computations" in said and "seed=0," in said
    page.press("Escape")
    assert not page.run("document.querySelector('[data-chart=loss] .tip')")


def test_axes_can_be_changed(pages: dict[str, Path], page: Page) -> None:
    page.open(pages["one"])
    against_cost = view(page)
    page.click("#axis button:nth-child(2)")
    assert view(page)["x"] != against_cost["x"]
    assert page.run("document.querySelector('#axis [aria-pressed=true]').textContent") == "seconds"
    was = view(page, "psnr")["log"]["y"]
    page.click("[data-chart=psnr] .chart-head button:first-child")
    assert view(page, "psnr")["log"]["y"] is not was
    page.click("#logx")
    assert view(page)["log"]["x"] is True


def test_runs_and_lines_can_be_hidden(pages: dict[str, Path], page: Page) -> None:
    page.open(pages["both"])
    lines = "document.querySelectorAll('[data-chart=psnr] path.line').length"
    both = page.run(lines)
    page.click("#legend button:first-child")
    assert page.run(lines) == both / 2
    page.click(".filters li:first-child button")
    assert page.run("document.querySelectorAll('[data-chart=potentials] path.line').length") == 1


def test_the_recipe_is_copied(pages: dict[str, Path], page: Page, tmp_path: Path) -> None:
    page.open(pages["one"])
    page.run("navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); }")
    page.click("[data-copy='resolved-0']")
    page.wait("window.copied")
    copied = tmp_path / "copied.yaml"
    copied.write_text(page.run("window.copied"))
    resolved = load_recipe(pages["one"].parent / "resolved.yaml")
    assert load_recipe(copied).to_dict() == resolved.to_dict(), "25/255 is the same number, easier to read"
    assert page.run("document.querySelector('[data-copy]').textContent") == "Copied"


CONTRAST = """
(() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgba = (colour) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data]; };
  const light = ([r, g, b]) => { const f = (c) => ((c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b); };
  const behind = (node) => { for (; node; node = node.parentElement) {
    const found = rgba(getComputedStyle(node).backgroundColor); if (found[3] === 255) return found; }
    return [255, 255, 255]; };
  const bad = [];
  for (const node of document.querySelectorAll('body *:not(script):not(style):not(option)')) {
    if (!node.offsetParent || node.closest(':disabled') || node.closest('.tag, .divider, .logo')) continue;
    if (![...node.childNodes].some((one) => one.nodeType === 3 && one.textContent.trim())) continue;
    const [ink, paper] = [light(rgba(getComputedStyle(node).color)), light(behind(node))];
    const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    if (ratio < 4.5) bad.push(node.className + ' ' + node.textContent.slice(0, 30) + ' ' + ratio.toFixed(2));
  }
  return bad;
})()
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_both_themes(pages: dict[str, Path], page: Page, scheme: str) -> None:
    page.prefer(color_scheme=scheme)
    page.open(pages["both"])
    assert page.run(CONTRAST) == []
    paper = "getComputedStyle(document.body).backgroundColor"
    before = page.run(paper)
    page.click("#theme")
    assert page.run(paper) != before, "the button turns the page to the other theme"
    assert page.run(CONTRAST) == []
    page.click("#theme")
    assert page.run(paper) == before
    page.run("localStorage.clear()")


def test_nothing_moves_for_those_who_do_not_want_it(pages: dict[str, Path], page: Page) -> None:
    page.prefer(reduced_motion="reduce")
    page.open(pages["one"])
    assert page.run("getComputedStyle(document.documentElement).scrollBehavior") == "auto"
    page.run("document.querySelector('#theme').focus()")
    page.press("Tab", code="Tab", windowsVirtualKeyCode=9)
    assert page.run("document.activeElement.matches('.divider:focus-visible')")
    page.press("Tab", code="Tab", windowsVirtualKeyCode=9)
    seen = page.run("getComputedStyle(document.activeElement).outlineStyle")
    assert seen == "solid", "the focus can be seen"
