"""A run's settings as frozen dataclasses: what ``conf/`` composes to, checked."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import AfterValidator, Field

from common.choices import imports_of, trust, trusted
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
from common.data.domain import DataSource
from common.data.protocols import Protocol
from common.data.views import Views
from common.errors import ConfigError, nearest
from common.models.specs import ModelSpec
from common.privacy import GaussianPrivacy, NoPrivacy
from common.versions import CODE, code_sha256
from common.wire.messages import printable

PLACES = ("output", "resume", "overwrite", "data.root", "choices", "experiment", "tracker")
"""Settings, and groups of them, that say where a run lies and who is told of it, or what others say already."""

NOT_THE_RESULT = (
    *(*PLACES, "engine", "train.device"),
    *("rounds.deadline", "rounds.registration", "rounds.failures", "rounds.checkpoints", "rounds.memory"),
)
"""Settings, and groups of them, that do not change what comes out of a run."""

LARGEST_RECORD = 100_000
"""Bytes of a ``config.yaml`` that is read; ours have 3,000."""

_SCORING = ("rounds.last_rounds", "rounds.evaluate_every", "rounds.test_samples", "rounds.test")
MAY_GO_ON_OTHERWISE = ("train.rounds", *_SCORING)
"""Settings that change the result, but not the rounds that are done: a run may go on with other values."""


def flat(settings: Mapping[str, Any], without: Sequence[str] = (), prefix: str = "") -> dict[str, Any]:
    """Nested settings as ``a.b.c`` keys, but those, and the groups, that ``without`` names; lists stay values."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if name not in without:
            found |= flat(value, without, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return found


def yaml_of(raw: Mapping[str, Any]) -> str:
    """The composed configuration as ``config.yaml`` has it."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(raw)))


def read_config(path: Path) -> dict[str, Any]:
    """What a run's ``config.yaml`` says. Nothing that it names is imported here, and later only what is trusted.

    Raises:
        ConfigError: it cannot be read, is no run's, or names for import what neither ``conf/`` nor the user names.
    """
    try:
        text = path.read_text()
        aliases = "*" in text and any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text))
        if aliases or len(text) > LARGEST_RECORD:
            raise ValueError("it is too large, or refers to parts of itself, which no run writes")
        content: Any = OmegaConf.to_container(OmegaConf.create(text))
    except (OSError, ValueError, RecursionError, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not _is_record(content):
        raise ConfigError(f"{path} is not a run's configuration")
    for where, name in imports_of(content):
        if not trusted(name, where):
            shown = printable(str(name))[:200]
            key = "engine.device" if where == "engine" else f"{where}._target_"
            raise ConfigError(
                f"{path}: {key}={shown} is not one of Goldfinch's own, and what only a folder names is not imported. "
                f"If it is yours, name it yourself: goldfinch resume {path.parent} {key}={shown}, or "
                f"goldfinch --own {shown} table, report, figure ..., or --config-dir with the folder that names it"
            )
    return {str(key): value for key, value in content.items()}


def _is_record(content: Any) -> bool:
    """Whether all is there that is read from a record as it stands."""
    groups = ("method", "data", "protocol", "model", "train", "rounds", "choices")
    if not isinstance(content, dict) or not all(isinstance(content.get(group), dict) for group in groups):
        return False
    numbers = (content.get("seed"), content["train"].get("rounds"), content["rounds"].get("last_rounds"))
    words = (content["method"].get("_target_"), *content["choices"], *filter(None, content["choices"].values()))
    domains = content["data"].get("domains")
    return (
        all(isinstance(number, int) for number in numbers)
        and all(isinstance(word, str) and printable(word) == word for word in words)
        and isinstance(domains, list | None)
    )


def differing(raw: Mapping[str, Any], path: Path) -> list[str]:
    """The settings that change the rounds which are done, and are not as ``config.yaml`` at ``path`` has them."""
    if not path.exists():
        return []
    same: Any = OmegaConf.to_container(OmegaConf.create(yaml_of(raw)))
    before, now = (result_settings(content, MAY_GO_ON_OTHERWISE) for content in (read_config(path), same))
    return sorted(key for key in before | now if before.get(key) != now.get(key))


def result_settings(raw: Mapping[str, Any], without: Sequence[str] = ()) -> dict[str, Any]:
    """Every setting that changes what comes out of a run, as ``a.b.c`` keys, but those that ``without`` names."""
    found = flat(raw, (*NOT_THE_RESULT, *without))
    if not found.get("protocol.validation"):
        found.pop("protocol.validation", None)  # runs without are what they were before there was any
    if found.get("data.duplicates") == "keep":
        found.pop("data.duplicates")  # likewise
    return found


@checked
class TrainSettings:
    """Rounds and local training (conf/train/).

    Args:
        rounds: communication rounds, >= 1.
        epochs: local epochs E per round, >= 1.
        local_steps: stop each local epoch after so many batches; ``None`` runs whole epochs.
        batch_size: samples per batch, >= 2.
        last_batch: a short last batch is kept, dropped, or merged into the one before, as a single sample always is.
        optimizer: ``sgd`` or ``adam``; made fresh for each client and round.
        learning_rate: > 0.
        momentum: SGD's momentum, in [0, 1).
        weight_decay: L2 coefficient, >= 0.
        clip_norm: largest norm of the gradient over all parameters; ``None`` does not clip.
        device: ``auto`` (CUDA where there is one), ``cpu``, ``cuda`` or ``cuda:0`` ...
        threads: CPU threads of one client. Another number may round differently, so it is part of what is reproducible.
        precision: ``float32``, or ``bfloat16`` autocast.
        channels_last: memory format of images and convolutions; ``None``: what the network's spec says was faster.
        deterministic: on CUDA, only deterministic algorithms.
    """

    rounds: Count = 10
    epochs: Count = 1
    local_steps: Count | None = None
    batch_size: AtLeastTwo = 32
    last_batch: Literal["keep", "drop", "merge"] = "keep"
    optimizer: Literal["sgd", "adam"] = "sgd"
    learning_rate: Positive = 0.01
    momentum: BelowOne = 0.9
    weight_decay: NonNegative = 1e-5
    clip_norm: Positive | None = None
    device: str = "auto"
    threads: Count = 1
    precision: Literal["float32", "bfloat16"] = "float32"
    channels_last: bool | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        name, _, index = self.device.partition(":")
        valid = self.device in ("auto", "cpu", "cuda") or (name == "cuda" and index.isdigit())
        check(valid, f"device must be auto, cpu, cuda or cuda:N; got {self.device!r}")


@checked
class RoundSettings:
    """How the server conducts rounds (conf/rounds/).

    Args:
        participation: share of clients sampled each round, in (0, 1]; at least one client.
        oversample: ask so many times as many, >= 1, with a participation below 1; whoever comes after enough have
            answered, and all who score (they are waited for), is late and does not count. Further exchanges ask those
            in time; in simulations the seed draws.
        quorum: share of the sampled clients that must answer for the round to count, in (0, 1].
        deadline: seconds a round's exchange may take; later clients are left out. Flower's default is twelve hours.
        registration: seconds to wait for all clients of the protocol to appear before the first round.
        failures: rounds in a row that may miss the quorum before the run stops.
        last_rounds: how many of the last rounds the ``last`` score averages (the papers: 5).
        checkpoints: rounds whose checkpoints are kept, >= 2.
        evaluate_every: score the test sets every so many rounds (the last round always).
        test_samples: score at most so many random images of each test split, always the same; ``None`` scores all.
        test: whether test sets are scored; ``False`` leaves them alone, as a search for settings must.
        absence: probability, in [0, 1), that a client is away, drawn for each round; one at least is always there.
        outliers: what becomes of an update that is too long: ``clip`` scales it down to the bound, ``refuse`` leaves it
            out, ``off`` lets any length in. See :mod:`strategies.core.bounds`.
        outlier_factor: the bound in lengths of the exchange's median update, > 1; a client's own history raises it.
        max_samples: registrations of more training samples are refused.
        largest_client: a client counts for at most so many times the samples of the federation's median client, >= 1.
        largest_share: a client's largest share of an average over three clients or more, in (0, 1]. A half: no client
            alone decides. FedPall's published digits need more (66 %). See :mod:`strategies.core.aggregation`.
        transport: what float32 tensors of the model and a method's further tensors are rounded to on the wire, both
            ways; prototypes and other dtypes travel as they are. See :mod:`common.wire.payload`.
        memory: GiB of an exchange's answers that stay in the server's memory, >= 0. What is beyond lies in mapped files
            in the run's folder until it is averaged; see :mod:`common.storage.answer_store`.
        joins: first round, >= 1, of the domains and clients that are not there from the beginning, by name.
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
    absence: BelowOne = 0.0
    outliers: Literal["clip", "refuse", "off"] = "clip"
    outlier_factor: Annotated[float, Field(gt=1)] = 1.5
    max_samples: Count = 10_000_000
    largest_client: Annotated[float, Field(ge=1)] = 10.0
    largest_share: Share = 0.5
    transport: Literal["float32", "bfloat16", "float16"] = "float32"
    memory: NonNegative = 1.5
    joins: dict[str, Count] | None = None

    def __post_init__(self) -> None:
        check(
            self.oversample == 1 or self.participation < 1,
            f"oversample={self.oversample:g} asks more clients than a round needs, and participation=1 needs all there "
            f"are; take participation={1 / self.oversample:.2g} or less",
        )

    def sampled(self, clients: int) -> int:
        """How many of so many clients a round needs: at least one."""
        return max(1, round(self.participation * clients))

    def asked(self, clients: int) -> int:
        """How many of so many clients are asked for it."""
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
    is_rule = hasattr(value, "average") and hasattr(value, "after_refusals")
    check(is_rule, f"must be a rule of averaging (strategies.core.aggregation.Mean); got {type(value).__name__}")
    return value


@checked
class RunSettings:
    """One run: what is trained on what, how, and where its output goes.

    ``method`` to ``views``, ``aggregation`` and ``privacy`` are the objects that their groups' ``_target_`` names.

    Args:
        method: a ``strategies.core.method.Method``, a class that this package cannot import.
        data: the data set.
        protocol: the clients, the samples of each, and the domains that are scored.
        model: the network to build.
        views: the views of an image that a method compares.
        train: rounds and local training.
        rounds: how the server runs rounds.
        aggregation: the server's rule of averaging, a ``strategies.core.aggregation.Mean``.
        seed: seed of model initialisation, shuffling, augmentation and client sampling, >= 0.
        output: folder of everything the run writes; absolute, or relative to where ``goldfinch`` was called.
        resume: go on from the checkpoint in ``output`` if there is one; ``anyway``: even if clients' data have changed.
        overwrite: replace a run that ``output`` holds already.
        engine: the chosen engine's own settings; read by that engine only.
        tracker: where rows go besides the CSV; read by the trackers only.
        raw: the composed configuration as plain containers, for the record.
    """

    method: Annotated[Any, AfterValidator(_method)]
    data: DataSource
    protocol: Protocol
    model: ModelSpec
    views: Views
    train: TrainSettings
    rounds: RoundSettings
    aggregation: Annotated[Any, AfterValidator(_aggregation)]
    seed: Natural
    output: str
    resume: Resume
    overwrite: bool
    engine: Mapping[str, Any]
    tracker: Mapping[str, Any]
    privacy: GaussianPrivacy | NoPrivacy
    raw: Mapping[str, Any] = field(repr=False)

    @cached_property
    def identity(self) -> str:
        """16 hex digits over everything that changes the result; a checkpoint of another identity is refused.

        What a run may go on with another value of is left out.
        """
        return self._digest(())

    @cached_property
    def configuration(self) -> str:
        """:attr:`identity` without the seed: runs of one configuration are averaged in tables."""
        return self._digest(("seed",))

    @cached_property
    def scoring(self) -> str:
        """16 hex digits over the settings that change which scores a run has, but not its state."""
        found = {key: value for key, value in flat(self.raw).items() if key in _SCORING}
        return hashlib.sha256(json.dumps(found, sort_keys=True, default=str).encode()).hexdigest()[:16]

    @cached_property
    def own_packages(self) -> tuple[str, ...]:
        """Packages of the user's that the settings name classes of."""
        return tuple(sorted({str(name).partition(".")[0] for _, name in imports_of(self.raw)} - set(CODE)))

    @cached_property
    def code(self) -> str:
        """:func:`common.versions.code_sha256` of all that the run's classes are made of."""
        return code_sha256(self.own_packages)

    @property
    def software(self) -> str:
        """What has to be the same on server and devices, in words."""
        return " and ".join(["the same Goldfinch", *(f"the same {package}" for package in self.own_packages)])

    def _digest(self, without: tuple[str, ...]) -> str:
        relevant = result_settings(self.raw, MAY_GO_ON_OTHERWISE + without)
        return hashlib.sha256(json.dumps(relevant, sort_keys=True, default=str).encode()).hexdigest()[:16]

    @cached_property
    def test_scorers(self) -> dict[str, int]:
        """The domains whose test sets are scored, in their order, and how many clients score each in a round.

        One client scores a shared model on a domain. Models of their own are scored by every client on its own domain.
        """
        held = Counter(spec.domain for spec in self.protocol.clients(self.data)) if self.method.personal else Counter()
        return {domain: max(1, held[domain]) for domain in self.protocol.test_domains(self.data)}

    @cached_property
    def validation_scorers(self) -> dict[str, int]:
        """The domains with validation samples, in their order, and how many clients hold some of each; may be empty."""
        if not self.protocol.validation:
            return {}
        return dict(Counter(spec.domain for spec in self.protocol.clients(self.data)))

    @cached_property
    def unseen_domains(self) -> tuple[str, ...]:
        """The domains whose test sets are scored and of which no client holds training samples."""
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
    """The same run with another method object; the record says so."""
    node = to_config(method)
    trust(str(name) for _, name in imports_of(node, "method"))  # objects of the caller's own process
    return replace(settings, method=method, raw={**settings.raw, "method": node})


def load_settings(overrides: Sequence[str] = ()) -> RunSettings:
    """Compose ``conf/`` with ``overrides`` and check every value.

    Raises:
        ConfigError: what is wrong, at which key, and the nearest valid choice.
    """
    return settings_of(compose_config(overrides))


def settings_of(raw: Mapping[str, Any]) -> RunSettings:
    """The settings that a composed configuration describes, such as a run's ``config.yaml``, checked.

    Raises:
        ConfigError: what is wrong, at which key, and the nearest valid choice.
    """
    groups = ("method", "data", "protocol", "model", "views", "aggregation", "privacy", "train", "rounds")
    for key in (*groups, "engine", "tracker"):
        if not isinstance(raw.get(key), Mapping):
            raise ConfigError(f"no {key} chosen; add {key}=NAME (see conf/{key}/)")
    if isinstance(raw["data"].get("root"), str):  # it means something else where the run is resumed
        raw = {**raw, "data": {**raw["data"], "root": str(Path(raw["data"]["root"]).expanduser().absolute())}}
    targets = {"train": TrainSettings, "rounds": RoundSettings}
    values = {key: build(raw[key], key, targets.get(key)) for key in groups}
    values |= {each.name: raw[each.name] for each in fields(RunSettings) if each.name not in (*groups, "raw")}
    if values["output"] is None:
        chosen = raw["choices"]
        values["output"] = str(Path("outputs", chosen["data"], chosen["method"], f"seed-{raw['seed']}"))
    settings = construct(RunSettings, {**values, "raw": raw})
    clients = settings.protocol.clients(settings.data)  # the protocol's domains must exist in the data set
    settings.aggregation.check(settings.method.name, settings.method.averages, settings.rounds.sampled(len(clients)))
    _check_validation(settings)
    _check_joins(settings, [name for spec in clients for name in (spec.domain, spec.id)])
    if getattr(settings.method, "multi_view", False) and settings.views.count < 1:
        raise ConfigError(
            f"method={raw['choices']['method']} compares views of an image, and views={raw['choices']['views']} gives "
            "none besides the image; choose views=randconv, augmented or another of conf/views/, with views.count >= 1"
        )
    return settings


def _check_validation(settings: RunSettings) -> None:
    validation, public = settings.protocol.validation, getattr(settings.method, "public", None)
    if not (settings.rounds.test or validation):
        raise ConfigError("rounds.test=false leaves nothing to score: set protocol.validation to a share such as 0.1")
    if validation and settings.rounds.oversample > 1:
        raise ConfigError(
            f"rounds.oversample={settings.rounds.oversample:g} goes on without the clients that answer last, and "
            f"protocol.validation={validation:g} compares rounds by the samples of every client: choose one of the two"
        )
    own = settings.data.domains if public is not None and public.source.name == settings.data.name else ()
    if validation and public is not None and public.domain in own:
        raise ConfigError(
            f"method.public takes training images of {public.domain}, of which protocol.validation={validation:g} "
            "holds some out: choose another public set"
        )


def _check_joins(settings: RunSettings, names: Sequence[str]) -> None:
    joins = settings.rounds.joins or {}
    for name in joins:
        if name not in names:
            raise ConfigError(f"rounds.joins.{name}: no such domain or client; {nearest(name, names)}")
    late = [name for name, first in joins.items() if first > settings.train.rounds]
    if late:
        raise ConfigError(f"rounds.joins: {', '.join(late)} would join after the last round, {settings.train.rounds}")
