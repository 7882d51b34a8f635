"""Filters: what may change accepted updates before they are aggregated, besides the aggregation rule.

A plain run has no filters. :func:`filters_of` returns the filters that the settings ask for, and the filters apply in
this order. The filters of the aggregation rule (:meth:`strategies.core.aggregation.Mean.filters`) apply after them. So
a user adds a filter of their own with an aggregation rule (docs/methods.md).

To add a filter to Goldfinch:

- write a class with the functions of :class:`Filter`;
- add the class to :func:`filters_of`, and its setting to ``RoundSettings``;
- add an entry to ``goldfinch/alterations.yaml``;
- if the filter changes tensors, name it in ``RunSettings.alters_updates``. Methods whose clients keep a correction of
  their own step refuse such a filter.

A filter sees the updates of all participants of an exchange at once. A filter may change an update, but never leaves an
update out: the gate has already refused the replies that are not accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from common.round_settings import RoundSettings
from common.storage import GlobalState, under_prefix, with_prefix
from strategies.core.aggregation import cap_samples
from strategies.core.bounds import Bounds
from strategies.core.context import ServerContext
from strategies.core.exchange import Update, UploadSpec

Factors = dict[str, dict[str, float]]
"""By client id and part of its update, the factor in (0, 1) by which a filter scaled it."""


class Filtered(NamedTuple):
    """What a filter returns.

    Args:
        updates: the updates, by client id as before.
        scaled: what was scaled, and by how much; the client's status is ``scaled`` then.
        why: why it was scaled, for the run's record, such as ``longer than the bound``.
    """

    updates: list[Update]
    scaled: Factors
    why: str = "by a filter"


@runtime_checkable
class Filter(Protocol):
    """Changes accepted updates before they are aggregated."""

    def apply(
        self, updates: Sequence[Update], state: GlobalState, expected: UploadSpec, server: ServerContext
    ) -> Filtered:
        """Return the updates as they count.

        Args:
            updates: of all participants that passed the gate, by client id; none if clients are only asked to score.
            state: the state that the participants were sent.
            expected: what the exchange's uploads carry.
            server: the exchange.
        """

    def memory(self) -> dict[str, Tensor]:
        """Return what the filter remembers from one exchange to the next; a checkpoint keeps it."""

    def remember(self, memory: Mapping[str, Tensor]) -> None:
        """Continue with the memory of a checkpoint; entries of other filters are ignored."""


class LengthBound:
    """Scales updates that are longer than the bound down to it (``rounds.outliers=clip``), see :class:`Bounds`.

    Args:
        factor: the bound as a multiple of the median length, >= 1.
        keep: where a scaled update waits until it is aggregated.
    """

    def __init__(self, factor: float, keep: Callable[[Update], Update]) -> None:
        self.bounds = Bounds(factor)
        self.keep = keep

    def apply(
        self, updates: Sequence[Update], state: GlobalState, expected: UploadSpec, server: ServerContext
    ) -> Filtered:
        """Scale each part that is too long down to its bound."""
        too_long = self.bounds.find(updates, state, expected, server)
        bounded: list[Update] = []
        scaled: Factors = {}
        for update in updates:
            client = update.client.id
            if client not in too_long:
                bounded.append(update)
                continue
            limits: dict[str, float] = {}
            scaled[client] = {}
            for part, excess in too_long[client].items():
                limits[part] = excess.bound
                scaled[client][part] = excess.bound / excess.length
            bounded.append(self.keep(self.bounds.scale(update, state, expected, server, limits)))
        return Filtered(bounded, scaled, "longer than the bound (rounds.outliers=clip)")

    def memory(self) -> dict[str, Tensor]:
        """Return the median lengths of the last exchanges."""
        return with_prefix("bounds/", self.bounds.medians)

    def remember(self, memory: Mapping[str, Tensor]) -> None:
        """Continue with the median lengths of a checkpoint."""
        self.bounds.medians = under_prefix("bounds/", memory)


class SampleLimit:
    """Limits the samples that an update counts for (``rounds.largest_client``, ``rounds.largest_share``).

    ``server.clients`` count for at most ``rounds.largest_client`` already, since methods read their samples, too.

    Args:
        share: largest share of one client in the sum of all samples, in (0, 1].
    """

    def __init__(self, share: float) -> None:
        self.share = share

    def apply(
        self,
        updates: Sequence[Update],
        state: GlobalState,  # noqa: ARG002
        expected: UploadSpec,  # noqa: ARG002
        server: ServerContext,
    ) -> Filtered:
        """Return the updates with the samples that they count for. No tensor of a model is scaled."""
        return Filtered(cap_samples(updates, server.clients, self.share), {})

    def memory(self) -> dict[str, Tensor]:
        """Return nothing: each exchange is limited by itself."""
        return {}

    def remember(self, memory: Mapping[str, Tensor]) -> None:
        """Do nothing."""


def filters_of(rounds: RoundSettings, keep: Callable[[Update], Update]) -> list[Filter]:
    """Return the filters that the rounds' settings ask for, in the order in which they apply; none by default.

    Args:
        rounds: the settings of the rounds.
        keep: where a changed update waits until it is aggregated.
    """
    filters: list[Filter] = []
    if rounds.outliers == "clip":
        filters.append(LengthBound(rounds.outlier_factor, keep))
    if rounds.largest_client is not None or rounds.largest_share < 1:
        filters.append(SampleLimit(rounds.largest_share))
    return filters
