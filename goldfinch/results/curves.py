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
    curves_of_runs: list[Curves] = []
    names: dict[str, None] = {}
    for run in runs:
        curves_of_runs.append(curves(run))
        names |= dict.fromkeys(curves_of_runs[-1])
    values: dict[str, dict[int, Value]] = {}
    for name in names:
        values[name] = by_round([each.get(name, {}) for each in curves_of_runs])
    return values


def accuracy_curves(run: RunRecord) -> Curves:
    """Return the run's metric in per cent: average, worst domain, and each domain; a partial round has no average."""
    curves: Curves = {AVERAGE: {}, WORST: {}}
    for name in run.domains:
        curves[name] = {}
    for score in run.round_scores:
        if not score.missing:
            curves[AVERAGE][score.round] = score.average
            curves[WORST][score.round] = score.worst
        for name, accuracy in score.accuracy.items():
            curves[name][score.round] = accuracy
    return curves


def loss_curves(run: RunRecord) -> Curves:
    """Return test loss: average over domains, and each domain, averaged over the clients that scored it."""
    losses: dict[str, dict[int, list[float]]] = {}
    for row in run.test_lines:
        rounds = losses.setdefault(str(row["domain"]), {})
        rounds.setdefault(int(row["round"]), []).append(float(row["loss"]))
    curves: Curves = {AVERAGE: {}}
    for name, rounds in losses.items():
        curves[name] = {number: statistics.fmean(values) for number, values in rounds.items()}
    for score in run.round_scores:
        if not score.missing:
            means = [curves[name][score.round] for name in losses if score.round in curves[name]]
            curves[AVERAGE][score.round] = statistics.fmean(means)
    return curves


def train_losses(run: RunRecord) -> Curves:
    """Return each loss term's mean over clients, weighted by their samples."""
    rows: dict[int, list[Mapping[str, Any]]] = {}
    for row in run.replies:
        rows.setdefault(int(row["round"]), []).append(row)
    curves: Curves = {}
    for number in sorted(rows):
        for term, mean in mean_losses(rows[number]).items():
            curves.setdefault(term.replace("_", " "), {})[number] = mean
    return curves


def cost_curves(run: RunRecord) -> Curves:
    """Return megabytes down and up, and seconds, by round."""
    curves: Curves = {"MB down a round": {}, "MB up a round": {}, "seconds a round": {}}
    for row in run.replies:
        number = int(row["round"])
        if number <= run.facts.latest:  # the exchange after the last round only scores
            for direction in ("down", "up"):
                points = curves[f"MB {direction} a round"]
                points[number] = points.get(number, 0.0) + row.get(f"bytes_{direction}", 0) / 1e6
    for entry in run.events:
        if entry["event"] == "round done":
            curves["seconds a round"][int(entry["round"])] = float(entry["seconds"])
    return curves
