"""Whether the fused kernels can be trusted on a device: tried once per process on a problem with a known answer."""

from __future__ import annotations

import warnings

import torch

from common.kernels.closed_form import evaluate
from common.kernels.inputs import kernel_inputs
from common.kernels.terms import PrototypeTerms
from common.prototypes import PrototypeSet

TERMS = PrototypeTerms(
    contrast=1.0,
    alignment=0.5,
    mse=0.25,
    cosine_square=0.5,
    temperature=0.1,
    alpha=0.5,
    fraction=0.5,
    weighted=True,
)
TOLERANCE = 1e-3

_verdicts: dict[torch.device, bool] = {}


def trusted(device: torch.device) -> bool:
    """Whether both tilings give the closed form's loss and gradient on ``device``; asked once, with a warning if not.

    A GPU that Triton does not know, a missing C compiler or a driver that is too old end here, not in the middle of a
    training step. Inside a trace or a graph capture nothing may be launched on the side, so there the answer is yes.
    """
    if torch.compiler.is_compiling() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return True
    if device not in _verdicts:
        reason = _failure(device)
        _verdicts[device] = reason is None
        if reason is not None:
            warnings.warn(
                f"the fused prototype losses do not work on {device} ({reason}); PyTorch computes them instead. "
                "Results are the same; tests/kernels on this machine show what is wrong",
                RuntimeWarning,
                stacklevel=2,
            )
    return _verdicts[device]


def _failure(device: torch.device) -> str | None:
    """What goes wrong on ``device``, or ``None``."""
    steps = torch.arange(5 * 24, dtype=torch.float32)
    features = ((0.7 * steps).sin() + 1.1).view(5, 24).to(device)
    vectors = ((1.3 * steps[: 4 * 24]).cos() + 1.2).view(4, 24)
    labels = torch.tensor([0, 2, 1, 0, 5], device=device)
    rows = PrototypeSet(vectors, torch.tensor([0, 0, 0, 2]), torch.tensor([0.2, 0.5, 0.3, 1.0])).to(device)
    means = PrototypeSet(vectors[1:3], torch.tensor([0, 2]), torch.ones(2)).to(device)
    expected = evaluate(
        features, labels, kernel_inputs(rows), kernel_inputs(means), TERMS, None, divisor=5, with_gradient=True
    )
    assert expected.gradient is not None
    try:
        from common.kernels.operator import operator_arguments

        for tiling in ("row", "stream"):
            leaf = features.detach().clone().requires_grad_()
            arguments = operator_arguments(leaf, labels, rows, means, TERMS, None, 5, tiling)
            _, found, gradient = torch.ops.goldfinch.prototype_losses(*arguments)
            error = max(
                (found - expected.means).abs().max().item() / expected.means.abs().max().item(),
                (gradient - expected.gradient).abs().max().item() / expected.gradient.abs().max().item(),
            )
            if not error < TOLERANCE:
                return f"the {tiling} kernels are off by {error:.1e}"
    except Exception as problem:  # a compiler, a linker or a driver can fail in any way; what counts is that it did
        return f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else 'no message'}"
    return None
