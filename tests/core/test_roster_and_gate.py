"""Who is admitted, who is asked, and what is accepted: each refusal has its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exchanges import ANSWER, COUNTS, registration, request_to
from support.toy import CLASSES, toy_settings

from client.transfer import copied_to_cpu
from common.errors import ConfigError, PayloadError
from common.prototypes import PrototypeSet
from common.settings import RunSettings
from common.wire.messages import Answer, Registration, read_header
from common.wire.payload import Payload, cast_down, cast_up, decode, encode
from server.engines.inline import InlineEngine
from strategies.core.codec import read_registrations, write_registrations
from strategies.core.exchange import Client, UploadSpec
from strategies.core.federation import Federation
from strategies.core.gate import Gate
from strategies.core.method import build_model, server_context
from strategies.core.participants import Registry


@pytest.fixture
def settings(tmp_path: Path) -> RunSettings:
    return toy_settings("fpl", tmp_path)


@pytest.fixture
def registry(settings: RunSettings) -> Registry:
    made = Registry(settings)
    for client in COUNTS:
        assert made.admit(registration(settings, client)) is None
    return made


# ---- registration ----------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "an unknown client": ("moon-0", {}, "no client moon-0"),
    "a second of its domain": ("dark-1", {"domain": "dark"}, "no client dark-1"),
    "other code": ("dark-0", {"code": "0" * 16}, "install the same Goldfinch"),
    "other settings": ("dark-0", {"identity": "0" * 16}, "other overrides"),
    "another domain": ("dark-0", {"domain": "bright"}, "holds domain bright, not dark"),
    "labels of other classes": ("dark-0", {"classes": "0" * 64}, "number the classes unlike the server's"),
    "too few classes": ("dark-0", {"class_counts": [24]}, f"{CLASSES} exist"),
    "no classes": ("dark-0", {"class_counts": [], "samples": 0}, f"{CLASSES} exist"),
    "a negative class": ("dark-0", {"class_counts": [25, -1, 0, 0]}, f"{CLASSES} exist"),
    "a sum that is wrong": ("dark-0", {"samples": 25}, "25 samples in classes"),
    "one sample": ("dark-0", {"samples": 1, "class_counts": [1, 0, 0, 0]}, "1 samples"),
    "too many samples": ("dark-0", {"samples": 10**7 + 1, "class_counts": [10**7, 1, 0, 0]}, "10000000 is the limit"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_registration_is_refused(case: str, settings: RunSettings) -> None:
    client, changes, reason = REFUSED[case]
    fresh = Registry(settings)
    assert reason in str(fresh.admit(registration(settings, client, **changes)))
    assert not fresh.registrations


def test_a_client_comes_again_only_with_the_same_data(registry: Registry, settings: RunSettings) -> None:
    assert registry.admit(registration(settings, "dark-0", device="a new one")) is None
    assert registry.registrations["dark-0"].device == "a new one"
    assert "other data" in str(registry.admit(registration(settings, "dark-0", split="1" * 64)))
    more = registration(settings, "dark-0", samples=25, class_counts=[7, 6, 6, 6])
    assert "other data" in str(registry.admit(more)), "its weight is fixed when it first registers"
    assert registry.registrations["dark-0"].split == "0" * 64


def test_a_client_does_not_come_again_with_other_pixels(registry: Registry, settings: RunSettings) -> None:
    """As a resumed run refuses them, which takes its last registration for what the rounds before were trained on."""
    assert registry.admit(registration(settings, "dark-0", content="a" * 64)) is None
    refused = str(registry.admit(registration(settings, "dark-0", content="b" * 64)))
    assert "with other data (content): restore them, or end the run and go on with resume=anyway" in refused
    assert registry.registrations["dark-0"].content == "a" * 64


def test_a_client_does_not_come_again_with_other_validation_samples(settings: RunSettings, tmp_path: Path) -> None:
    chosen = toy_settings("fedavg", tmp_path, overrides=("protocol.validation=0.2",))
    first = InlineEngine(chosen).devices["dark-0"].register()
    registry = Registry(chosen)
    assert registry.admit(first) is None
    assert "with other data (validation)" in str(registry.admit(replace(first, validation=first.validation - 1)))


def test_clients_come_by_id_with_lasting_positions(settings: RunSettings) -> None:
    part = Registry(settings)
    for client in ("noisy-0", "bright-0"):
        part.admit(registration(settings, client))
    assert part.missing == ["dark-0"]
    found = [(client.id, client.index, client.client_count, client.samples) for client in part.clients()]
    assert found == [("bright-0", 0, 3, 25), ("noisy-0", 2, 3, 18)]
    assert (part.domain("dark-0"), part.domain("moon-0")) == ("dark", "")


# ---- sampling and scoring --------------------------------------------------------------------------------------------


def test_sampling_is_keyed_by_seed_and_round_not_by_arrival(settings: RunSettings) -> None:
    half = toy_settings("fpl", settings.output_folder, rounds={"participation": 0.67})
    orders = []
    for order in (list(COUNTS), list(reversed(COUNTS))):
        made = Registry(half)
        for client in order:
            made.admit(registration(half, client))
        orders.append([[client.id for client in made.sample(number)] for number in range(1, 30)])
    assert orders[0] == orders[1]
    assert all(len(chosen) == 2 and chosen == sorted(chosen) for chosen in orders[0])
    assert {client for chosen in orders[0] for client in chosen} == set(COUNTS)
    assert len({tuple(chosen) for chosen in orders[0]}) == 3
    few = replace(half, rounds=replace(half.rounds, participation=0.01))
    made.settings = few
    assert len(made.sample(1)) == 1


def test_each_domain_is_scored_once_by_its_holder(registry: Registry) -> None:
    clients = registry.clients()
    assert registry.scorers(clients, personal=False) == {
        "bright-0": ["bright"], "dark-0": ["dark"], "noisy-0": ["noisy"],
    }  # fmt: skip
    one = registry.scorers(clients[:1], personal=False)
    assert one == {"bright-0": ["bright", "dark", "noisy"]}
    two = registry.scorers(clients[:2], personal=False)
    assert sorted(domain for duties in two.values() for domain in duties) == ["bright", "dark", "noisy"]


def test_who_can_score_is_asked_even_if_it_does_not_train(settings: RunSettings) -> None:
    made = Registry(settings)
    for client in COUNTS:
        made.admit(registration(settings, client, scores=[client.partition("-")[0]]))
    found = made.scorers(made.clients()[:1], personal=False)
    assert found == {"bright-0": ["bright"], "dark-0": ["dark"], "noisy-0": ["noisy"]}


def test_a_client_that_did_not_reply_scores_only_where_no_other_can(settings: RunSettings) -> None:
    made = Registry(settings)
    for client in COUNTS:
        made.admit(registration(settings, client, scores=["dark", client.partition("-")[0]]))
    made.note_replies(["bright-0"], ["dark-0", "noisy-0"])
    found = made.scorers(made.clients(), personal=False)
    assert found == {"bright-0": ["bright", "dark"], "noisy-0": ["noisy"]}
    only_lost = made.scorers([client for client in made.clients() if client.id == "dark-0"], personal=False)
    assert only_lost["bright-0"] == ["bright", "dark"]
    made.note_replies(["dark-0"], [])
    assert made.scorers(made.clients(), personal=False)["dark-0"] == ["dark"]


def test_a_domain_that_no_client_can_score_is_left_out(settings: RunSettings) -> None:
    made = Registry(settings)
    made.admit(registration(settings, "dark-0", scores=["dark"]))
    assert made.scorers(made.clients(), personal=False) == {"dark-0": ["dark"]}


def test_personal_models_are_scored_by_their_owners(registry: Registry) -> None:
    found = registry.scorers(registry.clients()[1:], personal=True)
    assert found == {"dark-0": ["dark"], "noisy-0": ["noisy"]}
    registry.test_domains = ["noisy"]
    assert registry.scorers(registry.clients(), personal=True) == {"noisy-0": ["noisy"]}, "no other is scored"


def test_a_personal_client_that_scores_nothing_is_asked_for_no_score(settings: RunSettings) -> None:
    made = Registry(settings)
    for client in COUNTS:
        scored = [] if client == "dark-0" else [client.partition("-")[0]]
        made.admit(registration(settings, client, scores=scored))
    assert made.scorers(made.clients(), personal=True) == {"bright-0": ["bright"], "noisy-0": ["noisy"]}


def test_scoring_is_shared_among_holders_of_many_domains(tmp_path: Path) -> None:
    """Ten clients of one domain, two other domains to score: no client scores both while others idle."""
    settings = toy_settings(
        "fedavg", tmp_path, overrides=("protocol=dirichlet", "protocol.least=2", "data.domains=[printed,signs,sketch]"),
    )  # fmt: skip
    made = Registry(settings)
    for client in made.expected:
        made.admit(registration(settings, client, scores=["dark", "noisy"]))
    found = made.scorers(made.clients(), personal=False)
    assert sorted(map(len, found.values())) == [1, 1]


# ---- the gate --------------------------------------------------------------------------------------------------------


class Asked:
    """A federation that has asked dark-0 to train and score, and the answer it should give."""

    def __init__(self, settings: RunSettings) -> None:
        self.federation = Federation(settings)
        for client in COUNTS:
            self.federation.registry.admit(registration(settings, client))
        self.ask()

    def ask(self, *, score: bool = True, train: bool = True) -> None:
        self.federation.begin(1, "train", score=score)
        clients = self.federation.registry.clients()
        self.requests = self.federation.requests("run", clients, train=train)

    def answer(self, client: str = "dark-0", **changes: Any) -> Payload:
        request = self.requests[client]
        echo = {name: getattr(request, name) for name in ("run", "method", "round", "exchange", "attempt")}
        data = {"client": client, "samples": sum(COUNTS[client]), "class_counts": COUNTS[client]}
        scores = [{"domain": name, "count": 16, "correct": 4, "loss": 1.5} for name in request.score]
        facts = {**ANSWER, **echo, **data, "trained": request.train, "scores": scores, **changes}
        held = [label for label, count in enumerate(COUNTS[client]) if count]
        counts = torch.tensor([float(COUNTS[client][label]) for label in held])
        prototypes = PrototypeSet(torch.ones(len(held), 128), torch.tensor(held), counts)
        return Payload(dict(self.federation.server.shared), prototypes, header=facts)

    def admit(self, payload: Payload, client: str = "dark-0") -> Any:
        return self.federation.admit(client, read_header(Answer, payload.header), payload)


@pytest.fixture
def asked(settings: RunSettings) -> Asked:
    return Asked(settings)


def test_a_good_reply_is_accepted(asked: Asked) -> None:
    update = asked.admit(asked.answer())
    assert update.client.id == "dark-0"
    assert update.samples == 24
    assert list(update.weights) == list(asked.federation.server.shared)
    assert update.prototypes.classes == [0, 1, 2, 3]


@pytest.mark.parametrize("transport", ["float32", "float16"])
def test_a_dead_channel_and_a_long_update_are_accepted_as_they_were_trained(transport: str, asked: Asked) -> None:
    """Honest training can come to a variance that decayed to 0, or to a model that diverges."""
    good = asked.answer()
    variance = next(name for name in good.weights if name.endswith("running_var"))
    weight = next(name for name in good.weights if name in asked.federation.server.parameters)
    dead = torch.full_like(good.weights[variance], 1e-12)
    dead[0] = 0.0
    long = torch.full_like(good.weights[weight], 1e4 if transport == "float16" else 1e15)
    trained = replace(good, weights={**good.weights, **copied_to_cpu({variance: dead, weight: long})})
    sent = cast_up(cast_down(trained, transport), transport)
    update = asked.admit(sent)
    assert torch.equal(update.weights[variance], sent.weights[variance])
    assert torch.equal(update.weights[weight], sent.weights[weight])
    if transport == "float32":
        assert torch.equal(update.weights[variance], dead)


Change = Callable[[Payload], Payload]


def header(**changes: Any) -> Change:
    return lambda payload: replace(payload, header={**payload.header, **changes})


def scored(**changes: Any) -> Change:
    return header(scores=[{"domain": "dark", "count": 16, "correct": 4, "loss": 1.5, **changes}])


def of_class_one(vectors: torch.Tensor, weights: torch.Tensor) -> Change:
    rows = PrototypeSet(vectors, torch.ones(len(vectors), dtype=torch.int64), weights)
    return lambda payload: replace(payload, prototypes=rows)


FURTHER: dict[str, tuple[Change, str]] = {
    "another method": (header(method="fedavg"), "stale"),
    "another exchange": (header(exchange="again"), "stale"),
    "another attempt": (header(attempt=1), "stale"),
    "nothing trained": (header(trained=False), "no update"),
    "twice the scores": (header(scores=[{"domain": "dark", "count": 16, "correct": 4, "loss": 1.5}] * 2), "asked for"),
    "more correct than there are": (scored(correct=17), "17 correct of 16"),
    "negative correct": (scored(correct=-1), "-1 correct"),
    "none counted": (scored(count=0, correct=0), "0 correct of 0"),
    "correct is a fraction": (scored(correct=0.5), "correct=0.5: must be a valid integer"),
    "a score of more": (scored(admin=1), "scores[0].admin: no such key"),
    "loss is endless": (scored(loss=10**400), "loss=1000"),
    "loss is NaN": (scored(loss=float("nan")), "loss=nan"),
    "loss is negative": (scored(loss=-1.0), "loss -1.0"),
    "loss is of no net": (scored(loss=2e30), "loss 2e+30, not 0 to 1e+30: training diverged"),
    "more images than there can be": (scored(count=10**7 + 1), "at most 10000000 are accepted"),
    "losses are NaN": (header(losses={"ce": float("nan")}), "losses"),
    "steps are endless": (header(steps=10**30), "steps"),
    "releases without end": (header(releases=2**62), "releases in 1 rounds"),
    "releases below none": (header(releases=-1), "-1 releases"),
    "seconds below none": (header(seconds={"train": -1.0}), "train is -1"),
    "steps below none": (header(steps=-3), "steps is -3"),
    "seconds without measure": (header(seconds={"train": 1e299}), "train is 1e+299, not 0 to"),
    "loss in training of no net": (header(losses={"ce": -2e30}), "the loss ce is -2e+30; the bound is 1e+30: training"),
    "memory below none": (header(peak_bytes=-1), "peak_bytes is -1"),
    "device is a number": (header(device=3), "device"),
    "losses without end": (header(losses={str(i): 0.0 for i in range(51)}), "losses: more than 50 entries"),
    "seconds without end": (header(seconds={str(i): 0.0 for i in range(51)}), "seconds: more than 50 entries"),
    "fields without end": (header(**{f"f{i}": 0 for i in range(51)}), "more than 50 entries"),
    "a field too many": (header(admin=True), "admin: no such key"),
    "two rows of a class": (of_class_one(torch.ones(2, 128), torch.ones(2)), "2 prototypes of class 1; at most 1"),
    "more mass than samples": (of_class_one(torch.ones(1, 128), torch.tensor([6.5])), "weigh 6.5; 6 samples exist"),
    "less mass than a sample's": (
        of_class_one(torch.ones(1, 128), torch.tensor([1e-45])),
        "positive number of samples",
    ),
    "far too large": (of_class_one(torch.full((1, 128), 1e19), torch.ones(1)), "norm"),
}


@pytest.mark.parametrize("case", FURTHER)
def test_each_lie_is_refused_with_its_reason(case: str, asked: Asked) -> None:
    change, reason = FURTHER[case]
    with pytest.raises(PayloadError) as caught:
        asked.admit(change(asked.answer()))
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_no_value_that_is_not_finite_passes(value: float, dtype: torch.dtype, settings: RunSettings) -> None:
    gate = Gate(UploadSpec(), Federation(settings).server)
    gate._check_values({"w": torch.ones(3, dtype=dtype)})
    with pytest.raises(PayloadError, match="w has values that are not finite"):
        gate._check_values({"v": torch.ones(2, dtype=dtype), "w": torch.tensor([1.0, value]).to(dtype)})


def test_a_further_tensor_of_a_weight_s_name_does_not_hide_the_weight(settings: RunSettings) -> None:
    client = Client("dark-0", "dark", 24, (6, 6, 6, 6), 0, 3)
    server = replace(Federation(settings).server, clients=(client,))
    gate = Gate(UploadSpec(extra={"head.bias": (torch.float32, (4,))}), server)
    request = request_to(settings, client="dark-0", score=[])
    facts = {**ANSWER, **{name: getattr(request, name) for name in ("run", "method", "round", "exchange", "attempt")}}
    good = Payload(dict(server.shared), extra={"head.bias": torch.zeros(4)}, header=facts)
    assert gate.admit(request, read_header(Answer, facts), good, client) is not None
    huge = replace(good, weights={**good.weights, "head.bias": torch.full((4,), 1e30)})
    with pytest.raises(PayloadError, match=r"head.bias has norm .* lower train\.learning_rate or"):
        gate.admit(request, read_header(Answer, facts), huge, client)


def test_integers_that_are_negative_on_the_server_too_are_no_counters(settings: RunSettings) -> None:
    server = Federation(settings).server
    integers = {"table": torch.tensor([-1, 0, 1]), "count": torch.tensor([3])}
    client = Client("dark-0", "dark", 24, (6, 6, 6, 6), 0, 3)
    server = replace(server, shared={**server.shared, **integers}, clients=(client,), round=1)
    gate = Gate(UploadSpec(), server)
    gate._check_model({"table": torch.tensor([-1, 0, 1])})
    with pytest.raises(PayloadError, match="count has negative values; the server's has none"):
        gate._check_model({"count": torch.tensor([-3])})


@pytest.mark.parametrize("value", ["int8", "complex", "sparse", "mapping"])
def test_a_network_with_what_messages_cannot_contain_is_refused_before_anything_is_trained(
    value: str, settings: RunSettings
) -> None:
    model = build_model(settings, 3)
    if value == "mapping":
        model.get_submodule("head").register_buffer("kept", torch.zeros(1))
        model.register_state_dict_post_hook(_with_a_mapping)
    else:
        made = {"int8": torch.zeros(1, dtype=torch.int8), "complex": torch.zeros(1, dtype=torch.complex64)}
        model.register_buffer("kept", made.get(value, torch.eye(3).to_sparse()))
    with pytest.raises(ConfigError, match=r"the network: .* is a .*; make it a dense tensor of .*, or a buffer"):
        server_context(settings, model, 3)
    fine = build_model(settings, 3)
    fine.register_buffer("mask", torch.ones(3, dtype=torch.bool))
    assert "mask" in server_context(settings, fine, 3).shared


def _with_a_mapping(module: object, state: dict[str, Any], prefix: str, metadata: object) -> None:
    state[f"{prefix}_extra_state"] = {"a": 1}


def test_a_first_score_over_more_test_images_than_the_run_allows_is_refused(tmp_path: Path) -> None:
    """There is no earlier score that it could contradict."""
    limited = Asked(toy_settings("fpl", tmp_path, rounds={"test_samples": 8}))
    few = scored(count=8, correct=2)(limited.answer())
    with pytest.raises(PayloadError, match="over 16 test images; at most 8 are accepted"):
        limited.admit(limited.answer())
    assert limited.admit(few) is not None


def test_an_update_without_the_score_that_was_asked_for_is_accepted(asked: Asked) -> None:
    """The score's absence is reported by the rounds; a device without its test images may still train."""
    made = asked.answer()
    update = asked.admit(replace(made, header={**made.header, "scores": []}))
    assert update.client.id == made.header["client"]


def test_a_class_that_a_client_does_not_hold_is_refused(asked: Asked) -> None:
    made = asked.answer("noisy-0")
    invented = PrototypeSet(torch.ones(1, 128), torch.tensor([3]), torch.ones(1))
    with pytest.raises(PayloadError, match="1 prototypes of class 3; at most 0"):
        asked.admit(replace(made, prototypes=invented), "noisy-0")


def test_no_rows_are_a_legal_set(asked: Asked) -> None:
    update = asked.admit(replace(asked.answer(), prototypes=PrototypeSet.empty(128)))
    assert len(update.prototypes) == 0


def test_an_answer_counts_once_and_only_if_asked(asked: Asked) -> None:
    asked.admit(asked.answer())
    with pytest.raises(PayloadError, match="answered already"):
        asked.admit(asked.answer())
    with pytest.raises(PayloadError, match="was not asked"):
        asked.admit(asked.answer(), "moon-0")
    old = asked.answer("bright-0")
    asked.federation.begin(2, "train")
    with pytest.raises(PayloadError, match="was not asked"):
        asked.admit(old, "bright-0")


def test_a_replayed_upload_is_refused(asked: Asked) -> None:
    """The same bytes in another round, another exchange or another run, and as somebody else's."""
    blob = encode(asked.answer())
    asked.admit(decode(blob))
    asked.federation.begin(2, "train")
    asked.requests = asked.federation.requests("run", asked.federation.registry.clients())
    with pytest.raises(PayloadError, match="stale, replayed or of another run"):
        asked.admit(decode(blob))
    with pytest.raises(PayloadError, match="stale, replayed or of another run"):
        asked.admit(decode(blob), "bright-0")
    assert asked.admit(asked.answer()) is not None
    asked.federation.begin(1, "train")
    asked.federation.requests("another run", asked.federation.registry.clients())
    with pytest.raises(PayloadError, match="stale, replayed or of another run"):
        asked.admit(decode(blob))


def test_a_refused_answer_does_not_use_up_the_turn(asked: Asked) -> None:
    with pytest.raises(PayloadError):
        asked.admit(replace(asked.answer(), weights={}))
    assert asked.admit(asked.answer()) is not None


def test_a_score_alone_brings_no_update(asked: Asked) -> None:
    asked.ask(train=False)
    only = Payload(header={**asked.answer().header, "trained": False})
    assert asked.admit(only) is None
    asked.ask(train=False)
    with pytest.raises(PayloadError, match="not asked for"):
        asked.admit(Payload(header={**asked.answer().header, "trained": True}))


def test_what_was_not_asked_for_is_refused(tmp_path: Path) -> None:
    plain = Asked(toy_settings("fedavg", tmp_path))
    with pytest.raises(PayloadError, match="prototype set that was not asked for"):
        plain.admit(plain.answer())
    assert plain.admit(replace(plain.answer(), prototypes=None)) is not None


# ---- headers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"class_counts": [6, True]},
        {"class_counts": [2**63]},
        {"class_counts": {}},
        {"samples": 24.0},
        {"scores": [1]},
        {"versions": {"python": 3}},
        {"split": None},
    ],
    ids=str,
)
def test_a_header_of_other_types_is_refused(changes: dict[str, Any], settings: RunSettings) -> None:
    fields = {**asdict(registration(settings, "dark-0")), **changes}
    with pytest.raises(PayloadError, match=next(iter(changes))):
        read_header(Registration, fields)


@pytest.mark.parametrize(
    ("name", "longest"),
    [("device", "x" * 300), ("class_counts", [0] * 10_000), ("scores", ["x"] * 1000), ("scores", ["x" * 300])],
    ids=["text", "classes", "domains", "text of a list"],
)
def test_a_header_s_texts_and_lists_end_somewhere(name: str, longest: Any, settings: RunSettings) -> None:
    fields = asdict(registration(settings, "dark-0"))
    assert getattr(read_header(Registration, {**fields, name: longest}), name) == longest
    longer = ["x" * 301] if longest == ["x" * 300] else longest + longest[:1]
    with pytest.raises(PayloadError, match=name):
        read_header(Registration, {**fields, name: longer})


def test_a_header_comes_back_and_one_with_other_fields_is_refused(settings: RunSettings) -> None:
    made = registration(settings, "dark-0")
    fields = asdict(made)
    assert read_header(Registration, fields) == made
    del fields["split"]
    with pytest.raises(PayloadError, match="split: a value is missing"):
        read_header(Registration, fields)


def test_registrations_come_back_and_a_client_that_a_node_names_twice_is_refused(settings: RunSettings) -> None:
    one, other = registration(settings, "dark-0"), registration(settings, "bright-0")
    assert read_registrations(write_registrations([one, other])) == [one, other]
    with pytest.raises(PayloadError, match="registers client dark-0 twice"):
        read_registrations(write_registrations([one, other, one]))
