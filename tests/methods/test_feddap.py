"""FedDAP against its formulas: losses in loops over samples and (class, domain), and the fusion on the server."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
import torch
from support.halves import FEATURES, LossSide, elements, run_server, updates

from common.losses import cross_entropy
from common.prototypes import PrototypeSet
from strategies.core.method import Batch, Client
from strategies.feddap import ROW_DOMAINS, FedDAP, domain_number, fusion_shares

LABELS = torch.tensor([0, 1, 2, 1, 0, 2, 3])
LOGITS = torch.rand(7, 4, generator=torch.Generator().manual_seed(1))
OWN = "east"
PLACES = {
    "every class in three domains": [(c, d) for c in range(4) for d in (OWN, "north", "south")],
    "class 3 nowhere, class 2 not at home, class 0 only at home": [(0, OWN), (1, OWN), (1, "north"), (2, "south")],
    "the own domain alone": [(0, OWN), (1, OWN), (2, OWN)],
    "only others": [(0, "north"), (1, "south"), (2, "north")],
}


@dataclass
class Side(LossSide):
    """A device of the domain ``OWN``."""

    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    client: Client = field(default_factory=lambda: Client("east-0", OWN, 7, (2, 2, 2, 1)))


def side_of(places):
    """A device that received a row for each (class, domain), and these rows by place."""
    vectors = torch.rand(len(places), FEATURES, generator=torch.Generator().manual_seed(2)) + 0.05
    labels = torch.tensor([label for label, _ in places], dtype=torch.int64)
    numbers = torch.tensor([domain_number(domain) for _, domain in places], dtype=torch.int64)
    side = Side(PrototypeSet(vectors, labels, torch.ones(len(places))), extra={ROW_DOMAINS: numbers})
    return side, dict(zip(places, vectors.double(), strict=True))


def cosine(left, right):
    return (left * right).sum() / (left * left).sum().sqrt() / (right * right).sum().sqrt()


def expected_terms(features, rows, method):
    """DPA and CPCL as printed, times their weights, in loops over samples."""
    alignment = contrast = features.new_zeros(())
    for z, label in zip(features, LABELS.tolist(), strict=True):
        if (label, OWN) in rows:
            alignment = alignment + 1 - cosine(z, rows[label, OWN])
        every, positive = [], []
        for (c, domain), row in rows.items():
            if domain == OWN:
                continue
            every.append(torch.exp(cosine(z, row) / method.temperature))
            if c == label:
                positive.append(every[-1])
        if positive and len(positive) < len(every):
            contrast = contrast - torch.log(sum(positive) / sum(every))
    count = len(features)
    return method.alignment * alignment / count, method.contrast * contrast / count


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_the_loss_is_the_formula_in_value_and_gradient(places):
    method = FedDAP(alignment=7.0, contrast=3.0)
    side, rows = side_of(places)
    draws = torch.Generator().manual_seed(3)
    features = torch.rand(7, FEATURES, generator=draws, dtype=torch.float64).requires_grad_()
    found = method.loss(Batch(torch.zeros(7, 3, 1, 1), LABELS, features, LOGITS), side).terms
    torch.testing.assert_close(found.pop("cross_entropy"), cross_entropy(LOGITS, LABELS))
    total = found["alignment"] + found["contrast"]
    alignment, contrast = expected_terms(features, rows, method)
    torch.testing.assert_close(found["alignment"], alignment, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found["contrast"], contrast, rtol=1e-9, atol=1e-9)
    gradients = []
    for value in (total, alignment + contrast):
        gradients.append(torch.autograd.grad(value, features, retain_graph=True)[0])
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


# ---- the fusion ------------------------------------------------------------------------------------------------------


def shares_in_loops(members, temperature):
    """The released code's sums, with the cosine of a row to itself."""
    sums = [sum(float(cosine(one, other)) for other in members) for one in members]
    powers = [math.exp((value - max(sums)) / temperature) for value in sums]
    return [value / sum(powers) for value in powers]


@pytest.mark.parametrize("temperature", [0.1, 0.001])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_shares_are_a_softmax_of_summed_cosines(count, temperature):
    members = torch.rand(count, 6, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    found = fusion_shares(members, temperature)
    assert elements(found) == pytest.approx(shares_in_loops(members, temperature), abs=1e-9)


def test_the_clients_of_a_domain_are_fused_at_the_released_temperature():
    members = 1 + 0.05 * torch.rand(5, FEATURES, generator=torch.Generator().manual_seed(0))
    fused = FedDAP().fuse(PrototypeSet(members, torch.zeros(5, dtype=torch.int64), torch.ones(5))).vectors[0]
    shares = torch.tensor(shares_in_loops(members.double(), 0.001), dtype=torch.float64)
    assert 0.1 < float(shares.max()) < 0.9
    torch.testing.assert_close(fused, (shares @ members.double()).float(), rtol=1e-4, atol=0)


def test_rows_of_zero_length_share_alike():
    assert elements(fusion_shares(torch.zeros(3, 8, dtype=torch.float64), 0.001)) == pytest.approx([1 / 3] * 3)


def rows_of(*places):
    """A client's class means: (class, first coordinate)."""
    vectors = torch.tensor([[first, 1.0, 0.0, 0.0] for _, first in places])
    return PrototypeSet(vectors, torch.tensor([label for label, _ in places]), torch.full((len(places),), 2.0))


def in_domains(sent, *domains):
    found = []
    for update, domain in zip(sent, domains, strict=True):
        client = Client(f"{domain}-{update.client.id}", domain, update.client.samples, update.client.class_counts)
        found.append(replace(update, client=client))
    return found


def test_the_server_makes_a_row_for_each_class_and_domain():
    sent = updates(1, prototypes={0: rows_of((0, 1.0), (1, 2.0)), 1: rows_of((0, 3.0)), 2: rows_of((0, 5.0))})
    rounds = [in_domains(sent, "b", "b", "a")]
    state = run_server(FedDAP(), rounds)[-1]
    assert state.prototypes.labels.tolist() == [0, 0, 1]
    places = zip(state.prototypes.labels.tolist(), state.extra[ROW_DOMAINS].tolist(), strict=True)
    by_place = dict(zip(places, state.prototypes.vectors[:, 0].tolist(), strict=True))
    a, b = domain_number("a"), domain_number("b")
    assert by_place == {(0, a): 5.0, (0, b): 2.0, (1, b): 2.0}


def test_a_domain_that_sat_out_loses_its_rows_or_keeps_them():
    first = in_domains(updates(1, prototypes={i: rows_of((0, 1.0 + i)) for i in range(3)}), "a", "b", "c")
    second = in_domains(updates(2, (0, 1), prototypes={0: rows_of((0, 9.0)), 1: rows_of((1, 9.0))}), "a", "b")
    dropped = run_server(FedDAP(), [first, second])[-1]
    assert dropped.prototypes.labels.tolist() == [0, 1]
    kept = run_server(FedDAP(keep_missing=True), [first, second])[-1]
    assert sorted(kept.prototypes.vectors[:, 0].tolist()) == [2.0, 3.0, 9.0, 9.0]
    assert sorted(set(kept.extra[ROW_DOMAINS].tolist())) == sorted(domain_number(domain) for domain in "abc")
    without_rows = in_domains(updates(3), "a", "b", "c")
    assert len(run_server(FedDAP(), [first, without_rows])[-1].prototypes) == 0
