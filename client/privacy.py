"""Differential privacy on the device: what is clipped and noised before anything is encoded.

See :mod:`common.privacy` for what neighbouring data sets are and why the sensitivities hold.
"""

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from client.trainer import LocalExchange
from common.privacy import GaussianPrivacy, clip_factor, clip_rows, finite, gaussian
from common.prototypes import PrototypeSet, class_means


class Protection:
    """The mechanism for one exchange.

    Args:
        local: the exchange, with the model as it was received.
        simulated: whether this machine plays several clients, so that keyed noise is what ``auto`` means.

    Attributes:
        randomness: where the noise comes from.
    """

    def __init__(self, privacy: GaussianPrivacy, local: LocalExchange, *, simulated: bool) -> None:
        self.privacy, self.local = privacy, local
        keyed = privacy.randomness == "keyed" or (privacy.randomness == "auto" and simulated)
        self.randomness: Literal["keyed", "system"] = "keyed" if keyed else "system"
        self._clean: PrototypeSet | None = None

    def before_training(self) -> None:
        """Class means of clipped features under the model **as received**, in evaluation mode (``unit=sample``).

        After local training every feature depends on every image, through the weights; with the received model a
        feature is a function of its own image, and only then does one image move a class mean by at most 2 C / n.
        """
        if self.privacy.unit == "sample" and self._sends_prototypes:
            features, labels = self.local.features()
            self._clean = class_means(clip_rows(features, self.privacy.clip), labels, self.local.class_count)

    @property
    def _sends_prototypes(self) -> bool:
        return self.local.method.prototypes_from != "none"

    def prototypes(self, trained: PrototypeSet) -> PrototypeSet:
        """What is sent in place of the class means that training left: noised, and no longer than C again.

        Shortening the noised means costs no privacy, and the clean ones are no longer either. Labels and weights, the
        class counts, are sent as they are.
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
            deviations = scale / counts
        noise = gaussian(tuple(clean.vectors.shape), self._draws("prototypes")) * deviations
        noised = clean.vectors.double().cpu() + noise
        return PrototypeSet(clip_rows(noised, privacy.clip).float(), clean.labels.cpu(), clean.weights.cpu())

    def weights(self, trained: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The received weights plus a clipped, noised update; ``trained`` itself where updates are not protected.

        All floating-point tensors are clipped together, running statistics included. Values that are not finite do not
        move; if the update's norm overflows, noise alone is sent. Integers are sent as they were received.
        """
        clip = self.privacy.update_clip
        if clip is None or not trained:
            return trained
        received = self.local.weights
        floats = sorted(name for name, tensor in trained.items() if tensor.is_floating_point())
        updates = {name: finite(trained[name].cpu().double() - received[name].cpu().double()) for name in floats}
        norm = math.sqrt(sum(float(update.square().sum()) for update in updates.values()))
        factor, draws = clip_factor(norm, clip), self._draws("weights")
        deviation = self.privacy.update_noise_multiplier * 2 * clip
        sent = {name: received[name] for name in trained}
        for name in floats:
            noise = gaussian(tuple(updates[name].shape), draws) * deviation
            value = received[name].double().cpu() + factor * updates[name] + noise
            if name.endswith("running_var"):
                value = value.clamp_min(0.0)  # a variance; the gate would refuse it, and this costs no privacy
            sent[name] = value.to(trained[name].dtype)
        return sent

    def _draws(self, purpose: str) -> torch.Generator | None:
        """A generator that is keyed by all settings, so that two mechanisms never add the same noise; or ``None``."""
        if self.randomness == "system":
            return None
        return self.local.generator("privacy", purpose, self.local.settings.identity)
