"""A run opened again from its folder: settings, state, models, data; for figures and measures after the fact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from common.config import compose_config
from common.data.domain import Split
from common.data.protocols import ClientSpec, test_subset
from common.errors import CheckpointError, ConfigError
from common.models.base import Model
from common.seeding import generator
from common.settings import RunSettings, settings_of
from common.storage.series import Series
from server.run.checkpoint import Checkpoint, Checkpoints
from server.run.conduct import read_summary
from server.run.prototype_log import Page, read_pages
from strategies.core.federation import Federation
from strategies.core.method import Method

EVALUATION_BATCH = 256
_KEPT_MODEL = "model/"  # how a device names the unshared part of its model in its own state


@dataclass(frozen=True)
class Run:
    """A finished run.

    Args:
        folder: where it was written.
        settings: what it was.
        summary: its ``summary.json``.
    """

    folder: Path
    settings: RunSettings
    summary: Mapping[str, Any]

    @classmethod
    def open(cls, folder: Path | str) -> Run:
        """Read a run's folder.

        Raises:
            ConfigError: the folder holds no finished run, or its configuration is of another version of Goldfinch.
        """
        folder = Path(folder)
        summary = read_summary(folder)
        try:
            raw = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
        except OSError as error:
            raise ConfigError(f"{folder}: config.yaml is missing") from error
        if not isinstance(raw, dict):
            raise ConfigError(f"{folder / 'config.yaml'} is not a run's configuration")
        whole = {str(key): value for key, value in raw.items()}
        defaults = compose_config([])["rounds"]
        whole["rounds"] = {**defaults, **whole.get("rounds", {})}  # keys that are newer than the run
        return cls(folder, settings_of({**whole, "output": str(folder)}), summary)

    @property
    def method(self) -> Method:
        """The run's method."""
        method: Method = self.settings.method
        return method

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The newest checkpoint.

        Raises:
            CheckpointError: there is none.
        """
        found = Checkpoints(self.folder / "checkpoint").load()
        if found is None:
            raise CheckpointError(f"{self.folder} has no checkpoint: the model is gone; run it again")
        return found

    @cached_property
    def federation(self) -> Federation:
        """The server's side: who the clients are, how the model is made."""
        return Federation(self.settings)

    @cached_property
    def clients(self) -> tuple[ClientSpec, ...]:
        """The run's clients."""
        specs: tuple[ClientSpec, ...] = self.settings.protocol.clients(self.settings.data)
        return specs

    @property
    def test_domains(self) -> tuple[str, ...]:
        """The domains that were scored."""
        domains: tuple[str, ...] = tuple(self.settings.protocol.test_domains(self.settings.data))
        return domains

    def pages(self) -> list[Page]:
        """The prototypes of the rounds that were kept."""
        return read_pages(self.folder / "prototypes")

    def model(self, client: str | None = None) -> Model:
        """The global model, or, where methods leave parts of it on devices, a client's; in evaluation mode.

        Args:
            client: a client's id; ``None`` is the first.

        Raises:
            CheckpointError: the client's part is not in the run's folder, as after a run on real devices.
        """
        model = self.federation.server.new_model()
        assert isinstance(model, Model)
        state = {**model.state_dict(), **self.checkpoint.state.weights}
        if self.method.shared_names(model) != set(model.state_dict()):
            state |= self.kept(client or self.clients[0].id)
        model.load_state_dict(state)
        return model.eval().requires_grad_(False)

    def kept(self, client: str) -> dict[str, Tensor]:
        """The part of its model that a client kept.

        Raises:
            CheckpointError: it is not in the run's folder.
        """
        folder = self.folder / "clients" / self.checkpoint.run / client
        tensors = Series(folder, "state").newest(lambda entry: entry.tensors)
        if tensors is None:
            raise CheckpointError(f"{client}'s own state is not in {folder}: it stays on the device where it was made")
        return {name[len(_KEPT_MODEL) :]: tensors[name] for name in tensors if name.startswith(_KEPT_MODEL)}

    def model_for(self, domain: str) -> Model:
        """The model that was scored on ``domain``: the global one, or its first client's."""
        own = next((spec.id for spec in self.clients if spec.domain == domain), None)
        return self.model(own)

    def test_split(self, domain: str) -> Split:
        """What was scored of a domain."""
        split: Split = self.settings.protocol.test_split(self.settings.data.load(domain))
        return test_subset(split, self.settings.rounds.test_samples, domain)

    def train_split(self, client: ClientSpec) -> Split:
        """A client's training samples."""
        domain = self.settings.data.load(client.domain)
        return domain.train.subset(self.settings.protocol.split(domain, client, self.settings.seed))

    def sample(self, domain: str, count: int) -> Split:
        """At most ``count`` test images of a domain, classes in turn, the same every time."""
        split = self.test_split(domain)
        order = torch.randperm(len(split), generator=generator(0, "figure", domain))
        labels = split.labels[order]
        turn = torch.zeros(len(order), dtype=torch.int64)
        for label in labels.unique():
            members = (labels == label).nonzero().squeeze(1)
            turn[members] = torch.arange(len(members))
        return split.subset(order[torch.argsort(turn, stable=True)][:count])

    @torch.no_grad()
    def features(self, model: Model, split: Split) -> tuple[Tensor, Tensor]:
        """Features ``[N, D]`` and logits ``[N, K]`` of a split's images as for testing."""
        augmentation = self.settings.data.augmentation
        passes = [model(augmentation.test(images)) for images in split.images.split(EVALUATION_BATCH)]
        return torch.cat([features for features, _ in passes]), torch.cat([logits for _, logits in passes])
