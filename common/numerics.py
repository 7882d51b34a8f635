"""Random numbers keyed by their purpose, and the precision of losses and clusterings.

Every draw in Goldfinch comes from ``generator(seed, purpose, round, client, ...)``. The key is hashed with SHA-256, so
two different keys give independent streams, and the same key gives the same stream on every engine. No result depends
on the order of arrival or on processes.

The precision of losses and clusterings does not depend on the model's.
"""

import contextlib
import hashlib
import random
import threading
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

# ---- random numbers --------------------------------------------------------------------------------------------------


def derive(seed: int, *key: str | int) -> int:
    """Hash ``seed`` and ``key`` to a 63-bit seed. Keys are typed: 1 and "1" give different seeds."""
    text = repr((int(seed), *key)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def generator(seed: int, *key: str | int) -> torch.Generator:
    """Return a CPU :class:`torch.Generator` for ``key``. Draws on the CPU are equal on every device."""
    return torch.Generator().manual_seed(derive(seed, *key))


def numpy_generator(seed: int, *key: str | int) -> np.random.Generator:
    """Return a NumPy generator for ``key`` (PCG64)."""
    return np.random.default_rng(derive(seed, *key))


GLOBAL_GENERATORS = threading.RLock()
"""Held while the global generators are seeded or set back, and while initial weights or a transform draw from them."""


@contextlib.contextmanager
def seeded_globals(seed: int, *key: str | int) -> Iterator[None]:
    """Within the context, the global generators of PyTorch, NumPy and Python start from ``key``; then they go on.

    Goldfinch draws from none of them, except for initial weights (see :func:`common.models.base.initialised`). Dropout
    does, and so may a network, a method or a metric of the user's own. In threads that run at the same time
    (``engine.workers`` above 1) such draws do not repeat, since they share the generators.
    """
    number = derive(seed, *key)
    on_cuda = torch.cuda.is_initialized()
    cuda_states: list[Tensor] = []
    with GLOBAL_GENERATORS:
        states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002  # the global one
        if on_cuda:
            cuda_states = torch.cuda.get_rng_state_all()
        # what torch.manual_seed does, on the devices that there are: it notes a traceback for each that is not
        torch.default_generator.manual_seed(number)
        if torch.cuda.is_available():
            torch.cuda.manual_seed_all(number)
        if torch.backends.mps.is_available():
            torch.mps.manual_seed(number)
        np.random.seed(number % 2**32)  # noqa: NPY002
        random.seed(number)
    try:
        yield
    finally:
        with GLOBAL_GENERATORS:
            torch.set_rng_state(states[0])
            np.random.set_state(states[1])  # noqa: NPY002
            random.setstate(states[2])
            if on_cuda:
                torch.cuda.set_rng_state_all(cuda_states)


# ---- precision -------------------------------------------------------------------------------------------------------


FULL_PRECISION_TEMPERATURE = 0.05
"""At or below this temperature products run in IEEE float32: TF32's 5e-4 in the cosine would be 0.01 in the logit."""

NORM_FLOOR = 1e-12
"""Vectors shorter than this count as zero vectors."""


def working_dtype(features: Tensor) -> torch.dtype:
    """Return float64 for float64 features, float32 for all others."""
    return torch.promote_types(features.dtype, torch.float32)


def unit_vectors(features: Tensor) -> Tensor:
    """Return ``[..., D]`` at unit length; vectors shorter than 1e-12 become zero and pass no gradient."""
    length = torch.linalg.vector_norm(features, dim=-1, keepdim=True)
    return features * torch.where(length < NORM_FLOOR, 0.0, 1.0 / length.clamp_min(NORM_FLOOR))


@contextlib.contextmanager
def full_precision(device: torch.device, temperature: float) -> Iterator[None]:
    """Within the context, autocast is off; if ``temperature`` is at most 0.05, TF32 products are off too."""
    tf32 = device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    lower = tf32 and temperature <= FULL_PRECISION_TEMPERATURE
    if lower:
        torch.backends.cuda.matmul.allow_tf32 = False
    try:
        if torch.is_autocast_enabled(device.type):  # entering it costs as much as a small loss
            with torch.autocast(device.type, enabled=False):
                yield
        else:
            yield
    finally:
        if lower:
            torch.backends.cuda.matmul.allow_tf32 = True
