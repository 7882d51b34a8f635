"""The numbers of a run by round, and their mean over the runs of a row, for figures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from goldfinch.record import RunRecord
from goldfinch.results.seeds import Value, by_round
from server.run.history import mean_losses

AVERAGE, WORST = "average over domains", "worst domain"

Points = dict[int, float]
"""A number for each round."""

Curves = dict[str, Points]
"""Curves by name."""


def over_seeds(runs: Sequence[RunRecord], curves: Callable[[RunRecord], Curves]) -> dict[str, dict[int, Value]]:
    """Return mean and deviation of each curve in the rounds that every run has.

    A later round of some of the runs, after an average over all, would be a step between two quantities.

    Args:
        runs: one run per seed.
        curves: the curves of a run, such as :func:`accuracy_curves`.
    """
    found: list[Curves] = []
    names: dict[str, None] = {}
    for run in runs:
        found.append(curves(run))
        names |= dict.fromkeys(found[-1])
    return {name: by_round([each.get(name, {}) for each in found]) for name in names}


def accuracy_curves(run: RunRecord) -> Curves:
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


def loss_curves(run: RunRecord) -> Curves:
    """Return test loss: average over domains, and each domain, averaged over the clients that scored it."""
    losses: dict[str, dict[int, list[float]]] = {}
    for row in run.test_lines:
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


def train_losses(run: RunRecord) -> Curves:
    """Return each loss term's mean over clients, weighted by their samples."""
    rows: dict[int, list[Mapping[str, Any]]] = {}
    for row in run.replies:
        rows.setdefault(int(row["round"]), []).append(row)
    found: Curves = {}
    for number in sorted(rows):
        for term, mean in mean_losses(rows[number]).items():
            found.setdefault(term.replace("_", " "), {})[number] = mean
    return found


def cost_curves(run: RunRecord) -> Curves:
    """Return megabytes down and up, and seconds, by round."""
    found: Curves = {"MB down a round": {}, "MB up a round": {}, "seconds a round": {}}
    for row in run.replies:
        number = int(row["round"])
        if number <= run.facts.latest:  # the exchange after the last round only scores
            for direction in ("down", "up"):
                points = found[f"MB {direction} a round"]
                points[number] = points.get(number, 0.0) + row.get(f"bytes_{direction}", 0) / 1e6
    for entry in run.events:
        if entry["event"] == "round done":
            found["seconds a round"][int(entry["round"])] = float(entry["seconds"])
    return found
