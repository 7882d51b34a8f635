"""Which runs belong together: in one table, in one row of it, and which of them are the same run twice.

Tables, reports, figures, sweeps, comparisons and reproduced tables all use these rules.

*One table* (:class:`ScoreTable`) holds runs that are scored on the same images: same data set, domains, image size and
test images, same protocol and same network. *One row* (:class:`~goldfinch.results.rows.ScoreRow`) holds runs that
differ in the seed alone: every setting that changes the result or the score is the same, and so are the rounds that are
done, the code that ran and, where a partition is fixed, the samples of every client. Runs that ``train.patience``
stopped early may have stopped after different rounds. If each run of a row uses its own seed for the partition too, the
partitions differ, and the runs stay one row.

Two runs with the same seed and the same final state, such as from two engines, count once. Of two runs with the same
seed and different states the first counts, and the other is named below the table.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from common.errors import ConfigError, some_of
from common.metrics import COUNTED
from common.versions import combined_hash
from goldfinch.record import RunRecord, setting_text, varying
from goldfinch.results.rows import (
    PARTITION_SEED,
    ScoreRow,
    best_row,
    named,
    notes_on,
    partition_seed,
    sign_of,
)
from server.run.events import COUNTS_LESS_SETTINGS, counts_text
from server.run.files import EVALUATED

MAX_LABEL_SETTINGS = 4
"""Settings in a row's label, unless more are needed to tell rows of one method apart."""

MAX_LEFT_OUT = 5
"""Folders that the note below a table names, of runs that are in no row."""

MAX_CLIENTS = 3
"""Clients that the note below a table names, of those in a row that count for fewer samples."""

TABLE_SETTINGS = (
    *("data.root", "data.image_size", "data.domains", "data.duplicates"),
    *("rounds.test_samples", "rounds.test"),
)
"""Settings that decide which images are scored."""

SHOWN_IN_MARKS = ("train.rounds", "attack._target_", "attack.clients")
"""Settings that are left out of a row's label, because its marks show them."""


@dataclass
class ScoreTable:
    """One table: rows that may be compared, since they are scored on the same images with the same network."""

    data: str
    protocol: str
    model: str
    rows: list[ScoreRow[RunRecord]] = field(default_factory=list)
    remark: str = ""
    """What tells this table from another one of the same data, protocol and model."""
    left_out: list[RunRecord] = field(default_factory=list)
    """Runs that are in no row, since they have not ended or score no test images."""

    @property
    def title(self) -> str:
        """Data set, protocol and model that the rows share, and :attr:`remark`."""
        parts = [self.data, self.protocol.replace("_", " "), self.model]
        if self.remark:
            parts.append(self.remark)
        return ", ".join(filter(None, parts))

    @property
    def bounds(self) -> dict[str, str]:
        """``lower`` or ``upper`` by the label of each row that is a bound."""
        return bounds_of(self.rows)

    @property
    def domains(self) -> list[str]:
        """Domains of all rows, in the first one's order."""
        names: dict[str, None] = {}
        for run in self.runs:
            names |= dict.fromkeys(run.domains)
        return list(names)

    @property
    def runs(self) -> list[RunRecord]:
        """The rows' runs, without duplicates and contradictions."""
        runs: list[RunRecord] = []
        for row in self.rows:
            runs += row.runs
        return runs

    @property
    def named_runs(self) -> list[tuple[str, RunRecord]]:
        """:attr:`runs` with their names."""
        pairs: list[tuple[str, RunRecord]] = []
        for row in self.rows:
            for run in row.runs:
                pairs.append((run_name(row, run), run))
        return pairs

    @property
    def clients(self) -> int:
        """The largest number of clients of a run."""
        count = 0
        for run in self.runs:
            count = max(count, len(run.registrations))
        return count

    @property
    def codes(self) -> list[str]:
        """Hashes of the code that ran, each once, in the order of the rows."""
        hashes: dict[str, None] = {}
        for row in self.rows:
            hashes[row.code] = None
        return list(hashes)

    def by_metric(self, metric: str) -> ScoreTable | None:
        """Return the same table with scores by another metric; ``None`` if a run lacks it, or confusion counts."""
        for run in self.runs:
            if metric not in run.measures or (metric in COUNTED and not run.has_counts):
                return None
        rows: list[ScoreRow[RunRecord]] = []
        for row in self.rows:
            runs = [run.by_metric(metric) for run in row.runs]
            rows.append(replace(row, runs=runs))
        return ScoreTable(self.data, self.protocol, self.model, rows, self.remark)

    def notes(self) -> list[str]:
        """Return the notes of the table, one sentence each: those on its rows, on partitions, and on repeated runs."""
        notes = notes_on(self.rows)
        notes += notes_on_bins(self.runs)
        notes += self._reply_notes()
        labels = [row.label for row in self.rows if row.partition_follows_seed]
        if len(labels) == len(self.rows):
            notes.append("Every seed has a partition of its own.")
        elif labels:
            notes.append(f"{named(labels, len(self.rows))}: every seed has a partition of its own.")
        for row in self.rows:
            metric = row.runs[0].validation_metric
            if row.scored_images:
                images = " and ".join(map(str, row.scored_images))
                remark = (
                    f"its runs were scored on {images} test images of a domain, so its mean is not of the same images."
                )
                if row.runs[0].changed_scoring:
                    remark = (
                        f"some rounds were scored on {images} test images of a domain, as it was resumed with other "
                        "scoring; it is averaged with no other run."
                    )
                notes.append(f"{row.label}: {remark}")
            if metric != "accuracy":
                label = row.measure_of("validation").label
                notes.append(f"{row.label}: validation is {label} (rounds.metric={metric}).")
            notes += joined_note(row)
            for run in row.duplicates:
                again = f"{run.folder} is seed {run.seed} once more with the same state; it counts once."
                notes.append(f"{row.label}: {again}")
            for run in row.contradictions:
                again = f"{run.folder} is seed {run.seed} once more with another state; it does not count."
                notes.append(f"{row.label}: {again}")
        return [*notes, *self.left_out_notes()]

    def left_out_notes(self) -> list[str]:
        """Return the notes on :attr:`left_out`."""
        unfinished: list[str] = []
        unscored: list[str] = []
        lacking: list[str] = []
        for run in self.left_out:
            name = f"{run.method_name} with seed {run.seed} ({run.folder})"
            if run.metric not in run.measures:
                lacking.append(name)
            elif run.scored:
                unfinished.append(f"{name}, {run.status} after round {run.rounds_done}")
            else:
                unscored.append(name)
        notes: list[str] = []
        if unfinished:
            notes.append(
                f"Left out, since they have not ended: {some_of(unfinished, MAX_LEFT_OUT)}; goldfinch resume goes on "
                "with a run."
            )
        if unscored:
            notes.append(f"Left out, since they score no test images: {some_of(unscored, MAX_LEFT_OUT)}.")
        if lacking:
            notes.append(
                f"Left out, since they lack this metric: {some_of(lacking, MAX_LEFT_OUT)}; a run has it with "
                "rounds.scores=true or own_metric=."
            )
        return notes

    def _reply_notes(self) -> list[str]:
        """Return the notes on updates that were scaled or not used, and on clients that count for fewer samples."""
        replies: list[str] = []
        samples: list[str] = []
        for row in self.rows:
            counts: Counter[str] = Counter()
            fewer: dict[str, None] = {}
            for run in row.runs:
                counts.update(run.answers)
                for client, entry in run.counts_less.items():
                    fewer[f"{client} as {entry['counted']} of {entry['registered']}"] = None
            text = counts_text(counts)
            if text:
                replies.append(f"{row.label}: {text}")
            if fewer:
                samples.append(f"{row.label}: {some_of(list(fewer), MAX_CLIENTS)}")
        notes: list[str] = []
        if replies:
            notes.append(f"Replies: {'; '.join(replies)}.")
        if samples:
            notes.append(
                f"Clients count for fewer samples than they registered ({COUNTS_LESS_SETTINGS}): {'; '.join(samples)}."
            )
        return notes


def group_runs(
    runs: Sequence[RunRecord],
    name: Callable[[RunRecord], str] | None = None,
    left_out: Sequence[RunRecord] = (),
) -> list[ScoreTable]:
    """Sort ``runs`` into tables and rows, both in the order of their first run.

    Args:
        runs: finished runs, or unfinished runs that have started.
        name: returns the method's name in labels; by default the name of its option.
        left_out: further runs, which a note below their table names; without a table of theirs, below the first.
    """
    tables: dict[str, ScoreTable] = {}
    members_of: dict[str, dict[str, list[RunRecord]]] = {}
    for run in runs:
        key = _text(_table_key(run))
        tables.setdefault(key, _new_table(run))
        members_of.setdefault(key, {}).setdefault(_text(_row_key(run)), []).append(run)
    for key, table in tables.items():
        for members in members_of[key].values():
            table.rows += map(_row, _by_partition(members))
        table.rows = _by_method(table.rows)
        _label(table.rows, name or _option_name)
    in_order = list(tables.values())
    for run in left_out:
        tables.get(_text(_table_key(run)), in_order[0]).left_out.append(run)
    _tell_tables_apart(in_order, [_settings_of_table(table.runs[0]) for table in in_order])
    return in_order


def _by_method(rows: Sequence[ScoreRow[RunRecord]]) -> list[ScoreRow[RunRecord]]:
    """Return the rows with those of one method next to each other, methods in the order of their first row.

    Bounds come last, the lower before the upper.
    """
    methods: dict[str, list[ScoreRow[RunRecord]]] = {}
    for row in rows:
        methods.setdefault(row.runs[0].method_name, []).append(row)
    grouped: list[ScoreRow[RunRecord]] = []
    for members in methods.values():
        grouped += members
    return sorted(grouped, key=lambda row: row.bound or "")


def bounds_of(rows: Sequence[ScoreRow[RunRecord]]) -> dict[str, str]:
    """Return ``lower`` or ``upper`` by the label of each row that is a bound of its table."""
    bounds: dict[str, str] = {}
    for row in rows:
        if row.bound:
            bounds[row.label] = row.bound
    return bounds


def notes_on_bins(runs: Sequence[RunRecord]) -> list[str]:
    """Return the note below scores by a binned metric: how far they may be off; none by another metric."""
    resolution = max(run.resolution for run in runs)
    if not resolution:
        return []
    label = runs[0].measure.label
    return [f"{label} is binned: after the last round it differs from the exact one by at most {resolution:.2f}."]


def joined_note(row: ScoreRow[RunRecord]) -> list[str]:
    """Return the note on clients whose last batch of one sample joined the batch before it, if there are any."""
    joined: set[str] = set()
    for run in row.runs:
        if run.facts.end is not None:
            joined.update(run.facts.end.joined_batches)
    if not joined:
        return []
    clients = some_of(sorted(joined), MAX_CLIENTS)
    return [
        f"{row.label}: a last batch of one sample joined the batch before it at {clients}, because network or method "
        "cannot train on one sample."
    ]


def run_name(row: ScoreRow[RunRecord], run: RunRecord) -> str:
    """Return a run's name: its row's label, with its seed if the row has several."""
    if len(row.runs) > 1:
        return f"{row.label}, seed {run.seed}"
    return row.label


# ---- which run is exported -------------------------------------------------------------------------------------------


def exported_run(rows: Sequence[ScoreRow[RunRecord]], rule: str = "final") -> RunRecord | None:
    """Return the finished run whose model a table offers for export; ``None`` without one.

    The run is of the only row, or of the row that is better than every other one on average (:func:`leader`). Of the
    row's seeds the one with the best score on validation samples is chosen, or else the first. No test score chooses.
    """
    row = best_row(rows, rule=rule)
    if len(rows) == 1:
        row = rows[0]
    if row is None:
        return None
    best: RunRecord | None = None
    highest = -math.inf
    for run in row.runs:
        score = run.rules.get(rule)
        if not run.ended or run.facts.scored == EVALUATED or score is None:
            continue
        quality = sign_of(row, "validation") * float(score.get("validation", 0.0))
        if best is None or quality > highest:
            best = run
            highest = quality
    return best


# ---- keys ------------------------------------------------------------------------------------------------------------


def _settings_of_table(run: RunRecord) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for key in TABLE_SETTINGS:
        if run.options.get(key) is not None:
            settings[key] = run.options[key]
    return settings


def _table_key(run: RunRecord) -> list[Any]:
    return [run.names, _settings_of_table(run)]


def _row_key(run: RunRecord) -> list[Any]:
    """Return everything that the runs of one row share, except for the partition's seed."""
    options = dict(run.options)
    options.pop(PARTITION_SEED, None)
    return [options, run.planned_rounds, run.code, run.changed_scoring]


def _by_partition(runs: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Return the runs of one row key, sorted by partition.

    Runs with the same fixed partition belong together, and so do the runs in which the partition's seed is the run's
    seed. If other runs have a fixed partition of that seed, such a run belongs to them.
    """
    fixed: set[int | None] = set()
    for run in runs:
        if partition_seed(run) != run.seed:
            fixed.add(partition_seed(run))
    runs_by_partition: dict[str, list[RunRecord]] = {}
    for run in runs:
        number = partition_seed(run)
        follows = number == run.seed and number not in fixed
        key = "the run's seed"
        if not follows:
            samples = combined_hash(run.facts.splits) if run.facts.splits else ""
            key = f"{number} {samples}"
        runs_by_partition.setdefault(key, []).append(run)
    return list(runs_by_partition.values())


def _row(members: Sequence[RunRecord]) -> ScoreRow[RunRecord]:
    duplicates: list[RunRecord] = []
    contradictions: list[RunRecord] = []
    by_seed: dict[int, RunRecord] = {}
    for run in sorted(members, key=lambda run: (run.seed, str(run.folder))):
        known = by_seed.setdefault(run.seed, run)
        if known is run:
            continue
        if run.state_sha256 is not None and run.state_sha256 == known.state_sha256:
            duplicates.append(run)
        else:
            contradictions.append(run)
    return ScoreRow("", list(by_seed.values()), duplicates, contradictions, bound=members[0].bound)


def _new_table(run: RunRecord) -> ScoreTable:
    return ScoreTable(*run.names)


def _option_name(run: RunRecord) -> str:
    return run.method_name


def _text(key: Any) -> str:
    return json.dumps(key, sort_keys=True, default=str)


# ---- labels ----------------------------------------------------------------------------------------------------------


def _label(rows: Sequence[ScoreRow[RunRecord]], name: Callable[[RunRecord], str]) -> None:
    """Give every row its marks, and a label that no other row of the table has."""
    for row in rows:
        row.marks = _marks(row, rows)
    by_method: dict[str, list[ScoreRow[RunRecord]]] = {}
    for row in rows:
        by_method.setdefault(name(row.runs[0]), []).append(row)
    for method, namesakes in by_method.items():
        keys = varying([row.runs[0] for row in namesakes])
        keys = [key for key in keys if key not in SHOWN_IN_MARKS]
        labels = _labels(namesakes, method, keys[:MAX_LABEL_SETTINGS])
        shown = keys[:MAX_LABEL_SETTINGS]
        for key in keys[MAX_LABEL_SETTINGS:]:
            longer = _labels(namesakes, method, [*shown, key])
            if len(set(longer)) > len(set(labels)):  # a key that tells rows apart
                shown.append(key)
                labels = longer
        for row, label in zip(namesakes, labels, strict=True):
            row.label = label
    by_label: dict[str, list[ScoreRow[RunRecord]]] = {}
    for row in rows:
        by_label.setdefault(row.label, []).append(row)
    for label, same in by_label.items():
        if len(same) > 1:  # such as two sets of images in the same place
            for number, row in enumerate(same, 1):
                row.label = f"{label} ({number})"


def rename(tables: Sequence[Sequence[ScoreRow[RunRecord]]], labels: Sequence[str]) -> None:
    """Give rows other labels, all at once, so that two rows may exchange theirs.

    Args:
        tables: the rows of each table; no two rows of one may have the same label.
        labels: ``OLD=NEW`` each. ``OLD`` is a row's label, or a method's name, which is replaced in all of its rows.

    Raises:
        ConfigError: an item has no ``=``, no row has the label or method, or two rows of a table would share a label.
    """
    rows = list(itertools.chain(*tables))
    new_labels = {id(row): row.label for row in rows}
    for item in labels:
        old, equals, new = item.rpartition("=")
        if not equals or not new:
            raise ConfigError(f"label {item}: write it as OLD=NEW, such as fedavg=FedAvg")
        matched = [row for row in rows if row.label == old]
        if not matched:
            matched = [row for row in rows if _first_part(row.label) == old]
        if not matched:
            matched = [row for row in rows if row.runs[0].method_name == old]
        if not matched:
            known = sorted({row.label for row in rows})
            raise ConfigError(f"label {item}: no row is called {old!r}; rows: {some_of(list(map(repr, known)))}")
        for row in matched:
            rest = row.label.removeprefix(old)
            if rest == row.label:  # found by the method's name
                rest = row.label.removeprefix(_first_part(row.label))
            new_labels[id(row)] = new + rest
    for table in tables:
        counts = Counter(new_labels[id(row)] for row in table)
        for label, count in counts.items():
            if count > 1 and labels:
                raise ConfigError(f"labels: {count} rows would be called {label!r}; give each a label of its own")
    for row in rows:
        row.label = new_labels[id(row)]


def _first_part(label: str) -> str:
    """Return a label without the settings, marks and table that tell its row from others of the same name."""
    return re.split(r", | \(|; ", label, maxsplit=1)[0]


def _labels(rows: Sequence[ScoreRow[RunRecord]], method: str, keys: Sequence[str]) -> list[str]:
    labels: list[str] = []
    for row in rows:
        parts = [method]
        for key in keys:
            if key in row.runs[0].options:
                parts.append(setting_text(key, row.runs[0].options[key]))
        label = ", ".join(parts)
        if row.marks:
            label += f" ({', '.join(row.marks)})"
        labels.append(label)
    return labels


def _marks(row: ScoreRow[RunRecord], rows: Sequence[ScoreRow[RunRecord]]) -> tuple[str, ...]:
    """Return that ``row`` is a bound or was attacked, and its differences from most rows: code, rounds, seeds."""
    marks: list[str] = []
    if row.runs[0].attack:
        marks.append(f"under attack: {row.runs[0].attack}")
    if row.bound:
        marks.append(f"{row.bound} bound")
    codes: Counter[tuple[str, str]] = Counter()
    rounds: Counter[int] = Counter()
    seeds: Counter[tuple[int, ...]] = Counter()
    for other in rows:
        codes.update(other.runs[0].code_by_package.items())
        rounds[other.rounds] += 1
        seeds[tuple(other.seeds)] += 1
    if _has_rare_code(row, codes):
        marks.append(f"code {row.code}")
    if row.scored_images:
        marks.append(f"scored on {' and '.join(map(str, row.scored_images))} images")
    if row.early_stops:
        marks.append(f"stopped early after round {', '.join(map(str, row.early_stops))}")
    elif row.rounds != rounds.most_common(1)[0][0]:
        marks.append(f"{row.rounds} rounds")
    if tuple(row.seeds) != seeds.most_common(1)[0][0]:
        word = "seed"
        if len(row.seeds) > 1:
            word = "seeds"
        marks.append(f"{word} {','.join(map(str, row.seeds))}")
    return tuple(marks)


def _has_rare_code(row: ScoreRow[RunRecord], codes: Counter[tuple[str, str]]) -> bool:
    """Return whether a package that ran for ``row`` is another version than that of most rows that ran it.

    Args:
        row: a row.
        codes: how many rows ran each package, by its name and hash.
    """
    for name, digest in row.runs[0].code_by_package.items():
        counts = {other: count for (package, other), count in codes.items() if package == name}
        if digest != max(counts, key=counts.__getitem__):  # the first of several
            return True
    return False


def _tell_tables_apart(tables: Sequence[ScoreTable], settings: Sequence[dict[str, Any]]) -> None:
    """Name the settings that tell tables of the same data, protocol and model apart."""
    by_title: dict[str, list[tuple[ScoreTable, dict[str, Any]]]] = {}
    for table, values_by_key in zip(tables, settings, strict=True):
        by_title.setdefault(table.title, []).append((table, values_by_key))
    for same in by_title.values():
        if len(same) < 2:
            continue
        values: dict[str, set[str]] = {}
        for _, values_by_key in same:
            for key in values_by_key:
                values[key] = set()
        for key in values:
            for _, values_by_key in same:
                values[key].add(_text(values_by_key.get(key)))
        differing = sorted(key for key in values if len(values[key]) > 1)
        for table, values_by_key in same:
            table.remark = ", ".join(setting_text(key, values_by_key.get(key)) for key in differing)
