"""Accuracy over rounds, and bars of accuracy per domain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from server.plots.style import COLOURS, line_style, new_figure, plain

Point = tuple[float, float | None]
"""Mean and standard deviation over seeds; ``None`` for one seed."""


def convergence(curves: Mapping[str, Mapping[int, Point]], title: str) -> Figure:
    """Average test accuracy by round, one line per method, the band one standard deviation over seeds.

    Args:
        curves: for each label, mean and deviation in per cent by round.
        title: above the axes.
    """
    figure = new_figure(7.2, 4.2)
    axes = plain(figure.add_subplot())
    for index, (label, points) in enumerate(curves.items()):
        rounds = sorted(points)
        means = np.array([points[number][0] for number in rounds])
        spreads = np.array([points[number][1] or 0.0 for number in rounds])
        style = line_style(index)
        every = max(1, len(rounds) // 8)
        axes.plot(rounds, means, label=label, markersize=4, linewidth=1.5, markevery=every, **style)
        if spreads.any():
            axes.fill_between(rounds, means - spreads, means + spreads, color=style["color"], alpha=0.12, linewidth=0)
    axes.set_xlabel("round")
    axes.set_ylabel("average test accuracy, %")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(title, loc="left", fontsize=10)
    if curves:
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def bars(groups: Sequence[str], series: Mapping[str, Sequence[Point | None]], title: str) -> Figure:
    """Grouped bars with one standard deviation over seeds: groups are domains and the average, bars are runs.

    Args:
        groups: names along the axis.
        series: for each label, mean and deviation in per cent in each group; ``None`` leaves a gap.
        title: above the axes.
    """
    figure = new_figure(max(6.0, 0.28 * len(groups) * len(series) + 3.0), 3.8)
    axes = plain(figure.add_subplot())
    width = 0.8 / max(1, len(series))
    hatches = ("", "//", "..", "xx", "\\\\", "++")
    lowest = 100.0
    for index, (label, points) in enumerate(series.items()):
        known = [(place, point) for place, point in enumerate(points) if point is not None]
        places = np.array([place for place, _ in known]) + (index - (len(series) - 1) / 2) * width
        means = [point[0] for _, point in known]
        lowest = min([lowest, *means])
        axes.bar(
            places,
            means,
            width * 0.94,
            yerr=[point[1] or 0.0 for _, point in known] if any(point[1] for _, point in known) else None,
            label=label,
            color=COLOURS[index % len(COLOURS)],
            hatch=hatches[(index // len(COLOURS)) % len(hatches)],
            edgecolor="white",
            error_kw={"elinewidth": 1, "capsize": 2, "ecolor": "#333333"},
        )
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel("test accuracy, %")
    axes.grid(axis="x", visible=False)
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_ylim(0, 100)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
