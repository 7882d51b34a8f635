"""``import goldfinch``: a run, its records as DataFrames, comparisons, and what is imported when."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from support.partial import without_domain

import goldfinch as gf
from common.errors import ConfigError
from common.metrics import RULES
from goldfinch.cli import main
from goldfinch.overrides import overrides_of
from strategies.fedavg import FedAvg

SMALL = {"protocol.samples": 40, "rounds.test_samples": 30, "train.batch_size": 16, "train.device": "cpu"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FPL and FedAvg with one seed, and FPL with another."""
    folder = tmp_path_factory.mktemp("runs with spaces")
    common: dict[str, Any] = {"data": "glyphs", "rounds": 2, "quiet": True, "settings": SMALL}
    gf.run(method="fpl", seed=0, output=folder / "fpl", **common)
    gf.run("method=fpl", "seed=1", output=folder / "fpl 1", **common)
    gf.run(method="fedavg", seed=0, output=str(folder / "fedavg"), **common)
    return folder


@pytest.fixture
def fpl(folder: Path) -> gf.Run:
    return gf.load_run(folder / "fpl")


# ---- names -----------------------------------------------------------------------------------------------------------


def test_the_package_alone_imports_neither_torch_nor_flower() -> None:
    code = "import sys, goldfinch; print(sorted({'torch', 'flwr', 'pandas'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("name", gf.__all__)
def test_every_public_name_can_be_imported_and_is_documented(name: str) -> None:
    assert getattr(gf, name).__doc__


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"'nothing'.*compare"):
        _ = gf.nothing  # type: ignore[attr-defined]


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keywords", "settings", "expected"),
    [
        ({"method": "fpl", "rounds": 3}, None, ["method=fpl", "train.rounds=3"]),
        ({"seed": None}, {"method.temperature": 0.05}, ["method.temperature=0.05"]),
        ({"overwrite": True}, {"rounds.test_samples": None}, ["overwrite=true", "rounds.test_samples=null"]),
        ({"output": Path("a b,c=d")}, None, ["output='a b,c=d'"]),
        ({"output": "null"}, None, ["output='null'"]),
        ({}, {"data.domains": ["a", "b c"]}, ["data.domains=[a,'b c']"]),
        ({"seed": np.int64(2)}, {"data.domains": np.array(["a", "b"])}, ["seed=2", "data.domains=[a,b]"]),
        ({}, {"protocol.counts": {"a": 1, "Ward B": 2}}, ["protocol.counts={a:1,Ward B:2}"]),
    ],
    ids=[
        "aliases",
        "none is left out",
        "bool and null",
        "path",
        "a text that looks like null",
        "list",
        "NumPy",
        "dict",
    ],
)
def test_keywords_become_overrides(keywords: dict[str, Any], settings: dict[str, Any], expected: list[str]) -> None:
    assert overrides_of(settings, keywords) == expected


def test_a_list_of_a_sweep_is_several_values() -> None:
    given = overrides_of(None, {"method": ["fedavg", "fpl"], "seed": range(3)}, sweep=True)
    assert given == ["method=fedavg,fpl", "seed=0,1,2"]
    for seeds in (np.arange(3), pd.Series(range(3))):
        assert overrides_of(None, {"seed": seeds}, sweep=True) == ["seed=0,1,2"]


UNTYPED: Any = gf

MISTAKES: dict[str, tuple[Any, str]] = {
    "settings in place of a text": (
        lambda: UNTYPED.run({"method": "fpl"}),
        r"\{'method': 'fpl'\}: expected .* settings=",
    ),
    "a number in place of a text": (lambda: UNTYPED.resume(".", 3), "3: expected a text"),
    "settings as a text": (lambda: UNTYPED.run(settings="rounds=1"), "settings='rounds=1': expected a dictionary"),
    "settings as a list": (lambda: UNTYPED.run(settings=["rounds=1"]), "settings=.* expected a dictionary"),
    "a set": (lambda: UNTYPED.run(settings={"data.domains": {"a"}}), r"\{'a'\}: expected .*, not a set"),
    "no jobs": (lambda: UNTYPED.sweep("seed=0,1", jobs=0), "jobs=0: expected a whole number"),
    "jobs as a text": (lambda: UNTYPED.compare("fpl", jobs="2"), "jobs='2': expected a whole number"),
    "no output of a run": (lambda: UNTYPED.run(output=""), "output: must name a folder"),
    "no output of a sweep": (lambda: UNTYPED.sweep("seed=0,1", output=""), "name is empty"),
    "no output of a comparison": (lambda: UNTYPED.compare("fpl", output=""), "name is empty"),
    "no folder to load": (lambda: UNTYPED.load_run(""), "name is empty"),
    "nothing to load": (lambda: UNTYPED.load_run(None), "None is not the path of a folder: give one"),
    "a number to resume": (lambda: UNTYPED.resume(3), "3 is not the path of a folder: give one"),
    "no folder to resume": (lambda: UNTYPED.resume(""), "name is empty"),
}


@pytest.mark.parametrize(("call", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_wrong_argument_is_refused_with_what_was_expected(
    call: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        call()
    assert not list(tmp_path.iterdir())


def test_an_unknown_keyword_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'metod'.*method.*settings="):
        gf.run(metod="fpl")


# ---- a run -----------------------------------------------------------------------------------------------------------


def test_a_run_has_the_numbers_of_its_summary(folder: Path, fpl: gf.Run) -> None:
    summary = json.loads((folder / "fpl" / "summary.json").read_text())
    assert (fpl.average, fpl.worst) == (summary["average"], summary["worst"])
    assert fpl.accuracy == summary["accuracy"]
    assert fpl.sha256 == summary["state_sha256"]
    assert (fpl.method, fpl.seed, fpl.missing, fpl.finished) == ("fpl", 0, {}, True)
    assert fpl.settings["train"]["rounds"] == 2
    assert "fpl, seed 0, average" in repr(fpl)
    assert "<table" in fpl._repr_html_()


def test_records_are_data_frames_with_numbers(fpl: gf.Run) -> None:
    last = fpl.history[fpl.history["round"] == 2]
    assert dict(zip(last["domain"], last["accuracy"], strict=True)) == pytest.approx(fpl.accuracy, abs=1e-4)
    assert fpl.scores.loc[2, "average"] == fpl.average
    trained = fpl.replies[fpl.replies["status"].isin(["trained", "scaled"])]
    assert trained.groupby("round")["client"].nunique().tolist() == [4, 4]
    assert pd.api.types.is_numeric_dtype(fpl.replies["bytes_up"])


def test_confusion_counts_are_those_of_the_score(fpl: gf.Run) -> None:
    counts = fpl.confusion("sketch").to_numpy()
    assert 100 * counts.trace() / counts.sum() == pytest.approx(fpl.accuracy["sketch"])
    with pytest.raises(ConfigError, match=r"'moon'.*handwritten"):
        fpl.confusion("moon")
    with pytest.raises(ConfigError, match=r"round 9; rounds: 0, 1, 2"):
        fpl.confusion("sketch", 9)


def test_a_run_without_scores_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = {**SMALL, "rounds.test": False, "protocol.validation": 0.2, "data.domains": ["sketch"]}
    run = gf.run(method="fedavg", rounds=1, output=tmp_path / "run", quiet=True, settings=chosen)
    asked: list[Callable[[], object]] = [lambda: run.average, run.metrics, run.recall, lambda: run.confusion("sketch")]
    asked.append(run.plot)
    for ask in asked:
        with pytest.raises(ConfigError, match=r"scores no test images: rounds\.test=false; summary\['validation'\]"):
            ask()
    best = run.summary["validation"]
    assert best["round"] in (0, 1)
    for kind in ("bars", "convergence", "heatmap"):
        assert main(["figure", kind, str(run.folder)]) == 1
        assert f"no run in {run.folder} was scored on test images" in capsys.readouterr().err
    page = run.report().read_text()
    assert "scores no test images (rounds.test=false)." in page
    assert f"Its best round by validation is {best['round']}, with {best['average']:.1f} %." in page
    assert "is partial and has no rank" not in page
    assert "no domains" not in page
    gf.run(
        method="fedavg",
        rounds=1,
        output=tmp_path / "scored",
        quiet=True,
        settings={**SMALL, "data.domains": ["sketch"]},
    )
    assert main(["figure", "bars", str(tmp_path)]) == 0
    assert f"left out, since they score no test images: {run.folder}\n" in capsys.readouterr().out


def test_a_run_s_folder_is_no_exported_model(fpl: gf.Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a run's folder: goldfinch export .* --to DIR writes its model"):
        gf.load_model(fpl.folder)
    with pytest.raises(ConfigError, match=r"model.json is missing: goldfinch export RUN --to DIR"):
        gf.load_model(tmp_path)


@pytest.mark.long
def test_a_run_draws_its_accuracies_and_writes_its_report(fpl: gf.Run, tmp_path: Path) -> None:
    labels = [str(line.get_label()) for line in fpl.plot().axes[0].get_lines()]
    assert "sketch" in labels
    assert any(label.startswith("average") for label in labels)
    path = fpl.report(tmp_path / "page.html")
    assert path.read_text().startswith("<!doctype html>")


def test_the_model_of_a_run_is_the_exported_one(folder: Path, fpl: gf.Run, tmp_path: Path) -> None:
    from goldfinch.commands.export import export

    model = fpl.model(chosen=2)
    export(folder / "fpl", tmp_path / "model")
    images = torch.rand(4, 3, model.image_size, model.image_size, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(images)["probabilities"], gf.load_model(tmp_path / "model")(images)["probabilities"])


def test_a_run_is_resumed_from_python(folder: Path, tmp_path: Path) -> None:
    common: dict[str, Any] = {"method": "fedavg", "data": "glyphs", "quiet": True, "settings": SMALL}
    gf.run(rounds=1, output=tmp_path / "run", **common)
    longer = gf.resume(tmp_path / "run", settings={"train.rounds": 2}, quiet=True)
    assert longer.sha256 == gf.load_run(folder / "fedavg").sha256


def test_a_second_run_of_a_process_reads_the_images_that_are_there_now(tmp_path: Path) -> None:
    def held(name: str) -> list[list[int]]:
        own = {"data.root": str(tmp_path / "images"), "train.device": "cpu", "train.local_steps": 1}
        run = gf.run(method="fedavg", data="folder", rounds=1, quiet=True, output=tmp_path / name, settings=own)
        return [entry["class_counts"] for entry in run.records.facts.registrations.values()]

    for number in range(20):
        place = tmp_path / "images" / "ward" / ("cat", "dog")[number % 2] / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (9 * number, 0, 0)).save(place)
    assert held("first") == [[8, 8]]
    for number in range(0, 10, 2):  # half of one class was of the other
        (tmp_path / "images" / "ward" / "cat" / f"{number}.png").rename(
            tmp_path / "images" / "ward" / "dog" / f"{number}.png"
        )
    assert held("second") == [[4, 12]]


@gf.checked
class Doubled(FedAvg):
    """A method of one's own, given as a class."""

    def loss(self, batch: gf.Batch, local: gf.ClientContext) -> gf.Losses:
        return gf.Losses({"cross_entropy": 2 * batch.cross_entropy()})


@gf.checked
class Bare(FedAvg):
    """Its loss lacks the names of its terms."""

    def loss(self, batch: gf.Batch, local: gf.ClientContext) -> Any:
        return batch.cross_entropy()


def test_a_class_is_a_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small: dict[str, Any] = {"settings": SMALL, "rounds": 1, "quiet": True}
    assert gf.run(method=Doubled, output=tmp_path / "run", engine="inline", **small).average > 0
    with pytest.raises(gf.GoldfinchError, match=r"Bare.loss\(\) is a Tensor, and must be Losses"):
        gf.run(method=Bare, output=tmp_path / "bare", engine="inline", **small)

    @gf.checked
    class Hidden(Doubled):
        pass

    with pytest.raises(ConfigError, match="defined inside a function"):
        gf.run(method=Hidden, output=tmp_path / "hidden", **small)
    monkeypatch.setattr(Doubled, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "Doubled", Doubled, raising=False)
    with pytest.raises(ConfigError, match=r"processes of engine=ray cannot import it: .* goldfinch.run with engine=in"):
        gf.run(method=Doubled, output=tmp_path / "notebook", engine="ray", **small)
    assert not (tmp_path / "notebook").exists()
    with pytest.raises(ConfigError, match=r"method: Doubled .* processes of a sweep cannot import it"):
        gf.sweep(method=["fedavg", Doubled], engine="inline", output=tmp_path / "sweep", settings=SMALL)
    with pytest.raises(ConfigError, match=r"method: Doubled .* processes of a comparison cannot import it"):
        gf.compare(["fedavg", Doubled], output=tmp_path / "compare", settings=SMALL)
    gf.run(method=Doubled, output=tmp_path / "here", engine="inline", **small)
    for more in ({}, {"method": Doubled}):
        with pytest.raises(ConfigError, match=r"processes of engine=ray cannot import it"):
            gf.resume(tmp_path / "here", engine="ray", rounds=2, quiet=True, **more)


def test_a_list_of_folders_is_not_one_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not a list: load_runs\(\*folders\)"):
        gf.load_runs([tmp_path, tmp_path])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"given none: load_runs\('outputs'\)"):
        gf.load_runs()


@pytest.mark.parametrize("load", [gf.load_run, gf.Run, gf.load_runs], ids=["load_run", "Run", "load_runs"])
def test_a_folder_without_a_run_is_refused(load: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no"):
        load(tmp_path)


# ---- comparisons -----------------------------------------------------------------------------------------------------


def test_a_table_has_means_and_deviations_over_seeds(folder: Path) -> None:
    runs = gf.load_runs(folder)
    table = gf.table(runs)
    (fpl,) = [label for label in table.index if label != "fedavg"]
    assert table.loc[fpl, "seeds"] == "0, 1"
    mean = gf.table(runs, values="mean").loc[fpl, "average"]
    deviations = gf.table(runs, values="std")["average"]
    averages = [run.average for run in runs if run.method == "fpl"]
    assert mean == pytest.approx(sum(averages) / 2)
    assert deviations[fpl] == pytest.approx(abs(averages[0] - averages[1]) / 2**0.5)
    assert pd.isna(deviations["fedavg"])
    assert table.loc[fpl, "average"].startswith(f"{mean:.2f} ± {deviations[fpl]:.2f}")


def test_a_table_takes_a_run_and_names_what_else_it_takes(folder: Path, fpl: gf.Run) -> None:
    assert gf.table(fpl).equals(gf.table([fpl]))
    assert gf.table(fpl, labels=f"{gf.table(fpl).index[0]}=ours").index == ["ours"]
    assert gf.table(run for run in [fpl]).equals(gf.table(fpl)), "a generator"
    assert gf.table(fpl, labels={gf.table(fpl).index[0]: "ours"}).index == ["ours"]
    for given in (str(folder), folder, [str(folder)], None, 3):
        with pytest.raises(ConfigError, match=r"takes runs, such as gf.load_runs\(FOLDER\) returns"):
            gf.table(given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="there is no run to show"):
        gf.table([])


def test_megabytes_have_one_decimal_as_text(fpl: gf.Run) -> None:
    megabytes = gf.table(fpl, values="mean")["MB"].iloc[0]
    assert gf.table(fpl)["MB"].tolist() == [f"{megabytes:.1f}"]
    assert f" {megabytes:.1f} " in gf.table(fpl).to_latex(escape=True)


def test_a_run_has_one_method(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a run has one method; use sweep"):
        gf.run(method=["fedavg", "fpl"], output=tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no such choice; did you mean 'fedavg'"):
        gf.compare("fedavgg", output=tmp_path / "compared")


def test_a_partial_number_is_marked_or_nan_everywhere(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "fedavg", tmp_path / "run")
    without_domain(tmp_path / "run", "sketch", 2)
    (run,) = runs = gf.load_runs(tmp_path)
    table = runs.table()
    assert "†" in table.loc["fedavg", "average"]
    assert any("sketch" in note for note in table.attrs["notes"])
    numbers = [run.average, run.worst, *run.scores.loc[2, ["average", "worst"]]]
    numbers += [*run.metrics().loc["sketch"], *run.recall()["sketch"]]
    numbers.append(runs.table(values="mean").loc["fedavg", "average"])
    assert pd.isna(numbers).all()
    assert "†" in repr(run)
    assert run.metrics().drop("sketch").notna().all(axis=None)
    assert run.metrics(1).notna().all(axis=None)


def test_the_prototypes_of_a_run_are_those_of_its_rounds(folder: Path, fpl: gf.Run) -> None:
    found = fpl.prototypes()
    assert list(found) == [1, 2]
    assert found[2].labels.unique().tolist() == list(range(10))
    assert len(found[2].vectors) == len(found[2].labels)
    assert gf.load_run(folder / "fedavg").prototypes() == {}


def test_runs_under_other_conditions_are_in_tables_of_their_own(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "fedavg", tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("data: glyphs", "data: others"))
    table = gf.table([gf.load_run(tmp_path / "run"), gf.load_run(folder / "fedavg")])
    assert table.index.names == ["table", "method"]
    assert len(table) == 2


def test_errors_in_python_speak_of_no_option_of_the_command_line(fpl: gf.Run, tmp_path: Path) -> None:
    calls: list[Callable[[], object]] = [
        lambda: gf.table(fpl, labels="nobody=ours"),
        lambda: gf.table(fpl, labels="ours"),
        lambda: fpl.model(chosen="first"),
        lambda: fpl.model(chosen="best"),
        lambda: fpl.report(tmp_path / "report.pdf"),
        lambda: gf.compare(["fedavg"], studies=0),
        lambda: gf.compare(["fedavg"], scores=["all"]),
        lambda: gf.compare(["fedavg"], data="glyphs", output=tmp_path / "a", storage="junk"),
    ]
    for call in calls:
        with pytest.raises(ConfigError) as caught:
            call()
        assert "--" not in str(caught.value)


def test_an_unknown_rule_names_the_known_ones(fpl: gf.Run) -> None:
    with pytest.raises(ConfigError, match=r"best_round"):
        gf.table([fpl], rule="best")
    with pytest.raises(ConfigError, match="choose one of text, mean, std"):
        gf.table([fpl], values=cast("Any", "means"))
    assert gf.table([fpl], rule="last_n").attrs["rule"] in RULES
