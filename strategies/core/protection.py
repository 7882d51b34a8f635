"""Whether a request may be served: :func:`check_request`, the one check of settings that devices and server share.

A server calls it before the first round, so that a run which no device would answer ends at once. A hostile server can
leave the check out. So each device calls it as well, with its own contract: when it registers, and in every exchange on
the received model.
"""

from collections.abc import Collection
from dataclasses import replace

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from common.contract import Contract
from common.data.inspection import check_test_images
from common.errors import ConfigError, PayloadError, PrivacyError
from common.privacy import GaussianPrivacy, NoPrivacy
from common.prototypes import PrototypeSet
from common.settings import OWN_METRIC_IS_PRIVATE, RunSettings
from strategies.core.method import Method, Upload, UploadSpec, server_context

CLASS_MEANS = ("last_epoch_running", "post_eval")

UNKNOWN = Contract(simulated=True)
"""What a server checks against before it asks: no device has told it a contract."""


def check_request(
    contract: Contract,
    settings: RunSettings,
    model: nn.Module,
    client_count: int,
    *,
    round_number: int = 0,
    exchange: str = "train",
    scores: bool = False,
    validates: bool = False,
) -> None:
    """Check that a device may do what it is asked: its contract allows it, and noise covers what would leave.

    The contract's terms of data are checked where they are read, see :meth:`common.contract.Contract.check_terms`.

    Args:
        contract: the device's; :data:`UNKNOWN` on a server.
        settings: the run's settings.
        model: its model, extended; in an exchange the received one.
        client_count: number of clients of the run.
        round_number: the exchange's round; 0 before the first.
        exchange: its name.
        scores: whether it scores test images.
        validates: whether it scores images that were taken from its training samples.

    Raises:
        PrivacyError: the contract forbids it: an update without noise, or with noise that the server could repeat.
        ConfigError: differential privacy does not cover what the method sends, scores or keeps.
    """
    privacy, method = settings.privacy, settings.method
    if isinstance(privacy, GaussianPrivacy):
        check_test_images(settings.data, privacy)
        if privacy.randomness == "keyed" and not (contract.simulated or contract.allows_keyed):
            raise PrivacyError(
                "privacy.randomness=keyed: anyone who knows the run's seed could subtract this device's noise; choose "
                "privacy.randomness=auto, or allow it on the device by --node-config 'privacy-randomness=\"keyed\"'"
            )
        if privacy.unit == "group" and not settings.data.grouped:
            raise ConfigError(
                "privacy.unit=group: nothing says which images belong together; name the column of a table that does, "
                "data.group=COLUMN (data=table), or choose privacy.unit=sample or client"
            )
        if settings.own_metric.sum_names:
            raise ConfigError(f"{OWN_METRIC_IS_PRIVATE}; nothing was sent")
        server = server_context(settings, model, client_count)
        expected = method.expects(replace(server, round=round_number, exchange=exchange))
        check_protects(privacy, method, model, expected, settings.protocol.validation)
    if (scores or validates) and contract.budget:
        check_exact_scores(contract.budget, method, validates=validates)
    _check_noise(contract, settings, model)


def multipliers_of(contract: Contract, settings: RunSettings, model: nn.Module) -> dict[str, float]:
    """Return the noise multiplier of each part of an update; 0 for noise that is absent or known to the server.

    Args:
        contract: the device's.
        settings: the run's settings.
        model: its model, extended.
    """
    privacy, method = settings.privacy, settings.method
    if not isinstance(privacy, GaussianPrivacy):
        return {"everything": 0.0}
    prototypes, weights = method.prototypes_from != "none", bool(method.shared_names(model))
    noised = privacy.noised(prototypes=prototypes, weights=weights)
    if privacy.randomness == "keyed" and not contract.simulated:
        noised = {}
    multipliers: dict[str, float] = {}
    if prototypes:
        multipliers["prototypes"] = noised.get("prototypes", 0.0)
    if weights:
        multipliers["weights"] = noised.get("weights", 0.0)
    return multipliers


def _check_noise(contract: Contract, settings: RunSettings, model: nn.Module) -> None:
    """Refuse an update of which a part would carry no noise, if the device's or the run's epsilon has a limit."""
    limit = contract.max_epsilon
    privacy = settings.privacy
    if not limit and isinstance(privacy, GaussianPrivacy) and privacy.max_epsilon is not None:
        limit = f"privacy.max_epsilon={privacy.max_epsilon:g}"
    if not limit or not settings.method.trains:
        return
    bare = [part for part, multiplier in multipliers_of(contract, settings, model).items() if not multiplier]
    if bare:
        raise PrivacyError(
            f"{limit} allows no update without noise, and this run's would have: {', '.join(bare)}. Choose "
            "privacy=gaussian with privacy.update_clip and both noise multipliers above 0, and privacy.randomness=auto"
        )


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
        model: its model, extended; on a device, the one that it received.
        expected: what the uploads of the exchange carry.
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
    makes_means = expected.prototypes or method.prototypes_from != "none"
    if makes_means and privacy.unit != "client":
        _check_features(privacy.unit, method, model)
    weights = expected.weights and bool(method.shared_names(model))
    if privacy.noised(prototypes=expected.prototypes, weights=weights):
        return
    if expected.prototypes:
        raise ConfigError(
            "privacy=gaussian: nothing would carry noise; set privacy.noise_multiplier above 0, or choose privacy=none"
        )
    remedy = "set privacy.update_clip and privacy.update_noise_multiplier above 0 to cover its weights"
    if method.keeps_step:
        remedy = "nor can its weights, since clients keep a correction: choose another method, such as fpl or fedavg"
    raise ConfigError(f"privacy=gaussian: {name} sends no class means, so nothing would carry noise; {remedy}")


def _check_features(unit: str, method: Method, model: nn.Module) -> None:
    """Refuse a model of which a feature may depend on other images than its own; ``unit`` is not ``client``."""
    if method.shared_names(model) != set(model.state_dict()):
        raise ConfigError(
            f"privacy.unit={unit}: {method.name} keeps part of the model on the device, trained on all of its images, "
            "so one image changes every feature and its effect on a class mean has no bound; choose privacy.unit=client"
        )
    for place, layer in model.named_modules():
        if isinstance(layer, _BatchNorm) and layer.running_mean is None:
            raise ConfigError(
                f"privacy.unit={unit}: the layer {place} normalises by its batch, so one image changes the features of "
                "others and its effect on a class mean has no bound; choose privacy.unit=client"
            )


def check_received(method: Method, model: nn.Module, weights: Collection[str]) -> None:
    """Check that a private device received all that its method shares, before it scores or trains.

    What was not received would be the device's own: left from earlier training, or read from a file of the device.

    Args:
        method: the method.
        model: its model.
        weights: names of the received tensors of the model.

    Raises:
        PayloadError: a tensor is missing.
    """
    missing = method.shared_names(model) - set(weights)
    if missing:
        raise PayloadError(
            f"the server asks for a score or an update of a private device and sent {len(missing)} tensors of the "
            f"model too few, such as {min(missing)}; nothing was sent"
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
    """Refuse the scores of :func:`check_scores` for the given setting.

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


def check_nothing_else(upload: Upload, protected: PrototypeSet | None, shared: Collection[str]) -> None:
    """Check a protected upload before it leaves the device: it holds what the ledger counts, and nothing besides.

    Args:
        upload: the method's upload.
        protected: the prototypes with noise, in tensors that the method cannot reach; ``None`` if it makes none.
        shared: names of the tensors of the model that the method shares.

    Raises:
        PayloadError: the upload has tensors without noise.
    """
    if upload.extra or (upload.prototypes is not None and upload.prototypes != protected):
        raise PayloadError("privacy=gaussian: the method would send tensors that carry no noise; nothing was sent")
    if upload.weights is not None and set(upload.weights) != set(shared):
        raise PayloadError("privacy=gaussian: the method would send other weights than it shares; nothing was sent")
