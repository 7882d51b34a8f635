"""A dishonest server asks a device directly: it skips the registration, and chooses every setting and every message.

The device refuses, or its clean release moves by no more than the claimed sensitivity when one image changes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from support.attacks import Attacker, name_of, write_folder
from support.toy import CLASSES, ChangedToy, Toy
from test_privacy_attacks import TABLE, write_table
from test_privacy_audit import CLIP, device_of, neighbour
from test_sensitivity_audit import CLEAN, UNITS, figures, released, request_of, settings_of

from client.border import check_single, training_images
from client.device import Device
from client.reasons import REASONS
from common.config import checked
from common.data.domain import Domain
from common.data.protocols import ClientSpec, OneClientPerDomain
from common.errors import ConfigError, GoldfinchError, PayloadError, RepeatedImageError
from common.privacy import clip_rows
from common.prototypes import class_means
from common.settings import RunSettings
from common.wire.payload import Payload, decode
from strategies.core.context import ClientContext
from strategies.core.exchange import Trained, Upload
from strategies.core.method import Method, build_model
from strategies.fedavg import FedAvg
from strategies.fedbn import FedBN
from strategies.fpl import FPL


def pair_of(settings: RunSettings, unit: str, folder: Path) -> tuple[Device, Device]:
    return device_of(settings, Toy(), folder / "a"), device_of(settings, neighbour(unit), folder / "b")


def movement(pairs: list[tuple[Payload, Payload]], unit: str) -> float:
    """The largest movement of a part of an answer, as a share of what is claimed for it."""
    return max(figure.share for figure in figures(pairs, unit, {0}, (7, 6, 6, 6)))


# ---- what the server's own check refuses; test_sensitivity_audit.py tries all methods -------------------------------


@pytest.mark.parametrize("unit", UNITS)
def test_a_device_that_keeps_its_layers_sends_no_means_of_them(unit: str, tmp_path: Path) -> None:
    """The attack: no scores are asked, so the means of later rounds are those of layers that were trained before."""
    settings = settings_of("fedproto", tmp_path, unit, aggregate_models=False)
    devices = pair_of(settings, unit, tmp_path)
    with pytest.raises(ConfigError, match="fedproto is scored on models that hold a part of each client's own"):
        released(settings, *devices)
    assert not (tmp_path / "a/ledger/ledger.json").exists()
    assert not any((tmp_path / "a").rglob("*.safetensors")), "nothing was trained"


@checked
class Undeclared(FPL):
    """FPL whose classifier stays on the device, and which declares nothing of it."""

    def shared_names(self, model: Any) -> set[str]:
        return {name for name in model.state_dict() if name.startswith("backbone.")}


@checked
class Silent(FPL):
    """FPL that makes and sends class means of a model of its own, and does not expect them."""

    def shared_names(self, model: Any) -> set[str]:
        return set()

    def expects(self, server: Any) -> Any:
        return replace(super().expects(server), prototypes=False)


@pytest.mark.parametrize("method", [Undeclared, Silent])
def test_kept_layers_are_found_in_the_model_itself(method: type[Method], tmp_path: Path) -> None:
    settings = replace(settings_of("fpl", tmp_path, "sample"), method=method())
    with pytest.raises(ConfigError, match=r"choose privacy\.unit=client"):
        released(settings, *pair_of(settings, "sample", tmp_path))
    settings = replace(settings_of("fpl", tmp_path, "client"), method=Undeclared())
    assert movement(released(settings, *pair_of(settings, "client", tmp_path / "client")), "client") <= 1 + 1e-3


@checked
class Batched(FPL):
    """FPL on a network that normalises by each batch, in evaluation too."""

    def extend(self, model: Any, client_count: int, seed: int) -> Any:
        for name, layer in list(model.backbone.named_modules()):
            if isinstance(layer, torch.nn.BatchNorm2d):
                place, _, leaf = name.rpartition(".")
                own = torch.nn.BatchNorm2d(layer.num_features, track_running_stats=False)
                setattr(model.backbone.get_submodule(place), leaf, own)
        return model


def test_features_that_depend_on_the_batch_have_no_bound_for_one_image(tmp_path: Path) -> None:
    settings = replace(settings_of("fpl", tmp_path, "sample"), method=Batched())
    with pytest.raises(ConfigError, match=r"normalises by its batch.*choose privacy\.unit=client"):
        released(settings, *pair_of(settings, "sample", tmp_path))


def test_what_another_run_kept_is_no_received_model(tmp_path: Path) -> None:
    """The attack: a run under the name of another, in which layers were kept, and a message without a model."""
    kept = replace(settings_of("fpl", tmp_path, "client"), method=Undeclared())
    device = device_of(kept, Toy(), tmp_path / "a")
    model = build_model(kept, 3)
    shared = {name: tensor for name, tensor in model.state_dict().items() if name.startswith("backbone.")}
    device.answer(request_of(kept, 1), Payload(shared))
    assert [path.name for path in (tmp_path / "a/r").rglob("*.safetensors")]
    settings = settings_of("fpl", tmp_path, "sample")
    for message in (Payload(), Payload(shared)):
        with pytest.raises(PayloadError):
            device_of(settings, Toy(), tmp_path / "a").answer(request_of(settings, 2), message)


# ---- what a method does besides what it declares ---------------------------------------------------------------------


@checked
class Unmasking(FPL):
    """FPL that writes the means without noise into the tensors that it was given with noise."""

    def upload(self, local: ClientContext, trained: Trained) -> Upload:
        bare = class_means(clip_rows(local.features()[0], CLIP), local.features()[1], local.class_count)
        trained.prototypes.vectors.copy_(bare.vectors)
        return super().upload(local, trained)


@checked
class Adding(FedAvg):
    """FedAvg that shares nothing, says so, and sends its model."""

    def shared_names(self, model: Any) -> set[str]:
        return set()

    def upload(self, local: ClientContext, trained: Trained) -> Upload:
        return Upload(weights=local.model.state_dict())


@checked
class AddingMeans(FPL):
    """The same of an FPL whose class means have noise."""

    def shared_names(self, model: Any) -> set[str]:
        return set()

    def upload(self, local: ClientContext, trained: Trained) -> Upload:
        return Upload(weights=local.model.state_dict(), prototypes=trained.prototypes)


@checked
class MeansOfItsOwn(FedAvg):
    """FedAvg that sends class means which it does not declare."""

    def upload(self, local: ClientContext, trained: Trained) -> Upload:
        return Upload(prototypes=class_means(*local.features(), local.class_count))


@pytest.mark.parametrize("method", [Unmasking, Adding, AddingMeans, MeansOfItsOwn])
def test_an_upload_that_is_not_the_declared_one_is_not_sent(method: type[Method], tmp_path: Path) -> None:
    base = settings_of("fpl" if issubclass(method, FPL) else "fedavg", tmp_path, "client")
    settings = replace(base, method=method())
    with pytest.raises(GoldfinchError):
        released(settings, *pair_of(settings, "client", tmp_path))
    assert not (tmp_path / "a/ledger/ledger.json").exists()


@checked
class Peeking(FedAvg):
    """FedAvg whose predictions follow the features of its training images."""

    def predict(self, features: torch.Tensor, logits: torch.Tensor, local: ClientContext) -> torch.Tensor:
        told = int(1e6 * float(local.features()[0].sum())) % CLASSES
        return torch.eye(CLASSES)[torch.full((len(features),), told)]


@checked
class Keeping(FedBN):
    """FedBN that does not declare that its scores are of a model of its own."""

    @property
    def scores_own_training(self) -> bool:
        return False


@pytest.mark.parametrize("method", [Peeking, Keeping])
def test_scores_are_computed_without_training_images_and_kept_layers(method: type[Method], tmp_path: Path) -> None:
    settings = replace(settings_of("fedavg", tmp_path, "client"), method=method())
    ours, theirs = pair_of(settings, "client", tmp_path)
    try:
        pairs = released(settings, ours, theirs, score=["bright"])
    except RuntimeError:  # there are no images of which there could be features
        return
    assert movement(pairs, "client") <= 1 + 1e-3


# ---- one image that is several samples -------------------------------------------------------------------------------

MEANS = ("method=fpl", "privacy=gaussian", f"privacy.clip={CLIP}", "privacy.update_clip=1", *CLEAN[:2])
LISTED = (*TABLE, "data.path=list.csv")
OWN_LIST = {"data": "table", "data_path": "list.csv"}
"""What the device's owner pins, so that its table may be read under privacy."""
COPIES = 30


def listed(folder: Path, link: Callable[[Path, Path], None] | None, *, changed: bool) -> Path:
    """A list of 36 training images of two classes; one file is 30 of them, by its own path or by links to it."""
    write_folder(folder, 9)
    first = folder / "negative" / name_of(0)
    Image.new("RGB", (16, 16), "yellow" if changed else "black").save(first)
    lines = [f"negative/{name_of(number)},negative,train" for number in range(3)]
    lines += [f"positive/{name_of(number, 'positive')},positive,train" for number in range(4)]
    for number in range(1, COPIES):
        path = first
        if link is not None:
            path = folder / f"link {number}.png"
            link(first, path)
        lines.append(f"{path.relative_to(folder)},negative,train")
    for number in (7, 8):
        lines.append(f"negative/{name_of(number)},negative,test")
        lines.append(f"positive/{name_of(number, 'positive')},positive,test")
    (folder / "list.csv").write_text("\n".join(["path,label,split", *lines]) + "\n")
    return folder


def linked(target: Path, path: Path) -> None:
    path.symlink_to(target)


def hard_linked(target: Path, path: Path) -> None:
    os.link(target, path)


WAYS = {"rows": None, "links": linked, "hard links": hard_linked}


@pytest.mark.parametrize("way", WAYS)
def test_one_file_in_many_rows_is_not_one_sample(way: str, tmp_path: Path) -> None:
    """The claim is 2 C / n for one row; one image moves 30 of the 32 rows of its class."""
    sent: list[Any] = []
    for side, changed in (("a", False), ("b", True)):
        folder = listed(tmp_path / side, WAYS[way], changed=changed)
        attacker = Attacker(folder, tmp_path / f"{side} state", domain="clinic", **OWN_LIST)
        sent.append(attacker.ask(*LISTED, *MEANS, train=True))
        registered = attacker.register(*LISTED, *MEANS)
        assert (registered.ok, registered.text) == (False, REASONS[RepeatedImageError])
    if all(reply.ok for reply in sent):
        ours, theirs = (decode(reply.tensors[0]).prototypes for reply in sent)
        moved = float((ours.vectors - theirs.vectors).norm(dim=1).max())
        pytest.fail(f"one image moved a class mean by {moved:.3f}; claimed: {2 * CLIP / 32:.4f}")
    for reply in sent:
        assert (reply.ok, reply.text, reply.traceback) == (False, REASONS[RepeatedImageError], "")
    assert not any(tmp_path.rglob("ledger.json"))


def test_the_way_out_of_the_refusal_works(tmp_path: Path) -> None:
    folder = listed(tmp_path / "a", None, changed=False)
    attacker = Attacker(folder, tmp_path / "state", domain="clinic", **OWN_LIST)
    assert "privacy.unit=client" in REASONS[RepeatedImageError]
    assert attacker.register(*LISTED, *MEANS, "privacy.unit=client").ok
    assert attacker.ask(*LISTED, *MEANS, "privacy.unit=client", train=True).ok


def test_rows_that_hold_their_images_are_samples_each(tmp_path: Path) -> None:
    """Equal bytes in two rows are two images, as two files with one content are."""
    folder = write_folder(tmp_path / "clinic")
    paths = sorted(folder.rglob("*.png"))
    write_table(folder / "images.parquet", [paths[0], *paths, paths[0]])
    attacker = Attacker(folder, tmp_path / "state", domain="clinic", data="table", data_path="images.parquet")
    assert attacker.ask(*TABLE, "data.path=images.parquet", *MEANS, train=True).ok


@checked
class WithReplacement(OneClientPerDomain):
    """A protocol that draws a sample twice, against what a protocol may do, and past the check of its split."""

    def held(self, domain: Domain, client: ClientSpec, seed: int) -> torch.Tensor:
        held = super().held(domain, client, seed)
        return torch.cat([held, held[:1]])


def test_a_protocol_that_repeats_a_sample_is_refused(tmp_path: Path) -> None:
    """The message is for the owner alone: it counts images."""
    for unit in UNITS:
        settings = replace(settings_of("fpl", tmp_path, unit), protocol=WithReplacement())
        device = device_of(settings, Toy(), tmp_path / unit)
        if unit == "client":
            assert device.register().samples == 26
            continue
        with pytest.raises(RepeatedImageError, match=r"bright: 26 training samples are 25 images, .* is 2 samples"):
            device.register()
        with pytest.raises(RepeatedImageError):
            released(settings, device, device)


def test_samples_are_told_apart_by_their_place(tmp_path: Path) -> None:
    domain = ChangedToy().load("bright")
    check_single(training_images(Toy(), domain, torch.arange(25)))
    named = replace(domain, train_files=tuple(tmp_path / f"no file {number}" for number in range(25)))
    check_single(training_images(Toy(), named, torch.arange(25)))
    with pytest.raises(RepeatedImageError):
        check_single(training_images(Toy(), named, torch.tensor([3, 1, 3])))
