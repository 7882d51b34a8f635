"""A metric of the user's own: devices count sums, the server adds them up and computes the metric."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from common.config import checked
from common.errors import ConfigError, PayloadError
from common.metrics import CONFIDENCE_MEASURES, METRICS, Measure

if TYPE_CHECKING:
    from torch import Tensor

MAX_SUMS = 50
"""Most sums of a metric, which is also the most entries of a mapping in a message."""

MAX_MEASURES = 20
"""Most values of a metric."""

NAME = re.compile(r"[a-z][a-z0-9_]{0,49}")
"""How sums and values are named: they become columns and parts of settings."""

TAKEN = frozenset(
    {*METRICS, *CONFIDENCE_MEASURES, "round", "client", "client_domain", "domain", "scored_on", "count", "correct"}
    | {"loss", "average", "worst", "spread", "validation"}
)
"""Names of the metrics that exist, and of the columns of tables."""


ROUNDING = 1e-5
"""Share of a limit by which a sum may exceed it, because floating-point sums are rounded."""


SPLIT = 1e-4
"""How far, relatively or absolutely, a sum may be from that of the same images in two batches, in rounding alone."""


TRIED = 2
"""Images of each class on which a metric is tried; the probabilities of each are drawn, the same in every trial."""


@dataclass(frozen=True)
class SumRange:
    """What one image can add to a sum. The server refuses a reply with a sum beyond that.

    Args:
        low: the least, finite.
        high: the most, finite, >= ``low``.
        whole: whether the sum is a whole number, as a count is.
    """

    low: float = 0.0
    high: float = 1.0
    whole: bool = False

    def mistake(self, value: float, count: int) -> str:
        """Return why ``value`` cannot be the sum over ``count`` images; empty if it can."""
        least, most = self.low * count, self.high * count
        tolerance = ROUNDING * max(abs(least), abs(most))
        if not least - tolerance <= value <= most + tolerance:
            return f"it is {value:g} over {count} images, and each adds {self.low:g} to {self.high:g}"
        if self.whole and not float(value).is_integer():
            return f"it is {value:g}, and it must be a whole number"
        return ""


@checked
class OwnMetric:
    """The base of a metric of the user's own. See docs/add-a-metric.md.

    A device calls :meth:`sums` for each batch of images that it scores, and sends the sums over the batches. The server
    adds the sums of all clients that scored a domain and calls :meth:`values` with the result. So a metric is that of
    all images together, whichever clients hold them, as long as it is a function of sums over images.

    Attributes:
        sum_names: the names that :meth:`sums` returns, 1 to 50.
        sum_ranges: what one image can add to a sum, by its name; a sum without an entry has 0 to 1, as counts of images
            and probabilities do.
        measures: what :meth:`values` returns, by name: a label, a unit, and whether lower is better.
    """

    sum_names: ClassVar[tuple[str, ...]] = ()
    sum_ranges: ClassVar[Mapping[str, SumRange]] = {}
    measures: ClassVar[Mapping[str, Measure]] = {}

    def ranges(self) -> dict[str, SumRange]:
        """Return what one image can add to each sum, by the names in :attr:`sum_names`."""
        return {name: self.sum_ranges.get(name, SumRange()) for name in self.sum_names}

    def sums(self, probabilities: Tensor, labels: Tensor) -> Mapping[str, float | Tensor]:
        """Return the sums of a batch, by the names in :attr:`sum_names`; finite numbers, or tensors of one element.

        Args:
            probabilities: float32 ``[N, K]``, the probability of each class for each image.
            labels: int64 ``[N]``, the true classes.
        """
        raise NotImplementedError

    def values(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        """Return the values by the names in :attr:`measures`. One that is not defined is left out, or ``None``.

        Args:
            sums: the sums over all clients that scored a domain, NumPy float64: a division by zero is not an error,
                and a value that is then not finite counts as not defined.
        """
        raise NotImplementedError


@checked
class NoMetric(OwnMetric):
    """No metric of your own: scores are accuracy, loss, and what follows from confusion counts."""


def count_sums(metric: OwnMetric, probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the sums of a batch as floats.

    Raises:
        PayloadError: the metric returned other names than it declares, a value that is not a finite number, or one
            outside the range that it declares.
    """
    returned = dict(metric.sums(probabilities, labels))
    name = type(metric).__name__
    if set(returned) != set(metric.sum_names):
        raise PayloadError(
            f"{name}.sums returned {sorted(returned)}; it declares {sorted(metric.sum_names)} in sum_names"
        )
    sums: dict[str, float] = {}
    for key in metric.sum_names:
        try:
            sums[key] = float(returned[key])
        except (TypeError, ValueError, RuntimeError) as error:
            raise PayloadError(f"{name}.sums: {key} is not a number: {error}") from error
        if not math.isfinite(sums[key]):
            raise PayloadError(f"{name}.sums: {key} is {sums[key]} and must be finite")
        mistake = metric.ranges()[key].mistake(sums[key], len(labels))
        if mistake:
            raise PayloadError(f"{name}.sums: {key}: {mistake}; another range is declared in {name}.sum_ranges")
    return sums


def values_of(metric: OwnMetric, sums: Mapping[str, float]) -> dict[str, float | None]:
    """Return the metric's values; ``None`` for one that is not defined, since it is left out or not finite.

    Raises:
        ConfigError: :meth:`OwnMetric.values` raised another error than one of arithmetic, or returned other names or
            what is no number.
    """
    name = type(metric).__name__
    try:
        with np.errstate(all="ignore"):
            returned = dict(metric.values({key: np.float64(value) for key, value in sums.items()}))
    except ArithmeticError:  # such as a division of Python's own numbers by zero
        returned = {}
    except NotImplementedError as error:
        raise ConfigError(f"{name} does not define values; add it, or correct its spelling") from error
    except ConfigError:  # what it returned is not as declared
        raise
    except Exception as error:
        raise ConfigError(f"{name}.values: {type(error).__name__}: {error}") from error
    unknown = sorted(set(returned) - set(metric.measures))
    if unknown:
        raise ConfigError(f"{name}.values returned {unknown}; it declares {sorted(metric.measures)} in measures")
    values: dict[str, float | None] = {}
    for key in metric.measures:
        value = returned.get(key)
        values[key] = None
        try:
            number = math.nan if value is None else float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{name}.values: {key} is not a number: {error}") from error
        if math.isfinite(number):
            values[key] = number
    return values


def check_own_metric(metric: OwnMetric, class_count: int) -> None:
    """Check a metric's declarations and try it on some images of each class, in one batch and two, before a run begins.

    Raises:
        ConfigError: a declaration is wrong, or the trial failed; the message names what to correct.
    """
    if isinstance(metric, NoMetric):
        return
    name = type(metric).__name__
    for what, names, largest in (
        ("sum_names", list(metric.sum_names), MAX_SUMS),
        ("measures", list(metric.measures), MAX_MEASURES),
    ):
        if not 1 <= len(set(names)) == len(names) <= largest:
            raise ConfigError(f"own_metric: {name}.{what} must have 1 to {largest} different names; got {names}")
        for each in names:
            if not isinstance(each, str) or not NAME.fullmatch(each):
                raise ConfigError(f"own_metric: {name}.{what} has {each!r}; a name is like class_f1")
    for key, limits in metric.sum_ranges.items():
        if key not in metric.sum_names:
            raise ConfigError(f"own_metric: {name}.sum_ranges has {key!r}, which is not in {name}.sum_names")
        if not isinstance(limits, SumRange) or not -math.inf < limits.low <= limits.high < math.inf:
            raise ConfigError(f"own_metric: {name}.sum_ranges[{key!r}] must be a SumRange, low <= high; got {limits}")
    for key, measure in metric.measures.items():
        if key in TAKEN:
            raise ConfigError(f"own_metric: {name}.measures has {key}, which is taken; choose another name")
        if not isinstance(measure, Measure):
            raise ConfigError(f"own_metric: {name}.measures[{key!r}] must be a Measure; got {measure!r:.100}")
    _try(metric, class_count)


def _try(metric: OwnMetric, class_count: int) -> None:
    import torch

    from common.numerics import generator

    labels = torch.arange(class_count).repeat(TRIED)
    draws = torch.randn(len(labels), class_count, generator=generator(0, "trial of a metric"))
    probabilities = draws.softmax(1)
    try:
        sums = count_sums(metric, probabilities, labels)
        values_of(metric, sums)
        _check_adds_up(metric, sums, probabilities, labels)
    except (ConfigError, PayloadError) as error:
        raise ConfigError(f"own_metric: {error}") from error
    except Exception as error:
        raise ConfigError(
            f"own_metric: {type(metric).__name__}.sums fails on {len(labels)} images of {class_count} classes: "
            f"{type(error).__name__}: {error}"
        ) from error


def _check_adds_up(metric: OwnMetric, sums: Mapping[str, float], probabilities: Tensor, labels: Tensor) -> None:
    """Check that the sums of two batches are those of all images, as the server adds them."""
    if len(labels) < 2:
        return
    first = count_sums(metric, probabilities[:1], labels[:1])
    others = count_sums(metric, probabilities[1:], labels[1:])
    for key, whole in sums.items():
        together = first[key] + others[key]
        if not math.isclose(whole, together, rel_tol=SPLIT, abs_tol=SPLIT):
            raise PayloadError(
                f"{type(metric).__name__}.sums: {key} of {len(labels)} images is {whole:g}, and in two batches "
                f"{together:g}; return a sum over images, and divide in values"
            )
