"""The other losses against their formulas in loops: value and gradient, in float64."""

import loss_oracles as oracle
import pytest
import torch

from common import losses
from common.numerics import generator
from strategies import fccl_plus, fedadg, fedgca, fedsr, moon


def draw(*shape, purpose="x", seed=0):
    return torch.randn(*shape, generator=generator(seed, purpose), dtype=torch.float64)


def agree(function, oracle_function, *inputs, check=True):
    """Equal value, equal gradient in every input, and (away from kinks) equal to finite differences."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    twins = [tensor.clone().requires_grad_() for tensor in inputs]
    value, expected = function(*leaves), oracle_function(*twins)
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-11)
    found = torch.autograd.grad(value, leaves, allow_unused=True)
    wanted = torch.autograd.grad(expected, twins, allow_unused=True)
    for leaf, a, b in zip(leaves, found, wanted, strict=True):
        zero = torch.zeros_like(leaf)
        torch.testing.assert_close(zero if a is None else a, zero if b is None else b, rtol=1e-7, atol=1e-9)
    if check:
        assert torch.autograd.gradcheck(function, leaves)


LABELS = torch.tensor([0, 2, 1, 2, 0])


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy(smoothing):
    agree(
        lambda v: losses.cross_entropy(v, LABELS, smoothing),
        lambda v: oracle.cross_entropy(v, LABELS, smoothing),
        3 * draw(5, 4),
    )


@pytest.mark.parametrize("direction", ["uniform_first", "prediction_first"])
@pytest.mark.parametrize("scale", [0.0, 1.0, 8.0])  # already uniform, ordinary, confident
def test_uniform_divergence(direction, scale):
    agree(
        lambda v: losses.uniform_divergence(v, direction),
        lambda v: oracle.uniform_divergence(v, direction),
        scale * draw(5, 4),
    )


@pytest.mark.parametrize("temperature", [0.5, 0.01])
def test_model_contrast(temperature):
    near, far = draw(5, 4, purpose="near"), draw(5, 4, purpose="far")
    agree(
        lambda z: moon.model_contrast(z, near, far, temperature=temperature),
        lambda z: oracle.model_contrast(z, near, far, temperature),
        draw(5, 4),
    )


def test_model_contrast_of_zero_and_opposite_vectors():
    z = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    near = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    far = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    agree(
        lambda z: moon.model_contrast(z, near, far, temperature=0.5),
        lambda z: oracle.model_contrast(z, near, far, 0.5),
        z,
        check=False,  # a zero vector has no derivative; ours is 0 by convention
    )


@pytest.mark.parametrize("form", ["bce", "kl"])
def test_multi_view_consistency_of_certain_views_is_finite(form):
    certain = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]], dtype=torch.float64)
    leaf = certain.clone().requires_grad_()
    value = fedgca.multi_view_consistency(leaf, certain, form)
    assert value.item() == pytest.approx(0.0, abs=1e-5)
    assert torch.autograd.grad(value, leaf)[0].isfinite().all()


@pytest.mark.parametrize("temperature", [3.0, 1.0])
def test_nontarget_distillation(temperature):
    teacher = draw(5, 4, purpose="teacher")
    agree(
        lambda v: fccl_plus.nontarget_distillation(v, teacher, LABELS, temperature=temperature),
        lambda v: oracle.nontarget_distillation(v, teacher, LABELS, temperature),
        draw(5, 4),
    )


def test_nontarget_distillation_of_one_class_is_zero():
    labels = torch.zeros(5, dtype=torch.int64)
    assert fccl_plus.nontarget_distillation(draw(5, 1), draw(5, 1, purpose="t"), labels).item() == 0


def test_cross_correlation():
    others = draw(5, 3, purpose="others")
    agree(
        lambda v: fccl_plus.cross_correlation(v, others, off_diagonal=0.1),
        lambda v: oracle.cross_correlation(v, others, 0.1),
        draw(5, 3),
    )


def test_cross_correlation_of_a_constant_column_is_finite():
    logits = draw(5, 3)
    logits[:, 1] = 2.0
    others = draw(5, 3, purpose="others")
    leaf = logits.requires_grad_()
    value = fccl_plus.cross_correlation(leaf, others)
    torch.testing.assert_close(value, oracle.cross_correlation(logits, others, 0.0051))
    assert torch.autograd.grad(value, leaf)[0].isfinite().all()
    with pytest.raises(ValueError, match="at least 2"):
        fccl_plus.cross_correlation(logits[:1], others[:1])


def test_pairwise_similarities():
    features = draw(4, 3)
    features[2] = 0
    expected = torch.tensor([[float(x) for x in row] for row in oracle.similarities(features, 0.5)])
    found = fccl_plus.pairwise_similarities(features, temperature=0.5)
    torch.testing.assert_close(found, expected.double(), rtol=1e-6, atol=1e-7)


def test_similarity_distillation():
    target = draw(4, 3, purpose="target")
    agree(
        lambda z: fccl_plus.similarity_distillation(z, target, temperature=0.3, scale=3.0),
        lambda z: oracle.similarity_distillation(z, target, 0.3, 3.0),
        draw(4, 5),
    )
    with pytest.raises(ValueError, match="at least 2"):
        fccl_plus.similarity_distillation(draw(1, 3), torch.zeros(1, 0))


@pytest.mark.parametrize("squared", [True, False])
def test_the_norm_of_a_feature_of_length_zero_has_no_gradient(squared):
    zero = torch.zeros(2, 3, requires_grad=True)
    loss = fedsr.feature_norm(zero, squared=squared)
    assert loss.item() == 0
    assert torch.autograd.grad(loss, zero)[0].abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lower_precisions_compute_in_float32(dtype):
    logits, features = draw(5, 4).to(dtype), draw(5, 4, purpose="z").to(dtype)
    for value in (
        losses.cross_entropy(logits, LABELS),
        losses.uniform_divergence(logits),
        moon.model_contrast(features, logits, -logits, temperature=0.5),
        fedgca.multi_view_consistency(logits[None].softmax(2), logits[None].softmax(2)),
        fccl_plus.nontarget_distillation(logits, logits * 2, LABELS),
        fccl_plus.cross_correlation(logits, logits * 2),
        fccl_plus.similarity_distillation(features, torch.zeros(5, 4)),
        fedsr.feature_norm(features),
        fedadg.least_squares_generator(features),
    ):
        assert value.dtype == torch.float32
        assert value.isfinite()


def test_unknown_options_are_named():
    with pytest.raises(ValueError, match="direction"):
        losses.uniform_divergence(draw(2, 3), "sideways")
    with pytest.raises(ValueError, match="form"):
        fedgca.multi_view_consistency(draw(1, 2, 3), draw(1, 2, 3), "mse")
    with pytest.raises(ValueError, match=r"\[V, B, K\]"):
        fedgca.multi_view_consistency(draw(1, 2, 3), draw(1, 2, 4))
    with pytest.raises(ValueError, match="temperature"):
        moon.model_contrast(draw(2, 3), draw(2, 3), draw(2, 3), temperature=0)
