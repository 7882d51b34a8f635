"""What a sweep of hyper-parameters shows: heat maps over two of them, a line over one, bars of a few runs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from common.errors import ConfigError, nearest
from server.plots.curves import Point, bars
from server.plots.style import COLOURS, HEAT, new_figure, plain
from server.results.run import Run, brief, varying


def score(run: Run, rule: str, column: str) -> float:
    """A domain's accuracy, ``average``, ``worst`` or ``spread`` of a run, in per cent.

    Raises:
        ConfigError: the run has no such column.
    """
    found = run.summary["scores"].get(rule)
    if found is None:
        raise ConfigError(f"{run.folder} has no score by the rule {rule}: leave it out")
    if column in ("average", "worst", "spread"):
        return float(found[column])
    if column not in found["accuracy"]:
        raise ConfigError(f"{column}: no such column; {nearest(column, [*found['accuracy'], 'average', 'worst'])}")
    return float(found["accuracy"][column])


def sensitivity(
    runs: Sequence[Run],
    *,
    axes: Sequence[str] = (),
    rule: str = "final",
    column: str = "average",
    names: Mapping[str, str] | None = None,
) -> Figure:
    """A heat map over two hyper-parameters, or a line over one.

    Args:
        runs: the runs of a sweep; runs that differ in the seed alone are averaged.
        axes: keys of the horizontal and of the vertical axis; empty takes the keys that vary.
        rule: how a run is scored.
        column: what is shown.
        names: what to call an axis instead of its key.

    Raises:
        ConfigError: the runs vary in none or more than two settings, or an axis is not among these.
    """
    keys = list(axes) or varying(runs)
    known = varying(runs)
    for key in keys:
        if key not in known:
            raise ConfigError(f"{key} does not vary between these runs; {nearest(key, known)}")
    if not 1 <= len(keys) <= 2:
        said = f"in {', '.join(keys)}" if keys else "in nothing but the seed"
        raise ConfigError(f"the runs vary {said}; name one or two settings with --axes KEY[,KEY]")
    extra = [key for key in known if key not in keys]
    if extra and axes:
        raise ConfigError(
            f"the runs also differ in {', '.join(extra)}; choose runs that differ in {', '.join(keys)} only"
        )
    cells: dict[tuple[Any, ...], list[float]] = {}
    for run in runs:
        place = tuple(run.options.get(key) for key in keys)
        cells.setdefault(place, []).append(score(run, rule, column))
    means = {place: statistics.fmean(values) for place, values in cells.items()}
    values = [sorted({place[index] for place in means}, key=_order) for index in range(len(keys))]
    title = f"{runs[0].summary['method']} on {runs[0].summary['data']}: {column}, %"
    shown = [(names or {}).get(key, key) for key in keys]
    return _heat(shown, values, means, title) if len(keys) == 2 else _line(shown[0], values[0], means, title)


def _order(value: Any) -> tuple[int, float, str]:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return (0, float(value), "") if number else (1, 0.0, str(value))


def _heat(
    keys: Sequence[str], values: Sequence[Sequence[Any]], means: Mapping[tuple[Any, ...], float], title: str
) -> Figure:
    across, down = values
    grid = np.full((len(down), len(across)), np.nan)
    for (x, y), mean in means.items():
        grid[down.index(y), across.index(x)] = mean
    figure = new_figure(0.85 * len(across) + 2.6, 0.62 * len(down) + 1.8)
    axes = figure.add_subplot()
    shown = axes.imshow(grid, cmap=HEAT, origin="lower", aspect="auto")
    low, high = np.nanmin(grid), np.nanmax(grid)
    for row, line in enumerate(grid):
        for place, mean in enumerate(line):
            if not np.isnan(mean):
                light = high > low and (mean - low) / (high - low) > 0.55
                weight = "bold" if mean == high else "normal"
                colour = "black" if light else "white"
                axes.text(place, row, f"{mean:.1f}", ha="center", va="center", color=colour, fontsize=8, weight=weight)
    axes.set_xticks(range(len(across)), [brief(value) for value in across])
    axes.set_yticks(range(len(down)), [brief(value) for value in down])
    axes.set_xlabel(keys[0])
    axes.set_ylabel(keys[1])
    axes.set_title(title, loc="left", fontsize=10)
    figure.colorbar(shown, ax=axes)
    return figure


def _line(key: str, values: Sequence[Any], means: Mapping[tuple[Any, ...], float], title: str) -> Figure:
    figure = new_figure(5.2, 3.4)
    axes = plain(figure.add_subplot())
    heights = [means[(value,)] for value in values]
    axes.plot(range(len(values)), heights, color=COLOURS[0], marker="o")
    for place, height in enumerate(heights):
        axes.annotate(
            f"{height:.1f}", (place, height), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=8
        )
    axes.margins(y=0.18)
    axes.set_xticks(range(len(values)), [brief(value) for value in values])
    axes.set_xlabel(key)
    axes.set_ylabel("%")
    axes.set_title(title, loc="left", fontsize=10)
    return figure


def grouped(runs: Sequence[Run], names: Sequence[str]) -> dict[str, list[Run]]:
    """Runs by label; the seeds of one label together."""
    found: dict[str, list[Run]] = {}
    for run, name in zip(runs, names, strict=True):
        found.setdefault(name, []).append(run)
    return found


def loss_bars(runs: Sequence[Run], names: Sequence[str], rule: str = "final") -> Figure:
    """Accuracy per domain and on average, one bar for each label, with the deviation over seeds."""
    groups = [
        *dict.fromkeys(name for run in runs for name in run.summary["scores"][rule]["accuracy"]),
        "average",
    ]
    series: dict[str, list[Point | None]] = {}
    for label, members in grouped(runs, names).items():
        points: list[Point | None] = []
        for group in groups:
            having = [run for run in members if group == "average" or group in _accuracy(run, rule)]
            values = [score(run, rule, group) for run in having]
            spread = statistics.stdev(values) if len(values) > 1 else None
            points.append((statistics.fmean(values), spread) if values else None)
        series[label] = points
    return bars(groups, series, f"{runs[0].summary['data']}, {runs[0].summary['protocol']}")


def _accuracy(run: Run, rule: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = run.summary["scores"][rule]["accuracy"]
    return found
