"""Initial weights as people have them: with prefixes and wrappers, other heads, and any suffix."""

from __future__ import annotations

import logging
import re
import shlex
import subprocess
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file
from torch import Tensor, nn

from common.models.base import ModelError
from common.models.pretrained import load_weights
from common.models.residual import ResidualBackbone
from common.text import warn_once

State = dict[str, Tensor]


def network() -> ResidualBackbone:
    """A small ResNet with torchvision's names."""
    return ResidualBackbone((1, 1, 1, 1), width=2)


@pytest.fixture(scope="module")
def state() -> State:
    torch.manual_seed(7)
    return {**network().state_dict(), "fc.weight": torch.zeros(13, 16), "fc.bias": torch.zeros(13)}


def load(path: Path) -> ResidualBackbone:
    backbone = network()
    load_weights(backbone, path, "model.weights", (), "check model.name")
    return backbone


def body(state: State) -> State:
    return {name: tensor for name, tensor in state.items() if not name.startswith("fc.")}


def with_prefix(prefix: str, state: State) -> State:
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


def moved(state: State) -> State:
    return {name: tensor + 1 for name, tensor in state.items()}


def with_head(name: str, state: State) -> State:
    return {**body(state), f"{name}weight": torch.zeros(3, 512), f"{name}bias": torch.zeros(3)}


FILES: dict[str, Callable[[State], Any]] = {
    "plain": lambda state: state,
    "module": lambda state: with_prefix("module.", state),
    "backbone": lambda state: with_prefix("backbone.", body(state)),
    "encoder": lambda state: with_prefix("encoder.", body(state)),
    "module.encoder": lambda state: with_prefix("module.encoder.", body(state)),
    "backbone and head": lambda state: with_head("head.", with_prefix("backbone.", body(state))),
    "encoder and another part": lambda state: (
        with_prefix("encoder.", body(state)) | {"projector.0.weight": Tensor([1])}
    ),
    "classifier": lambda state: with_head("classifier.", state),
    "state_dict": lambda state: {"state_dict": state, "epoch": 3, "optimizer": {"lr": 0.1}},
    "model": lambda state: {"model": state, "args": Namespace(arch="resnet18")},
    "teacher": lambda state: {"student": {}, "teacher": with_prefix("module.backbone.", body(state)), "epoch": 1},
    "a prefix of nobody": lambda state: with_prefix("whatever.inner.", state),
    "torch.compile": lambda state: with_prefix("_orig_mod.", state),
    "an underscore": lambda state: with_prefix("net_", state),
    "a suffix": lambda state: {f"{name}_ema": tensor for name, tensor in state.items()},
    "an entry of nobody": lambda state: {"student_weights": {"ema": state}, "epoch": 3, "optimizer": {0: Tensor([1])}},
    "the same network twice": lambda state: {"model": state, "ema": with_prefix("module.", state)},
    "Lightning": lambda state: {"state_dict": with_prefix("model.", state), "global_step": 1},
}


@pytest.mark.parametrize("suffix", [".pth.tar", ".bin", ".safetensors", ""])
def test_a_file_is_known_by_its_bytes(suffix: str, state: State, tmp_path: Path) -> None:
    for format_of_zip in (True, False):  # the old format of torch too
        torch.save(state, tmp_path / f"saved{suffix}", _use_new_zipfile_serialization=format_of_zip)
        check_same(load(tmp_path / f"saved{suffix}"), state)
    save_file(with_prefix("module.", state), tmp_path / f"safe{suffix}")
    check_same(load(tmp_path / f"safe{suffix}"), state)


@pytest.mark.parametrize("kind", FILES)
def test_weights_are_found_in_the_file(kind: str, state: State, tmp_path: Path) -> None:
    torch.save(FILES[kind](state), tmp_path / "file.pth")
    check_same(load(tmp_path / "file.pth"), state)


def check_same(backbone: ResidualBackbone, state: State) -> None:
    found = backbone.state_dict()
    for name, tensor in body(state).items():
        assert torch.equal(found[name], tensor), name


class Transformer(nn.Module):
    """Its names begin with encoder, as torchvision's do."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(2, 2)
        self.ln = nn.LayerNorm(2)


def test_names_of_the_network_itself_are_no_prefixes(tmp_path: Path) -> None:
    saved, started = Transformer(), Transformer()
    torch.save(with_prefix("module.", saved.state_dict()), tmp_path / "saved.pth")
    load_weights(started, tmp_path / "saved.pth", "model.weights", (), "")
    assert torch.equal(saved.encoder.weight, started.encoder.weight)


def test_a_header_whose_length_looks_like_a_pickle_is_safetensors(tmp_path: Path) -> None:
    for length in range(20, 400):
        save_file({"x": torch.zeros(1)}, tmp_path / "weights.pth", {"note": "n" * length})
        if (tmp_path / "weights.pth").read_bytes()[0] == 0x80:
            break
    with pytest.raises(ModelError, match="belongs to another network: it lacks"):
        load(tmp_path / "weights.pth")


def test_what_was_taken_dropped_and_missing_is_said(
    state: State, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    without = {name: tensor for name, tensor in body(state).items() if not name.endswith("num_batches_tracked")}
    torch.save(with_head("classifier.", without), tmp_path / "file.th")
    with caplog.at_level(logging.WARNING):
        load(tmp_path / "file.th")
    (message,) = [record.getMessage() for record in caplog.records]
    assert f"model.weights={tmp_path / 'file.th'}: {len(without)} tensors are taken" in message
    assert "dropped: classifier.bias, classifier.weight; missing: bn1.num_batches_tracked" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(value: float, state: State, tmp_path: Path) -> None:
    spoilt = {name: tensor.clone() for name, tensor in state.items()}
    spoilt["layer2.0.bn1.running_var"][3] = value
    torch.save(spoilt, tmp_path / "file.pth")
    with pytest.raises(ModelError, match=r"values that are not finite in layer2\.0\.bn1\.running_var"):
        load(tmp_path / "file.pth")
    spoilt["layer2.0.bn1.running_var"][3] = 1
    spoilt["fc.weight"][0] = value
    torch.save(spoilt, tmp_path / "head.pth")
    load(tmp_path / "head.pth")  # the classifier is not taken


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda state: {"epoch": 3, "weights": 1}, "it holds epoch, weights, and no tensors by name"),
        (lambda state: [state], "is no state dict"),
        (lambda state: state | {"layer1.2.conv1.weight": torch.zeros(1)}, "unknown tensors layer1.2.conv1.weight"),
        (lambda state: state | {"conv1.weight": torch.zeros(3, 3)}, "other shapes for conv1"),
        (
            lambda state: with_prefix("encoder.", state) | with_prefix("backbone.", moved(state)),
            "holds 2 networks that fit; keep one",
        ),
    ],
    ids=["no state dict", "a list", "another depth", "another shape", "two networks"],
)
def test_what_does_not_fit_is_named(
    content: Callable[[State], Any], message: str, state: State, tmp_path: Path
) -> None:
    torch.save(content(state), tmp_path / "file.pth")
    with pytest.raises(ModelError, match=message):
        load(tmp_path / "file.pth")


TWO: dict[str, Callable[[State], Any]] = {
    "a mean beside it": lambda state: {"state_dict": state, "ema": with_prefix("module.", moved(state))},
    "student and teacher": lambda state: {"args": Namespace(), "student": state, "teacher": moved(state)},
    "query and key": lambda state: (
        with_prefix("module.encoder_q.", state) | with_prefix("module.encoder_k.", moved(state))
    ),
    "with and without a prefix": lambda state: state | with_prefix("momentum.", moved(state)),
    "with and without a suffix": lambda state: state | {f"{name}_ema": item + 1 for name, item in state.items()},
}


SAVED = [*((kind, False) for kind in TWO), ("query and key", True), ("with and without a suffix", True)]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "safe"), SAVED)
def test_of_two_networks_one_is_kept_by_the_command_that_is_named(
    kind: str, safe: bool, state: State, tmp_path: Path
) -> None:
    write = save_file if safe else torch.save
    write(TWO[kind](state), tmp_path / "file.pth")
    with pytest.raises(ModelError, match="holds 2 networks that fit") as told:
        load(tmp_path / "file.pth")
    means: set[float] = set()
    for command, target in re.findall(r"(\S+ -P -c .*?) and model\.weights=(\S+?)(?:;|$)", str(told.value)):
        words = shlex.split(command)
        subprocess.run(words, check=True)
        means.add(round(float(load(Path(target)).state_dict()["conv1.weight"].mean()), 3))
    assert means == {round(float(each["conv1.weight"].mean()), 3) for each in (state, moved(state))}


def test_half_a_file_is_refused(state: State, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(save(state)[:1000])
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        load(tmp_path / "file")
