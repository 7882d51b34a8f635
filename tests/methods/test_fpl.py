"""FPL's fused loss is the sum of its two terms, in value and gradient, whichever of them are on."""

from __future__ import annotations

import pytest
import torch
from support.halves import FEATURES, LossSide

from common.losses import cross_entropy, prototype_contrast, prototype_mse
from common.prototypes import PrototypeSet, unbiased_prototypes
from strategies.core.method import Batch
from strategies.fpl import FPL

DRAWS = torch.Generator().manual_seed(5)
LABELS = torch.tensor([0, 1, 2, 1, 0, 2])
LOGITS = torch.rand(6, 3, generator=DRAWS)
MEMBERS = torch.tensor([3.0, 1, 1, 2, 2])
ROWS = PrototypeSet(torch.rand(5, FEATURES, generator=DRAWS), torch.tensor([0, 0, 0, 1, 1]), MEMBERS)
MEANS = unbiased_prototypes(ROWS, sample_weighted=True)
READINGS = {
    "as published": ({}, ROWS, unbiased_prototypes(ROWS)),
    "contrast with global means": ({"clusters": "global"}, MEANS, unbiased_prototypes(ROWS)),
    "to global means": ({"target": "global"}, ROWS, MEANS),
}


@pytest.mark.parametrize(("contrast", "consistency"), [(2.0, 3.0), (2.0, 0.0), (0.0, 3.0), (0.0, 0.0)])
@pytest.mark.parametrize("reading", READINGS)
def test_the_loss_is_the_sum_of_its_terms(contrast, consistency, reading):
    options, rows, targets = READINGS[reading]
    method = FPL(contrast=contrast, consistency=consistency, **options)
    features = torch.rand(6, FEATURES, generator=DRAWS).requires_grad_()
    found = method.loss(Batch(torch.zeros(6, 3, 1, 1), LABELS, features, LOGITS), LossSide(ROWS))
    parts = [
        cross_entropy(LOGITS, LABELS),
        contrast * prototype_contrast(features, LABELS, rows, temperature=0.02),
        consistency * prototype_mse(features, LABELS, targets),
    ]
    torch.testing.assert_close(found.total, sum(parts))
    torch.testing.assert_close(sum(found.terms.values()), found.total)
    if contrast or consistency:
        torch.testing.assert_close(found.terms["contrast"], parts[1])
        torch.testing.assert_close(found.terms["consistency"], parts[2])
        torch.testing.assert_close(
            torch.autograd.grad(found.total, features)[0], torch.autograd.grad(sum(parts), features)[0]
        )


def test_before_there_are_prototypes_the_loss_is_the_cross_entropy():
    batch = Batch(torch.zeros(6, 3, 1, 1), LABELS, torch.zeros(6, FEATURES), LOGITS)
    assert set(FPL().loss(batch, LossSide(PrototypeSet.empty(FEATURES))).terms) == {"cross_entropy"}
