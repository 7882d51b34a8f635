"""A federation that trains in a tenth of a second a round: three domains of 16x16 images in four classes, in memory."""

from __future__ import annotations

import json
import pydoc
from collections.abc import Mapping
from dataclasses import asdict, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
import yaml

from common.choices import CONF, trust
from common.config import checked
from common.data.batches import Augmentation, Split
from common.data.domain import DataSource, Domain
from common.numerics import generator
from common.settings import RunSettings, load_settings, with_method

CLASSES = 4
DOMAINS = ("bright", "dark", "noisy")
TRAIN = {"bright": 25, "dark": 24, "noisy": 18}
"""25 leaves a last batch of one sample with batches of eight; the noisy domain has no sample of the last class."""
_CONTRAST = {"bright": (200, 60), "dark": (20, 110), "noisy": (128, 50)}


@checked
class Toy(DataSource):
    """A class is the quadrant that differs from the ground; a domain is ground, contrast and noise."""

    name: ClassVar[str] = "toy"
    known_domains: ClassVar[tuple[str, ...]] = DOMAINS

    domains: tuple[str, ...] = DOMAINS
    image_size: int = 16
    augmentation: Augmentation = field(
        default_factory=lambda: Augmentation(crop_padding=1, flip=False, mean=(0.5,), std=(0.25,))
    )
    missing_class: bool = True

    @property
    def class_names(self) -> tuple[str, ...]:
        return ("upper left", "upper right", "lower left", "lower right")

    def _root(self, root: str | None = None) -> str | None:
        return None

    def _read(self, domain: str) -> Domain:
        lacks = domain == "noisy" and self.missing_class
        train = torch.arange(TRAIN[domain]) % (CLASSES - 1 if lacks else CLASSES)
        return Domain(
            domain, self._draw(domain, "train", train), self._draw(domain, "test", torch.arange(16) % CLASSES)
        )

    def _draw(self, domain: str, part: str, labels: torch.Tensor) -> Split:
        draws = generator(0, "toy", domain, part)
        ground, step = _CONTRAST[domain]
        half = self.image_size // 2
        images = torch.full((len(labels), 3, self.image_size, self.image_size), float(ground))
        for image, label in zip(images, labels.tolist(), strict=True):
            row, column = divmod(label, 2)
            image[:, row * half : (row + 1) * half, column * half : (column + 1) * half] += step
        noise = 40.0 if domain == "noisy" else 12.0
        images += noise * torch.randn(images.shape, generator=draws)
        return Split(images.clamp(0, 255).to(torch.uint8), labels)


@checked
class ChangedToy(Toy):
    """The toy data, in which some training images of one domain are their own negatives."""

    changed: tuple[int, ...] = (0,)
    changed_domain: str = "bright"

    def _read(self, domain: str) -> Domain:
        found = super()._read(domain)
        if domain != self.changed_domain:
            return found
        images = found.train.images.clone()
        images[list(self.changed)] = 255 - images[list(self.changed)]
        return replace(found, train=Split(images, found.train.labels))


def method_at_defaults(name: str) -> Any:
    """The method of ``conf/method/NAME.yaml`` as its class has it; to compose a configuration takes far longer."""
    target = yaml.safe_load((CONF / "method" / f"{name}.yaml").read_text())["_target_"]
    return pydoc.locate(target)()  # type: ignore[operator]  # a class


@lru_cache(maxsize=64)
def composed(*overrides: str) -> RunSettings:
    """Settings from ``conf/``, composed once per session."""
    return load_settings(list(overrides))


def toy_settings(
    method: str,
    output: Path,
    *,
    overrides: tuple[str, ...] = (),
    hyper: Mapping[str, Any] | None = None,
    data: DataSource | None = None,
    train: Mapping[str, Any] | None = None,
    rounds: Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
    **top: Any,
) -> RunSettings:
    """Settings of a run of ``method`` on :class:`Toy`, as ``conf/`` has them but for what is given here.

    Args:
        method: the stem of a file in ``conf/method``.
        output: the run's folder.
        overrides: further Hydra overrides.
        hyper: fields of the method.
        data: another data set.
        train, rounds, engine: fields of those groups.
        top: ``seed``, ``resume``, ``overwrite``.
    """
    base = composed(f"method={method}", "engine=inline", "train.device=cpu", *overrides)
    if base.method.multi_view and base.views.count == 0:
        base = composed(f"method={method}", "engine=inline", "train.device=cpu", "views=randconv", *overrides)
    data = data or Toy()
    small = {"rounds": 2, "epochs": 1, "batch_size": 8, "learning_rate": 0.05, **(train or {})}
    rounds, engine = dict(rounds or {}), dict(engine or {})
    raw = json.loads(json.dumps(base.raw))
    target = f"{type(data).__module__}.{type(data).__name__}"
    trust([target])  # as a person does who names it on the command line
    raw["data"] = {"_target_": target, **asdict(data)}
    raw["train"] |= small
    raw["rounds"] |= rounds
    raw["engine"] |= engine
    raw |= {"output": str(output), **top}
    raw["choices"]["data"] = "toy"
    settings = replace(
        base,
        data=data,
        train=replace(base.train, **small),
        rounds=replace(base.rounds, **rounds),
        engine=raw["engine"],
        output=str(output),
        raw=raw,
        **top,
    )
    return with_method(settings, replace(_shrunk(base.method), **(hyper or {})))


def attacked_settings(
    attack: str, method: str, output: Path, overrides: tuple[str, ...] = (), **more: Any
) -> RunSettings:
    """Settings of a run on :class:`Toy` in which ``dark-0`` is hostile; see :func:`toy_settings`."""
    chosen = (f"attack={attack}", "attack.clients=[signs-0]", *overrides)  # composed with the clients of glyphs
    settings = toy_settings(method, output, overrides=chosen, **more)
    raw = {**settings.raw, "attack": {**settings.raw["attack"], "clients": ["dark-0"]}}
    return replace(settings, attack=replace(settings.attack, clients=("dark-0",)), raw=raw)


def _shrunk(method: Any) -> Any:
    """A method's public images are as small and few as the private ones, and it has as many epochs of each kind."""
    if hasattr(method, "adversarial_epochs"):
        return replace(method, adversarial_epochs=1)
    if not hasattr(method, "public"):
        return method
    public = replace(method.public, samples=32, source=replace(method.public.source, image_size=16))
    return replace(method, public=public, public_batch=16)
