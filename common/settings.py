"""A run's settings: the composed configuration as checked, frozen dataclasses."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from common.choices import imports_of, trust
from common.config import (
    AtLeastTwo,
    BelowOne,
    Count,
    Natural,
    NonNegative,
    Positive,
    Share,
    build,
    check,
    checked,
    compose_config,
    construct,
    to_config,
)
from common.data.batches import Augmentation
from common.data.domain import DataSource
from common.data.inspection import inspect
from common.data.protocols import ClientSpec, Protocol
from common.data.table import placed
from common.data.views import Views
from common.errors import ConfigError, nearest
from common.metrics import CONFIDENCE_MEASURES, MEASURES, Measure, Metric
from common.models.specs import ModelSpec
from common.overrides import CONFIGURATION, overrides_in, split_overrides
from common.own_metric import NoMetric, OwnMetric, check_own_metric
from common.privacy import GaussianPrivacy, NoPrivacy
from common.run_config import configuration_of, identity_of, scoring_of, sent_config
from common.text import printable, warn_once
from common.versions import OURS, code_sha256

OWN_METRIC_IS_PRIVATE = (
    "privacy=gaussian covers no metric of your own: its sums are exact, and nothing checks what they are computed of"
)


def check_test_images(data: DataSource, privacy: GaussianPrivacy | NoPrivacy) -> None:
    """Refuse a private run whose training images decide which images are scored.

    Raises:
        ConfigError: they do; the message names the setting.
    """
    if isinstance(privacy, GaussianPrivacy) and data.test_follows_training:
        raise ConfigError(
            f"{data.test_follows_training}: training images would decide which images are scored, so the number of "
            "scored images would tell of them without noise, and privacy=gaussian refuses it; remove copies from the "
            "data themselves and leave the setting out, or choose privacy=none"
        )


def inspect_run(settings: "RunSettings") -> None:
    """Read and compare all domains of a simulation, those that are only scored too: see :func:`inspect`.

    Raises:
        DataError: see :func:`inspect`.
    """
    protocol, data = settings.protocol, settings.data
    used = {client.domain for client in protocol.clients(data)} | set(protocol.test_domains(data))
    domains = [domain for domain in data.domains if domain in used]
    inspect(data, domains, private=isinstance(settings.privacy, GaussianPrivacy))


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
        clip_norm: largest norm of the gradient over all parameters; ``None`` does not clip.
        label_smoothing: share of the target that is spread evenly over all classes, in [0, 1). It acts on the
            cross-entropy of every method; scores use none.
        class_weights: ``balanced`` weights the cross-entropy of each sample inversely to its class's share of the
            client's training samples, see :func:`common.losses.classification.balanced_weights`.
        patience: rounds without a better average on validation samples after which the run stops; needs
            ``protocol.validation``. ``None`` runs all rounds.
        device: ``auto`` (CUDA if available), ``cpu``, ``cuda`` or ``cuda:0`` ...
        threads: CPU threads of one client. Another number may round differently and so change the result.
        precision: ``float32``, or autocast with ``bfloat16``.
        channels_last: memory format of images and convolutions; ``None`` takes the faster one of the network's spec.
        deterministic: use only deterministic algorithms on CUDA.
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

    def __post_init__(self) -> None:
        name, _, index = self.device.partition(":")
        valid = self.device in ("auto", "cpu", "cuda") or (name == "cuda" and index.isdigit())
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
        deadline: seconds that an exchange may take; clients that answer later are left out.
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
        transport: dtype to which float32 tensors of the model and of the method are rounded on the wire, both ways;
            prototypes and other dtypes are sent unchanged. See :mod:`common.wire.payload`.
        memory: GiB of an exchange's updates that stay in the server's memory, >= 0. Further updates are stored in
            memory-mapped files in the run's folder until they are averaged; see :mod:`common.storage`.
        key: what a round's participants are drawn from. ``None``: in simulations the seed; in a deployment, whose
            devices know the seed, a random number that stays on the server. ``summary.json`` holds it, so that a
            simulation can repeat a deployed run. A deployment refuses a given key, because devices receive settings.
    """

    participation: Share = 1.0
    oversample: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    quorum: Share = 0.5
    deadline: Positive = 3600.0
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
            f"are; take participation={1 / self.oversample:.2g} or less",
        )

    def sampled(self, clients: int) -> int:
        """Return the number of clients that a round needs, of ``clients``: at least one."""
        return max(1, round(self.participation * clients))

    def asked(self, clients: int) -> int:
        """Return the number of clients that a round asks, of ``clients``."""
        return min(clients, math.ceil(round(self.oversample * self.sampled(clients), 6)))  # 1.1 * 10 is above 11


def _true_or_anyway(value: Any) -> Any:
    check(isinstance(value, bool) or value == "anyway", f"must be true, false or anyway; got {value!r:.200}")
    return value


Resume = Annotated[Any, AfterValidator(_true_or_anyway)]
"""A bool or ``anyway``."""


def _method(value: Any) -> Any:
    is_method = hasattr(value, "exchanges") and hasattr(value, "aggregate")
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
    seed: Natural
    output: str
    resume: Resume
    overwrite: bool
    engine: Mapping[str, Any]
    tracker: Mapping[str, Any]
    privacy: GaussianPrivacy | NoPrivacy
    raw: Mapping[str, Any] = field(repr=False)

    @cached_property
    def clients(self) -> tuple[ClientSpec, ...]:
        """The clients: those of the protocol, or one that holds the samples of all of them (:attr:`Method.pools`)."""
        found = self.protocol.clients(self.data)
        if self.method.pools:
            return (ClientSpec.pooled(found),)
        return found

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
        found: set[str] = set()
        for _, name in imports_of(self.raw):
            package = str(name).partition(".")[0]
            if package not in OURS:
                found.add(package)
        return tuple(sorted(found))

    @cached_property
    def code(self) -> str:
        """:func:`common.versions.code_sha256` of Goldfinch and the user's own packages."""
        return code_sha256(self.own_packages)

    @property
    def software(self) -> str:
        """The software that server and devices must have in the same version, as text for messages."""
        text = "the same Goldfinch"
        for package in self.own_packages:
            text += f" and the same {package}"
        return text

    @property
    def alters_updates(self) -> dict[str, str]:
        """The settings under which the server may count another update than a client computed, each with a remedy."""
        found: dict[str, str] = {}
        if self.rounds.outliers != "off":
            found[f"rounds.outliers={self.rounds.outliers}"] = "rounds.outliers=off"
        if getattr(self.aggregation, "robust", False):
            rule = self.choices.get("aggregation", type(self.aggregation).__name__)
            found[f"aggregation={rule}"] = "aggregation=mean"
        if isinstance(self.privacy, GaussianPrivacy) and self.privacy.update_clip is not None:
            found[f"privacy.update_clip={self.privacy.update_clip:g}"] = "privacy.update_clip=null"
        return found

    @cached_property
    def test_scorers(self) -> dict[str, int]:
        """The number of clients that score each test domain in a round, by domain, in the data's order.

        One client scores a shared model on a domain. If every client has a model of its own, all score theirs.
        """
        found = dict.fromkeys(self.protocol.test_domains(self.data), 1)
        if self.method.personal:
            for domain, count in self._clients_by_domain().items():
                if domain in found:
                    found[domain] = count
        return found

    @cached_property
    def validation_scorers(self) -> dict[str, int]:
        """The number of clients with validation samples by domain, in the data's order; empty without validation."""
        if not self.protocol.validation:
            return {}
        return self._clients_by_domain()

    @property
    def further_measures(self) -> dict[str, Measure]:
        """The metrics that only this run's settings ask for: those of confidences, and those of ``own_metric``."""
        found: dict[str, Measure] = {}
        if self.rounds.scores:
            found |= CONFIDENCE_MEASURES
        return found | dict(self.own_metric.measures)

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


def load_settings(overrides: Sequence[str] = ()) -> RunSettings:
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
    groups = ("method", "data", "protocol", "model", "views", "aggregation", "privacy", "train", "rounds")
    for key in (*groups, "engine", "tracker"):
        if not isinstance(raw.get(key), Mapping):
            raise ConfigError(f"no {key} chosen; add {key}=NAME (see conf/{key}/)")
    added = {"own_metric": "common.own_metric.NoMetric", "attack": "strategies.core.attacks.NoAttack"}
    raw = {**{key: {"_target_": target} for key, target in added.items()}, **raw}  # a copy, with what older runs lack
    if raw["data"].get("_target_") == "common.data.table.Table":
        raw = {**raw, "data": placed(raw["data"])}
    if isinstance(raw["data"].get("root"), str):  # relative to the present folder, not to that of a later resume
        raw = {**raw, "data": {**raw["data"], "root": str(Path(raw["data"]["root"]).expanduser().absolute())}}
    targets = {"train": TrainSettings, "rounds": RoundSettings}
    values: dict[str, Any] = {"raw": raw}
    for key in (*groups, *added):
        values[key] = build(raw[key], key, targets.get(key))
        if is_described_by_no_file(raw, key):
            raw[key] = completed(raw[key], values[key])
    for each in fields(RunSettings):
        if each.name not in values:
            values[each.name] = raw[each.name]
    if values["output"] is None:
        chosen = raw["choices"]
        values["output"] = str(Path("outputs", chosen["data"], chosen["method"], f"seed-{raw['seed']}"))
    settings = construct(RunSettings, values)
    clients = settings.clients  # the protocol's domains must exist in the data set
    settings.aggregation.check(settings.method.name, settings.method.averages, settings.rounds.sampled(len(clients)))
    check_kept_step(settings)
    _check_pooled(settings)
    _check_attack(settings)
    check_test_images(settings.data, settings.privacy)
    _check_metrics(settings)
    _check_validation(settings)
    _check_smoothing(settings)
    _check_freeze(settings)
    if getattr(settings.method, "multi_view", False) and settings.views.count < 1:
        raise ConfigError(
            f"method={raw['choices']['method']} compares views of an image, and views={raw['choices']['views']} gives "
            "none besides the image; choose views=randconv, augmented or another of conf/views/, with views.count >= 1"
        )
    return settings


def is_described_by_no_file(raw: Mapping[str, Any], group: str) -> bool:
    """Return whether a group's class is the user's own or was chosen by its dotted name: no file has its defaults."""
    target = str(raw[group].get("_target_", "common."))
    return target.partition(".")[0] not in OURS or raw.get("choices", {}).get(group) == target


def completed(node: Mapping[str, Any], value: Any) -> dict[str, Any]:
    """Return a group's settings with the defaults of its class, so that the composed configuration holds all of them.

    Args:
        node: the settings that were given.
        value: the object that was built of them. Of its defaults those are left out that YAML cannot express, and
            classes, which nobody named.
    """
    found = dict(node)
    plain = to_config(value)
    for each in fields(value):
        if each.init and _is_plain(plain[each.name]):
            found[each.name] = plain[each.name]
    if isinstance(value, DataSource) and not {"mean", "std", "normalisation"} & set(node.get("augmentation") or ()):
        _say_normalisation(value, str(node["_target_"]))
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "_target_" not in value and all(map(_is_plain, value.values()))
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _say_normalisation(data: DataSource, target: str) -> None:
    """Log that images are normalised by ImageNet's mean and deviation, if nobody chose it."""
    default, used = Augmentation(), data.augmentation
    if (used.mean, used.std, used.normalisation) == (default.mean, default.std, default.normalisation):
        warn_once(
            f"{target}: images are normalised by ImageNet's mean and standard deviation, the default of "
            "data.augmentation; if they are not photographs, set data.augmentation.normalisation=image (each image by "
            "its own), or data.augmentation.mean and std"
        )


def check_kept_step(settings: RunSettings) -> None:
    """Refuse a method whose clients keep what the server made of their updates, if the server may change these.

    Raises:
        ConfigError: the method cannot be combined with the settings; the message says what to set.
    """
    altering = settings.alters_updates
    if altering and getattr(settings.method, "keeps_step", None):
        raise ConfigError(
            f"method={settings.method.name}: each client keeps a correction that must equal what the server made of "
            f"its updates, and {' and '.join(altering)} may change them on the way, so that the two drift apart; set "
            f"{' '.join(altering.values())}, or choose a method that keeps no such correction (fedavg, fpl ...)"
        )


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


def _check_pooled(settings: RunSettings) -> None:
    if settings.method.pools and isinstance(settings.privacy, GaussianPrivacy):
        raise ConfigError(
            f"method={settings.method.name} has all clients' images in one place, so there is nothing that privacy="
            f"{settings.choices['privacy']} could protect: set privacy=none"
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
    validation, public = settings.protocol.validation, getattr(settings.method, "public", None)
    if settings.train.patience is not None and not validation:
        raise ConfigError(
            f"train.patience={settings.train.patience} stops a run by its scores on validation samples, and there are "
            "none: set protocol.validation to a share such as 0.1"
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
    if not validation or public is None or public.source.name != settings.data.name:
        return
    if public.domain in settings.data.domains:
        raise ConfigError(
            f"method.public takes training images of {public.domain}, and protocol.validation={validation:g} "
            "holds some of these out: choose another public set"
        )


def _check_smoothing(settings: RunSettings) -> None:
    if settings.train.label_smoothing and hasattr(settings.method, "smoothing"):
        raise ConfigError(
            f"train.label_smoothing={settings.train.label_smoothing:g}: method={settings.choices['method']} smooths "
            "labels by a setting of its own; set method.smoothing instead"
        )


def _check_freeze(settings: RunSettings) -> None:
    noised = isinstance(settings.privacy, GaussianPrivacy) and settings.privacy.update_clip is not None
    if settings.model.freeze == "backbone" and noised:
        raise ConfigError(
            "model.freeze=backbone keeps the backbone as it is, and privacy.update_clip adds noise to all weights that "
            "are sent; set model.freeze=none or privacy.update_clip=null"
        )
