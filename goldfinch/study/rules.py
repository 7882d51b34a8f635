"""The rules of a comparison: what all methods share, what is searched and how long, and what is scored.

docs/fair-comparison.md explains the rules. Model selection follows DomainBed (Gulrajani and Lopez-Paz, ICLR 2021), and
repeated tuning follows AlgoPerf (Dahl et al., 2023).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from common.choices import choices_of
from common.composition import compose_config
from common.config import Search, search_ranges
from common.errors import ConfigError
from common.metrics import MEASURES, Measure
from common.overlays import printed_values
from common.privacy import GaussianPrivacy
from common.run_config import FOLDER_KEYS, result_settings
from common.settings import RunSettings, settings_of
from goldfinch.study.options import IN_DOMAIN, LEAVE_ONE_OUT, NAMES, Rules

BASE = "fedavg"
"""The method that the others are compared with, if it is among them; otherwise it is the first."""

VALIDATION = "protocol.validation=0.1"
PARTITION = "protocol.partition_seed"
RATE = "train.learning_rate"
RATE_FACTOR = 10.0
"""The learning rate is searched from a tenth to ten times its value in the settings."""

LEFT_OUT = "leave_out:"
"""The beginning of the name of a case in which one domain has no client; the score is that of this domain."""

OWN_KEYS = (
    *FOLDER_KEYS,
    *("method", "seed", "tuned", "printed", "experiment"),
    *("rounds.test", "train.patience", PARTITION, "protocol.leave_out"),
)
"""Settings that the rules set themselves."""

Start = Literal["printed", "default", "given"]


@dataclass(frozen=True)
class Entrant:
    """One method in one case.

    Args:
        method: its name in conf/method/.
        case: ``in_domain``, or ``leave_out:`` with a domain.
        overrides: the overrides of all its runs, without seed and output.
        settings: the settings that they compose.
        space: the range of each searched setting.
        start: the origin of the first trial's values: ``printed`` (in a paper, for this data set), ``default`` (of the
            method) or ``given`` (by the user).
        fixed: printed settings that are not searched.
    """

    method: str
    case: str
    overrides: tuple[str, ...]
    settings: RunSettings
    space: Mapping[str, Search]
    start: Start = "default"
    fixed: Mapping[str, float] = field(default_factory=dict)

    @property
    def left_out(self) -> str | None:
        """The domain without a client; ``None`` if every domain has one."""
        if self.case == IN_DOMAIN:
            return None
        return self.case.removeprefix(LEFT_OUT)


def chosen_methods(methods: Sequence[str]) -> list[str]:
    """Return the names of the methods, each once, FedAvg first; ``*`` is all of conf/method/.

    Raises:
        ConfigError: there is none, or one is no name of a method.
    """
    names = list(dict.fromkeys(methods))
    if names == ["*"]:
        names = sorted(choices_of("method"))
    if not names:
        raise ConfigError("a comparison needs methods: goldfinch compare --methods fedavg,fpl data=glyphs")
    for name in names:
        if set(name) & set(",*"):
            raise ConfigError(f"{name!r} is no method: write --methods A,B, in Python ['A', 'B']; '*' alone is all")
    return sorted(names, key=lambda name: name != BASE)


def entrants_of(methods: Sequence[str], overrides: Sequence[str], rules: Rules) -> tuple[list[Entrant], dict[str, str]]:
    """Return every method in every case, and with ``*`` the methods that cannot take part, with the reason.

    Raises:
        ConfigError: a setting is not valid, is set by the rules, or a method that was named cannot take part.
        DataError: the data set's files are not there.
    """
    names = chosen_methods(methods)
    _check_overrides(overrides, names)
    entrants: list[Entrant] = []
    left_out: dict[str, str] = {}
    for name in names:
        try:
            for case in _cases(name, overrides, rules):
                entrant = _entrant(name, case, overrides, rules)
                _check_shared(entrant, entrants)
                entrants.append(entrant)
        except ConfigError as error:
            if list(methods) != ["*"]:
                raise ConfigError(f"{name}: {error}") from error
            left_out[name] = str(error)
    if not entrants:
        raise ConfigError(f"no method is left to compare; {next(iter(left_out.values()))}")
    return entrants, left_out


def _check_overrides(overrides: Sequence[str], names: Sequence[str]) -> None:
    for item in overrides:
        key = item.partition("=")[0].lstrip("+~")
        if key in ("rules", "weighting"):
            raise ConfigError(
                f"{item}: every comparison follows the rules of docs/fair-comparison.md; their numbers are options: "
                f"{', '.join(f'--{name}' for name in NAMES)}"
            )
        if key == "method":
            raise ConfigError(f"{item}: choose the methods of a comparison by --methods A,B")
        if key.startswith("method.") and len(names) > 1:
            raise ConfigError(f"{item}: settings of a method are for it alone; compare one method, or leave it out")
        if key in OWN_KEYS:
            raise ConfigError(f"{item}: the rules set {key} themselves, so that all rows have the same; leave it out")


def _cases(method: str, overrides: Sequence[str], rules: Rules) -> list[str]:
    """Return the names of the cases.

    Raises:
        ConfigError: domains are to be left out, and the protocol is not one client per domain.
    """
    cases: list[str] = []
    if IN_DOMAIN in rules.scores:
        cases.append(IN_DOMAIN)
    if LEAVE_ONE_OUT in rules.scores:
        settings = settings_of(compose_config(_compose(method, IN_DOMAIN, overrides, rules)[0]))
        protocol = settings.choices["protocol"]
        if protocol != "one_per_domain":
            raise ConfigError(
                f"--scores leave_one_out leaves out one domain after another, with one client for each other domain; "
                f"protocol={protocol} has its own clients: take --scores in_domain"
            )
        for domain in settings.data.domains:
            cases.append(f"{LEFT_OUT}{domain}")
    return cases


def _compose(method: str, case: str, overrides: Sequence[str], rules: Rules) -> tuple[list[str], str]:
    """Return the overrides of a method's runs in a case, without seed, output and printed values, and the data set."""
    chosen = [f"method={method}", VALIDATION, *overrides]
    if case != IN_DOMAIN:
        chosen = [item for item in chosen if not item.startswith("protocol=")]
        chosen += ["protocol=leave_one_out", f"protocol.leave_out=[{case.removeprefix(LEFT_OUT)}]"]
    composed = compose_config(chosen)
    if "partition_seed" in composed["protocol"]:
        chosen.append(f"{PARTITION}=null")
    if rules.weighting and "weighting" in composed["method"]:
        chosen.append(f"method.weighting={rules.weighting}")
    return chosen, str(composed["choices"]["data"])


def _entrant(method: str, case: str, overrides: Sequence[str], rules: Rules) -> Entrant:
    """Return one method in one case. The first trial has the printed values for the data set, if there are any.

    Raises:
        ConfigError: the method cannot be run or searched with these settings.
    """
    chosen, data = _compose(method, case, overrides, rules)
    given = {item.partition("=")[0] for item in overrides}
    paper = printed_values(method, data)
    fixed: dict[str, float] = {}
    start: Start = "default"
    if paper is not None:
        chosen = [*chosen, "printed=true"]
        fixed = dict(paper.values)
        start = "printed"
    settings = settings_of(compose_config([*chosen, "rounds.test=false"]))
    check_searchable(settings)
    space = space_of(settings)
    for name, (low, high, log) in space.items():
        if not (low < high and (low > 0 or not log)):
            raise ConfigError(f"{name} is searched from {low:g} to {high:g}: give it a range of more than one value")
    if given & ({*space, *fixed} - {RATE}):
        start = "given"
    for name in (*space, *given):
        fixed.pop(name, None)
    return Entrant(method, case, tuple(chosen), settings, space, start, fixed)


def check_searchable(settings: RunSettings) -> None:
    """Check that a search can choose by the validation scores of runs with these settings.

    Raises:
        ConfigError: it cannot, and why.
        DataError: the data set's files are not there.
    """
    if isinstance(settings.privacy, GaussianPrivacy):
        raise ConfigError(
            "privacy=gaussian: a search chooses by validation scores, which are exact functions of clients' images; "
            "search with privacy=none on data that need none, then give goldfinch run tuned= and privacy=gaussian"
        )
    engine = settings.engine.get("name")
    if engine != "inline":
        raise ConfigError(
            f"engine={engine}: a comparison does its runs in this process: leave it out; goldfinch run tuned=FILE "
            f"engine={engine} takes what it found"
        )
    settings.data.check_files()
    if measure_of(settings).lower_is_better:
        raise ConfigError(
            f"rounds.metric={settings.rounds.metric}: a search looks for the highest score, and of this metric lower "
            "is better; choose another one"
        )


def measure_of(settings: RunSettings) -> Measure:
    """Return the metric that a run's ``rounds.metric`` names."""
    return {**MEASURES, **settings.further_measures}[settings.rounds.metric]


def _check_shared(entrant: Entrant, others: Sequence[Entrant]) -> None:
    """Check that an entrant has the settings of the first one in the same case."""
    for other in others:
        if other.case == entrant.case:
            differ = differing_settings(shared_settings(entrant.settings.raw), shared_settings(other.settings.raw))
            if differ:
                raise ConfigError(
                    f"it needs other settings than {other.method} ({', '.join(differ[:5])}): give them for all "
                    "methods, such as views=randconv, or leave it out"
                )
            return


def shared_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that all rows of a comparison must share, by ``a.b.c`` keys.

    These are all that change a result, without the method's, the learning rate, which is searched, and the seed.

    Args:
        raw: a run's settings, nested as in ``conf/``.
    """
    shared: dict[str, Any] = {}
    for key, value in result_settings(raw, ("seed",)).items():
        if not key.startswith("method.") and key != RATE:
            shared[key] = value
    return shared


def differing_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the keys with different values, sorted."""
    return [key for key in sorted({*one, *other}) if one.get(key) != other.get(key)]


# ---- what is searched ------------------------------------------------------------------------------------------------


def space_of(settings: RunSettings) -> dict[str, Search]:
    """Return the ranges of a search, by setting: the learning rate, and the method's fields with a search range.

    A range is extended to include the value in the settings, such as the printed value for the data set. A field that
    is 0 where a logarithm is searched is left out: what is switched off stays off.
    """
    rate = settings.train.learning_rate
    space = {RATE: Search(rate / RATE_FACTOR, rate * RATE_FACTOR)}
    for name, (low, high, log) in search_ranges(type(settings.method)).items():
        start = getattr(settings.method, name)
        if log and start <= 0:
            continue
        if low < high:
            low, high = min(low, start), max(high, start)
        space[f"method.{name}"] = Search(low, high, log)
    return space


def starting_values(settings: RunSettings, space: Mapping[str, Search]) -> dict[str, float]:
    """Return the values of the searched settings before the search."""
    groups = {"train": settings.train, "method": settings.method}
    values: dict[str, float] = {}
    for name in space:
        group, _, field_name = name.partition(".")
        values[name] = getattr(groups[group], field_name)
    return values


def overrides_for(values: Mapping[str, float]) -> list[str]:
    """Return the overrides of ``goldfinch run`` for ``values``."""
    return [f"{name}={value!r}" for name, value in values.items()]
