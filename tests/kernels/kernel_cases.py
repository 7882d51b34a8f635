"""Kernel calls as plain data (NumPy arrays and options), so that another process can run them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from common.numerics import numpy_generator


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
    reduction: str = "mean"
    with_gradient: bool = True
    layout: str = "contiguous"

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)


@dataclass(frozen=True)
class Result:
    total: float
    parts: np.ndarray  # [4], times their coefficients
    gradient: np.ndarray | None = field(repr=False)  # [B, D] float64


FPL = {"contrast": 1.0, "mse": 1.0, "temperature": 0.02}
FEDPLCC = {"contrast": 1.0, "alignment": 0.3, "temperature": 0.07, "alpha": 0.5, "fraction": 0.5, "weighted": True}

TERMS = {
    "fpl": FPL,
    "fedplcc": FEDPLCC,
    "fedplvm": {"contrast": 100.0, "cosine_square": 100.0, "temperature": 0.07, "alpha": 0.25},
    "fedapc": {"contrast": 1.0, "temperature": 0.07},
    "fedproto": {"mse": 1.0, "mse_reduce": "sum"},
    "fedpall printed": {"contrast": 0.7, "temperature": 3.0, "denominator": "negatives"},
    "fedpall released": {"contrast": 0.7, "temperature": 3.0, "denominator_rows": "raw"},
    "raw negatives, weighted": {
        "contrast": 1.0, "temperature": 1.0, "denominator_rows": "raw", "denominator": "negatives", "weighted": True,
    },
    "alignment of all rows": {"alignment": 1.0, "alpha": 0.3, "weighted": True},
    "unweighted alignment": {"alignment": 1.0, "fraction": 0.34},
    "power in the correction": {"cosine_square": 2.0, "alpha": 0.25, "power_in_square": True},
    "everything": {
        "contrast": 0.5, "alignment": -2.0, "mse": 3.0, "cosine_square": 0.1, "temperature": 0.2, "fraction": 0.5,
    },
}  # fmt: skip
BIASED = {"fedapc", "fedpall printed", "raw negatives, weighted"}


def make(samples, rows, dimensions, classes, terms, *, seed=0, positive=False, **options):
    draw = numpy_generator(seed, "case", samples, rows, dimensions)
    features = draw.standard_normal((samples, dimensions)).astype(np.float32)
    vectors = draw.standard_normal((rows, dimensions)).astype(np.float32)
    if positive:
        features, vectors = np.abs(features), np.abs(vectors)
    return Case(
        features,
        draw.integers(0, classes, samples),
        vectors,
        np.sort(draw.integers(0, classes, rows)),
        draw.uniform(0.1, 1.0, rows).astype(np.float32),
        terms,
        **options,
    )


def ready() -> str:
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    torch.set_num_threads(1)
    return "interpreter" if isinstance(tl.sum, InterpretedFunction) else "compiler"


def inputs(case: Case, device: str = "cpu", dtype: torch.dtype | None = None):
    """``(features, labels, prototypes, class rows, terms, bias)`` of a case as tensors."""
    from common.losses.prototype_terms import PrototypeTerms
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
    labels = torch.from_numpy(case.labels).to(device)
    return features, labels, prototypes, unbiased_prototypes(prototypes), PrototypeTerms(**case.terms), bias


def run(case: Case, device: str = "cpu") -> Result:
    """The case through the Triton kernel, compiled on CUDA, else by the interpreter."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's: log 0 and 1 / 0 are meant
        return call(case, inputs(case, device), "triton")


def reference(case: Case) -> Result:
    """The case in float64 by the closed form, which the loss oracles check."""
    return call(case, inputs(case, dtype=torch.float64), "closed_form")


def call(case: Case, arguments, backend: str) -> Result:
    from common.losses import prototype_losses

    features, labels, prototypes, class_rows, terms, bias = arguments
    features = features.detach().requires_grad_(case.with_gradient)
    options = {"class_rows": class_rows, "positive_bias": bias, "reduction": case.reduction, "backend": backend}
    total, *parts = prototype_losses(features, labels, prototypes, terms, **options)
    gradient = None
    if case.with_gradient:
        (slope,) = torch.autograd.grad(total, features)
        assert slope.dtype == features.dtype
        gradient = slope.double().cpu().numpy()
    return Result(total.item(), torch.stack(parts).double().cpu().numpy(), gradient)
