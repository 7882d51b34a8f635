"""Who computes the prototype losses, and what torch.compile, CUDA graphs and autograd ask of them."""

import sys

import pytest
import torch

from common.losses import prototype as module_of_losses
from common.losses import prototype_contrast, prototype_losses
from common.losses.prototype import evaluate_call
from common.losses.prototype_terms import PrototypeTerms, alignment_count, prepared_rows, wanted_counts
from common.numerics import full_precision, generator
from common.prototypes import PrototypeSet, unbiased_prototypes

TERMS = PrototypeTerms(
    contrast=1, alignment=0.5, mse=2, cosine_square=0.3, temperature=0.1, alpha=0.5, fraction=0.5, weighted=True
)


@pytest.fixture
def problem():
    draw = generator(0, "losses")
    prototypes = PrototypeSet(
        torch.randn(9, 6, generator=draw), torch.tensor([0, 0, 1, 1, 1, 1, 4, 4, 4]), torch.rand(9, generator=draw)
    )
    features = torch.randn(5, 6, generator=draw).abs()
    return features, torch.tensor([0, 1, 2, 4, 1]), prototypes, unbiased_prototypes(prototypes)


def gradient_of(loss, features):
    return torch.autograd.grad(loss, features)[0]


def test_terms_are_detached_and_the_total_is_their_sum(problem):
    features, labels, prototypes, class_rows = problem
    losses = prototype_losses(features.requires_grad_(), labels, prototypes, TERMS, class_rows=class_rows)
    assert losses.total.requires_grad
    assert not any(term.requires_grad for term in losses[1:])
    torch.testing.assert_close(losses.total, sum(losses[1:]))


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_torch_compile_takes_the_losses_whole(problem, compiler):
    features, labels, prototypes, class_rows = problem
    for rows in (prototypes, class_rows):  # once per round, outside the step
        prepared_rows(rows), wanted_counts(rows, TERMS)

    def step(z):
        return prototype_losses(z, labels, prototypes, TERMS, class_rows=class_rows).total

    leaf = features.clone().requires_grad_()
    eager, expected = step(leaf), gradient_of(step(leaf), leaf)
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=compiler)(leaf)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(gradient_of(compiled, leaf), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.cuda
def test_a_cuda_graph_takes_the_losses(problem):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    features, labels, prototypes, class_rows = problem
    prototypes, class_rows, labels = prototypes.to("cuda"), class_rows.to("cuda"), labels.cuda()
    leaf = features.cuda().requires_grad_()

    def step():
        total = prototype_losses(leaf, labels, prototypes, TERMS, class_rows=class_rows, backend="triton").total
        return total, gradient_of(total, leaf)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expected = tuple(value.detach() for value in step())  # a graph of autograd's would tie the leaf to this stream
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.testing.assert_close(tuple(value.detach() for value in captured), expected, rtol=0, atol=0)


def test_second_derivatives_are_refused_rather_than_wrong(problem):
    features, labels, prototypes, _ = problem
    leaf = features.clone().requires_grad_()
    loss = prototype_contrast(leaf, labels, prototypes, temperature=0.1)
    for total in (loss, loss + leaf.square().sum()):  # beside another term, a constant gradient would go unnoticed
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(total, leaf, create_graph=True)
        torch.autograd.grad(total, leaf, retain_graph=True)


def test_rows_are_prepared_once_per_set(problem):
    _, _, prototypes, _ = problem
    rows = prepared_rows(prototypes)
    assert prepared_rows(prototypes) is rows
    assert wanted_counts(prototypes, TERMS) is wanted_counts(prototypes, TERMS)
    assert rows.offsets.tolist() == [0, 2, 6, 6, 6, 9]
    assert wanted_counts(prototypes, TERMS).tolist() == [1, 2, 1, 1, 2]


@pytest.mark.parametrize(
    ("fraction", "rows", "expected"),
    [(0.1, 30, 3), (0.7, 10, 7), (0.34, 50, 17), (0.5, 3, 2), (1.0, 7, 7), (0.01, 5, 1)],
)
def test_alignment_counts_are_safe_from_float_error(fraction, rows, expected):
    assert alignment_count(rows, fraction) == expected


@pytest.fixture
def tf32():
    """Sets whether float32 products may run in TF32, and puts it back."""
    before = torch.backends.cuda.matmul.allow_tf32

    def allow(allowed):
        torch.backends.cuda.matmul.allow_tf32 = allowed

    yield allow
    allow(before)


def test_full_precision_suspends_tf32_and_autocast_and_gives_them_back(tf32):
    tf32(True)
    with full_precision(torch.device("cuda"), 0.02):
        assert not torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cuda.matmul.allow_tf32
    with full_precision(torch.device("cuda"), 0.07):
        assert torch.backends.cuda.matmul.allow_tf32
    with torch.autocast("cpu", dtype=torch.bfloat16), full_precision(torch.device("cpu"), 1.0):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


@pytest.fixture
def kernel(monkeypatch):
    """Puts a function in the place of the Triton kernel."""

    def replace(function):
        module = type(module_of_losses)("common.losses.triton_kernel")
        module.launch = function
        monkeypatch.setitem(sys.modules, "common.losses.triton_kernel", module)

    module_of_losses._tried.cache_clear()
    yield replace
    module_of_losses._tried.cache_clear()


CPU = torch.device("cpu")


def test_kernels_that_fail_are_warned_of_once_and_not_used(kernel):
    def no_compiler(*_):
        raise RuntimeError("Failed to find C compiler")

    kernel(no_compiler)
    with pytest.warns(RuntimeWarning, match="Failed to find C compiler.*PyTorch computes them"):
        assert not module_of_losses._tried(CPU)
    kernel(lambda *_: pytest.fail("asked twice"))
    assert not module_of_losses._tried(CPU)


def test_kernels_that_are_right_are_used_and_wrong_ones_are_not(kernel):
    kernel(evaluate_call)
    assert module_of_losses._tried(CPU)
    module_of_losses._tried.cache_clear()
    kernel(lambda call: tuple(1.01 * tensor for tensor in evaluate_call(call)))
    with pytest.warns(RuntimeWarning, match="off by"):
        assert not module_of_losses._tried(CPU)


class OnCuda:
    """As much of a CUDA tensor as the choice looks at."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, dtype=torch.float32, size=100):
        self.dtype, self.size = dtype, size

    def numel(self):
        return self.size


def test_which_backend_computes_by_default(problem, monkeypatch):
    rows = prepared_rows(problem[2])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for verdict in (True, False):
        monkeypatch.setattr(module_of_losses, "_tried", lambda _, verdict=verdict: verdict)
        assert module_of_losses._fused(OnCuda(), rows) is verdict
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert module_of_losses._fused(OnCuda(torch.bfloat16), rows)
    assert not module_of_losses._fused(OnCuda(torch.float64), rows)
    assert not module_of_losses._fused(OnCuda(size=module_of_losses.FUSED_WORK), rows)
    assert not module_of_losses._fused(problem[0], rows)
