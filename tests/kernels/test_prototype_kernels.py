"""The fused kernels against the float64 reference, value and gradient, in Triton's interpreter (and on CUDA)."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import BIASED, FPL, TERMS, Case, inputs, make, reference


def agree(run, case, rtol=2e-4):
    """Value within ``rtol``, gradient within ``rtol`` of its largest entry; also for the batch's terms one by one."""
    found, expected = run(case), reference(case)
    scale = 1.0 + np.abs(expected.parts).max()
    np.testing.assert_allclose(found.parts, expected.parts, rtol=rtol, atol=rtol * 1e-2 * scale)
    np.testing.assert_allclose(found.total, expected.total, rtol=rtol, atol=rtol * scale * 0.1)
    smallest = 1e-12  # below: float64's own rounding
    if expected.gradient.shape[1] == 1:
        smallest = 1e-3  # a direction in one dimension has no slope; what is left is float32's rounding
    largest = max(np.abs(expected.gradient).max(), smallest)
    np.testing.assert_allclose(found.gradient, expected.gradient, rtol=0, atol=rtol * largest)
    return found


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.long
def test_every_combination_of_terms(run, terms):
    case = make(6, 11, 20, 4, TERMS[terms])
    if terms in BIASED:
        case = case.but(bias=np.linspace(-2, 1, 6, dtype=np.float32))
    agree(run, case)


SHAPES = {
    "one of everything": (1, 1, 1, 1),
    "fewer than any block": (3, 5, 7, 3),
    "exactly one block of each": (16, 64, 32, 5),
    "one more than a block of each": (17, 65, 33, 5),
    "several blocks of rows, the last one short": (4, 300, 16, 6),
    "one class, so no negatives": (5, 9, 12, 1),
    "more classes than rows, so most of them absent": (12, 4, 12, 40),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("terms", ["fpl", pytest.param("fedplcc", marks=pytest.mark.long)])
def test_shapes_at_the_edges_of_blocks(run, shape, terms):
    samples, rows, dimensions, classes = SHAPES[shape]
    agree(run, make(samples, rows, dimensions, classes, TERMS[terms], positive=terms == "fedplcc"))


def test_a_class_of_many_blocks(run):
    """400 rows of one class: each block's scores are ranked against 7 blocks."""
    agree(run, make(2, 400, 8, 1, {"alignment": 1.0, "fraction": 0.3}, positive=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("terms", ["fpl", "fedplcc"])
def test_half_precision_features_are_summed_in_float32(run, dtype, terms):
    """The loss is as exact as with float32; the gradient is rounded to the features' type at the end."""
    case = make(6, 11, 20, 4, TERMS[terms], positive=True, dtype=dtype)
    found, expected = run(case), reference(case)
    np.testing.assert_allclose(found.total, expected.total, rtol=2e-4)
    rounding = 2.0 ** (-8 if dtype == "bfloat16" else -10)
    np.testing.assert_allclose(
        found.gradient, expected.gradient, rtol=0, atol=rounding * np.abs(expected.gradient).max()
    )


@pytest.mark.parametrize("layout", ["strided rows", "transposed"])
def test_features_need_not_be_contiguous(run, layout):
    agree(run, make(6, 11, 20, 4, FPL, layout=layout))


def axes(terms):
    """Cosines exactly 1, 0, -1 and one of each in between; a zero feature; a zero prototype."""
    features = np.array([[1, 0, 0, 0], [-1, 0, 0, 0], [0, 2, 0, 0], [0, 0, 0, 0], [3, 4, 0, 0]], dtype=np.float32)
    vectors = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [-2, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 5]], dtype=np.float32)
    labels = np.array([0, 0, 1, 1, 2])
    return Case(features, labels, vectors, np.array([0, 0, 1, 1, 2]), np.ones(5, np.float32), terms)


@pytest.mark.parametrize("terms", ["fpl", "fedplcc", "fedplvm", "power in the correction", "everything"])
def test_cosines_at_zero_below_and_zero_vectors(run, terms):
    found = agree(run, axes(TERMS[terms]))
    assert np.isfinite(found.gradient).all()


def test_duplicate_rows_tie_to_the_lowest_index(run):
    """Six equal rows of which three are taken: the weights tell which, so a wrong tie shows in value and gradient."""
    vectors = np.tile(np.array([[1, 2, 0, 1]], np.float32), (6, 1))
    weights = np.ones(6, np.float32)
    features = np.array([[1, 0, 0, 1], [0, 1, 1, 0]], np.float32)
    terms = {"alignment": 1.0, "fraction": 0.5, "weighted": True}
    agree(run, Case(features, np.array([0, 0]), vectors, np.zeros(6, np.int64), weights, terms))


@pytest.mark.parametrize("temperature", [0.0115, 0.0005])  # naive fp32 gives inf; logits of 2000
def test_huge_inverse_temperatures(run, temperature):
    found = agree(run, make(6, 11, 20, 4, {"contrast": 1.0, "temperature": temperature}), rtol=1e-3)
    assert np.isfinite(found.total)


def test_tiny_losses_keep_their_digits(run):
    """Features on their prototype: the loss is e^-40 or so, which LSE(all) - LSE(positive) would lose in float32."""
    vectors = np.eye(4, dtype=np.float32)
    case = Case(
        vectors.copy(), np.arange(4), vectors, np.arange(4), np.ones(4, np.float32),
        {"contrast": 1.0, "temperature": 0.025},
    )  # fmt: skip
    found, expected = run(case), reference(case)
    assert 0 < expected.total < 1e-16
    assert found.total == pytest.approx(expected.total, rel=1e-3)


def test_rows_of_weight_zero_are_as_if_absent(run):
    case = make(6, 11, 20, 4, {"contrast": 1.0, "weighted": True, "temperature": 0.1})
    weights = case.weights.copy()
    weights[case.row_labels == 1] = 0  # a whole class
    weights[0] = 0
    agree(run, case.but(weights=weights))


@pytest.mark.parametrize("terms", ["fpl", "fedplcc", "fedpall printed", "fedpall released"])
def test_nan_in_nan_out_and_only_there(run, terms):
    case = make(6, 11, 20, 4, TERMS[terms], positive=True)
    clean = run(case)
    features = case.features.copy()
    features[2, 3] = np.nan
    broken = run(case.but(features=features))
    assert np.isnan(broken.total)
    assert np.isnan(broken.gradient[2]).any()
    others = [0, 1, 3, 4, 5]
    np.testing.assert_array_equal(broken.gradient[others], clean.gradient[others])


def test_nan_shows_even_when_the_class_is_absent(run):
    case = make(3, 5, 7, 3, FPL)
    features = case.features.copy()
    features[1] = np.nan
    assert np.isnan(run(case.but(features=features, labels=np.array([0, 77, 1]))).total)


@pytest.mark.parametrize("terms", ["fpl", "fedplvm"])
def test_a_length_beyond_float32_shows_as_nan_and_not_as_a_zero_vector(run, terms):
    case = make(3, 5, 7, 3, TERMS[terms]).but(labels=np.array([0, 0, 1]), with_gradient=False)
    for length, is_nan in ((3e19, True), (1e18, False), (0.0, False)):
        features = case.features.copy()
        features[1] = 0.0
        features[1, 0] = length
        assert np.isnan(run(case.but(features=features)).parts[0]) == is_nan, length


def test_labels_out_of_the_table_read_nothing(run):
    """Negative and huge labels have no rows; the kernel must not follow them out of its arrays."""
    agree(run, make(4, 5, 7, 3, TERMS["everything"]).but(labels=np.array([0, 2**40, 2, 3])))
    found = run(make(2, 5, 7, 3, FPL).but(labels=np.array([-1, -(2**40)])))
    assert found.total == 0
    assert np.abs(found.gradient).max() == 0


def test_without_a_gradient_the_value_is_the_same(run):
    for terms in ("fpl", "fedplcc"):
        case = make(6, 11, 20, 4, TERMS[terms], positive=True)
        assert run(case.but(with_gradient=False)).total == run(case).total


def test_the_reduction_scales_value_and_gradient(run):
    agree(run, make(6, 11, 20, 4, FPL, reduction="sum"))


def test_two_runs_give_the_same_bits(run):
    case = make(3, 130, 33, 5, TERMS["everything"])
    first, second = run(case), run(case)
    assert first.total == second.total
    assert np.array_equal(first.gradient, second.gradient)


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    samples=st.integers(1, 9),
    rows=st.integers(1, 140),
    dimensions=st.integers(1, 70),
    classes=st.integers(1, 12),
    terms=st.sampled_from(["fpl", "fedplcc", "fedplvm", "fedpall printed", "everything"]),
    seed=st.integers(0, 10),
)
@pytest.mark.long
def test_any_shape(run, samples, rows, dimensions, classes, terms, seed):
    positive = terms in ("fedplcc", "fedplvm")
    agree(run, make(samples, rows, dimensions, classes, TERMS[terms], seed=seed, positive=positive), 1e-3)


@pytest.mark.parametrize("terms", TERMS)
def test_the_reference_is_the_formula_in_loops(terms):
    """The float64 reference of this file against nested loops, so that the kernels' chain ends at the formula."""
    import loss_oracles as oracle

    case = make(4, 6, 3, 3, TERMS[terms])
    if terms in BIASED:
        case = case.but(bias=np.linspace(-2, 1, 4, dtype=np.float32))
    features, labels, prototypes, class_rows, options, bias = inputs(case, dtype=torch.float64)
    value, gradient = oracle.value_and_gradient(
        lambda z: oracle.combined(z, labels, prototypes, options, class_rows, bias), features
    )
    found = reference(case)
    assert found.total == pytest.approx(value.item(), rel=1e-9)
    np.testing.assert_allclose(found.gradient, gradient.numpy(), rtol=1e-7, atol=1e-9)
