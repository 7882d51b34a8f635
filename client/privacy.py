"""Differential privacy on the device: clipping, noise, and the count of releases, before an answer is encoded.

:mod:`common.privacy` defines neighbouring data sets and derives the sensitivities.

In a run without differential privacy, :class:`DevicePrivacy` is used for the whole run and :class:`Unprotected` for one
exchange. With ``privacy=gaussian`` they are :class:`GaussianDevicePrivacy` and :class:`Protection`.

A device refuses in four places: other data than its contract names in :mod:`common.contract`, a spent budget in
:mod:`client.ledger`, an image of the other side in :mod:`client.border`, and a method or a tensor that no noise covers
in :mod:`strategies.core.protection`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from client.border import (
    SCORED,
    Border,
    Images,
    check_grouped,
    check_single,
    scored_images,
    trained_on,
    training_images,
)
from client.ledger import Budget, Ledger, check_accountant
from client.trainer import LocalExchange
from common.contract import Contract
from common.data.batches import Split
from common.data.domain import Domain
from common.data.protocols import ClientSpec
from common.data.splits import public_split_hash
from common.errors import DIVERGED, ConfigError
from common.privacy import GaussianPrivacy, clip_factor, clip_rows, finite_copy, gaussian, group_factor
from common.prototypes import PrototypeSet, class_means
from common.settings import RunSettings
from common.text import warn_once
from common.wire.messages import Request
from strategies.core.method import Method, Upload
from strategies.core.protection import check_nothing_else, check_received, check_request, multipliers_of

Install = Callable[[Mapping[str, Tensor]], LocalExchange]
"""Makes an exchange of the received message and a client's own state, which it loads into the device's model."""


class DevicePrivacy:
    """Privacy of one device in a run without differential privacy: only the device's own budget applies.

    Args:
        settings: the run's settings.
        ledger: the record of releases of the client's data, and the device's own budget; ``None`` counts nothing.
        contract: what the device's owner allows.
    """

    def __init__(self, settings: RunSettings, ledger: Ledger | None, contract: Contract) -> None:
        self.settings, self.ledger = settings, ledger
        self.contract = contract if ledger is None else ledger.budget.limits(contract)
        self._has_budget = ledger is not None and bool(ledger.budget)
        self.method: Method = settings.method
        self._sides: dict[str, tuple[str, Images]] = {}
        """The images that the run trains on, and those that it scores of each domain, with their side of the border."""
        self._kept: set[str] = set()
        """The noted images that the border has recorded."""

    @property
    def budgets(self) -> list[Budget]:
        """The budgets that an update must fit in."""
        if self.ledger is None:
            return []
        return [self.ledger.budget]

    @property
    def counts(self) -> bool:
        """Whether updates are counted in the ledger."""
        return self._has_budget

    def multipliers(self, model: nn.Module) -> dict[str, float]:
        """Return the noise multiplier of each part of an update of ``model``; 0 for a part without noise."""
        return multipliers_of(self.contract, self.settings, model)

    def check_request(self, model: nn.Module, client_count: int, request: Request | None = None) -> None:
        """Check a request, or with ``None`` the settings at registration, against the device's contract.

        A budget counts updates alone. So a device with a budget sends no score that depends on its training images.

        Args:
            model: the model, received or as it is before the first round.
            client_count: number of clients of the run.
            request: the request.

        Raises:
            PrivacyError, ConfigError: see :func:`strategies.core.protection.check_request`; or a budget needs an
                accountant that is not installed, or the ledger has no place.
        """
        check_accountant(self.budgets)
        if request is None:
            check_request(self.contract, self.settings, model, client_count)
            return
        check_request(
            self.contract,
            self.settings,
            model,
            client_count,
            round_number=request.round,
            exchange=request.exchange,
            scores=bool(request.score),
            validates=request.validate,
        )

    def received(self, install: Install, kept: Mapping[str, Tensor], request: Request) -> LocalExchange:
        """Return an exchange to score the received model in.

        The score of a private device cannot depend on training images: the method's functions get neither these images
        nor the tensors that the client kept from training. A method that declares that it needs them is refused, and a
        message without the whole model: what it lacks would come from a file of the device that the settings name.

        Args:
            install: makes an exchange of a client's own state.
            kept: the client's own state.
            request: the request.

        Raises:
            PrivacyError, ConfigError: as in :meth:`check_request`.
            PayloadError: the server left out a part of the model that is to be scored.
        """
        if not self.counts:
            return install(kept)
        local = install({})
        self.check_request(local.model, local.client.client_count, request)
        if request.score:
            check_received(self.method, local.model, local.weights)
        return local.without_training_images()

    def protected(
        self, install: Install, kept: Mapping[str, Tensor], local: LocalExchange
    ) -> tuple[LocalExchange, Unprotected]:
        """Return the exchange to train in, and the protection of its upload.

        Args:
            install: as in :meth:`received`.
            kept: as in :meth:`received`.
            local: the exchange that :meth:`received` returned.

        Raises:
            PayloadError: the server left out a part of the model.
        """
        if self.counts:
            local = install(kept)
        return local, Unprotected()

    def note_training(self, domain: Domain, rows: Tensor, scores: Collection[str]) -> None:
        """Note which images the client trains on, and check that the device may train on them.

        If the device also scores the domain, its test images are checked as well, so that a run that would score images
        that were trained on is refused at registration and not in its first round.

        Args:
            domain: the client's domain.
            rows: int64 [n], the training samples in its train split.
            scores: the domains that the device scores.

        Raises:
            ImageSideError: an image was scored before or belongs to another domain, or a test image was trained on.
            RepeatedImageError: single images are to be protected, and one is several samples.
            DataError: the record of images is damaged.
        """
        if self._border is None:
            return
        self._note("train", trained_on(domain.name), training_images(self.settings.data, domain, rows))
        if not self.settings.rounds.test or domain.name not in scores:
            return
        if domain.name in self.settings.protocol.test_domains(self.settings.data):
            self.note_test(domain, self.settings.protocol.test_split(domain))

    def note_test(self, domain: Domain, split: Split) -> None:
        """Note which images of a domain are scored, and check that the device may score them.

        Args:
            domain: the domain.
            split: those of its images that the protocol scores.

        Raises:
            ImageSideError: an image was trained on before.
            DataError: the record of images is damaged.
        """
        if self._border is None:
            return
        images = scored_images(self.settings.data, domain, whole=split is not domain.test)
        self._note(f"score {domain.name}", SCORED, images)

    def keep_sides(self, request: Request) -> None:
        """Record the sides of the images that an exchange uses, before they are used.

        Raises:
            ImageSideError: as in :meth:`note_training` and :meth:`note_test`.
            DataError: the record of images is damaged, or cannot be written.
        """
        border = self._border
        if border is None:
            return
        uses = [f"score {domain}" for domain in request.score]
        if request.train:
            uses.append("train")
        for use in uses:
            if use not in self._kept:
                border.keep(*self._sides[use])
                self._kept.add(use)

    @property
    def _border(self) -> Border | None:
        if not self.counts or self.ledger is None:
            return None
        return self.ledger.border

    def _note(self, use: str, side: str, images: Images) -> None:
        if self._border is not None:
            self._border.check(side, images)
        self._sides[use] = side, images

    def check_budget(self, model: nn.Module) -> None:
        """Refuse, before training, an update that could not be sent after it.

        Raises:
            PrivacyError: a budget is spent.
        """
        if self.counts and self.ledger is not None:
            self.ledger.check(self.multipliers(model), self.budgets)

    def count_release(self, run: str, client: str, model: nn.Module) -> int:
        """Count an update in the ledger before it is sent.

        Returns:
            The client's updates with noise in this run, including this one; 0 without differential privacy.
        """
        if self.counts and self.ledger is not None:
            self.ledger.spend(run, client, self.multipliers(model), self.budgets)
        return 0

    def registered_hashes(
        self,
        spec: ClientSpec,  # noqa: ARG002
        split: str,
        content: str,
        counts: Sequence[int],  # noqa: ARG002
        validation: int,  # noqa: ARG002
    ) -> tuple[str, str]:
        """Return the hashes of the split and of its images that the client registers.

        Args:
            spec: the client.
            split: SHA-256 of the split.
            content: SHA-256 of its images and of the test split.
            counts: training samples per class.
            validation: validation samples.
        """
        return split, content

    def measurements(self, seconds: Mapping[str, float], peak_bytes: int) -> tuple[dict[str, float], int]:
        """Return the seconds by phase and the peak memory for the answer."""
        return dict(seconds), peak_bytes


class GaussianDevicePrivacy(DevicePrivacy):
    """Privacy of one device in a run with ``privacy=gaussian``.

    Args:
        settings: as in :class:`DevicePrivacy`.
        privacy: the settings of the mechanism.
        ledger: as in :class:`DevicePrivacy`; required.
        contract: as in :class:`DevicePrivacy`.
    """

    def __init__(
        self, settings: RunSettings, privacy: GaussianPrivacy, ledger: Ledger | None, contract: Contract
    ) -> None:
        super().__init__(settings, ledger, contract)
        self.privacy = privacy
        self.group_factor = 1.0
        """How many times an image's change one change of the unit may be, for the class means."""

    @property
    def budgets(self) -> list[Budget]:
        """The device's own budget and the run's."""
        privacy = self.privacy
        return [*super().budgets, Budget(privacy.max_releases, privacy.max_epsilon, privacy.delta)]

    @property
    def counts(self) -> bool:
        """Whether updates are counted in the ledger."""
        return True

    @property
    def _required_ledger(self) -> Ledger:
        if self.ledger is None:
            raise ConfigError("privacy=gaussian: this device has no place for its ledger; pass Device a ledger")
        return self.ledger

    def check_request(self, model: nn.Module, client_count: int, request: Request | None = None) -> None:
        """See :meth:`DevicePrivacy.check_request`."""
        _ = self._required_ledger
        super().check_request(model, client_count, request)

    def note_training(self, domain: Domain, rows: Tensor, scores: Collection[str]) -> None:
        """Check that no change of one unit is more than is claimed; then note the images as the base class does.

        With ``unit=sample`` no image may be two samples. With ``unit=group`` no image may be of two groups, and the
        largest group scales the noise.

        Raises:
            RepeatedImageError: single images are to be protected, and one is several samples; or of two groups.
            ImageSideError, DataError: as in the base class.
        """
        images = training_images(self.settings.data, domain, rows)
        if self.privacy.unit == "sample":
            check_single(images)
        if self.privacy.unit == "group":
            check_grouped(images)
            self.group_factor = group_factor(images.groups, domain.train.labels[rows].tolist())
            warn_once(
                f"{domain.name}: privacy.unit=group: noise of the class means is {self.group_factor:.4g} times that of "
                "single images, by the largest group"
            )
        super().note_training(domain, rows, scores)

    def count_release(self, run: str, client: str, model: nn.Module) -> int:
        """Count the update in the ledger with its noise multipliers; return the client's count in this run.

        Raises:
            PrivacyError: a budget is spent; nothing is counted.
            DataError: the ledger is damaged, or cannot be written.
        """
        return self._required_ledger.spend(run, client, self.multipliers(model), self.budgets)

    def registered_hashes(
        self, spec: ClientSpec, split: str, content: str, counts: Sequence[int], validation: int
    ) -> tuple[str, str]:
        """Return hashes with which a guess of images or labels cannot be checked: one uses the device's secret.

        Images that were read by other settings have another hash: if two were equal, they would tell of an image.
        """
        keyed = self._required_ledger.keyed_hash("content", self.settings.identity, spec.id, split, content)
        return public_split_hash(self.settings.data.name, spec.id, list(counts), validation), keyed

    def measurements(
        self,
        seconds: Mapping[str, float],  # noqa: ARG002
        peak_bytes: int,  # noqa: ARG002
    ) -> tuple[dict[str, float], int]:
        """Return no measurements: time and memory may depend on images."""
        return {}, 0

    def protected(
        self,
        install: Install,
        kept: Mapping[str, Tensor],
        local: LocalExchange,  # noqa: ARG002
    ) -> tuple[LocalExchange, Unprotected]:
        """Return the exchange to train in, and the Gaussian mechanism, which starts from the received tensors alone.

        Raises:
            PayloadError: the server left out a part of the model.
        """
        received = install({})
        check_received(self.method, received.model, received.weights)
        protection = Protection(self.privacy, received, self.group_factor, simulated=self.contract.simulated)
        protection.before_training()
        return install(kept), protection


class Unprotected:
    """The upload of one exchange without differential privacy: it is sent as it is.

    Attributes:
        randomness: source of the noise; empty without noise.
    """

    randomness: Literal["", "keyed", "system"] = ""

    def prototypes(self, trained: PrototypeSet) -> PrototypeSet:
        """Return the prototypes to send in place of the class means of local training."""
        return trained

    def check_upload(self, upload: Upload) -> None:
        """Refuse an upload with tensors that were not protected."""

    def weights(self, trained: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the weights to send in place of the trained ones."""
        return trained

    def losses(self, losses: Mapping[str, float]) -> dict[str, float]:
        """Return the training losses for the answer.

        Raises:
            ConfigError: one is infinite or NaN.
        """
        wrong = [f"{name} is {loss}" for name, loss in losses.items() if not math.isfinite(loss)]
        if wrong:
            raise ConfigError(f"the loss {' and '.join(wrong)}: {DIVERGED}")
        return dict(losses)


class Protection(Unprotected):
    """The Gaussian mechanism for one exchange.

    Args:
        local: the exchange, with the received model.
        group_factor: how many times an image's change one change of the unit may be, see
            :func:`common.privacy.group_factor`.
        simulated: whether this machine plays several clients, so that ``auto`` is keyed noise.

    Attributes:
        randomness: source of the noise.
    """

    def __init__(
        self, privacy: GaussianPrivacy, local: LocalExchange, group_factor: float = 1.0, *, simulated: bool
    ) -> None:
        self.privacy, self.local, self.group_factor = privacy, local, group_factor
        self.randomness = "system"
        if privacy.randomness == "keyed" or (privacy.randomness == "auto" and simulated):
            self.randomness = "keyed"
        self._clean: PrototypeSet | None = None
        self._noised: PrototypeSet | None = None
        """A copy of the prototypes with noise, which the method cannot change."""

    def before_training(self) -> None:
        """Compute class means of clipped features of the **received** model, in evaluation mode.

        So they are with ``unit=sample`` and ``group``.

        After local training every feature depends on every image, through the weights. With the received model a
        feature is a function of its own image. Only then one image changes a class mean by at most 2 C / n.
        """
        if self.privacy.unit != "client" and self._sends_prototypes:
            features, labels = self.local.features()
            self._clean = class_means(clip_rows(features, self.privacy.clip), labels, self.local.class_count)

    @property
    def _sends_prototypes(self) -> bool:
        return self.local.method.prototypes_from != "none"

    def prototypes(self, trained: PrototypeSet) -> PrototypeSet:
        """Return class means with noise, clipped to length C again.

        Clipping after the noise costs no privacy. Labels and weights, the class counts, are sent unchanged.
        """
        if not self._sends_prototypes:
            return trained
        privacy, clean = self.privacy, self._clean
        scale = privacy.noise_multiplier * 2 * privacy.clip  # times the sensitivity's other factor
        if clean is None:
            clean = PrototypeSet(clip_rows(trained.vectors, privacy.clip), trained.labels, trained.weights)
            deviations = torch.full((len(clean), 1), scale * math.sqrt(len(clean)), dtype=torch.float64)
        else:
            counts = clean.weights.double().cpu()[:, None]
            deviations = scale * self.group_factor / counts
        noise = gaussian(tuple(clean.vectors.shape), self._draws("prototypes")) * deviations
        noised = clean.vectors.double().cpu() + noise
        vectors, labels, weights = clip_rows(noised, privacy.clip).float(), clean.labels.cpu(), clean.weights.cpu()
        self._noised = PrototypeSet(vectors.clone(), labels.clone(), weights.clone())
        return PrototypeSet(vectors, labels, weights)

    def check_upload(self, upload: Upload) -> None:
        """Refuse an upload with tensors that were not protected.

        Raises:
            PayloadError: see :func:`strategies.core.protection.check_nothing_else`.
        """
        check_nothing_else(upload, self._noised, self.local.weights)

    def losses(self, losses: Mapping[str, float]) -> dict[str, float]:  # noqa: ARG002
        """Return no losses: they depend on the training data and have no noise."""
        return {}

    def weights(self, trained: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the received weights plus a clipped update with noise; ``trained`` if weights are not protected.

        All floating-point tensors are clipped together, including running statistics. Values that are not finite keep
        the received ones; if the update's norm overflows, only noise is sent. Integers are sent as received.
        """
        clip = self.privacy.update_clip
        if clip is None or not trained:
            return trained
        received = self.local.weights
        sent = {name: received[name] for name in trained}
        updates: dict[str, Tensor] = {}
        squares = 0.0
        for name in sorted(trained):
            if trained[name].is_floating_point():
                updates[name] = finite_copy(trained[name].cpu().double() - received[name].cpu().double())
                squares += float(updates[name].square().sum())
        factor, draws = clip_factor(math.sqrt(squares), clip), self._draws("weights")
        deviation = self.privacy.update_noise_multiplier * 2 * clip
        for name, update in updates.items():
            noise = gaussian(tuple(update.shape), draws) * deviation
            value = received[name].double().cpu() + factor * update + noise
            if name.endswith("running_var"):
                value = value.clamp_min(0.0)  # the gate refuses negative variances; clamping costs no privacy
            sent[name] = value.to(trained[name].dtype)
        return sent

    def _draws(self, purpose: str) -> torch.Generator | None:
        """Return a generator keyed by all settings, so that two mechanisms never add the same noise; or ``None``."""
        if self.randomness == "system":
            return None
        return self.local.generator("privacy", purpose, self.local.settings.identity)
