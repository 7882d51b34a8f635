"""Networks that differ between clients: shapes, what is refused, whole runs, exports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import run
from support.toy import method_at_defaults, toy_settings

from common.choices import choices_of
from common.errors import ConfigError
from common.models.mixed import Aligned, Mixed, network
from common.models.specs import ModelSpec, ResNet10, Small, TorchvisionResNet
from common.settings import load_settings
from goldfinch.commands.export import export
from goldfinch.explanation import explain
from goldfinch.record import RunRecord
from goldfinch.run_model import RunModel
from strategies.core.method import build_model

MIXED = ("model=by_domain", "model.features=16", "tuned=none")
NETWORKS = {"dark": "digit_cnn", "noisy": "digit_cnn_gap"}


def settings_of(method: str, output: Path, *words: str, **more: Any) -> Any:
    settings = toy_settings(method, output, overrides=(*MIXED, *words), **more)
    raw = {**settings.raw, "model": {**settings.raw["model"], "networks": NETWORKS}}
    return replace(settings, model=replace(settings.model, networks=NETWORKS), raw=raw)


@pytest.mark.parametrize(
    "spec",
    [Small(), ResNet10(width=4), network("digit_cnn"), TorchvisionResNet(depth=18, head="multilayer")],
    ids=["small", "resnet10", "digit_cnn", "another head"],
)
def test_every_network_has_the_chosen_features_and_one_linear_classifier(spec: ModelSpec) -> None:
    model = Aligned(network=spec, features=24).build(7, 32, seed=0)
    features, logits = model(torch.rand(3, 3, 32, 32))
    assert (features.shape, logits.shape, model.feature_size) == ((3, 24), (3, 7), 24)
    assert float(features.detach().min()) >= 0
    assert isinstance(model.head, torch.nn.Linear)


def test_a_network_that_fits_stays_as_it_is() -> None:
    plain, aligned = Small(features=24), Aligned(network=Small(features=24), features=24)
    first, second = plain.build(5, 16, 0).state_dict(), aligned.build(5, 16, 0).state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_initial_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    settings = settings_of("single_set", tmp_path)
    states = [build_model(settings, 3, domain).state_dict() for domain in ("dark", "noisy", "dark")]
    assert states[0].keys() != states[1].keys()
    assert all(torch.equal(states[0][name], states[2][name]) for name in states[0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"others": "smal"}, "did you mean 'small'"),
        ({"networks": {"dark": "by_domain"}}, "cannot be a mix"),
        ({"freeze": "backbone"}, "Unexpected keyword argument"),
    ],
    ids=["unknown", "nested", "frozen"],
)
def test_what_is_no_mix_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mixed(**given)


def test_settings_with_a_method_that_exchanges_weights_are_refused_and_the_message_says_what_lists_others() -> None:
    with pytest.raises(ConfigError, match=r"method=fpl exchanges \d+ tensors .*: goldfinch list by_domain names them"):
        load_settings(["method=fpl", *MIXED, "model.networks={signs: digit_cnn}"])


def test_a_network_for_a_domain_that_the_run_does_not_have_is_refused() -> None:
    """A name that was mistyped trained the network of the other domains."""
    words = ["method=single_set", *MIXED, "data=glyphs"]
    load_settings([*words, "model.networks={signs: digit_cnn}"])
    with pytest.raises(ConfigError, match=r"model.networks: the run has no domain 'sgins'; did you mean 'signs'\?"):
        load_settings([*words, "model.networks={sgins: digit_cnn}"])


@pytest.mark.long
def test_goldfinch_list_names_every_method_that_exchanges_no_weights() -> None:
    model = Small().build(5, 16, 0)
    exchange_none: set[str] = set()
    for name in choices_of("method"):
        if not method_at_defaults(name).shared_names(model):
            exchange_none.add(name)
    with_setting = load_settings(["method=fedproto", "method.aggregate_models=false", "tuned=none"]).method
    assert not with_setting.shared_names(model)
    _, _, listed = explain("model.by_domain").text.partition("exchange no weights: ")
    assert {word.strip(" ,") for word in listed.partition(", and fedproto")[0].split(",")} == exchange_none
    assert "and fedproto with method.aggregate_models=false" in listed


@pytest.mark.parametrize(
    ("method", "words"), [("fedproto", ["method.aggregate_models=false"]), ("fedpall", []), ("adcol", [])]
)
@pytest.mark.long
def test_clients_with_different_networks_learn_and_are_exported(method: str, words: list[str], tmp_path: Path) -> None:
    settings = settings_of(method, tmp_path / "run", *words, train={"rounds": 6})
    done = run(settings)
    assert done.averages()[-1] > 40, "chance is 25"
    kept = RunModel(RunRecord.open(tmp_path / "run"))
    for client, name in (("dark-0", "DigitCNN"), ("noisy-0", "DigitCNNPooled"), ("bright-0", "Small")):
        to = tmp_path / client
        description = export(tmp_path / "run", to, client=client)
        assert description.architecture["model"]["network"]["_target_"].endswith(f".{name}")
        domain = client.removesuffix("-0")
        assert done.summary["scores"]["final"]["accuracy"][domain] == description.score["accuracy"][domain]  # type: ignore[index]
    assert kept.model("dark-0").state_dict().keys() != kept.model("noisy-0").state_dict().keys()
    registered = {entry["client"]: entry["device"] for event, entry in done.events if event == "registered"}
    assert registered["dark-0"].endswith(", digit_cnn")
    assert registered["bright-0"].endswith(", small")
