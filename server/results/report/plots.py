"""What the page draws: each plot is one function here, and one line ``{{ draw(plots.NAME(...)) }}`` in ``page.html``.

A plot is what ``plots.js`` reads. Of kind ``lines``, ``bars`` or ``points`` it has ``rows``, one for each line: fields
that say what it is (``method``, ``domain`` ...), ``x``, ``y`` and the deviation over seeds ``sd``, and its ``format``.
``wide`` names the field of the lines of one wide chart, ``panels`` the fields to make small charts by, ``keys`` each
field's values in order; rows may differ in ``measure``, and in the field ``choose`` by whose value (``of``) the wide
chart picks. ``confusion`` and ``prototypes`` show one of several ``runs``.
"""

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from server.results.groups import Board, run_name
from server.results.report.prototypes import prototype_map, prototype_numbers
from server.results.report.results import cost, metric_boards
from server.results.run import Run
from server.results.seeds import by_round
from server.run.history import mean_losses

MAX_CELLS = 150_000
"""Numbers of one run's confusion matrices in the page; rounds are thinned until they are no more."""

MAX_DETAILED = 8
"""Runs with confusion matrices and a map each; of more, only the first seed of each group has them."""

AVERAGE, WORST = "average over domains", "worst domain"

PERCENT = {"digits": 1, "tens": True, "shared": True}
LOSS = {"digits": 3, "shared": True}

Plot = dict[str, Any]
Points = dict[int, float]
Curves = Mapping[str, Points]


def over_rounds(board: Board) -> Plot:
    """Accuracy, test loss and, where confusion counts were recorded, the other metrics, all by round.

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
        return plot | {"wide": "domain", "rows": [row for row in rows if row["domain"] != WORST]}
    plot |= {"wide": "method", "choose": "domain", "of": [AVERAGE, WORST, *board.domains]}
    return plot | {"panels": ["domain", "method"], "rows": rows}


def lacking(boards: Sequence[Board]) -> bool:
    """Whether a run of the page has a round that lacks a domain."""
    return any(score.missing for board in boards for run in board.runs for score in run.round_scores)


def losses(board: Board) -> Plot:
    """Each term of the training loss by round, one small chart for each."""
    rows = _over_seeds(board, "term", train_losses, {"digits": 4})
    return _small("Training loss", rows, board, "term", none="No losses were recorded.")


def costs(board: Board) -> Plot:
    """Bytes and seconds by round."""
    rows = _over_seeds(board, "cost", _round_bytes, {"bytes": True, "low": 0})
    rows += _over_seeds(board, "cost", _round_seconds, {"digits": 2, "low": 0})
    return _small("Cost", rows, board, "cost")


def accuracy_bars(board: Board, rule: str) -> Plot:
    """Accuracy by domain, average and worst, with the deviation over seeds; a partial value has no bar."""
    columns = [*(f"domain:{name}" for name in board.domains), "average", "worst"]
    rows = []
    for group in board.groups:
        values = [group.value(column, rule) for column in columns]
        found = [None if value is None or value.partial else value for value in values]
        row = {"method": group.label, "y": [each and each.mean for each in found]}
        rows.append(row | {"sd": [each and each.deviation for each in found], "format": {"digits": 1, "low": 0}})
    groups = [*board.domains, "average", "worst"]
    return _wide("bars", "Accuracy in %", rows, board) | {"groups": groups, "height": 250}


def accuracy_against_bytes(board: Board, rule: str) -> Plot:
    """Average accuracy over the bytes of a run, both ways, both means over seeds."""
    rows = []
    for group in board.groups:
        found = group.value("average", rule)
        if found is not None and not found.partial:
            traffic = statistics.fmean(sum(cost(run)["bytes"].values()) for run in group.runs)
            row = {"method": group.label, "x": [traffic], "y": [found.mean], "sd": [found.deviation]}
            rows.append(row | {"format": PERCENT})
    across = {"title": "bytes of a run, both ways", "format": {"bytes": True}}
    title = "Average accuracy in % against bytes"
    return _wide("points", title, rows, board) | {"across": across, "height": 250}


def confusion(boards: Sequence[Board]) -> Plot:
    """Confusion matrices by domain and round, one run at a time."""
    return {
        "kind": "confusion",
        "note": "Rows are true classes, columns what the model said; the stronger the colour, the larger the share of "
        "the true class.",
        "none": "These runs kept no confusion matrices.",
        "runs": [
            {"name": name, "classes": run.class_names} | found
            for name, run in _detailed(boards)
            if (found := confusion_data(run))
        ],
    }


def prototypes(boards: Sequence[Board], *, tsne: bool) -> Plot:
    """The map of prototypes by round, and their number, drift and distances, one run at a time."""
    runs = []
    for name, run in _detailed(boards):
        found, numbers = prototype_map(run, tsne=tsne), prototype_numbers(run)
        if found is None or numbers is None:
            continue
        owners = [owner["domain"] for owner in found["owners"] if owner["domain"]]
        domains = list(dict.fromkeys([*run.domains, *owners]))
        own = {"name": name, "classes": run.class_names, "domains": domains, "numbers": _prototype_numbers(numbers)}
        runs.append(found | own)
    return {
        "kind": "prototypes",
        "note": "Each mark is one vector in feature space, at unit length: filled marks are what clients sent (their "
        "shape is the domain), rings are the global set. All rounds are placed together, so positions compare.",
        "none": "None of these methods exchanges prototypes, or the runs kept none.",
        "runs": runs,
    }


def _prototype_numbers(numbers: Mapping[str, Any]) -> Plot:
    shown = {
        "count": ("global prototypes", "prototypes", 0),
        "drift": ("drift of class means", "since the round before", 4),
        "domains": ("distance between", "domains", 3),
        "classes": ("distance between", "classes", 3),
    }
    rows = []
    for key, (panel, line, digits) in shown.items():
        kept = [(x, y) for x, y in zip(numbers["rounds"], numbers[key], strict=True) if y is not None]
        if kept:
            x, y = zip(*kept, strict=True)
            rows.append({"panel": panel, "line": line, "x": x, "y": y, "format": {"digits": digits, "low": 0}})
    keys = {"panel": _distinct(rows, "panel"), "line": [line for _, line, _ in shown.values()]}
    plot = {"kind": "lines", "title": "Prototypes", "rows": rows, "keys": keys}
    return plot | {"panels": ["panel"], "colour": "line", "apart": True}


# ---- what the plots have in common -----------------------------------------------------------------------------------


def _names(board: Board) -> list[str]:
    return [group.label for group in board.groups]


def _distinct(rows: Sequence[Mapping[str, Any]], field: str) -> list[str]:
    return list(dict.fromkeys(row[field] for row in rows))


def _small(title: str, rows: list[Plot], board: Board, panel: str, **more: Any) -> Plot:
    keys = {"method": _names(board), panel: _distinct(rows, panel)}
    return {"kind": "lines", "title": title, "rows": rows, "panels": [panel], "colour": "method", "keys": keys, **more}


def _wide(kind: str, title: str, rows: list[Plot], board: Board) -> Plot:
    return {"kind": kind, "title": title, "rows": rows, "wide": "method", "keys": {"method": _names(board)}}


def _over_seeds(
    board: Board, field: str, curves: Callable[[Run], Curves], form: Mapping[str, Any], **more: str
) -> list[Plot]:
    """A row for each group and each of the ``curves`` of its runs: mean and deviation over the runs, round by round."""
    rows = []
    for group in board.groups:
        found = [curves(run) for run in group.runs]
        partial = {score.round for run in group.runs for score in run.round_scores if score.missing}
        for name in dict.fromkeys(name for each in found for name in each):
            row = {"method": group.label, field: name, "format": form, **more}
            points = [each.get(name, {}) for each in found]
            if name in (AVERAGE, WORST):  # a mean over seeds without the one that lacks a domain would be another mean
                points = [_without(each, partial) for each in points]
            rows.append(row | band(points))
    return rows


def _without(points: Points, rounds: Collection[int]) -> Points:
    return {number: value for number, value in points.items() if number not in rounds}


def band(runs: Sequence[Points]) -> dict[str, Any]:
    """``x`` (rounds), ``y`` (mean), ``sd`` (sample standard deviation, ``None`` of a single run)."""
    found = by_round(runs)
    return {
        "x": list(found),
        "y": [_short(each.mean) for each in found.values()],
        "sd": [_short(each.deviation) for each in found.values()],
    }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _detailed(boards: Sequence[Board]) -> list[tuple[str, Run]]:
    total = sum(len(board.runs) for board in boards)
    most = None if total <= MAX_DETAILED else 1
    return [(run_name(group, run), run) for board in boards for group in board.groups for run in group.runs[:most]]


# ---- a run's numbers by round ----------------------------------------------------------------------------------------


def accuracy_curves(run: Run) -> Curves:
    """The run's metric in per cent on average, on the worst domain, and on each; no mean of a partial round."""
    scores = run.round_scores
    found = {AVERAGE: {score.round: score.average for score in scores if not score.missing}}
    found[WORST] = {score.round: score.worst for score in scores if not score.missing}
    for name in run.domains:
        found[name] = {score.round: score.accuracy[name] for score in scores if name in score.accuracy}
    return found


def loss_curves(run: Run) -> Curves:
    """Test loss on average over domains, and on each; several clients of a domain count once each."""
    seen: dict[str, dict[int, list[float]]] = {}
    for row in run.scores:
        seen.setdefault(str(row["domain"]), {}).setdefault(int(row["round"]), []).append(float(row["loss"]))
    found = {name: {n: statistics.fmean(each) for n, each in rounds.items()} for name, rounds in seen.items()}
    whole = [score.round for score in run.round_scores if not score.missing]
    average = {n: statistics.fmean(points[n] for points in found.values() if n in points) for n in whole}
    return {AVERAGE: average, **found}


def train_losses(run: Run) -> Curves:
    """Each loss term's mean over clients, weighted by their samples."""
    rows: dict[int, list[Mapping[str, Any]]] = {}
    for row in run.activity:
        rows.setdefault(int(row["round"]), []).append(row)
    found: dict[str, Points] = {}
    for number in sorted(rows):
        for term, mean in mean_losses(rows[number]).items():
            found.setdefault(term.replace("_", " "), {})[number] = mean
    return found


def _round_bytes(run: Run) -> Curves:
    found: dict[str, Points] = {"bytes down a round": {}, "bytes up a round": {}}
    for row in run.activity:
        number = int(row["round"])
        if number <= run.rounds:  # the last trip only scores
            for way in ("down", "up"):
                points = found[f"bytes {way} a round"]
                points[number] = points.get(number, 0.0) + float(row.get(f"bytes_{way}") or 0)
    return found


def _round_seconds(run: Run) -> Curves:
    done = {int(entry["round"]): float(entry["seconds"]) for entry in run.events if entry["event"] == "round done"}
    return {"seconds a round": done}


def confusion_data(run: Run) -> dict[str, Any] | None:
    """``rounds``, and by domain one flat ``[K * K]`` matrix per round (true class first); ``None`` if none were kept.

    Several clients that scored one domain, each its own model, are added up.
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
    most = max(1, MAX_CELLS // (size**2 * max(1, len(run.domains))))
    if len(rounds) > most:
        step = -(-len(rounds) // most)
        rounds = sorted({*rounds[::step], rounds[-1]}) if most > 1 else rounds[-1:]
    return {
        "rounds": rounds,
        "domains": {name: [cells[number].get(name) for number in rounds] for name in run.domains},
    }
