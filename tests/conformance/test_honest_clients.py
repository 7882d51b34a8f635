"""A plain run counts what honest clients sent, to the bit, however unlike they are; and it trains on single samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.runs import Run, TouchedEngine, run
from support.toy import Toy, method_at_defaults, toy_settings
from support.unlike import SAMPLES, Unlike

from client.device import Device
from common.choices import CONF
from common.errors import ConfigError
from common.settings import RunSettings
from common.storage import tensors_sha256
from common.wire.messages import Request
from common.wire.payload import Payload
from strategies.core.federation import Federation, Outcome, Reply
from strategies.core.method import Upload

FILES = sorted(path.stem for path in (CONF / "method").glob("*.yaml"))
METHODS = [name for name in FILES if not method_at_defaults(name).pools]
"""All methods with the protocol's clients."""
ROUNDS = 2
NEED_PAIRS = ("adcol", "fedpall")  # a discriminator with batch normalisation reads the features of each batch
FAST = ("fedavg", "fpl", *NEED_PAIRS)


Place = tuple[int, str, str]


def bits(item: Any) -> list[str]:
    """Hashes of the tensors of a payload, or of an update that was made of it."""
    prototypes = {}
    if item.prototypes:
        prototypes = {name: getattr(item.prototypes, name) for name in ("vectors", "labels", "weights")}
    return [tensors_sha256(tensors) for tensors in (item.weights, item.extra, prototypes)]


@dataclass
class Honest:
    """A run of unlike clients.

    Args:
        settings: its settings.
        done: what it left.
        sent: the bits that the devices sent.
        outcomes: what became of it, by round and exchange.
        kept: names of the tensors that devices kept by ``Upload.local``.
    """

    settings: RunSettings
    done: Run
    sent: dict[Place, list[str]] = field(default_factory=dict)
    outcomes: list[tuple[int, str, Outcome]] = field(default_factory=list)
    kept: set[str] = field(default_factory=set)


def honest_run(method: str, folder: Path) -> Honest:
    """Run two plain rounds; record what devices send and what the server makes of it."""
    settings = toy_settings(method, folder, data=Unlike(), rounds={"evaluate_every": ROUNDS}, train={"rounds": ROUNDS})
    found = Honest(settings, Run({}, folder))
    close, keep = Federation.close, Device._keep

    def closed(self: Federation, state: Any, replies: Sequence[Reply], *arguments: Any, **more: Any) -> Outcome:
        outcome = close(self, state, replies, *arguments, **more)
        found.outcomes.append((self.server.round, self.server.exchange, outcome))
        return outcome

    def kept(self: Device, *arguments: Any, **more: Any) -> bool:
        upload: Upload = arguments[-1]
        found.kept.update(upload.local)
        return keep(self, *arguments, **more)

    def answered(request: Request, payload: Payload) -> Payload:
        if request.train:
            found.sent[request.round, request.exchange, request.client] = bits(payload)
        return payload

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Federation, "close", closed)
        patch.setattr(Device, "_keep", kept)
        found.done = run(settings, TouchedEngine(settings, edit=answered))
    return found


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Honest]:
    """The run of a method, once for all tests that look at it."""
    runs: dict[str, Honest] = {}

    def of(method: str) -> Honest:
        if method not in runs:
            runs[method] = honest_run(method, tmp_path_factory.mktemp(method))
        return runs[method]

    return of


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.long
def test_every_update_counts_as_it_was_sent(method: str, honest: Callable[[str], Honest]) -> None:
    found = honest(method)
    counted: set[Place] = set()
    for number, exchange, outcome in found.outcomes:
        assert not outcome.refused
        assert not outcome.scaled
        for update in outcome.updates:
            place = (number, exchange, update.client.id)
            counted.add(place)
            assert bits(update) == found.sent[place], place
            assert update.samples == SAMPLES[update.client.domain]
    assert counted == set(found.sent)
    assert len(counted) == ROUNDS * len(found.settings.method.exchanges) * len(SAMPLES)
    answers = found.done.summary["answers"]
    assert [answers[name] for name in ("scaled", "refused", "failed", "lost")] == [0, 0, 0, 0]
    assert found.done.summary["rounds_skipped"] == 0
    # at 16x16 the last maps have one position, so that nine samples in batches of eight are one batch
    assert found.done.summary["joined_batches"] == ["two_classes-0"]


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_a_method_declares_what_its_clients_keep(method: str, honest: Callable[[str], Honest]) -> None:
    """What stays on a device by ``Upload.local`` is found in a run, not in a list."""
    found = honest(method)
    assert not found.kept or found.settings.method.keeps_step is not None, sorted(found.kept)[:3]


@pytest.mark.parametrize("method", METHODS)
def test_a_kept_step_needs_the_update_as_it_was_sent(method: str, tmp_path: Path) -> None:
    settings = toy_settings(method, tmp_path, rounds={"outliers": "clip"})
    if not settings.method.keeps_step:
        Federation(settings)
        return
    with pytest.raises(ConfigError, match=f"method={method}: .* set rounds.outliers=off, or"):
        Federation(settings)


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in METHODS]
)
def test_a_last_batch_of_one_sample_is_trained_on(method: str, tmp_path: Path) -> None:
    """At 32x32 every batch normalisation of the network has several values of a channel, also of one image."""
    data = Toy(image_size=32, domains=("bright", "dark"))  # 25 and 24 samples in batches of eight
    done = run(toy_settings(method, tmp_path, data=data, rounds={"evaluate_every": 2}))
    assert done.summary["answers"]["failed"] == 0
    joined = done.summary.get("joined_batches", [])
    assert joined == (["bright-0"] if method in NEED_PAIRS else [])
    if method == "fedavg":
        assert {row["steps"] for row in done.replies() if row["client"] == "bright-0"} >= {"4"}
