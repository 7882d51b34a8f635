"""Which methods differential privacy can cover, and the check that a device sends nothing without noise."""

from collections.abc import Mapping

from torch import Tensor, nn

from common.errors import ConfigError, PayloadError
from common.privacy import GaussianPrivacy, NoPrivacy
from strategies.core.method import Method, Upload, UploadSpec

CLASS_MEANS = ("last_epoch_running", "post_eval")


def check_protects(
    privacy: GaussianPrivacy | NoPrivacy,
    method: Method,
    model: nn.Module,
    expected: UploadSpec,
    validation: float = 0.0,
) -> None:
    """Refuse a run in which a device sends something that the mechanism does not cover, or sends nothing with noise.

    Args:
        privacy: the run's privacy settings.
        method: the method.
        model: its model, extended.
        expected: what the uploads of the exchange ``train`` carry.
        validation: share of the training samples that clients score instead of training on them.

    Raises:
        ConfigError: the method sends, scores or keeps something that is not covered; the message names it and says
            what to choose instead.
    """
    if not isinstance(privacy, GaussianPrivacy):
        return
    name = method.name
    if method.exchanges != ("train",) or expected.extra:
        sent = ", ".join(sorted(expected.extra)[:3]) or "replies in further exchanges"
        raise ConfigError(f"privacy=gaussian covers class means and weights; {name} also sends {sent}")
    if expected.prototypes and method.prototypes_from not in CLASS_MEANS:
        raise ConfigError(f"privacy=gaussian covers class means; {name} makes prototypes of its own, without a bound")
    check_scores(privacy, method, validates=validation > 0)
    if expected.prototypes and privacy.unit == "sample" and method.shared_names(model) != set(model.state_dict()):
        raise ConfigError(
            f"privacy.unit=sample: {name} keeps part of the model on the device, trained on all of its images, so one "
            "image changes every feature and its effect on a class mean has no bound; choose privacy.unit=client"
        )
    weights = expected.weights and bool(method.shared_names(model))
    if privacy.noised(prototypes=expected.prototypes, weights=weights):
        return
    if expected.prototypes:
        raise ConfigError(
            "privacy=gaussian: nothing would carry noise; set privacy.noise_multiplier above 0, or choose privacy=none"
        )
    raise ConfigError(
        f"privacy=gaussian: {name} sends no class means, so nothing would carry noise; set privacy.update_clip and "
        "privacy.update_noise_multiplier above 0 to cover its weights"
    )


def check_scores(privacy: GaussianPrivacy | NoPrivacy, method: Method, *, validates: bool) -> None:
    """Refuse scores that depend on training or validation images other than through the received model.

    A score carries no noise. The score of the received model on test images reveals nothing new about the training
    images. But if a model holds parts that only the client trained, or was adapted to its training images, then its
    score, its loss and its confusion matrix are exact functions of these images.

    Args:
        privacy: the run's privacy settings.
        method: the method.
        validates: whether clients score images that were taken from their training samples.

    Raises:
        ConfigError: there are such scores; the message says which, and what to choose instead.
    """
    if isinstance(privacy, GaussianPrivacy):
        check_exact_scores("privacy=gaussian", method, validates=validates)


def check_exact_scores(setting: str, method: Method, *, validates: bool) -> None:
    """Refuse the scores of :func:`check_scores`, whatever it is that forbids them.

    Args:
        setting: what forbids them, for the message.
        method: the method.
        validates: as in :func:`check_scores`.

    Raises:
        ConfigError: as in :func:`check_scores`.
    """
    if method.scores_own_training:
        raise ConfigError(
            f"{setting}: {method.name} is scored on models that hold a part of each client's own, and such "
            "scores are exact functions of its training images, without noise; choose a method whose shared model is "
            "scored (fpl, fedproc, fedavg, fedprox ...; fedproto with method.aggregate_models=true, per_fedavg with "
            "method.adapt_steps=0), or privacy=none on a device without a budget"
        )
    if validates:
        raise ConfigError(
            f"{setting}: validation scores are exact functions of the client's own images, without noise; remove "
            "protocol.validation, or choose privacy=none on a device without a budget"
        )


def check_nothing_else(upload: Upload, protected: object, weights: Mapping[str, Tensor]) -> None:
    """Check a protected upload before it leaves the device.

    Args:
        upload: the method's upload.
        protected: the noised prototype set.
        weights: the weights that are sent.

    Raises:
        PayloadError: the upload has tensors without noise.
    """
    if upload.extra or (upload.prototypes is not None and upload.prototypes is not protected):
        raise PayloadError("privacy=gaussian: the method would send tensors that carry no noise; nothing was sent")
    if upload.weights is not None and weights and set(upload.weights) != set(weights):
        raise PayloadError("privacy=gaussian: the method would send other weights than it received; nothing was sent")
