"""``summary.json``: the results of a run, for programs outside Goldfinch, repeated from the run's other files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.metrics import RoundScore, best_round, states
from common.run_config import CLASS_NAMES, attack_text
from common.scores import RunScores, test_images
from server.run.files import RunFiles
from server.run.measures import described, resolutions_of

SUMMARY = "summary.json"
"""The file's name."""


def summary_of(files: RunFiles) -> dict[str, Any]:
    """Return the content of ``summary.json``; empty if the run has not ended. Accuracies are in per cent.

    A run that never held a round has no ``scores``. If the last state could not be scored, there is no score by the
    rule ``final``. ``average``, ``worst`` and ``spread`` are ``null`` in both cases. ``stopped_early`` is there only if
    ``train.patience`` ended the run before its last round. ``missing`` has the domains that the final score lacks, with
    the last round that scored each; ``partial`` is whether there are any. ``images`` has the test images of
    each domain. ``joined_batches`` has the clients whose last batch of one sample joined the one before it, if there
    are any (:mod:`strategies.core.last_batch`).
    """
    facts, end, totals = files.facts, files.facts.end, files.reply_totals
    if end is None:
        return {}
    scores, rules = files.scores_by(), files.rules_by()
    final = rules.get("final", {})
    content: dict[str, Any] = {
        "method": facts.method,
        "data": facts.data,
        CLASS_NAMES: list(files.class_names),
        "protocol": facts.protocol,
        "model": facts.model,
        "seed": facts.seed,
        "key": end.key,
        "identity": facts.identity,
        "scoring": facts.scoring,
        "code": facts.code,
        "configuration": facts.configuration,
        "rounds": end.round,
        "rounds_held": facts.held,
        "rounds_skipped": len(facts.skipped),
        "stopped_early": _early_stop(facts.early_stop),
        "answers": dict(totals.answers),
        "scored": facts.scored,
        "bound": facts.bound,
        "attack": attack_text(files.config),
        "accuracy": final.get("accuracy", {}),
        "average": final.get("average"),
        "worst": final.get("worst"),
        "spread": final.get("spread"),
        "missing": final.get("missing", {}),
        "partial": bool(final.get("missing")),
        "unseen": list(facts.unseen),
        "scores": rules,
        "images": test_images(scores.lines),
        "validation": _validation(scores),
        "metrics": _further(scores, files),
        "state_sha256": end.sha256,
        "bytes": totals.bytes,
        "bytes_by_part": {direction: dict(parts) for direction, parts in totals.parts.items()},
        "privacy": end.privacy,
        "wall_seconds": end.seconds,
        "server_peak_bytes": end.server_peak_bytes,
        "clients": facts.samples,
        "counts_less": dict(facts.counts_less),
        "joined_batches": end.joined_batches,
        "splits": facts.splits,
        "processor": dict(facts.processor),
        "versions": dict(facts.versions),
    }
    for name in ("stopped_early", "attack", "validation", "metrics", "privacy", "joined_batches"):
        if not content[name]:
            del content[name]
    return content


def _early_stop(entry: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if entry is None:
        return None
    return {"rounds_planned": entry["rounds"], "patience": entry["patience"], "best_round": entry["best"]}


def _validation(scores: RunScores) -> dict[str, Any] | None:
    """Return the round that is best on validation samples; ``None`` without such."""
    best: RoundScore | None = best_round(states(scores.validated(), scores.skipped))
    if best is None:
        return None
    content = {"round": best.round, "average": best.average, "missing": dict(best.missing)}
    if scores.chosen_by != "accuracy":
        content["metric"] = scores.chosen_by
    return content


def _further(scores: RunScores, files: RunFiles) -> dict[str, Any]:
    """Return the values of ``rounds.scores`` and ``own_metric`` in the last scored round; empty without them."""
    metrics = described(files.facts.further)
    if not metrics:
        return {}
    accuracies = scores.tested()
    resolutions: dict[str, float] = {}
    if accuracies:
        resolutions = resolutions_of(scores.events, accuracies[-1].round)
    for metric, entry in metrics.items():
        entry |= {"domains": {}, "average": None, "worst": None}
        by_round = scores.tested(metric)
        if by_round and by_round[-1].round == accuracies[-1].round:
            score = by_round[-1]
            entry |= {"domains": dict(score.accuracy), "average": score.average, "worst": score.worst}
            entry["missing"] = dict(score.missing)
            if metric in resolutions:
                entry["resolution"] = resolutions[metric]
    return metrics
