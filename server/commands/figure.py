"""``goldfinch figure KIND DIR ...``: one figure from the folders of runs, as PNG, PDF or SVG."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from common.errors import ConfigError, nearest
from common.regular_files import read_small
from server.plots.figures import bars, check_format, convergence, save, sensitivity
from server.results.columns import domain_columns, domain_heads, mark_notes
from server.results.groups import Group, group_runs
from server.results.run import Run, find_runs
from server.results.seeds import curve

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


def named_groups(runs: Sequence[Run]) -> list[Group]:
    """The groups of ``runs``, each by its name in a table of ``goldfinch reproduce``, if it is in one.

    A group that shares its name with another, as of another code, and a group of another table keep their own labels
    beside it.
    """
    known: dict[Path, str] = {}
    for folder in {run.folder.absolute().parents[2] for run in runs if len(run.folder.absolute().parents) > 2}:
        for path in sorted(folder.glob("*.json")):
            known |= _labels_in(path)
    boards = group_runs(runs)
    groups = [group for board in boards for group in board.groups]
    if all(run.folder.absolute() in known for run in runs):
        names = [known[group.runs[0].folder.absolute()] for group in groups]
        for group, name in zip(groups, names, strict=True):
            marks = f" ({', '.join(group.marks)})" if group.marks else ""
            group.label = name + marks if names.count(name) == 1 else f"{name}: {group.label}"
    elif len(boards) > 1:
        for board in boards:
            for group in board.groups:
                group.label = f"{group.label}; {board.title}"
    return groups


def names_of(runs: Sequence[Run]) -> list[str]:
    """The name of each run's group."""
    names = {}
    for group in named_groups(runs):
        for run in (*group.runs, *group.duplicates, *group.contradictions):
            names[run.folder] = group.label
    return [names[run.folder] for run in runs]


def _labels_in(path: Path) -> dict[Path, str]:
    try:
        rows = json.loads(read_small(path))["rows"]
        return {Path(folder).absolute(): row["label"] for row in rows for folder in row["folders"].values()}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def bars_of(runs: Sequence[Run], rule: str) -> Figure:
    """Accuracy per domain and on average, one bar for each label, seeds of one label together.

    A partial value has no bar; the title says what is missing.
    """
    groups = named_groups(runs)
    domains = domain_columns(groups, rule)
    columns = [*(f"domain:{name}" for name in domains), "average"]
    series = {}
    for group in groups:
        values = [group.value(column, rule) for column in columns]
        series[group.label] = [None if value is None or value.partial else value for value in values]
    notes = mark_notes(groups, rule)
    return bars([*domain_heads(groups, domains), "average"], series, ". ".join([_title(runs), *notes]))


def curves_of(runs: Sequence[Run]) -> Figure:
    """Average accuracy by round of runs, seeds of one label together."""
    curves = {group.label: curve(group.runs) for group in named_groups(runs)}
    return convergence(curves, _title(runs))


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
