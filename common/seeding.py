"""Random numbers keyed by their purpose, so that no result depends on the order of arrival or on processes.

Every draw in Goldfinch comes from ``generator(seed, purpose, round, client, ...)``. The key is hashed with SHA-256, so
two different keys give independent streams, and the same key gives the same stream on every engine.
"""

import hashlib

import numpy as np
import torch


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
