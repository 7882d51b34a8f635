"""The figures of the page: each is one function here, and one line ``{{ draw(plots.NAME(...)) }}`` in ``page.html``.

A plot is a dictionary that ``plots.js`` reads. Plots of kind ``lines``, ``bars`` and ``points`` have these keys:

- ``rows``: one entry per line. Its fields name it (``method``, ``domain`` ...); ``x``, ``y`` and ``sd`` (the standard
  deviation over seeds) are its numbers, ``format`` says how numbers are printed.
- ``wide``: the field that tells the lines of the wide chart apart. ``panels``: the fields by which small charts can be
  made. ``keys``: the values of each field, in order.
- ``measures``: the values of ``measure`` among which the reader chooses. ``choose``: a field of which the wide chart
  shows one value at a time, one of ``of``.

Plots of kind ``confusion`` show one of several ``runs``.
"""

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from server.results.groups import Board, run_name
from server.results.report.results import metric_boards, total_bytes
from server.results.run import RunFolder
from server.results.seeds import by_round
from server.run.history import mean_losses

MAX_CELLS = 150_000
"""Largest number of confusion counts of one run in the page; of more, evenly spaced rounds are shown."""

MAX_DETAILED = 8
"""Largest number of runs that all have confusion matrices; of more, only the first seed of each group."""

AVERAGE, WORST = "average over domains", "worst domain"

PERCENT = {"digits": 1, "tens": True, "shared": True}
LOSS = {"digits": 3, "shared": True}

Plot = dict[str, Any]
Points = dict[int, float]
Curves = dict[str, Points]


def over_rounds(board: Board) -> Plot:
    """Plot accuracy, test loss and, where confusion counts were recorded, the other metrics, all by round.

    They are shown on average, on the worst domain, and by domain or method in small charts.
    """
    rows = _over_seeds(board, "domain", accuracy_curves, PERCENT, measure="Test accuracy in %")
    rows += _over_seeds(board, "domain", loss_curves, LOSS, measure="Test loss")
    plot: Plot = {"kind": "lines", "title": "", "measures": ["Test accuracy in %", "Test loss"]}
    for name, other in metric_boards(board):
        measure = f"{name[0].upper()}{name[1:]} in %"
        plot["measures"].append(measure)
        rows += _over_seeds(other, "domain", accuracy_curves, PERCENT, measure=measure)
    plot["keys"] = {"method": _names(board), "domain": board.domains}
    if len(board.groups) == 1:
        plot["wide"] = "domain"
        plot["rows"] = [row for row in rows if row["domain"] != WORST]
        return plot
    plot["wide"] = "method"
    plot["choose"] = "domain"
    plot["of"] = [AVERAGE, WORST, *board.domains]
    plot["panels"] = ["domain", "method"]
    plot["rows"] = rows
    return plot


def has_partial_rounds(boards: Sequence[Board]) -> bool:
    """Return whether a run of the page has a round in which the score lacks a domain."""
    for board in boards:
        for run in board.runs:
            if _partial_rounds(run):
                return True
    return False


def _partial_rounds(run: RunFolder) -> set[int]:
    return {score.round for score in run.round_scores if score.missing}


def losses(board: Board) -> Plot:
    """Plot each term of the training loss by round, one small chart per term."""
    rows = _over_seeds(board, "term", train_losses, {"digits": 4})
    return _small("Training loss", rows, board, "term", none="No losses were recorded.")


def costs(board: Board) -> Plot:
    """Plot bytes and seconds by round."""
    rows = _over_seeds(board, "cost", _round_bytes, {"bytes": True, "low": 0})
    rows += _over_seeds(board, "cost", _round_seconds, {"digits": 2, "low": 0})
    return _small("Cost", rows, board, "cost")


def accuracy_bars(board: Board, rule: str) -> Plot:
    """Plot accuracy by domain, average and worst, with the deviation over seeds; a partial value has no bar."""
    columns = [f"domain:{name}" for name in board.domains]
    columns += ["average", "worst"]
    rows = []
    for group in board.groups:
        means: list[float | None] = []
        deviations: list[float | None] = []
        for column in columns:
            value = group.value(column, rule)
            if value is None or value.partial:
                means.append(None)
                deviations.append(None)
            else:
                means.append(value.mean)
                deviations.append(value.deviation)
        rows.append({"method": group.label, "y": means, "sd": deviations, "format": {"digits": 1, "low": 0}})
    groups = [*board.domains, "average", "worst"]
    return _wide("bars", "Accuracy in %", rows, board) | {"groups": groups, "height": 250}


def accuracy_against_bytes(board: Board, rule: str) -> Plot:
    """Plot average accuracy against the bytes of a run, both ways; both are means over seeds."""
    rows = []
    for group in board.groups:
        value = group.value("average", rule)
        if value is None or value.partial:
            continue
        traffic = statistics.fmean(map(total_bytes, group.runs))
        row = {"method": group.label, "x": [traffic], "y": [value.mean], "sd": [value.deviation], "format": PERCENT}
        rows.append(row)
    across = {"title": "bytes of a run, both ways", "format": {"bytes": True}}
    title = "Average accuracy in % against bytes"
    return _wide("points", title, rows, board) | {"across": across, "height": 250}


def confusion(boards: Sequence[Board]) -> Plot:
    """Plot confusion matrices by domain and round, one run at a time."""
    runs = []
    for name, run in _detailed(boards):
        found = confusion_data(run)
        if found is not None:
            runs.append({"name": name, "classes": run.class_names, **found})
    return {
        "kind": "confusion",
        "note": "Rows are true classes, columns are predicted classes. The stronger the colour, the larger the share "
        "of the true class.",
        "none": "These runs kept no confusion matrices.",
        "runs": runs,
    }


# ---- what the plots have in common -----------------------------------------------------------------------------------


def _names(board: Board) -> list[str]:
    return [group.label for group in board.groups]


def _distinct(rows: Sequence[Mapping[str, Any]], field: str) -> list[str]:
    found: dict[str, None] = {}
    for row in rows:
        found[row[field]] = None
    return list(found)


def _small(title: str, rows: list[Plot], board: Board, panel: str, **more: Any) -> Plot:
    keys = {"method": _names(board), panel: _distinct(rows, panel)}
    return {"kind": "lines", "title": title, "rows": rows, "panels": [panel], "colour": "method", "keys": keys, **more}


def _wide(kind: str, title: str, rows: list[Plot], board: Board) -> Plot:
    return {"kind": kind, "title": title, "rows": rows, "wide": "method", "keys": {"method": _names(board)}}


def _over_seeds(
    board: Board, field: str, curves: Callable[[RunFolder], Curves], form: Mapping[str, Any], **more: str
) -> list[Plot]:
    """Return a row for each group and each of the ``curves`` of its runs: mean and deviation over runs, by round."""
    rows = []
    for group in board.groups:
        found: list[Curves] = []
        names: dict[str, None] = {}
        partial: set[int] = set()
        for run in group.runs:
            found.append(curves(run))
            names |= dict.fromkeys(found[-1])
            partial |= _partial_rounds(run)
        for name in names:
            points = [each.get(name, {}) for each in found]
            if name in (AVERAGE, WORST):  # the mean over the other seeds would be a mean over other domains
                points = [_without(each, partial) for each in points]
            rows.append({"method": group.label, field: name, "format": form, **more, **band(points)})
    return rows


def _without(points: Points, rounds: Collection[int]) -> Points:
    return {number: value for number, value in points.items() if number not in rounds}


def band(runs: Sequence[Points]) -> dict[str, Any]:
    """Return ``x`` (rounds), ``y`` (mean) and ``sd`` (sample standard deviation, ``None`` for a single run)."""
    means: list[float] = []
    deviations: list[float | None] = []
    found = by_round(runs)
    for value in found.values():
        means.append(_short(value.mean))
        deviations.append(None if value.deviation is None else _short(value.deviation))
    return {"x": list(found), "y": means, "sd": deviations}


def _short(value: float) -> float:
    """Return a number with six significant digits."""
    return float(f"{value:.6g}")


def _detailed(boards: Sequence[Board]) -> list[tuple[str, RunFolder]]:
    """Return the runs that have confusion matrices in the page, with their names."""
    every = sum(len(board.runs) for board in boards) <= MAX_DETAILED
    found: list[tuple[str, RunFolder]] = []
    for board in boards:
        for group in board.groups:
            for run in group.runs:
                if every or run is group.runs[0]:
                    found.append((run_name(group, run), run))
    return found


# ---- a run's numbers by round ----------------------------------------------------------------------------------------


def accuracy_curves(run: RunFolder) -> Curves:
    """Return the run's metric in per cent: average, worst domain, and each domain; a partial round has no average."""
    found: Curves = {AVERAGE: {}, WORST: {}}
    for name in run.domains:
        found[name] = {}
    for score in run.round_scores:
        if not score.missing:
            found[AVERAGE][score.round] = score.average
            found[WORST][score.round] = score.worst
        for name, accuracy in score.accuracy.items():
            found[name][score.round] = accuracy
    return found


def loss_curves(run: RunFolder) -> Curves:
    """Return test loss: average over domains, and each domain, averaged over the clients that scored it."""
    losses: dict[str, dict[int, list[float]]] = {}
    for row in run.scores:
        rounds = losses.setdefault(str(row["domain"]), {})
        rounds.setdefault(int(row["round"]), []).append(float(row["loss"]))
    found: Curves = {AVERAGE: {}}
    for name, rounds in losses.items():
        found[name] = {number: statistics.fmean(values) for number, values in rounds.items()}
    for score in run.round_scores:
        if not score.missing:
            means = [found[name][score.round] for name in losses if score.round in found[name]]
            found[AVERAGE][score.round] = statistics.fmean(means)
    return found


def train_losses(run: RunFolder) -> Curves:
    """Return each loss term's mean over clients, weighted by their samples."""
    rows: dict[int, list[Mapping[str, Any]]] = {}
    for row in run.replies:
        rows.setdefault(int(row["round"]), []).append(row)
    found: Curves = {}
    for number in sorted(rows):
        for term, mean in mean_losses(rows[number]).items():
            found.setdefault(term.replace("_", " "), {})[number] = mean
    return found


def _round_bytes(run: RunFolder) -> Curves:
    found: Curves = {"bytes down a round": {}, "bytes up a round": {}}
    for row in run.replies:
        number = int(row["round"])
        if number <= run.rounds:  # the exchange after the last round only scores
            for direction in ("down", "up"):
                points = found[f"bytes {direction} a round"]
                points[number] = points.get(number, 0.0) + row.get(f"bytes_{direction}", 0)
    return found


def _round_seconds(run: RunFolder) -> Curves:
    seconds: Points = {}
    for entry in run.events:
        if entry["event"] == "round done":
            seconds[int(entry["round"])] = float(entry["seconds"])
    return {"seconds a round": seconds}


def confusion_data(run: RunFolder) -> dict[str, Any] | None:
    """Return the confusion counts of a run; ``None`` if none were kept.

    The counts of several clients that scored the same domain, each with its own model, are added up.

    Returns:
        ``rounds``, and in ``domains`` one flat ``[K * K]`` matrix per round of each domain, true class first.
    """
    size = len(run.class_names)
    cells: dict[int, dict[str, list[int]]] = {}
    for line in run.confusions:
        if int(line["classes"]) != size:
            continue
        matrix = cells.setdefault(int(line["round"]), {}).setdefault(str(line["domain"]), [0] * size**2)
        for row, column, count in zip(line["true"], line["predicted"], line["count"], strict=True):
            matrix[row * size + column] += count
    if not cells:
        return None
    rounds = sorted(cells)
    limit = max(1, MAX_CELLS // (size**2 * max(1, len(run.domains))))
    if limit == 1:
        rounds = rounds[-1:]
    elif len(rounds) > limit:
        step = -(-len(rounds) // limit)
        rounds = sorted({*rounds[::step], rounds[-1]})
    domains = {}
    for name in run.domains:
        domains[name] = [cells[number].get(name) for number in rounds]
    return {"rounds": rounds, "domains": domains}
