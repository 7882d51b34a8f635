"""Attacks as a setting: what hostile clients send, who may attack, and that every record of it says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import Run, TouchedEngine, run
from support.toy import CLASSES, TRAIN, attacked_settings, toy_settings

from common.choices import choices_of
from common.config import checked
from common.contract import Contract
from common.errors import ConfigError
from common.prototypes import PrototypeSet
from common.settings import check_deployable, load_settings
from common.wire.messages import Request
from common.wire.payload import Payload
from goldfinch.record import RunRecord
from goldfinch.results.frames import json_table, score_sheet
from goldfinch.results.groups import group_runs
from goldfinch.results.report.results import title
from server.engines.inline import InlineEngine
from server.run.events import describe
from server.run.rounds import RoundLoop
from strategies.core import attacks
from strategies.core.attacks import Attack, Seen
from strategies.core.flower import FlowerStrategy
from strategies.fedavg import FedAvg

ATTACKS = [name for name in choices_of("attack") if name != "none"]
HOSTILE = "attack.clients=[signs-0]"


def attacked(attack: str, output: Path, *overrides: str, method: str = "fedavg", **more: Any) -> Run:
    return run(attacked_settings(attack, method, output, overrides, **more))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A round of FPL without an attack."""
    return run(toy_settings("fpl", tmp_path_factory.mktemp("plain"), train={"rounds": 1}))


@pytest.fixture(scope="module")
def flipped(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same round under a sign flip by ``dark-0``."""
    return attacked("sign_flip", tmp_path_factory.mktemp("flipped"), method="fpl", train={"rounds": 1})


def test_an_attack_by_no_client_of_the_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"attack\.clients: the protocol has no client sings-0; did you mean"):
        load_settings(["method=fedavg", "data=glyphs", "attack=sign_flip", "attack.clients=[sings-0]"])


# ---- what is sent ----------------------------------------------------------------------------------------------------


def payload(step: float) -> Payload:
    weights = {
        "w": torch.full((2,), 1.0 + step),
        "bn.running_var": torch.full((2,), 3.0),
        "bn.num_batches_tracked": torch.tensor(4),
    }
    rows = PrototypeSet(torch.tensor([[step, 0.0], [0.0, 2.0]]), torch.tensor([0, 1]), torch.ones(2))
    return Payload(weights, rows, {})


def seen(*honest: float) -> Seen:
    request = Request(
        run="r", identity="i", method="m", round=1, exchange="train", client="c-0", client_count=3, client_index=2,
        train=True, score=[], code="c",
    )  # fmt: skip
    sent = {f"{name}-0": payload(step) for name, step in zip("ab", honest, strict=False)}
    return Seen(payload(0.0), request, sent, ["a-0", "b-0", "c-0"], seed=0)


def sent(attack: Attack, *honest: float) -> Payload:
    found = attack.sent(payload(0.5), seen(*honest))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("attack", "moved"),
    [
        (attacks.SignFlip(("c-0",), strength=2.0), -1.0),
        (attacks.InnerProduct(("c-0",), strength=10.0), -20.0),
        (attacks.LittleIsEnough(("c-0",), strength=1.5), 2.0 - 1.5 * 2**0.5),
        (attacks.LabelFlip(("c-0",)), 0.5),
    ],
)
def test_the_step_is_the_formula_s(attack: Attack, moved: float) -> None:
    """The hostile client's own step is 0.5; the honest ones are 1 and 3, of mean 2 and deviation sqrt(2)."""
    found = sent(attack, 1.0, 3.0)
    assert torch.allclose(found.weights["w"], torch.full((2,), 1.0 + moved))
    assert torch.equal(found.weights["bn.running_var"], payload(0).weights["bn.running_var"])
    assert torch.equal(found.weights["bn.num_batches_tracked"], torch.tensor(4))


def test_framing_sends_the_opposite_of_one_honest_client_s_step() -> None:
    found = sent(attacks.Framing(("c-0",), strength=10.0), 1.0, 3.0).weights["w"]
    assert found.tolist() in ([-9.0, -9.0], [-29.0, -29.0])


def test_prototypes_are_turned_or_dealt_to_other_classes() -> None:
    flipped = sent(attacks.SignFlip(("c-0",), strength=2.0)).prototypes
    rolled = sent(attacks.PrototypeRoll(("c-0",), strength=3.0)).prototypes
    assert flipped is not None
    assert rolled is not None
    assert flipped.vectors.tolist() == [[-1.0, 0.0], [0.0, -4.0]]
    assert rolled.vectors.tolist() == [[0.0, 6.0], [1.5, 0.0]]
    assert rolled.labels.tolist() == [0, 1]


def test_of_several_prototypes_of_a_class_each_is_another_class_s() -> None:
    rows = PrototypeSet(torch.arange(6.0)[:, None], torch.tensor([0, 0, 0, 2, 3, 3]), torch.ones(6))
    found = attacks.PrototypeRoll(("c-0",)).sent(replace(payload(0.5), prototypes=rows), seen())
    assert found is not None
    assert found.prototypes is not None
    assert found.prototypes.vectors[:, 0].tolist() == [4.0, 5.0, 4.0, 0.0, 3.0, 3.0]
    assert found.prototypes.labels.tolist() == rows.labels.tolist()


@pytest.mark.parametrize("transport", ["bfloat16", "float16"])
def test_an_attack_is_sent_as_the_transport_sends(transport: str, tmp_path: Path) -> None:
    done = attacked("noise", tmp_path, method="fpl", train={"rounds": 1}, rounds={"transport": transport})
    assert {row["status"] for row in done.replies() if row["client"] == "dark-0"} == {"scored", "trained"}


def test_variances_are_multiplied() -> None:
    assert sent(attacks.Variances(("c-0",), strength=5.0)).weights["bn.running_var"].tolist() == [15.0, 15.0]


@pytest.mark.parametrize("attack", [attacks.InnerProduct(("c-0",)), attacks.LittleIsEnough(("c-0",))])
def test_without_an_honest_client_the_update_is_the_own(attack: Attack) -> None:
    assert torch.equal(sent(attack).weights["w"], payload(0.5).weights["w"])


def test_with_one_honest_client_little_is_enough_sends_its_update() -> None:
    assert torch.equal(sent(attacks.LittleIsEnough(("c-0",)), 1.0).weights["w"], payload(1.0).weights["w"])


@pytest.mark.parametrize("attack", [name for name in ATTACKS if name != "variances"])
def test_an_attack_is_as_strong_as_those_of_the_literature_unless_another_strength_is_set(attack: str) -> None:
    chosen = load_settings([f"attack={attack}", HOSTILE]).attack
    assert 1 <= getattr(chosen, "strength", 1.0) <= 10


# ---- in runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", ATTACKS)
def test_every_attack_runs_changes_the_state_and_is_in_the_record(attack: str, plain: Run, tmp_path: Path) -> None:
    done = attacked(attack, tmp_path, method="fpl", train={"rounds": 1})
    assert done.sha256 != plain.sha256
    assert done.summary["attack"] == RunRecord(done.folder).attack == f"{attack} by dark-0"
    start = next(entry for name, entry in done.events if name == "start")
    assert start["attack"] == f"{attack} by dark-0"


@pytest.mark.parametrize("attack", ATTACKS)
def test_neither_the_wire_nor_the_order_of_arrival_changes_an_attack(attack: str, tmp_path: Path) -> None:
    """The wire sorts a reply's tensors by name, and Flower's replies come in any order; two would add up alike."""
    several = ("protocol=skewed", "protocol.skew=none", "protocol.client_count=2", "protocol.least=2")
    more: dict[str, Any] = {"overrides": several, "train": {"rounds": 1}}
    whole = run(attacked_settings(attack, "fpl", tmp_path / "whole", **more))
    settings = attacked_settings(attack, "fpl", tmp_path / "other", engine={"wire": True}, **more)
    other = run(settings, TouchedEngine(settings, arrival=lambda replies: list(reversed(replies))))
    assert other.sha256 == whole.sha256


def test_an_attack_that_changes_nothing_says_so(plain: Run, tmp_path: Path) -> None:
    """FedAvg sends no prototypes, so none are dealt to other classes; FPL sends some."""
    without = attacked("prototype_roll", tmp_path / "without", train={"rounds": 1})
    assert without.sha256 == run(toy_settings("fedavg", tmp_path / "plain", train={"rounds": 1})).sha256
    told = [entry for name, entry in without.events if name == "harmless attack"]
    assert [entry["clients"] for entry in told] == [["dark-0"]]
    assert describe("harmless attack", told[0], 1).startswith("the attack changed nothing that dark-0 sent: ")
    assert "harmless attack" in [event["event"] for event in RunRecord(without.folder).events]


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_attack_that_changes_something_is_called_harmless(attack: str, tmp_path: Path) -> None:
    done = attacked(attack, tmp_path, method="fpl", train={"rounds": 2})
    assert "harmless attack" not in [name for name, _ in done.events]


@checked
class Added(Attack):
    """Adds one drawn number to every weight."""

    def sent(self, payload: Payload, seen: Seen) -> Payload | None:
        number = torch.rand(())
        weights = {name: value + number.to(value.dtype) for name, value in payload.weights.items()}
        return replace(payload, weights=weights)


@checked
class InPlace(Attack):
    """Does the same in place, and clears all else that it is shown."""

    def sent(self, payload: Payload, seen: Seen) -> Payload | None:
        number = torch.rand(())
        for value in payload.weights.values():
            value.add_(number.to(value.dtype))
        for shown in (seen.message, *seen.honest.values()):
            for value in shown.weights.values():
                value.zero_()
        return payload


def test_an_attack_that_works_in_place_changes_its_own_update_alone_and_draws_by_the_seed(tmp_path: Path) -> None:
    hashes = []
    for number, kind in enumerate((Added, InPlace, InPlace)):
        torch.manual_seed(number)
        settings = attacked_settings("sign_flip", "fedavg", tmp_path / str(number), train={"rounds": 1})
        done = run(replace(settings, attack=kind(("dark-0",))))
        assert "harmless attack" not in [name for name, _ in done.events]
        hashes.append(done.sha256)
    assert hashes[0] == hashes[1] == hashes[2]


def test_another_seed_draws_other_noise() -> None:
    noise = attacks.Noise(("c-0",))
    wide = replace(payload(0.0), weights={"w": torch.arange(4.0)})
    found = []
    for seed in (0, 0, 1):
        changed = noise.sent(wide, replace(seen(), message=replace(wide, weights={"w": torch.zeros(4)}), seed=seed))
        assert changed is not None
        found.append(changed.weights["w"].tolist())
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_who_is_not_hostile_sends_what_it_would_send(flipped: Run, plain: Run) -> None:
    losses: list[dict[str, str]] = []
    for each in (flipped, plain):
        losses.append({row["client"]: row["losses"] for row in each.replies() if row["status"] == "trained"})
    assert losses[0] == losses[1], "they all train honestly"


def test_under_a_label_flip_the_classes_are_those_it_learns(plain: Run, tmp_path: Path) -> None:
    done = attacked("label_flip", tmp_path, method="fpl", train={"rounds": 1})
    counts = {entry["client"]: entry["class_counts"] for name, entry in done.events if name == "registered"}
    before = {entry["client"]: entry["class_counts"] for name, entry in plain.events if name == "registered"}
    assert counts["dark-0"] == before["dark-0"][::-1]
    assert counts["bright-0"] == before["bright-0"]
    assert len(counts["dark-0"]) == CLASSES


def test_noise_comes_with_nine_million_samples(tmp_path: Path) -> None:
    done = attacked("noise", tmp_path, "attack.strength=0.001", train={"rounds": 1})
    assert done.summary["clients"]["dark-0"] > 8_000_000
    assert done.summary["clients"]["bright-0"] == TRAIN["bright"]
    assert not [row for row in done.replies() if row["status"] == "refused"]


# ---- who may attack --------------------------------------------------------------------------------------------------


def test_a_deployment_refuses_it(tmp_path: Path) -> None:
    settings = attacked_settings("sign_flip", "fedavg", tmp_path)
    with pytest.raises(ConfigError, match=r"attack=sign_flip.*attack=none"):
        check_deployable(settings)
    engine = InlineEngine(settings)
    engine.simulated = False
    with pytest.raises(ConfigError, match="simulation only"):
        RoundLoop(settings, engine)
    engine.close()
    with pytest.raises(ConfigError, match="attack=none"):
        FlowerStrategy(FedAvg(), settings)


def test_a_device_that_is_not_simulated_keeps_its_labels(tmp_path: Path) -> None:
    settings = attacked_settings("label_flip", "fedavg", tmp_path)
    engine = InlineEngine(settings)
    device: Any = engine.devices["dark-0"]
    device.contract = Contract()
    labels = device._own_data()[0].labels
    assert torch.equal(labels, settings.data.load("dark").train.labels)
    engine.close()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["attack=sign_flip"], r"attack: no client is hostile: name them, such as attack\.clients="),
        (["attack=sign_flip", "attack.clients=[sings-0]"], "no client sings-0.*signs-0"),
        ([HOSTILE], "attack.clients"),
    ],
)
def test_mistakes_are_named(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(["method=fedavg", "data=glyphs", *overrides])


def test_a_run_under_attack_has_an_identity_of_its_own(tmp_path: Path) -> None:
    plain = toy_settings("fedavg", tmp_path)
    hostile = attacked_settings("sign_flip", "fedavg", tmp_path)
    assert hostile.identity != plain.identity


# ---- what is said of it ----------------------------------------------------------------------------------------------


def test_an_attacked_row_is_marked_alone_and_beside_others(flipped: Run, plain: Run, tmp_path: Path) -> None:
    second = attacked("sign_flip", tmp_path, method="fpl", seed=1, train={"rounds": 1})
    hostile = [flipped.folder, second.folder]
    (alone,) = group_runs([RunRecord(folder) for folder in hostile])
    (both,) = group_runs([RunRecord(folder) for folder in (*hostile, plain.folder)])
    assert [group.label for group in alone.rows] == ["fpl (under attack: sign_flip by dark-0)"]
    assert [len(group.runs) for group in both.rows] == [2, 1], "never one row"
    assert ["under attack: sign_flip by dark-0" in group.label for group in both.rows] == [True, False]
    assert any(note.startswith("under attack:") for note in score_sheet(both, "final").notes)
    assert [row["attack"] for row in json_table(both, "final")["rows"]] == ["sign_flip by dark-0", ""]
    assert title([alone]) == "FPL on toy, under attack: sign_flip by dark-0"
