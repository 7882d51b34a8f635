"""Runs with scores, without files: for tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from goldfinch.record import RunRecord
from goldfinch.results.groups import group_runs
from goldfinch.results.rows import ScoreRow
from server.run.files import OWN, SHARED, End, Facts, ReplyTotals

TOTALS = ReplyTotals.of([{"status": "trained", "bytes_up": 1, "bytes_down": 1}])


def scored_run(
    average: float,
    *,
    seed: int = 0,
    method: str = "fpl",
    data: str = "toy",
    domains: tuple[str, str] = ("a", "b"),
    missing: tuple[str, ...] = (),
    settings: Mapping[str, Any] | None = None,
    personal: bool = False,
) -> RunRecord:
    """A run with this average over two domains that differ by two points, and a state of its own.

    Args:
        average: in per cent.
        seed, method, data: as in the run's settings.
        domains: the names of the worse and of the better domain.
        missing: domains without a score.
        settings: further settings by key; runs that differ in them are of two configurations.
        personal: whether each client was scored with its own model.
    """
    accuracy = dict(zip(domains, (average - 1, average + 1), strict=True))
    score = {"average": average, "worst": average - 1, "spread": 1.0, "missing": dict.fromkeys(missing)}
    score["accuracy"] = {name: value for name, value in accuracy.items() if name not in missing}
    facts = Facts(
        method=method,
        data=data,
        protocol="p",
        model="small",
        seed=seed,
        identity="",
        configuration="",
        scoring="",
        planned=2,
        code="unknown",
        scored=OWN if personal else SHARED,
        end=End("finish", 2, f"{method} {average}", 1.0, 1),
    )
    run = RunRecord(Path(f"{method}-{seed}"))
    options = {"method._target_": method, **(settings or {})}
    config = {"seed": seed, "rounds": {}, "choices": {}}
    vars(run).update(options=options, facts=facts, rules={"final": score}, config=config)
    vars(run).update(round_scores=[], score_lines=[], events=[], code_files={}, reply_totals=TOTALS)
    return run


def restate(run: RunRecord, **facts: Any) -> None:
    """Change what a run states of itself; ``rounds`` are those that were done when it ended."""
    known = run.facts
    if "rounds" in facts:
        assert known.end is not None
        facts["end"] = replace(known.end, round=facts.pop("rounds"))
    vars(run)["facts"] = replace(known, **facts)


def all_groups(runs: Sequence[RunRecord]) -> list[ScoreRow[RunRecord]]:
    """The rows of all tables of runs."""
    found: list[ScoreRow[RunRecord]] = []
    for board in group_runs(runs):
        found += board.rows
    return found
