"""Figures are made from run folders alone, show the right numbers, and refuse what they cannot show."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from common.errors import CheckpointError, ConfigError
from common.numerics import generator
from common.prototypes import PrototypeSet
from server.cli import main
from server.commands.figure import bars_of, curves_of, named_groups
from server.results.figures.charts import CLASS_COLOURS, COLOURS, bars, convergence, line_style, rendered, sensitivity
from server.results.figures.prototypes import Panel, class_colours, draw_map, embed, prototype_figure
from server.results.figures.svg import inline_svg
from server.results.groups import group_runs
from server.results.report.figures import prototypes
from server.results.run import RunFolder, find_runs, varying
from server.results.seeds import Value
from server.run.prototype_log import Page
from tests.support.runs import run
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


def names_of(runs: Sequence[RunFolder]) -> list[str]:
    """The label of each run's row."""
    names = {run.folder: group.label for group in named_groups(runs) for run in group.runs}
    return [names[run.folder] for run in runs]


def header(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


def texts(figure: Figure) -> list[str]:
    found = [figure.get_suptitle(), *(text.get_text() for axes in figure.axes for text in axes.texts)]
    for axes in figure.axes:
        legend = axes.get_legend()
        found += [text.get_text() for text in legend.get_texts()] if legend else []
        found += [axes.get_title(), axes.get_xlabel(), axes.get_ylabel()]
        found += [text.get_text() for text in (*axes.get_xticklabels(), *axes.get_yticklabels())]
    return found


# ---- the command -----------------------------------------------------------------------------------------------------


def test_title_size_and_labels_of_a_figure_can_be_chosen(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "figure.png"
    words = ["--title", "Mine", "--size", "4x3", "--label", "fedavg=FedAvg"]
    assert main(["figure", "convergence", str(folder / "fedavg"), "--output", str(path), *words]) == 0
    assert header(path) == (600, 450), "150 pixels an inch"
    shown = texts(curves_of(find_runs([str(folder / "fedavg")]), "Mine", ["fedavg=FedAvg"]))
    assert "Mine" in shown
    assert "FedAvg" in shown
    assert "fedavg" not in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--size", "4"], "--size 7x4"),
        (["--size", "0x3"], "from 1 to 50"),
        (["--label", "FedAvg"], "OLD=NEW"),
        (["--label", "fedavgg=FedAvg"], "fedavg"),
    ],
    ids=["one number", "no width", "no sign", "no such row"],
)
def test_a_size_or_a_label_that_is_none_is_refused(
    folder: Path, tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figure.png"
    assert main(["figure", "bars", str(folder / "fedavg"), "--output", str(path), *words]) == 1
    assert message in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize(
    "words", [["convergence"], ["bars"], ["prototypes"], ["prototypes", "--by", "pca"]], ids=" ".join
)
def test_every_kind_writes_a_png(
    words: list[str], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figure.png"
    chosen = folder / "fpl-0" if words[0] == "prototypes" else folder
    assert main(["figure", words[0], str(chosen), "--output", str(path), *words[1:]]) == 0
    assert str(path) in capsys.readouterr().out
    width, height = header(path)
    assert min(width, height) > 400


@pytest.mark.parametrize(
    ("suffix", "first"), [("pdf", b"%PDF-"), ("svg", b"<?xml"), ("PNG", b"\x89PNG")], ids=["pdf", "svg", "PNG"]
)
def test_the_suffix_names_the_format(suffix: str, first: bytes, folder: Path, tmp_path: Path) -> None:
    paths = [tmp_path / name / f"figure.{suffix}" for name in ("one", "two")]
    for path in paths:
        assert main(["figure", "bars", str(folder / "fedavg"), "--output", str(path)]) == 0
    assert paths[0].read_bytes().startswith(first)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_the_default_place_is_the_first_folder(folder: Path) -> None:
    assert main(["figure", "bars", str(folder / "fedavg")]) == 0
    assert header(folder / "fedavg" / "bars.png")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["heatmaps", "x"], "did you mean 'heatmap'"),
        (["bars", "nowhere"], "is not a folder"),
        (["prototypes", "FOLDER"], "prototypes shows one run; 4 were found"),
        (["prototypes", "FOLDER/fpl-0", "--by", "pc"], "did you mean 'pca'"),
        (["heatmap", "FOLDER/fpl-0", "FOLDER/fpl-1"], "vary in nothing but the seed"),
        (["prototypes", "FOLDER/fpl-0", "--samples", "0"], "must be 1 or more"),
        (["bars", "FOLDER", "--output", "x.jpeg"], "is written as .png, .pdf, .svg; .jpeg is none of these"),
        (["bars", "FOLDER", "--output", "x"], "no suffix is none of these"),
    ],
)
def test_mistakes_are_named(words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["figure", *(word.replace("FOLDER", str(folder)) for word in words)]) == 1
    assert message in capsys.readouterr().err


# ---- curves and bars -------------------------------------------------------------------------------------------------


def test_curves_are_the_means_over_seeds_of_history(folder: Path) -> None:
    figure = curves_of([RunFolder(folder / "fpl-0"), RunFolder(folder / "fpl-1"), RunFolder(folder / "fedavg")])
    drawn = {line.get_label(): line.get_xydata() for line in figure.axes[0].get_lines()}
    assert set(drawn) == {"fpl", "fedavg (seed 0)"}
    last = [RunFolder.open(folder / name).summary["average"] for name in ("fpl-0", "fpl-1")]
    assert drawn["fpl"][-1].tolist() == pytest.approx([2, sum(last) / 2])
    assert len(drawn["fpl"]) == 3  # before the first round, after each of the two


def test_bars_have_one_group_per_domain_and_the_average() -> None:
    figure = bars(
        ["a", "b", "average"], {"x": [Value(10.0, 1.0), None, Value(20.0, 2.0)], "y": [Value(30.0, None)] * 3}, "t"
    )
    assert sorted(patch.get_height() for patch in figure.axes[0].patches) == [10.0, 20.0, 30.0, 30.0, 30.0]


def test_series_differ_in_more_than_colour() -> None:
    styles = [tuple(line_style(index).values()) for index in range(20)]
    assert len(set(styles)) == 20
    assert len({style[1:] for style in styles}) >= 10
    grey = sorted(0.2126 * red + 0.7152 * green + 0.0722 * blue for red, green, blue in map(to_rgb, COLOURS))
    assert all(value < 0.75 for value in grey)  # all are seen on white
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
    settings = {"method.a_rather_long_name_of_a_setting_that_is_swept_over": 1.0}
    panel = Panel("round 1: class means that clients sent", *np.zeros((5, 1, 2), int)[:, :, 0])
    panel = replace(panel, points=np.zeros((1, 2)), prototypes=np.zeros((1, 2)))
    for figure in (
        draw_map([panel] * 3, ["one domain of a long name"] * 4, [name] * CLASSES, title),
        convergence({name: {1: Value(10.0, 1.0), 2: Value(20.0, 2.0)}, "b": {1: Value(3.0, None)}}, title),
        bars(["one domain of a long name", "average"], {name: [Value(10.0, 1.0)] * 2}, title),
        sensitivity([entry(50.0), entry(60.0, **settings), entry(55.0, **{"method.mu": 0.7})]),
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
    assert all(part in text for part in ('role="img"', "what &quot;it&quot; shows", "b &lt;i&gt;", "currentColor"))
    assert all(f"var(--line{index}" in text for index in (0, 1))
    assert not re.search("#000000|#ffffff|#dddddd", text)
    odd = inline_svg(convergence({"a\x1b[31m\x00\udcff": {1: Value(3.0, None)}}, "\x07"), "", "one")
    assert "a\ufffd" in odd
    assert not re.search("[\x00-\x08\x1b]", odd), "a stranger's name may have any letters"
    ids = [set(re.findall(' id="([^"]+)"', inline_svg(convergence(curves, "t"), "", salt))) for salt in ("one", "two")]
    assert ids[0]
    assert not ids[0] & ids[1], "an id is there once in a page"
    assert "var(" not in inline_svg(convergence(curves, "t"), "", "one", paper=True)


def test_a_font_is_given_by_its_size_alone_in_every_release_of_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = convergence({"a": {1: Value(10.0, None)}}, "t")

    def as_before_3_10(stream: Any, **_: Any) -> None:
        style = "font: 8px 'DejaVu Sans', sans-serif; text-anchor: end"
        stream.write(f'<svg xmlns="http://www.w3.org/2000/svg"><text style="{style}">x</text></svg>'.encode())

    assert re.search('<text [^>]*font-size="[0-9.]+px"', inline_svg(figure, "", "one"))
    monkeypatch.setattr(figure, "savefig", as_before_3_10)
    text = inline_svg(figure, "", "one")
    assert 'font-size="8px"' in text
    assert "DejaVu" not in text


def test_the_same_figure_gives_the_same_bytes() -> None:
    curves = {"a": {1: Value(10.0, 1.0), 2: Value(12.0, None)}}
    assert rendered(convergence(curves, "t")) == rendered(convergence(curves, "t"))


def test_labels_name_what_differs_between_runs_and_are_those_of_the_table(folder: Path, tmp_path: Path) -> None:
    entries = [RunFolder(folder / "fpl-0"), RunFolder(folder / "fpl-1"), RunFolder(folder / "fedavg")]
    assert names_of(entries) == ["fpl", "fpl", "fedavg (seed 0)"]
    other = toy_settings("fpl", tmp_path / "runs" / "fpl-x" / "seed-0", hyper={"temperature": 0.5})
    run(other)
    both = [RunFolder(folder / "fpl-0"), RunFolder(other.output_folder)]
    assert names_of(both) == ["fpl, temperature=0.02", "fpl, temperature=0.5"]
    rows = [{"label": "FPL (warm)", "folders": {"0": str(other.output_folder)}}]
    (tmp_path / "table.json").write_text(json.dumps({"rows": rows}))
    assert names_of([RunFolder(other.output_folder)]) == ["FPL (warm)"]


# ---- sweeps ----------------------------------------------------------------------------------------------------------


def entry(average: float, seed: int = 0, **settings: Any) -> RunFolder:
    scores = {"final": {"accuracy": {"a": average, "b": average}, "average": average, "worst": average, "spread": 0.0}}
    summary = {"method": "fedpall", "data": "toy", "protocol": "p", "seed": seed, "scores": scores}
    run = RunFolder(Path("x"))
    vars(run).update(options={"method.mu": 0.1, "method.delta": 0.1, **settings}, summary=summary)
    return run


def grid_of(entries: Sequence[RunFolder], **options: Any) -> np.ndarray:
    figure = sensitivity(entries, **options)
    return np.asarray(figure.axes[0].get_images()[0].get_array())


def test_a_heat_map_has_the_mean_over_seeds_at_its_place() -> None:
    entries = [
        entry(50.0, 0, **{"method.mu": 0.2}),
        entry(54.0, 1, **{"method.mu": 0.2}),
        entry(60.0, **{"method.delta": 0.5}),
        entry(70.0),
    ]
    grid = grid_of(entries, axes=["method.mu", "method.delta"])
    assert grid[0].tolist() == [70.0, 52.0]  # delta 0.1: mu 0.1, 0.2
    assert grid[1, 0] == 60.0
    assert np.isnan(grid[1, 1])
    shown = texts(sensitivity(entries, axes=["method.mu", "method.delta"]))
    assert {"70.0", "52.0", "60.0", "method.mu", "method.delta", "fedpall on toy: average, %"} <= set(shown)


def test_a_sweep_of_one_setting_is_a_line_in_numeric_order() -> None:
    entries = [entry(value, **{"method.mu": mu}) for mu, value in ((10.0, 30.0), (2.0, 20.0), (0.5, 10.0))]
    assert varying(entries) == ["method.mu"]
    figure = sensitivity(entries)
    assert figure.axes[0].get_lines()[0].get_ydata().tolist() == [10.0, 20.0, 30.0]


def test_a_sweep_that_varies_in_more_is_refused() -> None:
    entries = [entry(1.0), entry(2.0, **{"method.mu": 1.0, "method.delta": 1.0, "method.tau": 3.0})]
    with pytest.raises(ConfigError, match="name one or two settings"):
        sensitivity(entries)
    with pytest.raises(ConfigError, match=r"also differ in method\.tau"):
        sensitivity(entries, axes=["method.mu", "method.delta"])
    with pytest.raises(ConfigError, match=r"did you mean 'method\.mu'"):
        sensitivity(entries, axes=["method.my"])
    with pytest.raises(ConfigError, match="c: no such column"):
        sensitivity([entries[0], entry(1.0, **{"method.mu": 9.0})], column="c")


def test_bars_of_runs(folder: Path) -> None:
    figure = bars_of([RunFolder(folder / name) for name in ("fpl-0", "fpl-1", "fedavg")], "final")
    assert {"fpl", "fedavg (seed 0)", "average", *DOMAINS} <= set(texts(figure))
    heights = [patch.get_height() for patch in figure.axes[0].patches]
    assert len(heights) == 2 * (len(DOMAINS) + 1)
    averages = [RunFolder(folder / name).summary["average"] for name in ("fpl-0", "fpl-1")]
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
    assert points.shape == (60, 2)
    assert (stars.shape, none.shape) == ((3, 2), (0, 2))
    for label in range(3):  # a prototype lies among its own class
        distances = [
            np.linalg.norm(points[labels.numpy() == other] - stars[label], axis=1).mean() for other in range(3)
        ]
        assert int(np.argmin(distances)) == label
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
    opened = RunFolder.open(folder / "fpl-0")
    figure = prototype_figure(opened, per_domain=8)
    assert [axes.get_title() for axes in figure.axes] == [
        "round 1: class means that clients sent",
        "round 2: test features",
    ]
    first, last = figure.axes
    assert len(last.collections[-1].get_offsets()) >= CLASSES  # the stars
    drawn = [sum(len(part.get_offsets()) for part in axes.collections[:-1]) for axes in (first, last)]
    assert drawn == [len(opened.pages[0].uploaded), 8 * len(DOMAINS)]
    alone = prototype_figure(RunFolder.open(folder / "fedavg"), "pca", 8)
    assert [axes.get_title() for axes in alone.axes] == ["round 2: test features"]
    assert "% of the variance" in alone.get_suptitle()


def test_what_was_sent_is_shown_without_model_and_data(folder: Path) -> None:
    run = RunFolder(folder / "fpl-0")
    figure = prototype_figure(run, "pca", 0)
    assert [axes.get_title() for axes in figure.axes] == [
        "round 1: class means that clients sent",
        "round 2: class means that clients sent",
    ]
    for axes, page in zip(figure.axes, run.pages, strict=True):
        drawn = [len(part.get_offsets()) for part in axes.collections]
        assert (sum(drawn[:-1]), drawn[-1]) == (len(page.uploaded), len(page.prototypes))
    assert rendered(figure) == rendered(prototype_figure(RunFolder(folder / "fpl-0"), "pca", 0))
    with pytest.raises(ConfigError, match="four points"):
        prototype_figure(RunFolder(folder / "fedavg"), "pca", 0)


def test_a_single_vector_has_no_figure(folder: Path) -> None:
    one = PrototypeSet(torch.ones(1, 4), torch.tensor([0]), torch.ones(1))
    run = RunFolder(folder / "fpl-0")
    vars(run)["pages"] = [Page(1, one, PrototypeSet.empty(4), torch.zeros(0, dtype=torch.int64), ())]
    with pytest.raises(ConfigError, match="four points"):
        prototype_figure(run, "pca", 0)
    (board,) = group_runs([run])
    assert prototypes([board]) == []


def test_the_report_has_the_figure_of_runs_with_prototypes(folder: Path, tmp_path: Path) -> None:
    assert main(["report", str(folder), "--output", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert page.count('<figure class="paper">') == 1
    assert "None of these methods exchanges prototypes" not in page


def test_models_that_stay_on_devices_are_read_from_their_state(folder: Path) -> None:
    opened = RunFolder.open(folder / "single")
    first, second = opened.model_for("bright"), opened.model_for("dark")
    weights = [next(model.parameters()) for model in (first, second)]
    assert not torch.equal(*weights)
    split = opened.test_split("bright")
    _, logits = opened.features(first, split)
    accuracy = 100.0 * float((logits.argmax(1) == split.labels).float().mean())
    assert accuracy == pytest.approx(opened.summary["accuracy"]["bright"])
    for path in (folder / "single" / "clients").rglob("dark-0/*.safetensors"):
        path.rename(path.with_suffix(".away"))
    with pytest.raises(CheckpointError, match="stays on the device"):
        opened.model_for("dark")
    for path in (folder / "single" / "clients").rglob("dark-0/*.away"):
        path.rename(path.with_suffix(".safetensors"))


def test_the_opened_global_model_scores_as_the_run_did(folder: Path) -> None:
    opened = RunFolder.open(folder / "fpl-0")
    for domain in opened.test_domains:
        split = opened.test_split(domain)
        _, logits = opened.features(opened.model(), split)
        accuracy = 100.0 * float((logits.argmax(1) == split.labels).float().mean())
        assert accuracy == pytest.approx(opened.summary["accuracy"][domain])


def test_images_that_are_shown_are_the_same_every_time_and_of_all_classes(folder: Path) -> None:
    opened = RunFolder.open(folder / "fedavg")
    chosen = opened.sample("bright", CLASSES)
    assert sorted(chosen.labels.tolist()) == list(range(CLASSES))
    assert chosen.images.equal(opened.sample("bright", CLASSES).images)


def test_a_folder_without_a_finished_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no finished run"):
        RunFolder.open(tmp_path)
