from __future__ import annotations

import re
import shlex
import shutil
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support.records import rewrite

from common import choices
from common.composition import compose_config
from common.errors import ConfigError
from common.settings import load_settings
from common.text import counted, duration, listing, size
from goldfinch.cli import main
from goldfinch.commands.figure import draw
from goldfinch.record import find_runs
from goldfinch.results.overrides import repeat_command
from goldfinch.results.report.page import write_report
from goldfinch.results.table import scored_tables


@pytest.fixture(scope="module")
def html(finished_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = write_report([str(finished_runs)], tmp_path_factory.mktemp("page") / "report.html")
    return path.read_text()


# ---- which runs belong together --------------------------------------------------------------------------------------


def test_no_runs_is_an_error(finished_runs: Path, tmp_path: Path) -> None:
    same = str(finished_runs / "fpl-0")
    assert len(find_runs([same, same], finished=False)) == 1
    for finished in (True, False):
        with pytest.raises(ConfigError, match="holds no"):
            find_runs([str(tmp_path)], finished=finished)
    with pytest.raises(ConfigError, match="is not a folder"):
        find_runs([str(tmp_path / "nowhere")])
    (tmp_path / "events.jsonl").write_text("")
    (tmp_path / "config.yaml").write_text("just: [broken")
    with pytest.raises(ConfigError, match=r"config\.yaml cannot be read"):
        find_runs([str(tmp_path)], finished=False)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("last", "told"),
    [
        (
            '{"event": "failed", "time": 1.0, "round": 1, "reason": "two rounds <b>in a row</b>"}',
            '<p class="bad">FPL failed after round 1: two rounds &lt;b&gt;in a row&lt;/b&gt;</p>',
        ),
        ('{"event": "stopped", "time": 1.0, "round": 2}\n{"event": "rou', "can go on with resume=true"),
        ("", '<p class="bad">FPL has not finished'),
    ],
    ids=["failed", "stopped, then killed while writing", "killed"],
)
def test_a_run_that_did_not_end_well_is_reported_as_far_as_it_came(
    last: str, told: str, finished_runs: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished_runs / "fpl-0", tmp_path / "run")
    events = tmp_path / "run" / "events.jsonl"
    kept = [line for line in events.read_text().splitlines() if '"finish"' not in line]
    events.write_text("\n".join([*kept, last]))
    (tmp_path / "run" / "summary.json").unlink()
    assert told in write_report([str(tmp_path)]).read_text()


def test_a_run_that_has_not_ended_is_left_out_of_a_table_and_named_below_it(
    finished_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("fpl-0", "fedavg-0"):
        shutil.copytree(finished_runs / name, tmp_path / name)
    events = tmp_path / "fpl-0" / "events.jsonl"
    kept = [line for line in events.read_text().splitlines() if '"finish"' not in line]
    events.write_text("\n".join(kept))
    (tmp_path / "fpl-0" / "summary.json").unlink()
    both = [str(tmp_path / "fpl-0"), str(tmp_path / "fedavg-0")]
    for folders in (both, [str(tmp_path)]):
        (board,) = scored_tables(folders)
        assert [row.label for row in board.rows] == ["fedavg"]
        assert [note for note in board.notes() if "Left out, since they have not ended: fpl with seed 0" in note]
        draw("bars", folders, tmp_path / "bars.png")
        assert f"left out, since they have not ended: {both[0]}" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="fpl-0 holds no finished run: a run is going on or was stopped"):
        scored_tables(both[:1])


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["experiment=demo", "method=fedavg", "engine=ray", "engine.actors=2"],
        ["method=fpl", "method.temperature=0.3", "views=randconv", "train.weight_decay=1e-4", "seed=7"],
        ["data.domains=[signs,sketch]", "train.precision=bfloat16"],
    ],
)
def test_the_command_gives_the_same_configuration(overrides: list[str]) -> None:
    raw = compose_config(overrides)
    words = shlex.split(repeat_command(raw))
    assert words[:2] == ["goldfinch", "run"]
    assert {"method", "data"} <= {word.partition("=")[0] for word in words[2:]}
    again = compose_config(words[2:])
    for place in ("output", "choices", "tracker"):
        raw.pop(place)
        again.pop(place)
    assert again == raw
    assert load_settings(words[2:]).identity == load_settings(overrides).identity


def test_the_command_of_a_choice_that_is_not_here_names_it_and_all_its_settings(tmp_path: Path) -> None:
    """With the folder of the user's choices it gives the same run; without it, it fails and trains nothing else."""
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "ours.yaml").write_text("_target_: strategies.fedprox.FedProx\nmu: 0.3\n")
    choices.search(tmp_path)
    raw = compose_config(["method=ours", "views=randconv", "seed=3"])
    here = shlex.split(repeat_command(raw))
    assert here.pop() == f"--config-dir={tmp_path}"
    del choices.FOLDERS[1:]
    elsewhere = shlex.split(repeat_command(raw))
    assert "method.mu=0.3" in elsewhere
    for words in (here, elsewhere):
        with pytest.raises(ConfigError, match="method=ours: no such choice"):
            compose_config(words[2:])
    choices.search(tmp_path)
    for words in (here, elsewhere):
        again = compose_config(words[2:])
        assert (again["method"], again["seed"], again["views"]) == (raw["method"], 3, raw["views"])
    del choices.FOLDERS[1:]


def test_the_command_keeps_a_setting_that_is_no_longer_known() -> None:
    """A run of another version is repeated with it, or not at all."""
    raw = compose_config(["method=fedprox"])
    raw["method"]["former"] = 3
    assert "method.former=3" in shlex.split(repeat_command(raw))


# ---- the page --------------------------------------------------------------------------------------------------------


class Outline(HTMLParser):
    """Tags, ids, links and images of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.sources: list[str] = []
        self.headings: list[int] = []
        self.unnamed: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.tags.append(tag)
        if found.get("id"):
            self.ids.append(str(found["id"]))
        if tag == "a":
            self.links.append(str(found.get("href")))
        self.sources += [str(found[name]) for name in ("src", "srcset", "data-src") if name in found]
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if found.get("role") == "img" and not found.get("aria-label"):
            self.unnamed.append(tag)


@pytest.mark.long
def test_the_page_fetches_nothing_and_its_policy_forbids_it(html: str) -> None:
    outline = Outline(html)
    assert outline.sources == []
    assert "default-src 'none'" in unescape(html)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", html)
    assert {link.removeprefix("#") for link in outline.links} <= set(outline.ids)


def test_ids_are_unique_headings_descend_and_images_have_names(html: str) -> None:
    outline = Outline(html)
    assert len(outline.ids) == len(set(outline.ids))
    assert outline.headings[0] == 1
    assert outline.headings.count(1) == 1
    assert all(later - earlier <= 1 for earlier, later in zip(outline.headings, outline.headings[1:], strict=False))
    assert outline.unnamed == []


def test_text_of_a_client_stays_text(html: str) -> None:
    outline = Outline(html)
    assert "img" not in outline.tags
    assert "&lt;/script&gt;&lt;img src=x onerror=" in html


def test_the_page_is_whole_without_scripts(html: str) -> None:
    """It has none: figures are drawn, and styles are in one place, as its policy demands."""
    outline = Outline(html)
    assert "script" not in outline.tags
    assert "script-src" not in html
    assert not re.search(r"<[^>]+\sstyle=", html)
    assert outline.tags.count("style") == 1
    assert outline.tags.count("svg") > 20
    for name in ("results", "rounds", "losses", "confusion", "prototypes", "clients", "cost"):
        section = html[html.index(f'<section id="{name}">') :].partition("</section>")[0]
        assert "<svg" in section, name


@pytest.mark.usefixtures("undrawn")
def test_the_best_of_a_column_is_bold(tmp_path: Path, finished_runs: Path) -> None:
    for method, shift in (("fedavg", 0), ("fpl", 100)):
        for seed in (0, 1, 2):
            folder = tmp_path / f"{method}-{seed}"
            shutil.copytree(finished_runs / f"{method}-{min(seed, 1)}", folder)
            config = (folder / "config.yaml").read_text()
            (folder / "config.yaml").write_text(re.sub(r"^seed: \d", f"seed: {seed}", config, flags=re.MULTILINE))
            right = shift + seed * (1 + shift // 100)
            rewrite(folder / "scores.jsonl", lambda line, right=right: {**line, "count": 200, "correct": right})
    page = write_report([str(tmp_path)]).read_text()
    assert "<strong>51.00</strong>" in page
    assert "<strong>0.50</strong>" not in page
    assert f"goldfinch export {tmp_path}/fpl-0 --to models/fpl</pre>" in page


def test_hashes_versions_failures_and_commands_are_there(html: str, boards: Any) -> None:
    for record in boards[0].runs:
        assert record.summary["state_sha256"] in html
        for split in record.summary["splits"].values():
            assert split in html
    assert "BrokenError" in html
    assert "out of the ordinary" in html
    assert "goldfinch run" in html


@pytest.mark.usefixtures("undrawn")
def test_runs_of_different_data_are_not_compared(finished_runs: Path, tmp_path: Path) -> None:
    shutil.copytree(finished_runs / "fpl-0", tmp_path / "one")
    shutil.copytree(finished_runs / "fpl-0", tmp_path / "two")
    config = tmp_path / "two" / "config.yaml"
    config.write_text(config.read_text().replace("data: toy", "data: other"))
    page = write_report([str(tmp_path)]).read_text()
    assert page.count("<p>One run of toy") == 1
    assert page.count("<h3>other, ") == 4  # above its curves, losses, clients and costs


def test_the_command_line_writes_the_file(finished_runs: Path, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "page.html"
    assert main(["report", str(finished_runs / "fedavg-0"), "--output", str(target)]) == 0
    assert target.stat().st_size > 20_000
    assert main(["report", str(tmp_path / "nowhere")]) == 1


@pytest.mark.parametrize("name", ["page.pdf", "page", ""])
def test_a_page_is_an_html_file(finished_runs: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"name an \.html file"):
        write_report([str(finished_runs / "fedavg-0")], Path(name and tmp_path / name))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (size(999), "999\u00a0B"),
        (size(2.5e9), "2.5\u00a0GB"),
        (duration(599.6), "600\u00a0s"),
        (duration(3600), "60\u00a0min"),
        (duration(9000), "2\u00a0h 30\u00a0min"),
        (listing(["a", "b", "c"]), "a, b and c"),
        (counted(1, "run"), "one run"),
        (counted(13, "client"), "13 clients"),
    ],
    ids=["B", "GB", "minutes in s", "an hour in min", "hours", "three", "one counted", "many counted"],
)
def test_numbers_as_people_read_them(shown: str, expected: str) -> None:
    assert shown == expected
