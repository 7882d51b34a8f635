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
from server.results.run import Run, find_runs, labels

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
        "heatmap": lambda: sensitivity(runs, axes=axes, rule=rule, column=column),
        "bars": lambda: _bars(runs, rule),
    }
    print(f"wrote {save(kinds[kind](), output or Path(folders[0]) / f'{kind}.png')}")


def names_of(runs: Sequence[Run]) -> list[str]:
    """Labels of runs: those of the table that ``goldfinch reproduce`` made of them, else method and settings."""
    known: dict[Path, str] = {}
    for folder in {run.folder.absolute().parents[2] for run in runs if len(run.folder.absolute().parents) > 2}:
        for path in sorted(folder.glob("*.json")):
            known |= _labels_in(path)
    found = [known.get(run.folder.absolute()) for run in runs]
    return [name for name in found if name] if all(found) else labels(runs)


def _labels_in(path: Path) -> dict[Path, str]:
    try:
        rows = json.loads(path.read_text())["rows"]
        return {Path(folder).absolute(): row["label"] for row in rows for folder in row["folders"].values()}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _bars(runs: Sequence[Run], rule: str) -> Figure:
    return loss_bars(runs, names_of(runs), rule)


def curves_of(runs: Sequence[Run]) -> Figure:
    """Average accuracy by round of runs, seeds of one label together."""
    curves: dict[str, dict[int, Point]] = {}
    for label, members in grouped(runs, names_of(runs)).items():
        by_round: dict[int, list[float]] = {}
        for run in members:
            for number, average in averages(run.folder).items():
                by_round.setdefault(number, []).append(average)
        curves[label] = {
            number: (statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)
            for number, values in sorted(by_round.items())
        }
    first = runs[0].summary
    return convergence(curves, f"{first['data']}, {first['protocol']}")


def _features(runs: Sequence[Run], samples: int) -> Figure:
    from server.plots.maps import feature_map

    if len(runs) != 1:
        raise ConfigError(
            f"features shows one run; {len(runs)} were found: {', '.join(str(run.folder) for run in runs[:5])}"
        )
    return feature_map(runs[0], samples)


def _cam(runs: Sequence[Run], samples: int) -> Figure:
    from server.plots.maps import activation_maps

    names = names_of(runs)
    repeated = [
        f"{name}, {run.folder.name}" if names.count(name) > 1 else name for name, run in zip(names, runs, strict=True)
    ]
    return activation_maps(list(zip(repeated, runs, strict=True)), samples)
