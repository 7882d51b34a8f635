"""The report in real headless Chromium: no errors, no fetches, and everything that can be moved moves something."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chromium import Browser, find_chromium
from PIL import Image

from server.commands.report import report
from server.results.groups import group_runs
from server.results.report.page import render
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
    return report([str(finished_runs)], tmp_path_factory.mktemp("page") / "report.html")


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


def choose(browser: Browser, selector: str, value: int) -> None:
    """Move a slider or a selection, as a person's input does."""
    browser.evaluate(
        f"(() => {{ const e = document.querySelector({selector!r}); e.value = {value}; "
        "for (const kind of ['input', 'change']) e.dispatchEvent(new Event(kind, {bubbles: true})); })()"
    )


def test_every_figure_is_drawn(opened: Browser) -> None:
    assert opened.evaluate("document.title") == "FedAvg and FPL on toy"
    for name in ("results", "rounds", "losses", "cost"):
        assert opened.evaluate(f"document.querySelectorAll('#{name} svg.chart').length") > 0, name
    lacking = 3  # of the mean of the last rounds: a domain, the average and the worst are partial
    assert opened.evaluate("document.querySelectorAll('#results rect.column').length") == 3 * 2 * 5 - lacking
    assert opened.evaluate("document.querySelectorAll('.matrix svg').length") == 3
    widths = opened.evaluate("[...document.querySelectorAll('#prototypes img')].map((e) => e.naturalWidth)")
    assert len(widths) == 1, "FPL's; FedAvg has no prototypes"
    assert widths[0] > 500
    assert "[object" not in opened.evaluate("document.body.textContent")
    assert "undefined" not in opened.evaluate("document.querySelector('main').innerText")
    assert "NaN" not in opened.evaluate("document.querySelector('main').innerHTML")


def test_the_confusion_matrices_follow_run_and_round(opened: Browser) -> None:
    cells = "[...document.querySelectorAll('.matrix rect')].map((e) => e.getAttribute('fill')).join()"
    last = opened.evaluate(cells)
    choose(opened, "#confusion-round", 0)
    untrained = opened.evaluate(cells)
    assert untrained != last
    choose(opened, "#confusion select", 3)
    assert opened.evaluate(cells) != untrained
    label = opened.evaluate("document.querySelector('.matrix svg').getAttribute('aria-label')")
    assert "% right" in label


def test_the_score_rule_changes_the_table(opened: Browser) -> None:
    shown = "[...document.querySelectorAll('[data-rule]')].filter((e) => !e.hidden).map((e) => e.dataset.rule).join()"
    assert opened.evaluate(shown) == "final"
    opened.click("#rules label:nth-of-type(2)")
    assert opened.evaluate(shown) == "last_n"
    opened.press("ArrowRight")
    assert opened.evaluate(shown) == "best_round"


def test_lines_can_be_hidden_and_measures_chosen(opened: Browser) -> None:
    lines = "document.querySelectorAll('#rounds figure:first-child path.line').length"
    caption = "document.querySelector('#rounds figcaption').textContent"
    assert opened.evaluate(lines) == 2
    opened.click("#rounds .legend button")
    assert opened.evaluate(lines) == 1
    opened.click("#rounds .legend button")
    assert opened.evaluate(lines) == 2
    opened.click("#rounds input[value='Test loss'] + span")
    assert opened.evaluate(caption).startswith("Test loss, average over domains")
    choose(opened, "#rounds select", 2)
    assert opened.evaluate(caption).startswith("Test loss, bright")
    panels = "[...document.querySelectorAll('#rounds .panel > p')].map((e) => e.textContent).join()"
    assert opened.evaluate(panels) == "bright,dark,noisy"
    opened.click("#rounds input[value='by method'] + span")
    assert opened.evaluate(panels) == "FedAvg,FPL (seeds 0,1,2)"


def test_the_cursor_shows_numbers_to_keyboard_and_pointer(opened: Browser) -> None:
    tip = "document.getElementById('tip').hidden ? '' : document.getElementById('tip').innerText"
    assert opened.evaluate(tip) == ""
    opened.evaluate("document.querySelector('#rounds svg.chart').focus({preventScroll: true})")
    opened.press("ArrowLeft")
    opened.press("ArrowLeft")
    shown = opened.evaluate(tip)
    assert "round 2" in shown
    assert "FedAvg" in shown
    assert "FPL" in shown
    assert "±" in shown
    opened.press("Home")
    assert "round 0" in opened.evaluate(tip)
    opened.press("Escape")
    assert opened.evaluate(tip) == ""
    box = opened.evaluate(
        "(() => { const b = document.querySelector('.panel svg.chart'); b.scrollIntoView({block: 'center', behavior: "
        "'instant'}); const r = b.getBoundingClientRect(); return [r.right - 20, r.top + r.height / 2]; })()"
    )
    opened.frame()
    opened.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
    assert "round 4" in opened.evaluate(tip)
    assert opened.evaluate("document.querySelectorAll('.panel .cursor').length") >= 3  # the panels move together


def test_bars_and_points_tell_their_numbers_and_follow_the_rule(opened: Browser) -> None:
    tip = "document.getElementById('tip').innerText"
    charts = "[...document.querySelectorAll('#results [data-rule]:not([hidden]) svg.chart')]"
    assert opened.evaluate(f"{charts}.length") == 2
    opened.evaluate(f"{charts}[0].focus({{preventScroll: true}})")
    opened.press("Home")
    assert [word in opened.evaluate(tip) for word in ("bright", "FedAvg", "FPL", "±")] == [True] * 4
    opened.evaluate(f"{charts}[1].focus({{preventScroll: true}})")
    opened.press("End")
    assert [word in opened.evaluate(tip) for word in ("accuracy", "bytes of a run", "B")] == [True] * 3
    opened.click("#rules label:nth-of-type(3)")
    opened.frame()
    assert opened.evaluate(f"{charts}.map((e) => e.getBoundingClientRect().width > 200)") == [True, True]


def test_long_names_wrap(browser: Browser, finished_runs: Path, tmp_path: Path) -> None:
    boards = group_runs(find_runs([str(finished_runs)], finished=False), name=attrgetter("title"))
    boards[0].groups[0].label = "FedAvg with a name of many words, such as a sweep over three settings gives it"
    path = tmp_path / "report.html"
    path.write_text(render(boards))
    browser.size(1000)
    browser.open(path)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 1000
    assert browser.evaluate("document.querySelectorAll('#rounds .name tspan').length") >= 4
    assert browser.evaluate("document.querySelector('table.scores tbody th').getBoundingClientRect().width") < 400
    outside = (
        "[...document.querySelectorAll('#rounds .name')].filter((e) => e.getBoundingClientRect().right > 1000).length"
    )
    assert browser.evaluate(outside) == 0


def test_numbers_behind_a_figure_can_be_opened(opened: Browser) -> None:
    opened.evaluate("document.querySelector('#rounds details').open = true")
    rows = "document.querySelectorAll('#rounds details tbody tr').length"
    opened.evaluate("new Promise((resolve) => setTimeout(resolve, 50))")
    assert opened.evaluate(rows) == 5


def test_dark_and_light_follow_the_person_and_the_button(opened: Browser, tmp_path: Path) -> None:
    opened.screenshot(tmp_path / "light.png", full=False)
    assert _brightness(tmp_path / "light.png") > 220
    named = "document.getElementById('theme').innerText.trim()"
    assert opened.evaluate(named).endswith("Dark")  # the button says where it leads
    opened.click("#theme")
    assert opened.evaluate(named).endswith("Light")
    opened.screenshot(tmp_path / "dark.png", full=False)
    assert _brightness(tmp_path / "dark.png") < 50
    opened.click("#theme")
    opened.media(prefers_color_scheme="dark", prefers_reduced_motion="reduce")
    opened.frame()
    assert opened.evaluate("document.documentElement.dataset.theme") == "dark"


def _brightness(path: Path) -> float:
    with Image.open(path) as image:
        return float(np.asarray(image.convert("L")).mean())


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_contrast(opened: Browser, scheme: str) -> None:
    opened.media(prefers_color_scheme=scheme, prefers_reduced_motion="reduce")
    opened.frame()
    assert opened.evaluate("document.documentElement.dataset.theme") == scheme
    opened.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    assert opened.evaluate(CONTRAST) == []


@pytest.mark.parametrize("width", [320, 390, 768])
def test_nothing_sticks_out_on_a_narrow_screen(opened: Browser, width: int) -> None:
    opened.size(width, 844, mobile=True)
    opened.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    targets: Any = opened.evaluate(
        "[...document.querySelectorAll('button, select, .choice span')].filter((e) => e.getBoundingClientRect().width)"
        ".map((e) => [e.textContent.slice(0, 20), e.getBoundingClientRect().height]).filter((pair) => pair[1] < 24)"
    )
    assert targets == []


def test_text_of_a_client_is_not_executed(opened: Browser) -> None:
    assert opened.evaluate("document.title") == "FedAvg and FPL on toy"
    assert opened.evaluate("document.querySelectorAll('img:not([src^=\"data:image/png;\"])').length") == 0


def test_everything_that_acts_can_be_reached_by_keyboard(opened: Browser) -> None:
    unreachable = opened.evaluate(
        "[...document.querySelectorAll('button, select, input, summary, svg.chart, a[href]')]"
        ".filter((e) => e.tabIndex < 0 || e.disabled).map((e) => e.outerHTML.slice(0, 60))"
    )
    assert unreachable == []
    unnamed = opened.evaluate(
        "[...document.querySelectorAll('button, select, input')].filter((e) => !(e.textContent.trim() "
        "|| e.getAttribute('aria-label') || e.labels?.length)).map((e) => e.outerHTML.slice(0, 60))"
    )
    assert unnamed == []
