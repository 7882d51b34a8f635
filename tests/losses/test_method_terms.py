"""The prototype terms of the methods against the losses in loops: each with its own weights, options and rows."""

from __future__ import annotations

from typing import NamedTuple

import loss_oracles as oracle
import pytest
import torch
from support.halves import FEATURES, LossSide

from common.losses import PrototypeTerms
from common.prototypes import PrototypeSet, unbiased_prototypes
from strategies.core.method import Batch, Method
from strategies.fedapc import FedAPC
from strategies.fedpall import FedPall
from strategies.fedplcc import FedPLCC
from strategies.fedplvm import FedPLVM
from strategies.fedproto import FedProto
from strategies.fpl import FPL
from strategies.i2pfl import I2PFL

DRAWS = torch.Generator().manual_seed(5)
LABELS = torch.tensor([0, 1, 2, 1, 0, 2])
"""Class 2 has no row: its samples add nothing and still count."""
LOGITS = torch.rand(6, 3, generator=DRAWS, dtype=torch.float64)
SHARES = torch.tensor([0.2, 0.5, 0.3, 0.9, 0.1])
ROWS = PrototypeSet(torch.rand(5, FEATURES, generator=DRAWS), torch.tensor([0, 0, 0, 1, 1]), SHARES)
MEANS = unbiased_prototypes(ROWS)
WEIGHTED = unbiased_prototypes(ROWS, sample_weighted=True)

SHARED = {"temperature": 0.5, "contrast": 2.0}
FPL_TERMS = PrototypeTerms(**SHARED, mse=3)
FEDPLVM_TERMS = PrototypeTerms(contrast=7, cosine_square=3, temperature=0.07, alpha=0.25)
CLUSTERED = {"contrast": 2.0, "correction": 5.0, "alpha": 0.25, "temperature": 0.5}


def fedplcc_terms(**options):
    return PrototypeTerms(contrast=2, alignment=5, alpha=0.25, temperature=0.5, **options)


class Case(NamedTuple):
    """A method, what it adds to the cross-entropy, what it contrasts with, its targets, and what the server sent."""

    method: Method
    terms: PrototypeTerms
    rows: PrototypeSet = ROWS
    targets: PrototypeSet = MEANS
    sent: PrototypeSet = ROWS


CASES = {
    "fpl": Case(FPL(**SHARED, consistency=3), FPL_TERMS),
    "fpl, contrast alone": Case(FPL(**SHARED, consistency=0), PrototypeTerms(**SHARED)),
    "fpl, consistency alone": Case(FPL(contrast=0, consistency=3), PrototypeTerms(mse=3)),
    "fpl, neither": Case(FPL(contrast=0, consistency=0), PrototypeTerms()),
    "fpl, contrast of means": Case(FPL(**SHARED, consistency=3, clusters="global"), FPL_TERMS, rows=WEIGHTED),
    "fpl, global targets": Case(FPL(**SHARED, consistency=3, target="global"), FPL_TERMS, targets=WEIGHTED),
    "fedproto": Case(FedProto(consistency=3), PrototypeTerms(mse=3), sent=MEANS),
    "fedapc": Case(FedAPC(**SHARED), PrototypeTerms(**SHARED)),
    "i2pfl": Case(I2PFL(**SHARED, alignment=0), PrototypeTerms(**SHARED)),
    "fedpall": Case(FedPall(**SHARED, divergence=0), PrototypeTerms(**SHARED, denominator_rows="raw")),
    "fedpall, printed": Case(
        FedPall(**SHARED, divergence=0, fidelity="paper"), PrototypeTerms(**SHARED, denominator="negatives")
    ),
    "fedplvm": Case(FedPLVM(contrast=7, correction=3), FEDPLVM_TERMS),
    "fedplcc": Case(FedPLCC(**CLUSTERED), fedplcc_terms(fraction=0.5, weighted=True)),
    "fedplcc, all rows": Case(FedPLCC(**CLUSTERED, fraction=1), fedplcc_terms(weighted=True)),
    "fedplcc, a third": Case(FedPLCC(**CLUSTERED, fraction=1 / 3), fedplcc_terms(fraction=1 / 3, weighted=True)),
    "fedplcc, unweighted": Case(FedPLCC(**CLUSTERED, weighted=False), fedplcc_terms(fraction=0.5)),
}


@pytest.mark.parametrize("case", CASES)
def test_terms_are_the_printed_ones_in_value_and_gradient(case):
    method, terms, rows, targets, sent = CASES[case]
    features = torch.rand(6, FEATURES, generator=DRAWS, dtype=torch.float64).requires_grad_()
    found = method.loss(Batch(torch.zeros(6, 3, 1, 1), LABELS, features, LOGITS), LossSide(sent))
    added = found.total - oracle.cross_entropy(LOGITS, LABELS, 0.0)
    wanted, gradient = oracle.value_and_gradient(
        lambda z: oracle.combined(z, LABELS, rows, terms, class_rows=targets), features
    )
    torch.testing.assert_close(added, wanted, rtol=1e-9, atol=1e-11)
    ours = torch.autograd.grad(added + 0 * features.sum(), features)[0]
    torch.testing.assert_close(ours, gradient, rtol=1e-7, atol=1e-9)
    reported = [value.item() for name, value in found.terms.items() if name != "cross_entropy" and value != 0]
    parts = oracle.prototype_terms(features, LABELS, rows, terms, targets)
    assert reported == pytest.approx([part.item() for part in parts if part != 0], rel=1e-9)
