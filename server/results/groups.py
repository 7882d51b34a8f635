"""Which runs belong together: in one table, in one row of it, and which of them are the same run twice.

This is the one place that decides it, for tables, reports, figures, sweeps, comparisons and reproduced tables.

*One table* (:class:`Board`) holds runs that are scored on the same images: same data set, domains, image size and test
images, same protocol and same network. *One row* (:class:`Group`) holds runs that differ in the seed alone: every
setting that changes the result or the score is the same, and so are the rounds that are done, the code that ran and,
where a partition is fixed, the samples of every client. A partition whose seed is the run's seed in every run of a row
varies with it, and stays one row.

The same seed with the same final state, as from another engine, counts once. The same seed with another state is no
further seed: the first run counts, and the others are named.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.data.protocols import combined_hash
from common.metrics import PARTIAL, named_missing
from server.results.run import Run, setting_text, varying
from server.results.seeds import Value

MAX_LABEL_SETTINGS = 4
"""Settings that a row's label names, unless more are needed to tell it from its namesakes."""

MAX_DIFFERENCES = 8
"""Settings that are listed under a table; the report lists all."""

PARTITION_SEED = "protocol.partition_seed"
BOARD_SETTINGS = ("data.image_size", "data.domains", "data.duplicates", "rounds.test_samples", "rounds.test")
"""Settings that decide which images are scored."""

SHOWN_IN_MARKS = ("train.rounds",)
"""Settings that a row's marks tell, so that its label need not."""


@dataclass
class Group:
    """One row: runs that differ in the seed alone.

    Args:
        label: the method's name, the settings that tell it from its namesakes, and its :attr:`marks`.
        runs: one for each seed, ascending.
        duplicates: further runs of the same seed and the same final state; they do not count.
        contradictions: further runs of a seed that is there already with another final state; they do not count.
        marks: in what the row differs from most rows of its table besides settings: code, rounds, seeds.
    """

    label: str
    runs: list[Run] = field(default_factory=list)
    duplicates: list[Run] = field(default_factory=list)
    contradictions: list[Run] = field(default_factory=list)
    marks: tuple[str, ...] = ()

    @property
    def seeds(self) -> list[int]:
        """The seeds of the runs that count."""
        return [run.seed for run in self.runs]

    @property
    def personal(self) -> bool:
        """Whether its scores are of clients' own models."""
        return self.runs[0].personal

    @property
    def code(self) -> str:
        """The hash of the code that ran."""
        return self.runs[0].code

    @property
    def rounds(self) -> int:
        """Rounds that are done."""
        return self.runs[0].rounds_done

    @property
    def partition_follows_seed(self) -> bool:
        """Whether every run has a partition of its own, drawn with its seed."""
        return len(self.runs) > 1 and len({partition_seed(run) for run in self.runs}) > 1

    def values(self, column: str, rule: str = "final") -> list[float]:
        """What each run that has it scored.

        Args:
            column: ``average``, ``worst``, ``spread``, ``validation``, ``seen_average``, ``unseen_average`` or
                ``domain:<name>``.
            rule: how runs are scored, see :func:`common.metrics.summarise`.
        """
        found = [_cell(run.rules[rule], column) for run in self.runs if rule in run.rules]
        return [value for value in found if value is not None]

    def value(self, column: str, rule: str = "final") -> Value | None:
        """The same over seeds, partial if any run's is or a run has none; ``None`` where no run has it."""
        values = self.values(column, rule)
        lacking = [_lacks(run.rules[rule], column, rule, run.unseen) for run in self.runs if rule in run.rules]
        return Value.of(values, partial=any(lacking) or len(values) < len(self.runs))

    def missing(self, rule: str = "final") -> list[str]:
        """What the runs' scores lack and since when, a line for each run that is not whole."""
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
        """What the groups share."""
        parts = (self.data, self.protocol.replace("_", " "), self.model, self.remark)
        return ", ".join(part for part in parts if part)

    @property
    def domains(self) -> list[str]:
        """Domains of all groups, in the first one's order."""
        return list(dict.fromkeys(name for run in self.runs for name in run.domains))

    @property
    def runs(self) -> list[Run]:
        """The runs that count, group by group."""
        return [run for group in self.groups for run in group.runs]

    @property
    def named_runs(self) -> list[tuple[str, Run]]:
        """The same with what each is called."""
        return [(run_name(group, run), run) for group in self.groups for run in group.runs]

    @property
    def clients(self) -> int:
        """The number of clients of the run that has most."""
        return max((len(run.registrations) for run in self.runs), default=0)

    @property
    def codes(self) -> list[str]:
        """Hashes of the code that ran, each once, in the order of the groups."""
        return list(dict.fromkeys(group.code for group in self.groups))

    def notes(self) -> list[str]:
        """What a reader of the table must know besides its numbers, one sentence each."""
        found = []
        if differences := self.differences():
            shown = "; ".join(differences[:MAX_DIFFERENCES])
            more = len(differences) - MAX_DIFFERENCES
            found.append(
                f"Rows differ in more than the method: {shown}" + (f"; and {more} more" if more > 0 else "") + "."
            )
        if len(self.codes) > 1:
            rows = "; ".join(f"{code}: {self._labels_with('code', code)}" for code in self.codes)
            found.append(f"Rows were run by different code: {rows}.")
        for group in self.groups:
            if group.partition_follows_seed:
                found.append(f"{group.label}: every seed has a partition of its own.")
            found += [
                f"{group.label}: {run.folder} is seed {run.seed} once more with the same state; it counts once."
                for run in group.duplicates
            ]
            found += [
                f"{group.label}: {run.folder} is seed {run.seed} once more with another state; it does not count."
                for run in group.contradictions
            ]
        return found

    def differences(self) -> list[str]:
        """Settings besides the method's own in which the groups differ, each with its values and who has them."""
        first = [group.runs[0] for group in self.groups]
        keys = [key for key in varying(first) if not key.startswith("method.") and key != PARTITION_SEED]
        if len({partition_seed(run) for run in first}) > 1 and not any(g.partition_follows_seed for g in self.groups):
            keys.append(PARTITION_SEED)
        found = []
        for key in keys:
            rows: dict[str, list[str]] = {}
            for group in self.groups:
                value = setting_text(key, group.runs[0].options.get(key)).partition("=")[2]
                rows.setdefault(value, []).append(group.label)
            values = ", ".join(f"{value} ({', '.join(labels)})" for value, labels in rows.items())
            found.append(f"{key} {values}")
        return found

    def _labels_with(self, attribute: str, value: Any) -> str:
        return ", ".join(group.label for group in self.groups if getattr(group, attribute) == value)


def group_runs(runs: Sequence[Run], name: Callable[[Run], str] | None = None) -> list[Board]:
    """Sort ``runs`` into boards and groups, both in the order of their first run.

    Args:
        runs: finished runs, or unfinished ones that have at least begun.
        name: what a method is called in labels; by default the name of its option.
    """
    boards: dict[str, Board] = {}
    rows: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        key = _text(_board_key(run))
        boards.setdefault(key, _new_board(run))
        rows.setdefault(key, {}).setdefault(_text(_row_key(run)), []).append(run)
    for key, board in boards.items():
        for members in rows[key].values():
            board.groups += [_group(part) for part in _by_partition(members)]
        _label(board.groups, name or _option_name)
    _tell_boards_apart(list(boards.values()), [_settings_of_board(board.runs[0]) for board in boards.values()])
    return list(boards.values())


def all_groups(runs: Sequence[Run]) -> list[Group]:
    """The groups of all boards that ``runs`` make."""
    return [group for board in group_runs(runs) for group in board.groups]


def run_name(group: Group, run: Run) -> str:
    """What a run is called: its group's label, with its seed where the group has several."""
    return f"{group.label}, seed {run.seed}" if len(group.runs) > 1 else group.label


def partition_seed(run: Run) -> int | None:
    """The seed that the clients' samples were drawn with; ``None`` if the protocol draws none."""
    chosen = run.options.get(PARTITION_SEED, "absent")
    if chosen == "absent":
        return None
    return run.seed if chosen is None else int(chosen)


# ---- which is best ---------------------------------------------------------------------------------------------------


def _cell(score: Mapping[str, Any], column: str) -> float | None:
    """A number of a run's score, ``None`` if it has none."""
    if column.startswith("domain:"):
        score, column = score["accuracy"], column.removeprefix("domain:")
    return None if score.get(column) is None else float(score[column])


def _lacks(score: Mapping[str, Any], column: str, rule: str, unseen: Collection[str]) -> bool:
    """Whether a number of a run's score is of fewer domains, rounds or clients than it should be."""
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


def footnotes(groups: Sequence[Group], rule: str = "final") -> list[str]:
    """Return one line for each group with a partial score: what it lacks, and since when."""
    lines = []
    for group in groups:
        if found := group.missing(rule):
            lines.append(f"{PARTIAL} partial, not ranked: {group.label}: {'; '.join(found)}")
    return lines


def comparable(groups: Sequence[Group]) -> list[Group]:
    """Groups among which a best one may be named: those scored on one shared model, or all if there are none."""
    return [group for group in groups if not group.personal] or list(groups)


def cells(groups: Sequence[Group], columns: Sequence[str], rule: str) -> list[list[tuple[Value | None, bool]]]:
    """Each group's value in each of ``columns``, ``None`` without a score, and whether it is the best of its column.

    Of ``spread`` the least is best. A best one is named among several :func:`comparable` groups only, and is never a
    partial value.
    """
    rivals, found = comparable(groups), []
    for column in columns:
        values = [group.value(column, rule) for group in groups]
        ranks = [
            value is not None and not value.partial and group in rivals
            for group, value in zip(groups, values, strict=True)
        ]
        means = [value.mean for value, may in zip(values, ranks, strict=True) if value is not None and may]
        best = (min if column == "spread" else max)(means) if means and len(rivals) > 1 else math.nan
        found.append(
            [
                (value, may and value is not None and abs(value.mean - best) < 1e-9)
                for value, may in zip(values, ranks, strict=True)
            ]
        )
    return [list(row) for row in zip(*found, strict=True)]


def ranked(groups: Sequence[Group], rule: str = "final") -> list[Group]:
    """Groups with a whole score, the best average first; a partial one has no rank."""
    values = [(group.value("average", rule), group) for group in groups]
    scored = [(value.mean, group) for value, group in values if value is not None and not value.partial]
    return [group for _, group in sorted(scored, key=lambda pair: -pair[0])]


def best_run(groups: Sequence[Group], rule: str = "final") -> Run | None:
    """The finished run of the lowest seed in the group with the best whole average; ``None`` if there is none."""
    runs = [run for group in comparable(ranked(groups, rule))[:1] for run in group.runs if run.summary]
    return min(runs, key=lambda run: run.seed, default=None)


# ---- keys ------------------------------------------------------------------------------------------------------------


def _settings_of_board(run: Run) -> dict[str, Any]:
    found = {key: run.options[key] for key in BOARD_SETTINGS if run.options.get(key) is not None}
    if run.names[0] == "folder":  # images of one's own: another folder holds other images
        found["data.root"] = dict(run.config.get("data") or {}).get("root")
    return found


def _board_key(run: Run) -> list[Any]:
    return [run.names, _settings_of_board(run)]


def _row_key(run: Run) -> list[Any]:
    """All that runs of one row share, but the partition's seed."""
    options = {key: value for key, value in run.options.items() if key != PARTITION_SEED}
    return [options, run.rounds_done, run.code]


def _by_partition(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs of one row key by partition: those with a fixed one each by itself, and those where it is the run's seed.

    A run whose partition's seed is its own seed belongs to the fixed partition of that number if other runs have it.
    """
    fixed = {partition_seed(run) for run in runs if partition_seed(run) != run.seed}
    found: dict[str, list[Run]] = {}
    for run in runs:
        number = partition_seed(run)
        follows = number == run.seed and number not in fixed
        splits = run.summary.get("splits")
        samples = combined_hash(splits) if splits and not follows else ""
        found.setdefault("the run's seed" if follows else f"{number} {samples}", []).append(run)
    return list(found.values())


def _group(members: Sequence[Run]) -> Group:
    group = Group("")
    by_seed: dict[int, Run] = {}
    for run in sorted(members, key=lambda run: (run.seed, str(run.folder))):
        known = by_seed.setdefault(run.seed, run)
        if known is run:
            group.runs.append(run)
        elif run.state_sha256 is not None and run.state_sha256 == known.state_sha256:
            group.duplicates.append(run)
        else:
            group.contradictions.append(run)
    return group


def _new_board(run: Run) -> Board:
    return Board(*run.names)


def _option_name(run: Run) -> str:
    return run.method_name


def _text(key: Any) -> str:
    return json.dumps(key, sort_keys=True, default=str)


# ---- labels ----------------------------------------------------------------------------------------------------------


def _label(groups: Sequence[Group], name: Callable[[Run], str]) -> None:
    """Give every group its marks, and a label that no other group of the board has."""
    for group in groups:
        group.marks = _marks(group, groups)
    for method in {name(group.runs[0]) for group in groups}:
        namesakes = [group for group in groups if name(group.runs[0]) == method]
        keys = [key for key in varying([group.runs[0] for group in namesakes]) if key not in SHOWN_IN_MARKS]
        count = min(MAX_LABEL_SETTINGS, len(keys))
        while count < len(keys) and len(set(_labels(namesakes, method, keys[:count]))) < len(namesakes):
            count += 1
        for group, label in zip(namesakes, _labels(namesakes, method, keys[:count]), strict=True):
            group.label = label
    for label, times in Counter(group.label for group in groups).items():
        if times > 1:  # such as two sets of images in the same place
            same = [group for group in groups if group.label == label]
            for number, group in enumerate(same, 1):
                group.label = f"{label} ({number})"


def _labels(groups: Sequence[Group], method: str, keys: Sequence[str]) -> list[str]:
    found = []
    for group in groups:
        options = group.runs[0].options
        label = ", ".join([method, *(setting_text(key, options.get(key)) for key in keys)])
        found.append(f"{label} ({', '.join(group.marks)})" if group.marks else label)
    return found


def _marks(group: Group, groups: Sequence[Group]) -> tuple[str, ...]:
    """In what ``group`` differs from most groups of its board: code, rounds and seeds."""
    found = []
    if group.code != _commonest(other.code for other in groups):
        found.append(f"code {group.code}")
    if group.rounds != _commonest(other.rounds for other in groups):
        found.append(f"{group.rounds} rounds")
    if tuple(group.seeds) != _commonest(tuple(other.seeds) for other in groups):
        found.append(f"{'seeds' if len(group.seeds) > 1 else 'seed'} {','.join(map(str, group.seeds))}")
    return tuple(found)


def _commonest(values: Iterable[Any]) -> Any:
    """The most frequent value; the first of several."""
    return Counter(values).most_common(1)[0][0]


def _tell_boards_apart(boards: Sequence[Board], settings: Sequence[dict[str, Any]]) -> None:
    """Name the settings that tell boards of the same data, protocol and model apart."""
    for title in {board.title for board in boards}:
        same = [(board, found) for board, found in zip(boards, settings, strict=True) if board.title == title]
        keys = sorted({key for _, found in same for key in found})
        differing = [key for key in keys if len({_text(found.get(key)) for _, found in same}) > 1]
        for board, found in same if len(same) > 1 else ():
            board.remark = ", ".join(setting_text(key, found.get(key)) for key in differing)
