"""Every command with damaged inputs: a message and an exit code, never a traceback, and never a hang."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from support.faults import small_disk, trials
from support.records import change_events

from common import choices
from goldfinch.cli import main
from goldfinch.commands.program import TRACEBACK
from goldfinch.record import RunRecord
from server.run.checkpoint import Checkpoint, Checkpoints
from server.run.history import REPLY_COLUMNS
from server.run.registration import KEY_BITS
from server.run.schema import Event

TINY = ["train.rounds=1", "train.local_steps=1", "protocol.samples=8", "rounds.test_samples=8", "data.domains=[sketch]"]
LIMIT = 120
"""Seconds after which a command counts as hanging."""

DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "no text": lambda path: path.write_bytes(bytes(range(256))),
    "a list": lambda path: path.write_text("[]"),
    "a string": lambda path: path.write_text('"text"'),
    "nested": lambda path: path.write_text("[" * 50_000),
    "odd numbers": lambda path: path.write_text(path.read_text(errors="replace").replace("1", "1e999")),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "missing": lambda path: None,
    "a folder": lambda path: path.mkdir(),
    "a pipe": lambda path: os.mkfifo(path),
}
REPLACED = ("missing", "a folder", "a pipe")
RECORDS = ("config.yaml", "summary.json", "scores.jsonl", "replies.jsonl", "events.jsonl", "code.json")
COMPARE = [
    *("compare", "--methods", "fedavg", *TINY, "protocol.samples=40", "protocol.validation=0.5"),
    *("train.learning_rate=0.1", "--trials", "1", "--studies", "1", "--runs", "1", "--output"),
]
STUDY = "fedavg/in_domain/study-0"
FOLDERS = {
    "run": (["run", "--quiet", "method=fpl", *TINY, "output=FOLDER"], (*RECORDS, "checkpoint", "prototypes")),
    "sweep": (["sweep", "method=fedavg", "seed=0", *TINY, "--output", "FOLDER"], ("sweep.json", "config.yaml")),
    "compare": ([*COMPARE, "FOLDER"], ("journal.log", f"{STUDY}/best.yaml", f"{STUDY}/seed-0/summary.json")),
    "certificates": (
        ["devices", "certificates", "FOLDER", "--host", "localhost", "--node", "a"],
        ("authority/ca.key", "authority/ca.crt", "server/server.pem", "nodes/a/key", "operator/nodes/a.pub"),
    ),
    "model": (["export", "RUN", "--to", "FOLDER"], ("model.json", "model.safetensors")),
}
"""The command that makes a folder of each kind, and files of the folder that are damaged."""

READING = {
    "table": ("run", ["table", "FOLDER"]),
    "report": ("run", ["report", "FOLDER"]),
    "resume": ("run", ["resume", "FOLDER", "--quiet"]),
    "figure": ("run", ["figure", "convergence", "FOLDER", "--output", "OUT.png"]),
    "export": ("run", ["export", "FOLDER", "--to", "OUT"]),
    "sweep": ("sweep", FOLDERS["sweep"][0]),
    "compare": ("compare", FOLDERS["compare"][0]),
    "certificates": ("certificates", FOLDERS["certificates"][0]),
    "predict": ("model", ["evaluate", "FOLDER", "IMAGE"]),
    "evaluate": ("model", ["evaluate", "FOLDER", "data=glyphs", "data.domains=[sketch]"]),
}
"""Commands that read a folder, and its kind."""

QUICK = {
    *(("table", "nested"), ("table", "a pipe"), ("resume", "a list"), ("export", "cut"), ("report", "odd numbers")),
    *(("certificates", "cut"), ("certificates", "a pipe"), ("predict", "nested"), ("evaluate", "a list")),
}


def every_damage() -> Iterator[object]:
    """Each command with each damage; all but the quick ones are slow."""
    for command in READING:
        for name in DAMAGES:
            marks = () if (command, name) in QUICK else (pytest.mark.slow,)
            yield pytest.param(command, name, marks=marks, id=f"{command}, {name}")


def put_in(words: list[str], **places: Path) -> list[str]:
    """The words of a command with these places."""
    found = []
    for word in words:
        for name, place in places.items():
            word = word.replace(name, str(place))
        found.append(word)
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the undamaged folder of a kind; each is made once."""

    @cache
    def folder(kind: str) -> Path:
        place = tmp_path_factory.mktemp(kind) / "folder"
        places = {"RUN": folder("run")} if kind == "model" else {}
        assert main(put_in(FOLDERS[kind][0], FOLDER=place, **places)) == 0
        return place

    return folder


@pytest.fixture(scope="module")
def original(made: Callable[[str], Path]) -> Path:
    return made("run")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy of a run's folder."""
    return Path(shutil.copytree(original, tmp_path / "run"))


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has a ledger, too."""
    folder = tmp_path_factory.mktemp("private") / "run"
    assert main(["run", "--quiet", "method=fpl", "privacy=gaussian", *TINY, f"output={folder}"]) == 0
    assert (folder / "privacy.json").exists()
    return folder


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    """Raise after :data:`LIMIT` seconds what no command catches."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no answer after {LIMIT} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def check(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command; return what it wrote to stderr. An exception would be a traceback and fails the test."""
    status = main(arguments)
    error = capsys.readouterr().err
    assert status in (0, 1, 2)
    assert "Traceback" not in error
    assert "no answer after" not in error
    assert (status == 0) or error.strip(), "an error without a message"
    return error


def damage(name: str, path: Path) -> None:
    if path.is_dir():
        for each in path.iterdir():
            damage(name, each)
        return
    if name in REPLACED:
        path.unlink()
    DAMAGES[name](path)


@pytest.mark.parametrize(("command", "name"), list(every_damage()))
@pytest.mark.long
def test_a_damaged_folder_gives_a_message(
    command: str,
    name: str,
    made: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One file of the folder after the other."""
    monkeypatch.setattr(choices, "_OWN_NAMES", set())
    kind, words = READING[command]
    original = made(kind)
    image = tmp_path / "image.png"
    Image.new("RGB", (32, 32)).save(image)
    for number, file in enumerate(FOLDERS[kind][1]):
        folder = tmp_path / str(number) / "folder"
        shutil.copytree(original, folder)
        damage(name, folder / file)
        check(put_in(words, FOLDER=folder, OUT=folder.parent / "out", IMAGE=image), capsys)


VALUES: tuple[object, ...] = (
    *(None, True, -1, 0, 2**80, 1e308, float("nan"), float("inf"), "", "x", "\x1b[2J\u202e", "\0", "a" * 5000),
    *([], [1], [None], {}, {"a": {"b": []}}, "../../elsewhere", "/etc/passwd", [[[]]], ["x"] * 1000, "1e999", -0.5),
)
"""What a value of a record is replaced by."""

READERS = {
    "table": ["table", "RUN"],
    "classes": ["table", "RUN", "--classes", "--format", "csv", "--output", "OUT.csv"],
    "validated table": ["table", "RUN", "--rule", "validated", "--metric", "macro_f1", "--output", "OUT.md"],
    "report": ["report", "RUN", "--output", "OUT.html"],
    "csv": ["report", "RUN", "--csv"],
    "convergence": ["figure", "convergence", "RUN", "--output", "OUT.png"],
    "bars": ["figure", "bars", "RUN", "--output", "OUT.png"],
    "prototypes": ["figure", "prototypes", "RUN", "--by", "pca", "--samples", "4", "--output", "OUT.png"],
    "export": ["export", "RUN", "--to", "OUT"],
    "resume": ["resume", "RUN", "--quiet"],
    "resume further": ["resume", "RUN", "--quiet", "train.rounds=2"],
    "sweep": ["sweep", "method=fedavg", "seed=0", *TINY, "--output", "RUN"],
}
"""Commands that read a run's folder."""


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """Return each container in ``value`` with each of its keys."""
    found: list[tuple[Any, Any]] = []
    if isinstance(value, (dict, list)):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        for key in keys:
            found.append((value, key))
            found += places_in(value[key])
    return found


def change(value: Any, draw: random.Random) -> None:
    """Remove, repeat or replace something in ``value``."""
    places = places_in(value)
    if not places:
        return
    container, key = draw.choice(places)
    kind = draw.random()
    if kind < 0.15:
        del container[key]
    elif kind < 0.3 and isinstance(container, dict):
        container[draw.choice(["", "x", "\x1b[2J", "../a", "__class__"])] = container[key]
    else:
        container[key] = draw.choice(VALUES)


def rewrite(path: Path, draw: random.Random) -> None:
    """Write a record again with one to three changes."""
    text = path.read_text()
    changes = draw.randint(1, 3)
    if path.suffix == ".jsonl":
        lines = [json.loads(line) for line in text.splitlines()]
        for _ in range(changes):
            change(draw.choice(lines), draw)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return
    value = yaml.safe_load(text)
    for _ in range(changes):
        change(value, draw)
    path.write_text(json.dumps(value) if path.suffix == ".json" else yaml.safe_dump(value))


def files_outside(folder: Path, run: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if run not in path.parents and path != run}


@pytest.mark.parametrize("command", [pytest.param(name, marks=pytest.mark.slow) for name in READERS])
def test_records_with_other_values_give_a_message(
    command: str,
    original: Path,
    private: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One or two records are well-formed and say something else. A command that fails has written nothing."""
    monkeypatch.setattr(choices, "_OWN_NAMES", set())
    faults: list[str] = []
    for trial in range(trials(30)):
        signal.alarm(LIMIT)
        draw = random.Random(f"{command} {trial}")
        folder = tmp_path / str(trial) / "run"
        shutil.copytree(draw.choice([original, private]), folder)
        records = [name for name in (*RECORDS, "privacy.json") if (folder / name).exists()]
        for file in draw.sample(records, draw.randint(1, 2)):
            rewrite(folder / file, draw)
        before = files_outside(tmp_path / str(trial), folder)
        status = main(put_in(READERS[command], RUN=folder, OUT=folder.parent / "out"))
        error = capsys.readouterr().err
        written = files_outside(folder.parent, folder) - before
        if TRACEBACK in error or "Traceback" in error or (status != 0 and (written or not error.strip())):
            faults.append(f"trial {trial}: status {status}, wrote {written}, {error}")
        shutil.rmtree(folder.parent)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("folder", ["original", "private"])
def test_every_fact_of_an_event_is_checked_when_it_is_read(folder: str, request: pytest.FixtureRequest) -> None:
    events = read_json_lines(request.getfixturevalue(folder) / "events.jsonl")
    stating = [entry for entry in events if entry["event"] in ("start", "registered", "finish")]
    assert len(stating) > 2
    for entry in stating:
        assert set(entry) <= set(Event.__annotations__)


def test_the_key_of_a_deployment_is_larger_than_other_numbers(folder: Path) -> None:
    key = 2**KEY_BITS - 1
    change_events(folder, "finish", key=key)
    assert RunRecord(folder).summary["key"] == key


def test_a_partition_seed_that_is_no_number_gives_a_message(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_entry(folder / "config.yaml", "protocol", "partition_seed")
    assert main(["figure", "bars", str(folder), "--output", str(folder.parent / "out.png")]) == 1
    assert "protocol.partition_seed=/etc/passwd: must be a whole number" in capsys.readouterr().err


def with_entry(path: Path, *keys: str) -> None:
    """Put the text ``/etc/passwd`` at ``keys`` of a record, in each of its lines."""
    documents = [yaml.safe_load(path.read_text())] if path.suffix == ".yaml" else read_json_lines(path)
    for document in documents:
        place = document
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = "/etc/passwd"
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))


def read_json_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("column", REPLY_COLUMNS[7:-1])
def test_a_reply_with_text_for_a_number_gives_a_message(
    column: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_entry(folder / "replies.jsonl", column)
    error = check(["report", str(folder), "--csv"], capsys)
    assert "replies.jsonl" in error
    assert TRACEBACK not in error


@pytest.mark.parametrize(
    ("group", "command"),
    [
        *((group, "table") for group in ("data", "method", "views", "aggregation", "privacy", "engine", "tracker")),
        *(("method", command) for command in ("export", "resume")),
    ],
)
def test_a_configuration_with_text_for_a_group_gives_a_message(
    group: str, command: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_entry(folder / "config.yaml", group)
    error = check(put_in(READING[command][1], FOLDER=folder, OUT=tmp_path / "out"), capsys)
    assert "config.yaml is not a run's configuration" in error
    assert not (tmp_path / "out").exists()


def _rewritten(checkpoint: Checkpoint, **facts: Any) -> Checkpoint:
    return dataclasses.replace(checkpoint, **facts)


def _reshaped(checkpoint: Checkpoint) -> Checkpoint:
    weights = {name: tensor[..., None] for name, tensor in checkpoint.state.weights.items()}
    return dataclasses.replace(checkpoint, state=dataclasses.replace(checkpoint.state, weights=weights))


def _short(checkpoint: Checkpoint) -> Checkpoint:
    weights = dict(checkpoint.state.weights)
    weights.popitem()
    return dataclasses.replace(checkpoint, state=dataclasses.replace(checkpoint.state, weights=weights))


def _odd_memory(checkpoint: Checkpoint) -> Checkpoint:
    return dataclasses.replace(checkpoint, memory={name: torch.zeros(3, 3) for name in checkpoint.memory})


HOSTILE: dict[str, Callable[[Checkpoint], Checkpoint]] = {
    "no run": partial(_rewritten, run=[]),
    "seconds that are text": partial(_rewritten, seconds="x"),
    "rounds that are a list": partial(_rewritten, rounds=[1]),
    "a seed that is text": partial(_rewritten, seed="x"),
    "other shapes": _reshaped,
    "a missing tensor": _short,
    "guards' memory of other shapes": _odd_memory,
}
"""Checkpoints with correct checksums, as an attacker writes them."""


@pytest.mark.parametrize("command", ["resume", pytest.param("export", marks=pytest.mark.long)])
@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_checkpoint_gives_a_message(
    change: Callable[[Checkpoint], Checkpoint],
    command: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoints = Checkpoints(folder / "checkpoint")
    good = checkpoints.load()
    assert good is not None
    checkpoints.replace(change(good))
    words = ["resume", str(folder), "--quiet", "train.rounds=2"]
    if command == "export":
        words = ["export", str(folder), "--to", str(tmp_path / "model")]
    error = check(words, capsys)
    if change in (_reshaped, _short):
        assert error, "the network does not fit, which must not pass in silence"
        assert not (tmp_path / "model" / "model.json").exists()


READ_ONLY = {
    "run": ["run", "--quiet", "method=fpl", *TINY, "output=DISK/new"],
    "resume": ["resume", "DISK/run", "--quiet", "train.rounds=2"],
    "sweep": ["sweep", "method=fedavg", "seed=0", *TINY, "--output", "DISK/sweep"],
    "compare": [*COMPARE, "DISK/compare"],
    "figure": ["figure", "bars", "DISK/run"],
    "report": ["report", "DISK/run"],
    "export": ["export", "DISK/run", "--to", "DISK/model"],
    "certificates": ["devices", "certificates", "DISK/keys", "--host", "localhost"],
}


@pytest.mark.long
def test_a_read_only_disk_gives_a_message(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_disk(tmp_path / "disk", "64m") as change:
        disk = tmp_path / "disk"
        shutil.copytree(original, disk / "run")
        before = sorted(disk.rglob("*"))
        change("ro")
        for words in READ_ONLY.values():
            status = main(put_in(words, DISK=disk))
            error = capsys.readouterr().err
            assert status == 1, words
            assert "Read-only file system" in error, words
            assert "Traceback" not in error
        assert sorted(disk.rglob("*")) == before


SETTINGS = {
    "a group outside": ["data=../x"],
    "no experiment": ["experiment=null"],
    "no device": ["engine.device=abc"],
    "no key": ["=3"],
    "a control character": ["method=\x1b[2J"],
    "NUL": ["output=a\0b"],
    "an endless interpolation": ["train.rounds=${train.rounds}"],
}


@pytest.mark.parametrize("given", SETTINGS.values(), ids=SETTINGS)
def test_damaged_settings_give_a_message(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert check(["run", "--quiet", *TINY, *given], capsys)


@pytest.mark.parametrize("name", ["no text", "nested", "a folder", "a pipe", "a list"])
def test_a_damaged_folder_of_settings_gives_a_message(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "conf" / "method" / "mine.yaml"
    place.parent.mkdir(parents=True)
    place.write_text("lr: 1\n")
    damage(name, place)
    assert check(["run", "--quiet", f"--config-dir={tmp_path / 'conf'}", "method=mine", *TINY], capsys)


def test_a_package_that_exits_when_imported_ends_the_command_with_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaving_package.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    status = main(["run", "--quiet", "method._target_=leaving_package.Mine", *TINY])
    assert status == 1
    assert "sys.exit(0)" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    error = check(["run", "--quiet", *TINY, f"output={tmp_path / 'closed' / 'run'}"], capsys)
    assert "closed" in error


def test_an_unexpected_exception_names_its_place_and_how_to_see_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr("common.choices.search", fail)
    arguments = ["run", f"--config-dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["goldfinch", *arguments])
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert "ZeroDivisionError: a fault (test_damaged_inputs.py, line" in error
    assert f"{TRACEBACK}=1 goldfinch run --config-dir={tmp_path} resume=true shows" in error
    (tmp_path / "run").mkdir()
    arguments.append(f"output={tmp_path / 'run'}")
    monkeypatch.setattr(sys, "argv", ["goldfinch", *arguments])
    assert main(arguments) == 1
    assert "resume=true" not in capsys.readouterr().err
    monkeypatch.setenv(TRACEBACK, "1")
    with pytest.raises(ZeroDivisionError):
        main(arguments)
