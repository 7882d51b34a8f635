"""What one hostile device may claim: each claim is bounded by what an honest one could have done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.exchanges import registration
from support.halves import COUNTER, FEATURES, Half, clients, model_state, updates
from support.runs import TouchedEngine, run
from support.toy import toy_settings

from common import prototypes as finch
from common.errors import PayloadError
from common.prototypes import PrototypeSet, cluster_prototypes
from common.wire.messages import Request
from common.wire.payload import Payload
from strategies.adcol import owners_of
from strategies.core import gate
from strategies.core.aggregation import average, cap_samples, sample_limit
from strategies.core.federation import Federation
from strategies.core.gate import MAX_CLASS_ROWS, MAX_CLUSTERED, MAX_PASSES, MAX_ROWS, Gate
from strategies.core.method import Client, UploadSpec
from strategies.parts.server_nets import sent_rows

# ---- prototypes ------------------------------------------------------------------------------------------------------


def rows(counts: Sequence[int], features: int = FEATURES) -> PrototypeSet:
    """Random prototypes, ``counts[k]`` of class k, each of one sample."""
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    draws = torch.Generator().manual_seed(0)
    return PrototypeSet(torch.randn(len(labels), features, generator=draws), labels, torch.ones(len(labels)))


def admit_rows(sent: PrototypeSet, classes: int, max_rows: int | None = None, asked: int = 1) -> PrototypeSet:
    made = Gate(
        UploadSpec(prototypes=True, max_rows=max_rows),
        Half(class_count=classes, feature_size=sent.feature_size),
        asked,
    )
    return made._check_prototypes(sent, Client("ward-0", "ward", 10**6 * classes, (10**6,) * classes))


def test_a_client_sends_no_more_rows_than_the_server_can_cluster() -> None:
    """However many samples it registered."""
    assert len(admit_rows(rows([MAX_CLASS_ROWS, 1, 1]), 3)) == MAX_CLASS_ROWS + 2
    with pytest.raises(PayloadError, match=f"{MAX_CLASS_ROWS + 1} prototypes of class 1; at most {MAX_CLASS_ROWS}"):
        admit_rows(rows([1, MAX_CLASS_ROWS + 1, 1]), 3)
    many = MAX_ROWS // 1000 + 1
    with pytest.raises(PayloadError, match=f"{many * 1000} prototypes; at most {MAX_ROWS}"):
        admit_rows(rows([1000] * many), many)
    with pytest.raises(PayloadError, match="2 prototypes of class 1; at most 1 "):
        admit_rows(rows([1, 2, 1]), 3, max_rows=1)


@pytest.mark.parametrize(("asked", "most"), [(5, 2000), (20, 500), (1000, 10), (50_000, 1)])
def test_many_clients_share_what_is_clustered_of_a_class(asked: int, most: int) -> None:
    """And each may send one of each of DomainNet's 345 classes, as most methods do."""
    assert len(admit_rows(rows([most, 0, 0]), 3, asked=asked)) == most
    assert len(admit_rows(rows([1] * 345), 345, asked=asked)) == 345
    with pytest.raises(PayloadError, match=f"at most {most} are accepted from each of {asked} clients"):
        admit_rows(rows([most + 1, 0, 0]), 3, asked=asked)


@pytest.mark.parametrize(("features", "asked", "classes"), [(4, 5, 10), (512, 5, 10), (512, 10, 10), (2048, 5, 2)])
def test_what_is_clustered_in_all_is_bounded_by_the_pairs_that_are_compared(
    features: int, asked: int, classes: int
) -> None:
    most = min(MAX_CLASS_ROWS, MAX_CLUSTERED // asked)
    assert len(admit_rows(rows([most] * classes, features), classes, asked=asked)) == most * classes
    with pytest.raises(PayloadError, match=rf"pairs; at most \d+ from each|at most {MAX_ROWS}"):
        admit_rows(rows([most] * (classes + 1), features), classes + 1, asked=asked)


def test_the_server_compares_no_more_pairs_than_it_lets_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight clients send all that passes the gate, in one class or in several; counted is what FINCH compares."""
    monkeypatch.setattr(gate, "MAX_PAIRS", 20_000)
    pairs: list[int] = []
    nearest = finch.first_neighbours

    def counting(points: torch.Tensor) -> torch.Tensor:
        pairs.append(len(points) ** 2)
        return nearest(points)

    monkeypatch.setattr(finch, "first_neighbours", counting)

    def admitted(counts: list[int]) -> bool:
        try:
            admit_rows(rows(counts), 3, asked=8)
        except PayloadError:
            return False
        return True

    for classes in (1, 3):
        most = max(count for count in range(1, 50) if admitted([count] * classes))
        pairs.clear()
        cluster_prototypes(PrototypeSet.concatenate([rows([most] * classes)] * 8), clustering="torch")
        assert 15_000 < sum(pairs) <= 20_000 * 4 / 3  # each level has at most half as many rows as the one before


def test_the_rows_of_a_run_are_shared_by_those_who_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MAX_CLUSTERED", 12)

    def edit(request: Request, payload: Payload) -> Payload:
        if request.client != "bright-0" or not request.train:
            return payload
        vectors = torch.randn(5, payload.prototypes.feature_size) if payload.prototypes else torch.zeros(0)
        return replace(payload, prototypes=PrototypeSet(vectors, torch.zeros(5, dtype=torch.int64), torch.ones(5)))

    settings = toy_settings("fedplvm", tmp_path, train={"rounds": 1})
    done = run(settings, TouchedEngine(settings, edit=edit))
    refused = {row["client"]: row["reason"] for row in done.replies() if row["status"] == "refused"}
    assert list(refused) == ["bright-0"]
    assert "5 prototypes of class 0; at most 4" in refused["bright-0"]


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
    made, most = Gate(UploadSpec(), half), 4 + 3 * 2 * 30 * MAX_PASSES
    made._check_model(model_state("client") | {COUNTER: torch.tensor(most)})
    for claim in (most + 1, ENDLESS):
        with pytest.raises(PayloadError, match=f"{COUNTER} is {claim}, which 3 rounds"):
            made._check_model(model_state("client") | {COUNTER: torch.tensor(claim)})


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
    status = [(row["client"], row["status"]) for row in done.replies() if row["status"] != "scored"]
    assert {client for client, word in status if word == "refused"} == {"bright-0"}
    assert sum(word in ("trained", "scaled") for _, word in status) == 6


# ---- samples ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(2, 10**9), min_size=1, max_size=8), st.floats(0.01, 1.0))
def test_the_cap_is_the_largest_that_keeps_every_client_within_the_share(samples: list[int], share: float) -> None:
    most = sample_limit(samples, share)
    capped = [min(count, most) for count in samples]
    if share * len(samples) < 1:  # impossible: the shares would not sum to one
        assert set(capped) == {min(samples)}
        return
    assert max(capped) <= share * sum(capped) * (1 + 1e-9) or max(capped) == min(samples)
    if max(samples) > most * 1.01:
        more = [min(count, most * 1.01) for count in samples]
        assert max(more) > share * sum(more)


LIMITED = {"largest_client": 10.0, "largest_share": 0.5}


def federation(tmp_path: Path, sizes: Mapping[str, int], **rounds: float) -> tuple[Federation, list[str]]:
    """Return a federation of clients with these numbers of samples, and why the others were refused."""
    settings = toy_settings("fpl", tmp_path, rounds=rounds)
    made = Federation(settings)
    reasons = []
    for client, size in sizes.items():
        reasons.append(made.registry.admit(registration(settings, client, samples=size, class_counts=[size, 0, 0, 0])))
    return made, [reason for reason in reasons if reason]


def test_by_default_every_client_counts_for_all_of_its_samples(tmp_path: Path) -> None:
    sizes = {"bright-0": 43, "dark-0": 28, "noisy-0": 1920}
    made, reasons = federation(tmp_path, sizes)
    assert not reasons
    made.begin(1, "train")
    assert [client.samples for client in made.server.clients] == list(sizes.values())
    sent = []
    for update, client in zip(updates(), made.registry.clients(), strict=True):
        sent.append(replace(update, client=client))
    found = cap_samples(sent, made.server.clients, made.settings.rounds.largest_share)
    assert all(one is other for one, other in zip(found, sent, strict=True))


def test_with_limits_a_liar_about_samples_has_no_more_than_half_of_the_average(tmp_path: Path) -> None:
    """Nine million samples count as ten times the median, 250, and of the sum no more than the others together: 42."""
    liar = 9_000_000
    made, reasons = federation(tmp_path, {"bright-0": 25, "dark-0": liar, "noisy-0": 17}, **LIMITED)
    assert not reasons
    made.begin(1, "train")
    assert [client.samples for client in made.server.clients] == [25, 250, 17]
    mass = PrototypeSet(torch.ones(1, FEATURES), torch.tensor([0]), torch.tensor([float(liar)]))
    sent = [
        replace(update, client=client, prototypes=mass)
        for update, client in zip(updates(), made.registry.clients(), strict=True)
    ]
    found = cap_samples(sent, made.server.clients, made.settings.rounds.largest_share)
    assert [update.samples for update in found] == [25, 42, 17]
    assert found[1].prototypes.weights.item() == pytest.approx(42)
    weights = made.server.aggregation.average(found)["layer.weight"]
    shares = zip([25, 42, 17], sent, strict=True)
    assert torch.allclose(weights, sum(share * update.weights["layer.weight"] for share, update in shares) / 84)


def test_of_two_clients_neither_is_limited_by_a_share() -> None:
    """Two have no majority."""
    pair = updates(who=(0, 1))
    assert cap_samples(pair, clients(), 0.5) == pair
    assert len({update.samples for update in cap_samples(updates(), clients(), 0.34)}) < len(clients())


def test_an_honest_client_that_counts_for_fewer_samples_is_not_refused(tmp_path: Path) -> None:
    """It repeats what it registered, not what it counts for."""
    done = run(toy_settings("fedavg", tmp_path, rounds={"largest_client": 1.0}))
    assert "client counts less" in [name for name, _ in done.events]
    assert {row["status"] for row in done.replies()} == {"trained", "scored"}


def test_a_liar_about_samples_gives_the_servers_nets_no_more_rows_than_it_counts_for() -> None:
    """Its rows are taken evenly, since those of a class may lie together; of an honest client all are, in order."""
    tables = {index: {"features": torch.arange(size * 1.0)[:, None]} for index, size in enumerate((10, 30, 20))}
    sent = updates(extra=tables)
    assert torch.equal(sent_rows(sent, "features"), torch.cat([tables[index]["features"] for index in range(3)]))
    found = cap_samples(sent, clients(), 0.4)
    assert [update.samples for update in found] == [10, 20, 20]
    assert sent_rows(found[1:2], "features").flatten().tolist() == [index * 30 // 20 for index in range(20)]
    assert owners_of(found).tolist() == [0] * 10 + [1] * 20 + [2] * 20


def test_a_billion_samples_are_not_registered(tmp_path: Path) -> None:
    _, reasons = federation(tmp_path, {"bright-0": 10**9, "dark-0": 25})
    assert len(reasons) == 1
    assert "1000000000 samples; rounds.max_samples=" in reasons[0]


def test_a_client_that_counts_less_is_reported_once(tmp_path: Path) -> None:
    done = run(toy_settings("fpl", tmp_path, rounds={"largest_share": 0.34}))
    told = [entry for name, entry in done.events if name == "client counts less"]
    assert [entry["client"] for entry in told] == ["bright-0", "dark-0"]
    assert "of 25 samples (rounds.largest_client, rounds.largest_share)" in told[0]["reason"]
