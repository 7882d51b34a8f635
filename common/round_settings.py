"""The settings of rounds and of local training: the groups ``train`` and ``rounds``. The module imports no torch."""

import math
from typing import Annotated, Literal

from pydantic import Field

from common.config import AtLeastTwo, BelowOne, Count, Natural, NonNegative, Positive, Share, check, checked
from common.metrics import Metric


@checked
class TrainSettings:
    """Rounds and local training (conf/train/).

    Args:
        rounds: communication rounds, >= 1.
        epochs: local epochs E per round, >= 1.
        local_steps: batches after which each local epoch stops; ``None`` runs whole epochs.
        batch_size: samples per batch, >= 2.
        last_batch: a short last batch is kept, dropped, or merged into the one before. A kept batch of a single sample
            is merged only if the network or the method cannot train on it; ``summary.json`` names these clients.
        optimizer: ``sgd``, ``adam`` or ``adamw``; a new one for each client and round.
        learning_rate: of the first round, > 0.
        schedule: how the learning rate changes over the rounds: not at all, by half a cosine down to 0, or in steps.
        step_rounds: rounds after which ``schedule=step`` multiplies the learning rate, >= 1.
        step_factor: what it is multiplied by, in (0, 1].
        momentum: SGD's momentum, in [0, 1).
        weight_decay: L2 coefficient, >= 0; of ``adamw`` the decoupled one.
        clip_norm: largest norm of the loss's gradient over all parameters; ``None`` does not clip.
        label_smoothing: share of the target that is spread evenly over all classes, in [0, 1). The smoothing acts
            on the cross-entropy of every method; scores use none.
        class_weights: ``balanced`` weights the cross-entropy of each sample inversely to its class's share of the
            client's training samples, see :func:`common.losses.classification.balanced_weights`.
        patience: rounds without a better average on validation samples after which the run stops; needs
            ``protocol.validation``. ``None`` runs all rounds.
        device: ``auto`` (CUDA if available), ``cpu``, ``cuda`` or ``cuda:0`` ...
        threads: CPU threads of one client. Another number may round differently and so change the result.
        precision: ``float32``, or autocast with ``bfloat16``.
        channels_last: memory format of images and convolutions; ``None`` takes the faster one of the network's spec.
        deterministic: use only deterministic algorithms on CUDA.
        capture: on CUDA, capture training steps in a graph and replay it where the method declares that this computes
            the same; what cannot be captured runs as without, and says why.
    """

    rounds: Count = 10
    epochs: Count = 1
    local_steps: Count | None = None
    batch_size: AtLeastTwo = 32
    last_batch: Literal["keep", "drop", "merge"] = "keep"
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    learning_rate: Positive = 0.01
    schedule: Literal["constant", "cosine", "step"] = "constant"
    step_rounds: Count = 10
    step_factor: Share = 0.1
    momentum: BelowOne = 0.9
    weight_decay: NonNegative = 1e-5
    clip_norm: Positive | None = None
    label_smoothing: BelowOne = 0.0
    class_weights: Literal["none", "balanced"] = "none"
    patience: Count | None = None
    device: str = "auto"
    threads: Count = 1
    precision: Literal["float32", "bfloat16"] = "float32"
    channels_last: bool | None = None
    deterministic: bool = False
    capture: bool = False

    def __post_init__(self) -> None:
        name, _, index = self.device.partition(":")
        valid = self.device in ("auto", "cpu", "cuda") or (name == "cuda" and index.isascii() and index.isdecimal())
        check(valid, f"device must be auto, cpu, cuda or cuda:N; got {self.device!r}")

    def rate(self, round_number: int) -> float:
        """Return the learning rate of a round.

        With ``t`` rounds done before it and ``T`` rounds in all, ``constant`` is ``lr``, ``cosine`` is ``lr (1 + cos(pi
        t / T)) / 2`` (Loshchilov and Hutter, ICLR 2017, Eq. 5, without restarts and down to 0), and ``step`` is ``lr
        step_factor^floor(t / step_rounds)``.

        Args:
            round_number: from 1. Exchanges after the last round count as the last.
        """
        done = min(round_number, self.rounds) - 1
        if self.schedule == "cosine":
            return self.learning_rate * (1 + math.cos(math.pi * done / self.rounds)) / 2
        if self.schedule == "step":
            return self.learning_rate * self.step_factor ** (done // self.step_rounds)
        return self.learning_rate


@checked
class RoundSettings:
    """How the server runs rounds (conf/rounds/).

    Args:
        participation: share of clients sampled each round, in (0, 1]; at least one client.
        oversample: clients that are asked, as a multiple of the clients that a round needs, >= 1; above 1 only with a
            participation below 1. A client that answers after enough others is late and does not count; clients
            that score are waited for. Further exchanges ask the clients that were in time. In simulations the seed
            decides who is in time.
        quorum: share of the sampled clients that must answer for the round to count, in (0, 1].
        deadline: seconds that an exchange may take; clients that answer later are left out. ``None``: an hour; in a
            deployment ten times the median exchange, from the fourth on, and at most an hour.
        registration: seconds to wait before the first round for all clients of the protocol to register.
        failures: consecutive rounds that may miss the quorum before the run stops.
        last_rounds: number of last rounds that the ``last`` score averages (the papers: 5).
        checkpoints: number of last rounds with a checkpoint, >= 2.
        evaluate_every: score the test sets each time this number of rounds is done, and after the last round.
        test_samples: random images of each test split that are scored at most, always the same; ``None`` scores all.
        test: whether test sets are scored; a search for settings must not use them.
        metric: what chooses the best round on validation samples (the rule ``validated``); another metric than
            ``accuracy`` is computed for each domain from the confusion counts of its clients' samples together. See
            :meth:`common.metrics.ClassTotals.metric`. With ``scores=true`` also ``auroc``, ``calibration_error``,
            ``brier_score`` or ``log_loss``; with ``own_metric`` also the values of that metric.
        scores: whether devices count confidences with each score, for AUROC, calibration error, Brier score and log
            loss. See :class:`common.confidence.ConfidenceCounts`.
        outliers: ``clip`` scales an update with a norm above the bound down to it, ``off`` sets no bound. See
            :mod:`strategies.core.bounds`.
        outlier_factor: the bound as a multiple of the norm of the exchange's median update, > 1.
        max_samples: training samples above which a registration is refused.
        largest_client: the samples that a client counts for at most, as a multiple of the median client's, >= 1;
            ``None`` sets no limit.
        largest_share: a client's largest share of an average over three clients or more, in (0, 1]. 1 sets no limit;
            with 0.5 no client decides alone. See :mod:`strategies.core.aggregation`.
        transport: dtype to which float32 tensors of two dimensions or more, of model and method, are rounded on the
            wire, both ways; vectors, prototypes and other dtypes are sent unchanged. See :mod:`common.wire.payload`.
        memory: GiB of an exchange's updates that stay in the server's memory, >= 0. Further updates are stored in
            memory-mapped files in the run's folder until they are averaged; see :mod:`common.storage`.
        key: what a round's participants are drawn from. ``None``: in simulations the seed; in a deployment, whose
            devices know the seed, a random number that stays on the server. ``summary.json`` holds it, so that a
            simulation can repeat a deployed run. A deployment refuses a given key, because devices receive settings.
    """

    participation: Share = 1.0
    oversample: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    quorum: Share = 0.5
    deadline: Positive | None = None
    registration: Positive = 300.0
    failures: Count = 3
    last_rounds: Count = 5
    checkpoints: AtLeastTwo = 2
    evaluate_every: Count = 1
    test_samples: Count | None = None
    test: bool = True
    metric: Metric | str = "accuracy"
    scores: bool = False
    outliers: Literal["clip", "off"] = "off"
    outlier_factor: Annotated[float, Field(gt=1)] = 1.2
    max_samples: Count = 10_000_000
    largest_client: Annotated[float, Field(ge=1)] | None = None
    largest_share: Share = 1.0
    transport: Literal["float32", "bfloat16", "float16"] = "float32"
    memory: NonNegative = 1.5
    key: Natural | None = None

    def __post_init__(self) -> None:
        check(
            self.oversample == 1 or self.participation < 1,
            f"oversample={self.oversample:g} asks more clients than a round needs, and participation=1 needs all there "
            f"are; take participation={math.floor(100 / self.oversample) / 100:g} or less",
        )

    def sampled(self, clients: int) -> int:
        """Return the number of clients that a round needs, of ``clients``: at least one."""
        return max(1, round(self.participation * clients))

    def asked(self, clients: int) -> int:
        """Return the number of clients that a round asks, of ``clients``."""
        return min(clients, math.ceil(round(self.oversample * self.sampled(clients), 6)))  # 1.1 * 10 is above 11
