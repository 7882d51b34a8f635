"""The numbers behind the page's figures, as JSON for its script."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from server.results.report.prototypes import prototype_map, prototype_numbers
from server.results.report.records import Board, Group, RunRecord

MOST_CELLS = 150_000
"""Numbers of one run's confusion matrices in the page; rounds are thinned until they are no more."""

MOST_DETAILED = 8
"""Runs with confusion matrices and a map each; of more, only the first seed of each group has them."""

Points = dict[int, float]


def page_data(boards: Sequence[Board], *, tsne: bool = False) -> dict[str, Any]:
    """Everything the script draws: boards with the curves of their groups, and runs with what is each run's own."""
    runs: list[dict[str, Any]] = []
    drawn = []
    total = sum(len(board.runs) for board in boards)
    for board in boards:
        groups = []
        for group in board.groups:
            positions = range(len(runs), len(runs) + len(group.runs))
            for position, run in enumerate(group.runs):
                detailed = position == 0 or total <= MOST_DETAILED
                runs.append(run_data(run, run_name(group, run), detailed=detailed, tsne=tsne))
            groups.append({"name": group.label, "runs": list(positions), **group_curves(group, board.domains)})
        drawn.append({"title": board.title, "domains": board.domains, "groups": groups})
    return {"boards": drawn, "runs": runs}


def run_name(group: Group, run: RunRecord) -> str:
    """What a run is called on the page."""
    twins = [other for other in group.runs if other.seed == run.seed]
    name = f"{group.label}, seed {run.seed}" if len(group.runs) > 1 else group.label
    return f"{name} ({run.folder.name})" if len(twins) > 1 else name


def group_curves(group: Group, domains: Sequence[str]) -> dict[str, Any]:
    """Mean and standard deviation over the group's runs, round by round, of accuracy, test loss, loss terms and cost.

    Keys of ``accuracy`` and ``loss``: ``average``, ``worst`` (accuracy only) and ``domain:<name>``.
    """
    keys = [f"domain:{name}" for name in domains]
    accuracy: dict[str, list[Points]] = {key: [] for key in ("average", "worst", *keys)}
    loss: dict[str, list[Points]] = {key: [] for key in ("average", *keys)}
    terms: dict[str, list[Points]] = {}
    for run in group.runs:
        accuracy["average"].append({score.round: score.average for score in run.round_scores})
        accuracy["worst"].append({score.round: score.worst for score in run.round_scores})
        for name in domains:
            accuracy[f"domain:{name}"].append(
                {score.round: score.accuracy[name] for score in run.round_scores if name in score.accuracy}
            )
        by_domain = _test_losses(run)
        for name in domains:
            loss[f"domain:{name}"].append(by_domain.get(name, {}))
        rounds = sorted({number for points in by_domain.values() for number in points})
        loss["average"].append(
            {n: statistics.fmean(points[n] for points in by_domain.values() if n in points) for n in rounds}
        )
        for term, points in train_losses(run).items():
            terms.setdefault(term, []).append(points)
    return {
        "accuracy": {key: band(runs) for key, runs in accuracy.items()},
        "loss": {key: band(runs) for key, runs in loss.items()},
        "terms": {key: band(runs) for key, runs in terms.items()},
        "bytes": {way: band([_bytes(run, way) for run in group.runs]) for way in ("down", "up")},
        "seconds": band([_round_seconds(run) for run in group.runs]),
    }


def band(runs: Sequence[Points]) -> dict[str, Any]:
    """``round``, ``mean``, sample standard deviation ``sd`` (``None`` of a single run) and ``runs`` per round."""
    rounds = sorted({number for points in runs for number in points})
    columns = [[points[number] for points in runs if number in points] for number in rounds]
    return {
        "round": rounds,
        "mean": [_short(statistics.fmean(values)) for values in columns],
        "sd": [_short(statistics.stdev(values)) if len(values) > 1 else None for values in columns],
        "runs": [len(values) for values in columns],
    }


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _test_losses(run: RunRecord) -> dict[str, Points]:
    found: dict[str, dict[int, list[float]]] = {}
    for row in run.scores:
        found.setdefault(str(row["domain"]), {}).setdefault(int(row["round"]), []).append(float(row["loss"]))
    return {name: {n: statistics.fmean(values) for n, values in rounds.items()} for name, rounds in found.items()}


def train_losses(run: RunRecord) -> dict[str, Points]:
    """Each loss term's mean over clients, weighted by their samples, by round."""
    sums: dict[str, dict[int, tuple[float, float]]] = {}
    for row in run.activity:
        for term, value in json.loads(row.get("losses") or "{}").items():
            total, mass = sums.setdefault(term, {}).get(int(row["round"]), (0.0, 0.0))
            samples = float(row["samples"])
            sums[term][int(row["round"])] = (total + samples * float(value), mass + samples)
    return {
        term: {number: total / mass for number, (total, mass) in sorted(rounds.items()) if mass}
        for term, rounds in sums.items()
    }


def _bytes(run: RunRecord, way: str) -> Points:
    found: dict[int, float] = {}
    for row in run.activity:
        found[int(row["round"])] = found.get(int(row["round"]), 0.0) + float(row.get(f"bytes_{way}") or 0)
    return {number: value for number, value in found.items() if number <= run.rounds}  # the last trip only scores


def _round_seconds(run: RunRecord) -> Points:
    return {int(entry["round"]): float(entry["seconds"]) for entry in run.events if entry["event"] == "round done"}


def run_data(run: RunRecord, name: str, *, detailed: bool, tsne: bool) -> dict[str, Any]:
    """What is one run's own: confusion matrices and prototypes, if it is to be ``detailed``."""
    return {
        "name": name,
        "classes": run.class_names,
        "domains": run.domains,
        "confusion": confusion_data(run) if detailed else None,
        "map": prototype_map(run, tsne=tsne) if detailed else None,
        "prototypes": prototype_numbers(run) if detailed else None,
    }


def confusion_data(run: RunRecord) -> dict[str, Any] | None:
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
    most = max(1, MOST_CELLS // (size**2 * max(1, len(run.domains))))
    if len(rounds) > most:
        step = -(-len(rounds) // most)
        rounds = sorted({*rounds[::step], rounds[-1]}) if most > 1 else rounds[-1:]
    return {
        "rounds": rounds,
        "domains": {name: [cells[number].get(name) for number in rounds] for name in run.domains},
    }


def client_rows(run: RunRecord) -> list[dict[str, Any]]:
    """What each client brought and cost over the run."""
    rows: dict[str, dict[str, Any]] = {}
    for client, entry in run.registrations.items():
        rows[client] = _client(client, entry)
    for row in run.activity:
        found = rows.setdefault(str(row["client"]), _client(str(row["client"]), row))
        status = str(row["status"])
        found["answers"][status] = found["answers"].get(status, 0) + 1
        for way in ("up", "down"):
            found[way] += int(row.get(f"bytes_{way}") or 0)
        for phase in ("load", "score", "train", "save"):
            found["seconds"] += float(row.get(f"seconds_{phase}") or 0)
        found["memory"] = max(found["memory"], int(row.get("peak_bytes") or 0))
    return list(rows.values())


def _client(client: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "client": client,
        "domain": str(entry.get("domain", "")),
        "samples": int(entry.get("samples") or 0),
        "classes": list(entry.get("class_counts") or []),
        "device": str(entry.get("device", "")),
        "answers": {},
        "up": 0,
        "down": 0,
        "seconds": 0.0,
        "memory": 0,
    }


def cost(run: RunRecord) -> dict[str, dict[str, float]]:
    """Totals of a run: ``seconds`` over clients by phase, and ``bytes`` by what they carried."""
    seconds = {
        phase: sum(float(row.get(f"seconds_{phase}") or 0) for row in run.activity)
        for phase in ("train", "score", "load", "save")
    }
    parts = {
        part: float(sum(int(row.get(f"bytes_up_{part}") or 0) for row in run.activity))
        for part in ("weights", "prototypes", "extra")
    }
    up = float(sum(int(row.get("bytes_up") or 0) for row in run.activity))
    down = float(sum(int(row.get("bytes_down") or 0) for row in run.activity))
    headers = max(0.0, up - sum(parts.values()))
    return {
        "seconds": seconds,
        "bytes": {"down": down} | {f"up, {part}": size for part, size in parts.items()} | {"up, header": headers},
    }
