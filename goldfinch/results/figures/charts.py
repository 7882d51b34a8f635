"""Every figure but the prototypes, as matplotlib draws it: for ``goldfinch figure``, reports, the pages of a table.

Legible in print; series are told apart by colour, dash and marker at once, in colours that colour-blind readers can
tell apart.
"""

import io
import itertools
import re
import statistics
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from common.errors import ConfigError, nearest, some_of
from common.metrics import RULES, named_missing
from common.storage import write_bytes
from goldfinch.record import RunRecord, brief, setting_text, varying
from goldfinch.results.figures.fonts import complete_fonts
from goldfinch.results.groups import group_runs
from goldfinch.results.rows import ScoreRow
from goldfinch.results.seeds import Value

# Okabe and Ito's palette without its yellow, which is too light on white; black last.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")

# Ten for classes, found by search: of any two, the distance in Oklab is 0.17 or more for most readers, and 0.11 or more
# for protanopes, deuteranopes and tritanopes (Machado et al., 2009).
CLASS_COLOURS = (
    "#0000fc", "#d80000", "#b0a400", "#6c00a8", "#00b4e4", "#780000", "#f0789c", "#183c54", "#8478fc", "#846078",
)  # fmt: skip
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
HATCHES = ("", "//", "..", "xx", "\\\\", "++")
GRID, DARK = "#dddddd", "#333333"
"""Colours of the grid and of error bars."""

BOUND = "#666666"
"""Colour of the bounds of a table."""

NONE: Mapping[str, str] = {}
"""No bounds."""

SMALL = 8
"""Points of the text in figures of a page."""

MAX_LEGEND = 0.4
"""The share of a figure's width up to which its legend is beside the axes."""

MAX_MARKED = 3
"""Rows that the title of a heat map names, of those that differ from most."""

HEAT = "cividis"
"""A colour map of even lightness that looks the same to colour-blind readers."""

mpl.rcParams["text.parse_math"] = False  # a dollar in a name is a dollar

FORMATS = ("png", "pdf", "svg")

NOT_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
"""Characters that XML forbids or a reader obeys."""


REMEDY = "install one, for Chinese, Japanese and Korean such as fonts-wqy-microhei (apt), and draw it again"

NO_GLYPH = "Glyph .* missing from"
"""How matplotlib's warnings begin that a font lacks a character."""


def bound_style(bound: str) -> dict[str, Any]:
    """Return the style of the ``lower`` or the ``upper`` bound of a table: grey, without markers."""
    dash = {"lower": ":", "upper": "--"}[bound]
    return {"color": BOUND, "linestyle": dash, "linewidth": 1.5}


def line_style(index: int) -> dict[str, Any]:
    """Return colour, dash and marker of the ``index``-th series; pairs of colour and dash repeat after 28."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[(index // len(COLOURS)) % len(DASHES)],
        "marker": MARKERS[index % len(MARKERS)],
    }


def new_figure(width: float, height: float, title: str = "") -> Figure:
    """Return an empty figure of ``width`` x ``height`` inches; a long ``title`` takes several lines."""
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        lines = fill(title, max(16, int(width * 72 / 5.6)))  # a letter of ten points is 5.6 wide, or less
        figure.set_figheight(height + 0.17 * lines.count("\n"))
        figure.suptitle(lines, fontsize=10, x=0.01, ha="left")
    return figure


def plain_axes(axes: Axes) -> Axes:
    """Remove the frame on top and right, draw a light grid behind the series, and return the axes."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    return axes


def small_axes(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure without a title for a page, whose text surrounds it, and its axes with small text."""
    figure = new_figure(width, height)
    axes = plain_axes(figure.add_subplot())
    axes.tick_params(labelsize=SMALL)
    axes.xaxis.label.set_fontsize(SMALL)
    axes.yaxis.label.set_fontsize(SMALL)
    return figure, axes


def legend(axes: Axes) -> None:
    """Write the names of the series to the right of the axes; long names take several lines."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        wrapped = [fill(label, 34) for label in labels]
        axes.legend(handles, wrapped, frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def fit_names(figure: Figure) -> None:
    """Place names so that none covers another at the figure's size: a wide legend below, names of groups turned."""
    _lay_out(figure)
    for axes in figure.axes:
        wide = axes.get_legend()
        if wide is not None and wide.get_window_extent().width > MAX_LEGEND * figure.bbox.width:
            handles, labels = axes.get_legend_handles_labels()
            wide.remove()
            figure.legend(handles, labels, frameon=False, fontsize=8, loc="outside lower left")
    _lay_out(figure)
    for axes in figure.axes:
        places = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()]
        if any(left.x1 > right.x0 for left, right in itertools.pairwise(places)):
            axes.tick_params(axis="x", labelrotation=90)


def _lay_out(figure: Figure) -> None:
    """Compute where everything is in a figure, without drawing it."""
    clean_texts(figure)
    complete_fonts(figure)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", NO_GLYPH)  # what draws the figure tells of it
        figure.draw_without_rendering()


def rule_text(rule: str) -> str:
    """Return what a title says of the rule of its scores: nothing of the last round."""
    if rule == "final":
        return ""
    return f", {RULES[rule].name}"


def check_format(path: Path) -> None:
    """Refuse a file if its suffix is not one of the formats.

    Raises:
        ConfigError: it says which do.
    """
    if path.suffix.lower().removeprefix(".") not in FORMATS:
        known = ", ".join(f".{name}" for name in FORMATS)
        raise ConfigError(
            f"--output {path}: a figure is written as {known}; {path.suffix or 'no suffix'} is none of these"
        )


def clean_texts(figure: Figure) -> None:
    """Replace characters that no file of text may have in the texts of a figure; a name may come from elsewhere."""
    for text in figure.findobj(Text):
        text.set_text(NOT_TEXT.sub("\N{REPLACEMENT CHARACTER}", text.get_text()))


def rendered(figure: Figure, form: str = "png") -> bytes:
    """Return the figure as PNG, PDF or SVG; the same figure gives the same bytes.

    Characters that no font of this machine has are boxes. A line on standard error names them.
    """
    clean_texts(figure)
    fonts = complete_fonts(figure)
    if fonts.boxes:
        print(f"no font here has {fonts.boxes}, and the figure has boxes instead: {REMEDY}", file=sys.stderr)
    stream = io.BytesIO()
    metadata = {"png": {"Software": None}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}[form]
    embedded = 42 if fonts.truetype else 3
    with (
        mpl.rc_context({"svg.hashsalt": "goldfinch", "svg.fonttype": "path", "pdf.fonttype": embedded}),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", NO_GLYPH)  # one warning a character, at every drawing of it
        figure.savefig(stream, format=form, metadata=metadata)
    return stream.getvalue()


def save(figure: Figure, path: Path) -> Path:
    """Write the figure in the format that the path's suffix names, complete or not at all.

    Raises:
        ConfigError: the suffix names no format.
    """
    check_format(path)
    write_bytes(path, rendered(figure, path.suffix.lower().removeprefix(".")))
    return path


# ---- accuracy over rounds, and by domain -----------------------------------------------------------------------------


def draw_curves(axes: Axes, curves: Mapping[str, Mapping[int, Value]], bounds: Mapping[str, str] = NONE) -> None:
    """Draw a line for each label, means in per cent by round, with a band of one standard deviation over seeds.

    Args:
        axes: where to draw.
        curves: the values by round of each label, those of bounds last.
        bounds: the labels that are bounds, see :func:`bound_style`; they have no band.
    """
    for index, (label, points) in enumerate(curves.items()):
        rounds = sorted(points)
        if label in bounds:
            axes.plot(rounds, [points[number].mean for number in rounds], label=label, **bound_style(bounds[label]))
            continue
        means = np.zeros(len(rounds))
        spreads = np.zeros(len(rounds))
        for place, number in enumerate(rounds):
            means[place] = points[number].mean
            spreads[place] = points[number].deviation or 0.0
        style = line_style(index)
        every = max(1, len(rounds) // 8)
        axes.plot(rounds, means, label=label, markersize=4, linewidth=1.5, markevery=every, **style)
        if spreads.any():
            axes.fill_between(rounds, means - spreads, means + spreads, color=style["color"], alpha=0.12, linewidth=0)
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def convergence(curves: Mapping[str, Mapping[int, Value]], title: str, bounds: Mapping[str, str] = NONE) -> Figure:
    """Return a figure of average test accuracy by round, one line per label; see :func:`draw_curves`."""
    figure = new_figure(7.2, 4.2, title)
    axes = plain_axes(figure.add_subplot())
    draw_curves(axes, curves, bounds)
    axes.set_ylabel("average test accuracy, %")
    legend(axes)
    fit_names(figure)
    return figure


def key(index: int, bound: str | None = None) -> Figure:
    """Return a small figure of the line of the ``index``-th series, or of a bound, for the legend of a page."""
    figure = Figure(figsize=(0.36, 0.14))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, 2)
    if bound:
        axes.plot([0, 1, 2], [0, 0, 0], **bound_style(bound))
    else:
        axes.plot([0, 1, 2], [0, 0, 0], markersize=5, linewidth=1.5, markevery=(1, 5), **line_style(index))
    return figure


def points(
    series: Mapping[str, tuple[float, Value] | None], across: str, up: str, bounds: Mapping[str, str] = NONE
) -> Figure:
    """Return a point for each label, with one standard deviation over seeds upwards, and a line for each bound.

    Args:
        series: the place on the horizontal axis and the value of each label; ``None`` has no point.
        across: the title of the horizontal axis, which begins at 0.
        up: the title of the vertical axis.
        bounds: the labels that are bounds.
    """
    figure, axes = small_axes(5.6, 2.5)
    farthest = 0.0
    for index, (label, place) in enumerate(series.items()):
        if place is None:
            continue
        style = line_style(index)
        x, value = place
        if label in bounds:
            axes.axhline(value.mean, **bound_style(bounds[label]))
            continue
        farthest = max(farthest, x)
        axes.errorbar(
            [x], [value.mean], yerr=value.deviation, marker=style["marker"], color=style["color"], ecolor=DARK,
            elinewidth=1, capsize=2,
        )  # fmt: skip
    axes.set_xlim(0, 1.1 * farthest or 1.0)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    return figure


def bars(
    groups: Sequence[str],
    series: Mapping[str, Sequence[Value | None]],
    title: str,
    bounds: Mapping[str, str] = NONE,
) -> Figure:
    """Return grouped bars with one standard deviation over seeds: groups are domains and the average, bars are runs.

    ``series`` has for each label mean and deviation in per cent in each group; ``None`` leaves a gap. A label of
    ``bounds`` is a line across each group.
    """
    figure = new_figure(max(6.0, 0.28 * len(groups) * len(series) + 3.0), 3.8, title)
    axes = plain_axes(figure.add_subplot())
    draw_bars(axes, groups, series, bounds)
    axes.set_ylabel("test accuracy, %")
    axes.set_ylim(0, 100)
    legend(axes)
    fit_names(figure)
    return figure


def draw_bars(
    axes: Axes, groups: Sequence[str], series: Mapping[str, Sequence[Value | None]], bounds: Mapping[str, str] = NONE
) -> None:
    """Draw the bars and lines of :func:`bars`."""
    count = sum(label not in bounds for label in series)
    width = 0.8 / max(1, count)
    for index, (label, values) in enumerate(series.items()):
        if label in bounds:
            _draw_bound(axes, label, values, bounds[label])
            continue
        offset = (index - (count - 1) / 2) * width
        places = []
        means = []
        spreads = []
        for place, value in enumerate(values):
            if value is None:
                continue
            places.append(place)
            means.append(value.mean)
            spreads.append(value.deviation or 0.0)
        error_bars = None
        if any(spreads):
            error_bars = spreads
        axes.bar(
            np.array(places) + offset,
            means,
            width * 0.94,
            yerr=error_bars,
            label=label,
            color=COLOURS[index % len(COLOURS)],
            hatch=HATCHES[(index // len(COLOURS)) % len(HATCHES)],
            edgecolor="white",
            error_kw={"elinewidth": 1, "capsize": 2, "ecolor": DARK},
        )
    axes.set_xticks(range(len(groups)), [fill(name, 12) for name in groups])
    axes.grid(axis="x", visible=False)


def _draw_bound(axes: Axes, label: str, values: Sequence[Value | None], bound: str) -> None:
    """Draw a bound as a line across each group of bars."""
    style = bound_style(bound)
    places: list[int] = []
    means: list[float] = []
    for place, value in enumerate(values):
        if value is not None:
            places.append(place)
            means.append(value.mean)
    ends = np.array(places)
    axes.hlines(
        means, ends - 0.45, ends + 0.45, label=label, colors=style["color"], linestyles=style["linestyle"],
        linewidths=style["linewidth"],
    )  # fmt: skip


# ---- counts of classes -----------------------------------------------------------------------------------------------

MAX_NAMED = 24
"""Classes or clients beyond which an axis names none of them."""

MAX_NUMBERED = 12
"""Columns up to which the cells of a matrix have numbers."""


def matrix(
    shades: np.ndarray, numbers: np.ndarray, down: Sequence[str], across: Sequence[str], titles: tuple[str, str]
) -> Figure:
    """Return a matrix of cells, stronger where the shade is larger, with numbers where there are few columns.

    Args:
        shades: ``[R, C]`` in [0, 1].
        numbers: ``[R, C]``, what the cells say; 0 says nothing.
        down: the names of the rows.
        across: the names of the columns.
        titles: what the rows and the columns are.
    """
    rows, columns = shades.shape
    wide = min(6.0, max(2.4, 0.9 + 0.24 * columns))
    figure, axes = small_axes(wide, min(6.0, max(1.2, 0.7 + 0.2 * rows)))
    axes.grid(visible=False)
    cells = np.full((rows, columns, 4), to_rgba(COLOURS[0]))
    cells[..., 3] = 0.04 + 0.76 * shades  # the paper is seen through: numbers have contrast on a light and a dark page
    axes.imshow(cells, aspect="auto", interpolation="none")
    axes.set_xticks([])
    axes.set_yticks([])
    if rows <= MAX_NAMED:
        axes.set_yticks(range(rows), [_cut(name) for name in down], fontsize=SMALL - 1)
    if columns <= MAX_NAMED:
        names = [_cut(name) for name in across]
        turned = 0
        if max(map(len, names)) > 2:
            turned = 90
        axes.set_xticks(range(columns), names, rotation=turned, fontsize=SMALL - 1)
    axes.set_ylabel(titles[0])
    axes.set_xlabel(titles[1])
    if columns <= MAX_NUMBERED and rows <= MAX_NAMED:
        for row in range(rows):
            for column in range(columns):
                if numbers[row, column]:
                    text = f"{numbers[row, column]:.0f}"
                    axes.text(column, row, text, ha="center", va="center", fontsize=SMALL - 2)
    return figure


def _cut(name: str) -> str:
    """Return a name of at most 13 letters."""
    if len(name) > 13:
        return f"{name[:12]}\N{HORIZONTAL ELLIPSIS}"
    return name


# ---- sweeps ----------------------------------------------------------------------------------------------------------


def score(run: RunRecord, rule: str, column: str) -> float:
    """Return a domain's accuracy, ``average``, ``worst`` or ``spread`` of a run, in per cent.

    Raises:
        ConfigError: the run has no such column, or its score lacks a domain.
    """
    scores = run.rules.get(rule)
    if scores is None:
        raise ConfigError(f"{run.folder} has no score by the rule {rule}: leave it out")
    if scores["missing"] and (column in ("average", "worst", "spread") or column in scores["missing"]):
        raise ConfigError(f"{run.folder} has a partial score, without {named_missing(scores['missing'])}: leave it out")
    if column in ("average", "worst", "spread"):
        return float(scores[column])
    if column not in scores["accuracy"]:
        raise ConfigError(f"{column}: no such column; {nearest(column, [*scores['accuracy'], 'average', 'worst'])}")
    return float(scores["accuracy"][column])


def sensitivity(
    runs: Sequence[RunRecord],
    *,
    axes: Sequence[str] = (),
    rule: str = "final",
    column: str = "average",
    names: Mapping[str, str] | None = None,
    title: str | None = None,
) -> Figure:
    """Return a heat map over two settings, or a line over one; a place has the mean of one row of the runs' tables.

    ``axes`` are the keys of the horizontal and of the vertical axis, by default those that vary; ``names`` is what to
    call an axis instead of its key. ``title`` replaces the method, data and column. The title also
    names rows that differ from most in code, rounds or seeds.

    Raises:
        ConfigError: the runs vary in none or more than two settings, an axis is not among these, or two rows have the
            same place.
    """
    keys = _axes_of(runs, axes)
    rows = _rows_by_place(runs, keys)
    means = {place: statistics.fmean([score(run, rule, column) for run in row.runs]) for place, row in rows.items()}
    values = []
    for on_axis in zip(*means, strict=True):
        values.append(sorted(set(on_axis), key=_order))
    if title is None:
        title = f"{runs[0].facts.method} on {runs[0].facts.data}: {column}, %"
    title += rule_text(rule)
    marked: list[str] = []
    for place, row in rows.items():
        if row.marks:
            marked.append(f"{', '.join(map(setting_text, keys, place))}: {', '.join(row.marks)}")
    if marked:
        title += f". {some_of(marked, MAX_MARKED)}"
    shown = list(keys)
    if names:
        shown = [names.get(key, key) for key in keys]
    if len(keys) == 2:
        return _heat(shown, values, means, title)
    return _line(shown[0], values[0], means, title)


def _axes_of(runs: Sequence[RunRecord], axes: Sequence[str]) -> list[str]:
    """Return the keys of the axes: those that are named, else all that vary.

    Raises:
        ConfigError: see :func:`sensitivity`; the message says which runs a heat map can show.
    """
    known = varying(runs)
    if not known:
        raise ConfigError(
            "the runs vary in nothing but the seed; give the folders of runs with several values of one or two "
            "settings, such as those of a sweep"
        )
    keys = list(axes) or known
    for key in keys:
        if key not in known:
            settings = [each for each in known if not each.endswith("_target_")]
            raise ConfigError(f"{key} does not vary between these runs; {nearest(key, settings)}")
    if len(keys) > 2:
        raise ConfigError(
            f"the runs vary in {', '.join(known)}; a heat map has two axes at most: give the folders of runs that "
            "differ in one or two of these"
        )
    extra = [key for key in known if key not in keys]
    if extra:
        raise ConfigError(
            f"the runs also differ in {', '.join(extra)}; give the folders of runs that differ in {', '.join(keys)} "
            "alone"
        )
    return keys


def _rows_by_place(runs: Sequence[RunRecord], keys: Sequence[str]) -> dict[tuple[Any, ...], ScoreRow[RunRecord]]:
    """Return the row of each place: the values of the settings ``keys``.

    Raises:
        ConfigError: two rows have the same place, such as runs of other code or other data.
    """
    rows: dict[tuple[Any, ...], ScoreRow[RunRecord]] = {}
    for table in group_runs(runs):
        for row in table.rows:
            place = tuple(row.runs[0].options.get(key) for key in keys)
            other = rows.setdefault(place, row)
            if other is not row:
                raise ConfigError(
                    f"{', '.join(map(setting_text, keys, place))} has runs that are no seeds of one row: "
                    f"{other.runs[0].folder} ({other.label}) and {row.runs[0].folder} ({row.label}): choose one of them"
                )
    return rows


def _order(value: Any) -> tuple[int, float, str]:
    """Return a key that sorts numbers by size, before everything else by its text."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return 0, float(value), ""
    return 1, 0.0, str(value)


def _heat(
    keys: Sequence[str], values: Sequence[Sequence[Any]], means: Mapping[tuple[Any, ...], float], title: str
) -> Figure:
    across, down = values
    grid = np.full((len(down), len(across)), np.nan)
    for (x, y), mean in means.items():
        grid[down.index(y), across.index(x)] = mean
    figure = new_figure(max(3.6, 0.85 * len(across) + 2.6), 0.62 * len(down) + 1.8, title)
    axes = figure.add_subplot()
    shown = axes.imshow(grid, cmap=HEAT, origin="lower", aspect="auto")
    low, high = np.nanmin(grid), np.nanmax(grid)
    for row, line in enumerate(grid):
        for place, mean in enumerate(line):
            if np.isnan(mean):
                continue
            colour = "white"
            if high > low and (mean - low) / (high - low) > 0.55:
                colour = "black"
            axes.text(place, row, f"{mean:.1f}", ha="center", va="center", color=colour, fontsize=8)
    axes.set_xticks(range(len(across)), list(map(brief, across)))
    axes.set_yticks(range(len(down)), list(map(brief, down)))
    axes.set_xlabel(fill(keys[0], 40))
    axes.set_ylabel(fill(keys[1], 24))
    figure.colorbar(shown, ax=axes)
    return figure


def _line(key: str, values: Sequence[Any], means: Mapping[tuple[Any, ...], float], title: str) -> Figure:
    figure = new_figure(5.2, 3.4, title)
    axes = plain_axes(figure.add_subplot())
    heights = [means[(value,)] for value in values]
    axes.plot(range(len(values)), heights, color=COLOURS[0], marker="o")
    for place, height in enumerate(heights):
        axes.annotate(
            f"{height:.1f}", (place, height), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=8
        )
    axes.margins(y=0.18)
    axes.set_xticks(range(len(values)), list(map(brief, values)))
    axes.set_xlabel(key)
    axes.set_ylabel("%")
    return figure
