"""The report in real headless Chromium, light and dark, narrow and printed: no errors, no fetches, nothing cut off."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from chromium import Browser, find_chromium

from goldfinch.record import find_runs
from goldfinch.results.groups import group_runs
from goldfinch.results.report.page import render, write_report

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
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture
def opened(browser: Browser, page: Path) -> Iterator[Browser]:
    """The page on a desk, in light."""
    browser.errors.clear()
    browser.requests.clear()
    browser.size(1280)
    browser.open(page)
    browser.show("light")
    yield browser
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []


def test_every_figure_is_drawn_without_scripts(opened: Browser) -> None:
    assert opened.evaluate("document.scripts.length") == 0
    for name in ("results", "rounds", "losses", "confusion", "prototypes", "clients", "cost"):
        sizes = opened.evaluate(f"[...document.querySelectorAll('#{name} figure svg')].map((e) => e.clientWidth)")
        assert sizes, name
    assert opened.evaluate("document.querySelectorAll('#prototypes svg').length") == 1, "FedAvg has no prototypes"
    assert "[object" not in opened.evaluate("document.body.textContent")
    assert "None" not in opened.evaluate("document.querySelector('main').innerText")
    assert "nan" not in opened.evaluate("document.querySelector('#rounds').innerHTML").split()


def test_text_of_a_client_is_not_executed(opened: Browser) -> None:
    """Its message would set the page's title to "broken in"."""
    assert opened.evaluate("document.title") == "FedAvg and FPL on toy"
    assert opened.evaluate("document.querySelectorAll('img').length") == 0


UNFOLD = "document.querySelectorAll('details').forEach((e) => { e.open = true; })"
STROKE = "getComputedStyle(document.querySelector('#rounds figure > div svg path[stroke^=\"var(--line0\"]')).stroke"


@pytest.mark.parametrize(
    ("scheme", "media", "stroke"),
    [
        ("light", "", "rgb(0, 114, 178)"),
        ("dark", "", "rgb(86, 168, 224)"),
        ("dark", "print", "rgb(0, 114, 178)"),
    ],
    ids=["light", "dark", "printed"],
)
def test_text_has_contrast_and_lines_the_page_s_colours(scheme: str, media: str, stroke: str, opened: Browser) -> None:
    opened.show(scheme, media)
    opened.evaluate(UNFOLD)
    assert opened.evaluate(CONTRAST) == []
    assert opened.evaluate(STROKE) == stroke


def test_a_printed_page_is_as_wide_as_the_paper(opened: Browser) -> None:
    opened.size(718)  # A4 within margins of a centimetre
    opened.show("light", "print")
    assert opened.evaluate("document.documentElement.scrollWidth") <= 718


@pytest.mark.parametrize("width", [320, 500, 768])
def test_nothing_sticks_out_on_a_narrow_screen(width: int, opened: Browser) -> None:
    opened.size(width, 844, mobile=True)
    opened.evaluate(UNFOLD)
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    targets: Any = opened.evaluate(
        "[...document.querySelectorAll('summary')].filter((e) => e.getBoundingClientRect().width)"
        ".map((e) => [e.textContent.slice(0, 20), e.getBoundingClientRect().height]).filter((pair) => pair[1] < 24)"
    )
    assert targets == []


def test_long_names_wrap(browser: Browser, finished_runs: Path, tmp_path: Path) -> None:
    boards = group_runs(find_runs([str(finished_runs)], finished=False), name=attrgetter("title"))
    boards[0].rows[0].label = "FedAvg with a name of many words, such as a sweep over three settings gives it"
    path = tmp_path / "report.html"
    path.write_text(render(boards))
    browser.size(1000)
    browser.open(path)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 1000
    assert browser.evaluate("document.querySelector('table.scores tbody th').getBoundingClientRect().width") < 400
