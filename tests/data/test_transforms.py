"""Transforms of the user's own: what they change, that their draws repeat, and what is refused."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.own import forget
from support.runs import BackwardsEngine, run
from support.toy import Toy, toy_settings

from common.choices import trust
from common.config import to_config
from common.data.batches import Augmentation
from common.data.transforms import Transform
from common.errors import ConfigError
from common.numerics import generator
from common.settings import RunSettings, load_settings, settings_of
from server.engines.inline import InlineEngine

MINE = """
import random

import numpy as np
import torch
from torch import nn
from torchvision.transforms import v2


class Noise(nn.Module):
    def __init__(self, strength=20.0):
        super().__init__()
        self.strength = strength

    def forward(self, image):
        shift = self.strength * (random.random() + np.random.rand())
        noise = self.strength * torch.randn(image.shape, device=image.device)
        return (image + shift + noise).clamp(0, 255).to(torch.uint8)


both = v2.Compose([v2.RandomInvert(0.5), v2.ColorJitter(brightness=0.5)])
scaled = v2.ToDtype(torch.float32, scale=True)
smaller = v2.Resize(8)
number = 3


class Bright(nn.Module):
    def forward(self, image):
        if image.float().mean() > 200:
            raise RuntimeError("too bright")
        return image


class InPlace(nn.Module):
    def forward(self, image):
        image += 20
        return image


def halved(image):
    return image // 2
"""
RANDOM_INVERT = Transform("torchvision.transforms.v2.RandomInvert", {"p": 0.5})


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield "mine"
    forget("mine")


def images(count: int = 12) -> torch.Tensor:
    return torch.randint(256, (count, 3, 8, 8), generator=generator(0, "images"), dtype=torch.uint8)


def test_each_image_has_draws_of_its_own_and_the_global_generators_stay() -> None:
    before, numbers = torch.get_rng_state(), random.getstate()
    changed = RANDOM_INVERT(images(64), generator(0, "draw"))
    inverted = [torch.equal(one, 255 - other) for one, other in zip(changed, images(64), strict=True)]
    kept = [torch.equal(one, other) for one, other in zip(changed, images(64), strict=True)]
    assert all(one != other for one, other in zip(inverted, kept, strict=True))
    assert 10 < sum(inverted) < 54
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == numbers


def test_it_comes_before_the_data_s_augmentation_whose_draws_stay_as_they_were() -> None:
    plain = Augmentation(crop_padding=2, flip=True, rotation=10.0, erasing=0.5)
    both = replace(plain, transform=Transform("torchvision.transforms.v2.RandomInvert", {"p": 1.0}))
    expected = plain.train(255 - images(), generator(0, "draw"))
    assert torch.equal(both.train(images(), generator(0, "draw")), expected)
    assert torch.equal(both.test(images()), plain.test(images())), "test images are left alone"
    assert both.random


def test_draws_repeat_whatever_was_drawn_before(mine: str) -> None:
    trust(["mine.Noise"])
    noise = Transform("mine.Noise", {"strength": 40.0})
    first = noise(images(), generator(0, "draw", 1))
    torch.rand(5)
    random.random()
    np.random.rand()  # noqa: NPY002
    assert torch.equal(noise(images(), generator(0, "draw", 1)), first)
    assert not torch.equal(noise(images(), generator(0, "draw", 2)), first)


# ---- runs ------------------------------------------------------------------------------------------------------------


def settings(folder: Path, transform: Transform | None, workers: int = 1) -> RunSettings:
    data = Toy(augmentation=Augmentation(crop_padding=1, mean=(0.5,), std=(0.25,), transform=transform))
    return toy_settings("fedavg", folder, data=data, engine={"workers": workers})


def test_a_run_repeats_whatever_the_order_of_the_clients_and_in_threads(mine: str, tmp_path: Path) -> None:
    trust(["mine.Noise"])
    noise = Transform("mine.Noise")
    states: dict[str, str] = {}
    for name, transform, engine, workers in (
        ("first", noise, InlineEngine, 1),
        ("backwards", noise, BackwardsEngine, 1),
        ("threads", noise, InlineEngine, 3),
        ("without", None, InlineEngine, 1),
    ):
        chosen = settings(tmp_path / name, transform, workers)
        states[name] = run(chosen, engine(chosen)).sha256
    assert states["first"] == states["backwards"] == states["threads"] != states["without"]


# ---- by its name -----------------------------------------------------------------------------------------------------

NAME = "data.augmentation.transform"


@pytest.mark.parametrize(
    ("words", "node"),
    [
        ([f"{NAME}=mine.Noise", f"{NAME}.strength=9.5"], {"_target_": "mine.Noise", "strength": 9.5}),
        ([f"{NAME}._target_=mine.Noise"], {"_target_": "mine.Noise"}),
        ([f"{NAME}={{_target_: mine.Noise, strength: 2}}"], {"_target_": "mine.Noise", "strength": 2}),
        ([f"{NAME}=mine.both"], {"_target_": "mine.both"}),
        (
            [f"{NAME}=torchvision.transforms.v2.ColorJitter", f"{NAME}.hue=[0.1,0.2]"],
            {"_target_": "torchvision.transforms.v2.ColorJitter", "hue": [0.1, 0.2]},
        ),
    ],
    ids=["class and argument", "target", "mapping", "object", "torchvision"],
)
def test_it_is_given_by_its_dotted_name(words: list[str], node: dict[str, object], mine: str) -> None:
    loaded = load_settings([*words, "data.augmentation.flip=true"])
    assert loaded.raw["data"]["augmentation"]["transform"] == node
    assert to_config(loaded.data)["augmentation"]["transform"] == node
    assert loaded.data.augmentation.crop_padding == 2, "the data set's other values stay"
    assert loaded.data.augmentation.flip
    assert settings_of(loaded.raw).identity == loaded.identity != load_settings([]).identity


MISTAKES = {
    "no module": ("mine.halved", [], "must be a class derived from torch.nn.Module, or an object of one.*a function"),
    "no such name": ("mine.Nois", [], "has no object Nois; did you mean 'Noise'.*both, scaled, smaller"),
    "no such package": ("nowhere.Noise", [], "put the module's folder on PYTHONPATH"),
    "no dotted name": ("blur", [], "blur is no dotted name; write package.module.NAME"),
    "torchvision's without its package": ("RandAugment", [], rf"{NAME}=torchvision.transforms.v2.RandAugment$"),
    "unknown argument": ("mine.Noise", [f"{NAME}.strenth=3"], "cannot be constructed: TypeError.*strenth.*NAME=VALUE"),
    "an object's argument": ("mine.both", [f"{NAME}.p=1"], "takes no arguments; leave out p"),
    "another type": ("mine.scaled", [], r"must return an image as it takes it.*returned float32 \[3, 32, 32\]"),
    "another size": ("mine.smaller", [], r"returned uint8 \[3, 8, 8\]"),
    "an error": ("mine.Noise", [f"{NAME}.strength=much"], "mine.Noise fails on an image.*TypeError"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_named_before_the_run(case: str, mine: str) -> None:
    name, more, reason = MISTAKES[case]
    with pytest.raises(ConfigError, match=reason):
        load_settings([f"{NAME}={name}", *more])


def test_an_image_that_it_fails_on_in_a_run_is_answered_with_its_name(mine: str) -> None:
    bright = load_settings([f"{NAME}=mine.Bright"]).data.augmentation.transform
    with pytest.raises(
        ConfigError, match=r"mine\.Bright fails on an image, uint8 \[3, 4, 4\]: RuntimeError: too bright"
    ):
        bright(torch.full((2, 3, 4, 4), 250, dtype=torch.uint8), generator(0))


def test_one_that_works_in_place_changes_no_other_view(mine: str) -> None:
    transform = load_settings([f"{NAME}=mine.InPlace"]).data.augmentation.transform
    images = torch.full((2, 3, 4, 4), 50, dtype=torch.uint8)
    for _ in range(2):
        assert torch.equal(transform(images, generator(0)), torch.full_like(images, 70))
    assert torch.equal(images, torch.full_like(images, 50))


def test_one_that_only_a_folder_names_is_not_imported(mine: str) -> None:
    raw = load_settings([f"{NAME}=mine.both"]).raw
    forget("mine")
    with pytest.raises(ConfigError, match="imported only if you name it"):
        settings_of(raw)


@pytest.mark.parametrize("key", ["augmentation", "transform", "data.transform"])
def test_another_name_for_it_is_answered_with_the_setting(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"did you mean {NAME}=mylib.Noise"):
        load_settings([f"{key}=mylib.Noise"])
