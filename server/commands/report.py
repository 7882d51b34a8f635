"""``goldfinch report``: one HTML page of runs, with a figure of the prototypes of each."""

from collections.abc import Sequence
from pathlib import Path

from server.plots.figures import rendered
from server.plots.prototypes import sent_figure
from server.results.report.page import write_report
from server.results.run import RunFolder


def report(folders: Sequence[str], output: Path | None = None) -> Path:
    """Write the report on the runs in and below ``folders``, and return its path.

    Args:
        folders: run folders, or folders with runs below them.
        output: the page; ``None`` writes ``report.html`` into the first folder.

    Raises:
        ConfigError: there is no run, or the file cannot be written.
    """
    return write_report(folders, output, _prototypes)


def _prototypes(run: RunFolder) -> bytes | None:
    """Return the figure of the run's prototypes as PNG; ``None`` if it kept none."""
    figure = sent_figure(run)
    if figure is None:
        return None
    return rendered(figure)
