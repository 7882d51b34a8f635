"""The report in real headless Chromium, light and dark, narrow and printed: no errors, no fetches, nothing cut off."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chromium import Browser, find_chromium
from PIL import Image

from server.results.groups import group_runs
from server.results.report.page import render, write_report
from server.results.run import find_runs

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="Chromium is not installed")

CONTRAST = """(() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => [r, g, b].map((v) => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const element of document.querySelectorAll('body *')) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    const box = element.getBoundingClientRect();
    if (!own || !box.width || ['SCRIPT', 'STYLE', 'TITLE', 'OPTION'].includes(element.tagName)) continue;
    if (element.closest('.hidden, .skip, [hidden], title')) continue;
    const style = getComputedStyle(element), svg = element instanceof SVGElement;
    const [a, b] = [light(parse(svg ? style.fill : style.color)), light(ground(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const where = `${element.tagName}.${element.getAttribute('class')} ${element.textContent.slice(0, 30)}`;
    if (ratio < 4.5) poor.push(`${where} ${ratio.toFixed(2)}`);
  }
  return poor;
})()"""


@pytest.fixture(scope="module")
def page(finished_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report([str(finished_runs)], tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def opened(browser: Browser, page: Path) -> Iterator[Browser]:
    """The page on a desk, in light."""
    browser.errors.clear()
    browser.requests.clear()
    browser.size(1280)
    browser.media(prefers_color_scheme="light", prefers_reduced_motion="reduce")
    browser.open(page)
    yield browser
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []


def test_every_figure_is_drawn_without_scripts(opened: Browser) -> None:
    assert opened.evaluate("document.title") == "FedAvg and FPL on toy"
    assert opened.evaluate("document.scripts.length") == 0
    for name in ("results", "rounds", "losses", "confusion", "prototypes", "clients", "cost"):
        sizes = opened.evaluate(f"[...document.querySelectorAll('#{name} figure svg')].map((e) => e.clientWidth)")
        assert sizes, name
    assert opened.evaluate("document.querySelectorAll('#prototypes svg').length") == 1, "FedAvg has no prototypes"
    assert "[object" not in opened.evaluate("document.body.textContent")
    assert "None" not in opened.evaluate("document.querySelector('main').innerText")
    assert "nan" not in opened.evaluate("document.querySelector('#rounds').innerHTML").split()


def test_lines_have_the_page_s_colours(opened: Browser) -> None:
    stroke = "getComputedStyle(document.querySelector('#rounds figure > div svg path[stroke^=\"var(--line0\"]')).stroke"
    assert opened.evaluate(stroke) == "rgb(0, 114, 178)"
    opened.media(prefers_color_scheme="dark")
    opened.frame()
    assert opened.evaluate(stroke) == "rgb(86, 168, 224)"


def test_long_names_wrap(browser: Browser, finished_runs: Path, tmp_path: Path) -> None:
    boards = group_runs(find_runs([str(finished_runs)], finished=False), name=attrgetter("title"))
    boards[0].groups[0].label = "FedAvg with a name of many words, such as a sweep over three settings gives it"
    path = tmp_path / "report.html"
    path.write_text(render(boards))
    browser.size(1000)
    browser.open(path)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 1000
    assert browser.evaluate("document.querySelector('table.scores tbody th').getBoundingClientRect().width") < 400


def test_dark_and_light_follow_the_person(opened: Browser, tmp_path: Path) -> None:
    opened.screenshot(tmp_path / "light.png", full=False)
    assert _brightness(tmp_path / "light.png") > 220
    opened.media(prefers_color_scheme="dark", prefers_reduced_motion="reduce")
    opened.frame()
    opened.screenshot(tmp_path / "dark.png", full=False)
    assert _brightness(tmp_path / "dark.png") < 60


def test_a_printed_page_is_light_and_as_wide_as_the_paper(opened: Browser, tmp_path: Path) -> None:
    opened.size(718)  # A4 within margins of a centimetre
    opened.call(
        "Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}]
    )
    opened.frame()
    assert opened.evaluate("document.documentElement.scrollWidth") <= 718
    opened.screenshot(tmp_path / "print.png", full=False)
    assert _brightness(tmp_path / "print.png") > 220
    opened.call("Emulation.setEmulatedMedia", media="", features=[])


def _brightness(path: Path) -> float:
    with Image.open(path) as image:
        return float(np.asarray(image.convert("L")).mean())


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_contrast(opened: Browser, scheme: str) -> None:
    opened.media(prefers_color_scheme=scheme, prefers_reduced_motion="reduce")
    opened.frame()
    opened.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    assert opened.evaluate(CONTRAST) == []


@pytest.mark.parametrize("width", [320, 390, 500, 768])
def test_nothing_sticks_out_on_a_narrow_screen(opened: Browser, width: int) -> None:
    opened.size(width, 844, mobile=True)
    opened.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    targets: Any = opened.evaluate(
        "[...document.querySelectorAll('summary')].filter((e) => e.getBoundingClientRect().width)"
        ".map((e) => [e.textContent.slice(0, 20), e.getBoundingClientRect().height]).filter((pair) => pair[1] < 24)"
    )
    assert targets == []


def test_text_of_a_client_is_not_executed(opened: Browser) -> None:
    assert opened.evaluate("document.title") == "FedAvg and FPL on toy"
    assert opened.evaluate("document.querySelectorAll('img').length") == 0


def test_everything_that_acts_can_be_reached_by_keyboard(opened: Browser) -> None:
    unreachable = opened.evaluate(
        "[...document.querySelectorAll('summary, a[href]')].filter((e) => e.tabIndex < 0)"
        ".map((e) => e.outerHTML.slice(0, 60))"
    )
    assert unreachable == []
