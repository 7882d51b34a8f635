"""What a deployment's server draws cannot be predicted by its devices, and can be repeated by its record."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.runs import Run, TouchedEngine, run
from support.toy import toy_settings

from common.errors import ConfigError
from common.settings import RunSettings
from common.wire.messages import request_text
from common.wire.payload import encode

SOME = {"participation": 0.67, "evaluate_every": 100}
"""Two of three clients are drawn."""


class Deployed(TouchedEngine):
    """Devices that the server does not simulate."""

    simulated = False


def settings_in(folder: Path, rounds: int = 12, **more: Any) -> RunSettings:
    return toy_settings("fedavg", folder, train={"rounds": rounds, "local_steps": 1}, rounds={**SOME, **more})


def participants(done: Run) -> list[list[str]]:
    return [list(entry["clients"]) for name, entry in done.events if name == "round"]


def test_a_simulation_draws_from_the_seed(tmp_path: Path) -> None:
    first, second = (run(settings_in(tmp_path / name, rounds=4)) for name in "ab")
    assert (participants(first), first.sha256) == (participants(second), second.sha256)
    assert first.summary["key"] == first.summary["seed"]


def test_the_seed_does_not_tell_who_takes_part_in_a_deployment(tmp_path: Path) -> None:
    predicted = participants(run(settings_in(tmp_path / "simulated")))
    found: list[list[list[str]]] = []
    for name in ("first", "second"):
        settings = settings_in(tmp_path / name)
        done = run(settings, Deployed(settings))
        found.append(participants(done))
        assert done.summary["key"].bit_length() > 64
    assert found[0] != predicted
    assert found[1] != predicted
    assert found[0] != found[1]


def test_a_resumed_deployment_goes_on_with_its_key_and_a_simulation_can_repeat_it(tmp_path: Path) -> None:
    settings = settings_in(tmp_path / "deployed", rounds=6)
    before = run(settings, Deployed(settings), stop_after=3)
    resumed = replace(settings, resume=True)
    after = run(resumed, Deployed(resumed))
    assert len(participants(before)) == 3
    assert after.summary["key"] == before.summary["key"]
    again = run(settings_in(tmp_path / "repeated", rounds=6, key=after.summary["key"]))
    assert participants(again) == participants(before) + participants(after)
    assert again.sha256 == after.sha256


def test_a_deployment_may_be_resumed_as_a_simulation(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, rounds=2)
    before = run(settings, Deployed(settings), stop_after=1)
    after = run(replace(settings, resume=True))
    assert after.summary["key"] == before.summary["key"]


def test_no_device_is_sent_the_key(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, rounds=3)
    engine = Deployed(settings)
    done = run(settings, engine)
    key = done.summary["key"]
    spellings = [str(key).encode(), hex(key)[2:].encode(), key.to_bytes(16, "big"), key.to_bytes(16, "little")]
    sent = [json.dumps(settings.raw, default=str).encode()]
    for message in engine.messages:
        sent += [request_text(message.request).encode(), encode(message.message)]
    sent.append(json.dumps(done.events, default=str).encode())  # trackers are told every event
    sent.append((tmp_path / "config.yaml").read_bytes())
    for blob in sent:
        assert not any(spelling in blob for spelling in spellings)


def test_a_deployment_refuses_a_key_that_devices_would_receive(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, key=7)
    with pytest.raises(ConfigError, match=r"rounds.key=7 would be sent to the devices.*Leave it out"):
        run(settings, Deployed(settings))
