"""Run folders that came from elsewhere: nothing that only they name is imported, and odd files are reported."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

import pytest
import yaml
from support.records import Line, change_events, rewrite

from common import choices
from common.choices import CONF, choices_of
from common.config import class_of
from common.round_settings import RoundSettings, TrainSettings
from goldfinch.cli import main
from goldfinch.commands import running
from goldfinch.commands import sweep as sweep_module
from goldfinch.commands.running import PLACES

TINY = ["train.rounds=1", "train.local_steps=1", "protocol.samples=8", "rounds.test_samples=8", "data.domains=[sketch]"]

SPEAKING = """
from pathlib import Path
from common.config import checked
from strategies.fedavg import FedAvg

Path(__file__).with_suffix(".imported").touch()

@checked
class Mine(FedAvg):
    pass
"""

READERS = {
    "resume": ["resume", "RUN", "train.rounds=2", "--quiet"],
    "report": ["report", "RUN"],
    "table": ["table", "RUN"],
    "curves": ["figure", "convergence", "RUN"],
    "prototypes": ["figure", "prototypes", "RUN"],
}
BUILDERS = ("resume", "prototypes")
"""The readers that need the classes; the others show scores without them."""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "run"
    assert main(["run", "--quiet", "method=fedavg", *TINY, f"output={folder}"]) == 0
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(choices, "_OWN_NAMES", set())
    return Path(shutil.copytree(original, tmp_path / "run"))


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that leaves a file when it is imported; the file."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "stranger.py").write_text(SPEAKING)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.setattr(choices, "_OWN_NAMES", set())
    monkeypatch.delitem(sys.modules, "stranger", raising=False)
    return tmp_path / "modules" / "stranger.imported"


def changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.yaml"
    content = yaml.safe_load(path.read_text())
    change(content)
    path.write_text(yaml.safe_dump(content))


def with_choice(group: str, name: str, settings: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    """Give a configuration other settings of a group, which is called ``name``."""

    def change(content: dict[str, Any]) -> None:
        content[group] = settings
        content["choices"][group] = name

    return change


def words_for(reader: str, folder: Path) -> list[str]:
    return [str(folder) if word == "RUN" else word for word in READERS[reader]]


@pytest.mark.parametrize(
    ("reader", "target"), [*((reader, "stranger.Mine") for reader in READERS), ("resume", "os.system")]
)
def test_a_class_that_only_a_folder_names_is_not_imported(
    reader: str, target: str, folder: Path, stranger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(folder, lambda content: content["method"].update(_target_=target))
    needed = reader in BUILDERS
    assert main(words_for(reader, folder)) == needed
    error = capsys.readouterr().err
    assert (f"method._target_={target} is not one of Goldfinch's own" in error) == needed
    assert error.endswith("entry point of its package, see docs/add-a-method.md\n") == needed, "it fits every reader"
    assert not stranger.exists()


HIDDEN: dict[str, Callable[[dict[str, Any]], object]] = {
    "the data": lambda content: content["data"].update(_target_="stranger.Mine"),
    "the tracker": lambda content: content["tracker"].update(_target_="stranger.Mine"),
    "the model": lambda content: content["model"].update(_target_="stranger.Mine"),
    "the inline engine's devices": lambda content: content["engine"].update(device="stranger.Mine"),
    "below another key": lambda content: content["data"]["augmentation"].update(_target_="stranger.Mine"),
    "in a list": lambda content: content["train"].update(more=[{"_target_": "stranger.Mine"}]),
    "as a choice": lambda content: content["choices"].update({"method._target_": "stranger.Mine"}),
    "as a key with dots": lambda content: content.update({"method._target_": "stranger.Mine"}),
    "as an option with dots": lambda content: content.update({"method": {"_target_": "strategies.fedavg.FedAvg",
        "x._target_": "stranger.Mine"}}),
    "as a key with a brace": lambda content: content["data"].update(augmentation={"a:1},_target_": "stranger.Mine"}),
    "by an interpolation": lambda content: content["method"].update(_target_="${oc.env:STRANGER}"),
    "as something else": lambda content: content["method"].update(_target_=["stranger.Mine"]),
}  # fmt: skip


@pytest.mark.parametrize("place", HIDDEN)
@pytest.mark.long
def test_a_class_is_not_imported_wherever_a_folder_names_it(
    place: str, folder: Path, stranger: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STRANGER", "stranger.Mine")
    changed(folder, HIDDEN[place])
    for reader in ("resume", "report"):
        if main(words_for(reader, folder)):
            assert "error: " in capsys.readouterr().err
    assert not stranger.exists()


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("common.data.glyphs.Glyphs", "is not one of Goldfinch's own"),
        ("strategies.core.robust.GeometricMedian", "method"),
    ],
)
def test_a_class_of_goldfinch_is_used_only_for_its_own_group(
    target: str, reason: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(folder, lambda content: content["method"].update(_target_=target))
    assert main(words_for("resume", folder)) == 1
    assert reason in capsys.readouterr().err


@pytest.fixture
def installed(tmp_path: Path, stranger: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Install the stranger's module with an entry point of this value: what pip writes, in a folder on ``sys.path``."""

    def install(value: str) -> None:
        folder = tmp_path / "modules" / "stranger-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[goldfinch]\nanything = {value}\n")
        importlib.invalidate_caches()
        choices._declared.cache_clear()

    yield install
    choices._declared.cache_clear()


@pytest.mark.parametrize("value", ["stranger", "stranger:Mine"])
def test_a_class_of_an_installed_package_that_declares_it_is_imported(
    value: str, folder: Path, stranger: Path, installed: Callable[[str], None]
) -> None:
    changed(folder, lambda content: content["method"].update(_target_="stranger.Mine"))
    assert main(words_for("prototypes", folder)) == 1
    assert not stranger.exists()
    installed(value)
    assert main(words_for("prototypes", folder)) == 0
    assert stranger.exists()


@pytest.mark.parametrize(
    ("value", "target"),
    [
        ("stranger:Other", "stranger.Mine"),
        ("strange", "stranger.Mine"),
        ("stranger", "os.system"),
        ("stranger", "strangers.Mine"),
    ],
)
def test_an_entry_point_allows_what_it_declares_and_nothing_else(
    value: str, target: str, folder: Path, stranger: Path, installed: Callable[[str], None]
) -> None:
    installed(value)
    changed(folder, lambda content: content["method"].update(_target_=target))
    assert main(words_for("resume", folder)) == 1
    assert not stranger.exists()


def test_an_entry_point_does_not_allow_functions_as_devices(
    folder: Path, stranger: Path, installed: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    installed("stranger")
    changed(folder, HIDDEN["the inline engine's devices"])
    assert main(words_for("resume", folder)) == 1
    assert "engine.device=stranger.Mine is not one of Goldfinch's own" in capsys.readouterr().err
    assert not stranger.exists()


def test_what_lies_in_a_run_s_folder_is_not_installed(
    folder: Path, stranger: Path, installed: Callable[[str], None], tmp_path: Path
) -> None:
    installed("stranger")
    (tmp_path / "modules" / "stranger-1.0.dist-info").rename(folder / "stranger-1.0.dist-info")
    importlib.invalidate_caches()
    choices._declared.cache_clear()
    changed(folder, lambda content: content["method"].update(_target_="stranger.Mine"))
    assert main(words_for("prototypes", folder)) == 1
    assert not stranger.exists()


# ---- odd files -------------------------------------------------------------------------------------------------------

BOMB = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join(['*' + old] * 8)}]\n" for old, new in zip("abcdefghijkl", "bcdefghijklm", strict=True)
)
EVENT = '{"event": "%s", "time": 1, %s}\n'
SCORE = '{"round": 1, "client": "a", "domain": "a", "scored_on": "test", "count": 8, "correct": 4, "loss": 1.0}\n'
REPLY = '{"round": 1, "exchange": "train", "client": "a", "domain": "a", "status": "trained", "losses": %s}\n'
CELLS = '"confusion": {"classes": %d, "true": [%s], "predicted": [%s], "count": []}'
MATRIX = SCORE.replace('"loss": 1.0', f'"loss": 1.0, {CELLS}')

ODD = {
    "aliases": ("config.yaml", BOMB),
    "deep": ("config.yaml", "[" * 20_000),
    "binary": ("config.yaml", "\x00\x01"),
    "a list": ("config.yaml", "- 1\n"),
    "huge": ("config.yaml", "x" * 200_000),
    "an event of nothing": ("events.jsonl", '{"round": 1}\n'),
    "an event of a number": ("events.jsonl", '{"event": 3, "time": 1}\n'),
    "a round of NaN": ("events.jsonl", EVENT % ("round done", '"round": NaN')),
    "an end without its facts": ("events.jsonl", EVENT % ("finish", '"round": 1')),
    "an end of half a run": ("events.jsonl", EVENT % ("stopped", '"round": 1, "sha256": "00"')),
    "a value of infinity": ("events.jsonl", EVENT % ("score", '"round": 1, "values": {"auroc": {"a": Infinity}}')),
    "a client's trouble without a client": ("events.jsonl", EVENT % ("client lost", '"round": 1')),
    "other keys": ("scores.jsonl", '{"a": 1}\n'),
    "a score of words": ("scores.jsonl", SCORE.replace("4", '"x"')),
    "a loss of NaN": ("scores.jsonl", SCORE.replace("1.0", "NaN")),
    "a count of nothing": ("scores.jsonl", SCORE.replace("8", "0")),
    "a colour": ("scores.jsonl", SCORE.replace('"domain": "a"', '"domain": "\\u001b[31m"')),
    "not text": ("scores.jsonl", SCORE + "\udcff\n"),
    "losses of words": ("replies.jsonl", REPLY % '"["'),
    "a loss beyond all numbers": ("replies.jsonl", REPLY % '{"cross_entropy": 1e999}'),
    "a cell out of the matrix": ("scores.jsonl", MATRIX % (10, "10001", "1")),
    "columns of different lengths": ("scores.jsonl", MATRIX % (10, "1", "1")),
    "a matrix of a million classes": ("scores.jsonl", MATRIX % (10**6, "", "")),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("oddity", ODD)
@pytest.mark.long
def test_odd_files_are_named_and_not_shown(oddity: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, content = ODD[oddity]
    (folder / name).write_bytes(content.encode(errors="surrogateescape"))
    assert main(words_for("report", folder)) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert name in error
    if name in ("config.yaml", "events.jsonl"):
        assert main(words_for("table", folder)) == 1
    main(words_for("resume", folder))  # an error message or none, but no traceback


LONG = {"long": ["abc"] * 10_000, "deep": functools.reduce(lambda inner, _: [inner], range(300), "x")}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("value", LONG)
def test_a_setting_that_takes_long_to_be_read_is_not(
    value: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(folder, lambda content: content["method"].update(weighting=LONG[value]))
    assert main(words_for("resume", folder)) == 1
    assert "config.yaml" in capsys.readouterr().err or value == "deep"


@pytest.mark.parametrize("more", [[], ["--watch"]])
def test_a_broken_line_between_others_is_left_out(more: list[str], folder: Path) -> None:
    for name in ("events.jsonl", "scores.jsonl"):
        path = folder / name
        path.write_text('{"event": "rou\n' + path.read_text())
    assert main([*words_for("report", folder), *more]) == 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["events.jsonl", "scores.jsonl", "replies.jsonl"])
def test_a_pipe_in_a_watched_folder_is_named(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert main(["report", str(folder), "--watch"]) == 1
    assert f"{name} is not a regular file" in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--watch"]])
def test_a_run_without_its_replies_is_shown(more: list[str], folder: Path) -> None:
    (folder / "replies.jsonl").unlink()
    assert main([*words_for("report", folder), *more]) == 0


def test_brackets_in_a_sweep_s_labels_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sweep_module, "plan", lambda arguments, output, **_: ([], {"data.domains=[sketch]": "no [/red]"})
    )
    sweep_module.sweep([], tmp_path)
    assert "skipped: data.domains=[sketch]: no [/red]" in capsys.readouterr().out


def test_markup_and_formulas_in_names_are_plain_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["[/red]", "$\\frac$"]

    def renamed(line: Line) -> Line:
        return {**line, "domain": names[len(line["domain"]) % 2]}

    rewrite(folder / "scores.jsonl", renamed)
    change_events(folder, "start", method="[/red]", data="$\\frac{$", test=dict.fromkeys(names, 1))
    assert main(["table", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "[/red]" in printed
    assert main(["figure", "bars", str(folder)]) == 0
    assert main(["figure", "convergence", str(folder)]) == 0


# ---- where a resumed run writes --------------------------------------------------------------------------------------

READ_ONLY = {
    *("data.root", "data.path", "method.public.source.root"),
    *("model.pretrained", "model.pretrained_file", "model.weights", "model.others.pretrained"),
}
"""Settings with a path that a run reads."""

KEYS = ("name", "arguments")  # of a transform, whose name is imported under the rules of a `_target_`
NAMES = {
    *("data.image", "data.label", "data.domain", "data.split", "data.group"),
    *("data.classes", "data.domains", "method.public.domain", "method.public.source.domains", "protocol.domain"),
    *("protocol.counts", "protocol.fractions", "protocol.leave_out", "model.name", "rounds.metric", "train.device"),
    *("model.networks", "model.others", "attack.clients"),
    *(f"{group}.augmentation.transform.{key}" for group in ("data", "method.public.source") for key in KEYS),
}
"""Settings with a name of something that the product, or the user's own machine, has."""


def texts_of(target: type, where: str) -> Iterator[str]:
    """Yield the keys of a class's settings that hold any text or path."""
    for name, hint in get_type_hints(target).items():
        kinds = {hint, *get_args(hint)}
        if get_origin(hint) is ClassVar or name not in getattr(target, "__dataclass_fields__", {}):
            continue
        if kinds & {str, Path, Any}:
            yield f"{where}.{name}"
        for kind in kinds:
            if dataclasses.is_dataclass(kind) and isinstance(kind, type):
                yield from texts_of(kind, f"{where}.{name}")


def test_every_setting_that_holds_a_text_says_what_kind_of_text() -> None:
    found: set[str] = {*texts_of(TrainSettings, "train"), *texts_of(RoundSettings, "rounds")}
    for group in sorted(path.name for path in CONF.iterdir() if path.is_dir()):
        for path in choices_of(group).values():
            content = yaml.safe_load(path.read_text())
            if "_target_" in (content or {}):
                found.update(texts_of(class_of(content["_target_"], group), group))
    places = {key for key in found if key.partition(".")[0] in PLACES}
    assert places == {"tracker.folder", "tracker.tracking_uri", "tracker.experiment", "tracker.project"}
    unknown = found - places - READ_ONLY - NAMES
    assert not unknown, f"a path to write to, an address or a command goes to PLACES: {sorted(unknown)}"


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file of a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("choice", "claimed", "key", "value"),
    [
        ("tensorboard", "tensorboard", "folder", "ELSEWHERE"),
        ("tensorboard", "csv", "folder", "ELSEWHERE"),
        ("mlflow", "mlflow", "tracking_uri", "http://127.0.0.1:9/"),
        ("wandb", "csv", "mode", "online"),
    ],
)
def test_a_resumed_run_writes_where_its_user_says(
    choice: str, claimed: str, key: str, value: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value = value.replace("ELSEWHERE", str(tmp_path / "elsewhere"))
    settings = {**yaml.safe_load(choices_of("tracker")[choice].read_text()), key: value}
    changed(folder, with_choice("tracker", claimed, settings))
    before = contents(folder)
    assert main(["resume", str(folder), "train.rounds=2", "--quiet"]) == 1
    error = capsys.readouterr().err
    assert f"tracker.{key}={value}" in error
    assert "--trust" in error
    assert not (tmp_path / "elsewhere").exists()
    assert contents(folder) == before


@pytest.mark.parametrize("name", ["checkpoint", "prototypes", "events.jsonl", "logs/goldfinch.log"])
def test_a_resumed_run_writes_through_no_link_out_of_its_folder(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other" / name
    other.parent.mkdir(parents=True)
    (folder / name).parent.mkdir(exist_ok=True)
    if (folder / name).exists():
        (folder / name).rename(other)
    (folder / name).symlink_to(other)
    (folder / "code.json").rename(folder / "settings.json")
    (folder / "code.json").symlink_to("settings.json")  # this one stays within
    before = contents(tmp_path)
    assert main(["resume", str(folder), "train.rounds=2", "--quiet"]) == 1
    assert f"{folder / name} leads to {other}, outside {folder}" in capsys.readouterr().err
    assert contents(tmp_path) == before
    assert main(["resume", str(folder), "train.rounds=2", f"output={tmp_path / 'new'}", "--quiet"]) == 0
    assert main(["resume", str(folder), "train.rounds=2", "--trust", "--quiet"]) == 0


def test_a_resumed_run_joins_the_ray_cluster_that_its_user_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What an actor replies is unpickled here."""
    joined: list[Any] = []
    monkeypatch.setattr(running, "run", lambda settings, **_: joined.append(settings.engine.get("address")))
    changed(folder, with_choice("engine", "ray", {"name": "ray", "address": "10.0.0.9:6379"}))
    assert main(["resume", str(folder), "--quiet"]) == 1
    error = capsys.readouterr().err
    assert "engine.address=10.0.0.9:6379" in error
    assert "engine=inline, or add --trust" in error
    for words in (["engine=inline"], ["--trust"], ["engine.address=10.0.0.9:6379"]):
        assert main(["resume", str(folder), *words, "--quiet"]) == 0
    assert joined == [None, "10.0.0.9:6379", "10.0.0.9:6379"]


@pytest.mark.parametrize("how", ["the setting", "csv", "--trust"])
def test_the_user_s_own_folder_goes_on_with_its_tracker(how: str, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    place = tmp_path / "elsewhere"
    settings = {"_target_": "goldfinch.trackers.tensorboard.TensorBoard", "folder": str(place)}
    changed(folder, with_choice("tracker", "tensorboard", settings))
    words = {"the setting": [f"tracker.folder={place}"], "csv": ["tracker=csv"], "--trust": ["--trust"]}[how]
    assert main(["resume", str(folder), "train.rounds=2", *words, "--quiet"]) == 0
    assert place.exists() == (how != "csv")


def test_a_tracker_that_writes_into_the_run_s_folder_needs_no_word(folder: Path) -> None:
    pytest.importorskip("tensorboard")
    assert main(["resume", str(folder), "train.rounds=2", "tracker=tensorboard", "--quiet"]) == 0
    assert main(["resume", str(folder), "train.rounds=3", "--quiet"]) == 0
    assert (folder / "tensorboard").is_dir()
