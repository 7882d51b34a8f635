"""What all figures share: colours that colour-blind readers can tell apart, sizes, and how a figure is saved."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from common.storage.files import write_bytes

# Okabe and Ito's palette without its yellow, which is too light on white; black last.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
HEAT = "cividis"
"""A colour map of even lightness that looks the same to colour-blind readers."""


def line_style(index: int) -> dict[str, Any]:
    """Colour, dash and marker of the ``index``-th series: pairs of colour and dash repeat only after 28."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[(index // len(COLOURS)) % len(DASHES)],
        "marker": MARKERS[index % len(MARKERS)],
    }


def new_figure(width: float, height: float) -> Figure:
    """A figure of ``width`` x ``height`` inches with no tie to a screen."""
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plain(axes: Axes, *, grid: bool = True) -> Axes:
    """No frame on top and right, a light grid behind."""
    axes.spines[["top", "right"]].set_visible(False)
    if grid:
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    return axes


def png(figure: Figure) -> bytes:
    """The figure as PNG; the same figure gives the same bytes."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()


def save(figure: Figure, path: Path) -> Path:
    """Write the figure as PNG, complete or not at all."""
    write_bytes(path, png(figure))
    return path
