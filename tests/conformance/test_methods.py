"""What every method in conf/method must satisfy: the list of files is the list of tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from crashes import CrashError, crash_in
from support.hostile import ATTACKS, scaled
from support.own_states import KEEPING, own_state, versions
from support.runs import Run, TouchedEngine, run
from support.toy import Toy, composed, method_at_defaults, toy_settings

from common.choices import CONF
from common.config import search_ranges, to_config
from common.errors import ConfigError
from common.storage import GlobalState, tensors_sha256
from common.wire.messages import Request
from common.wire.payload import Payload, decode, encode
from goldfinch.record import RunRecord as Finished
from goldfinch.run_model import RunModel
from server.run.checkpoint import Checkpoints
from strategies.core.robust import GeometricMedian

FILES = sorted(path.stem for path in (CONF / "method").glob("*.yaml"))
METHODS = [name for name in FILES if not method_at_defaults(name).pools]
"""All methods with the protocol's clients; tests/methods/test_pooled.py has those with a single client for them."""
KINDS = {
    "one model for all": "fedavg",
    "a state of its own on every device": "scaffold",
    "prototypes, clustered": "fpl",
    "prototypes of several views": "fedapc",
    "several views of a batch": "fedgca",
    "layers that stay on the device": "fedrep",
    "nets on the server, two exchanges": "fedpall",
    "public images, two exchanges": "fccl_plus",
}
"""One method of each kind. Where arithmetic decides, a second instruction set is tried too (``make test-portable``)."""
BETWEEN_EXCHANGES = "rucr"  # keeps on the device, from one exchange of a round to the next, what the second needs
ROUNDS = 3
SPOILED = "dark-0"

Baseline = Callable[..., Run]
KIND = [pytest.mark.each_kind]
OTHER = [pytest.mark.long]  # make test has one method of each kind, make test-long all others
marks = {name: KIND if name in KINDS.values() else OTHER for name in METHODS}
on_any_processor = pytest.mark.parametrize("method", [pytest.param(name, marks=marks[name]) for name in METHODS])
every_method = pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[] if marks[name] is KIND else OTHER) for name in METHODS]
)


def three_rounds(method: str, folder: Path, **changes: Any) -> Any:
    return toy_settings(method, folder, train={"rounds": ROUNDS, **changes.pop("train", {})}, **changes)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    """Three undisturbed rounds of a method, run once for all tests that compare with them."""
    runs: dict[tuple[Any, ...], Run] = {}

    def of(method: str, *overrides: str, seed: int = 0) -> Run:
        key = (method, overrides, seed)
        if key not in runs:
            settings = three_rounds(method, tmp_path_factory.mktemp(method), overrides=overrides, seed=seed)
            runs[key] = run(settings, TouchedEngine(settings))
        return runs[key]

    return of


def last_state(done: Run) -> GlobalState:
    checkpoint = Checkpoints(done.folder / "checkpoint").load()
    assert checkpoint is not None
    return checkpoint.state


def assert_finite(done: Run) -> None:
    for name, tensor in last_state(done).tensors().items():
        assert bool(torch.isfinite(tensor).all()), name


def scores(done: Run) -> list[dict[str, str]]:
    return done.history()


@pytest.mark.each_kind
def test_the_instruction_set_is_the_one_asked_for() -> None:
    asked = os.environ.get("ATEN_CPU_CAPABILITY", "")
    assert asked.upper() in ("", torch.backends.cpu.get_cpu_capability())


# ---- the run itself --------------------------------------------------------------------------------------------------


@on_any_processor
def test_three_rounds_leave_what_a_run_leaves(method: str, baseline: Baseline) -> None:
    done = baseline(method)
    assert done.summary["rounds"] == ROUNDS
    assert done.summary["method"] == method
    assert done.sha256 == last_state(done).sha256()
    assert_finite(done)
    trained = [row for row in done.replies() if row["status"] in ("trained", "scaled")]
    exchanges = composed(f"method={method}", "engine=inline", "train.device=cpu").method.exchanges
    assert [row["exchange"] for row in trained if row["client"] == SPOILED] == list(exchanges) * ROUNDS
    assert not [row for row in done.replies() if row["status"] not in ("trained", "scaled", "scored")]


@every_method
def test_who_keeps_a_state_says_so(method: str, baseline: Baseline) -> None:
    replies = [item.reply for item in baseline(method).messages]
    assert any(reply is not None and reply.answer.kept for reply in replies) == (method in KEEPING)


@every_method
def test_no_client_is_said_to_have_lost_a_state_in_an_undisturbed_run(method: str, baseline: Baseline) -> None:
    """Also none of a method whose clients keep nothing."""
    assert not [entry for name, entry in baseline(method).events if name == "client state lost"]


@every_method
def test_each_domain_is_scored_once_a_round(method: str, baseline: Baseline) -> None:
    done = baseline(method)
    personal = composed(f"method={method}", "engine=inline", "train.device=cpu").method.personal
    by_round: dict[str, list[str]] = {}
    for row in scores(done):
        by_round.setdefault(row["round"], []).append(row["domain"])
        assert row["client_domain"] == row["domain"]
    assert str(ROUNDS) in by_round
    assert all(sorted(domains) == sorted(Toy().domains) for domains in by_round.values())
    assert done.summary["scored"] == ("own model" if personal else "global model")


@every_method
def test_what_leaves_after_training_is_what_was_scored(method: str, baseline: Baseline) -> None:
    """A method that overrides ``compute`` or ``predict`` in evaluation states the same by ``inference``."""
    reasons = {
        "fedsr": "tests draw noise for each image, an exported model draws once: tests/exports compares the averages",
        "rucr": "scored before the round's last exchange, which the model card says",
    }
    if method in reasons:
        pytest.skip(reasons[method])
    done = baseline(method)
    settings = three_rounds(method, done.folder)
    record = RunModel(Finished(done.folder))
    record.__dict__["settings"] = settings  # as objects: config.yaml does not name the classes of nested toys
    found = {}
    for spec in settings.protocol.clients(settings.data):
        test = settings.data.load(spec.domain).test
        with torch.no_grad():
            predicted = record.inference(spec.id)(settings.data.augmentation.test(test.images))[1].argmax(1)
        found[spec.domain] = 100 * float((predicted == test.labels).double().mean())
    assert found == done.summary["accuracy"]


@every_method
def test_the_first_round_needs_no_prototypes(method: str, baseline: Baseline) -> None:
    first = baseline(method).messages[0]
    assert first.request.round == 1
    assert first.message.prototypes is None or not len(first.message.prototypes)


@on_any_processor
def test_it_learns(method: str, tmp_path: Path) -> None:
    """Margin: of all methods under the instruction sets SSE4.1, AVX2 and AVX-512, the worst is 21 points above."""
    settings = toy_settings(method, tmp_path, train={"rounds": 4, "epochs": 3})
    averages = run(settings).averages()
    best, chance = max(averages[1:]), 100 / 4
    # who scores within a round has no score of the untrained model
    untrained = chance if settings.method.scores_new_state else averages[0]
    assert best >= untrained + 15, averages
    assert best >= chance + 20, averages


@every_method
def test_recorded_bytes_are_the_encoded_bytes(method: str, baseline: Baseline) -> None:
    done = baseline(method)
    rows = {(row["round"], row["exchange"], row["client"]): row for row in done.replies()}
    assert len(rows) == len(done.messages)
    for item in done.messages:
        assert item.reply is not None
        row = rows[str(item.request.round), item.request.exchange, item.request.client]
        answer = encode(item.reply.payload)
        assert int(row["bytes_up"]) == len(answer)
        parts = sum(int(row[f"bytes_up_{part}"]) for part in ("weights", "prototypes", "extra"))
        assert 0 < len(answer) - parts < 40_000
        assert 0 <= int(row["bytes_down"]) - len(encode(item.message)) < 1_000
    for way in ("up", "down"):
        assert done.summary["bytes"][way] == sum(int(row[f"bytes_{way}"]) for row in rows.values())


# ---- reductions ------------------------------------------------------------------------------------------------------


@on_any_processor
def test_the_knob_at_zero_is_fedavg(method: str, baseline: Baseline, tmp_path: Path) -> None:
    settings = composed(f"method={method}", "engine=inline", "train.device=cpu")
    if settings.method.fedavg_at is None:
        pytest.skip(f"{method} does not claim to contain FedAvg")
    # without the bound on lengths, which also counts what a method sends in addition to the model
    others = ("views=randconv",) if settings.method.multi_view else ()
    done = run(three_rounds(method, tmp_path / "method", overrides=others, hyper=settings.method.fedavg_at))
    ours, theirs = last_state(done).weights, last_state(baseline("fedavg", *others)).weights
    shared = {name: ours[name] for name in theirs}
    assert tensors_sha256(shared) == tensors_sha256(theirs)
    moved = last_state(baseline("fedavg", *others, seed=1)).weights
    assert tensors_sha256(moved) != tensors_sha256(theirs)


# ---- one result, however it comes about ------------------------------------------------------------------------------


@on_any_processor
def test_the_wire_the_number_of_workers_and_the_order_of_arrival_do_not_matter(
    method: str, baseline: Baseline, tmp_path: Path, untouched: None
) -> None:
    settings = three_rounds(method, tmp_path, engine={"wire": True, "workers": 2})
    other = run(settings, TouchedEngine(settings, arrival=lambda replies: list(reversed(replies))))
    assert other.sha256 == baseline(method).sha256
    assert other.summary["bytes"]["down"] == baseline(method).summary["bytes"]["down"]


@every_method
def test_the_state_survives_encoding(method: str, baseline: Baseline) -> None:
    state = last_state(baseline(method))
    again = GlobalState.from_tensors(state.round, state.tensors())
    assert again.sha256() == state.sha256()


@pytest.mark.parametrize(
    ("method", "participation"),
    [
        *(pytest.param(name, 1.0, marks=marks[name], id=f"{name}-all") for name in METHODS),
        *(
            pytest.param(name, 0.5, marks=[*KIND, pytest.mark.long], id=f"{name}-half")
            for name in (*KINDS.values(), BETWEEN_EXCHANGES)
        ),
    ],
)
def test_a_crashed_run_is_resumed_bit_for_bit(
    method: str, participation: float, baseline: Baseline, tmp_path: Path
) -> None:
    make = partial(three_rounds, method, rounds={"participation": participation})
    whole = baseline(method) if participation == 1 else run(make(tmp_path / "whole"))
    settings = make(tmp_path / "crashed")
    exchange = settings.method.exchanges[-1 if participation == 1 else 0]  # after the first, devices are ahead
    engine = TouchedEngine(settings, edit=crash_in((2, exchange)))
    with pytest.raises(CrashError):
        run(settings, engine)
    resumed = run(make(tmp_path / "crashed", resume=True))
    assert [name for name, _ in resumed.events if name in ("start", "resume")] == ["resume"]
    assert resumed.sha256 == whole.sha256
    assert scores(resumed) == scores(whole)
    timeless = [
        {
            key: value
            for key, value in row.items()
            if not key.startswith(("time", "seconds", "peak", "bytes_up", "bytes_down"))
        }
        for row in whole.replies()
    ]
    assert timeless == [{key: value for key, value in row.items() if key in timeless[0]} for row in resumed.replies()]


# ---- who is there ----------------------------------------------------------------------------------------------------


@every_method
@pytest.mark.parametrize("domain", ["bright", "noisy"], ids=["all classes", "a class is missing"])
def test_one_client_is_a_federation(method: str, domain: str, tmp_path: Path) -> None:
    done = run(toy_settings(method, tmp_path, train={"rounds": 2}, data=Toy(domains=(domain,))))
    assert_finite(done)
    assert done.summary["rounds"] == 2


@every_method
def test_a_client_drops_out_and_comes_back(method: str, tmp_path: Path) -> None:
    settings = three_rounds(method, tmp_path, train={"local_steps": 2})
    engine = TouchedEngine(
        settings, failing=lambda request: request.round == 2 and request.client == SPOILED and request.train
    )
    done = run(settings, engine)
    assert_finite(done)
    rows = [row for row in done.replies() if row["client"] == SPOILED]
    assert [row["reason"] for row in rows if row["status"] == "failed"] == ["BrokenError: the camera fell off"]
    assert {row["round"] for row in rows if row["status"] in ("trained", "scaled")} == {"1", "3"}
    assert sum(name == "round done" for name, _ in done.events) == ROUNDS
    failures = [entry for name, entry in done.events if name == "client failed"]
    assert len(failures) == 1
    assert failures[0]["client"] == SPOILED
    assert "raise BrokenError" in failures[0]["traceback"]


@every_method
def test_who_sits_out_keeps_its_state(method: str, tmp_path: Path) -> None:
    settings = three_rounds(method, tmp_path, train={"local_steps": 2}, rounds={"participation": 0.5})
    done = run(settings)
    per_round = len(settings.method.exchanges)
    rounds: dict[str, set[int]] = {}
    for row in done.replies():
        if row["status"] in ("trained", "scaled"):
            rounds.setdefault(row["client"], set()).add(int(row["round"]))
    assert any(len(numbers) < ROUNDS for numbers in rounds.values())
    for folder in (tmp_path / "clients").glob("*/*"):
        newest = versions(folder)[-1]
        assert newest.position // per_round == max(rounds[folder.name])
        assert own_state(folder)
    assert_finite(done)


@every_method
def test_hostile_answers_are_refused_and_named(method: str, tmp_path: Path) -> None:
    """Two attacks a round, each by its client; what the method's answers do not have cannot be spoiled."""
    attackers = (SPOILED, "bright-0")
    attacks = {(1 + place // 2, attackers[place % 2]): attack for place, attack in enumerate(ATTACKS)}
    number = 1 + len(ATTACKS) // 2
    settings = toy_settings(
        method, tmp_path, train={"rounds": number, "local_steps": 1},
        rounds={"quorum": 0.3, "evaluate_every": number},
    )  # fmt: skip
    spoiled: set[tuple[int, str]] = set()

    def edit(request: Request, payload: Payload) -> Payload:
        place = (request.round, request.client)
        if place not in attacks or not request.train or place in spoiled:
            return payload
        changed = attacks[place].spoil(payload)
        if changed is None:
            return payload
        spoiled.add(place)
        return changed

    done = run(settings, TouchedEngine(settings, edit=edit))
    assert_finite(done)
    assert sum(name == "round done" for name, _ in done.events) == number
    rows = done.replies()
    wrong = []
    for place, attack in attacks.items():
        mine = [row for row in rows if (int(row["round"]), row["client"]) == place]
        reasons = [row["reason"] for row in mine if row["status"] == "refused"]
        expected = [True] if place in spoiled else []
        if [attack.reason in reason for reason in reasons] != expected:
            wrong.append((attack.name, [(row["status"], row["reason"]) for row in mine]))
    assert not wrong
    accepted = {row["round"] for row in rows if row["client"] == "noisy-0" and row["status"] in ("trained", "scaled")}
    assert len(accepted) == number, "honest clients are still accepted"
    assert len(spoiled) >= 8


@on_any_processor
def test_replays_are_refused_and_giants_scaled_and_named(method: str, tmp_path: Path) -> None:
    """Round 2: the bytes of round 1 again. Round 3: a thousand times as long, which the gate lets in by itself."""
    chosen = composed(f"method={method}", "engine=inline", "train.device=cpu").method
    bounded = not chosen.keeps_step
    settings = three_rounds(method, tmp_path, rounds={"outliers": "clip" if bounded else "off"})
    kept: dict[str, bytes] = {}
    spoiled: set[int] = set()

    def edit(request: Request, payload: Payload) -> Payload:
        if request.client != SPOILED or not request.train:
            return payload
        if request.round == 1:
            kept.setdefault(request.exchange, encode(payload))
        if request.round == 2 and not spoiled:
            spoiled.add(2)
            return decode(kept[request.exchange])
        if request.round == 3 and 3 not in spoiled and (larger := scaled(payload, 1e3)) is not None:
            spoiled.add(3)
            return larger
        return payload

    done = run(settings, TouchedEngine(settings, edit=edit))
    assert_finite(done)
    mine = [row for row in done.replies() if row["client"] == SPOILED]
    refused = {row["round"]: row["reason"] for row in mine if row["status"] == "refused"}
    assert set(refused) == {"2"}
    assert "stale, replayed" in refused["2"]
    scaled_down = any(row["round"] == "3" and row["status"] == "scaled" for row in mine)
    assert scaled_down == (bounded and 3 in spoiled)
    skipped = [entry["by"] for name, entry in done.events if name == "round skipped"]
    if bounded and chosen.bound is None:
        assert skipped == ["rounds.outliers"], "two answers are too few for a bound"
    else:
        assert skipped == []
    assert sum(name == "round done" for name, _ in done.events) == ROUNDS - len(skipped)
    assert (3 in spoiled) == (method != "single_set"), "only who sends nothing has nothing to enlarge"


@on_any_processor
def test_the_geometric_median_bears_a_hostile_client(method: str, tmp_path: Path) -> None:
    """A client's values, a hundred thousand times too large, do not reach the state."""
    data = Toy(missing_class=False)  # what only two clients hold, no rule can defend
    base = three_rounds(method, tmp_path, data=data, train={"rounds": 1})
    rule = GeometricMedian()
    raw = {**base.raw, "aggregation": to_config(rule)}
    settings = replace(base, aggregation=rule, raw=raw)
    if not settings.method.averages or settings.method.keeps_step:
        with pytest.raises(ConfigError, match=f"method={method}"):
            run(settings)
        return

    def edit(request: Request, payload: Payload) -> Payload:
        return (scaled(payload, 1e5) or payload) if request.client == SPOILED and request.train else payload

    done = run(settings, TouchedEngine(settings, edit=edit))
    assert not [row["reason"] for row in done.replies() if row["status"] == "refused"]
    for name, tensor in last_state(done).tensors().items():
        assert float(tensor.double().abs().max() if tensor.numel() else 0.0) < 1e3 or name == "extra/images", name


SEARCHED = [(name, field) for name in METHODS for field in search_ranges(type(method_at_defaults(name)))]


@pytest.mark.long
@pytest.mark.parametrize(("method", "field"), SEARCHED)
def test_a_field_that_is_searched_has_an_effect(method: str, field: str, tmp_path: Path) -> None:
    """Each has trials of its own in a comparison, so one that does nothing would be budget in the method's favour."""
    searched = search_ranges(type(method_at_defaults(method)))[field]
    states: set[str] = set()
    for value in (searched.low, searched.high):
        states.add(run(three_rounds(method, tmp_path / str(value), hyper={field: value})).sha256)
    assert len(states) == 2
