"""A row of a table: the runs that it stands for, their mean and deviation, its differences from other rows, its notes.

``goldfinch table``, ``report``, ``compare``, ``reproduce`` and Python print this one class. Which runs make a row is
decided elsewhere: :mod:`goldfinch.results.groups` for runs in folders, :mod:`goldfinch.study.ranking` for a comparison,
:mod:`goldfinch.commands.reproduce` for a published table.

**± is a standard deviation**, of the values that the mean is over: one for each seed, and in a comparison one for each
study. **[a, b] is a 95 % confidence interval**, of a difference between two rows that is paired by these seeds or
studies.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

from common.errors import some_of
from common.metrics import MEASURES, Measure, named_missing
from goldfinch.record import PARTITION_SEED, having, setting_text
from goldfinch.results.seeds import Value
from goldfinch.results.statistics import Difference, paired_difference, verdict_on

MAX_DIFFERENCES = 8
"""Differing settings that are listed below a table; the report lists all of them."""

MAX_ABSENT = 3
"""Clients that a note names, of those that a run did not have."""

MANY_ROWS = 6
"""Rows of a table from which on its notes count the rows with a value that more than two of them have."""

METHOD = "method._target_"

ScoreColumn = str | tuple[str, ...]
"""A column of scores: ``average``, ``worst``, ``spread``, ``validation``, ``seen_average``, ``unseen_average``,
``domain:<name>``, or a tuple of domains, which is their average."""


class ScoredRun(Protocol):
    """What a row knows of a run, such as of a :class:`goldfinch.record.RunRecord`."""

    @property
    def seed(self) -> int:
        """The seed."""

    @property
    def rules(self) -> Mapping[str, Mapping[str, Any]]:
        """The scores under each rule, as in ``summary.json``."""

    @property
    def measure(self) -> Measure:
        """The metric of the scores on test images."""

    @property
    def measures(self) -> Mapping[str, Measure]:
        """The metrics that the run has."""

    @property
    def validation_metric(self) -> str:
        """The metric of the scores on validation samples, a key of :attr:`measures`."""

    @property
    def unseen(self) -> Sequence[str]:
        """The scored domains of which no client held training samples."""

    @property
    def personal(self) -> bool:
        """Whether each client was scored with its own model."""

    @property
    def code(self) -> str:
        """The hash of the code that ran."""

    @property
    def code_by_package(self) -> Mapping[str, str]:
        """The same of ``goldfinch``, and of each package of the user's own."""

    @property
    def processor(self) -> str:
        """The kind of processor; empty if it is not recorded."""

    @property
    def state_sha256(self) -> str | None:
        """The hash of the final state; ``None`` without one."""

    @property
    def at_chance(self) -> bool:
        """Whether the last score is not clearly better than one class for every image."""

    @property
    def rounds_done(self) -> int:
        """Completed rounds."""

    @property
    def stopped_early(self) -> bool:
        """Whether ``train.patience`` ended it."""

    @property
    def changed_scoring(self) -> list[int]:
        """The numbers of test images of one domain, if rounds differ in them."""

    @property
    def test_images(self) -> Mapping[str, int]:
        """The test images of one client by domain."""

    @property
    def clients(self) -> Sequence[str]:
        """The clients of the run, or of its last part."""

    @property
    def client_images(self) -> Mapping[tuple[str, str], str]:
        """The hash of each client's training images, by the client and the hash of which samples they are."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Every setting that changes the result, except the seed, by its ``a.b.c`` key."""

    @property
    def planned_rounds(self) -> int:
        """Completed rounds; of a run that ``train.patience`` ended those that it was to have."""

    @property
    def traffic(self) -> int | None:
        """Bytes to all clients and from them; ``None`` if the run has not ended."""


@dataclass(frozen=True)
class KnownRun:
    """A run that is known by its scores, without its folder: of a comparison's ``runs.csv``, or a recall of one class.

    Args:
        seed: the run's seed.
        rules: its scores, as in ``summary.json``.

    The others are those of :class:`ScoredRun`.
    """

    seed: int
    rules: Mapping[str, Mapping[str, Any]]
    measure: Measure = MEASURES["accuracy"]
    measures: Mapping[str, Measure] = field(default_factory=lambda: MEASURES)
    validation_metric: str = "accuracy"
    unseen: Sequence[str] = ()
    personal: bool = False
    code: str = ""
    processor: str = ""
    state_sha256: str | None = None
    at_chance: bool = False
    rounds_done: int = 0
    planned_rounds: int = 0
    traffic: int | None = None
    stopped_early: bool = False
    changed_scoring: list[int] = field(default_factory=list)
    test_images: Mapping[str, int] = field(default_factory=dict)
    clients: Sequence[str] = ()
    client_images: Mapping[tuple[str, str], str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def code_by_package(self) -> Mapping[str, str]:
        """The hash of the code that ran."""
        return {"goldfinch": self.code}


AnyRun = TypeVar("AnyRun", bound=ScoredRun, covariant=True)


@dataclass
class ScoreRow(Generic[AnyRun]):
    """One row: runs of one method with one setting, by seed.

    Args:
        label: its name in the table.
        runs: one for each seed, ascending.
        duplicates: further runs of the same seed and the same final state; they do not count.
        contradictions: further runs of the same seed and another final state; they do not count.
        marks: what :attr:`label` says besides the method and its settings: that the row is a bound or was attacked, and
            how it differs from most rows of the table in code, rounds or seeds.
        bound: the line of the table that it is, ``lower`` or ``upper``: it is never ranked; ``None`` for other rows.
        unit: what each of :attr:`runs` stands for. In a comparison it is a study: its final runs share what it chose,
            so they are one value, and the study's number is in the place of the seed.
        absent: runs that were to be there and have no score, each with the reason.
        rank: its rank by the mean, if the table has ranks; ``None`` without one.
        difference: its difference from the base of the table, if there is one.
        p: the p-value of this difference after Holm's correction over all tests of the page; ``None`` without a test.
    """

    label: str
    runs: Sequence[AnyRun] = ()
    duplicates: Sequence[AnyRun] = ()
    contradictions: Sequence[AnyRun] = ()
    marks: tuple[str, ...] = ()
    bound: str | None = None
    unit: Literal["seed", "study"] = "seed"
    absent: Mapping[str, str] = field(default_factory=dict)
    rank: int | None = None
    difference: Difference | None = None
    p: float | None = None

    # ---- what its runs are ------------------------------------------------------------------------------------------

    @property
    def seeds(self) -> list[int]:
        """The runs' seeds, ascending."""
        return [run.seed for run in self.runs]

    @property
    def personal(self) -> bool:
        """Whether its scores are of clients' own models."""
        return any(run.personal for run in self.runs)

    @property
    def code(self) -> str:
        """The hash of the code that ran, that of the first run if they differ."""
        return self.runs[0].code

    @property
    def processors(self) -> list[str]:
        """The kinds of processors that its runs were computed on, sorted; an empty text is one that is not recorded."""
        return sorted({run.processor for run in self.runs})

    @property
    def states(self) -> dict[int, str | None]:
        """The hash of each run's final state, by seed."""
        return {run.seed: run.state_sha256 for run in self.runs}

    @property
    def chance(self) -> str:
        """``at chance`` if every run is no better than predicting one class; else which seeds are; empty if none is."""
        seeds = [str(run.seed) for run in self.runs if run.at_chance]
        if not seeds:
            return ""
        if len(seeds) == len(self.runs):
            return "at chance"
        return f"at chance: {self.unit} {', '.join(seeds)}"

    @property
    def rounds(self) -> int:
        """Rounds that were planned and are done; those of runs that ``train.patience`` ended are planned."""
        return self.runs[0].planned_rounds

    @property
    def rounds_shown(self) -> int | str:
        """Rounds that are done, such as ``5``; ``4-5`` if the runs differ in them."""
        done = {run.rounds_done for run in self.runs}
        if len(done) == 1:
            return min(done)
        return f"{min(done)}-{max(done)}"

    @property
    def early_stops(self) -> list[int]:
        """The rounds after which ``train.patience`` ended runs, ascending, each once."""
        return sorted({run.rounds_done for run in self.runs if run.stopped_early})

    @property
    def unseen(self) -> set[str]:
        """The scored domains of which no client of a run held training samples."""
        domains: set[str] = set()
        for run in self.runs:
            domains.update(run.unseen)
        return domains

    @property
    def scored_images(self) -> list[int]:
        """The numbers of test images of one domain, if they changed within a run or between runs; empty otherwise."""
        if self.runs[0].changed_scoring:
            return self.runs[0].changed_scoring
        counts: dict[str, set[int]] = {}
        for run in self.runs:
            for domain, images in run.test_images.items():
                counts.setdefault(domain, set()).add(images)
        for numbers in counts.values():
            if len(numbers) > 1:
                return sorted(numbers)
        return []

    @property
    def partition_follows_seed(self) -> bool:
        """Whether each run's partition is drawn with the run's seed."""
        partitions = set(map(partition_seed, self.runs))
        return len(self.runs) > 1 and len(partitions) > 1

    @property
    def megabytes(self) -> float | None:
        """Megabytes that a run sent and received, both ways, all clients; the mean over runs.

        ``None`` is of a bound, whose clients would send nothing, and of a row without a run that has ended.
        """
        sizes: list[float] = []
        for run in self.runs:
            if run.traffic is not None and not self.bound:
                sizes.append(run.traffic / 1e6)
        if not sizes:
            return None
        return statistics.fmean(sizes)

    # ---- its scores -------------------------------------------------------------------------------------------------

    def scores(self, column: ScoreColumn = "average", rule: str = "final") -> dict[int, float]:
        """Return the score of each seed; in a comparison that of each study.

        Args:
            column: the column.
            rule: how runs are scored, see :func:`common.metrics.summarise`.

        Returns:
            Only seeds and studies with a score.
        """
        scores: dict[int, float] = {}
        for run in self.runs:
            value = None
            if rule in run.rules:
                value = _cell(run.rules[rule], column)
            if value is not None:
                scores[run.seed] = value
        return scores

    def value(self, column: ScoreColumn = "average", rule: str = "final") -> Value | None:
        """Return mean and deviation of :meth:`scores`; ``None`` if no run has one. See :meth:`partial`."""
        scores = list(self.scores(column, rule).values())
        if not scores:
            return None
        return Value.of(scores, partial=self.partial(column, rule), digits=self.measure_of(column).digits)

    def partial(self, column: ScoreColumn = "average", rule: str = "final") -> bool:
        """Return whether a run has no score in a column, or one over fewer domains, rounds or clients than a whole one.

        A partial value is marked, and its row is neither ranked nor best.
        """
        for run in self.runs:
            if rule not in run.rules or _cell(run.rules[rule], column) is None:
                return True
            if _lacks(run.rules[rule], column, rule, run.unseen):
                return True
        return False

    def whole(self, column: ScoreColumn = "average", rule: str = "final") -> Value | None:
        """Return the row's score as :meth:`value` does; ``None`` if it lacks the score, or a part of it."""
        value = self.value(column, rule)
        if value is None or value.partial:
            return None
        return value

    def missing(self, rule: str = "final") -> list[str]:
        """Return a line for each run with a partial score: the domains that it lacks, and since when."""
        lines: list[str] = []
        for run in self.runs:
            score = run.rules.get(rule)
            if score is None and not run.rules and run.measure != MEASURES["accuracy"]:
                lines.append(f"{self.unit} {run.seed}: the images of no domain define the metric")
            elif score is None and rule == "validated":
                lines.append(
                    f"{self.unit} {run.seed}: no score on validation samples, which protocol.validation=0.1 takes"
                )
            elif score is None:
                lines.append(f"{self.unit} {run.seed}: no such score")
            elif score.get("missing"):
                lines.append(f"{self.unit} {run.seed}: without {named_missing(score['missing'])}")
            elif score.get("validation_missing"):
                lines.append(f"{self.unit} {run.seed}: validation without {named_missing(score['validation_missing'])}")
        return lines

    def measure_of(self, column: ScoreColumn) -> Measure:
        """Return the metric of a column: that of the runs, or of their validation samples."""
        run = self.runs[0]
        if column == "validation":
            return run.measures[run.validation_metric]
        return run.measure

    # ---- beside other rows ------------------------------------------------------------------------------------------

    def is_identical_to(self, other: ScoreRow[Any]) -> bool:
        """Return whether both rows have the same seeds, and with each seed the same final state."""
        return bool(self.runs) and self.states == other.states and all(self.states.values())

    def minus(self, other: ScoreRow[Any], column: ScoreColumn = "average", rule: str = "final") -> Difference | None:
        """Return the difference from another row, paired by seed, or by study.

        Returns:
            ``None`` if one of them has seeds or studies that the other has not. Identical rows differ by 0, and that is
            no result of a test.
        """
        ours, theirs = self.scores(column, rule), other.scores(column, rule)
        if not ours or ours.keys() != theirs.keys():
            return None
        if self.is_identical_to(other):
            return Difference(0.0, identical=True)
        return paired_difference(list(ours.values()), [theirs[number] for number in ours])

    @property
    def verdict(self) -> str:
        """What :attr:`difference` says; empty without one."""
        if self.difference is None:
            return ""
        return verdict_on(self.difference, self.p)


def partition_seed(run: ScoredRun) -> int | None:
    """Return the seed that the clients' samples were drawn with; ``None`` if the protocol draws none."""
    chosen = run.options.get(PARTITION_SEED, "absent")
    if chosen == "absent":
        return None
    if chosen is None:
        return run.seed
    return int(chosen)


def _cell(score: Mapping[str, Any], column: ScoreColumn) -> float | None:
    """Return a column's number of a run's score; ``None`` if it has none."""
    if isinstance(column, tuple):
        accuracy = score["accuracy"]
        if not accuracy.keys() >= set(column):
            return None
        return statistics.fmean([float(accuracy[domain]) for domain in column])
    if column.startswith("domain:"):
        score, column = score["accuracy"], column.removeprefix("domain:")
    value = score.get(column)
    if value is None:
        return None
    return float(value)


def _lacks(score: Mapping[str, Any], column: ScoreColumn, rule: str, unseen: Collection[str]) -> bool:
    """Return whether a column's number is over fewer domains, rounds or clients than in a whole score."""
    missing = set(score.get("missing") or ())
    if column == "validation" or (rule == "validated" and score.get("validation_missing")):
        return bool(score.get("validation_missing"))
    if isinstance(column, tuple):
        return bool(missing.intersection(column))
    if column.startswith("domain:"):
        return column.removeprefix("domain:") in missing
    if column == "unseen_average":
        return bool(missing.intersection(unseen))
    if column == "seen_average":
        return bool(missing.difference(unseen))
    return bool(missing)


# ---- which is best ---------------------------------------------------------------------------------------------------


def best_row(
    rows: Sequence[ScoreRow[AnyRun]], column: ScoreColumn = "average", rule: str = "final"
) -> ScoreRow[AnyRun] | None:
    """Return the best row of a column, which tables and pages print in bold; ``None`` if no row is the best.

    This is the one rule for "best" of rows. A row is the best if it is better than every other row that is ranked with
    it: the 95 % interval of their difference, paired by seed, excludes 0. Nothing is tested, and so there is no best
    row, if two of them have other seeds, rounds, code, images or clients, or fewer than three seeds, or are identical.

    Rows of one shared model are ranked with each other; rows of clients' own models are if there are no others. A bound
    and a partial score are ranked with none. (The best *round* of a run is another matter: it is chosen by
    ``rule``, one of :data:`common.metrics.RULES`.)

    Args:
        rows: the rows of a table.
        column: the column. The best ``spread`` is the lowest, and so is the best of a metric of which lower is better.
        rule: how runs are scored.
    """
    whole: list[tuple[float, ScoreRow[AnyRun]]] = []
    for row in comparable(rows):
        value = row.value(column, rule)
        if value is not None and not value.partial:
            whole.append((sign_of(row, column) * value.mean, row))
    if len(whole) < 2:
        return None
    best = max(whole, key=lambda pair: pair[0])[1]
    for _, other in whole:
        if other is not best and not _is_better(best, other, column, rule):
            return None
    return best


def comparable(rows: Sequence[ScoreRow[AnyRun]]) -> list[ScoreRow[AnyRun]]:
    """Return the rows that are ranked with each other: those scored on one shared model, or else on clients' own.

    Bounds are ranked with none.
    """
    methods = [row for row in rows if not row.bound]
    shared = [row for row in methods if not row.personal]
    return shared or methods


def ranked(rows: Sequence[ScoreRow[AnyRun]], rule: str = "final") -> list[ScoreRow[AnyRun]]:
    """Return the rows with a whole score, the best average first; a partial one and a bound have no rank."""
    scored: list[tuple[float, ScoreRow[AnyRun]]] = []
    for row in rows:
        if row.bound:
            continue
        value = row.value("average", rule)
        if value is not None and not value.partial:
            scored.append((sign_of(row, "average") * value.mean, row))
    scored.sort(key=lambda pair: -pair[0])
    return [row for _, row in scored]


def sign_of(row: ScoreRow[Any], column: ScoreColumn) -> int:
    """Return 1 if a higher number of a column is better, else -1."""
    if column == "spread" or row.measure_of(column).lower_is_better:
        return -1
    return 1


def _is_better(row: ScoreRow[Any], other: ScoreRow[Any], column: ScoreColumn, rule: str) -> bool:
    """Return whether the interval of the difference of two whole rows is on the better side of 0."""
    conditions = [(each.seeds, each.rounds, each.scored_images) for each in (row, other)]
    if conditions[0] != conditions[1] or ran_other_code(row, other):
        return False
    if changed_images([row, other]) or absent_clients([row, other]):
        return False
    difference = row.minus(other, column, rule)
    if difference is None or difference.p is None or difference.low is None or difference.high is None:
        return False
    return sign_of(row, column) * difference.low > 0 and sign_of(row, column) * difference.high > 0


def ran_other_code(row: ScoreRow[Any], other: ScoreRow[Any]) -> bool:
    """Return whether two rows ran different versions of a package; a package of one of them alone is none."""
    for run, beside in itertools.product(row.runs, other.runs):
        for name, digest in run.code_by_package.items():
            if beside.code_by_package.get(name, digest) != digest:
                return True
    return False


def changed_images(rows: Sequence[ScoreRow[Any]]) -> dict[str, list[str]]:
    """Return the names of runs by the hash of a client's images, if the same samples have other images in some runs.

    The files of a data set were then changed between these runs. Empty if no client's images are known to differ. Runs
    whose images are read otherwise by their settings are not compared.
    """
    names: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for row in rows:
        for run in row.runs:
            reading = repr([entry for entry in run.options.items() if entry[0].startswith("data.")])
            for (client, samples), images in run.client_images.items():
                by_images = names.setdefault((reading, client, samples), {})
                by_images.setdefault(images, []).append(f"{row.label} {row.unit} {run.seed}")
    for by_images in names.values():
        if len(by_images) > 1:
            return by_images
    return {}


def absent_clients(rows: Sequence[ScoreRow[Any]]) -> list[str]:
    """Return a text for each run without clients that another run of the same data and protocol had; none of a bound.

    Such a client, for example a device that never registered, has added no samples to this run.
    """
    clients: dict[str, set[str]] = {}
    runs: list[tuple[str, str, set[str]]] = []
    for row in rows:
        if row.bound:
            continue
        for run in row.runs:
            shared = [entry for entry in run.options.items() if entry[0].startswith(("data.", "protocol."))]
            settings = repr([entry for entry in shared if entry[0] != PARTITION_SEED])
            clients.setdefault(settings, set()).update(run.clients)
            runs.append((f"{row.label} {row.unit} {run.seed}", settings, set(run.clients)))
    texts: list[str] = []
    for name, settings, present in runs:
        absent = sorted(clients[settings] - present)
        if present and absent:
            texts.append(f"{name} (without {some_of(absent, MAX_ABSENT)})")
    return texts


# ---- notes -----------------------------------------------------------------------------------------------------------


def notes_on(rows: Sequence[ScoreRow[Any]]) -> list[str]:
    """Return what a reader has to know before comparing the rows of a table, one sentence each.

    The notes name settings, code, images, clients and processors in which runs differ, rows at chance, and rows that
    are identical.
    """
    present = [row for row in rows if row.runs]
    notes: list[str] = []
    differences = setting_differences(_settings_by_label(present))
    if differences:
        notes.append(differences_note(differences))
    notes += _code_note(present)
    changed = changed_images(present)
    if changed:
        sets = "; ".join(some_of(names, MAX_DIFFERENCES) for names in changed.values())
        notes.append(f"Images changed between runs: the same samples of a client have other pixels in {sets}.")
    without = absent_clients(present)
    if without:
        notes.append(f"Runs without clients that other runs had: {some_of(without, MAX_DIFFERENCES)}.")
    processors: dict[str, list[str]] = {}
    for row in present:
        for processor in row.processors:
            processors.setdefault(processor or "not recorded", []).append(row.label)
    if len(processors) > 1:
        kinds = "; ".join(f"{processor}: {named(labels, len(rows))}" for processor, labels in processors.items())
        notes.append(f"Rows were computed on different processors, which moves scores (docs/faq.md): {kinds}.")
    chances: dict[str, list[str]] = {}
    for row in present:
        if row.chance:
            chances.setdefault(row.chance.removeprefix("at chance"), []).append(row.label)
    if chances:
        texts = [named(labels, len(rows)) + seeds for seeds, labels in chances.items()]
        notes.append(f"At chance, where one class for every image may score as much: {'; '.join(texts)}.")
    for labels in identical_rows(present):
        notes.append(f"Identical: {', '.join(labels)} ended in the same state with every seed; they differ by 0.")
    return notes


def _code_note(rows: Sequence[ScoreRow[Any]]) -> list[str]:
    """Return the note on rows that were run by different code, if there are any."""
    if not any(ran_other_code(*pair) for pair in itertools.combinations_with_replacement(rows, 2)):
        return []
    codes: dict[str, dict[str, None]] = {}
    for row in rows:
        for run in row.runs:
            codes.setdefault(run.code, {})[row.label] = None
    texts = [f"{code}: {named(list(labels), len(rows))}" for code, labels in codes.items()]
    return [f"Rows were run by different code: {'; '.join(texts)}."]


def identical_rows(rows: Sequence[ScoreRow[Any]]) -> list[list[str]]:
    """Return the labels of rows that are identical to each other, each set of them once."""
    sets: list[list[str]] = []
    seen: list[ScoreRow[Any]] = []
    for row in rows:
        same = [other.label for other in rows if other is row or other.is_identical_to(row)]
        if len(same) > 1 and not any(row.is_identical_to(other) for other in seen):
            sets.append(same)
        seen.append(row)
    return sets


def _settings_by_label(rows: Sequence[ScoreRow[Any]]) -> dict[str, dict[str, Any]]:
    """Return the settings of each row, with the seed of its partition unless a row has a partition for every seed."""
    own_partitions = any(row.partition_follows_seed for row in rows)
    settings: dict[str, dict[str, Any]] = {}
    for row in rows:
        settings[row.label] = {key: value for key, value in row.runs[0].options.items() if key != PARTITION_SEED}
        if PARTITION_SEED in row.runs[0].options and not own_partitions:
            settings[row.label][PARTITION_SEED] = partition_seed(row.runs[0])
    return settings


Differences = Mapping[str, Mapping[str, Sequence[str]]]
"""The labels of rows by a setting's key and the text of its value."""


def setting_differences(options: Mapping[str, Mapping[str, Any]]) -> Differences:
    """Return the settings in which rows differ, besides the method and the seed.

    A setting that only one method of the table has belongs to this method: it makes no difference between rows of
    several methods, and is in the labels of its own rows. Every other one counts, such as ``method.weighting`` of two
    methods that both have it.

    Args:
        options: the settings of each row by its label.

    Returns:
        Settings outside the method first, then those of the method that most rows have.
    """
    keys: dict[str, None] = {}
    for each in options.values():
        keys |= dict.fromkeys(each)
    differences: dict[str, dict[str, list[str]]] = {}
    for key in sorted(keys):
        if key == METHOD:
            continue
        compared = having(key, list(options.values()))
        holders = [label for label, each in options.items() if each in compared]
        if key.startswith("method.") and _is_in_the_labels(key, holders, options):
            continue
        exact = {label: repr(options[label].get(key)) for label in holders}
        if len(set(exact.values())) < 2:
            continue
        texts = {label: setting_text(key, options[label].get(key)).partition("=")[2] for label in holders}
        if len(set(texts.values())) < len(set(exact.values())):
            texts = exact  # they differ in later digits
        values: dict[str, list[str]] = {}
        for label, text in texts.items():
            values.setdefault(text, []).append(label)
        differences[key] = values
    return dict(sorted(differences.items(), key=lambda entry: _place(*entry)))


def _is_in_the_labels(key: str, holders: Sequence[str], options: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether a setting is of one method alone, whose rows have its value in their labels."""
    if len({options[label].get(METHOD) for label in holders}) > 1:
        return False
    return all(setting_text(key, options[label][key]) in label for label in holders)


def _place(key: str, values: Mapping[str, Sequence[str]]) -> tuple[bool, int, str]:
    """Return where a difference stands in a note."""
    of_method = key.startswith("method.")
    holders = sum(map(len, values.values()))
    return of_method, -holders if of_method else -len(values), key


def differences_note(differences: Differences) -> str:
    """Return the note on settings in which rows differ."""
    labels: set[str] = set()
    for values in differences.values():
        labels.update(itertools.chain(*values.values()))
    texts: list[str] = []
    for key, values in differences.items():
        shown = [f"{value} ({named(holders, len(labels))})" for value, holders in values.items()]
        texts.append(f"{key} {', '.join(shown)}")
    note = "; ".join(texts[:MAX_DIFFERENCES])
    if len(texts) > MAX_DIFFERENCES:
        note += f"; and {len(texts) - MAX_DIFFERENCES} more"
    return f"Rows differ in more than the method: {note}."


def named(labels: Sequence[str], rows: int) -> str:
    """Return the labels of rows; their number if they are more than two of a table with many ``rows``."""
    if rows >= MANY_ROWS and len(labels) > 2:
        return f"{len(labels)} rows"
    return ", ".join(labels)
