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
    title: str | None = None,
    size: str | None = None,
    labels: Sequence[str] = (),
) -> None:
    """Draw the runs in and below ``folders`` as one picture.

    Args:
        kind: one of :data:`KINDS`.
        folders: run folders, or folders with runs below them.
        output: the picture; ``<first folder>/<kind>.png`` by default.
        rule: the rule of the accuracies, as in ``goldfinch table``.
        column: what a heat map shows.
        axes: the settings of a heat map's axes.
        samples: images per test domain.
        title: the title instead of data and protocol; notes on missing values stay.
        size: width and height in inches, such as ``7x4``.
        labels: names of rows, such as ``fedavg=FedAvg``.

    Raises:
        ConfigError: an unknown kind, folders without runs, runs that the kind cannot show, a size that is none, or a
            label of no row.
    """
    if kind not in KINDS:
        raise ConfigError(f"goldfinch figure {kind}: no such kind; {nearest(kind, KINDS)}")
    if samples is not None and samples < 1:
        raise ConfigError(f"--samples {samples}: must be 1 or more")
    path = output or Path(folders[0]) / f"{kind}.png"
    check_format(path)  # before the work
    inches = _inches(size)
    runs = find_runs(folders)
    kinds: Mapping[str, Callable[[], Figure]] = {
        "convergence": lambda: curves_of(runs, title, labels),
        "features": lambda: _features(runs, samples or 100, title),
        "cam": lambda: _cam(runs, samples or 2, title, labels),
        "heatmap": lambda: sensitivity(runs, axes=axes, rule=rule, column=column, title=title),
        "bars": lambda: bars_of(runs, rule, title, labels),
    }
    if labels and kind in ("features", "heatmap"):
        raise ConfigError(f"--label: {kind} shows no rows of runs; it fits convergence, bars and cam")
    figure = kinds[kind]()
    if inches is not None:
        figure.set_size_inches(*inches)
    print(f"wrote {save(figure, path)}")


def _inches(size: str | None) -> tuple[float, float] | None:
    """Return width and height of ``7x4``.

    Raises:
        ConfigError: it is not two numbers from 1 to 50.
    """
    if size is None:
        return None
    width, _, height = size.partition("x")
    try:
        inches = float(width), float(height)
    except ValueError:
        inches = 0.0, 0.0
    if not (1 <= inches[0] <= 50 and 1 <= inches[1] <= 50):
        raise ConfigError(f"--size {size}: give width and height in inches, each from 1 to 50, such as --size 7x4")
    return inches


def _rename(groups: Sequence[Group], labels: Sequence[str]) -> None:
    """Give groups the labels of ``OLD=NEW``.

    Raises:
        ConfigError: an item has no ``=``, or no group has the label.
    """
    by_label = {group.label: group for group in groups}
    for item in labels:
        old, equals, new = item.rpartition("=")
        if not equals or not new:
            raise ConfigError(f"--label {item}: write it as OLD=NEW, such as --label fedavg=FedAvg")
        if old not in by_label:
            raise ConfigError(f"--label {item}: no row is called {old!r}; {nearest(old, by_label)}")
        by_label[old].label = new


def named_groups(runs: Sequence[Run], labels: Sequence[str] = ()) -> list[Group]:
    """Return the groups of ``runs``, each by its name in a table of ``goldfinch reproduce``, if it is in one.

    A group that shares its name with another, as of another code, and a group of another table keep their own labels
    as well. Then the names in ``labels``, ``OLD=NEW``, apply.
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
    _rename(groups, labels)
    return groups


def names_of(runs: Sequence[Run], labels: Sequence[str] = ()) -> list[str]:
    """The name of each run's group."""
    names = {}
    for group in named_groups(runs, labels):
        for run in (*group.runs, *group.duplicates, *group.contradictions):
            names[run.folder] = group.label
    return [names[run.folder] for run in runs]


def _labels_in(path: Path) -> dict[Path, str]:
    try:
        rows = json.loads(read_small(path))["rows"]
        return {Path(folder).absolute(): row["label"] for row in rows for folder in row["folders"].values()}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def bars_of(runs: Sequence[Run], rule: str, title: str | None = None, labels: Sequence[str] = ()) -> Figure:
    """Accuracy per domain and on average, one bar for each label, seeds of one label together.

    A partial value has no bar; the title says what is missing.
    """
    groups = named_groups(runs, labels)
    domains = domain_columns(groups, rule)
    columns = [*(f"domain:{name}" for name in domains), "average"]
    series = {}
    for group in groups:
        values = [group.value(column, rule) for column in columns]
        series[group.label] = [None if value is None or value.partial else value for value in values]
    notes = mark_notes(groups, rule)
    return bars([*domain_heads(groups, domains), "average"], series, ". ".join([title or _title(runs), *notes]))


def curves_of(runs: Sequence[Run], title: str | None = None, labels: Sequence[str] = ()) -> Figure:
    """Average accuracy by round of runs, seeds of one label together."""
    curves = {group.label: curve(group.runs) for group in named_groups(runs, labels)}
    return convergence(curves, title or _title(runs))


def _title(runs: Sequence[Run]) -> str:
    return f"{runs[0].summary['data']}, {runs[0].summary['protocol']}"


def _features(runs: Sequence[Run], samples: int, title: str | None) -> Figure:
    from server.plots.maps import feature_map

    if len(runs) != 1:
        raise ConfigError(
            f"features shows one run; {len(runs)} were found: {', '.join(str(run.folder) for run in runs[:5])}"
        )
    return feature_map(runs[0], samples, title)


def _cam(runs: Sequence[Run], samples: int, title: str | None, labels: Sequence[str]) -> Figure:
    from server.plots.maps import activation_maps

    names = names_of(runs, labels)
    repeated = [
        f"{name}, {run.folder.name}" if names.count(name) > 1 else name for name, run in zip(names, runs, strict=True)
    ]
    return activation_maps(list(zip(repeated, runs, strict=True)), samples, title)
