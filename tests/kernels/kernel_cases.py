"""Kernel calls as plain data (NumPy arrays and options), so that another process can run them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Case:
    """One call of the fused losses."""

    features: np.ndarray  # [B, D] float32
    labels: np.ndarray  # [B]
    vectors: np.ndarray  # [M, D]
    row_labels: np.ndarray  # [M]
    weights: np.ndarray  # [M]
    terms: dict[str, Any]
    bias: np.ndarray | None = None
    dtype: str = "float32"
    tiling: str = "row"
    divisor: int | None = None
    with_gradient: bool = True
    layout: str = "contiguous"

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)


@dataclass(frozen=True)
class Result:
    total: float
    means: np.ndarray  # [4]
    gradient: np.ndarray | None = field(repr=False)  # [B, D] float64


def ready() -> str:
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    torch.set_num_threads(1)
    return "interpreter" if isinstance(tl.sum, InterpretedFunction) else "compiler"


def inputs(case: Case, device: str = "cpu", dtype: torch.dtype | None = None):
    """``(features, labels, prototypes, class rows, terms, bias, divisor)`` of a case as tensors."""
    from common.kernels.terms import PrototypeTerms
    from common.prototypes import PrototypeSet, unbiased_prototypes

    features = torch.from_numpy(case.features).to(device=device, dtype=getattr(torch, case.dtype))
    if dtype is not None:
        features = features.to(dtype)  # after the cast: the reference sees the rounded features
    if case.layout == "strided rows":
        features = torch.cat([features, features], 1)[:, : features.shape[1]]
    elif case.layout == "transposed":
        features = features.T.contiguous().T
    prototypes = PrototypeSet(
        torch.from_numpy(case.vectors), torch.from_numpy(case.row_labels), torch.from_numpy(case.weights)
    ).to(device)
    bias = None if case.bias is None else torch.from_numpy(case.bias).to(device)
    terms = PrototypeTerms(**case.terms)
    divisor = len(features) if case.divisor is None else case.divisor
    return (
        features,
        torch.from_numpy(case.labels).to(device),
        prototypes,
        unbiased_prototypes(prototypes),
        terms,
        bias,
        divisor,
    )


def run(case: Case, device: str = "cpu") -> Result:
    """The case through the operator: Triton kernels on CUDA and in the interpreter."""
    import warnings

    from common.kernels.operator import fused_losses

    features, labels, prototypes, class_rows, terms, bias, divisor = inputs(case, device)
    features = features.detach().requires_grad_(case.with_gradient)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's: log 0 and 1 / 0 are meant
        total, means = fused_losses(features, labels, prototypes, class_rows, terms, bias, divisor, case.tiling)
    gradient = None
    if case.with_gradient:
        (found,) = torch.autograd.grad(total, features)
        assert found.dtype == features.dtype
        gradient = found.double().cpu().numpy()
    return Result(total.item(), means.detach().double().cpu().numpy(), gradient)


def reference(case: Case) -> Result:
    """The case in float64 by the batched tier, which the loss oracles check."""
    from common.kernels.batched import term_values

    features, labels, prototypes, class_rows, terms, bias, divisor = inputs(case, dtype=torch.float64)
    features = features.detach().requires_grad_()
    values = term_values(features, labels, prototypes, class_rows, terms, bias)
    zero = features.new_zeros(())
    means = torch.stack([zero if value is None else value.sum() / divisor for value in values])
    total = (means * terms.coefficients(means)).sum()
    (gradient,) = torch.autograd.grad(total, features)
    return Result(total.item(), means.detach().numpy(), gradient.numpy())
