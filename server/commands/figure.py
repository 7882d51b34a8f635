"""``goldfinch figure KIND DIR ...``: one figure from the folders of runs, as PNG, PDF or SVG."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from common.errors import ConfigError, nearest
from server.plots.figures import bars, check_format, convergence, save, sensitivity
from server.results.run import Run, find_runs, labels
from server.results.seeds import Group, curve

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
    path = output or Path(folders[0]) / f"{kind}.png"
    check_format(path)  # before the work
    runs = find_runs(folders)
    kinds: Mapping[str, Callable[[], Figure]] = {
        "convergence": lambda: curves_of(runs),
        "features": lambda: _features(runs, samples or 100),
        "cam": lambda: _cam(runs, samples or 2),
        "heatmap": lambda: sensitivity(runs, axes=axes, rule=rule, column=column),
        "bars": lambda: bars_of(runs, rule),
    }
    print(f"wrote {save(kinds[kind](), path)}")


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


def bars_of(runs: Sequence[Run], rule: str) -> Figure:
    """Accuracy per domain and on average, one bar for each label, seeds of one label together."""
    scores = [run.summary["scores"].get(rule, {}) for run in runs]
    domains = list(dict.fromkeys(name for score in scores for name in score.get("accuracy", {})))
    columns = [*(f"domain:{name}" for name in domains), "average"]
    series = {group.label: [group.value(column, rule) for column in columns] for group in _grouped(runs)}
    return bars([*domains, "average"], series, _title(runs))


def curves_of(runs: Sequence[Run]) -> Figure:
    """Average accuracy by round of runs, seeds of one label together."""
    curves = {group.label: curve(group.runs) for group in _grouped(runs)}
    return convergence(curves, _title(runs))


def _grouped(runs: Sequence[Run]) -> list[Group]:
    """Runs by label; the seeds of one label together."""
    found: dict[str, Group] = {}
    for run, name in zip(runs, names_of(runs), strict=True):
        found.setdefault(name, Group(name)).runs.append(run)
    return list(found.values())


def _title(runs: Sequence[Run]) -> str:
    return f"{runs[0].summary['data']}, {runs[0].summary['protocol']}"


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
