"""Stands in for a CUDA graph on the CPU: operators are recorded, and replayed with the tensors they were recorded with.

As in a CUDA graph, only the operators are recorded and none of the Python around them; tensors keep their addresses;
and what a graph cannot have, such as a number that Python reads from a tensor, is an error while it is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim")
"""Operators whose result Python reads, or whose shape depends on numbers."""


class RecordedGraph:
    """See :class:`client.capture.Graph`."""

    def __init__(self) -> None:
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def capture(self, work: Callable[[], None]) -> None:
        """Record the operators of ``work``, which are carried out too."""
        with _Recorder(self._calls):
            work()

    def replay(self) -> None:
        """Carry out the operators again, and put what they return into the tensors that they returned before."""
        with torch.no_grad():
            for function, positional, named, before in self._calls:
                _overwrite(before, function(*positional, **named))


class _Recorder(TorchDispatchMode):
    def __init__(self, calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        name = function.overloadpacket.__name__
        if name in WAITS or (name == "index" and _has_mask(args[1])):
            raise RuntimeError(f"operation not permitted while a stream is captured: {name}")
        result = function(*args, **named)
        self._calls.append((function, args, named, result))
        return result


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    return any(index is not None and index.dtype == torch.bool for index in indices)


def _overwrite(before: Any, now: Any) -> None:
    """Copy a result into the tensors of the first result; what shares its memory is there already."""
    if isinstance(before, Tensor):
        if before.data_ptr() != now.data_ptr():
            before.copy_(now)
    elif isinstance(before, (list, tuple)):
        for one, other in zip(before, now, strict=True):
            _overwrite(one, other)
