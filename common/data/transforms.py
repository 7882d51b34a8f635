"""A transform of training images by its dotted name: one of torchvision's, or one of the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn

from common.config import checked, imported
from common.errors import ConfigError
from common.numerics import GLOBAL_GENERATORS, seeded_globals
from common.overrides import TRANSFORM


@checked
class Transform:
    """A random change of single training images, before the data's own augmentation.

    In a configuration it is ``_target_`` with the name, and the arguments beside it.

    Attributes:
        name: ``package.module.NAME`` of a class derived from ``torch.nn.Module``, such as
            ``torchvision.transforms.v2.RandAugment``, or of an object of such a class.
        arguments: what the class is constructed with; none for an object.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(cls, node: Mapping[str, Any], where: str) -> Self:
        """Return the transform that ``node`` describes.

        Raises:
            ConfigError: it cannot be imported or constructed, or is no module.
        """
        arguments = {str(key): value for key, value in node.items() if key != "_target_"}
        transform = cls(str(node["_target_"]), arguments)
        transform._check(where)
        return transform

    def as_config(self) -> dict[str, Any]:
        """Return the plain containers that describe the transform."""
        return {"_target_": self.name, **self.arguments}

    @cached_property
    def module(self) -> nn.Module:
        """The module that changes an image."""
        named = imported(self.name, TRANSFORM, _is_module)
        if isinstance(named, nn.Module):
            return named
        assert isinstance(named, type)
        module = named(**self.arguments)
        assert isinstance(module, nn.Module)
        return module

    def _check(self, where: str) -> None:
        if "." not in self.name:
            raise ConfigError(f"{where}: {self.name} is no dotted name; {_dotted(self.name, where)}")
        named = imported(self.name, where, _is_module)
        if not _is_module(named):
            raise ConfigError(
                f"{where}: {self.name} must be a class derived from torch.nn.Module, or an object of one, which takes "
                f"an image and returns it changed; it is a {type(named).__name__}"
            )
        if isinstance(named, nn.Module) and self.arguments:
            raise ConfigError(
                f"{where}: {self.name} is an object and takes no arguments; leave out {', '.join(self.arguments)}, or "
                "name a class"
            )
        try:
            _ = self.module
        except Exception as error:  # a class of the user's may raise anything
            raise ConfigError(
                f"{where}: {self.name} cannot be constructed: {type(error).__name__}: {error}; give its arguments as "
                f"{where}.NAME=VALUE"
            ) from error

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return the images, each changed with draws of its own.

        The global generators of PyTorch, NumPy and Python start from one draw of ``generator``. Other threads wait
        before they seed them again, so that the draws repeat with ``engine.workers``, too.

        Args:
            images: uint8 [B, 3, H, W] on any device.
            generator: a CPU generator.

        Raises:
            ConfigError: the transform fails, or returned something else than an image of the same size and type.
        """
        seed = int(torch.randint(2**63 - 1, (), generator=generator))
        changed: list[Tensor] = []
        with GLOBAL_GENERATORS, seeded_globals(seed, "transform"), torch.no_grad():
            for image in images:
                changed.append(self._changed(image))
        return torch.stack(changed)

    def _changed(self, image: Tensor) -> Tensor:
        shown = f"{TRANSFORM}={self.name}"
        try:
            changed = self.module(image.clone())  # one that works in place changes the images of no other view
        except Exception as error:  # a class of the user's may raise anything
            raise ConfigError(
                f"{shown} fails on an image, uint8 {list(image.shape)}: {type(error).__name__}: {error}"
            ) from error
        if isinstance(changed, Tensor) and changed.dtype == torch.uint8 and changed.shape == image.shape:
            return changed
        returned = type(changed).__name__
        if isinstance(changed, Tensor):
            returned = f"{str(changed.dtype).removeprefix('torch.')} {list(changed.shape)}"
        raise ConfigError(
            f"{shown} must return an image as it takes it, uint8 {list(image.shape)}; it returned "
            f"{returned}; leave out conversions and normalisation, which follow (data.augmentation.mean and std)"
        )

    def try_on(self, image_size: int) -> None:
        """Change one image of noise, before a run begins.

        Raises:
            ConfigError: the transform fails on it, or returns something else than an image.
        """
        draws = torch.Generator().manual_seed(0)
        images = torch.randint(256, (1, 3, image_size, image_size), generator=draws, dtype=torch.uint8)
        self(images, draws)


def _is_module(named: object) -> bool:
    return isinstance(named, nn.Module) or (isinstance(named, type) and issubclass(named, nn.Module))


def _dotted(name: str, where: str) -> str:
    """Return what to write instead of ``name``."""
    from torchvision.transforms import v2  # takes seconds to import

    if _is_module(getattr(v2, name, None)):
        return f"torchvision's is {where}=torchvision.transforms.v2.{name}"
    return "write package.module.NAME, such as torchvision.transforms.v2.RandAugment"
