"""An audit of everything that leaves a private device: two neighbouring data sets, and all that tells them apart.

A run is recorded, and its requests and messages are replayed to two devices that hold neighbouring data. With the same
noise on both, answers may differ in what is covered alone, and there by no more than the claimed sensitivity. With
noise that cannot be predicted, a distinguisher that knows both data sets stays below the claimed epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import beta
from support.runs import Recorded, TouchedEngine, run
from support.toy import CLASSES, ChangedToy, Toy, method_at_defaults, toy_settings
from test_privacy_claims import PERSONAL

import strategies.core.protection
from client.device import Device
from client.ledger import Ledger
from client.privacy import DevicePrivacy
from client.reasons import REASONS
from client.resident.messages import TrainerReply as NodeReply
from common.accounting import epsilon
from common.choices import choices_of
from common.client_state import ClientStore
from common.config import checked
from common.contract import Contract
from common.data.batches import Split
from common.data.domain import Domain
from common.data.protocols import ClientSpec
from common.data.protocols import test_hash as hash_of_test
from common.data.splits import content_hash
from common.errors import ConfigError
from common.privacy import GaussianPrivacy
from common.settings import RunSettings
from common.wire.messages import Answer, Registration
from common.wire.payload import Payload
from strategies.core.federation import Federation

ASKED, PUBLIC, WITHHELD, RECEIVED, SECRET = "asked", "public", "withheld", "received", "secret"
CARRIES, REASON = "carries", "reason"
"""What a field is: an echo of the request; a function of sample counts, split, names of classes or machine; empty under
privacy; a function of what was received and of test images; a keyed hash with a key that stays on the device; what is
classified itself (an answer or registrations); one of a fixed list of reasons."""

ANSWER = {
    **dict.fromkeys(("run", "method", "round", "exchange", "attempt", "client", "trained"), ASKED),
    **dict.fromkeys(("samples", "class_counts", "steps", "device", "releases", "randomness", "kept", "lost"), PUBLIC),
    "scores": RECEIVED,
    **dict.fromkeys(("losses", "validation", "seconds", "peak_bytes"), WITHHELD),
}
REGISTRATION = {
    **dict.fromkeys(("client", "domain", "samples", "class_counts", "scores", "split", "identity", "code"), PUBLIC),
    **dict.fromkeys(("device", "versions", "validation", "files", "start_seconds", "clock_ahead", "classes"), PUBLIC),
    "content": SECRET,
}
PAYLOAD = {"header", "weights", "prototypes", "extra"}
REPLY = {"ok": PUBLIC, "text": CARRIES, "traceback": WITHHELD, "samples": PUBLIC, "tensors": CARRIES}
"""A node's reply that did what was asked."""
FAILURE = {"ok": PUBLIC, "text": REASON, "traceback": WITHHELD, "samples": WITHHELD, "tensors": WITHHELD}
"""A node's reply that did not."""

REFUSED = {
    **dict.fromkeys(("fedpall", "rucr", "adcol", "fccl_plus"), "also sends"),
    **dict.fromkeys(("feddg_ga", "fedheal", "fpl_heal"), "also sends"),
    **dict.fromkeys(("fedplvm", "fedplcc", "fedapc"), "prototypes of its own"),
    **dict.fromkeys(("scaffold", "feddyn", "fedgca", "combined"), "keeps a correction"),
    **dict.fromkeys(("fdse", "fedbn", "fedrep", "single_set"), "exact functions of its training images"),
    "pooled": "all clients' images in one place",
}
SECURITY = Path(__file__).resolve().parents[2] / "SECURITY.md"
METHODS = sorted(choices_of("method"))
ACCEPTED = [method for method in METHODS if method not in REFUSED]
CLIP, UPDATE_CLIP = 0.5, 0.25
COVERED = ("privacy=gaussian", f"privacy.clip={CLIP}", f"privacy.update_clip={UPDATE_CLIP}")
RUN = {"rounds": 2, "epochs": 1, "batch_size": 8}


def neighbour(unit: str) -> ChangedToy:
    return ChangedToy(changed=(4,) if unit == "sample" else tuple(range(25)))


def private(method: str, output: Path, *overrides: str, **more: Any) -> RunSettings:
    return toy_settings(method, output, overrides=(*COVERED, *overrides), train=RUN, **more)


def recorded(settings: RunSettings) -> list[Recorded]:
    """What the client ``bright-0`` was asked and sent over a whole run, the last scoring included."""
    engine = TouchedEngine(settings)
    run(settings, engine)
    return [item for item in engine.messages if item.request.client == "bright-0"]


def device_of(settings: RunSettings, data: Toy, folder: Path) -> Device:
    """A device with its own state and other data; the settings' identity stays, as a neighbour's would."""
    scores = tuple(settings.protocol.test_domains(settings.data))
    settings = replace(settings, data=data)
    return Device(
        settings,
        ClientSpec("bright", 0),
        lambda name: ClientStore(folder / name),
        scores=scores,
        contract=Contract(simulated=True),
        ledger=Ledger(folder / "ledger"),
    )


def replay(device: Device, messages: Sequence[Recorded]) -> list[Payload]:
    return [device.answer(item.request, item.message) for item in messages]


def both(settings: RunSettings, messages: Sequence[Recorded], ours: Toy, theirs: Toy) -> list[tuple[Payload, Payload]]:
    """The answers of two devices with neighbouring data to the same messages, in pairs."""
    folder = settings.output_folder.parent
    before = replay(device_of(settings, ours, folder / "a"), messages)
    after = replay(device_of(settings, theirs, folder / "b"), messages)
    return list(zip(before, after, strict=True))


# ---- everything is classified ----------------------------------------------------------------------------------------


def test_every_field_that_leaves_is_classified() -> None:
    """A new field must be told apart here before it may leave a private device."""
    classified = ((Answer, ANSWER), (Registration, REGISTRATION), (Payload, PAYLOAD), (NodeReply, REPLY))
    for kind, known in (*classified, (NodeReply, FAILURE)):
        assert {field.name for field in fields(kind)} <= set(known)


def test_a_failure_is_one_of_few_reasons_and_nothing_else() -> None:
    """Neighbours that fail in the same way look the same; the reasons of all errors are in test_privacy_attacks.py."""
    sent = NodeReply.of(KeyError("image patient_0417_positive.png cannot be decoded"), private=True)
    for name, classified in FAILURE.items():
        if classified == WITHHELD:
            assert not getattr(sent, name)
        elif classified == REASON:
            assert getattr(sent, name) in REASONS.values()
    assert not sent.ok


def test_security_md_lists_the_methods_that_are_accepted() -> None:
    (line,) = [line for line in SECURITY.read_text().splitlines() if line.startswith("| methods |")]
    listed = line.partition(": ")[2].partition(";")[0]
    assert sorted(plain(name) for name in listed.split(",")) == sorted(plain(method) for method in ACCEPTED)


def plain(name: str) -> str:
    """A method's name without case and signs: Per-FedAvg is per_fedavg."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


# ---- the same noise --------------------------------------------------------------------------------------------------


@dataclass
class Difference:
    """What differs between the answers of neighbours to one request."""

    bare: list[str]
    """What differs and must not."""
    rows: dict[int, float]
    """How far each class's prototype moved."""
    weights: float
    """How far all floating-point weights together moved."""


def difference(before: Payload, after: Payload) -> Difference:
    """Compare two answers, part by part."""
    bare = [name for name in ANSWER if name in before.header and not _equal(name, before.header, after.header)]
    if set(before.weights) != set(after.weights) or set(before.extra) != set(after.extra):
        bare.append("names of tensors")
    squares = 0.0
    for name, tensor in before.weights.items():
        if tensor.is_floating_point():
            squares += float((tensor.double() - after.weights[name].double()).square().sum())
        elif not torch.equal(tensor, after.weights[name]):
            bare.append(name)
    bare += [name for name, tensor in before.extra.items() if not torch.equal(tensor, after.extra[name])]
    rows: dict[int, float] = {}
    ours, theirs = before.prototypes, after.prototypes
    if ours is not None and theirs is not None:
        if not torch.equal(ours.labels, theirs.labels) or not torch.equal(ours.weights, theirs.weights):
            bare.append("prototypes' labels or weights")
        moved = (ours.vectors.double() - theirs.vectors.double()).norm(dim=1)
        rows = dict(zip(ours.labels.tolist(), moved.tolist(), strict=True))
    elif ours is not theirs:
        bare.append("prototypes")
    return Difference(bare, rows, math.sqrt(squares))


def _equal(name: str, before: dict[str, Any], after: dict[str, Any]) -> bool:
    kind = ANSWER[name]
    if kind == WITHHELD:
        return not before[name] and not after[name]
    return bool(before[name] == after[name])


AUDITED = [(method, "client") for method in ACCEPTED]
AUDITED += [(method, "sample") for method in ACCEPTED if method_at_defaults(method).prototypes_from != "none"]
AUDITED += [("fedavg", "sample")]
"""Without prototypes the bound is the same for both units, and clients differ in more: fedavg stands for the others."""


@pytest.mark.parametrize(("method", "unit"), AUDITED)
@pytest.mark.long
def test_neighbours_differ_in_what_is_covered_alone(method: str, unit: str, tmp_path: Path) -> None:
    settings = private(method, tmp_path / "run", f"privacy.unit={unit}", "privacy.randomness=keyed")
    messages = recorded(settings)
    assert [item.request.train for item in messages] == [True, True, False]
    assert all(item.request.score for item in messages)
    moved = 0.0
    for before, after in both(settings, messages, Toy(), neighbour(unit)):
        found = difference(before, after)
        assert found.bare == []
        assert found.weights <= 2 * UPDATE_CLIP + 1e-4
        moved = max(moved, found.weights)
        if unit == "sample" and found.rows:
            assert found.rows.pop(0) <= 2 * CLIP / 7 + 1e-5  # seven images of the first class
            assert all(distance == 0 for distance in found.rows.values())
        else:
            assert math.hypot(*found.rows.values()) <= 2 * CLIP * math.sqrt(CLASSES) + 1e-5
    assert moved > 0, "the changed images had no effect, so nothing was audited"


@pytest.mark.parametrize("method", sorted(REFUSED))
@pytest.mark.long
def test_all_other_methods_are_refused(method: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=REFUSED[method]):
        Federation(private(method, tmp_path, "privacy.unit=client"))


@checked
class FollowingToy(ChangedToy):
    """The changed toy data, in which something else follows a training image."""

    follows: str = "test images"

    @property
    def test_follows_training(self) -> str:
        return "data.follows" if self.follows == "test images" else ""

    def _read(self, domain: str) -> Domain:
        found = super()._read(domain)
        if domain != self.changed_domain or not self.changed:
            return found
        if self.follows == "test images":
            return replace(found, test=found.test.subset(torch.arange(len(found.test) - 1)))
        if self.follows == "sizes":
            return replace(found, train=found.train.subset(torch.arange(len(found.train) - 1)))
        labels = found.train.labels.clone()
        labels[1] = labels[0]
        return replace(found, train=Split(found.train.images, labels))


@pytest.mark.parametrize(
    ("follows", "differs"), [("test images", "scores"), ("sizes", "samples"), ("classes", "class_counts")]
)
def test_the_audit_finds_what_follows_a_training_image(
    follows: str, differs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = private("fedavg", tmp_path / "run", "privacy.unit=client", "privacy.randomness=keyed")
    messages = recorded(settings)
    theirs = FollowingToy(changed=(4,), follows=follows)
    if theirs.test_follows_training:
        with pytest.raises(ConfigError, match=r"data\.follows: training images would decide which images are scored"):
            device_of(settings, theirs, tmp_path / "refused").register()
        monkeypatch.setattr(strategies.core.protection, "check_test_images", lambda *rest: None)
    pairs = both(settings, messages, FollowingToy(changed=(), follows=follows), theirs)
    assert all(differs in difference(*pair).bare for pair in pairs)


def unrefused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch the refusals off, as if the methods were accepted, and score the devices' own models."""
    monkeypatch.setattr(strategies.core.protection, "check_protects", lambda *rest: None)
    monkeypatch.setattr(DevicePrivacy, "received", lambda self, install, kept, request: install(kept))


@pytest.mark.long
@pytest.mark.parametrize("case", PERSONAL)
def test_the_audit_finds_what_the_refused_methods_would_tell(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unrefused(monkeypatch)
    method, hyper = PERSONAL[case]
    settings = private(method, tmp_path / "run", "privacy.unit=client", "privacy.randomness=keyed", hyper=hyper)
    pairs = both(settings, recorded(settings), Toy(), neighbour("client"))
    assert any("scores" in difference(*pair).bare for pair in pairs)


def test_the_audit_finds_validation_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unrefused(monkeypatch)
    settings = private("fedavg", tmp_path / "run", "protocol.validation=0.2", "privacy.randomness=keyed")
    pairs = both(settings, recorded(settings), Toy(), neighbour("client"))
    assert all("validation" in difference(*pair).bare for pair in pairs)


# ---- registration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["sample", "client"])
def test_a_registration_does_not_tell_neighbours_apart(unit: str, tmp_path: Path) -> None:
    settings = private("fpl", tmp_path, f"privacy.unit={unit}")
    ours = device_of(settings, Toy(), tmp_path / "a").register()
    theirs = device_of(settings, neighbour(unit), tmp_path / "b").register()
    differ = {name for name in REGISTRATION if getattr(ours, name) != getattr(theirs, name)}
    assert differ <= {name for name, kind in REGISTRATION.items() if kind == SECRET}
    again = device_of(settings, Toy(), tmp_path / "c").register()
    assert not ours.content or ours.content != again.content, "a hash that anyone with the same images can make"
    bright, nothing = Toy().load("bright"), content_hash(Toy().load("bright").train.subset(torch.arange(0)), "[]")
    assert ours.content != content_hash(bright.train, nothing, hash_of_test(bright))


# ---- noise that cannot be predicted ----------------------------------------------------------------------------------

RELEASES = 1000
"""Of each of the two data sets, where a claim is tested."""

FEW = 400
"""The same, where an answer gives itself away."""

CONFIDENCE = 0.999


def lower_bound(ours: np.ndarray, theirs: np.ndarray, delta: float) -> float:
    """Return an epsilon that the mechanism exceeds with the module's confidence, from an attack's scores.

    The threshold is chosen on one half of the releases and judged on the other, by Clopper and Pearson's intervals.
    """
    half = len(ours) // 2
    tail = (1 - CONFIDENCE) / 4  # two errors, both directions

    def bound(hits: int, misses: int, total: int) -> float:
        least_hit = float(beta.ppf(tail, hits, total - hits + 1)) if hits else 0.0
        most_false = float(beta.ppf(1 - tail, misses + 1, total - misses)) if misses < total else 1.0
        return math.log((least_hit - delta) / most_false) if least_hit > delta else -math.inf

    found = -math.inf
    for first, second in ((ours, theirs), (theirs, ours), (-ours, -theirs), (-theirs, -ours)):
        thresholds = np.quantile(np.concatenate([first[:half], second[:half]]), np.linspace(0.01, 0.99, 99))
        chosen = max(
            thresholds,
            key=lambda at: bound(int((first[:half] >= at).sum()), int((second[:half] >= at).sum()), half),
        )
        judged = first[half:], second[half:]
        found = max(found, bound(*(int((part >= chosen).sum()) for part in judged), len(judged[0])))
    return found


def told(payload: Payload, directions: dict[str, torch.Tensor]) -> tuple[float, float]:
    """What an attacker who knows both data sets makes of an answer: of what is covered, and of the rest."""
    covered = sum(
        float((tensor.double() * directions[name]).sum())
        for name, tensor in payload.weights.items()
        if name in directions
    )
    if payload.prototypes is not None:
        covered += float((payload.prototypes.vectors.double() * directions["prototypes"]).sum())
    return covered, sum(float(entry["loss"]) for entry in payload.header["scores"])


def attacked(settings: RunSettings, unit: str, folder: Path, noiseless: RunSettings, releases: int) -> float:
    """Return the lower bound on epsilon of one answer in round 2, by the best of the attacker's two statistics."""
    messages = recorded(settings)[:2]
    sides = [Toy(), neighbour(unit)]
    clean = [replay(device_of(noiseless, side, folder / f"clean {n}"), _of(messages, noiseless))[1]
             for n, side in enumerate(sides)]  # fmt: skip
    privacy = settings.privacy
    assert isinstance(privacy, GaussianPrivacy)
    directions: dict[str, torch.Tensor] = {}
    for name, tensor in clean[0].weights.items():
        if tensor.is_floating_point() and not name.endswith("running_var"):
            gap = clean[1].weights[name].double() - tensor.double()
            directions[name] = gap / (2 * UPDATE_CLIP * privacy.update_noise_multiplier) ** 2
    ours, theirs = clean[0].prototypes, clean[1].prototypes
    if ours is not None and theirs is not None:
        share = 1 / ours.weights.double()[:, None] if unit == "sample" else math.sqrt(CLASSES)
        deviations = 2 * CLIP * privacy.noise_multiplier * share
        directions["prototypes"] = (theirs.vectors.double() - ours.vectors.double()) / deviations**2
    found = []
    for n, side in enumerate(sides):
        device = device_of(settings, side, folder / f"noised {n}")
        device.answer(messages[0].request, messages[0].message)
        request, message = messages[1].request, messages[1].message
        found.append(np.array([told(device.answer(request, message), directions) for _ in range(releases)]))
    return max(lower_bound(found[0][:, k], found[1][:, k], privacy.delta) for k in range(2))


def _of(messages: Sequence[Recorded], settings: RunSettings) -> list[Recorded]:
    """The same messages as another run's."""
    return [replace(item, request=replace(item.request, identity=settings.identity)) for item in messages]


def attack(method: str, unit: str, noise: float, folder: Path, releases: int = RELEASES, **more: Any) -> float:
    """:func:`attacked` with one optimiser step a round, which is quick."""
    base = (f"privacy.unit={unit}", "privacy.randomness=system", "train.local_steps=1")
    noises = [f"{key}={noise}" for key in ("privacy.noise_multiplier", "privacy.update_noise_multiplier")]
    none = [f"{key}=1e-9" for key in ("privacy.noise_multiplier", "privacy.update_noise_multiplier")]
    settings = private(method, folder / "run", *base, *noises, **more)
    noiseless = private(method, folder / "run", *base, *none, **more)
    return attacked(settings, unit, folder, noiseless, releases)


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["sample", "client"])
@pytest.mark.parametrize("method", ["fpl", "fedavg"])
def test_a_distinguisher_stays_below_the_claimed_epsilon(method: str, unit: str, tmp_path: Path) -> None:
    """2,000 releases; the attacker knows everything but which of two data sets it is."""
    settings = private(method, tmp_path)
    noised = [0.5, 0.5] if settings.method.prototypes_from != "none" else [0.5]
    assert attack(method, unit, 0.5, tmp_path) < epsilon(noised, 1, 1e-5)


@pytest.mark.slow
def test_a_distinguisher_sees_too_little_noise(tmp_path: Path) -> None:
    """A hundredth of the noise that a claim is made for is found out."""
    assert attack("fedavg", "client", 0.02, tmp_path, FEW) > epsilon([2.0], 1, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["fedbn", "fedproto without averaging", "single_set"])
def test_a_distinguisher_sees_the_scores_of_refused_methods(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why they are refused: the claim would have been 0.23, or 0 where nothing is covered."""
    unrefused(monkeypatch)
    method, hyper = PERSONAL[case]
    assert attack(method, "client", 20.0, tmp_path, FEW, hyper=hyper) > 3.0
