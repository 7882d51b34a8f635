"""``goldfinch figure KIND DIR ...``: draw one figure of runs as PNG, PDF or SVG."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path

from matplotlib.figure import Figure

from common.errors import ConfigError, nearest, some_of
from common.regular_files import read_small
from goldfinch.record import RunRecord, find_runs
from goldfinch.results.figures.charts import bars, check_format, convergence, fit_names, rule_text, save, sensitivity
from goldfinch.results.frames import domain_columns, domain_heads, partial_notes, starred_bounds, starred_label
from goldfinch.results.groups import group_runs, rename
from goldfinch.results.rows import ScoreRow
from goldfinch.results.seeds import Value, curve
from goldfinch.results.table import scored_runs, unfinished_runs

KINDS = ("convergence", "prototypes", "heatmap", "bars")
USED_BY = {
    "rule": ("heatmap", "bars"),
    "column": ("heatmap",),
    "axes": ("heatmap",),
    "samples": ("prototypes",),
    "by": ("prototypes",),
    "labels": ("convergence", "bars"),
}
"""The kinds that use a parameter of :func:`draw`, of those that not all use."""


def draw(
    kind: str,
    folders: Sequence[str],
    output: Path | None,
    rule: str = "final",
    column: str = "average",
    axes: Sequence[str] = (),
    samples: int = 100,
    by: str = "tsne",
    title: str | None = None,
    size: str | None = None,
    labels: Sequence[str] = (),
) -> None:
    """Draw the runs in and below ``folders`` as one picture.

    Args:
        kind: one of :data:`KINDS`.
        folders: run folders, or folders with runs below them.
        output: the picture; ``<first folder>/<kind>.png`` by default.
        rule: the rule of the accuracies, as in ``goldfinch table``.
        column: what a heat map shows.
        axes: the settings of a heat map's axes.
        samples: test images of each domain in a figure of prototypes.
        by: how prototypes and features are placed, ``tsne`` or ``pca``.
        title: replaces data and protocol in the title; notes on missing values remain.
        size: width and height in inches, such as ``7x4``.
        labels: names of rows, such as ``fedavg=FedAvg``.

    Raises:
        ConfigError: the kind is unknown or does not use an option, the folders hold no runs or runs that the kind
            cannot show, or the size or a label is not valid.
    """
    if kind not in KINDS:
        raise ConfigError(f"goldfinch figure {kind}: no such kind; {nearest(kind, KINDS)}")
    if samples < 1:
        raise ConfigError(f"--samples {samples}: must be 1 or more")
    given = {"rule": rule, "column": column, "axes": tuple(axes), "samples": samples, "by": by, "labels": tuple(labels)}
    for name, fit in USED_BY.items():
        if kind not in fit and given[name] != signature(draw).parameters[name].default:
            option = "--label" if name == "labels" else f"--{name}"
            raise ConfigError(f"{option}: {kind} does not use it, only {' and '.join(fit)}; leave it out")
    path = output or Path(folders[0]) / f"{kind}.png"
    check_format(path)  # before the work
    inches = _inches(size)
    runs = ended = find_runs(folders)
    if kind != "prototypes":
        runs = scored_runs(ended)
    kinds: Mapping[str, Callable[[], Figure]] = {
        "convergence": lambda: curves_of(runs, title, labels),
        "prototypes": lambda: _prototypes(runs, by, samples, title),
        "heatmap": lambda: sensitivity(runs, axes=axes, rule=rule, column=column, title=title),
        "bars": lambda: bars_of(runs, rule, title, labels),
    }
    figure = kinds[kind]()
    if inches is not None:
        figure.set_size_inches(*inches)
        fit_names(figure)
    print(f"wrote {save(figure, path)}")
    unfinished = [str(run.folder) for run in unfinished_runs(folders, ended)]
    if unfinished:
        print(f"left out, since they have not ended: {some_of(unfinished)}")
    unscored = [str(run.folder) for run in ended if run not in runs]
    if unscored:
        print(f"left out, since they score no test images: {some_of(unscored)}")


def _inches(size: str | None) -> tuple[float, float] | None:
    """Return width and height of ``7x4``.

    Raises:
        ConfigError: ``size`` is not two numbers from 1 to 50.
    """
    if size is None:
        return None
    width, _, height = size.partition("x")
    try:
        inches = float(width), float(height)
    except ValueError:
        inches = 0.0, 0.0
    if not (1 <= inches[0] <= 50 and 1 <= inches[1] <= 50):
        raise ConfigError(f"--size {size}: give width and height in inches, each from 1 to 50, such as --size 7x4")
    return inches


def named_groups(runs: Sequence[RunRecord], labels: Sequence[str] = ()) -> list[ScoreRow[RunRecord]]:
    """Return the rows of ``runs`` with the labels of a figure.

    If all runs are rows of tables of ``goldfinch reproduce``, their labels are those of the tables. A label that two
    rows share is followed by the row's own label. Groups of several tables are followed by their table's title.

    Args:
        runs: finished runs.
        labels: further names, ``OLD=NEW``.
    """
    known: dict[Path, str] = {}
    places: set[Path] = set()
    for run in runs:
        places.update(run.folder.absolute().parents[2:3])
    for place in places:
        for path in sorted(place.glob("*.json")):
            known |= _labels_in(path)
    tables = group_runs(runs)
    rows: list[ScoreRow[RunRecord]] = []
    for table in tables:
        rows += table.rows
    if all(run.folder.absolute() in known for run in runs):
        names = [known[row.runs[0].folder.absolute()] for row in rows]
        for row, name in zip(rows, names, strict=True):
            if names.count(name) > 1:
                row.label = f"{name}: {row.label}"
            elif row.marks:
                row.label = f"{name} ({', '.join(row.marks)})"
            else:
                row.label = name
        counts = Counter(row.label for row in rows)
        for table in tables:
            for row in table.rows:
                if counts[row.label] > 1:  # a row of this name in each of two reproduced tables
                    row.label = f"{row.label}; {table.title}"
    elif len(tables) > 1:
        for table in tables:
            for row in table.rows:
                row.label = f"{row.label}; {table.title}"
    rename([rows], labels)
    return rows


def _labels_in(path: Path) -> dict[Path, str]:
    """Return the labels in a file of ``goldfinch reproduce`` by folder of the run; empty for another file."""
    labels: dict[Path, str] = {}
    try:
        for row in json.loads(read_small(path))["rows"]:
            for folder in row["folders"].values():
                labels[Path(folder).absolute()] = row["label"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return labels


def bars_of(runs: Sequence[RunRecord], rule: str, title: str | None = None, labels: Sequence[str] = ()) -> Figure:
    """Draw accuracy by domain and on average, one bar for each label; seeds of one label are averaged.

    A partial value has no bar, and the title names what it lacks.
    """
    rows = named_groups(runs, labels)
    domains = domain_columns(rows, rule)
    columns = [f"domain:{name}" for name in domains]
    series: dict[str, list[Value | None]] = {}
    for row in rows:
        series[starred_label(row)] = [row.whole(column, rule) for column in [*columns, "average"]]
    heading = (title or _title(runs)) + rule_text(rule)
    text = ". ".join([heading, *partial_notes(rows, rule), *_own_models(rows)])
    return bars([*domain_heads(rows, domains), "average"], series, text, starred_bounds(rows))


def curves_of(runs: Sequence[RunRecord], title: str | None = None, labels: Sequence[str] = ()) -> Figure:
    """Draw average accuracy by round; seeds of one label are averaged."""
    rows = named_groups(runs, labels)
    curves = {starred_label(row): curve(row.runs) for row in rows}
    return convergence(curves, ". ".join([title or _title(runs), *_own_models(rows)]), starred_bounds(rows))


def _title(runs: Sequence[RunRecord]) -> str:
    """Return the data set and the protocol of the runs; of several, each of them."""
    titles = dict.fromkeys(", ".join(run.names[:2]) for run in runs)
    return some_of(list(titles), 3)


def _own_models(rows: Sequence[ScoreRow[RunRecord]]) -> list[str]:
    """Return the note on rows with a star, if there are any."""
    if any(row.personal for row in rows):
        return ["* scored with each client's own model"]
    return []


def _prototypes(runs: Sequence[RunRecord], by: str, samples: int, title: str | None) -> Figure:
    from goldfinch.results.figures.prototypes import prototype_figure
    from goldfinch.run_model import RunModel

    if len(runs) != 1:
        folders = [str(run.folder) for run in runs[:5]]
        raise ConfigError(f"prototypes shows one run; {len(runs)} were found: {', '.join(folders)}")
    return prototype_figure(RunModel(runs[0]), by, samples, title)
