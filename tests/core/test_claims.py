"""What one hostile device may claim: each claim is bounded by what an honest one could have done."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.halves import COUNTER, FEATURES, Half, model_state
from support.runs import TouchedEngine, run
from support.toy import toy_settings

from common.errors import PayloadError
from common.prototypes import PrototypeSet, cluster_prototypes
from common.wire.messages import Request
from common.wire.payload import Payload
from strategies.core.aggregation import average
from strategies.core.gate import MOST_CLASS_ROWS, MOST_PASSES, MOST_ROWS, Gate
from strategies.core.method import Client, Expected

# ---- prototypes ------------------------------------------------------------------------------------------------------


def rows(counts: Sequence[int], features: int = FEATURES) -> PrototypeSet:
    """So many random prototypes of each class, each of one sample."""
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    draws = torch.Generator().manual_seed(0)
    return PrototypeSet(torch.randn(len(labels), features, generator=draws), labels, torch.ones(len(labels)))


def admit_rows(sent: PrototypeSet, classes: int, most_rows: int | None = None) -> PrototypeSet:
    gate = Gate(Expected(prototypes=True, most_rows=most_rows), Half(class_count=classes))
    return gate._check_prototypes(sent, Client("ward-0", "ward", 10**6 * classes, (10**6,) * classes))


def test_a_client_sends_no_more_rows_than_the_server_can_cluster() -> None:
    """However many samples it registered."""
    assert len(admit_rows(rows([MOST_CLASS_ROWS, 1, 1]), 3)) == MOST_CLASS_ROWS + 2
    with pytest.raises(PayloadError, match=f"{MOST_CLASS_ROWS + 1} prototypes of class 1; at most {MOST_CLASS_ROWS}"):
        admit_rows(rows([1, MOST_CLASS_ROWS + 1, 1]), 3)
    many = MOST_ROWS // 1000 + 1
    with pytest.raises(PayloadError, match=f"{many * 1000} prototypes came; at most {MOST_ROWS}"):
        admit_rows(rows([1000] * many), many)
    with pytest.raises(PayloadError, match="2 prototypes of class 1; at most 1 can be"):
        admit_rows(rows([1, 2, 1]), 3, most_rows=1)


def test_as_many_rows_of_a_class_as_are_let_in_are_clustered_in_time() -> None:
    sent = rows([MOST_CLASS_ROWS], 128)
    cluster_prototypes(rows([10], 128))  # the first one compiles
    started = time.process_time()
    cluster_prototypes(sent)
    assert time.process_time() - started < 5


# ---- counters --------------------------------------------------------------------------------------------------------

ENDLESS = 2**63 - 1


@pytest.mark.parametrize(
    ("counts", "result"), [([ENDLESS, 5, 7], 7), ([9, 4, 6, 5], 5), ([ENDLESS, 3], 3), ([8], 8)], ids=str
)
def test_a_counter_of_the_average_is_the_lower_median(counts: list[int], result: int) -> None:
    found = average([{"w": torch.ones(1), COUNTER: torch.tensor(count)} for count in counts], [1] * len(counts))
    assert found[COUNTER].item() == result
    assert found[COUNTER].dtype == torch.int64


def test_a_counter_counts_no_more_than_the_rounds_so_far_could() -> None:
    """From 4 in the initial state, by at most the passes of the largest client's 30 samples."""
    half = Half(round=3)
    half.train = replace(half.train, epochs=2)
    gate, most = Gate(Expected(), half), 4 + 3 * 2 * 30 * MOST_PASSES
    gate._check_model(model_state("client") | {COUNTER: torch.tensor(most)})
    for claim in (most + 1, ENDLESS):
        with pytest.raises(PayloadError, match=f"{COUNTER} is {claim}; 3 rounds cannot count so far"):
            gate._check_model(model_state("client") | {COUNTER: torch.tensor(claim)})


def test_a_counter_that_ran_away_does_not_end_the_run(tmp_path: Path) -> None:
    """The first client's, which was once what all others got."""

    def edit(request: Request, payload: Payload) -> Payload:
        if request.client != "bright-0" or not request.train:
            return payload
        ended = {name: torch.full_like(tensor, ENDLESS) for name, tensor in payload.weights.items() if not tensor.ndim}
        assert ended
        return replace(payload, weights={**payload.weights, **ended})

    settings = toy_settings("fedavg", tmp_path, train={"rounds": 3})
    done = run(settings, TouchedEngine(settings, edit=edit))
    status = [(row["client"], row["status"]) for row in done.rows("activity.csv") if row["status"] != "scored"]
    assert {client for client, word in status if word == "refused"} == {"bright-0"}
    assert sum(word in ("trained", "clipped") for _, word in status) == 6
