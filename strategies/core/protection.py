"""Which methods differential privacy can cover, and the check that nothing else leaves a device."""

from collections.abc import Mapping

from torch import Tensor, nn

from common.errors import ConfigError, PayloadError
from common.privacy import GaussianPrivacy, NoPrivacy
from strategies.core.method import Expected, Method, Upload

CLASS_MEANS = ("last_epoch_running", "post_eval")


def check_protects(privacy: GaussianPrivacy | NoPrivacy, method: Method, model: nn.Module, expected: Expected) -> None:
    """Refuse a run whose uploads the mechanism does not bound.

    Args:
        privacy: the run's choice.
        method: the method.
        model: its model, extended.
        expected: what the uploads of the exchange ``train`` carry.

    Raises:
        ConfigError: what the method sends, or keeps, that is not covered, and what to choose instead.
    """
    if not isinstance(privacy, GaussianPrivacy):
        return
    name = method.name
    if method.exchanges != ("train",) or expected.extra:
        sent = ", ".join(sorted(expected.extra)[:3]) or "answers to further exchanges"
        raise ConfigError(f"privacy=gaussian covers class means and weights; {name} also sends {sent}")
    if expected.prototypes and method.prototypes_from not in CLASS_MEANS:
        raise ConfigError(f"privacy=gaussian covers class means; {name} makes prototypes of its own, without a bound")
    if expected.prototypes and privacy.unit == "sample" and method.shared_names(model) != set(model.state_dict()):
        raise ConfigError(
            f"privacy.unit=sample: {name} keeps part of the model on the device, trained on all of its images, so one "
            "image changes every feature and its effect on a class mean has no bound; choose privacy.unit=client"
        )
    if not expected.prototypes and (privacy.update_clip is None or not expected.weights):
        raise ConfigError(
            f"privacy=gaussian: {name} sends no class means; set privacy.update_clip to cover its weights"
        )


def check_nothing_else(upload: Upload, protected: object, weights: Mapping[str, Tensor]) -> None:
    """The last look before a protected upload leaves the device.

    Args:
        upload: what the method wants to send.
        protected: the noised prototype set.
        weights: the weights that are sent.

    Raises:
        PayloadError: tensors that the mechanism has not seen.
    """
    if upload.extra or (upload.prototypes is not None and upload.prototypes is not protected):
        raise PayloadError("privacy=gaussian: the method would send tensors that carry no noise; nothing was sent")
    if upload.weights is not None and weights and set(upload.weights) != set(weights):
        raise PayloadError("privacy=gaussian: the method would send other weights than it received; nothing was sent")
