"""Figures of a board over data sets: critical differences and performance profiles."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from server.plots.figures import legend, line_style, new_figure, plain
from server.results.board.table import DISTANCES, Overall


def critical_difference_figure(overall: Overall) -> Figure:
    """Return Demsar's figure: methods on an axis of average ranks, and a bar over those that are not told apart.

    Args:
        overall: ranks over two data sets or more.
    """
    if overall.difference is None:
        raise ValueError("a critical difference needs two data sets or more")
    count = len(overall.ranks)
    rows = (count + 1) // 2
    bars = len(overall.groups)
    figure = new_figure(7.2, 1.3 + 0.24 * rows + 0.14 * bars, "")
    axes = figure.add_subplot()
    margin = 0.2 * (count - 1) + 0.1
    axes.set_xlim(1 - margin, max(count + margin, 1.1 + overall.difference))
    axes.set_ylim(-(bars * 0.35 + rows * 0.6 + 0.4), 1.6)
    axes.set_axis_off()
    axes.plot([1, count], [0, 0], color="black", linewidth=1)
    for tick in range(1, count + 1):
        axes.plot([tick, tick], [0, 0.18], color="black", linewidth=1)
        axes.text(tick, 0.28, str(tick), ha="center", va="bottom", fontsize=8)
    axes.plot([1, 1 + overall.difference], [1.15, 1.15], color="black", linewidth=2)
    axes.text(1, 1.3, f"critical difference {overall.difference:.2f}", ha="left", va="bottom", fontsize=8)
    for index, group in enumerate(overall.groups):
        height = -0.35 * index - 0.3
        ends = [overall.ranks[name] for name in group]
        axes.plot([min(ends) - 0.06, max(ends) + 0.06], [height, height], color="#0072B2", linewidth=3)
    for index, (name, rank) in enumerate(overall.ranks.items()):
        left = index < rows
        place = index
        end, align = 1 - margin, "left"
        if not left:
            place = count - 1 - index
            end, align = count + margin, "right"
        low = -(bars * 0.35 + 0.6 * (place + 1))
        axes.plot([rank, rank, end], [0, low, low], color="#777777", linewidth=0.8)
        axes.text(end, low + 0.06, f"{name} ({rank:.2f})", ha=align, va="bottom", fontsize=8)
    return figure


def profile_figure(overall: Overall) -> Figure:
    """Return the performance profile: for each method, the share of data sets within x points of the best method."""
    figure = new_figure(7.2, 3.8, "")
    axes = plain(figure.add_subplot())
    for index, name in enumerate(overall.ranks):
        shares = [100 * share for share in overall.profile[name]]
        axes.step(DISTANCES, shares, where="post", label=name, markersize=4, linewidth=1.5, **line_style(index))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("points from the best method")
    axes.set_ylabel("data sets, %")
    axes.set_ylim(-3, 103)
    legend(axes)
    return figure
