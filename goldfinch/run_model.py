"""A run's model and data: its checkpoint, the nets with its weights, its prototypes, and the images of its clients.

:mod:`goldfinch.record` reads everything else of a run, and imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from common.data.batches import Split, union_of
from common.data.protocols import ClientSpec, test_subset
from common.errors import CheckpointError, ConfigError
from common.exports.model import kept_part, without_paths, without_training_parts
from common.models.base import Model
from common.numerics import generator
from common.settings import RunSettings, settings_of
from common.storage import folder_name
from goldfinch.exports.formats import BATCH
from goldfinch.record import RunRecord
from server.run.accounting import LEDGER, ReleaseCounts, privacy_report
from server.run.checkpoint import BEST, Checkpoint, Checkpoints
from server.run.prototype_log import Page, read_pages
from strategies.core.federation import Federation
from strategies.core.method import Method


class RunModel:
    """The checkpoint, the model and the data of a run.

    Args:
        record: the run's record.
        chosen: the round of the model: ``last``, ``best`` by validation, or a round's number.
    """

    def __init__(self, record: RunRecord, chosen: str = "last") -> None:
        self.record = record
        self.folder = record.folder
        self.chosen = chosen

    @cached_property
    def settings(self) -> RunSettings:
        """The run's settings as objects, without files that training started from: the weights replace those anyway."""
        config = self.record.trusted_config
        model = without_paths(config.get("model"), "model")
        return settings_of({**config, "model": model, "output": str(self.folder)})

    @property
    def method(self) -> Method:
        """The run's method."""
        return self.settings.method

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint of the chosen round.

        Raises:
            CheckpointError: there is no such checkpoint.
            ConfigError: ``best`` was chosen, but the run keeps no best round; or the choice is not valid.
        """
        kept = Checkpoints(self.folder / "checkpoint")
        if self.chosen.isascii() and self.chosen.isdecimal():
            return kept.at(int(self.chosen))
        if self.chosen not in ("best", "last"):
            raise ConfigError(f"round {self.chosen!r}: choose best, last or a round's number")
        if self.chosen == "best" and not self.has_best:
            raise ConfigError(
                f"{self.folder} keeps no best round: run again with protocol.validation set to a share of the training "
                "images, by which it is chosen, or take round last"
            )
        if self.chosen == "best":
            kept = Checkpoints(self.folder / "checkpoint", kind=BEST)
        checkpoint = kept.load()
        if checkpoint is None:
            raise CheckpointError(
                f"{self.folder} has no checkpoint: it stopped before its first, or that was deleted; run it again"
            )
        chosen = self.record.summary.get("validation", {}).get("round")
        if self.chosen == "best" and chosen not in (None, checkpoint.state.round):
            raise CheckpointError(
                f"{self.folder}: the best round by validation is {chosen}, and the model that is kept as the best is "
                f"of round {checkpoint.state.round}; round last takes the newest model"
            )
        return checkpoint

    @property
    def has_best(self) -> bool:
        """Whether the run kept the best round by validation."""
        return bool(Checkpoints(self.folder / "checkpoint", kind=BEST).series.numbers())

    @cached_property
    def pages(self) -> Sequence[Page]:
        """The prototypes of the rounds that were kept."""
        return read_pages(self.folder / "prototypes")

    def privacy(self) -> Mapping[str, Any] | None:
        """Return what the run has released, at its end or so far; ``None`` without differential privacy."""
        end = self.record.facts.end
        if end is not None:
            return end.privacy
        if not (self.folder / LEDGER).exists():
            return None
        samples = {client: int(entry["samples"]) for client, entry in self.record.facts.registrations.items()}
        return privacy_report(self.settings, ReleaseCounts(self.folder), samples)

    @cached_property
    def federation(self) -> Federation:
        """The server's half of the method, which makes the model."""
        return Federation(self.settings)

    @cached_property
    def clients(self) -> tuple[ClientSpec, ...]:
        """The run's clients."""
        return self.settings.clients

    @property
    def test_domains(self) -> tuple[str, ...]:
        """The domains that were scored."""
        return tuple(self.settings.protocol.test_domains(self.settings.data))

    def shared_model(self, client: str | None = None) -> tuple[Model, dict[str, Tensor]]:
        """Return the net that classifies, with initial weights, and the shared weights of the chosen round.

        Args:
            client: the client whose net it is, where clients may have different ones; ``None`` is the first.

        Raises:
            CheckpointError: they are not weights of this net.
        """
        self.federation.check_fits(self.checkpoint.state)
        domain = (client or self.clients[0].id).rpartition("-")[0]
        model = without_training_parts(self.federation.new_model(domain))
        return model, _selected(self.method.scored_weights(self.checkpoint.state), model)

    def model(self, client: str | None = None) -> Model:
        """Return the model as it was scored, in evaluation mode.

        The model is the global one, or a client's if the method keeps a part of the model on the clients.

        Args:
            client: a client's id; ``None`` is the first.

        Raises:
            CheckpointError: the client's part is not in the run's folder, as after a run on real devices.
        """
        model, state = self.shared_model(client)
        if len(state) < len(model.state_dict()):
            state |= _selected(self.kept(client or self.clients[0].id), model)
        model.load_state_dict(state)
        return model.eval().requires_grad_(False)

    def inference(self, client: str | None = None) -> nn.Module:
        """Return the module that classifies with :meth:`model`: from prepared images to features and logits."""
        return self.method.inference(self.model(client), self.checkpoint.state.prototypes, self.settings.seed).eval()

    def kept(self, client: str) -> dict[str, Tensor]:
        """Return the part of its model that is a client's own.

        Raises:
            CheckpointError: it is not in the run's folder.
        """
        own = self.folder / "clients" / self.checkpoint.run / folder_name(client)
        place = sorted(spec.id for spec in self.clients).index(client)
        extra = self.checkpoint.state.extra
        return kept_part(own, self.checkpoint.counted.get(client), self.method, extra, place)

    def model_for(self, domain: str) -> Model:
        """Return the model that was scored on ``domain``: the global model, or that of the domain's first client."""
        for spec in self.clients:
            if spec.domain == domain:
                return self.model(spec.id)
        return self.model()

    def test_split(self, domain: str) -> Split:
        """Return the images of a domain that were scored."""
        split: Split = self.settings.protocol.test_split(self.settings.data.load(domain))
        return test_subset(split, self.settings.rounds.test_samples, domain)

    def train_split(self, client: ClientSpec) -> Split:
        """Return the samples that a client trained on."""
        return self._parts(client)[0]

    def validation_split(self, client: ClientSpec) -> Split:
        """Return a client's validation samples; empty if ``protocol.validation`` is 0."""
        return self._parts(client)[1]

    def _parts(self, client: ClientSpec) -> tuple[Split, Split]:
        """Return a client's training samples and its validation samples."""
        training: list[Split] = []
        validation: list[Split] = []
        for spec in client.holds:
            domain = self.settings.data.load(spec.domain)
            trained, validated = self.settings.protocol.parts(domain, spec, self.settings.seed)
            training.append(domain.train.subset(trained))
            validation.append(domain.train.subset(validated))
        return union_of(training), union_of(validation)

    def sample(self, domain: str, count: int) -> Split:
        """Return at most ``count`` test images of a domain, classes in turn; every call returns the same."""
        return in_turn(self.test_split(domain), count, domain)

    def features(self, model: Model, split: Split) -> tuple[Tensor, Tensor]:
        """Return features ``[N, D]`` and logits ``[N, K]`` of a split's images, prepared as for testing."""
        augmentation = self.settings.data.augmentation
        features, logits = [], []
        with torch.no_grad():
            for images in split.images.split(BATCH):
                outputs = model(augmentation.test(images))
                features.append(outputs[0])
                logits.append(outputs[1])
        return torch.cat(features), torch.cat(logits)


def in_turn(split: Split, count: int, name: str) -> Split:
    """Return at most ``count`` images of a split, classes in turn; for a name, every call returns the same."""
    order = torch.randperm(len(split), generator=generator(0, "figure", name))
    labels = split.labels[order]
    turn = torch.zeros(len(order), dtype=torch.int64)
    for label in labels.unique():
        members = (labels == label).nonzero().squeeze(1)
        turn[members] = torch.arange(len(members))
    return split.subset(order[torch.argsort(turn, stable=True)][:count])


def _selected(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return those of ``tensors`` that ``model`` has, in the model's order."""
    return {name: tensors[name] for name in model.state_dict() if name in tensors}
