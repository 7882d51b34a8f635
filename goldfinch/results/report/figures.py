"""The figures of the page, from tables of runs: each is one function here and one line of ``page.html``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from common.errors import ConfigError
from goldfinch.record import RunRecord
from goldfinch.results.curves import (
    AVERAGE,
    WORST,
    Curves,
    accuracy_curves,
    cost_curves,
    loss_curves,
    over_seeds,
    train_losses,
)
from goldfinch.results.figures import charts
from goldfinch.results.figures.prototypes import prototype_figure
from goldfinch.results.frames import measure, starred_bounds, starred_label
from goldfinch.results.groups import ScoreTable, run_name
from goldfinch.results.report.results import metric_tables, total_bytes
from goldfinch.results.seeds import Value
from goldfinch.run_model import RunModel

MAX_DETAILED = 8
"""Largest number of runs that all have confusion matrices; of more, only the first seed of each row."""

MAX_PICTURES = 6
"""Rows whose prototypes are shown."""

MISTAKES = 3
"""Mistakes that are named below a confusion matrix."""

Series = dict[str, dict[int, Value]]
"""Values by round, by the name of a line."""


class Drawing(NamedTuple):
    """One drawing of a figure of the page.

    Args:
        name: its heading; empty if the figure has one drawing.
        drawing: what is drawn.
        description: the same in words.
        note: a remark below it.
    """

    name: str
    drawing: Figure
    description: str
    note: str = ""


class Shown(NamedTuple):
    """A figure of the page.

    Args:
        caption: what it shows.
        lines: the names of its lines, in their order; empty if there is one, or none.
        panels: its drawings.
        bounds: the lines that are bounds.
    """

    caption: str
    lines: Sequence[str]
    panels: Sequence[Drawing]
    bounds: Mapping[str, str] = charts.NONE


# ---- lines over rounds -----------------------------------------------------------------------------------------------


def over_rounds(table: ScoreTable) -> list[Shown]:
    """Draw accuracy and test loss by round.

    Of several rows, the average is a wide figure, the worst and each domain are panels. Of one row, average and domains
    are the lines of one figure.
    """
    accuracy = _curves(table, accuracy_curves)
    loss = _curves(table, loss_curves)
    figures: list[Shown] = []
    for title, curves in (("Test accuracy in %", accuracy), ("Test loss", loss)):
        if not curves:
            continue
        if len(table.rows) == 1:
            lines = {name: series[starred_label(table.rows[0])] for name, series in curves.items() if name != WORST}
            figures.append(_wide(title, lines))
            continue
        figures.append(_wide(f"{title}, {AVERAGE}", curves.pop(AVERAGE), starred_bounds(table.rows)))
        figures.append(_panels(f"{title}, by domain", table, curves, shared=True))
    return figures


def other_metrics(table: ScoreTable) -> list[Shown]:
    """Draw the average and the worst domain by round, in each further metric that all runs have."""
    figures: list[Shown] = []
    for _, other in metric_tables(table):
        title = measure(other)
        curves = _curves(other, accuracy_curves)
        chosen = {each: curves[each] for each in (AVERAGE, WORST)}
        figures.append(_panels(f"{title[0].upper()}{title[1:]}", table, chosen))
    return figures


def losses(table: ScoreTable) -> list[Shown]:
    """Draw each term of the training loss by round."""
    curves = _curves(table, train_losses)
    if not curves:
        return []
    return [_panels("Training loss", table, curves)]


def costs(table: ScoreTable) -> list[Shown]:
    """Draw bytes and seconds by round."""
    shown = _panels("Cost", table, _curves(table, cost_curves))
    for panel in shown.panels:
        panel.drawing.axes[0].set_ylim(bottom=0)
    return [shown]


def _labels(table: ScoreTable) -> list[str]:
    return [starred_label(row) for row in table.rows]


def _curves(table: ScoreTable, curves: Callable[[RunRecord], Curves]) -> dict[str, Series]:
    """Return the values of each curve by the label of each row; a row without the curve has no values."""
    by_row = {starred_label(row): over_seeds(row.runs, curves) for row in table.rows}
    names: dict[str, None] = {}
    for of_row in by_row.values():
        names |= dict.fromkeys(of_row)
    series: dict[str, Series] = {}
    for name in names:
        series[name] = {label: of_row.get(name, {}) for label, of_row in by_row.items()}
    return series


def _wide(title: str, series: Series, bounds: Mapping[str, str] = charts.NONE) -> Shown:
    panel = Drawing("", _lines(5.6, 3.0, series, bounds), _described(title, series))
    return Shown(_caption(title, [series]), _several(list(series)), [panel], bounds)


def _panels(title: str, table: ScoreTable, curves: Mapping[str, Series], *, shared: bool = False) -> Shown:
    """Return a figure with a panel for each curve.

    Args:
        title: what the panels show.
        table: the table whose rows are the lines.
        curves: the lines of each panel.
        shared: whether the vertical axes have one range.
    """
    panels: list[Drawing] = []
    for name, series in curves.items():
        panels.append(
            Drawing(name, _lines(3.0, 1.9, series, starred_bounds(table.rows)), _described(f"{title}, {name}", series))
        )
    if shared:
        ranges = [panel.drawing.axes[0].get_ylim() for panel in panels]
        for panel in panels:
            panel.drawing.axes[0].set_ylim(min(low for low, _ in ranges), max(high for _, high in ranges))
    return Shown(_caption(title, list(curves.values())), _several(_labels(table)), panels, starred_bounds(table.rows))


def _several(names: Sequence[str]) -> Sequence[str]:
    """Return the names of a legend: none if there is one line alone."""
    if len(names) == 1:
        return ()
    return names


def _lines(width: float, height: float, series: Series, bounds: Mapping[str, str]) -> Figure:
    figure, axes = charts.small_axes(width, height)
    charts.draw_curves(axes, series, bounds)
    return figure


def _caption(title: str, drawn: Sequence[Series]) -> str:
    for series in drawn:
        for points in series.values():
            if any(value.deviation for value in points.values()):
                return f"{title}; mean, and one standard deviation over seeds as a band."
    return f"{title}."


def _described(title: str, series: Series) -> str:
    ends: list[str] = []
    for name, points in series.items():
        if points:
            last = max(points)
            ends.append(f"{name} {points[last].mean:.4g} in round {last}")
    return f"{title}, by round. At the end: {'; '.join(ends) or 'nothing'}."


# ---- final scores ----------------------------------------------------------------------------------------------------


def accuracy_bars(table: ScoreTable) -> Shown:
    """Draw the final accuracy by domain, average and worst, with the deviation over seeds; a partial value has no bar.

    Colours, and hatches beyond seven rows, are those of the lines. A bound is a line.
    """
    columns = [*[f"domain:{name}" for name in table.domains], "average", "worst"]
    names = [*table.domains, "average", "worst"]
    series: dict[str, list[Value | None]] = {}
    words: list[str] = []
    for row in table.rows:
        values = [row.whole(column) for column in columns]
        series[starred_label(row)] = values
        shown = [f"{name} {value.mean:.1f}" for name, value in zip(names, values, strict=True) if value is not None]
        words.append(f"{starred_label(row)}: {', '.join(shown)}.")
    figure, axes = charts.small_axes(5.6, 2.5)
    charts.draw_bars(axes, names, series, starred_bounds(table.rows))
    axes.tick_params(axis="x", labelsize=charts.SMALL)
    charts.fit_names(figure)
    drawing = Drawing("", figure, " ".join(words))
    return Shown(f"Accuracy in %{_error_bars(table)}.", _several(_labels(table)), [drawing], starred_bounds(table.rows))


def accuracy_against_bytes(table: ScoreTable) -> Shown:
    """Draw the final average accuracy against the megabytes of a run, both ways; both are means over seeds."""
    series: dict[str, tuple[float, Value] | None] = {}
    words: list[str] = []
    for row in table.rows:
        value = row.whole("average")
        series[starred_label(row)] = None
        if value is not None:
            traffic = statistics.fmean(map(total_bytes, row.runs)) / 1e6
            series[starred_label(row)] = (traffic, value)
            words.append(f"{starred_label(row)}: {value.mean:.1f} % at {traffic:.4g} MB.")
    drawing = charts.points(series, "MB of a run, both ways", "", starred_bounds(table.rows))
    caption = f"Average accuracy in % against traffic{_error_bars(table)}."
    return Shown(caption, (), [Drawing("", drawing, " ".join(words))])


def _error_bars(table: ScoreTable) -> str:
    """Return what the error bars of a figure are; empty if no row has several seeds."""
    if all(len(row.runs) < 2 for row in table.rows):
        return ""
    return "; mean, and one standard deviation over seeds as an error bar"


# ---- matrices --------------------------------------------------------------------------------------------------------


def confusion(tables: Sequence[ScoreTable]) -> list[Shown]:
    """Draw the confusion matrix of each domain after the last scored round, run by run."""
    figures: list[Shown] = []
    for name, run in _detailed(tables):
        number, counts = confusion_counts(run)
        panels: list[Drawing] = []
        for domain, matrix in counts.items():
            panels.append(_matrix(domain, matrix, run.class_names))
        if panels:
            figures.append(Shown(f"{name}, round {number}", (), panels))
    return figures


def confusion_counts(run: RunRecord) -> tuple[int, dict[str, np.ndarray]]:
    """Return the last round with confusion counts, and the counts of each domain, ``[K, K]``, true classes in rows.

    The counts of several clients that scored the same domain, each with its own model, are added up.
    """
    size = len(run.class_names)
    lines: list[Mapping[str, Any]] = []
    for line in run.test_lines:
        if "confusion" in line and line["confusion"]["classes"] == size:
            lines.append(line)
    last = max([int(line["round"]) for line in lines], default=0)
    matrices: dict[str, np.ndarray] = {}
    for line in lines:
        if int(line["round"]) == last:
            matrix = matrices.setdefault(str(line["domain"]), np.zeros((size, size), dtype=np.int64))
            cells = line["confusion"]
            np.add.at(matrix, (cells["true"], cells["predicted"]), cells["count"])
    return last, {name: matrices[name] for name in run.domains if name in matrices}


def _matrix(domain: str, counts: np.ndarray, names: Sequence[str]) -> Drawing:
    sums = counts.sum(1, keepdims=True)
    shares = counts / np.maximum(sums, 1)
    right = 100 * np.trace(counts) / max(1, counts.sum())
    wrong: list[tuple[int, str]] = []
    for true, predicted in np.argwhere(counts):
        if true != predicted:
            wrong.append((int(counts[true, predicted]), f"{names[true]} called {names[predicted]}"))
    wrong.sort(reverse=True)
    note = "Nothing wrong."
    if wrong:
        worst = [f"{text}, {count} times" for count, text in wrong[:MISTAKES]]
        note = f"Most often wrong: {'; '.join(worst)}."
    drawing = charts.matrix(shares, 100 * shares, names, names, ("true", "predicted"))
    heading = f"{domain}: {right:.1f} % of {counts.sum()}"
    return Drawing(heading, drawing, f"Confusion matrix of {heading} right. {note}", note)


def class_samples(run: RunRecord) -> Shown | None:
    """Draw the training samples of each client by class; ``None`` if no client registered them."""
    counts: dict[str, Sequence[int]] = {}
    for client, entry in run.registrations.items():
        if entry.get("class_counts"):
            counts[client] = entry["class_counts"]
    if not counts:
        return None
    table = np.array(list(counts.values()), dtype=float)
    names = run.class_names[: table.shape[1]]
    drawing = charts.matrix(table / table.max(initial=1.0), table, list(counts), names, ("client", "class"))
    words: list[str] = []
    for client, row in counts.items():
        words.append(f"{client} has {sum(row)} of {np.count_nonzero(row)} classes")
    return Shown("Training samples of each client by class.", (), [Drawing("", drawing, f"{'; '.join(words)}.")])


def _detailed(tables: Sequence[ScoreTable]) -> list[tuple[str, RunRecord]]:
    """Return the runs that have confusion matrices in the page, with their names."""
    every = sum(len(table.runs) for table in tables) <= MAX_DETAILED
    named_runs: list[tuple[str, RunRecord]] = []
    for table in tables:
        for row in table.rows:
            for run in row.runs:
                if every or run is row.runs[0]:
                    named_runs.append((run_name(row, run), run))
    return named_runs


# ---- prototypes ------------------------------------------------------------------------------------------------------


def prototypes(tables: Sequence[ScoreTable]) -> list[Shown]:
    """Draw what clients of the first run of each row sent, and what the server made of it."""
    figures: list[Shown] = []
    for table in tables:
        for row in table.rows:
            model = RunModel(row.runs[0])
            if len(figures) == MAX_PICTURES:
                continue
            if not any(len(page.uploaded) + len(page.prototypes) for page in model.pages):
                continue
            name = run_name(row, row.runs[0])
            try:
                drawing = prototype_figure(model, "pca", per_domain=0, title="")
            except ConfigError:  # vectors are too few, or all equal
                continue
            figures.append(Shown(name, (), [Drawing("", drawing, f"Prototypes of {name} in the plane, by round.")]))
    return figures
