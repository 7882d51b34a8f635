"""Prototype losses against their formulas in loops: value and gradient, in float64, on hand-made inputs."""

import loss_oracles as oracle
import pytest
import torch

from common.losses import PrototypeTerms, prototype_contrast, prototype_losses, prototype_mse
from common.numerics import generator
from common.prototypes import PrototypeSet, class_means, unbiased_prototypes


def rows(labels, size=4, seed=0, positive=False):
    draw = generator(seed, "rows")
    vectors = torch.randn(len(labels), size, generator=draw)
    weights = torch.rand(len(labels), generator=draw) + 0.1
    return PrototypeSet(vectors.abs() if positive else vectors, torch.tensor(labels, dtype=torch.int64), weights)


def batch(labels, size=4, seed=0, positive=False):
    features = torch.randn(len(labels), size, generator=generator(seed, "features"), dtype=torch.float64)
    return (features.abs() if positive else features), torch.tensor(labels)


AXES = PrototypeSet(torch.eye(4) * torch.tensor([1.0, 2.0, 0.5, 3.0]), torch.tensor([0, 0, 1, 2]), torch.ones(4))
PLUS_MINUS = torch.tensor([[1.0, 0, 0, 0], [-1, 0, 0, 0], [0, 1, 0, 0], [1, 1, 0, 0]], dtype=torch.float64)

CASES = {
    # a class with several rows, one with one, and batch labels in no order
    "ordinary": (*batch([0, 2, 1, 0, 2]), rows([0, 0, 1, 2, 2, 2])),
    # post-ReLU features: every cosine is positive
    "positive features": (*batch([0, 2, 1, 0, 2], positive=True), rows([0, 0, 1, 2, 2, 2], positive=True)),
    # labels between, below and above the table's classes have no row
    "absent classes": (*batch([0, 1, 3, 5, 9]), rows([1, 1, 3, 4])),
    # no sample of the batch has a row
    "all absent": (*batch([0, 7]), rows([1, 1, 3])),
    # only one class in the table: no negatives
    "one class": (*batch([2, 2, 1]), rows([2, 2, 2])),
    # one row in all
    "one row": (*batch([0, 1]), rows([0])),
    # a feature of length zero has cosine 0 with every row and no gradient from it
    "zero feature": (torch.tensor([[0.0] * 4, [1, 2, 0, 1]], dtype=torch.float64), torch.tensor([0, 1]), rows([0, 1])),
    # a prototype of length zero has cosine 0 with every feature
    "zero prototype": (
        *batch([0, 1, 2]),
        PrototypeSet(torch.tensor([[0.0] * 4, [1, 0, 2, 1], [0, 3, 1, 0]]), torch.tensor([0, 1, 2]), torch.ones(3)),
    ),
    # cosines exactly 1, 0 and -1
    "aligned, orthogonal, opposite": (PLUS_MINUS, torch.tensor([0, 0, 1, 2]), AXES),
    # equal rows: ties in the ranking
    "duplicate rows": (*batch([0, 1]), PrototypeSet(torch.ones(5, 4), torch.tensor([0, 0, 0, 1, 1]), torch.ones(5))),
    # one sample
    "one sample": (*batch([1]), rows([0, 1, 1])),
    # a row of weight 0 takes part in nothing weighted; class 1 has only such rows
    "zero weights": (
        *batch([0, 1, 2]),
        PrototypeSet(rows([0, 0, 1, 2]).vectors, torch.tensor([0, 0, 1, 2]), torch.tensor([0.0, 2, 0, 1])),
    ),
}

TERMS = {
    "fpl": PrototypeTerms(contrast=1, temperature=0.02),
    "fedproc": PrototypeTerms(contrast=1),
    "fedplvm": PrototypeTerms(contrast=1, temperature=0.07, alpha=0.25),
    "fedplcc": PrototypeTerms(contrast=1, temperature=0.07, alpha=0.5, weighted=True),
    "fedpall": PrototypeTerms(contrast=1, temperature=3.0),
    "fedpall as printed": PrototypeTerms(contrast=1, temperature=3.0, denominator="negatives"),
    "fedpall as released": PrototypeTerms(contrast=1, temperature=3.0, denominator_rows="raw"),
    "raw rows, weighted, among negatives": PrototypeTerms(
        contrast=1, temperature=0.5, denominator_rows="raw", denominator="negatives", weighted=True
    ),
    "contrast, weighted": PrototypeTerms(contrast=1, temperature=0.5, weighted=True),
    "contrast, huge 1/temperature": PrototypeTerms(contrast=1, temperature=0.0005),
    "alignment": PrototypeTerms(alignment=1),
    "alignment, a third": PrototypeTerms(alignment=1, fraction=0.34),
    "alignment, weighted": PrototypeTerms(alignment=1, alpha=0.5, weighted=True),
    "alignment, half, weighted": PrototypeTerms(alignment=1, alpha=0.25, fraction=0.5, weighted=True),
    "mse": PrototypeTerms(mse=1),
    "mse, sum": PrototypeTerms(mse=1, mse_reduce="sum"),
    "cosine square": PrototypeTerms(cosine_square=1, alpha=0.25),
    "cosine square, power": PrototypeTerms(cosine_square=1, alpha=0.25, power_in_square=True),
    "everything": PrototypeTerms(contrast=0.5, alignment=-2, mse=3, cosine_square=0.1, temperature=0.2, fraction=0.5),
    "nothing": PrototypeTerms(),
}


def agree(features, labels, prototypes, terms, bias=None):
    """The fused losses equal their formulas in value and gradient, in float64, and each term by itself in value."""
    means = unbiased_prototypes(prototypes)

    def found(z):
        return prototype_losses(z, labels, prototypes, terms, class_rows=means, positive_bias=bias)

    value, gradient = oracle.value_and_gradient(lambda z: found(z).total, features)
    expected, expected_gradient = oracle.value_and_gradient(
        lambda z: oracle.combined(z, labels, prototypes, terms, means, bias), features
    )
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-7, atol=1e-9)
    _, *each = found(features)
    torch.testing.assert_close(
        each, oracle.prototype_terms(features, labels, prototypes, terms, means, bias), rtol=1e-9, atol=1e-11
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("terms", TERMS)
def test_terms_are_their_formulas(case, terms):
    agree(*CASES[case], TERMS[terms])


@pytest.mark.parametrize("denominator", ["all", "negatives"])
def test_positive_bias_is_its_formula(denominator):
    bias = torch.tensor([-1.0, 0.3, -2, 0, 4], dtype=torch.float64)
    agree(*CASES["ordinary"], PrototypeTerms(contrast=1, temperature=0.5, denominator=denominator), bias)


def test_the_short_forms_are_single_terms():
    features, labels, prototypes = CASES["positive features"]
    means = unbiased_prototypes(prototypes)
    bias = torch.linspace(-1, 2, 5)
    for options in (
        {"temperature": 0.5, "alpha": 0.5, "weighted": True},
        {"temperature": 0.5, "denominator": "negatives", "denominator_rows": "raw"},
    ):
        contrast = prototype_contrast(features, labels, prototypes, positive_bias=bias, reduction="sum", **options)
        terms = PrototypeTerms(contrast=1, **options)
        whole = prototype_losses(features, labels, prototypes, terms, positive_bias=bias, reduction="sum").total
        assert torch.equal(contrast, whole)
    for reduce in ("mean", "sum"):
        whole = prototype_losses(features, labels, means, PrototypeTerms(mse=1, mse_reduce=reduce)).total
        assert torch.equal(prototype_mse(features, labels, means, reduce=reduce), whole)


def test_an_empty_set_gives_exactly_zero_that_can_be_differentiated():
    features = torch.tensor([[float("nan"), 1.0], [2.0, 3.0]], requires_grad=True)
    labels, empty = torch.tensor([0, 1]), PrototypeSet.empty(2)
    for loss in (
        prototype_contrast(features, labels, empty, temperature=0.1),
        prototype_mse(features, labels, empty),
        prototype_losses(features, labels, empty, TERMS["everything"]).total,
    ):
        assert loss.item() == 0
        assert torch.autograd.grad(loss, features)[0].abs().sum().item() == 0


def test_a_batch_of_none_gives_zero():
    features = torch.zeros(0, 4, requires_grad=True)
    loss = prototype_contrast(features, torch.zeros(0, dtype=torch.int64), rows([0, 1]), temperature=0.1)
    assert loss.item() == 0
    loss.backward()


def test_reductions_agree():
    features, labels, prototypes = CASES["ordinary"]
    each = torch.stack(
        [prototype_contrast(features[i : i + 1], labels[i : i + 1], prototypes, temperature=0.1) for i in range(5)]
    )
    for reduction, expected in (("sum", each.sum()), ("mean", each.mean())):
        torch.testing.assert_close(
            prototype_contrast(features, labels, prototypes, temperature=0.1, reduction=reduction), expected
        )


CONTRASTS = {name: terms for name, terms in TERMS.items() if terms.contrast and not terms.uses_class_rows}


@pytest.mark.parametrize("case", ["absent classes", "ordinary"])
def test_nan_features_show_in_the_loss_even_when_their_class_is_absent(case):
    _, labels, prototypes = CASES[case]
    for index in range(len(labels)):
        features = CASES[case][0].clone()
        features[index, 0] = float("nan")
        for name, terms in CONTRASTS.items():
            assert prototype_losses(features, labels, prototypes, terms).total.isnan(), name


def test_a_length_beyond_float32_shows_as_nan_and_not_as_a_zero_vector():
    features = torch.tensor([[3e19, 0.0], [1e18, 1e18], [0.0, 0.0]], requires_grad=True)
    prototypes = PrototypeSet(torch.eye(2), torch.tensor([0, 1]), torch.ones(2))
    for name in ("fpl", "fedplvm", "fedplcc"):
        terms = TERMS[name]
        for row, is_nan in enumerate((True, False, False)):
            losses = prototype_losses(features[row : row + 1], torch.tensor([0]), prototypes, terms)
            assert bool(losses.contrast.isnan()) == is_nan, (name, row)


def test_the_naive_power_would_be_nan_where_the_guard_is_finite():
    features = torch.tensor([[-1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    prototypes = PrototypeSet(torch.tensor([[1.0, 0.0]]), torch.tensor([0]), torch.ones(1))
    labels = torch.tensor([0, 0])
    cosines = (features @ prototypes.normalised.T).detach()
    assert cosines.pow(0.5)[0].isnan()
    loss = prototype_losses(features, labels, prototypes, PrototypeTerms(alignment=1, alpha=0.5)).total
    gradient = torch.autograd.grad(loss, features)[0]
    assert loss.isfinite()
    assert gradient.abs().sum() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precisions_compute_in_float32(dtype):
    features, labels, prototypes = CASES["ordinary"]
    features = features.to(dtype)
    loss = prototype_contrast(features, labels, prototypes, temperature=0.07)
    assert loss.dtype == torch.float32
    expected = prototype_contrast(features.double(), labels, prototypes, temperature=0.07)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-5)


def test_autocast_does_not_lower_the_precision():
    features, labels, prototypes = CASES["ordinary"]
    features = features.float()
    plain = prototype_contrast(features, labels, prototypes, temperature=0.02)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(prototype_contrast(features, labels, prototypes, temperature=0.02), plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0}, "temperature"),
        ({"temperature": 1, "alpha": 0}, "alpha"),
        ({"temperature": 1, "alpha": 2}, "alpha"),
        ({"temperature": 1, "denominator": "positives"}, "denominator"),
        ({"temperature": 1, "denominator_rows": "raw", "alpha": 0.5}, "raw"),
        ({"temperature": 1, "positive_bias": torch.zeros(3)}, "positive_bias"),
        ({"temperature": 1, "reduction": "median"}, "reduction"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    features, labels, prototypes = CASES["ordinary"]
    with pytest.raises(ValueError, match=message):
        prototype_contrast(features, labels, prototypes, **options)


def test_shapes_that_do_not_fit_are_named():
    features, labels, prototypes = CASES["ordinary"]
    with pytest.raises(ValueError, match="5 dimensions, prototypes 4"):
        prototype_contrast(torch.zeros(2, 5), labels[:2], prototypes, temperature=1)
    with pytest.raises(ValueError, match=r"features \[B, D\]"):
        prototype_contrast(features, labels[:2], prototypes, temperature=1)
    with pytest.raises(ValueError, match="one row per class"):
        prototype_mse(features, labels, prototypes)
    with pytest.raises(ValueError, match="fraction"):
        PrototypeTerms(alignment=1, fraction=0)


def test_types_that_do_not_fit_are_named():
    features, labels, prototypes = CASES["ordinary"]
    for wrong in (features.long(), labels), (features, labels.double()), (features, labels > 1):
        with pytest.raises(ValueError, match="floating-point and labels integers"):
            prototype_contrast(*wrong, prototypes, temperature=1)
    with pytest.raises(ValueError, match="backend must be one of auto, closed_form, triton; got 'closed'"):
        prototype_losses(features, labels, prototypes, PrototypeTerms(contrast=1), backend="closed")
    expected = prototype_contrast(features, labels, prototypes, temperature=1)
    for dtype in (torch.int32, torch.int16, torch.int8, torch.uint8):
        assert torch.equal(prototype_contrast(features, labels.to(dtype), prototypes, temperature=1), expected)
        prototype_mse(features, labels.to(dtype), unbiased_prototypes(prototypes))
    assert class_means(features, labels.int(), 3) == class_means(features, labels, 3)


def test_constants_that_would_get_no_gradient_are_named():
    features, labels, prototypes = CASES["ordinary"]
    learnt = PrototypeSet(prototypes.vectors.clone().requires_grad_(), prototypes.labels, prototypes.weights)
    bias = torch.zeros(len(labels), requires_grad=True)
    for call in (
        lambda: prototype_contrast(features, labels, learnt, temperature=1),
        lambda: prototype_contrast(features, labels, prototypes, temperature=1, positive_bias=bias),
        lambda: prototype_mse(features, labels, PrototypeSet(learnt.vectors[:1], labels[:1], torch.ones(1))),
    ):
        with pytest.raises(ValueError, match="only features have a gradient"):
            call()
        with torch.no_grad():
            call()
