"""What clients keep of their own, read from their files."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from common.client_state import ClientStore, Version

KEEPING = (
    *("adcol", "combined", "fccl_plus", "fdse", "fedadg", "fedbn", "feddyn", "fedgca", "fedheal", "fedpall", "fedrep"),
    *("fedsr", "fpl_heal", "moon", "rucr", "scaffold", "single_set"),
)
"""The methods whose clients keep a state of their own (tested)."""


def versions(folder: Path, before: float = float("inf")) -> list[Version]:
    """The versions in a client's folder, the earliest first, of exchanges before the position ``before``."""
    return [version for version in ClientStore(folder).versions() if version.position < before]


def own_state(folder: Path, before: float = float("inf")) -> dict[str, Tensor]:
    """The newest version in a client's folder of an exchange before the position ``before``; empty without one."""
    found = versions(folder, before)
    return ClientStore(folder).load(found[-1]).tensors if found else {}
