"""Half the bytes: float32 tensors rounded to bfloat16 or float16 for the way, and float32 again on arrival.

It is done at the two ends, where a message is made and where it is read, so every engine carries the same bytes and a
run has the same result on all of them. The server's own state stays float32; only the copy that is sent is rounded.

Integers, booleans and float64 travel as they are. So do prototype sets: a class mean per class is a thousandth of a
model's bytes, and a method's only information about other domains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from common.errors import PayloadError
from common.wire.payload import Payload

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What ``rounds.transport`` may say."""


def cast_down(payload: Payload, transport: str) -> Payload:
    """The payload as it travels.

    Raises:
        PayloadError: a number is too large for the transport, or none; it is named rather than sent as infinity.
    """
    if transport == "float32":
        return payload
    return replace(
        payload,
        weights={name: _narrow(name, tensor, transport) for name, tensor in payload.weights.items()},
        extra={name: _narrow(name, tensor, transport) for name, tensor in payload.extra.items()},
    )


def _narrow(name: str, tensor: Tensor, transport: str) -> Tensor:
    if tensor.dtype != torch.float32:
        return tensor
    found = tensor.to(DTYPES[transport])
    if not bool(torch.isfinite(found).all()):
        worst = float(tensor.abs().nan_to_num(nan=float("inf"), posinf=float("inf")).max())
        what = f"reaches {worst:.3g}" if worst < float("inf") else "has values that are not finite"
        raise PayloadError(
            f"rounds.transport={transport} cannot carry {name:.99}: it {what}, the largest number is "
            f"{torch.finfo(DTYPES[transport]).max:.3g}. If training diverged, lower train.learning_rate; else take "
            + ("rounds.transport=bfloat16" if transport == "float16" else "rounds.transport=float32")
        )
    return found


def cast_up(payload: Payload, transport: str) -> Payload:
    """The payload as it is used: what :func:`cast_down` rounded is float32 again.

    Raises:
        PayloadError: a tensor came as float32, which the run's transport leaves to no sender.
    """
    if transport == "float32":
        return payload
    return replace(payload, weights=_widen(payload.weights, transport), extra=_widen(payload.extra, transport))


def _widen(tensors: Mapping[str, Tensor], transport: str) -> dict[str, Tensor]:
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float32:
            raise PayloadError(f"{name:.99} came as float32; this run's transport is {transport}")
    dtype = DTYPES[transport]
    return {name: tensor.float() if tensor.dtype == dtype else tensor for name, tensor in tensors.items()}
