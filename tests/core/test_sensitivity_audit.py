"""An audit of the claimed sensitivities: what one change of the data moves in a clean release of each method.

Two devices hold neighbouring data and answer a dishonest server, which skips the registration, with the same draws and
next to no noise. What they send apart from each other is the movement that the noise must cover. For all methods, in
every variation of the settings, a device refuses, or the movement is at most what is claimed.
Run as a program, with ``PYTHONPATH=.:tests:tests/core``, the file prints claims and movements of all methods.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from support.toy import CLASSES, ChangedToy, Toy, toy_settings
from test_privacy_audit import ANSWER, METHODS, PUBLIC, REFUSED, UPDATE_CLIP, device_of, difference
from test_privacy_claims import PERSONAL

import client.privacy
import strategies.core.protection
from client.device import Device
from client.privacy import DevicePrivacy, GaussianDevicePrivacy, Protection
from common.config import checked
from common.data.batches import Split
from common.data.domain import DataSource, Domain
from common.data.folder import Folder
from common.data.table import Table
from common.errors import ConfigError, GoldfinchError, RepeatedImageError
from common.prototypes import PrototypeSet
from common.settings import RunSettings
from common.wire.messages import OwnVersion, Request
from common.wire.payload import Payload, cast_down, cast_up
from strategies.core.exchange import Client, Update
from strategies.core.method import build_model, server_context

CLEAN = ("privacy.noise_multiplier=1e-9", "privacy.update_noise_multiplier=1e-9", "privacy.randomness=keyed")
CLIP = 0.05
"""Shorter than most features of the small network, so that one image moves a mean by nearly all that it may."""

BOUNDS = (f"privacy.clip={CLIP}", f"privacy.update_clip={UPDATE_CLIP}")
ROUNDS = 3
UNITS = ("sample", "client")
COUNTS = (7, 6, 6, 6)
"""Training samples of each class of the toy data's domain ``bright``."""

ROUNDING = 1e-3
"""Share of a claim that float32 may round, and the noise may add."""


def settings_of(method: str, folder: Path, unit: str, *overrides: str, **hyper: Any) -> RunSettings:
    """Settings under which an update is all but free of noise, so that its movement is that of the clean release."""
    chosen = ("privacy=gaussian", "model=small", *BOUNDS, *CLEAN, f"privacy.unit={unit}", *overrides)
    train = {"rounds": ROUNDS, "batch_size": 8}
    return toy_settings(method, folder / "run", overrides=chosen, hyper=hyper, train=train)


def request_of(settings: RunSettings, round_number: int, **changes: Any) -> Request:
    """A request to train and to score nothing, which names the client's state of the round before."""
    own = None
    if round_number > 1:
        own = OwnVersion(round=round_number - 1, exchange="train", attempt=0)
    fields = {
        "run": "r",
        "identity": settings.identity,
        "method": settings.method.name,
        "round": round_number,
        "exchange": "train",
        "client": "bright-0",
        "client_count": 3,
        "client_index": 0,
        "train": True,
        "score": [],
        "code": settings.code,
        "own": own,
    }
    return Request(**{**fields, **changes})


def released(settings: RunSettings, ours: Device, theirs: Device, **changes: Any) -> list[tuple[Payload, Payload]]:
    """The answers of two devices to the same messages, which a server makes of the first one's answers."""
    client = Client("bright-0", "bright", sum(COUNTS), COUNTS, 0, 3)
    server = server_context(settings, build_model(settings, 3), 3)
    state = settings.method.initial_state(server.shared, server)
    found: list[tuple[Payload, Payload]] = []
    for number in range(1, settings.train.rounds + 1):
        download = settings.method.download(state, server)
        message = Payload(download.weights, download.prototypes, download.extra)
        message = cast_down(message, settings.rounds.transport)
        request = request_of(settings, number, client_count=len(ours.settings.clients), **changes)
        pair = ours.answer(request, message), theirs.answer(request, message)
        found.append(pair)
        first = cast_up(pair[0], settings.rounds.transport)
        prototypes = first.prototypes or PrototypeSet.empty(server.feature_size)
        update = Update(first.weights, prototypes, first.extra, client=client)
        state = settings.method.aggregate(state, [update], replace(server, round=number, clients=(client,)))
    return found


@dataclass(frozen=True)
class Figure:
    """What is claimed for a part of an answer, and how far it moved at most."""

    part: str
    claimed: float
    measured: float

    @property
    def share(self) -> float:
        """The movement as a share of the claim."""
        return self.measured / self.claimed


def figures(
    pairs: Sequence[tuple[Payload, Payload]], unit: str, changed: set[int], counts: Sequence[int], *, equal: bool = True
) -> list[Figure]:
    """Compare the answers of neighbours.

    Args:
        pairs: their answers to the same requests.
        unit: the unit of privacy.
        changed: classes with a changed image (``unit=sample``).
        counts: samples of each class, of the smaller data set.
        equal: whether both have the same samples; otherwise what is public may differ.
    """
    moved = {"weights": 0.0, "class means": 0.0, "other classes": 0.0}
    claims = {"weights": 2 * UPDATE_CLIP, "class means": 2 * CLIP * math.sqrt(len(counts)), "other classes": 1e-6}
    if unit == "sample":
        claims["class means"] = max(2 * CLIP / counts[label] for label in changed)
    if unit == "group":
        claims["class means"] = 2 * CLIP * FACTOR
    for before, after in pairs:
        found = difference(before, after)
        public = {name for name, kind in ANSWER.items() if kind == PUBLIC} | {"prototypes' labels or weights"}
        assert set(found.bare) <= (set() if equal else public)
        moved["weights"] = max(moved["weights"], found.weights)
        if unit != "sample":
            scales = counts if unit == "group" else (1,) * len(counts)
            rows = [distance * scales[label] for label, distance in found.rows.items()]
            moved["class means"] = max(moved["class means"], math.hypot(*rows))
            continue
        for label, distance in found.rows.items():
            part = "class means" if label in changed else "other classes"
            moved[part] = max(moved[part], distance)
    return [Figure(part, claims[part], moved[part]) for part in moved]


# ---- neighbouring data -----------------------------------------------------------------------------------------------


@checked
class LargerToy(Toy):
    """The toy data with one more training image, of the second class, in one domain."""

    def _read(self, domain: str) -> Domain:
        found = super()._read(domain)
        if domain != "bright":
            return found
        images = torch.cat([found.train.images, 255 - found.train.images[1:2]])
        return replace(found, train=Split(images, torch.cat([found.train.labels, found.train.labels[1:2]])))


@checked
class CopiedToy(Toy):
    """The toy data, of which one training image is another one of its class, turned by half."""

    def _read(self, domain: str) -> Domain:
        found = super()._read(domain)
        images = found.train.images.clone()
        images[4] = images[8].flip((1, 2))
        return replace(found, train=Split(images, found.train.labels))


PATIENT = (0, 1, 2, 4, 8, 12, 13)
"""Training images of the largest group: four of the first class, two of the second, one of the third."""

FACTOR = math.sqrt(4**2 + 2**2 + 1**2)


def written(folder: Path, kind: type[DataSource], changed: Sequence[int], group: str = "") -> DataSource:
    """The images of the toy data in files: in folders of classes, or in a list; of some the negatives."""
    domain = Toy().load("bright")
    lines = ["file,label,split,patient"]
    for part, split in (("train", domain.train), ("test", domain.test)):
        for number, label in enumerate(split.labels.tolist()):
            image = split.images[number]
            if part == "train" and number in changed:
                image = 255 - image
            path = folder / part / f"class {label}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
            patient = "the largest" if part == "train" and number in PATIENT else f"{part} {number // 2}"
            lines.append(f"{path.relative_to(folder)},class {label},{part},{patient}")
    names = tuple(f"class {label}" for label in range(CLASSES))
    place: dict[str, Any] = {"domains": ("bright",), "classes": names, "image_size": 16, "root": str(folder)}
    if kind is Folder:
        return Folder(**place)
    (folder / "list.csv").write_text("\n".join(lines) + "\n")
    return Table(path="list.csv", domain="none", image="file", label="label", split="split", group=group, **place)


def in_files(kind: type[DataSource], group: str = "") -> Callable[[Path, str], tuple[DataSource, DataSource]]:
    def both(folder: Path, unit: str) -> tuple[DataSource, DataSource]:
        changed = {"sample": (4,), "group": PATIENT, "client": range(25)}[unit]
        return written(folder / "ours", kind, (), group), written(folder / "theirs", kind, changed, group)

    return both


def replaced(folder: Path, unit: str) -> tuple[DataSource, DataSource]:
    return Toy(), ChangedToy(changed=(4,) if unit == "sample" else tuple(range(25)))


def copied(folder: Path, unit: str) -> tuple[DataSource, DataSource]:
    return Toy(), CopiedToy()


def added(folder: Path, unit: str) -> tuple[DataSource, DataSource]:
    return Toy(), LargerToy()


# ---- every method, in every variation --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variation:
    """Settings and neighbouring data of an audit.

    Args:
        overrides: settings.
        data: makes the data of the two devices.
        units: the units of privacy.
        rounds: rounds; the later ones are of what the earlier ones left on the device.
        changed: the classes with a changed image (``unit=sample``).
        train: settings of the group ``train``.
        flat: whether no noise covers the weights, so that nothing is claimed for them.
    """

    overrides: tuple[str, ...] = ()
    data: Callable[[Path, str], tuple[DataSource, DataSource]] = replaced
    rounds: int = 2
    units: tuple[str, ...] = UNITS
    changed: frozenset[int] = frozenset({0})
    train: Mapping[str, Any] | None = None
    flat: bool = False


VARIATIONS = {
    "one image replaced": Variation(rounds=ROUNDS),
    "by a copy of another": Variation(data=copied),
    "one image added": Variation(data=added, changed=frozenset({1})),
    "repeated epochs": Variation(train={"epochs": 3, "optimizer": "adam", "class_weights": "balanced"}),
    "views": Variation(("views=randconv", "views.count=2")),
    "a frozen backbone": Variation(("model.freeze=backbone", "privacy.update_clip=null"), flat=True),
    "rounded on the wire": Variation(("rounds.transport=float16", "train.precision=bfloat16")),
    "networks by domain": Variation(("model=by_domain", "model.others=small")),
    "a table": Variation(data=in_files(Table)),
    "own folders": Variation(data=in_files(Folder)),
    "a table with groups": Variation(data=in_files(Table, "patient"), units=("sample", "group")),
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {method: (method, {}) for method in METHODS if method != "pooled"}
"""All methods; the pooled one has no device, and its settings cannot be read with privacy."""
CASES |= PERSONAL


def audited(case: str, variation: str, unit: str, folder: Path) -> list[Figure] | None:
    """What is claimed and what was measured; ``None`` if a device refuses, which then has counted nothing."""
    method, hyper = CASES[case]
    chosen = VARIATIONS[variation]
    try:
        settings = settings_of(method, folder, unit, *chosen.overrides, **hyper)
    except ConfigError:  # a device reads the settings, too
        return None
    settings = replace(settings, train=replace(settings.train, rounds=chosen.rounds, **(chosen.train or {})))
    sources = chosen.data(folder, unit)
    devices: list[Device] = []
    for side, source in zip(("a", "b"), sources, strict=True):
        devices.append(device_of(settings, source, folder / side))
    ledger = folder / "a/ledger/ledger.json"
    try:
        pairs = released(settings, *devices)
    except GoldfinchError:
        assert not ledger.exists(), "a refused exchange is not counted"
        for device in devices:
            with pytest.raises(GoldfinchError):
                device.register()
        return None
    counted = json.loads(ledger.read_text())["releases"]
    assert sum(entry["count"] for entry in counted) == chosen.rounds
    equal = len(sources[0].load("bright").train) == len(sources[1].load("bright").train)
    measured = figures(pairs, unit, set(chosen.changed), COUNTS, equal=equal)
    if chosen.flat:
        return [figure for figure in measured if figure.part != "weights"]
    return measured


@pytest.mark.parametrize("case", CASES)
@pytest.mark.long
def test_a_device_refuses_or_keeps_to_the_bound(case: str, tmp_path: Path) -> None:
    served = 0
    for variation in VARIATIONS:
        for unit in VARIATIONS[variation].units:
            measured = audited(case, variation, unit, tmp_path / variation / unit)
            if measured is None:
                continue
            served += not VARIATIONS[variation].flat
            for figure in measured:
                assert figure.share <= 1 + ROUNDING, f"{variation}, {unit}: {figure}"
            assert max(figure.share for figure in measured) > 0.01, "nothing moved, so nothing was audited"
    assert bool(served) is (case not in REFUSED and case not in PERSONAL)


# ---- the audit finds what it is for ----------------------------------------------------------------------------------


def unrefused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices as they were when the server alone checked the method, and means were those of the kept layers."""

    def protected(self: Any, install: Any, kept: Any, local: Any) -> Any:
        received = install(kept)
        protection = Protection(self.privacy, received, simulated=True)
        protection.before_training()
        return install(kept), protection

    monkeypatch.setattr(strategies.core.protection, "check_protects", lambda *rest: None)
    monkeypatch.setattr(DevicePrivacy, "received", lambda self, install, kept, request: install(kept))
    monkeypatch.setattr(GaussianDevicePrivacy, "protected", protected)


def test_the_audit_finds_the_means_of_kept_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unrefused(monkeypatch)
    measured = audited("fedproto without averaging", "repeated epochs", "sample", tmp_path)
    assert measured is not None
    by_part = {figure.part: figure.share for figure in measured}
    assert by_part["class means"] > 1.5
    assert by_part["other classes"] > 1.5


def test_the_audit_finds_an_image_in_several_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of("fpl", tmp_path, "sample")
    devices: list[Device] = []
    for side, changed in (("a", ()), ("b", (4,))):
        source = written(tmp_path / side / "images", Table, changed)
        listed = tmp_path / side / "images" / "list.csv"
        listed.write_text(listed.read_text() + 29 * "train/class 0/4.png,class 0,train,x\n")
        devices.append(device_of(settings, source, tmp_path / side))
    with pytest.raises(RepeatedImageError):
        released(settings, *devices)
    monkeypatch.setattr(client.privacy, "check_single", lambda *rest: None)
    found = figures(released(settings, *devices), "sample", {0}, (36, *COUNTS[1:]))
    assert {figure.part: figure.share for figure in found}["class means"] > 1.5


def test_a_group_moves_more_than_an_image(tmp_path: Path) -> None:
    """Its images move the means together, so noise for a single image would not cover it."""
    moved: dict[str, float] = {}
    for unit in ("sample", "group"):
        measured = audited("fpl", "a table with groups", unit, tmp_path / unit)
        assert measured is not None
        moved[unit] = {figure.part: figure.measured for figure in measured}["class means"]
    assert moved["group"] > 2 * moved["sample"] * COUNTS[0]


def test_a_group_scales_the_noise_by_its_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.privacy, "gaussian", lambda shape, draws: torch.ones(shape, dtype=torch.float64))
    sent: dict[str, PrototypeSet] = {}
    for unit, noise in (("sample", "1e-3"), ("sample", "1e-9"), ("group", "1e-3")):
        settings = settings_of("fpl", tmp_path, unit, f"privacy.noise_multiplier={noise}", "privacy.clip=0.5")
        source = written(tmp_path / "images", Table, (), "patient")
        device = device_of(settings, source, tmp_path / unit / noise)
        found = released(replace(settings, train=replace(settings.train, rounds=1)), device, device)[0][0].prototypes
        assert found is not None
        sent[f"{unit} {noise}"] = found
    clean = sent["sample 1e-9"].vectors.double()
    for unit, factor in (("sample", 1.0), ("group", FACTOR)):
        noise = sent[f"{unit} 1e-3"].vectors.double() - clean
        expected = 1e-3 * 2 * 0.5 * factor / torch.tensor(COUNTS)[:, None]
        torch.testing.assert_close(noise, expected.double().expand_as(noise), rtol=0.02, atol=1e-7)


def main() -> None:
    """Print the audit's table: the largest movement of each method in all variations, and the claim."""
    print("method,unit,part,claimed,measured,share,variation,refused")
    for case in CASES:
        for unit in (*UNITS, "group"):
            worst: dict[str, tuple[Figure, str]] = {}
            refused: list[str] = []
            for variation in [name for name, chosen in VARIATIONS.items() if unit in chosen.units]:
                with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
                    measured = audited(case, variation, unit, Path(folder))
                if measured is None:
                    refused.append(variation)
                for figure in measured or ():
                    if figure.part not in worst or figure.share > worst[figure.part][0].share:
                        worst[figure.part] = figure, variation
            for part, (figure, variation) in worst.items():
                shown = f"{figure.claimed:.4g},{figure.measured:.4g},{figure.share:.3f},{variation},{len(refused)}"
                print(f"{case},{unit},{part},{shown}", flush=True)
            if not worst:
                print(f"{case},{unit},,,,,,{len(refused)}", flush=True)


if __name__ == "__main__":
    main()
