"""What becomes of a run in an output folder: the table of server/run/existing.py, row by row and column by column."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.runs import run
from support.toy import toy_settings

from common.data.folder import Folder
from common.data.table import Table
from common.errors import CheckpointError, ConfigError, EngineError, GoldfinchError
from common.run_config import result_settings, yaml_of
from common.settings import RunSettings
from server.engines.inline import InlineEngine
from server.run.conduct import prepare_output, run_federation
from server.run.existing import Step, _is_long_enough, _other_settings, decide

REFUSED = "refused"
START, GO_ON, NOTHING, KEEP = Step.START, Step.GO_ON, Step.NOTHING, Step.KEEP

CHANGED = {"common/data/batches.py": "0" * 16}


def settings(folder: Path, rounds: int = 2, **more: Any) -> RunSettings:
    return toy_settings("fedavg", folder, train={"rounds": rounds}, **more)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished run of two rounds, and one that was killed after its first."""
    place = tmp_path_factory.mktemp("existing")
    run(settings(place / "finished"))
    run(settings(place / "unfinished"), stop_after=1)
    (place / "unfinished" / "summary.json").unlink()
    return {name: place / name for name in ("finished", "unfinished")}


def content(folder: Path) -> dict[str, bytes]:
    """Every file below the folder, by its path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edited(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def of_other_code(folder: Path) -> None:
    edited(folder / "code.json", **CHANGED)


def without(*names: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        for name in names:
            if (folder / name).is_dir():
                shutil.rmtree(folder / name)
            else:
                (folder / name).unlink()

    return remove


def failed(folder: Path) -> None:
    with (folder / "events.jsonl").open("a") as stream:
        stream.write(json.dumps({"event": "failed", "time": 0.0, "round": 1, "reason": "not finite"}) + "\n")


def written(name: str, text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

    return write


def as_it_is(folder: Path) -> None:
    pass


ROWS: dict[str, tuple[str, Callable[[Path], None], dict[str, Any], tuple[Any, ...]]] = {
    "no folder": ("", as_it_is, {}, (START,) * 5),
    "files that no run writes": ("", written("notes.txt", "mine"), {}, (START,) * 5),
    "a folder of a run's name": ("", written("clients/list.csv", "mine"), {}, (REFUSED,) * 5),
    "a file of a run's name": ("", written("config.yaml", "mine: 1"), {}, (REFUSED,) * 5),
    "begun": ("finished", without("summary.json", "checkpoint", "events.jsonl"), {}, (START,) * 5),
    "unfinished": ("unfinished", as_it_is, {}, (REFUSED, GO_ON, START, GO_ON, START)),
    "failed": ("unfinished", failed, {}, (REFUSED, GO_ON, START, GO_ON, START)),
    "unfinished, other code": ("unfinished", of_other_code, {}, (REFUSED, GO_ON, START, KEEP, START)),
    "finished": ("finished", as_it_is, {}, (REFUSED, NOTHING, START, NOTHING, NOTHING)),
    "finished, other code": ("finished", of_other_code, {}, (REFUSED, NOTHING, START, KEEP, START)),
    "finished, fewer rounds": ("finished", as_it_is, {"train": {"rounds": 3}}, (REFUSED, GO_ON, START, GO_ON, START)),
    "finished, more rounds": ("finished", as_it_is, {"train": {"rounds": 1}}, (REFUSED, REFUSED, START, KEEP, START)),
    "other settings": ("finished", as_it_is, {"seed": 5}, (REFUSED, REFUSED, START, KEEP, START)),
    "unfinished, other settings": ("unfinished", as_it_is, {"seed": 5}, (REFUSED, REFUSED, START, KEEP, START)),
    "scored otherwise": (
        "finished",
        as_it_is,
        {"rounds": {"test_samples": 4}},
        (REFUSED, REFUSED, START, KEEP, START),
    ),
    "without a summary": ("finished", without("summary.json"), {}, (REFUSED, NOTHING, START, NOTHING, NOTHING)),
    "copied without checkpoints": (
        "finished",
        without("checkpoint"),
        {},
        (REFUSED, NOTHING, START, NOTHING, NOTHING),
    ),
    "copied without checkpoints, fewer rounds": (
        "finished",
        without("checkpoint"),
        {"train": {"rounds": 3}},
        (REFUSED, REFUSED, START, KEEP, START),
    ),
    "copied without checkpoints and summary": (
        "finished",
        without("checkpoint", "summary.json"),
        {},
        (REFUSED, NOTHING, START, NOTHING, NOTHING),
    ),
    "a damaged summary": (
        "finished",
        written("summary.json", "{"),
        {},
        (REFUSED, NOTHING, START, NOTHING, NOTHING),
    ),
    "a damaged configuration": (
        "finished",
        written("config.yaml", "[1"),
        {},
        (REFUSED, REFUSED, START, KEEP, START),
    ),
    "a damaged configuration without checkpoints": (
        "finished",
        lambda folder: (without("checkpoint")(folder), written("config.yaml", "[1")(folder)),
        {},
        (REFUSED, REFUSED, START, KEEP, START),
    ),
    "a damaged checkpoint": (
        "unfinished",
        written("checkpoint/round-000001.safetensors", "no tensors"),
        {},
        (REFUSED, REFUSED, START, KEEP, START),
    ),
}


@pytest.mark.parametrize(("kind", "change", "asked", "expected"), ROWS.values(), ids=ROWS)
def test_the_table(
    kind: str,
    change: Callable[[Path], None],
    asked: dict[str, Any],
    expected: tuple[Any, ...],
    kinds: dict[str, Path],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    if kind:
        shutil.copytree(kinds[kind], folder)
    change(folder)
    before = content(folder)
    plain = toy_settings("fedavg", folder, **{"train": {"rounds": 2}, **asked})
    columns = [
        (plain, False),
        (replace(plain, resume=True), False),
        (replace(plain, overwrite=True), False),
        (plain, True),
        (replace(plain, overwrite=True), True),
    ]
    found: list[Any] = []
    for wanted, study in columns:
        try:
            decision = decide(wanted, study=study)
        except GoldfinchError:
            found.append(REFUSED)
            continue
        if decision.step is KEEP and not study:
            found.append(REFUSED)
        else:
            found.append(decision.step)
        assert bool(decision.reason) == (decision.step is KEEP)
    assert tuple(found) == expected
    assert content(folder) == before, "it only reads"


LONG_ENOUGH: dict[str, tuple[dict[str, Any], bool]] = {
    "as many rounds": ({}, True),
    "more rounds": ({"rounds": 4}, False),
    "fewer rounds": ({"rounds": 2}, False),
    "other scores": ({"scoring": "every second round"}, False),
    "not at its end": ({"end": None}, False),
    "stopped early as now": ({"rounds": 2, "early_stop": {"patience": 1, "rounds": 3}}, True),
    "stopped early by another patience": ({"rounds": 2, "early_stop": {"patience": 2, "rounds": 3}}, False),
    "stopped early of more rounds": ({"rounds": 2, "early_stop": {"patience": 1, "rounds": 9}}, False),
}
"""What differs from a run of the three rounds that are asked for."""


@pytest.mark.parametrize("case", LONG_ENOUGH)
def test_a_study_takes_a_run_for_finished_if_it_would_end_so_today(case: str) -> None:
    changes, finished = LONG_ENOUGH[case]
    asked: Any = SimpleNamespace(scoring="all", train=SimpleNamespace(rounds=3, patience=1))
    facts: Any = SimpleNamespace(**{"scoring": "all", "rounds": 3, "early_stop": None, "end": "finish", **changes})
    assert _is_long_enough(asked, facts) is finished


def test_the_reason_names_files_and_settings(kinds: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(kinds["finished"], tmp_path / "run"))
    other = decide(settings(folder, seed=5), study=True)
    assert "seed=5, which was 0" in other.reason
    assert not other.finished
    of_other_code(folder)
    changed = decide(settings(folder), study=True)
    assert changed.reason == "it is of other code, which differs in common/data/batches.py"
    assert changed.finished, "its scores are those of the settings, and a table says that its code is another"


@pytest.mark.parametrize("make", [Folder, Table])
def test_a_study_keeps_a_run_on_other_images_of_one_s_own(make: Any, tmp_path: Path) -> None:
    """A folder's name alone says which images are in it."""
    data = make(domains=("a", "b"), classes=("x", "y"), root=str(tmp_path / "images"))
    first = settings(tmp_path / "run", data=data)
    first.output_folder.mkdir()
    (first.output_folder / "config.yaml").write_text(yaml_of(first.raw))
    moved = settings(tmp_path / "run", data=replace(data, root=str(tmp_path / "others")))
    assert _other_settings(first) == ""
    assert f"data.root={tmp_path}/others, which was {tmp_path}/images" in _other_settings(moved)
    assert first.identity == moved.identity, "each device has a root of its own"


@pytest.mark.parametrize(
    ("reader", "counts"),
    [("mylib.archives.Archives", True), ("common.data.folder.Folder", True), ("common.data.digits.Digits", False)],
)
def test_another_root_holds_other_images_but_of_a_public_set(reader: str, counts: bool) -> None:
    found = result_settings({"data": {"_target_": reader, "root": "here"}})
    assert ("data.root" in found) == counts


def test_a_run_without_a_score_is_done_again_and_is_in_the_table_until_then(tmp_path: Path) -> None:
    run(settings(tmp_path, 1))
    (tmp_path / "scores.jsonl").write_text("")
    shutil.rmtree(tmp_path / "checkpoint")
    again = decide(settings(tmp_path, 1), study=True)
    assert (again.step, again.finished) == (START, True)
    assert not decide(settings(tmp_path, 1, seed=5), study=True).finished


def test_a_run_is_not_written_over_files_of_its_names_even_with_overwrite(tmp_path: Path) -> None:
    written("clients/list.csv", "mine")(tmp_path)
    written("replies.csv", "mine")(tmp_path)
    for more in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(ConfigError, match=r"holds no run, but clients and replies\.csv, .*output="):
            run(settings(tmp_path, **more))
    assert content(tmp_path) == {"clients/list.csv": b"mine", "replies.csv": b"mine"}


def test_other_files_stay_where_a_run_begins(tmp_path: Path) -> None:
    written("notes.txt", "mine")(tmp_path)
    run(settings(tmp_path, 1))
    run(settings(tmp_path, 1, overwrite=True))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_run_without_checkpoints_is_neither_replaced_nor_begun_anew_unasked(
    kinds: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(kinds["finished"], tmp_path / "run", ignore=shutil.ignore_patterns("checkpoint")))
    before = content(folder)
    with pytest.raises(ConfigError, match="already holds a run"):
        run(settings(folder, 3))
    with pytest.raises(CheckpointError, match=r"without a checkpoint.*overwrite=true"):
        run(settings(folder, 3, resume=True))
    assert content(folder) == before
    assert run(settings(folder, 1, overwrite=True)).summary["rounds"] == 1


def test_a_run_that_is_replaced_stays_whole_until_the_new_one_begins(
    kinds: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(kinds["finished"], tmp_path / "run"))
    before = content(folder)
    new = settings(folder, 1, seed=5, overwrite=True)
    prepare_output(new)
    assert content(folder) == before, "as while an engine is started, which may fail"
    engine = InlineEngine(new)
    monkeypatch.setattr(engine, "register", lambda expected, admit, seconds: [])
    with pytest.raises(EngineError, match=r"only 0 of \d clients registered"):
        run_federation(new, engine)
    assert content(folder) == before, "as while no device is there"
    assert run_federation(new, InlineEngine(new))["seed"] == 5
    assert decide(settings(folder, 1, seed=5), study=True).step is NOTHING


def test_a_run_that_was_killed_before_its_summary_gets_it_without_training(
    kinds: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(kinds["finished"], tmp_path / "run"))
    before = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").unlink()
    again = run(settings(folder, resume=True))
    assert again.sha256 == before["state_sha256"]
    assert not [name for name, _ in again.events if name == "round done"]
    assert again.summary["average"] == before["average"]


def test_resume_and_overwrite_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose one"):
        prepare_output(settings(tmp_path, resume=True, overwrite=True))


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_starts_again_removes_what_clients_kept_for_an_attempt_without_a_round(
    resume: bool, kinds: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(kinds["unfinished"], tmp_path / "run"))
    without("checkpoint", "scores.jsonl")(folder)
    state = folder / "clients" / "an-id" / "dark-0" / "state-1-000001.safetensors"
    state.parent.mkdir(parents=True)
    state.write_bytes(b"of an attempt that was killed")
    run(settings(folder, resume=resume))
    assert not state.exists()
