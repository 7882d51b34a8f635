"""What is measured of a federated run: scores per domain, over domains, and over rounds; and memory."""

import math
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RoundScore:
    """Accuracy per domain after a round, in per cent."""

    round: int
    accuracy: Mapping[str, float]

    @property
    def average(self) -> float:
        """Unweighted mean over domains, as every paper's AVG column."""
        return sum(self.accuracy.values()) / len(self.accuracy)

    @property
    def worst(self) -> float:
        """The lowest domain's accuracy."""
        return min(self.accuracy.values())

    @property
    def spread(self) -> float:
        """Standard deviation between domains (population), in percentage points."""
        mean = self.average
        return math.sqrt(sum((value - mean) ** 2 for value in self.accuracy.values()) / len(self.accuracy))


def domain_accuracy(scores: Sequence[tuple[str, int, int]]) -> dict[str, float]:
    """Accuracy in per cent by domain from ``(domain, correct, count)`` entries.

    Several entries for one domain (clients with models of their own) count by accuracy, each client once.
    """
    by_domain: dict[str, list[float]] = {}
    for domain, correct, count in scores:
        by_domain.setdefault(domain, []).append(100.0 * correct / count)
    return {domain: sum(values) / len(values) for domain, values in sorted(by_domain.items())}


def best_round(rounds: Sequence[RoundScore]) -> RoundScore | None:
    """The round of the highest average among those that scored the most domains, the earliest of several."""
    return max(rounds, key=lambda score: (len(score.accuracy), score.average), default=None)


def summarise(
    rounds: Sequence[RoundScore], last: int, validation: Sequence[RoundScore] = ()
) -> dict[str, dict[str, object]]:
    """The run's scores under each rule.

    ``final`` is the last scored round; ``last_n`` the mean of each domain over those of the last ``last`` scored
    rounds that scored it (the FPL, FedAPC rule); ``best_round`` the round of the highest test average, which picks a
    model by its test score, as FedPall's table does, and is named so because it flatters. ``validated`` is the round
    that is best on ``validation`` (:func:`best_round`), scored on test. With it, each rule says the average of the same
    rounds on validation.
    """
    if not rounds:
        return {}
    best = max(rounds, key=lambda score: score.average)
    tail = rounds[-last:]
    mean = {}
    for domain in sorted({domain for score in tail for domain in score.accuracy}):
        values = [score.accuracy[domain] for score in tail if domain in score.accuracy]
        mean[domain] = sum(values) / len(values)
    rules = {"final": rounds[-1], "last_n": RoundScore(rounds[-1].round, mean), "best_round": best}
    if (chosen := best_round(validation)) and (found := [score for score in rounds if score.round == chosen.round]):
        rules["validated"] = found[0]
    held_out = {score.round: score.average for score in validation}
    result: dict[str, dict[str, object]] = {}
    for name, score in rules.items():
        result[name] = {
            "round": score.round,
            "accuracy": dict(score.accuracy),
            "average": score.average,
            "worst": score.worst,
            "spread": score.spread,
        }
        covered = [held_out[each.round] for each in (tail if name == "last_n" else [score]) if each.round in held_out]
        result[name] |= {"validation": sum(covered) / len(covered)} if covered else {}
    result["last_n"]["rounds"] = len(tail)
    return result


def peak_bytes() -> int:
    """Peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
