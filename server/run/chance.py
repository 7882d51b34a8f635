"""Whether a model is no better than a guess, and what a run at chance may try."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from common.errors import GoldfinchError
from common.metrics import ClassTotals
from common.settings import RunSettings
from common.text import quantity
from strategies.core.federation import check_combination
from strategies.core.method import build_model

ONE_CLASS = 0.9
"""Share of a domain's test images that are assigned to one class, from which the model counts as collapsed there."""

FEW_STEPS = 200
"""Steps of a client in a whole run, below which more steps are suggested to a run at chance."""


class Chance(NamedTuple):
    """The score of a model that predicts the most frequent class of each domain for all of its images.

    Args:
        average: over domains, in per cent.
        error: the standard error of that average for a model that guesses as often right, in percentage points.
    """

    average: float
    error: float


def chance(counts: Sequence[ClassTotals]) -> Chance:
    """Return the score at chance.

    Args:
        counts: images by class of each domain, at least one domain with at least one image.
    """
    shares: list[float] = []
    variance = 0.0
    for each in counts:
        share = max(each.true) / sum(each.true)
        shares.append(share)
        variance += share * (1 - share) / sum(each.true)
    return Chance(100 * sum(shares) / len(shares), 100 * math.sqrt(variance) / len(shares))


def remedies(settings: RunSettings, steps: int) -> list[str]:
    """Return settings that may help a run at chance and that it lacks, with a reason; the likeliest come first.

    Args:
        settings: the run's settings.
        steps: a client's steps in a round; 0 if they are not known.
    """
    settings_to_try: list[str] = []
    train = settings.train
    if settings.data.augmentation.normalisation == "fixed":
        settings_to_try.append("data.augmentation.normalisation=image (if domains differ in brightness or contrast)")
    longer: list[str] = []
    if train.batch_size > 8 and train.local_steps is None:
        longer.append("train.batch_size=8")
    if train.epochs < 5:
        longer.append("train.epochs=5")
    if 0 < steps * train.rounds < FEW_STEPS and settings.method.trains and longer:
        settings_to_try.append(f"{' '.join(longer)} (a client takes {quantity(steps, 'step')} in a round)")
    if train.optimizer == "sgd" and _is_accepted(settings, train=replace(train, optimizer="adam")):
        settings_to_try.append("train.optimizer=adam train.learning_rate=0.001")
    own_statistics = getattr(settings.method, "refresh_statistics", False)
    if getattr(settings.model, "norm", None) == "batch" and not own_statistics:
        model: Any = settings.model
        if _is_accepted(settings, model=replace(model, norm="group")):
            settings_to_try.append("model.norm=group (batch normalisation's averaged statistics may fit no domain)")
    return settings_to_try


def _is_accepted(settings: RunSettings, **changes: Any) -> bool:
    """Return whether the method, the network and the privacy settings allow a run with these changes."""
    changed = replace(settings, **changes)
    try:
        clients = len(changed.clients)
        check_combination(changed, build_model(changed, clients), clients)
    except GoldfinchError:
        return False
    return True


def one_class(confusion: Sequence[Sequence[int]]) -> tuple[int, float] | None:
    """Return the class that a model assigns nearly every image to, and the share of images, or nothing.

    Args:
        confusion: images by true class (row) and predicted class (column).

    Returns:
        The class and its share of the predictions, at least :data:`ONE_CLASS`; ``None`` if no class has that share, or
        if most of the images are of that class.
    """
    total = 0
    predicted = [0] * len(confusion)
    for row in confusion:
        total += sum(row)
        for label, count in enumerate(row):
            predicted[label] += count
    if not total:
        return None
    label = predicted.index(max(predicted))
    share = predicted[label] / total
    true_share = sum(confusion[label]) / total
    if share < ONE_CLASS or true_share > 0.5:
        return None
    return label, share
