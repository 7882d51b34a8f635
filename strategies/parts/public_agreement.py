"""Agreement on public images: clients say what their models make of them and learn from the mean (FCCL+)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Literal

import torch
from torch import Tensor

from common.config import AtLeastTwo, Positive, Share, check, checked
from common.data.public import PublicImages, fingerprint
from common.data.textures import Textures
from common.errors import DataError
from common.losses import pairwise_similarities
from common.seeding import generator
from strategies.core.method import Averaging, Local, Server, Update

TABLES = ("logits", "similarities")


@checked
class PublicAgreement(Averaging):
    """What clients say of public images: logits ``[N, K]`` and similarities ``[N, public_batch - 1]``.

    Args:
        public: the public images, from any data set; every device must read the same ones.
        public_batch: images per public step, >= 2; divides ``public.samples``.
        public_learning_rate: of Adam, made anew for each batch, > 0.
        public_rate_end: share of that rate that the last round has, in (0, 1]; the rate falls linearly over the rounds.
            1 keeps it, the released code has 0.1.
        public_mode: batch norm in the public phase: ``eval`` keeps the private data's statistics; ``train`` uses and
            moves to those of the public images, as the released code does, which suits only images like the own ones.
        similarity_temperature: > 0.
    """

    public: PublicImages = field(default_factory=lambda: PublicImages(Textures(), "textures"))
    public_batch: AtLeastTwo = 128
    public_learning_rate: Positive = 1e-3
    public_rate_end: Share = 1.0
    public_mode: Literal["eval", "train"] = "eval"
    similarity_temperature: Positive = 0.02

    def __post_init__(self) -> None:
        fits = self.public.samples % self.public_batch == 0
        check(fits, f"public_batch={self.public_batch} must divide public.samples={self.public.samples}")

    @property
    def scheduled(self) -> bool:
        """The public learning rate may fall over all rounds."""
        return self.public_rate_end < 1

    def public_rate(self, round_number: int, rounds: int) -> float:
        """Return the public learning rate of a round, from 1 to ``rounds``."""
        done = (round_number - 1) / max(rounds - 1, 1)
        return self.public_learning_rate * (1 - (1 - self.public_rate_end) * done)

    def public_batches(self, local: Local) -> list[Tensor]:
        """The public images in batches, weakly augmented by the data set's own means: equal on every device."""
        images = self.public.load(local.data_root).to(local.device)
        draws = generator(local.seed, "public images", local.round)
        return list(local.prepare(images, draws).split(self.public_batch))

    @torch.no_grad()
    def public_answers(self, local: Local) -> dict[str, Tensor]:
        """What the model says of the public images, and of which images it speaks."""
        answers = [local.model(images) for images in self.public_batches(local)]
        similar = [pairwise_similarities(features, temperature=self.similarity_temperature) for features, _ in answers]
        return {
            "logits": torch.cat([logits.float() for _, logits in answers]),
            "similarities": torch.cat(similar).float(),
            "images": fingerprint(self.public.load(local.data_root)),
        }

    def public_steps(self, local: Local) -> None:
        """Take one step of Adam per public batch towards the clients' means.

        A fresh Adam's first step has the length of the learning rate in every element with a gradient, however small.
        The correlation's gradient of ``head.bias`` is zero, since columns are centred. What arithmetic leaves of it is
        rounding noise, and Adam makes steps of it.
        """
        rate = self.public_rate(local.round, local.rounds)
        local.model.train(self.public_mode == "train")
        means = (local.extra[name].split(self.public_batch) for name in TABLES)
        for images, *wanted in zip(self.public_batches(local), *means, strict=True):
            optimizer = torch.optim.Adam(local.model.parameters(), lr=rate)
            optimizer.zero_grad(set_to_none=True)
            self.public_loss(*local.model(images), *wanted).backward()
            optimizer.step()

    def public_loss(self, features: Tensor, logits: Tensor, mean_logits: Tensor, mean_similarities: Tensor) -> Tensor:
        """The loss of one public batch."""
        raise NotImplementedError

    def check_images(self, local: Local) -> None:
        """Raise ``DataError`` unless the means are of the images that this device has."""
        if int(local.extra["images"]) != int(fingerprint(self.public.load(local.data_root))):
            raise DataError("the public images here are not those of the other clients; give every device the same")

    def agreed(self, updates: Sequence[Update], server: Server) -> Mapping[str, Tensor]:
        """The plain means over the clients that have the same public images."""
        common = Counter(int(update.extra["images"]) for update in updates).most_common(1)[0][0]
        chosen = [update.extra for update in updates if int(update.extra["images"]) == common]
        tables = [{name: extra[name] for name in TABLES} for extra in chosen]
        if server.aggregation.robust:
            means = server.aggregation.combine(tables, [1.0] * len(tables))
        else:
            means = {name: torch.stack([table[name] for table in tables]).double().mean(0).float() for name in TABLES}
        return {**means, "images": chosen[0]["images"]}
