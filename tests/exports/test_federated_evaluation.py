"""Clients score an exported model on their own test data, and nothing is trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from exports.conftest import Apart
from support.runs import run
from support.toy import DOMAINS, Toy, toy_settings

from common.overrides import quoted_override
from goldfinch.cli import main
from goldfinch.commands.deployment import LocalDeployment
from goldfinch.commands.evaluate import evaluate
from goldfinch.commands.export import export
from goldfinch.record import RunRecord

CLASSES = f"data.classes=[{','.join(Toy().class_names)}]"


@pytest.fixture(scope="module")
def by_prototypes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported model that classifies by the nearest prototype."""
    folder = tmp_path_factory.mktemp("fedproto")
    run(toy_settings("fedproto", folder / "run", hyper={"predict_with": "prototypes"}, train={"rounds": 3}))
    export(folder / "run", folder / "model")
    return folder / "model"


def data_of(pictures: Path) -> list[str]:
    return ["data=folder", quoted_override("data.root", pictures), "train.device=cpu"]


@pytest.mark.parametrize("model", ["exported", "by_prototypes"])
def test_clients_find_what_one_machine_with_all_data_finds(
    model: str, pictures: Path, tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    folder: Path = request.getfixturevalue(model)
    words = ["evaluate", str(folder), "engine=inline", "engine.wire=true", *data_of(pictures)]
    assert main([*words, "--output", str(tmp_path / "run")]) == 0
    assert "recall of the worst class" in capsys.readouterr().out
    found = RunRecord(tmp_path / "run")
    for domain in DOMAINS:
        alone = evaluate(folder, [*data_of(pictures)[:2], f"data.domains=[{domain}]", CLASSES])
        (line,) = [line["confusion"] for line in found.test_lines if line["domain"] == domain]
        counts = [[0] * len(alone["confusion"]) for _ in alone["confusion"]]
        for true, predicted, count in zip(line["true"], line["predicted"], line["count"], strict=True):
            counts[true][predicted] = count
        assert counts == alone["confusion"]
        assert found.rules["final"]["accuracy"][domain] == pytest.approx(alone["domains"][domain]["accuracy"])
    assert found.summary["scored"] == "exported model"
    assert {row["status"] for row in found.replies} == {"scored"}
    assert found.rounds_done == 0


def test_the_run_and_its_evaluation_have_the_same_scores(
    trained: RunRecord, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["data=support.toy.Toy", "train.device=cpu", "engine=inline"]
    assert main(["evaluate", str(exported), *words, "--output", str(tmp_path / "run"), "--quiet"]) == 0
    again = RunRecord(tmp_path / "run")
    assert again.summary["accuracy"] == trained.summary["accuracy"]
    assert main(["table", str(tmp_path / "run")]) == 0
    assert main(["evaluate", str(exported), *words, "--output", str(tmp_path / "run")]) == 1, "it holds a run"
    assert "to replace it, or choose another --output" in capsys.readouterr().err
    words += ["resume=true", "seed=3"]
    assert main(["evaluate", str(exported), *words, "--output", str(tmp_path / "run")]) == 1, "another run"
    assert "or add --output DIR to do it as a new run" in capsys.readouterr().err


def test_a_binned_metric_says_how_far_it_may_be_off(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["data=support.toy.Toy", "train.device=cpu", "engine=inline", "rounds.scores=true"]
    assert main(["evaluate", str(exported), *words, "--output", str(tmp_path / "run")]) == 0
    note = "AUROC is binned: after the last round it differs from the exact one by at most"
    assert note in capsys.readouterr().out
    assert main(["table", str(tmp_path / "run"), "--metric", "auroc"]) == 0
    assert note in " ".join(capsys.readouterr().out.split())


MISTAKES = {
    "another method": (["engine=inline", "method=fedavg"], "method=fedavg: the model in"),
    "rounds": (["engine=inline", "train.rounds=3"], "is evaluated as it is"),
    "rounds, in short": (["engine=inline", "rounds=3"], "train.rounds=3: the model in"),
    "no test": (["engine=inline", "rounds.test=false", "protocol.validation=0.2"], "rounds.test=false: the model in"),
    "other classes": (["engine=inline", "data=office_caltech"], "choose data with the model's classes"),
    "a split": (["engine=inline", "--split", "train"], "leave --split out"),
    "an engine that does not exist": (["engine=cloud", "data=support.toy.Toy"], "engine=cloud: no such choice"),
}


@pytest.mark.parametrize(("words", "complaint"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_an_error(
    words: list[str], complaint: str, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(exported), *words, "--output", str(tmp_path / "run")]) == 1
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_folder_of_records_has_no_suffix_of_a_file(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "scores.JSON"
    words = ["engine=inline", "data=support.toy.Toy", "train.device=cpu", "--output", str(place)]
    assert main(["evaluate", str(exported), *words]) == 1
    assert f"--output {place}: with engine=... it is a folder; name one without .JSON" in capsys.readouterr().err
    assert not place.exists()


def test_an_evaluation_takes_no_rounds(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["engine=inline", "data=support.toy.Toy", "train.device=cpu", "--output", str(tmp_path / "run")]
    assert main(["evaluate", str(exported), *words]) == 0
    again = ["resume", str(tmp_path / "run"), "data=support.toy.Toy"]
    assert main(again) == 0
    assert "has finished, and nothing is left to do\n" in capsys.readouterr().out
    before = (tmp_path / "run" / "config.yaml").read_text()
    assert main([*again, "train.rounds=4"]) == 1
    assert "evaluates a model and trains none" in capsys.readouterr().err
    assert (tmp_path / "run" / "config.yaml").read_text() == before


def test_the_part_that_clients_share_is_no_model(
    apart: Callable[[str], Apart], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(apart("fedbn").shared), "engine=inline", "data=support.toy.Toy"]) == 1
    assert "export the model of one client" in capsys.readouterr().err


def test_the_server_refuses_another_model_than_the_one_that_was_named(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("goldfinch.commands.device_evaluation.file_sha256", lambda path: "0" * 64)
    words = ["evaluate", str(exported), "engine=inline", "data=support.toy.Toy", "train.device=cpu"]
    assert main([*words, "--output", str(tmp_path / "run")]) == 1


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.timeout(600)
def test_super_nodes_score_a_model_that_they_have_no_file_of(
    exported: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes: dict[str, dict[str, object]] = {}
    for domain in DOMAINS:
        place = tmp_path / "devices" / domain
        shutil.copytree(pictures / domain, place / domain)  # each device has its own images alone
        nodes[f"{domain}-0"] = {"domain": domain, "data-dir": str(place)}
    words = ["data=folder", f"data.domains=[{','.join(DOMAINS)}]", "train.device=cpu", "rounds.registration=120"]
    with LocalDeployment(tmp_path / "flower", nodes) as deployment:
        monkeypatch.setenv("FLWR_HOME", str(deployment.home))
        assert main(["evaluate", str(exported), "engine=superlink", *words, "--output", str(tmp_path / "run")]) == 0
    found = RunRecord(tmp_path / "run")
    alone = evaluate(exported, [*data_of(pictures)[:2], CLASSES])
    for domain in DOMAINS:
        assert found.summary["accuracy"][domain] == pytest.approx(alone["domains"][domain]["accuracy"])
    events = [json.loads(line)["event"] for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert events[-1] == "finish"
    assert "round" not in events
    assert {row["domain"]: row["client"] for row in found.scores.lines} == {name: f"{name}-0" for name in DOMAINS}
