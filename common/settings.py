"""A run's settings: the composed configuration as checked, frozen dataclasses."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from common.choices import imports_of, trust
from common.composition import compose_config
from common.config import FolderName, Seed, build, check, checked, construct, is_plain, to_config
from common.data.domain import DataSource
from common.data.inspection import check_clients, check_test_images, inspect_all, say_normalisation
from common.data.protocols import ClientSpec, Protocol
from common.data.table import placed
from common.data.views import Views
from common.errors import ConfigError, nearest
from common.metrics import CONFIDENCE_MEASURES, MEASURES, Measure
from common.models.specs import ModelSpec
from common.overrides import CONFIGURATION, Overrides, overrides_in, split_overrides
from common.own_metric import NoMetric, OwnMetric, check_own_metric
from common.privacy import GaussianPrivacy, NoPrivacy
from common.round_settings import RoundSettings, TrainSettings
from common.run_config import configuration_of, flat, identity_of, scoring_of, sent_config
from common.text import printable
from common.versions import OURS, check_imported_code, code_sha256

OWN_METRIC_IS_PRIVATE = (
    "privacy=gaussian covers no metric of your own: its sums are exact, and nothing checks what they are computed of"
)


def inspect_run(settings: "RunSettings") -> None:
    """Read and compare all domains of a simulation, those that are only scored too: see :func:`inspect_all`.

    Raises:
        DataError: see :func:`inspect_all`.
    """
    inspect_all(settings.data, settings.protocol, settings.seed, settings.privacy)


def _true_or_anyway(value: Any) -> Any:
    check(isinstance(value, bool) or value == "anyway", f"must be true, false or anyway; got {value!r:.200}")
    return value


Resume = Annotated[Any, AfterValidator(_true_or_anyway)]
"""A bool or ``anyway``."""


def _method(value: Any) -> Any:
    is_method = all(hasattr(value, name) for name in ("exchanges", "aggregate", "check"))
    check(is_method, f"must be a method (strategies.core.method.Method); got {type(value).__name__}")
    return value


def _aggregation(value: Any) -> Any:
    is_rule = hasattr(value, "average") and hasattr(value, "class_means")
    check(is_rule, f"must be a rule of averaging (strategies.core.aggregation.Mean); got {type(value).__name__}")
    return value


def _attack(value: Any) -> Any:
    check(hasattr(value, "clients"), f"must be an attack (strategies.core.attacks); got {type(value).__name__}")
    return value


@checked
class RunSettings:
    """Settings of one run: method, data, training, and the folder of its output.

    ``method`` to ``views``, ``aggregation``, ``attack`` and ``privacy`` are the objects that their groups' ``_target_``
    names.

    Args:
        method: a ``strategies.core.method.Method``, a class that this package cannot import.
        data: the data set.
        protocol: the clients, the samples of each, and the domains that are scored.
        model: the network to build.
        views: the views of an image that a method compares.
        train: rounds and local training.
        rounds: how the server runs rounds.
        aggregation: the server's rule of averaging, a ``strategies.core.aggregation.Mean``.
        attack: what hostile clients of a simulation do, a ``strategies.core.attacks.Attack``.
        own_metric: a metric of the user's own, which devices compute besides accuracy and loss.
        seed: seed of initialisation, shuffling, augmentation and client sampling, >= 0.
        output: folder that the run writes to; absolute, or relative to the working directory.
        resume: continue from the checkpoint in ``output`` if it exists; ``anyway``: even if clients' data have changed.
        overwrite: replace an existing run in ``output``.
        engine: the chosen engine's settings, which that engine reads.
        tracker: the chosen tracker's settings, which the trackers read.
        raw: the composed configuration as plain containers, written to ``config.yaml``.
    """

    method: Annotated[Any, AfterValidator(_method)]
    data: DataSource
    protocol: Protocol
    model: ModelSpec
    views: Views
    train: TrainSettings
    rounds: RoundSettings
    aggregation: Annotated[Any, AfterValidator(_aggregation)]
    attack: Annotated[Any, AfterValidator(_attack)]
    own_metric: OwnMetric
    seed: Seed
    output: FolderName
    resume: Resume
    overwrite: bool
    engine: Mapping[str, Any]
    tracker: Mapping[str, Any]
    privacy: GaussianPrivacy | NoPrivacy
    raw: Mapping[str, Any] = field(repr=False)

    @cached_property
    def clients(self) -> tuple[ClientSpec, ...]:
        """The clients: those of the protocol, or one that holds the samples of all of them (:attr:`Method.pools`)."""
        clients = self.protocol.clients(self.data)
        if self.method.pools:
            return (ClientSpec.pooled(clients),)
        return clients

    @cached_property
    def local_steps(self) -> int | None:
        """Batches after which a local epoch stops: ``train.local_steps`` for each client whose samples it has."""
        steps = self.train.local_steps
        if steps is not None and self.method.pools:
            steps *= len(self.protocol.clients(self.data))
        return steps

    @cached_property
    def identity(self) -> str:
        """16 hex digits over the settings that change the result; see :func:`common.run_config.identity_of`.

        A checkpoint of another identity is refused.
        """
        return identity_of(self.raw)

    @cached_property
    def configuration(self) -> str:
        """:attr:`identity` without the seed: runs of one configuration are averaged in tables."""
        return configuration_of(self.raw)

    @cached_property
    def scoring(self) -> str:
        """16 hex digits over the settings that change which scores a run has, but not its state."""
        return scoring_of(self.raw)

    @cached_property
    def own_packages(self) -> tuple[str, ...]:
        """The user's own packages with classes that the settings name, sorted."""
        packages: set[str] = set()
        for _, name in imports_of(self.raw):
            package = str(name).partition(".")[0]
            if package not in OURS:
                packages.add(package)
        return tuple(sorted(packages))

    @cached_property
    def code(self) -> str:
        """:func:`common.versions.code_sha256` of Goldfinch and the user's own packages."""
        return code_sha256(self.own_packages)

    def check_code(self) -> None:
        """Refuse code that was changed since this process imported it (:func:`common.versions.check_imported_code`)."""
        check_imported_code(self.own_packages)

    @property
    def software(self) -> str:
        """The software that server and devices must have in the same version, as text for messages."""
        return "the same Goldfinch" + "".join(f" and the same {package}" for package in self.own_packages)

    @property
    def alters_updates(self) -> dict[str, str]:
        """The settings under which the server may count another update than a client computed, each with a remedy."""
        remedies: dict[str, str] = {}
        if self.rounds.outliers != "off":
            remedies[f"rounds.outliers={self.rounds.outliers}"] = "rounds.outliers=off"
        if type(self.aggregation).__module__ != "strategies.core.aggregation":  # the average alone is there
            rule = self.choices.get("aggregation", type(self.aggregation).__name__)
            remedies[f"aggregation={rule}"] = "aggregation=mean"
        if self.rounds.transport != "float32":
            remedies[f"rounds.transport={self.rounds.transport}"] = "rounds.transport=float32"
        if isinstance(self.privacy, GaussianPrivacy) and self.privacy.update_clip is not None:
            remedies[f"privacy.update_clip={self.privacy.update_clip:g}"] = "privacy.update_clip=null"
        return remedies

    @cached_property
    def test_scorers(self) -> dict[str, int]:
        """The number of clients that score each test domain in a round, by domain, in the data's order.

        One client scores a shared model on a domain. If every client has a model of its own, all score theirs.
        """
        domains = self.protocol.test_domains(self.data)
        if not self.method.personal:
            return dict.fromkeys(domains, 1)
        held = self._clients_by_domain()
        return {domain: held.get(domain, 1) for domain in domains}

    @cached_property
    def validation_scorers(self) -> dict[str, int]:
        """The number of clients with validation samples by domain, in the data's order; empty without validation."""
        if not self.protocol.validation:
            return {}
        return self._clients_by_domain()

    @property
    def further_measures(self) -> dict[str, Measure]:
        """The metrics that only this run's settings ask for: those of confidences, and those of ``own_metric``."""
        measures: dict[str, Measure] = {}
        if self.rounds.scores:
            measures |= CONFIDENCE_MEASURES
        return measures | dict(self.own_metric.measures)

    @property
    def scheduled(self) -> bool:
        """Whether what a round does depends on the number of rounds, so that the run cannot be made longer."""
        return bool(self.method.scheduled) or self.train.schedule == "cosine"

    def _clients_by_domain(self) -> dict[str, int]:
        return dict(Counter(spec.domain for spec in self.clients))

    @cached_property
    def unseen_domains(self) -> tuple[str, ...]:
        """The test domains without a client, so without training samples."""
        held = {spec.domain for spec in self.protocol.clients(self.data)}
        return tuple(domain for domain in self.protocol.test_domains(self.data) if domain not in held)

    @property
    def choices(self) -> Mapping[str, str]:
        """The name of the option chosen in each group of ``conf/``."""
        return self.raw["choices"]

    @property
    def output_folder(self) -> Path:
        """``output`` as an absolute path."""
        return Path(self.output).expanduser().absolute()


def with_method(settings: RunSettings, method: Any) -> RunSettings:
    """Return the settings with another method object, also in ``raw``."""
    node = to_config(method)
    trust(str(name) for _, name in imports_of(node, "method"))  # objects of the caller's own process
    return replace(settings, method=method, raw={**settings.raw, "method": node})


def load_settings(overrides: Overrides = ()) -> RunSettings:
    """Return the checked settings of ``conf/`` composed with ``overrides``.

    Raises:
        ConfigError: a value is wrong; the message names the key and the nearest valid choice.
    """
    return settings_of(compose_config(overrides))


def settings_in(run_config: Mapping[str, object]) -> RunSettings:
    """Return the checked settings of a run configuration of Flower, on the server and on every device.

    ``goldfinch run`` sends a composed configuration, which is not composed again: every process has the same settings,
    and interpolations and files of overrides are of the machine that submitted the run. ``flwr run`` sends overrides.

    Raises:
        ConfigError: a value is wrong, or what was sent is no configuration.
    """
    text = str(run_config.get(CONFIGURATION, ""))
    if not text:
        return load_settings(split_overrides(overrides_in(run_config)))
    raw = sent_config(text)
    trust(str(name) for _, name in imports_of(raw))  # as with overrides, the user who submits a run names its classes
    return settings_of(raw)


def settings_of(raw: Mapping[str, Any]) -> RunSettings:
    """Return the checked settings of a composed configuration, such as a run's ``config.yaml``.

    Raises:
        ConfigError: a value is wrong; the message names the key and the nearest valid choice.
    """
    classes = ("method", "data", "protocol", "model", "views", "aggregation", "attack", "own_metric", "privacy")
    groups = (*classes, "train", "rounds")
    for key in (*groups, "engine", "tracker"):
        if not isinstance(raw.get(key), Mapping):
            raise ConfigError(f"no {key} chosen; add {key}=NAME (see conf/{key}/)")
    check_no_password(raw)
    raw = dict(raw)
    if raw["data"].get("_target_") == "common.data.table.Table":
        raw = {**raw, "data": placed(raw["data"])}
    root = raw["data"].get("root")
    if root and isinstance(root, str):  # relative to the present folder, not to that of a later resume
        raw = {**raw, "data": {**raw["data"], "root": str(Path(root).expanduser().absolute())}}
    targets = {"train": TrainSettings, "rounds": RoundSettings}
    values: dict[str, Any] = {"raw": raw}
    for key in groups:
        values[key] = build(raw[key], key, targets.get(key))
        if takes_class_defaults(raw, key):
            raw[key] = completed(raw[key], values[key])
    for each in fields(RunSettings):
        if each.name not in values:
            values[each.name] = raw[each.name]
    if values["output"] is None:
        chosen = raw["choices"]
        values["output"] = str(Path("outputs", chosen["data"], chosen["method"], f"seed-{raw['seed']}"))
    settings = construct(RunSettings, values)
    clients = settings.clients  # the protocol's domains must exist in the data set
    check_clients(settings.data, settings.protocol)
    settings.aggregation.check(settings.method.name, settings.method.averages, settings.rounds.sampled(len(clients)))
    settings.method.check(settings)
    _check_attack(settings)
    if settings.data.augmentation.transform is not None:
        settings.data.augmentation.transform.try_on(settings.data.image_size)
    check_test_images(settings.data, settings.privacy)
    _check_metrics(settings)
    _check_validation(settings)
    _check_freeze(settings)
    return settings


def check_no_password(raw: Mapping[str, Any]) -> None:
    """Check that no setting holds an address with a password: settings are recorded, and every device receives them.

    Raises:
        ConfigError: one does; the message does not repeat it.
    """
    for key, value in flat(raw).items():
        if re.search(r"://[^/\s@]*:[^/\s@]+@", str(value)):
            raise ConfigError(
                f"{key}: the address holds a password, and settings are recorded and sent to every device; leave the "
                "password out, and give it to the library itself (such as MLFLOW_TRACKING_PASSWORD, or ~/.pgpass)"
            )


def takes_class_defaults(raw: Mapping[str, Any], group: str) -> bool:
    """Return whether a group's defaults are those of its class.

    Such a class is the user's own, or was chosen by its dotted name. For other classes a file of ``conf/`` holds the
    defaults.
    """
    target = str(raw[group].get("_target_", "common."))
    return target.partition(".")[0] not in OURS or raw.get("choices", {}).get(group) == target


def completed(node: Mapping[str, Any], value: Any) -> dict[str, Any]:
    """Return a group's settings with the defaults of its class, so that the composed configuration holds all of them.

    Args:
        node: the settings that were given.
        value: the object that was built of them. Of its defaults those are left out that YAML cannot express, and
            classes, which nobody named.
    """
    values = dict(node)
    plain = to_config(value)
    for each in fields(value):
        if each.init and is_plain(plain[each.name]):
            values[each.name] = plain[each.name]
    if isinstance(value, DataSource) and not {"mean", "std", "normalisation"} & set(node.get("augmentation") or ()):
        say_normalisation(value, str(node["_target_"]))
    return values


def check_deployable(settings: RunSettings) -> None:
    """Refuse what is only simulated: a deployment never does it, neither its server nor its devices.

    Raises:
        ConfigError: the method is a bound of tables, or clients are to attack; the message says what to set.
    """
    if settings.attack.clients:
        raise ConfigError(
            f"attack={settings.choices['attack']}: clients attack in a simulation only, and no device ever does: set "
            "engine=inline or engine=ray, or attack=none"
        )
    if settings.method.bound:
        raise ConfigError(
            f"method={settings.method.name} is the {settings.method.bound} bound of a table and no federation, so it "
            "is only simulated: set engine=inline or engine=ray, or choose another method"
        )


def _check_attack(settings: RunSettings) -> None:
    known = [spec.id for spec in settings.clients]
    for client in settings.attack.clients:
        if client not in known:
            raise ConfigError(f"attack.clients: the protocol has no client {client}; {nearest(client, known)}")


def _check_metrics(settings: RunSettings) -> None:
    if not isinstance(settings.own_metric, NoMetric):  # the classes of own images may be known on the devices only
        check_own_metric(settings.own_metric, settings.data.class_count)
    if settings.own_metric.sum_names and isinstance(settings.privacy, GaussianPrivacy):
        raise ConfigError(f"{OWN_METRIC_IS_PRIVATE}; remove own_metric, or choose privacy=none")
    known = [*MEASURES, *settings.further_measures]
    metric = settings.rounds.metric
    if metric in CONFIDENCE_MEASURES and metric not in known:
        raise ConfigError(f"rounds.metric={metric} needs counts of confidences: set rounds.scores=true, too")
    if metric not in known:
        raise ConfigError(f"rounds.metric={printable(metric)[:100]!r}: {nearest(metric, known)}")


def _check_validation(settings: RunSettings) -> None:
    validation = settings.protocol.validation
    if settings.train.patience is not None and not validation:
        raise ConfigError(
            f"train.patience={settings.train.patience} stops a run by its scores on validation samples, and there are "
            "none: set protocol.validation to a share such as 0.1, in a new run (goldfinch resume: add output=DIR)"
        )
    if not (settings.rounds.test or validation):
        raise ConfigError("rounds.test=false leaves nothing to score: set protocol.validation to a share such as 0.1")
    if settings.rounds.metric != "accuracy" and not validation:
        raise ConfigError(
            f"rounds.metric={settings.rounds.metric} chooses a round by validation samples, and protocol.validation=0 "
            "holds none out: set protocol.validation to a share such as 0.1. For tables of test scores take goldfinch "
            f"table --metric {settings.rounds.metric}"
        )
    if validation and settings.rounds.oversample > 1:
        raise ConfigError(
            f"rounds.oversample={settings.rounds.oversample:g} leaves out the clients that answer last, and "
            f"protocol.validation={validation:g} compares rounds by the samples of every client: choose one of the two"
        )


def _check_freeze(settings: RunSettings) -> None:
    noised = isinstance(settings.privacy, GaussianPrivacy) and settings.privacy.update_clip is not None
    if settings.model.freeze == "backbone" and noised:
        raise ConfigError(
            "model.freeze=backbone keeps the backbone as it is, and privacy.update_clip adds noise to all weights that "
            "are sent; set model.freeze=none or privacy.update_clip=null"
        )
