"""Figures are made from run folders alone, show the right numbers, and refuse what they cannot show."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from common.errors import CheckpointError, ConfigError
from common.numerics import generator
from common.prototypes import PrototypeSet
from goldfinch.cli import main
from goldfinch.commands.figure import bars_of, curves_of, named_groups
from goldfinch.record import RunRecord, find_runs
from goldfinch.results.figures.charts import (
    CLASS_COLOURS,
    COLOURS,
    bars,
    convergence,
    fit_names,
    line_style,
    sensitivity,
)
from goldfinch.results.figures.prototypes import Panel, class_colours, draw_map, embed, prototype_figure
from goldfinch.results.figures.svg import inline_svg
from goldfinch.results.groups import group_runs
from goldfinch.results.report.figures import prototypes
from goldfinch.results.seeds import Value
from goldfinch.run_model import RunModel
from server.run.prototype_log import PrototypeLog
from tests.support.runs import run
from tests.support.scored import restate, scored_run
from tests.support.toy import CLASSES, DOMAINS, toy_settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of FPL, one of FedAvg, one of a method that keeps models on the devices."""
    root = tmp_path_factory.mktemp("figures")
    for seed in (0, 1):
        run(toy_settings("fpl", root / f"fpl-{seed}", seed=seed))
    run(toy_settings("fedavg", root / "fedavg"))
    run(toy_settings("single_set", root / "single"))
    return root


def texts(figure: Figure) -> list[str]:
    found = [figure.get_suptitle(), *(text.get_text() for axes in figure.axes for text in axes.texts)]
    for axes in figure.axes:
        legend = axes.get_legend()
        found += [text.get_text() for text in legend.get_texts()] if legend else []
        found += [axes.get_title(), axes.get_xlabel(), axes.get_ylabel()]
        found += [text.get_text() for text in (*axes.get_xticklabels(), *axes.get_yticklabels())]
    return found


# ---- the command -----------------------------------------------------------------------------------------------------


def test_title_size_and_labels_of_a_figure_can_be_chosen(folder: Path) -> None:
    words = ["--title", "Mine", "--size", "4x3", "--label", "fedavg=FedAvg"]
    assert main(["figure", "convergence", str(folder / "fedavg"), *words]) == 0
    with Image.open(folder / "fedavg" / "convergence.png") as drawn:
        assert drawn.size == (600, 450), "150 pixels an inch"
    shown = texts(curves_of(find_runs([str(folder / "fedavg")]), "Mine", ["fedavg=FedAvg"]))
    assert "Mine" in shown
    assert "FedAvg" in shown
    assert "fedavg" not in shown


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "suffix", "first"),
    [("bars", "pdf", b"%PDF-"), ("convergence", "svg", b"<?xml"), ("prototypes", "PNG", b"\x89PNG")],
    ids=["pdf", "svg", "PNG"],
)
def test_the_suffix_names_the_format_and_the_bytes_are_the_same_again(
    kind: str, suffix: str, first: bytes, folder: Path, tmp_path: Path
) -> None:
    paths = [tmp_path / name / f"figure.{suffix}" for name in ("one", "two")]
    for path in paths:
        words = ["figure", kind, str(folder / "fpl-0"), "--output", str(path)]
        assert main([*words, "--by", "pca"] if kind == "prototypes" else words) == 0
    assert paths[0].read_bytes().startswith(first)
    assert paths[0].read_bytes() == paths[1].read_bytes()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["heatmaps", "x"], "did you mean 'heatmap'"),
        (["bars", "nowhere"], "is not a folder"),
        (["prototypes", "FOLDER"], "prototypes shows one run; 4 were found"),
        (["prototypes", "FOLDER/fpl-0", "--by", "pc"], "did you mean 'pca'"),
        (["heatmap", "FOLDER/fpl-0", "FOLDER/fpl-1"], "vary in nothing but the seed"),
        (["prototypes", "FOLDER/fpl-0", "--samples", "0"], "must be 1 or more"),
        (["bars", "FOLDER", "--output", "x.jpeg"], ".png, .pdf, .svg; .jpeg"),
        (["bars", "FOLDER", "--output", "x"], "no suffix"),
        (["bars", "FOLDER/fedavg", "--size", "4"], "--size 7x4"),
        (["bars", "FOLDER/fedavg", "--size", "0x3"], "from 1 to 50"),
        (["bars", "FOLDER/fedavg", "--label", "FedAvg"], "OLD=NEW"),
        (["bars", "FOLDER/fedavg", "--label", "fedavgg=FedAvg"], "fedavg"),
        (["bars", "FOLDER/fedavg", "--column", "worst"], "--column: bars does not use it, only heatmap"),
        (["convergence", "FOLDER/fedavg", "--rule", "best_round"], "--rule: convergence does not use it"),
        (["convergence", "FOLDER/fedavg", "--axes", "seed"], "--axes: convergence does not use it"),
        (["bars", "FOLDER/fedavg", "--samples", "4"], "--samples: bars does not use it, only prototypes"),
        (["heatmap", "FOLDER", "--by", "pca"], "--by: heatmap does not use it, only prototypes"),
        (["prototypes", "FOLDER/fpl-0", "--label", "fpl=FPL"], "--label: prototypes does not use it"),
    ],
)
def test_mistakes_are_named(words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["figure", *(word.replace("FOLDER", str(folder)) for word in words)]) == 1
    assert message in capsys.readouterr().err


# ---- curves and bars -------------------------------------------------------------------------------------------------


def test_curves_are_the_means_over_seeds_of_history(folder: Path) -> None:
    runs = [RunRecord(folder / name) for name in ("fpl-0", "fpl-1", "fedavg")]
    drawn = {line.get_label(): line.get_xydata() for line in curves_of(runs).axes[0].get_lines()}
    assert set(drawn) == {"fpl", "fedavg (seed 0)"}
    last = [run.summary["average"] for run in runs[:2]]
    assert drawn["fpl"][-1].tolist() == pytest.approx([2, sum(last) / 2])
    assert len(drawn["fpl"]) == 3  # before the first round, after each of the two


def test_series_differ_in_more_than_colour() -> None:
    styles = [tuple(line_style(index).values()) for index in range(20)]
    assert len(set(styles)) == 20
    assert len({style[1:] for style in styles}) >= 10
    grey = [0.2126 * red + 0.7152 * green + 0.0722 * blue for red, green, blue in map(to_rgb, COLOURS)]
    assert max(grey) < 0.75, "all are seen on white"
    assert len(set(class_colours(14))) == 14


# Machado, Oliveira, Fernandes (IEEE TVCG 2009), severity 1; rows are of linear RGB.
VISIONS = {
    "most": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def oklab(linear: np.ndarray) -> np.ndarray:
    cones = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566]]
    cones.append([0.0883024619, 0.2817188376, 0.6299787005])
    lab = [[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099]]
    lab.append([0.0259040371, 0.7827717662, -0.8086757660])
    return np.cbrt(linear @ np.transpose(cones)) @ np.transpose(lab)


@pytest.mark.parametrize("vision", VISIONS)
def test_the_colours_of_ten_classes_differ_for_every_reader(vision: str) -> None:
    assert len(set(CLASS_COLOURS)) == 10
    values = np.array([to_rgb(colour) for colour in CLASS_COLOURS])
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    seen = oklab(np.clip(linear @ np.transpose(VISIONS[vision]), 0, 1))
    distances = np.linalg.norm(seen[:, None] - seen[None], axis=2)[np.triu_indices(10, 1)]
    assert distances.min() > (0.17 if vision == "most" else 0.09)


def test_long_titles_and_names_are_not_cut() -> None:
    name = "FedProto with a temperature of 0.07 and a contrast of 0.5, warm from the third round on"
    title = "office_caltech_10, one domain per client with a third of its samples, " * 2
    settings = {"a_rather_long_name_of_a_setting_that_is_swept_over": 1.0}
    panel = Panel("round 1: class means that clients sent", *np.zeros((5, 1, 2), int)[:, :, 0])
    panel = replace(panel, points=np.zeros((1, 2)), prototypes=np.zeros((1, 2)))
    for figure in (
        draw_map([panel] * 3, ["one domain of a long name"] * 4, [name] * CLASSES, title),
        convergence({name: {1: Value(10.0, 1.0), 2: Value(20.0, 2.0)}, "b": {1: Value(3.0, None)}}, title),
        bars(["one domain of a long name", "average"], {name: [Value(10.0, 1.0)] * 2}, title),
        sensitivity([entry(50.0), entry(60.0, **settings), entry(55.0, mu=0.7)]),
    ):
        figure.canvas.draw()
        box = figure.get_tightbbox()  # of all that is drawn, inches
        assert min(box.x0, box.y0) >= -0.01
        assert box.x1 <= figure.get_figwidth() + 0.01
        assert box.y1 <= figure.get_figheight() + 0.01


def test_a_figure_of_a_page_takes_its_colours_and_carries_no_style() -> None:
    curves = {"a": {1: Value(10.0, 1.0), 2: Value(12.0, 1.0)}, "b <i>": {1: Value(3.0, None)}}
    text = inline_svg(convergence(curves, "t"), 'what "it" shows', "one")
    assert "style" not in text
    for part in (
        'role="img"',
        "what &quot;it&quot; shows",
        "b &lt;i&gt;",
        "currentColor",
        "var(--line0",
        "var(--line1",
    ):
        assert part in text
    assert not re.search("#000000|#ffffff|#dddddd", text)
    other = inline_svg(convergence(curves, "t"), "", "two", paper=True)
    assert "var(" not in other
    ids = [set(re.findall(' id="([^"]+)"', each)) for each in (text, other)]
    assert ids[0]
    assert not ids[0] & ids[1], "an id is there once in a page"


def test_a_stranger_s_name_with_any_letters_is_drawn() -> None:
    odd = inline_svg(convergence({"a\x1b[31m\x00\udcff": {1: Value(3.0, None)}}, "\x07"), "", "one")
    assert "a\ufffd" in odd
    assert not re.search("[\x00-\x08\x1b]", odd)


def test_a_font_is_given_by_its_size_alone_in_every_release_of_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = convergence({"a": {1: Value(10.0, None)}}, "t")
    assert re.search('<text [^>]*font-size="[0-9.]+px"', inline_svg(figure, "", "one"))
    before_3_10 = b"""<svg xmlns="http://www.w3.org/2000/svg"><text style="font: 8px 'DejaVu Sans'">x</text></svg>"""
    monkeypatch.setattr(figure, "savefig", lambda stream, **how: stream.write(before_3_10))
    text = inline_svg(figure, "", "one")
    assert 'font-size="8px"' in text
    assert "DejaVu" not in text


def test_a_run_of_a_reproduced_table_is_called_as_its_row(folder: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(folder / "fedavg", tmp_path / "runs" / "fedavg-x" / "seed-0"))
    rows = [{"label": "FedAvg (warm)", "folders": {"0": str(place)}}]
    (tmp_path / "table.json").write_text(json.dumps({"rows": rows}))
    assert [group.label for group in named_groups([RunRecord(place)])] == ["FedAvg (warm)"]


def test_rows_of_two_reproduced_tables_with_one_label_are_two_curves(folder: Path, tmp_path: Path) -> None:
    runs: list[RunRecord] = []
    rows: list[dict[str, Any]] = []
    for name, domains in (("one", None), ("two", [DOMAINS[0]])):
        place = Path(shutil.copytree(folder / "fedavg", tmp_path / "runs" / name / "seed-0"))
        rows.append({"label": "FedAvg", "folders": {"0": str(place)}})
        runs.append(RunRecord(place))
        vars(runs[-1])["options"] = {**runs[-1].options, "data.domains": domains}
    (tmp_path / "table.json").write_text(json.dumps({"rows": rows}))
    labels = [group.label for group in named_groups(runs)]
    assert len(set(labels)) == 2


# ---- sweeps ----------------------------------------------------------------------------------------------------------


def entry(average: float, seed: int = 0, **settings: Any) -> RunRecord:
    at = {f"method.{name}": value for name, value in settings.items()}
    return scored_run(average, seed=seed, settings={"method.mu": 0.1, "method.delta": 0.1, **at})


def test_a_heat_map_has_the_mean_over_seeds_at_its_place() -> None:
    entries = [entry(50.0, 0, mu=0.2), entry(54.0, 1, mu=0.2), entry(60.0, delta=0.5), entry(70.0)]
    figure = sensitivity(entries, axes=["method.mu", "method.delta"])
    grid = np.asarray(figure.axes[0].get_images()[0].get_array())
    assert grid[0].tolist() == [70.0, 52.0]  # delta 0.1: mu 0.1, 0.2
    assert grid[1, 0] == 60.0
    assert np.isnan(grid[1, 1])
    assert {"70.0", "52.0", "60.0", "method.mu", "method.delta"} <= set(texts(figure))


def test_a_heat_map_pools_no_runs_that_a_table_keeps_apart() -> None:
    """The rules are those of tables: a run counts once, and runs of other code are another row."""
    copy = entry(50.0, 0, mu=0.2)
    copy.folder = Path("the same run from another engine")
    found = sensitivity([entry(50.0, 0, mu=0.2), copy, entry(53.0, 1, mu=0.2), entry(60.0, 0)])
    assert found.axes[0].get_lines()[0].get_ydata().tolist() == [60.0, 51.5], "not 51.0"
    assert found.get_suptitle().endswith("mu=0.1: seed 0"), "the place with fewer seeds is named"
    other = entry(70.0, 1, mu=0.2)
    restate(other, code="other")
    with pytest.raises(ConfigError, match=r"mu=0\.2 has runs that are no seeds of one row: fpl-0 .* and fpl-1 "):
        sensitivity([entry(50.0, 0, mu=0.2), other, entry(60.0, 0)])


def test_a_sweep_of_one_setting_is_a_line_in_numeric_order_and_of_more_is_refused() -> None:
    line = sensitivity([entry(30.0, mu=10.0), entry(20.0, mu=2.0), entry(10.0, mu=0.5)])
    assert line.axes[0].get_lines()[0].get_ydata().tolist() == [10.0, 20.0, 30.0]
    entries = [entry(1.0), entry(2.0, mu=1.0, delta=1.0, tau=3.0)]
    with pytest.raises(ConfigError, match=r"vary in method.delta, method.mu, method.tau; .* differ in one or two"):
        sensitivity(entries)
    with pytest.raises(ConfigError, match="vary in nothing but the seed; give the folders of runs with several values"):
        sensitivity([entries[0]], axes=["method.mu"])
    with pytest.raises(ConfigError, match=r"differ in method\.tau"):
        sensitivity(entries, axes=["method.mu", "method.delta"])
    with pytest.raises(ConfigError, match=r"did you mean 'method\.mu'"):
        sensitivity(entries, axes=["method.my"])
    with pytest.raises(ConfigError, match="c: no such column"):
        sensitivity([entries[0], entry(1.0, mu=9.0)], column="c")


def test_no_number_of_a_heat_map_is_bold() -> None:
    """Bold is a test's verdict in tables, and the highest spread is the worst."""
    entries = [entry(50.0), entry(60.0, mu=0.2), entry(60.0, delta=0.2)]
    figure = sensitivity(entries, axes=["method.mu", "method.delta"], column="spread")
    assert {text.get_weight() for text in figure.axes[0].texts} == {"normal"}


def test_a_title_names_the_rule_and_every_data_set_and_a_star_own_models() -> None:
    runs = [entry(50.0), entry(60.0, mu=0.2), scored_run(40.0, method="fedbn", data="other", personal=True)]
    for each in runs:
        each.rules["best_round"] = each.rules["final"]
    drawn = bars_of(runs, "best_round")
    assert drawn.get_suptitle().replace("\n", " ") == (
        "toy, p, other, p, best round by test score. * scored with each client's own model"
    )
    names = [text.get_text() for text in drawn.findobj(Text)]
    assert any("fedbn" in name and name.endswith("*") for name in names)
    assert sensitivity(runs[:2], rule="best_round").get_suptitle().endswith("average, %, best round by test score")
    assert bars_of(runs[:2], "final").get_suptitle() == "toy, p"


@pytest.mark.parametrize("inches", [(3.0, 2.5), (6.0, 3.8), (12.0, 4.0)])
def test_names_of_domains_and_long_labels_cover_nothing(inches: tuple[float, float]) -> None:
    value = Value(50.0, 1.0, False, 2)
    names = ["handwritten", "photographs", "average"]
    series = {"FPL with a very long name indeed, and more so (ours)": [value] * 3, "fedavg": [value] * 3}
    figure = bars(names, series, "title")
    figure.set_size_inches(*inches)
    fit_names(figure)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    places = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert all(left.x1 <= right.x0 for left, right in itertools.pairwise(places))
    assert axes.get_window_extent().width > 0.4 * figure.bbox.width


def test_bars_of_runs(folder: Path) -> None:
    runs = [RunRecord(folder / name) for name in ("fpl-0", "fpl-1", "fedavg")]
    figure = bars_of(runs, "final")
    assert {"fpl", "fedavg (seed 0)", "average", *DOMAINS} <= set(texts(figure))
    heights = [patch.get_height() for patch in figure.axes[0].patches]
    assert len(heights) == 2 * (len(DOMAINS) + 1)
    averages = [run.summary["average"] for run in runs[:2]]
    assert heights[len(DOMAINS)] == pytest.approx(sum(averages) / 2)


# ---- maps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["tsne", "pca"])
def test_a_figure_has_every_feature_and_every_prototype(by: str) -> None:
    draws = generator(0, "figure")
    centres = torch.rand(3, 16, generator=draws)
    labels = torch.arange(60) % 3
    features = centres[labels] + 0.05 * torch.rand(60, 16, generator=draws)
    sets = [features, centres, torch.zeros(0, 16)]
    (points, stars, none), _ = embed(sets, by)
    assert (points.shape, stars.shape, none.shape) == ((60, 2), (3, 2), (0, 2))
    distances = np.linalg.norm(points[:, None] - stars[None], axis=2)
    assert distances.argmin(1).tolist() == labels.tolist(), "a feature lies at the prototype of its own class"
    assert np.array_equal(points, embed(sets, by)[0][0])
    with pytest.raises(ConfigError, match="four points"):
        embed([features[:2]], by)
    with pytest.raises(ConfigError, match="features that differ"):
        embed([torch.ones(8, 16)], by)


def test_features_of_one_number_are_placed_on_a_line() -> None:
    (points,), _ = embed([torch.tensor([[1.0], [-1.0], [2.0], [-2.0]])], "pca")
    assert points.shape == (4, 2)
    assert not points[:, 1].any()


def test_a_figure_shows_each_kept_round_as_it_was(folder: Path) -> None:
    opened = RunModel(RunRecord.open(folder / "fpl-0"))
    first, last = prototype_figure(opened, per_domain=8).axes
    assert first.get_title() == "round 1: class means that clients sent"
    assert last.get_title() == "round 2: test features"
    assert len(last.collections[-1].get_offsets()) >= CLASSES  # the stars
    drawn = [sum(len(part.get_offsets()) for part in axes.collections[:-1]) for axes in (first, last)]
    assert drawn == [len(opened.pages[0].uploaded), 8 * len(DOMAINS)]
    alone = prototype_figure(RunModel(RunRecord.open(folder / "fedavg")), "pca", 8)
    assert [axes.get_title() for axes in alone.axes] == ["round 2: test features"]


def test_what_was_sent_is_shown_without_model_and_data(folder: Path) -> None:
    run = RunModel(RunRecord(folder / "fpl-0"))
    for axes, page in zip(prototype_figure(run, "pca", 0).axes, run.pages, strict=True):
        assert axes.get_title() == f"round {page.round}: class means that clients sent"
        drawn = [len(part.get_offsets()) for part in axes.collections]
        assert (sum(drawn[:-1]), drawn[-1]) == (len(page.uploaded), len(page.prototypes))
    with pytest.raises(ConfigError, match="four points"):
        prototype_figure(RunModel(RunRecord(folder / "fedavg")), "pca", 0)


def test_a_single_vector_has_no_figure(folder: Path, tmp_path: Path) -> None:
    one = PrototypeSet(torch.ones(1, 4), torch.tensor([0]), torch.ones(1))
    run = tmp_path / "run"
    shutil.copytree(folder / "fpl-0", run)
    shutil.rmtree(run / "prototypes")
    PrototypeLog(run / "prototypes").add(1, one, [])
    with pytest.raises(ConfigError, match="four points"):
        prototype_figure(RunModel(RunRecord(run)), "pca", 0)
    (board,) = group_runs([RunRecord(run)])
    assert prototypes([board]) == []


@pytest.mark.parametrize("name", ["single", "fpl-0"])
def test_opened_models_score_as_the_run_did(name: str, folder: Path) -> None:
    """SingleSet's stay on the devices, each of its own domain; FPL's is one."""
    opened = RunModel(RunRecord.open(folder / name))
    for domain in opened.test_domains:
        split = opened.test_split(domain)
        _, logits = opened.features(opened.model_for(domain), split)
        accuracy = 100.0 * float((logits.argmax(1) == split.labels).float().mean())
        assert accuracy == pytest.approx(opened.record.rules["final"]["accuracy"][domain])


def test_a_model_of_a_device_that_is_not_here_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "single", tmp_path / "run")
    for path in (tmp_path / "run" / "clients").rglob("dark-0/*.safetensors"):
        path.unlink()
    with pytest.raises(CheckpointError, match="stays on the device"):
        RunModel(RunRecord.open(tmp_path / "run")).model_for("dark")


def test_images_that_are_shown_are_the_same_every_time_and_of_all_classes(folder: Path) -> None:
    opened = RunModel(RunRecord.open(folder / "fedavg"))
    chosen = opened.sample("bright", CLASSES)
    assert sorted(chosen.labels.tolist()) == list(range(CLASSES))
    assert chosen.images.equal(opened.sample("bright", CLASSES).images)
