"""The operator, the choice between tiers, and what torch.compile and CUDA graphs ask of them."""

import dataclasses

import pytest
import torch

from common.kernels import dispatch, operator, probe
from common.kernels.inputs import kernel_inputs
from common.kernels.launch import PARTIAL_ELEMENTS, ROW_LIMIT, plan, precision, top_blocks
from common.kernels.operator import fused_losses, operator_arguments
from common.kernels.terms import PrototypeTerms, alignment_count, full_precision
from common.losses import prototype_alignment, prototype_contrast, prototype_losses
from common.prototypes import PrototypeSet, unbiased_prototypes
from common.seeding import generator

TERMS = PrototypeTerms(
    contrast=1, alignment=0.5, mse=2, cosine_square=0.3, temperature=0.1, alpha=0.5, fraction=0.5, weighted=True
)


@pytest.fixture
def problem():
    draw = generator(0, "operator")
    prototypes = PrototypeSet(
        torch.randn(9, 6, generator=draw), torch.tensor([0, 0, 1, 1, 1, 1, 4, 4, 4]), torch.rand(9, generator=draw)
    )
    features = torch.randn(5, 6, generator=draw).abs()
    return features, torch.tensor([0, 1, 2, 4, 1]), prototypes, unbiased_prototypes(prototypes)


def gradient_of(loss, features):
    return torch.autograd.grad(loss, features)[0]


@pytest.mark.parametrize("with_gradient", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [True, False])
def test_the_operator_is_registered_correctly(problem, with_gradient, dtype, biased):
    """Schema, autograd registration, fake tensors, and the same under AOT tracing."""
    features, labels, prototypes, class_rows = problem
    features = features.to(dtype).requires_grad_(with_gradient)
    bias = torch.linspace(-1, 1, 5) if biased else None
    torch.library.opcheck(
        torch.ops.goldfinch.prototype_losses,
        operator_arguments(features, labels, prototypes, class_rows, TERMS, bias, 5),
        raise_exception=True,
    )


def test_the_operator_equals_the_other_tiers(problem):
    features, labels, prototypes, class_rows = problem
    found = {}
    for backend in ("batched", "closed_form", "triton"):
        leaf = features.clone().requires_grad_()
        losses = prototype_losses(leaf, labels, prototypes, TERMS, class_rows=class_rows, backend=backend)
        found[backend] = (*losses, gradient_of(3 * losses.total, leaf))
    for backend in ("closed_form", "triton"):
        torch.testing.assert_close(found[backend], found["batched"], rtol=1e-5, atol=1e-6)


def test_terms_are_detached_and_the_total_is_not(problem):
    features, labels, prototypes, class_rows = problem
    for backend in ("batched", "closed_form", "triton"):
        leaf = features.clone().requires_grad_()
        losses = prototype_losses(leaf, labels, prototypes, TERMS, class_rows=class_rows, backend=backend)
        assert losses.total.requires_grad
        assert not any(term.requires_grad for term in losses[1:])


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_torch_compile_takes_the_losses_whole(problem, compiler, backend):
    features, labels, prototypes, class_rows = problem
    kernel_inputs(prototypes), kernel_inputs(class_rows)  # once per round, outside the step

    def step(z):
        return prototype_losses(z, labels, prototypes, TERMS, class_rows=class_rows, backend=backend).total

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

    expected = step()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.testing.assert_close(captured, expected, rtol=0, atol=0)


def test_what_auto_chooses(problem, monkeypatch):
    features, _, prototypes, _ = problem
    assert dispatch.choose(features, prototypes, TERMS, "auto") == "closed_form"
    assert dispatch.choose(features, prototypes, TERMS, "triton") == "triton"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert dispatch.choose(features, prototypes, TERMS, "auto") == "batched"


def test_what_the_fused_kernels_cannot_take_is_named(problem, monkeypatch):
    features, labels, prototypes, _ = problem
    with pytest.raises(ValueError, match="float64"):
        prototype_contrast(features.double(), labels, prototypes, temperature=1, backend="triton")
    many = PrototypeSet(torch.rand(2049, 6), torch.zeros(2049, dtype=torch.int64), torch.ones(2049))
    with pytest.raises(ValueError, match="2048"):
        prototype_alignment(features, labels, many, fraction=0.5, backend="triton")
    monkeypatch.setattr(dispatch, "HAS_TRITON", False)
    with pytest.raises(ValueError, match="not installed"):
        prototype_contrast(features, labels, prototypes, temperature=1, backend="triton")
    assert prototype_contrast(features, labels, prototypes, temperature=1).isfinite()


def test_second_derivatives_are_refused_rather_than_wrong(problem):
    features, labels, prototypes, _ = problem
    for backend in ("closed_form", "triton"):
        leaf = features.clone().requires_grad_()
        loss = prototype_contrast(leaf, labels, prototypes, temperature=0.1, backend=backend)
        (first,) = torch.autograd.grad(loss, leaf, create_graph=True)
        with pytest.raises(RuntimeError):
            torch.autograd.grad(first.sum(), leaf)


def test_inputs_are_prepared_once_per_set(problem):
    _, _, prototypes, _ = problem
    inputs = kernel_inputs(prototypes)
    assert kernel_inputs(prototypes) is inputs
    assert inputs.wanted_counts(0.5) is inputs.wanted_counts(0.5)
    assert inputs.class_sizes == (2, 4, 0, 0, 3)
    assert inputs.offsets.tolist() == [0, 2, 6, 6, 6, 9]
    assert inputs.wanted_counts(0.5).tolist() == [1, 2, 1, 1, 2]


def test_alignment_counts_are_safe_from_float_error():
    for fraction, rows, expected in [
        (0.1, 30, 3),
        (0.7, 10, 7),
        (0.34, 50, 17),
        (0.5, 3, 2),
        (1.0, 7, 7),
        (0.01, 5, 1),
    ]:
        assert alignment_count(rows, fraction) == expected, (fraction, rows)


@pytest.mark.parametrize("samples", [1, 64, 513, 4096])
@pytest.mark.parametrize("rows", [1, 200, 512, 513, 8192])
@pytest.mark.parametrize("dimensions", [1, 128, 512, 2048])
def test_plans_cover_every_row_and_stay_small(samples, rows, dimensions):
    for processors in (1, 14, 132):  # one; Jetson Orin; H200
        chosen = plan(samples, rows, dimensions, processors, "auto", True)
        if chosen.tiling == "row":
            assert rows <= ROW_LIMIT <= 512
            assert chosen.block_m >= rows
            assert chosen.block_m * chosen.block_d <= 8192
        else:
            covered = chosen.splits * chosen.tiles_per_split * chosen.block_m
            assert rows <= covered
            assert covered - rows < chosen.tiles_per_split * chosen.block_m
            assert (chosen.splits - 1) * samples * dimensions <= PARTIAL_ELEMENTS
    with pytest.raises(ValueError, match="at most 512"):
        plan(samples, 513, dimensions, 1, "row", True)


def test_top_blocks_hold_the_largest_class():
    for largest in (1, 16, 17, 511, 513, 2048):
        block_m, block_d, warps = top_blocks(largest)
        assert block_m >= largest
        assert block_m * block_d <= 8192
        assert warps in (8, 16)


@pytest.fixture
def tf32():
    """Sets whether float32 products may run in TF32, and puts it back."""
    before = torch.backends.cuda.matmul.allow_tf32

    def allow(allowed):
        torch.backends.cuda.matmul.allow_tf32 = allowed

    yield allow
    allow(before)


def test_tf32_needs_both_leave_and_a_high_temperature(tf32):
    tf32(False)
    assert precision(PrototypeTerms(temperature=3.0)) == "ieee"
    tf32(True)
    assert precision(PrototypeTerms(temperature=3.0)) == "tf32"
    assert precision(PrototypeTerms(temperature=0.05)) == "ieee"


def test_full_precision_suspends_tf32_and_autocast_and_gives_them_back(tf32):
    tf32(True)
    with full_precision(torch.device("cuda"), 0.02):
        assert not torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cuda.matmul.allow_tf32
    with full_precision(torch.device("cuda"), 0.07):
        assert torch.backends.cuda.matmul.allow_tf32
    with torch.autocast("cpu", dtype=torch.bfloat16), full_precision(torch.device("cpu"), 1.0):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_the_cpu_operator_ignores_the_tiling(problem):
    features, labels, prototypes, class_rows = problem
    for tiling in ("row", "stream"):
        total, _ = fused_losses(features, labels, prototypes, class_rows, TERMS, None, 5, tiling)
        assert total.isfinite()


@pytest.fixture
def unasked(monkeypatch):
    monkeypatch.setattr(probe, "_verdicts", {})


@pytest.mark.usefixtures("unasked")
def test_a_device_is_tried_once(monkeypatch):
    assert probe.trusted(torch.device("cpu"))
    monkeypatch.setattr(probe, "_failure", lambda _: pytest.fail("asked twice"))
    assert probe.trusted(torch.device("cpu"))


@pytest.mark.usefixtures("unasked")
def test_kernels_that_fail_are_warned_of_once_and_not_used(monkeypatch):
    def no_compiler(*_):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(operator, "operator_arguments", no_compiler)
    with pytest.warns(RuntimeWarning, match="Failed to find C compiler.*PyTorch computes them"):
        assert not probe.trusted(torch.device("cpu"))
    assert not probe.trusted(torch.device("cpu"))


@pytest.mark.usefixtures("unasked")
def test_kernels_that_are_wrong_are_not_used(monkeypatch):
    original = operator.operator_arguments

    def colder(features, labels, rows, means, terms, *rest):
        return original(features, labels, rows, means, dataclasses.replace(terms, temperature=0.09), *rest)

    monkeypatch.setattr(operator, "operator_arguments", colder)
    with pytest.warns(RuntimeWarning, match="row kernels are off by"):
        assert not probe.trusted(torch.device("cpu"))


@pytest.mark.usefixtures("unasked")
def test_auto_falls_back_where_the_kernels_are_not_trusted(problem, monkeypatch):
    class OnCuda:
        is_cuda, dtype, device = True, torch.float32, torch.device("cuda", 0)

    _, _, prototypes, _ = problem
    for verdict, expected in ((True, "triton"), (False, "closed_form")):
        monkeypatch.setattr(dispatch, "trusted", lambda _, verdict=verdict: verdict)
        assert dispatch.choose(OnCuda(), prototypes, TERMS, "auto") == expected
