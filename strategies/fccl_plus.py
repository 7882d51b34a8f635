"""FCCL+: Generalizable Heterogeneous Federated Cross-Correlation and Instance Similarity Learning.

Wenke Huang, Mang Ye, Zekun Shi, Bo Du. TPAMI 2023. arXiv:2309.16286.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from common.config import AtLeastTwo, NonNegative, Positive, Search, check, checked
from common.data.public import PublicImages, fingerprint
from common.data.textures import Textures
from common.errors import ConfigError, DataError, PayloadError
from common.numerics import generator, unit_vectors, working_dtype
from common.settings import RunSettings
from common.storage import GlobalState, under_prefix, with_prefix
from strategies.core.method import (
    Averaging,
    Batch,
    ClientContext,
    Download,
    Losses,
    ServerContext,
    Trained,
    Update,
    Upload,
    UploadSpec,
    Weighting,
)
from strategies.core.readings import Point

OWN = "own/"
"""Prefix of the client's trained model among the tensors that it keeps."""

AVERAGED = ("logits", "similarities")
"""The tensors about the public images that the server averages."""

SLACK = 1 + 2**-7
"""How far a similarity may exceed that of equal features: ``rounds.transport=bfloat16`` rounds up by up to 2^-8."""

# ---- losses ----------------------------------------------------------------------------------------------------------


def nontarget_distillation(
    logits: Tensor, teacher_logits: Tensor, labels: Tensor, *, temperature: float = 3.0
) -> Tensor:
    """Return ``T^2 sum_{c != y} q_c (log q_c - log p_c)``, mean over the batch.

    ``p, q`` are the softmax at ``temperature`` T of ``logits`` and of the previous model's ``teacher_logits`` (a
    constant), both ``[B, K]``. The softmax is not normalised again over the non-target classes.
    """
    dtype = working_dtype(logits)
    student = torch.log_softmax(logits.to(dtype) / temperature, 1)
    teacher = torch.log_softmax(teacher_logits.detach().to(dtype) / temperature, 1)
    terms = teacher.exp() * (teacher - student)
    return temperature**2 * terms.scatter(1, labels[:, None], 0.0).sum(1).mean()


def cross_correlation(logits: Tensor, mean_logits: Tensor, *, off_diagonal: float = 0.0051) -> Tensor:
    """Return ``sum_c (R_cc - 1)^2 + off_diagonal * sum_{c != c'} (R_cc' + 1)^2`` on public data.

    ``R = Y^T Ybar / B`` of the column-standardised (unbiased deviation) ``logits [B, K]`` and ``mean_logits [B, K]``,
    the mean over clients (a constant). A column without variation counts as zeros.

    Raises:
        ValueError: fewer than two samples.
    """
    if len(logits) < 2:
        raise ValueError(f"cross_correlation needs at least 2 samples; got {len(logits)}")
    dtype = working_dtype(logits)
    ours, theirs = _standardised(logits.to(dtype)), _standardised(mean_logits.detach().to(dtype))
    correlation = ours.T @ theirs / len(logits)
    eye = torch.eye(len(correlation), dtype=dtype, device=logits.device)
    penalties = eye * (correlation - 1.0).square() + (1.0 - eye) * off_diagonal * (correlation + 1.0).square()
    return penalties.sum()


def _standardised(columns: Tensor) -> Tensor:
    centred = columns - columns.mean(0)
    deviation = columns.var(0).clamp_min(0.0)
    varies = deviation > torch.finfo(columns.dtype).tiny
    return centred * torch.where(varies, deviation.where(varies, 1.0).rsqrt(), 0.0)


def pairwise_similarities(features: Tensor, *, temperature: float = 0.02) -> Tensor:
    """Return ``[B, B - 1]``: cosines between ``features [B, D]`` over ``temperature``, without the diagonal."""
    direction = unit_vectors(features.to(working_dtype(features)))
    count = len(direction)
    similarities = direction @ direction.T / temperature
    # Dropping the diagonal of a square matrix: read from the second entry, B - 1 rows of B + 1, without their last.
    return similarities.flatten()[1:].view(count - 1, count + 1)[:, :-1].reshape(count, count - 1)


def similarity_distillation(
    features: Tensor, mean_similarities: Tensor, *, temperature: float = 0.02, scale: float = 3.0
) -> Tensor:
    """Return ``scale * KL(softmax(mean similarities) || softmax(own similarities))``, mean over the batch.

    Args:
        features: ``[B, D]`` of public samples.
        mean_similarities: ``[B, B - 1]``, mean over clients of :func:`pairwise_similarities` (a constant).
        temperature: of the similarities, > 0.
        scale: FCCL+'s ``dis_power``.

    Raises:
        ValueError: fewer than two samples.
    """
    if len(features) < 2:
        raise ValueError(f"similarity_distillation needs at least 2 samples; got {len(features)}")
    own = torch.log_softmax(pairwise_similarities(features, temperature=temperature), 1)
    target = torch.log_softmax(mean_similarities.detach().to(own.dtype), 1)
    return scale * (target.exp() * (target - own)).sum(1).mean()


# ---- the method ------------------------------------------------------------------------------------------------------


@checked
class FCCLPlus(Averaging):
    """FedAvg with two additions: agreement on public, unlabelled images, and distillation from the own previous model.

    A round has two exchanges. ``train``: local training on cross-entropy and, over the non-target classes, distillation
    from the client's model of its last round. The client sends the trained model's logits and similarities of the
    public images, not the model. ``collaborate``: the server sends the means over clients. Devices take one step per
    public batch towards high correlation of equal logits and low correlation of different ones with the mean, and
    towards the mean's similarities between images. The models are then averaged.
    ``correlation=similarity=distillation=0 weighting=samples`` is FedAvg.

    Payload: the model's state both ways; up logits ``[N, K]`` and similarities ``[N, public_batch - 1]`` of the N
    public images, down their means. Client state: its model after its last local training. Privacy: outputs of a
    client's model for the public images leave the device.

    Args:
        public: the public images, from any data set; every device must read the same ones. conf/ takes textures, which
            are generated; the released code takes 5,000 images of CIFAR-100.
        public_batch: images per public step, >= 2; divides ``public.samples`` (the released code: 256 on digits).
        public_learning_rate: learning rate of Adam, of which each batch has a new one, > 0.
        public_mode: batch norm in the public phase: ``train`` uses and moves to the statistics of the public images, as
            the released code does; ``eval`` keeps the private data's.
        similarity_temperature: temperature of the similarities, > 0.
        correlation: weight of the cross-correlation, >= 0.
        similarity: weight of the similarity distillation, >= 0 (the code's ``dis_power``).
        distillation: weight of the non-target distillation, >= 0.
        distillation_temperature: T > 0. The released code's best settings have 3 on digits and 1 on Office-Caltech.
        weighting: models are averaged ``uniform``-ly (the released code), or by ``samples``.
    """

    readings: ClassVar[tuple[Point, ...]] = (
        Point("public images", released="5,000 of CIFAR-100", ours="512 generated textures; method.public.source"),
        Point("short last public batch", released="kept", ours="refused: public_batch divides public.samples"),
        Point("average of models", released="uniform", setting="weighting"),
        Point("batch norm on public images", released="train", setting="public_mode"),
        Point(
            "public phase",
            released="begins a round, with new means after each batch",
            ours="closes it, with means of one pass",  # which takes two exchanges a round
        ),
        Point("public and local rate", released="fall to a tenth", ours="constant; train's"),
        Point("passes of a public step", released="two, which both move running statistics", ours="one"),
        Point("scored model", released="each client's, before averaging, on all domains", ours="the average"),
        Point("teacher's batch norm", released="statistics of the batch", ours="running statistics"),
        Point("teacher of round 1", released="another random net", ours="none before the first training"),
    )

    capturable: ClassVar[bool] = True

    exchanges: ClassVar[tuple[str, ...]] = ("train", "collaborate")
    fedavg_at: ClassVar[Mapping[str, Any] | None] = {
        "correlation": 0.0,
        "similarity": 0.0,
        "distillation": 0.0,
        "weighting": "samples",
    }

    public: PublicImages = field(default_factory=lambda: PublicImages(Textures(), "textures"))
    public_batch: AtLeastTwo = 128
    public_learning_rate: Positive = 1e-3
    public_mode: Literal["train", "eval"] = "train"
    similarity_temperature: Positive = 0.02
    correlation: NonNegative = 1.0
    similarity: Annotated[NonNegative, Search(0.1, 10.0)] = 3.0
    distillation: Annotated[NonNegative, Search(0.01, 1.0)] = 1.0
    distillation_temperature: Positive = 3.0
    weighting: Weighting = "uniform"

    def __post_init__(self) -> None:
        divides = self.public.samples % self.public_batch == 0
        check(divides, f"public_batch={self.public_batch} must divide public.samples={self.public.samples}")

    def check(self, settings: RunSettings) -> None:
        """Refuse public images some of which the run holds out as validation samples, or scores as unseen."""
        super().check(settings)
        validation, public = settings.protocol.validation, self.public
        same_data = public.source.name == settings.data.name and public.domain in settings.data.domains
        if validation and same_data:
            raise ConfigError(
                f"method.public takes training images of {public.domain}, and protocol.validation={validation:g} "
                "holds some of these out: choose another public set"
            )
        if same_data and public.domain in settings.unseen_domains:
            raise ConfigError(
                f"method.public takes training images of {public.domain}, which no client has and the run scores as "
                "unseen: every client would train on its images; choose another public set"
            )

    @property
    def keeps_step(self) -> bool:
        """Return False: a client keeps its own trained model, which the server's aggregate does not change."""
        return False

    # On the device, exchange "train"

    def loss(self, batch: Batch, local: ClientContext) -> Losses:
        """Return cross-entropy and, from the second participation on, non-target distillation."""
        terms = {"cross_entropy": batch.cross_entropy()}
        own = local.cached("own", lambda: under_prefix(OWN, local.kept))
        if self.distillation and own:
            with torch.no_grad():
                teacher = local.frozen("own", own).eval()(batch.images)[1]
            terms["distillation"] = self.distillation * nontarget_distillation(
                batch.logits, teacher, batch.labels, temperature=self.distillation_temperature
            )
        return Losses(terms)

    def upload(self, local: ClientContext, trained: Trained) -> Upload:  # noqa: ARG002
        """Return logits and similarities of the public images; the model stays until the next exchange."""
        local.model.train(self.public_mode == "train")
        after = {name: tensor.clone() for name, tensor in local.model.state_dict().items()}
        return Upload(weights={}, extra=self.public_outputs(local), local=with_prefix(OWN, after))

    @torch.no_grad()
    def public_outputs(self, local: ClientContext) -> dict[str, Tensor]:
        """Return the model's logits and similarities of the public images, and a fingerprint of these images."""
        logits, similarities = [], []
        for images in self.public_batches(local):
            features, outputs = local.model(images)
            logits.append(outputs.float())
            similarities.append(pairwise_similarities(features, temperature=self.similarity_temperature))
        return {
            "logits": torch.cat(logits),
            "similarities": torch.cat(similarities).float(),
            "images": fingerprint(self.public.load(local.data_root)),
        }

    def public_batches(self, local: ClientContext) -> list[Tensor]:
        """Return the public images in batches, weakly augmented as the data set defines it: equal on every device."""
        images = self.public.load(local.data_root).to(local.device)
        draws = generator(local.seed, "public images", local.round)
        return list(local.prepare(images, draws).split(self.public_batch))

    # On the device, exchange "collaborate"

    def respond(self, local: ClientContext) -> Upload:
        """Take one step per public batch from the model that was trained in this round, and send the result."""
        if int(local.extra["images"]) != int(fingerprint(self.public.load(local.data_root))):
            raise DataError("the public images here are not those of the other clients; give every device the same")
        own = under_prefix(OWN, local.kept)
        if not own:
            raise DataError("the model that was trained in this round is gone: keep the node's state-dir over restarts")
        local.model.load_state_dict(own)
        if self.correlation or self.similarity:
            self.public_steps(local)
        return Upload()

    def public_steps(self, local: ClientContext) -> None:
        """Take one step of Adam per public batch towards the clients' means.

        A fresh Adam's first step has the length of the learning rate in every element with a gradient, however small.
        The correlation's gradient of ``head.bias`` is zero, since columns are centred. What arithmetic leaves of it is
        rounding noise, and Adam makes steps of it.
        """
        local.model.train(self.public_mode == "train")
        means = (local.extra[name].split(self.public_batch) for name in AVERAGED)
        for images, mean_logits, mean_similarities in zip(self.public_batches(local), *means, strict=True):
            optimizer = torch.optim.Adam(local.model.parameters(), lr=self.public_learning_rate)
            optimizer.zero_grad(set_to_none=True)
            features, logits = local.model(images)
            self.public_loss(features, logits, mean_logits, mean_similarities).backward()
            optimizer.step()

    def public_loss(self, features: Tensor, logits: Tensor, mean_logits: Tensor, mean_similarities: Tensor) -> Tensor:
        """Return ``correlation L_col + similarity L_sim`` of one public batch."""
        together = cross_correlation(logits, mean_logits)
        alike = similarity_distillation(
            features, mean_similarities, temperature=self.similarity_temperature, scale=self.similarity
        )
        return self.correlation * together + alike

    # On the server

    def download(self, state: GlobalState, server: ServerContext) -> Download:
        """Send the model to train; in the second exchange the means over clients, without a model."""
        if server.exchange == "train":
            return Download(state.weights)
        return Download(extra=state.extra)

    def expects(self, server: ServerContext) -> UploadSpec:
        """Expect outputs for the public images, then models."""
        if server.exchange != "train":
            return UploadSpec()
        rows = self.public.samples
        return UploadSpec(
            weights=False,
            extra={
                "logits": (torch.float32, (rows, server.class_count)),
                "similarities": (torch.float32, (rows, self.public_batch - 1)),
                "images": (torch.int64, ()),
            },
        )

    def inspect(self, update: Update, server: ServerContext) -> None:
        """Refuse similarities that are no cosines over their temperature."""
        if server.exchange == "train":
            largest = float(update.extra["similarities"].abs().max())
            if largest > SLACK / self.similarity_temperature:
                raise PayloadError(f"a similarity of {largest:.3g} is no cosine over {self.similarity_temperature}")

    def aggregate(self, state: GlobalState, updates: Sequence[Update], server: ServerContext) -> GlobalState:
        """Average the outputs for the public images, then the models."""
        if server.exchange != "train":
            return super().aggregate(GlobalState(state.weights, round=state.round), updates, server)
        return GlobalState(state.weights, state.prototypes, self.mean_outputs(updates, server), round=state.round)

    def mean_outputs(self, updates: Sequence[Update], server: ServerContext) -> Mapping[str, Tensor]:
        """Return the means over the clients that have the commonest public images, by the aggregation rule.

        They are plain if fewer clients than a robust rule needs have these images: the others are left out already.
        """
        counts = Counter(int(update.extra["images"]) for update in updates)
        commonest = counts.most_common(1)[0][0]
        tables: list[Mapping[str, Tensor]] = []
        for update in updates:
            if int(update.extra["images"]) == commonest:
                tables.append({name: update.extra[name] for name in AVERAGED})
        means: dict[str, Tensor] = {}
        if server.aggregation.robust and len(tables) >= server.aggregation.min_answers:
            means = server.aggregation.combine(tables, [1.0] * len(tables))
        else:
            for name in AVERAGED:
                stacked = torch.stack([table[name] for table in tables])
                means[name] = stacked.double().mean(0).float()
        return {**means, "images": torch.tensor(commonest)}
