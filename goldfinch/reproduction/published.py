"""Published tables: one data file per paper in ``published/``, with the overrides that make each row again."""

import itertools
from collections.abc import Container, Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf

from common.config import build, check, checked
from common.errors import ConfigError, nearest
from goldfinch.papers import PAPERS, cited

PUBLISHED = Path(__file__).resolve().parent / "published"

Scale = Literal["paper", "paper_net", "small"]
Rule = Literal["final", "last_n", "best_round"]


@checked
class Reduction:
    """What ``scale=small`` or ``scale=paper_net`` changes.

    Args:
        says: every change as text, printed with every result.
        overrides: the same as overrides.
        stand_ins: data set in place of a published one, by the name of the published one. Scores on a stand-in are
            never compared with published ones.
        rows: labels of the rows that are run unless others are asked for; empty is all.
        seeds: likewise; empty is the table's own.
    """

    says: tuple[str, ...]
    overrides: tuple[str, ...]
    stand_ins: dict[str, str] = field(default_factory=dict)
    rows: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()


@checked
class PublishedRow:
    """One row of a table.

    Args:
        label: its name in the paper.
        overrides: what makes it, besides the experiment's settings.
        cells: published accuracy per domain in per cent, in the table's order; ``None`` where nothing was printed.
        deviations: published standard deviation of each cell.
        average: published average; it may differ from what the cells give (``misprint``).
        misprint: what is wrong with the printed average, as text.
        measured: a published measure besides accuracy (FedPall's mutual information).
        point: where the row lies in a sweep: the values of its axes by key.
    """

    label: str
    overrides: tuple[str, ...]
    cells: tuple[float | None, ...] = ()
    deviations: tuple[float, ...] = ()
    average: float | None = None
    misprint: str = ""
    measured: float | None = None
    point: dict[str, float] = field(default_factory=dict)

    @property
    def expected_average(self) -> float | None:
        """The average that the cells give; the printed one where cells are missing."""
        total = 0.0
        for cell in self.cells:
            if cell is None:
                return self.average
            total += cell
        if not self.cells:
            return self.average
        return total / len(self.cells)

    @property
    def has_cells(self) -> bool:
        """Whether the accuracy of at least one domain was printed."""
        return any(cell is not None for cell in self.cells)


@checked
class Sweep:
    """A grid of hyper-parameters. Each point is a row.

    Args:
        base: overrides of all points.
        axes: values by key.
        names: the axes' names in the paper.
        published: averages at some points: ``{at: [values in the order of axes], average: number}``.
    """

    base: tuple[str, ...]
    axes: dict[str, tuple[float, ...]]
    names: dict[str, str]
    published: tuple[dict[str, Any], ...] = ()

    def rows(self) -> tuple[PublishedRow, ...]:
        """One row per point of the grid."""
        known: dict[tuple[float, ...], float] = {}
        for entry in self.published:
            known[tuple(map(float, entry["at"]))] = float(entry["average"])
        rows: list[PublishedRow] = []
        for values in itertools.product(*self.axes.values()):
            point = dict(zip(self.axes, values, strict=True))
            labels: list[str] = []
            chosen: list[str] = []
            for key, value in point.items():
                labels.append(f"{self.names[key]} = {value:g}")
                chosen.append(f"{key}={value:g}")
            average = known.get(values)
            rows.append(PublishedRow(", ".join(labels), (*self.base, *chosen), average=average, point=point))
        return tuple(rows)


@checked
class PublishedTable:
    """One table, or one data set of it; its name is that of its file in ``conf/experiment/``.

    Args:
        name: the experiment.
        paper: title, authors, venue, year and identifier, from :mod:`goldfinch.papers`.
        title: which table of the paper.
        rule: how the paper scores a run: the last round, the mean of the last five, or the best round by test score.
        domains: the paper's name of each test domain.
        small: for two CPU cores in minutes: another network, fewer rounds and epochs. See :class:`Reduction`.
        decimals: of the printed averages.
        own: label of the paper's own method.
        note: what a reader of its scores must know of the data.
        seeds: the runs of each row.
        listed: rows as printed.
        sweeps: grids of hyper-parameters.
        measure: a measure besides accuracy.
        paper_net: the paper's own network, epochs, batches, clients and rule, in fewer rounds; ``None`` if not offered.
    """

    name: str
    paper: str
    title: str
    rule: Rule
    domains: dict[str, str]
    small: Reduction
    decimals: int = 2
    own: str = ""
    note: str = ""
    seeds: tuple[int, ...] = (0, 1, 2)
    listed: tuple[PublishedRow, ...] = ()
    sweeps: tuple[Sweep, ...] = ()
    measure: Literal["", "mutual_information"] = ""
    paper_net: Reduction | None = None

    def __post_init__(self) -> None:
        rows = self.rows
        check(bool(rows), f"{self.name} has no rows")
        labels = [row.label for row in rows]
        check(len(set(labels)) == len(labels), f"{self.name} names a row twice")
        for row in rows:
            check(len(row.cells) in (0, len(self.domains)), f"{self.name}, {row.label}: {len(row.cells)} cells")
            check(len(row.deviations) in (0, len(self.domains)), f"{self.name}, {row.label}: wrong deviations")
        for reduced in (self.small, self.paper_net):
            if reduced is None:
                continue
            unknown = set(reduced.rows) - set(labels)
            check(not unknown, f"{self.name}: no row {', '.join(sorted(unknown))}")
        check(self.own in ("", *labels), f"{self.name}: own={self.own!r} is no row")

    @property
    def rows(self) -> tuple[PublishedRow, ...]:
        """Listed rows, then those of the sweeps."""
        rows = list(self.listed)
        for sweep in self.sweeps:
            rows += sweep.rows()
        return tuple(rows)

    def stand_in(self, domain: str, scale: Scale) -> str:
        """The domain that is scored in place of a published one: itself, or its stand-in at this scale."""
        reduced = self.reduction(scale)
        if reduced is None:
            return domain
        return reduced.stand_ins.get(domain, domain)

    def reduction(self, scale: Scale) -> Reduction | None:
        """What a scale changes; ``None`` for the paper's.

        Raises:
            ConfigError: the table is not offered at this scale.
        """
        if scale == "paper_net" and self.paper_net is None:
            offered: list[str] = []
            for name, table in published_tables().items():
                if table.paper_net is not None:
                    offered.append(name)
            raise ConfigError(
                f"{self.name} has no --scale paper_net; {', '.join(offered)} have. Take --scale small or --scale paper"
            )
        return {"paper": None, "paper_net": self.paper_net, "small": self.small}[scale]

    def rows_at(self, scale: Scale) -> tuple[PublishedRow, ...]:
        """The rows that are run at a scale unless others are asked for."""
        reduced = self.reduction(scale)
        if reduced is None or not reduced.rows:
            return self.rows
        return self._labelled(reduced.rows)

    def _labelled(self, labels: Container[str]) -> tuple[PublishedRow, ...]:
        """Return the rows with these labels, in the table's order."""
        return tuple(row for row in self.rows if row.label in labels)

    def overrides(self, row: PublishedRow, scale: Scale, more: Sequence[str] = ()) -> list[str]:
        """Return the overrides of a row, without seed and output: experiment, row, scale, then ``more``.

        The last override of a key counts. A key that the row's method does not have is kept, and refused later.
        """
        chosen = [f"experiment={self.name}", *row.overrides]
        reduced = self.reduction(scale)
        if reduced is not None:
            chosen += reduced.overrides
        chosen += more
        last: dict[str, str] = {}
        for item in chosen:
            key = item.partition("=")[0]
            last.pop(key, None)  # a key keeps its first place otherwise
            last[key] = item
        return list(last.values())

    def select(self, wanted: Sequence[str]) -> tuple[PublishedRow, ...]:
        """The rows that ``wanted`` names: a label as written (without its commas) one row, a method all of its rows.

        Raises:
            ConfigError: a name fits no row.
        """
        chosen: set[str] = set()
        for word in wanted:
            labels = self._labels_of(word)
            if not labels:
                known = [row.label for row in self.rows] + [method_of(row) for row in self.rows]
                raise ConfigError(f"{self.name} has no row {word!r}; {nearest(word, known)}")
            chosen |= labels
        return self._labelled(chosen)

    def _labels_of(self, word: str) -> set[str]:
        """Return the label that ``word`` is, or else the labels of the rows that it names by method or plain label."""
        exact: set[str] = set()
        similar: set[str] = set()
        for row in self.rows:
            if row.label.replace(",", "") == word:
                exact.add(row.label)
            if _plain(word) in (_plain(row.label), _plain(method_of(row))):
                similar.add(row.label)
        return exact or similar


def method_of(row: PublishedRow) -> str:
    """The option of ``conf/method/`` that a row runs."""
    return next(item.partition("=")[2] for item in row.overrides if item.startswith("method="))


def _plain(word: str) -> str:
    return "".join(character for character in word.lower() if character.isalnum() or character in "+=.")


@lru_cache(maxsize=1)
def published_tables() -> Mapping[str, PublishedTable]:
    """Every table of every paper, by name.

    Raises:
        ConfigError: a data file is not as it must be.
    """
    tables: dict[str, PublishedTable] = {}
    for path in sorted(PUBLISHED.glob("*.yaml")):
        content = OmegaConf.to_container(OmegaConf.load(path))
        if not isinstance(content, dict):
            raise ConfigError(f"{path} is not a paper's data file")
        if content["paper"] not in PAPERS:
            raise ConfigError(f"{path}: paper={content['paper']}; {nearest(str(content['paper']), PAPERS)}")
        common = {"paper": cited(content["paper"]), "decimals": content.get("decimals", 2)}
        for name, node in content["tables"].items():
            values = {"name": name, **common, **node}
            values["listed"] = values.pop("rows", ())
            tables[name] = build(values, f"{path.name}: {name}", PublishedTable)
    return tables


def published_table(name: str) -> PublishedTable:
    """One table.

    Raises:
        ConfigError: there is none of this name.
    """
    tables = published_tables()
    if name not in tables:
        raise ConfigError(f"goldfinch reproduce {name}: no such table; {nearest(name, tables)}")
    return tables[name]
