"""Many tensors from one device to another in one copy of each kind, and clients side by side on one GPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from common.errors import ConfigError, some_of
from common.wire.payload import Payload, cast_up

_LAST = threading.local()
"""The last message of each thread and its copies on a GPU: clients of one round receive the same message.

Besides, by name, each tensor that the thread received last, with the number of changes in place that it had."""

_STREAMS = threading.local()
"""The CUDA stream of each thread, by device."""


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Within the context, the kernels of a thread run on a CUDA stream of its own, beside those of other threads.

    What was begun on the default stream is waited for first, and the thread's own work at the end, since another thread
    may be the next to serve the client.
    """
    streams: dict[torch.device, torch.cuda.Stream] = vars(_STREAMS).setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    stream = streams[device]
    stream.wait_stream(torch.cuda.default_stream(device))
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        stream.synchronize()


def moved(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return the tensors on ``device``, contiguous and in the same order; those that are there already as they are.

    The others are copied together, one copy for each dtype. Their memory is shared, and is freed as a whole.
    """
    result = dict(tensors)
    kinds: dict[torch.dtype, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.device != device:
            kinds.setdefault(tensor.dtype, []).append(name)
    for names in kinds.values():
        flat = torch.cat([tensors[name].detach().reshape(-1) for name in names])
        if device.type == "cuda":
            flat = flat.pin_memory()
        parts = flat.to(device, non_blocking=device.type == "cuda").split([tensors[name].numel() for name in names])
        for name, part in zip(names, parts, strict=True):
            result[name] = part.view(tensors[name].shape)
    return result


def copied_to_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the tensors on the CPU, because the next client of this thread changes the model's own."""
    cpu = torch.device("cpu")
    copies = moved(tensors, cpu)
    for name, tensor in copies.items():
        if tensors[name].device == cpu:
            copies[name] = tensor.detach().clone()
    return copies


def received(message: Payload, transport: str, device: torch.device) -> Payload:
    """Return the message with its tensors in their own dtypes on ``device``; what the thread had last is not copied.

    Args:
        message: the message.
        transport: ``rounds.transport``, in which it was sent.
        device: where the client trains.
    """
    last: tuple[Payload, torch.device, Payload] | None = getattr(_LAST, "message", None)
    if last is not None and last[0] is message and last[1] == device:
        own = last[2]
    else:
        own = cast_up(message, transport)
        prototypes = own.prototypes
        if device.type == "cpu":
            if prototypes is not None:  # what a set remembers is this client's own: threads would replace each other's
                own = replace(own, prototypes=replace(prototypes))
        else:
            if prototypes is not None:
                prototypes = prototypes.to(device)
            own = Payload(moved(own.weights, device), prototypes, moved(own.extra, device), header=own.header)
            _LAST.message = message, device, own
    tensors = {**own.extra, **own.weights}
    if own.prototypes is not None:
        for name in ("vectors", "labels", "weights"):
            tensors[f"prototypes.{name}"] = getattr(own.prototypes, name)
    _LAST.received = []
    for name, tensor in tensors.items():
        if not tensor.is_inference():  # one of inference mode counts no changes
            _LAST.received.append((name, tensor, tensor._version))
    return own


def check_unchanged(method: str) -> None:
    """Check that the tensors that this thread received last are as they were received.

    Raises:
        ConfigError: the method changed one in place, which the next client of this process would receive.
    """
    changed = [name for name, tensor, version in _LAST.received if tensor._version != version]
    _LAST.received = []
    if changed:
        raise ConfigError(
            f"method={method} changed received tensors in place ({some_of(changed, 3)}), and other clients receive the "
            "same ones: change a copy, tensor.clone()"
        )
