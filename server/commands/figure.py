"""``goldfinch figure KIND DIR ...``: one PNG from the folders of runs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from common.errors import ConfigError, nearest
from server.plots.curves import Point, convergence
from server.plots.style import save
from server.plots.sweeps import grouped, loss_bars, sensitivity
from server.reproduction.comparison import averages
from server.results.entries import Entry, labels, read_entries
from server.results.table import find_runs

KINDS = ("convergence", "features", "cam", "heatmap", "bars")


def draw(
    kind: str,
    folders: Sequence[str],
    output: Path | None,
    rule: str = "final",
    column: str = "average",
    axes: Sequence[str] = (),
    samples: int | None = None,
) -> None:
    """Draw the runs in and below ``folders``; ``output`` is ``<first folder>/<kind>.png`` unless it is given.

    Raises:
        ConfigError: an unknown kind, folders without runs, or runs that the kind cannot show.
    """
    if kind not in KINDS:
        raise ConfigError(f"goldfinch figure {kind}: no such kind; {nearest(kind, KINDS)}")
    if samples is not None and samples < 1:
        raise ConfigError(f"--samples {samples}: must be 1 or more")
    runs = find_runs(folders)
    kinds: Mapping[str, Callable[[], Figure]] = {
        "convergence": lambda: curves_of(runs),
        "features": lambda: _features(runs, samples or 100),
        "cam": lambda: _cam(runs, samples or 2),
        "heatmap": lambda: sensitivity(read_entries(runs), axes=axes, rule=rule, column=column),
        "bars": lambda: _bars(runs, rule),
    }
    print(f"wrote {save(kinds[kind](), output or Path(folders[0]) / f'{kind}.png')}")


def names_of(entries: Sequence[Entry]) -> list[str]:
    """Labels of runs: those of the table that ``goldfinch reproduce`` made of them, else method and settings."""
    known: dict[Path, str] = {}
    for folder in {entry.folder.absolute().parents[2] for entry in entries if len(entry.folder.absolute().parents) > 2}:
        for path in sorted(folder.glob("*.json")):
            known |= _labels_in(path)
    found = [known.get(entry.folder.absolute()) for entry in entries]
    return [name for name in found if name] if all(found) else labels(entries)


def _labels_in(path: Path) -> dict[Path, str]:
    try:
        rows = json.loads(path.read_text())["rows"]
        return {Path(folder).absolute(): row["label"] for row in rows for folder in row["folders"].values()}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _bars(folders: Sequence[Path], rule: str) -> Figure:
    entries = read_entries(folders)
    return loss_bars(entries, names_of(entries), rule)


def curves_of(folders: Sequence[Path]) -> Figure:
    """Average accuracy by round of runs, seeds of one label together."""
    entries = read_entries(folders)
    curves: dict[str, dict[int, Point]] = {}
    for label, members in grouped(entries, names_of(entries)).items():
        by_round: dict[int, list[float]] = {}
        for entry in members:
            for number, average in averages(entry.folder).items():
                by_round.setdefault(number, []).append(average)
        curves[label] = {
            number: (statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)
            for number, values in sorted(by_round.items())
        }
    first = entries[0].summary
    return convergence(curves, f"{first['data']}, {first['protocol']}")


def _features(folders: Sequence[Path], samples: int) -> Figure:
    from server.plots.maps import feature_map
    from server.results.run import Run

    if len(folders) != 1:
        raise ConfigError(f"features shows one run; {len(folders)} were found: {', '.join(map(str, folders[:5]))}")
    return feature_map(Run.open(folders[0]), samples)


def _cam(folders: Sequence[Path], samples: int) -> Figure:
    from server.plots.maps import activation_maps
    from server.results.run import Run

    names = names_of(read_entries(folders))
    repeated = [
        f"{name}, {folder.name}" if names.count(name) > 1 else name for name, folder in zip(names, folders, strict=True)
    ]
    return activation_maps([(name, Run.open(folder)) for name, folder in zip(repeated, folders, strict=True)], samples)
