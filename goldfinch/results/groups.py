"""Which runs belong together: in one table, in one row of it, and which of them are the same run twice.

Tables, reports, figures, sweeps, comparisons and reproduced tables all use these rules.

*One table* (:class:`Board`) holds runs that are scored on the same images: same data set, domains, image size and test
images, same protocol and same network. *One row* (:class:`Group`) holds runs that differ in the seed alone: every
setting that changes the result or the score is the same, and so are the rounds that are done, the code that ran and,
where a partition is fixed, the samples of every client. Runs that ``train.patience`` stopped early may have stopped
after different rounds. If each run of a row uses its own seed for the partition too, the partitions differ, and the
runs stay one row.

Two runs with the same seed and the same final state, such as from two engines, count once. Of two runs with the same
seed and different states the first counts, and the other is named below the table.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.errors import ConfigError, nearest, some_of
from common.metrics import COUNTED, Measure, named_missing
from common.versions import combined_hash
from goldfinch.results.run import RunFolder, setting_text, varying
from goldfinch.results.seeds import Value
from goldfinch.results.statistics import paired_difference
from server.run.events import COUNTS_LESS_SETTINGS, counts_text

MAX_LABEL_SETTINGS = 4
"""Settings in a row's label, unless more are needed to tell rows of one method apart."""

MAX_DIFFERENCES = 8
"""Differing settings that are listed below a table; the report lists all of them."""

MAX_CLIENTS = 3
"""Clients of a row that count for fewer samples, of which the note below a table has the numbers."""

MANY_ROWS = 6
"""Rows of a table from which on its notes count the rows with a value that more than two of them have."""

PARTITION_SEED = "protocol.partition_seed"
BOARD_SETTINGS = ("data.image_size", "data.domains", "data.duplicates", "rounds.test_samples", "rounds.test")
"""Settings that decide which images are scored."""

EVALUATED = "exported model"
"""What ``summary.json`` says was scored where nothing was trained: there is no model to export."""

SHOWN_IN_MARKS = ("train.rounds", "attack._target_", "attack.clients")
"""Settings that are left out of a row's label, because its marks show them."""


@dataclass
class Group:
    """One row: runs that differ in the seed alone.

    Args:
        label: the method's name, the settings that tell it from other rows of the method, and its :attr:`marks`.
        runs: one for each seed, ascending.
        duplicates: further runs of the same seed and the same final state; they do not count.
        contradictions: further runs of the same seed and another final state; they do not count.
        marks: that it is a bound or was attacked, and differences from most rows of the table besides settings: code,
            rounds, seeds.
    """

    label: str
    runs: list[RunFolder] = field(default_factory=list)
    duplicates: list[RunFolder] = field(default_factory=list)
    contradictions: list[RunFolder] = field(default_factory=list)
    marks: tuple[str, ...] = ()

    @property
    def seeds(self) -> list[int]:
        """The runs' seeds, ascending."""
        return [run.seed for run in self.runs]

    @property
    def personal(self) -> bool:
        """Whether its scores are of clients' own models."""
        return self.runs[0].personal

    @property
    def bound(self) -> str | None:
        """The line of the table that it is, ``lower`` or ``upper``: it is never ranked; ``None`` for other rows."""
        return self.runs[0].bound

    @property
    def code(self) -> str:
        """The hash of the code that ran."""
        return self.runs[0].code

    @property
    def rounds(self) -> int:
        """Rounds that were planned and are done; those of runs that ``train.patience`` ended are planned."""
        return _planned_rounds(self.runs[0])

    @property
    def rounds_shown(self) -> int | str:
        """Rounds that are done, such as ``5``; ``4-5`` if the runs differ in them."""
        done = {run.rounds_done for run in self.runs}
        if len(done) == 1:
            return min(done)
        return f"{min(done)}-{max(done)}"

    @property
    def unseen(self) -> set[str]:
        """The scored domains of which no client of a run held training samples."""
        found: set[str] = set()
        for run in self.runs:
            found.update(run.unseen)
        return found

    @property
    def scored_images(self) -> list[int]:
        """The numbers of test images of one domain, if they changed within a run or between runs; empty otherwise."""
        if self.runs[0].changed_scoring:
            return self.runs[0].changed_scoring
        counts: dict[str, set[int]] = {}
        for run in self.runs:
            for domain, images in run.test_images.items():
                counts.setdefault(domain, set()).add(images)
        for found in counts.values():
            if len(found) > 1:
                return sorted(found)
        return []

    @property
    def early_stops(self) -> list[int]:
        """The rounds after which ``train.patience`` ended runs, ascending, each once."""
        return sorted({run.rounds_done for run in self.runs if run.stopped_early})

    @property
    def partition_follows_seed(self) -> bool:
        """Whether each run's partition is drawn with the run's seed."""
        partitions = set(map(partition_seed, self.runs))
        return len(self.runs) > 1 and len(partitions) > 1

    def values(self, column: str, rule: str = "final") -> list[float]:
        """Return the score of each run that has one.

        Args:
            column: ``average``, ``worst``, ``spread``, ``validation``, ``seen_average``, ``unseen_average`` or
                ``domain:<name>``.
            rule: how runs are scored, see :func:`common.metrics.summarise`.
        """
        found: list[float] = []
        for run in self.runs:
            if rule not in run.rules:
                continue
            value = _cell(run.rules[rule], column)
            if value is not None:
                found.append(value)
        return found

    def value(self, column: str, rule: str = "final") -> Value | None:
        """Return mean and deviation of :meth:`values` over seeds; ``None`` if no run has a score.

        The value is partial if a run's score is partial or a run has no score.
        """
        values = self.values(column, rule)
        partial = len(values) < len(self.runs)
        for run in self.runs:
            if rule in run.rules and _lacks(run.rules[rule], column, rule, run.unseen):
                partial = True
        return Value.of(values, partial=partial, digits=self.measure_of(column).digits)

    def measure_of(self, column: str) -> Measure:
        """Return the metric of a column: that of the runs, or of their validation samples."""
        run = self.runs[0]
        if column == "validation":
            return run.measures[run.validation_metric]
        return run.measure

    def missing(self, rule: str = "final") -> list[str]:
        """Return a line for each run with a partial score: the domains that it lacks, and since when."""
        lines = []
        for run in self.runs:
            score = run.rules.get(rule)
            if score is None:
                lines.append(f"seed {run.seed}: no such score")
            elif score["missing"]:
                lines.append(f"seed {run.seed}: without {named_missing(score['missing'])}")
            elif score.get("validation_missing"):
                lines.append(f"seed {run.seed}: validation without {named_missing(score['validation_missing'])}")
        return lines


@dataclass
class Board:
    """One table: groups that may be compared, since they are scored on the same images with the same network."""

    data: str
    protocol: str
    model: str
    groups: list[Group] = field(default_factory=list)
    remark: str = ""
    """What tells it from another board of the same data, protocol and model."""

    @property
    def title(self) -> str:
        """Data set, protocol and model that the groups share, and :attr:`remark`."""
        parts = [self.data, self.protocol.replace("_", " "), self.model]
        if self.remark:
            parts.append(self.remark)
        return ", ".join(filter(None, parts))

    @property
    def bounds(self) -> dict[str, str]:
        """``lower`` or ``upper`` by the label of each group that is a bound."""
        return bounds_of(self.groups)

    @property
    def domains(self) -> list[str]:
        """Domains of all groups, in the first one's order."""
        found: dict[str, None] = {}
        for run in self.runs:
            found |= dict.fromkeys(run.domains)
        return list(found)

    @property
    def runs(self) -> list[RunFolder]:
        """The groups' runs, without duplicates and contradictions."""
        found: list[RunFolder] = []
        for group in self.groups:
            found += group.runs
        return found

    @property
    def named_runs(self) -> list[tuple[str, RunFolder]]:
        """:attr:`runs` with their names."""
        found: list[tuple[str, RunFolder]] = []
        for group in self.groups:
            for run in group.runs:
                found.append((run_name(group, run), run))
        return found

    @property
    def clients(self) -> int:
        """The largest number of clients of a run."""
        count = 0
        for run in self.runs:
            count = max(count, len(run.registrations))
        return count

    @property
    def codes(self) -> list[str]:
        """Hashes of the code that ran, each once, in the order of the groups."""
        found: dict[str, None] = {}
        for group in self.groups:
            found[group.code] = None
        return list(found)

    def by_metric(self, metric: str) -> Board | None:
        """Return the same board with scores by another metric; ``None`` if a run lacks it, or confusion counts."""
        for run in self.runs:
            if metric not in run.measures or (metric in COUNTED and not run.has_counts):
                return None
        groups: list[Group] = []
        for group in self.groups:
            runs = [run.by_metric(metric) for run in group.runs]
            groups.append(Group(group.label, runs, marks=group.marks))
        return Board(self.data, self.protocol, self.model, groups, self.remark)

    def notes(self) -> list[str]:
        """Return the notes of the table, one sentence each: different settings and code, partitions, repeated runs."""
        found: list[str] = []
        differences = self.differences()
        if differences:
            shown = "; ".join(differences[:MAX_DIFFERENCES])
            more = len(differences) - MAX_DIFFERENCES
            if more > 0:
                shown += f"; and {more} more"
            found.append(f"Rows differ in more than the method: {shown}.")
        if any(other_code(*pair) for pair in itertools.combinations(self.groups, 2)):
            rows: list[str] = []
            for code in self.codes:
                labels = [group.label for group in self.groups if group.code == code]
                rows.append(f"{code}: {self._named(labels)}")
            found.append(f"Rows were run by different code: {'; '.join(rows)}.")
        found += self._processor_note()
        resolution = max(run.resolution for run in self.runs)
        if resolution:
            label = self.groups[0].measure_of("average").label
            found.append(
                f"{label} is binned: after the last round it differs from the exact one by at most {resolution:.2f}."
            )
        found += self._reply_notes()
        labels = [group.label for group in self.groups if group.partition_follows_seed]
        if len(labels) == len(self.groups):
            found.append("Every seed has a partition of its own.")
        elif labels:
            found.append(f"{self._named(labels)}: every seed has a partition of its own.")
        for group in self.groups:
            metric = group.runs[0].validation_metric
            if group.scored_images:
                images = " and ".join(map(str, group.scored_images))
                remark = (
                    f"its runs were scored on {images} test images of a domain, so its mean is not of the same images."
                )
                if group.runs[0].changed_scoring:
                    remark = (
                        f"some rounds were scored on {images} test images of a domain, as it was resumed with other "
                        "scoring; it is averaged with no other run."
                    )
                found.append(f"{group.label}: {remark}")
            if metric != "accuracy":
                label = group.measure_of("validation").label
                found.append(f"{group.label}: validation is {label} (rounds.metric={metric}).")
            found += joined_note(group)
            for run in group.duplicates:
                again = f"{run.folder} is seed {run.seed} once more with the same state; it counts once."
                found.append(f"{group.label}: {again}")
            for run in group.contradictions:
                again = f"{run.folder} is seed {run.seed} once more with another state; it does not count."
                found.append(f"{group.label}: {again}")
        return found

    def _processor_note(self) -> list[str]:
        """Return the note on rows that were computed on different kinds of processors, if there are any."""
        rows: dict[str, list[str]] = {}
        for group in self.groups:
            for processor in sorted({run.processor for run in group.runs}):
                rows.setdefault(processor or "not recorded", []).append(group.label)
        if len(rows) < 2:
            return []
        kinds = "; ".join(f"{processor}: {self._named(labels)}" for processor, labels in rows.items())
        return [f"Rows were computed on different processors, which moves scores (docs/faq.md): {kinds}."]

    def _reply_notes(self) -> list[str]:
        """Return the notes on updates that were scaled or not used, and on clients that count for fewer samples."""
        replies: list[str] = []
        samples: list[str] = []
        for group in self.groups:
            counts: Counter[str] = Counter()
            fewer: dict[str, None] = {}
            for run in group.runs:
                counts.update(run.answers)
                for client, entry in run.counts_less.items():
                    fewer[f"{client} as {entry['counted']} of {entry['registered']}"] = None
            text = counts_text(counts)
            if text:
                replies.append(f"{group.label}: {text}")
            if fewer:
                samples.append(f"{group.label}: {some_of(list(fewer), MAX_CLIENTS)}")
        found: list[str] = []
        if replies:
            found.append(f"Replies: {'; '.join(replies)}.")
        if samples:
            found.append(
                f"Clients count for fewer samples than they registered ({COUNTS_LESS_SETTINGS}): {'; '.join(samples)}."
            )
        return found

    def differences(self) -> list[str]:
        """Return the settings, other than the method's own, in which the groups differ, with each group's value."""
        first = [group.runs[0] for group in self.groups]
        keys: list[str] = []
        for key in varying(first):
            if not key.startswith("method.") and key != PARTITION_SEED:
                keys.append(key)
        fixed = not any(group.partition_follows_seed for group in self.groups)
        if fixed and len(set(map(partition_seed, first))) > 1:
            keys.append(PARTITION_SEED)
        found: list[str] = []
        for key in keys:
            rows: dict[str, list[str]] = {}
            for group in self.groups:
                value = setting_text(key, group.runs[0].options.get(key)).partition("=")[2]
                rows.setdefault(value, []).append(group.label)
            values: list[str] = []
            for value, labels in rows.items():
                values.append(f"{value} ({self._named(labels)})")
            found.append(f"{key} {', '.join(values)}")
        return found

    def _named(self, labels: Sequence[str]) -> str:
        """Return the labels of rows; their number if they are more than two of many rows."""
        if len(self.groups) > MANY_ROWS and len(labels) > 2:
            return f"{len(labels)} rows"
        return ", ".join(labels)


def group_runs(runs: Sequence[RunFolder], name: Callable[[RunFolder], str] | None = None) -> list[Board]:
    """Sort ``runs`` into boards and groups, both in the order of their first run.

    Args:
        runs: finished runs, or unfinished runs that have started.
        name: returns the method's name in labels; by default the name of its option.
    """
    boards: dict[str, Board] = {}
    rows: dict[str, dict[str, list[RunFolder]]] = {}
    for run in runs:
        key = _text(_board_key(run))
        boards.setdefault(key, _new_board(run))
        rows.setdefault(key, {}).setdefault(_text(_row_key(run)), []).append(run)
    for key, board in boards.items():
        for members in rows[key].values():
            board.groups += map(_group, _by_partition(members))
        board.groups = _by_method(board.groups)
        _label(board.groups, name or _option_name)
    found = list(boards.values())
    _tell_boards_apart(found, [_settings_of_board(board.runs[0]) for board in found])
    return found


def _by_method(groups: Sequence[Group]) -> list[Group]:
    """Return the groups with those of one method next to each other, methods in the order of their first group.

    Bounds come last, the lower before the upper.
    """
    methods: dict[str, list[Group]] = {}
    for group in groups:
        methods.setdefault(group.runs[0].method_name, []).append(group)
    found: list[Group] = []
    for members in methods.values():
        found += members
    return sorted(found, key=lambda group: group.bound or "")


def bounds_of(groups: Sequence[Group]) -> dict[str, str]:
    """Return ``lower`` or ``upper`` by the label of each group that is a bound of its table."""
    found: dict[str, str] = {}
    for group in groups:
        if group.bound:
            found[group.label] = group.bound
    return found


def joined_note(group: Group) -> list[str]:
    """Return the note on clients whose last batch of one sample joined the batch before it, if there are any."""
    joined: set[str] = set()
    for run in group.runs:
        joined |= set(run.summary.get("joined_batches", []))
    if not joined:
        return []
    clients = some_of(sorted(joined), MAX_CLIENTS)
    return [
        f"{group.label}: a last batch of one sample joined the batch before it at {clients}, because network or method "
        "cannot train on one sample."
    ]


def run_name(group: Group, run: RunFolder) -> str:
    """Return a run's name: its group's label, with its seed if the group has several."""
    if len(group.runs) > 1:
        return f"{group.label}, seed {run.seed}"
    return group.label


def partition_seed(run: RunFolder) -> int | None:
    """Return the seed that the clients' samples were drawn with; ``None`` if the protocol draws none."""
    chosen = run.options.get(PARTITION_SEED, "absent")
    if chosen == "absent":
        return None
    if chosen is None:
        return run.seed
    return int(chosen)


# ---- which is best ---------------------------------------------------------------------------------------------------


def _cell(score: Mapping[str, Any], column: str) -> float | None:
    """Return a column's number of a run's score; ``None`` if it has none."""
    if column.startswith("domain:"):
        score, column = score["accuracy"], column.removeprefix("domain:")
    value = score.get(column)
    if value is None:
        return None
    return float(value)


def _lacks(score: Mapping[str, Any], column: str, rule: str, unseen: Collection[str]) -> bool:
    """Return whether a column's number is over fewer domains, rounds or clients than in a whole score."""
    missing = set(score["missing"])
    if column == "validation" or (rule == "validated" and score.get("validation_missing")):
        return bool(score.get("validation_missing"))
    if column.startswith("domain:"):
        return column.removeprefix("domain:") in missing
    if column == "unseen_average":
        return bool(missing.intersection(unseen))
    if column == "seen_average":
        return bool(missing.difference(unseen))
    return bool(missing)


def comparable(groups: Sequence[Group]) -> list[Group]:
    """Return the groups that are ranked with each other: those scored on one shared model, or else on clients' own.

    Bounds are ranked with none.
    """
    methods = [group for group in groups if not group.bound]
    shared = [group for group in methods if not group.personal]
    return shared or methods


def leader(groups: Sequence[Group], column: str = "average", rule: str = "final") -> Group | None:
    """Return the group that is better than every other one in a column; ``None`` if none is.

    Only :func:`comparable` groups with a whole score count. A group is better than another if the 95 % interval of
    their paired difference over seeds excludes 0. There is no such interval, and so no best group, if two of them have
    other seeds, rounds, code or scored images, or one seed.

    Args:
        groups: the rows of a table.
        column: as in :meth:`Group.values`. The best ``spread`` is the lowest, and so is the best of a metric of which
            lower is better.
        rule: how runs are scored.
    """
    whole: list[tuple[float, Group]] = []
    for group in comparable(groups):
        value = group.value(column, rule)
        if value is not None and not value.partial:
            whole.append((_sign(group, column) * value.mean, group))
    if len(whole) < 2:
        return None
    best = max(whole, key=lambda pair: pair[0])[1]
    for _, other in whole:
        if other is not best and not _is_better(best, other, column, rule):
            return None
    return best


def _sign(group: Group, column: str) -> int:
    """Return 1 if a higher number of a column is better, else -1."""
    if column == "spread" or group.measure_of(column).lower_is_better:
        return -1
    return 1


def _is_better(group: Group, other: Group, column: str, rule: str) -> bool:
    """Return whether the interval of the paired difference of two whole groups is on the better side of 0."""
    conditions = [(each.seeds, each.rounds, each.scored_images) for each in (group, other)]
    if conditions[0] != conditions[1] or len(group.seeds) < 2 or other_code(group, other):
        return False
    difference = paired_difference(group.values(column, rule), other.values(column, rule))
    bounds = [difference.low, difference.high]
    return all(bound is not None and _sign(group, column) * bound > 0 for bound in bounds)


def ranked(groups: Sequence[Group], rule: str = "final") -> list[Group]:
    """Return the groups with a whole score, the best average first; a partial one and a bound have no rank."""
    scored: list[tuple[float, Group]] = []
    for group in groups:
        if group.bound:
            continue
        value = group.value("average", rule)
        if value is not None and not value.partial:
            quality = value.mean
            if group.measure_of("average").lower_is_better:
                quality = -quality
            scored.append((quality, group))
    scored.sort(key=lambda pair: -pair[0])
    return [group for _, group in scored]


def exported_run(groups: Sequence[Group], rule: str = "final") -> RunFolder | None:
    """Return the finished run whose model a table offers for export; ``None`` without one.

    It is of the only row, or of the row that is better than every other one on average (:func:`leader`). Of its seeds
    the one with the best score on validation samples is chosen, or else the first; a test score chooses none.
    """
    group = leader(groups, rule=rule)
    if len(groups) == 1:
        group = groups[0]
    if group is None:
        return None
    found: RunFolder | None = None
    highest = -math.inf
    for run in group.runs:
        score = run.rules.get(rule)
        if not run.summary or run.summary["scored"] == EVALUATED or score is None:
            continue
        quality = _sign(group, "validation") * float(score.get("validation", 0.0))
        if found is None or quality > highest:
            found = run
            highest = quality
    return found


# ---- keys ------------------------------------------------------------------------------------------------------------


def _settings_of_board(run: RunFolder) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in BOARD_SETTINGS:
        if run.options.get(key) is not None:
            found[key] = run.options[key]
    if run.names[0] == "folder":  # the user's own images: another folder holds other images
        found["data.root"] = dict(run.config.get("data") or {}).get("root")
    return found


def _board_key(run: RunFolder) -> list[Any]:
    return [run.names, _settings_of_board(run)]


def _row_key(run: RunFolder) -> list[Any]:
    """Return everything that the runs of one row share, except for the partition's seed."""
    options = dict(run.options)
    options.pop(PARTITION_SEED, None)
    return [options, _planned_rounds(run), run.code, run.changed_scoring]


def _planned_rounds(run: RunFolder) -> int:
    """Return the rounds that are done; those that were planned if the run stopped early, as each seed may elsewhere."""
    if run.stopped_early:
        return int(run.summary["stopped_early"]["rounds_planned"])
    return run.rounds_done


def _by_partition(runs: Sequence[RunFolder]) -> list[list[RunFolder]]:
    """Return the runs of one row key, sorted by partition.

    Runs with the same fixed partition belong together, and so do the runs in which the partition's seed is the run's
    seed. If other runs have a fixed partition of that seed, such a run belongs to them.
    """
    fixed: set[int | None] = set()
    for run in runs:
        if partition_seed(run) != run.seed:
            fixed.add(partition_seed(run))
    found: dict[str, list[RunFolder]] = {}
    for run in runs:
        number = partition_seed(run)
        follows = number == run.seed and number not in fixed
        key = "the run's seed"
        if not follows:
            splits = run.summary.get("splits")
            samples = combined_hash(splits) if splits else ""
            key = f"{number} {samples}"
        found.setdefault(key, []).append(run)
    return list(found.values())


def _group(members: Sequence[RunFolder]) -> Group:
    group = Group("")
    by_seed: dict[int, RunFolder] = {}
    for run in sorted(members, key=lambda run: (run.seed, str(run.folder))):
        known = by_seed.setdefault(run.seed, run)
        if known is run:
            group.runs.append(run)
        elif run.state_sha256 is not None and run.state_sha256 == known.state_sha256:
            group.duplicates.append(run)
        else:
            group.contradictions.append(run)
    return group


def _new_board(run: RunFolder) -> Board:
    return Board(*run.names)


def _option_name(run: RunFolder) -> str:
    return run.method_name


def _text(key: Any) -> str:
    return json.dumps(key, sort_keys=True, default=str)


# ---- labels ----------------------------------------------------------------------------------------------------------


def _label(groups: Sequence[Group], name: Callable[[RunFolder], str]) -> None:
    """Give every group its marks, and a label that no other group of the board has."""
    for group in groups:
        group.marks = _marks(group, groups)
    by_method: dict[str, list[Group]] = {}
    for group in groups:
        by_method.setdefault(name(group.runs[0]), []).append(group)
    for method, namesakes in by_method.items():
        keys = varying([group.runs[0] for group in namesakes])
        keys = [key for key in keys if key not in SHOWN_IN_MARKS]
        count = min(MAX_LABEL_SETTINGS, len(keys))
        while count < len(keys) and len(set(_labels(namesakes, method, keys[:count]))) < len(namesakes):
            count += 1
        for group, label in zip(namesakes, _labels(namesakes, method, keys[:count]), strict=True):
            group.label = label
    by_label: dict[str, list[Group]] = {}
    for group in groups:
        by_label.setdefault(group.label, []).append(group)
    for label, same in by_label.items():
        if len(same) > 1:  # such as two sets of images in the same place
            for number, group in enumerate(same, 1):
                group.label = f"{label} ({number})"


def rename(groups: Sequence[Group], labels: Sequence[str]) -> None:
    """Give rows other labels.

    Args:
        groups: the rows.
        labels: ``OLD=NEW`` each. ``OLD`` is a row's label, or a method's name, which is replaced in all of its rows.

    Raises:
        ConfigError: an item has no ``=``, or no row has the label or method.
    """
    for item in labels:
        old, equals, new = item.rpartition("=")
        if not equals or not new:
            raise ConfigError(f"--label {item}: write it as OLD=NEW, such as --label fedavg=FedAvg")
        matched = [group for group in groups if group.label == old]
        if not matched:
            matched = [group for group in groups if re.match(rf"{re.escape(old)}(, | \(|$)", group.label)]
        if not matched:
            known = {group.label for group in groups} | {group.runs[0].method_name for group in groups}
            raise ConfigError(f"--label {item}: no row is called {old!r}; {nearest(old, sorted(known))}")
        for group in matched:
            group.label = new + group.label.removeprefix(old)


def _labels(groups: Sequence[Group], method: str, keys: Sequence[str]) -> list[str]:
    found: list[str] = []
    for group in groups:
        parts = [method]
        for key in keys:
            parts.append(setting_text(key, group.runs[0].options.get(key)))
        label = ", ".join(parts)
        if group.marks:
            label += f" ({', '.join(group.marks)})"
        found.append(label)
    return found


def _marks(group: Group, groups: Sequence[Group]) -> tuple[str, ...]:
    """Return that ``group`` is a bound or was attacked, and its differences from most groups: code, rounds, seeds."""
    found: list[str] = []
    if group.runs[0].attack:
        found.append(f"under attack: {group.runs[0].attack}")
    if group.bound:
        found.append(f"{group.bound} bound")
    codes: Counter[tuple[str, str]] = Counter()
    rounds: Counter[int] = Counter()
    seeds: Counter[tuple[int, ...]] = Counter()
    for other in groups:
        codes.update(other.runs[0].code_by_package.items())
        rounds[other.rounds] += 1
        seeds[tuple(other.seeds)] += 1
    if _has_rare_code(group, codes):
        found.append(f"code {group.code}")
    if group.scored_images:
        found.append(f"scored on {' and '.join(map(str, group.scored_images))} images")
    if group.early_stops:
        found.append(f"stopped early after round {', '.join(map(str, group.early_stops))}")
    elif group.rounds != rounds.most_common(1)[0][0]:
        found.append(f"{group.rounds} rounds")
    if tuple(group.seeds) != seeds.most_common(1)[0][0]:
        word = "seed"
        if len(group.seeds) > 1:
            word = "seeds"
        found.append(f"{word} {','.join(map(str, group.seeds))}")
    return tuple(found)


def _has_rare_code(group: Group, codes: Counter[tuple[str, str]]) -> bool:
    """Return whether a package that ran for ``group`` is another version than that of most groups that ran it.

    Args:
        group: a row.
        codes: how many rows ran each package, by its name and hash.
    """
    for name, digest in group.runs[0].code_by_package.items():
        counts = {other: count for (package, other), count in codes.items() if package == name}
        if digest != max(counts, key=counts.__getitem__):  # the first of several
            return True
    return False


def other_code(group: Group, other: Group) -> bool:
    """Return whether two groups ran different versions of a package; a package of one of them alone is none."""
    theirs = other.runs[0].code_by_package
    for name, digest in group.runs[0].code_by_package.items():
        if theirs.get(name, digest) != digest:
            return True
    return False


def _tell_boards_apart(boards: Sequence[Board], settings: Sequence[dict[str, Any]]) -> None:
    """Name the settings that tell boards of the same data, protocol and model apart."""
    by_title: dict[str, list[tuple[Board, dict[str, Any]]]] = {}
    for board, found in zip(boards, settings, strict=True):
        by_title.setdefault(board.title, []).append((board, found))
    for same in by_title.values():
        if len(same) < 2:
            continue
        values: dict[str, set[str]] = {}
        for _, found in same:
            for key in found:
                values[key] = set()
        for key in values:
            for _, found in same:
                values[key].add(_text(found.get(key)))
        differing = sorted(key for key in values if len(values[key]) > 1)
        for board, found in same:
            board.remark = ", ".join(setting_text(key, found.get(key)) for key in differing)
