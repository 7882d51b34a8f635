"""Networks of different architectures on different clients, for methods that exchange no weights."""

from collections.abc import Collection, Sequence
from dataclasses import field
from pathlib import Path
from typing import ClassVar, Literal

import yaml
from torch import nn

from common.choices import CONF
from common.config import Count, build, check, checked, construct
from common.errors import ConfigError, nearest
from common.models.base import Model, initialised
from common.models.specs import ModelSpec
from common.regular_files import read_small


@checked
class Aligned(ModelSpec):
    """A network with features of a chosen size and one linear layer as classifier.

    A network that has them stays as it is. Another's features pass through a linear layer and a ReLU, so that they are
    non-negative like all features, and its classifier is replaced.

    Args:
        network: the network.
        features: size of the features, >= 1.
    """

    network: ModelSpec
    features: Count
    minimum_image_size: ClassVar[int] = 1

    def build(self, class_count: int, image_size: int, seed: int, classes: Sequence[str] = ()) -> Model:
        """Build the network and, where its features have another size, a projection to ``features``."""
        model = self.network.build(class_count, image_size, seed, classes)
        if model.feature_size == self.features and isinstance(model.head, nn.Linear):
            return model
        with initialised(seed, "projection"):
            projection = nn.Linear(model.feature_size, self.features)
            head = nn.Linear(self.features, class_count)
        backbone = nn.Sequential(model.backbone, projection, nn.ReLU())
        return Model(backbone, head, self.features, class_count)

    def _construct(self, class_count: int, image_size: int) -> Model:
        raise NotImplementedError("build makes it")


@checked
class Mixed(ModelSpec):
    """A network for each domain, all with features of one size; see :class:`Aligned`.

    A device can choose another one for itself: ``model="small"`` in its SuperNode's ``--node-config``. The server
    cannot average such models. The server exchanges prototypes or other statistics (FedProto, Tan et al., AAAI 2022,
    without averaging of models).

    Args:
        others: the network of every domain that ``networks`` does not name, a choice of ``model=`` or the mapping that
            describes one.
        networks: the network by domain, such as ``{dslr: small, caltech: resnet10}``.
        features: size of the features and prototypes, >= 1. A linear layer follows a network with another number.
    """

    others: ModelSpec | str = "small"
    networks: dict[str, ModelSpec | str] = field(default_factory=dict)
    features: Count = 128
    minimum_image_size: ClassVar[int] = 1
    channels_last = True
    pretrained: Path | None = field(default=None, init=False)
    freeze: Literal["none", "backbone"] = field(default="none", init=False)

    def __post_init__(self) -> None:
        for each in (self.others, *self.networks.values()):
            check(not isinstance(network(each), Mixed), "a network for a domain cannot be a mix of networks")

    def check_domains(self, domains: Collection[str]) -> None:
        """Check that ``networks`` names only domains of the run.

        Raises:
            ConfigError: it names another, whose network no client would train.
        """
        for domain in self.networks:
            if domain not in domains:
                raise ConfigError(f"model.networks: the run has no domain {domain!r}; {nearest(domain, domains)}")

    def with_network(self, domain: str, chosen: str) -> "Mixed":
        """Return the same mix with another network for a domain.

        Raises:
            ConfigError: there is no such network.
        """
        values = {"others": self.others, "features": self.features, "networks": {**self.networks, domain: chosen}}
        return construct(Mixed, values, "model")

    def name_of(self, domain: str) -> str:
        """Return the name of a domain's network, for people."""
        chosen = self.networks.get(domain, self.others)
        if isinstance(chosen, str):
            return chosen
        return type(chosen).__name__

    def of(self, domain: str) -> ModelSpec:
        """Return the network of a domain."""
        return Aligned(network=network(self.networks.get(domain, self.others)), features=self.features)

    def build(self, class_count: int, image_size: int, seed: int, classes: Sequence[str] = ()) -> Model:
        """Return the network of the other domains, in whose place the server uses its shapes alone."""
        return self.of("").build(class_count, image_size, seed, classes)

    def _construct(self, class_count: int, image_size: int) -> Model:
        raise NotImplementedError("build makes it")


def network(chosen: ModelSpec | str) -> ModelSpec:
    """Return the network that a choice of ``model=`` names.

    Raises:
        ValueError: there is no such choice.
    """
    if isinstance(chosen, ModelSpec):
        return chosen
    known = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))
    check(chosen in known, f"no network is called {chosen!r}; {nearest(chosen, known)}")
    spec = build(yaml.safe_load(read_small(CONF / "model" / f"{chosen}.yaml")), "model")
    assert isinstance(spec, ModelSpec)
    return spec
