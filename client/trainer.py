"""Local training and scoring on a device, the same for every method and engine."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from client.capture import CapturedSteps, StepResult
from client.feature_cache import FeatureCache
from client.model_state import ModelState
from client.optimizer import SGD
from client.scoring import ScoreCounter
from common.data.batches import EVALUATION_BATCH, Split, split_batches
from common.errors import ConfigError, ContractError
from common.losses import balanced_weights
from common.numerics import generator
from common.prototypes import ClassSums, PrototypeSet, class_means
from common.round_settings import TrainSettings
from common.settings import RunSettings
from strategies.core.context import Optimizer
from strategies.core.last_batch import keeps_single
from strategies.core.method import Batch, Client, Measured, Method, Phase, Trained, build_model, feature_size_of


def choose_device(name: str) -> torch.device:
    """Return the device of ``train.device``: ``auto`` is CUDA if it is available.

    Raises:
        ConfigError: the CUDA device is not available.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    number = name.partition(":")[2] or "0"
    if name.startswith("cuda") and int(number) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name}: no such CUDA device is visible here; use auto or cpu where it is set (train.device, or "
            "device of the node configuration), and see goldfinch doctor"
        )
    return torch.device(name)


def memory_format(settings: RunSettings) -> torch.memory_format:
    """Return the memory format of images and convolutions in training and scoring; sent tensors are contiguous."""
    channels_last = settings.train.channels_last
    if channels_last is None:
        channels_last = getattr(settings.model, "channels_last", False)
    return torch.channels_last if channels_last else torch.contiguous_format


RECEIVED = ("weights", "prototypes", "extra", "kept", "class_weights", "optimizer")
"""Names of what an exchange has besides the model, in which a step may read or change tensors."""


class LocalExchange:
    """One exchange on one device; implements :class:`strategies.core.method.ClientContext`.

    Args:
        settings: the run's settings.
        method: the method.
        state: the model, with the received and the kept state installed, on ``device``.
        client: the client.
        split: training split of the client, on ``device``.
        weights, prototypes, extra: the received tensors, on ``device``.
        kept: the tensors that the client kept, on ``device``.
        round_number: 1-based round.
        exchange: name of the exchange.
        data_root: folder of this device's data; ``None`` takes the configured one.
        cache: holds features under the backbone that the model has; ``None`` computes them for every batch.
        validation: the client's validation samples, on ``device``; ``None`` if the device scores no image.
        steps: the captured steps of the model; ``None`` takes plain ones.
    """

    def __init__(
        self,
        settings: RunSettings,
        method: Method,
        state: ModelState,
        client: Client,
        split: Split,
        *,
        weights: Mapping[str, Tensor],
        prototypes: PrototypeSet,
        extra: Mapping[str, Tensor],
        kept: Mapping[str, Tensor],
        round_number: int,
        exchange: str,
        device: torch.device,
        data_root: str | None = None,
        cache: FeatureCache | None = None,
        validation: Split | None,
        steps: CapturedSteps | None = None,
    ) -> None:
        self.settings, self.method, self.client, self.split = settings, method, client, split
        self.state, self.model = state, state.model
        self.validation, self.steps = validation, steps
        self.weights, self.prototypes, self.extra, self.kept = weights, prototypes, extra, kept
        self.round, self.rounds, self.exchange = round_number, settings.train.rounds, exchange
        self.seed, self.device, self.data_root = settings.seed, device, data_root
        self.train: TrainSettings = settings.train
        self.learning_rate = settings.train.rate(round_number)
        self.class_weights: Tensor | None = None
        if settings.train.class_weights == "balanced":
            self.class_weights = balanced_weights(client.class_counts).to(device)
        self.class_count: int = settings.data.class_count
        self.feature_size = feature_size_of(state.model)
        self.cache = cache
        self.views: int = 1 + settings.views.count
        self.phase = self.batch = 0
        self.optimizer: Optimizer = SGD([], lr=1.0)
        self._cache: dict[str, Any] = {}
        self._first_batch: Batch | None = None
        self._keeps_single: bool | None = None

    def without_training_images(self) -> LocalExchange:
        """Return the same exchange with an empty training split; the client's class counts stay."""
        exchange = copy.copy(self)
        exchange.split = self.split.subset(torch.arange(0))
        return exchange

    # ---- the interface of methods ----------------------------------------------------------------------------------

    def forward(self, images: Tensor, labels: Tensor) -> Batch:
        """Run a forward pass of the model in its current mode; all results are float32."""
        with self._autocast():
            features, logits, extra = self.method.compute(self.model, images, self)
        floats = {name: tensor.float() for name, tensor in extra.items()}
        smoothing, weights = self.train.label_smoothing, self.class_weights
        batch = Batch(images, labels, features.float(), logits.float(), self.views, floats, smoothing, weights)
        if self._first_batch is None:
            self._first_batch = batch
        return batch

    def backward(self, loss: Tensor) -> None:
        """Clear the gradients and differentiate ``loss``; clip the gradients to ``train.clip_norm`` if it is set."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self.train.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.train.clip_norm)

    def frozen(self, name: str, weights: Mapping[str, Tensor] | None = None) -> nn.Module:
        """Return a copy of the model that does not train, in evaluation mode, made once per exchange and ``name``.

        Args:
            name: the copy's name.
            weights: tensors to put in place of those with which training began.
        """
        return self.cached(f"frozen {name}", lambda: self._copy(weights))

    def _copy(self, weights: Mapping[str, Tensor] | None) -> nn.Module:
        copy = self.new_model()
        copy.load_state_dict({**self.snapshot(), **(weights or {})})
        return copy.eval().requires_grad_(False)

    def new_model(self) -> nn.Module:
        """Return a new model of the run's architecture, with its initial weights, on the device."""
        model = build_model(self.settings, self.client.client_count, self.client.domain).to(self.device)
        return model.to(memory_format=memory_format(self.settings))

    def snapshot(self) -> Mapping[str, Tensor]:
        """Return the whole state of the model as it was when training began."""
        state: Mapping[str, Tensor] = self.cached("snapshot", self.state.copy)
        return state

    def reference(self) -> Mapping[str, Tensor]:
        """Return the model's tensors as they were when training began."""
        return self.snapshot()

    def cached(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what ``make()`` returned on the first call with ``name`` in this exchange."""
        if name not in self._cache:
            self._cache[name] = make()
        return self._cache[name]

    def make_optimizer(self, parameters: Iterable[nn.Parameter], rate: float = 1.0) -> Optimizer:
        """Return the optimiser that ``train.optimizer`` names, with ``rate`` times the learning rate of this round."""
        rate, decay = rate * self.learning_rate, self.train.weight_decay
        if self.train.optimizer == "adam":
            return torch.optim.Adam(parameters, lr=rate, weight_decay=decay)
        if self.train.optimizer == "adamw":
            return torch.optim.AdamW(parameters, lr=rate, weight_decay=decay)
        given = list(parameters)
        if given and all(isinstance(parameter, nn.Parameter) for parameter in given):
            return SGD(given, rate, self.train.momentum, decay)
        # groups, names or mistakes: PyTorch's own takes them, or says what is wrong
        return torch.optim.SGD(given, lr=rate, momentum=self.train.momentum, weight_decay=decay, foreach=True)

    def generator(self, *purpose: str | int) -> torch.Generator:
        """Return random numbers keyed by (seed, purpose, round, client)."""
        return generator(self.seed, *purpose, self.round, self.client.id)

    def prepare(self, images: Tensor, draws: torch.Generator | None = None) -> Tensor:
        """Return uint8 images ``[B, 3, H, W]`` as model input: augmented with ``draws``, or as for testing."""
        augmentation = self.settings.data.augmentation
        if draws is None:
            return self._formatted(augmentation.test(images))
        return self._formatted(augmentation.train(images, draws))

    def _known_features(self, split: Split) -> Tensor | None:
        """Return the features ``[N, D]`` of a split if the backbone is frozen; ``None`` if it trains.

        A method with a forward pass of its own may read more of the images than their features.
        """
        if self.cache is None or type(self.method).compute is not Method.compute:
            return None
        return self.cache.features(split, self._split_features)

    @torch.no_grad()
    def _split_features(self, split: Split) -> Tensor:
        """Return the features ``[N, D]`` of a whole split without augmentation, float32."""
        rows: list[Tensor] = []
        for indices in torch.arange(len(split)).split(EVALUATION_BATCH):
            images = self.settings.data.augmentation.test(split.images_at(indices.to(self.device)))
            with self._autocast():
                rows.append(self.model.get_submodule("backbone")(self._formatted(images)).float())
        return torch.cat(rows)

    @torch.no_grad()
    def features(self, *, augmented: int = 0, training_mode: bool = False) -> tuple[Tensor, Tensor]:
        """Return features ``[N, D]`` and labels ``[N]`` of the whole training split, without gradients.

        Args:
            augmented: average the features over this number of augmented views of each sample; 0 takes no view.
            training_mode: shuffle the batches, normalise each with its own statistics, and update the running ones.
        """
        known = None if augmented or training_mode else self._known_features(self.split)
        if known is not None:
            return known, self.split.labels
        was_training = self.model.training
        self.model.train(training_mode)
        draws = self.generator("feature pass")
        augmentation = self.settings.data.augmentation
        order = torch.arange(len(self.split))
        parts = split_batches(order, EVALUATION_BATCH, "keep")
        if training_mode:  # unshuffled batches could have one class each, with other statistics than the whole
            order = torch.randperm(len(self.split), generator=draws)
            parts = self._split(order, "keep")
        rows = []
        for indices in parts:
            images = self.split.images_at(indices.to(self.device))
            views = [augmentation.train(images, draws) for _ in range(augmented)] or [augmentation.test(images)]
            with self._autocast():
                passes = [self.model(self._formatted(view))[0].float() for view in views]
            rows.append(torch.stack(passes).mean(0))
        self.model.train(was_training)
        return torch.cat(rows)[order.argsort().to(self.device)], self.split.labels

    # ---- the loop --------------------------------------------------------------------------------------------------

    def run(self) -> Trained:
        """Train: every phase, every epoch, every batch."""
        self.snapshot()
        epochs = 0
        steps = 0
        taken = 0
        totals: dict[str, Tensor] = {}
        sums: ClassSums | None = None
        phases = self.method.phases(self.train.epochs)
        total = sum(phase.epochs for phase in phases)
        for self.phase, phase in enumerate(phases):
            self._prepare(phase)
            for _ in range(phase.epochs):
                epochs += 1
                if epochs == total and self.method.prototypes_from == "last_epoch_running":
                    sums = ClassSums(self.class_count, self.feature_size, self.device)
                totals, taken = self._epoch(epochs, sums)
                steps += taken
        self.state.unfreeze()
        losses = {name: float(total) / max(taken, 1) for name, total in totals.items()}  # of the last epoch
        return Trained(self._prototypes(sums), steps, losses)

    def _prepare(self, phase: Phase) -> None:
        """Freeze the parameters that this phase does not train, and make a new optimiser."""
        trained: list[nn.Parameter] = []
        for name, parameter in self.state.reset():
            chosen = parameter.requires_grad and (phase.trainable is None or phase.trainable(name))
            parameter.requires_grad_(chosen)
            if chosen:
                trained.append(parameter)
        self.optimizer = self.make_optimizer(trained)
        if self.steps is not None:
            self.steps.begin_phase()

    # ---- steps, plain and captured: client/capture.py ---------------------------------------------------------------

    def plain_step(self, images: Tensor, labels: Tensor) -> StepResult:
        """Take one step of the method with a batch."""
        self._first_batch = None
        losses = self.method.step(self, images, labels)
        terms = {name: value.detach() for name, value in losses.terms.items()}
        if self._first_batch is None:
            return terms, None
        return terms, self._first_batch.features.detach()

    def model_tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors of the model by name."""
        return self.state.tensors()

    def bound(self) -> dict[str, Any]:
        """Return what a step may read or change besides the model and the batch, by name."""
        bound = {f"cached {name}": value for name, value in self._cache.items()}
        for name in RECEIVED:
            bound[name] = vars(self)[name]
        return bound

    def bind(self, name: str, value: Any) -> None:
        """Put ``value`` in the place of what :meth:`bound` has under ``name``."""
        if name in RECEIVED:
            setattr(self, name, value)
        else:
            self._cache[name.removeprefix("cached ")] = value

    # ---- batches ---------------------------------------------------------------------------------------------------

    def _epoch(self, epoch: int, sums: ClassSums | None) -> tuple[dict[str, Tensor], int]:
        """Train one epoch, and return the sum of each loss term over its steps, on the device, and the steps."""
        totals: dict[str, Tensor] = {}
        steps = 0
        for position, (images, labels) in enumerate(self.batches("epoch", epoch)):
            self.batch = position
            if self.steps is None:
                terms, features = self.plain_step(images, labels)
            else:
                terms, features = self.steps.take(self, self.phase, images, labels)
            steps += bool(terms)
            for name, value in terms.items():
                totals[name] = totals.get(name, torch.zeros((), device=self.device)) + value
            if sums is not None and features is not None:
                originals = len(labels) // self.views
                sums.add(features[:originals], labels[:originals])
        return totals, steps

    def batches(self, *purpose: str | int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of one epoch with their views; the order is keyed by (seed, purpose, round, client)."""
        draws = self.generator(*purpose)
        order = torch.randperm(len(self.split), generator=draws).to(self.device)  # moved once: each move waits for CUDA
        batches = self._split(order, self.train.last_batch)
        change = self.views > 1 or (self.method.augments and self.settings.data.augmentation.random)
        known = None if change else self._known_features(self.split)  # of images that are the same in every epoch
        for chosen in batches[: self.settings.local_steps]:
            if known is not None:
                yield known[chosen], self.split.labels[chosen]
                continue
            images, labels = self.split.images_at(chosen), self.split.labels[chosen]
            images = self._augmented(images, draws)
            if self.views > 1:
                labels = self.settings.views.repeat(labels)
            yield self._formatted(images), labels

    @property
    def batches_per_epoch(self) -> int:
        """Return the number of batches of one local epoch, at most ``train.local_steps``."""
        return len(self._split(torch.arange(len(self.split)), self.train.last_batch)[: self.settings.local_steps])

    def _split(self, order: Tensor, last: str) -> list[Tensor]:
        """Return ``order`` cut into training batches; a last batch of one sample stays if it can be trained on."""
        size, single = self.train.batch_size, False
        if len(order) % size == 1:
            if self._keeps_single is None:
                self._keeps_single = keeps_single(self.settings, self.model)
            single = self._keeps_single
        return split_batches(order, size, last, single=single)

    def _augmented(self, images: Tensor, draws: torch.Generator) -> Tensor:
        """Return the augmented images of a training batch, with all views."""
        augmentation, views = self.settings.data.augmentation, self.settings.views
        if self.views > 1 and views.before_augmentation:
            images = views(images, draws)
        if self.method.augments:
            images = augmentation.train(images, draws)
        else:
            images = augmentation.test(images)
        if self.views > 1 and not views.before_augmentation:
            images = views(images, draws)
        return images

    def _prototypes(self, sums: ClassSums | None) -> PrototypeSet:
        if self.method.prototypes_from == "post_eval":
            features, labels = self.features()
            return class_means(features, labels, self.class_count)
        if sums is None:
            return PrototypeSet.empty(self.feature_size)
        return sums.means()

    # ---- scoring ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def score(self, split: Split) -> dict[str, Any]:
        """Return samples, correct predictions, mean loss and counts of the model on a test split.

        See :class:`client.scoring.ScoreCounter`.
        """
        was_training = self.model.training
        self.model.eval()
        counter = ScoreCounter(self.settings, self.device)
        known = self._known_features(split)
        for indices in torch.arange(len(split)).split(EVALUATION_BATCH):
            chosen = indices.to(self.device)
            labels = split.labels[chosen]
            if known is None:
                inputs = self._formatted(self.settings.data.augmentation.test(split.images_at(chosen)))
            else:
                inputs = known[chosen]
            with self._autocast():
                features, logits, _ = self.method.compute(self.model, inputs, self)
                if self.round == 1 and type(self.method).compute is not Method.compute:
                    self._check_exported(inputs, features, logits)
            scores = self.method.predict(features.float(), logits.float(), self)
            counter.add(scores, logits.float(), labels)
        self.model.train(was_training)
        return counter.result(len(split))

    def _check_exported(self, inputs: Tensor, *computed: Tensor) -> None:
        """Refuse a method whose own ``compute`` gives what no exported model would give."""
        if type(self.method).inference is not Method.inference or not self.method.trains:
            return
        for found, plain in zip(computed, self.model(inputs), strict=True):
            if found.shape != plain.shape or not torch.allclose(found, plain, rtol=1e-3, atol=1e-3, equal_nan=True):
                raise ConfigError(
                    f"method={self.method.name}: compute gives other features or logits than the network: override "
                    "inference, too: an export knows nothing of compute"
                )

    def validate(self) -> Measured:
        """Score the model on the client's validation samples, or on its training samples if there are none.

        Raises:
            ContractError: the device scores no image.
        """
        if self.validation is None:
            raise ContractError("this device scores no image, and the method measures models: choose another method")
        score = self.score(self.validation if len(self.validation) else self.split)
        return Measured(score["count"], score["correct"], score["loss"])

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.train.precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def _formatted(self, images: Tensor) -> Tensor:
        return images.contiguous(memory_format=memory_format(self.settings))
