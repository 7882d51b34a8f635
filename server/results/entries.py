"""Finished runs with their settings, and what to call them so that a reader can tell them apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from server.run.conduct import read_summary

_OWN = ("seed", "output", "resume", "overwrite", "engine", "report", "choices", "experiment")


@dataclass(frozen=True)
class Entry:
    """One finished run: its settings as ``group.key: value``, less those that leave the result alone, and summary."""

    folder: Path
    settings: Mapping[str, Any]
    summary: Mapping[str, Any]


def read_entries(folders: Sequence[Path]) -> list[Entry]:
    """Settings and summary of each run, settings as ``group.key: value``.

    Raises:
        ConfigError: a folder holds no finished run.
    """
    found = []
    for folder in folders:
        raw = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
        assert isinstance(raw, dict)
        flat = {key: value for key, value in _flat(raw) if key.partition(".")[0] not in _OWN}
        found.append(Entry(folder, flat, read_summary(folder)))
    return found


def _flat(node: Mapping[Any, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            pairs += _flat(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", tuple(value) if isinstance(value, list) else value))
    return pairs


def varying(entries: Sequence[Entry]) -> list[str]:
    """The keys that differ between the runs, most values first, then by name."""
    keys = dict.fromkeys(key for entry in entries for key in entry.settings)
    values = {key: {repr(entry.settings.get(key)) for entry in entries} for key in keys}
    return sorted((key for key in keys if len(values[key]) > 1), key=lambda key: (-len(values[key]), key))


def labels(entries: Sequence[Entry], most: int | None = None) -> list[str]:
    """A label for each run: the method, and at ``most`` so many settings that tell runs of one method apart."""
    found = []
    for entry in entries:
        method = str(entry.summary["method"])
        twins = [other for other in entries if other.summary["method"] == method]
        keys = varying(twins)
        parts = [f"{key.rpartition('.')[2]}={brief(entry.settings.get(key))}" for key in keys[:most]]
        found.append(", ".join([method, *parts]))
    return found


def brief(value: Any) -> str:
    """A setting's value in few letters."""
    return f"{value:g}" if isinstance(value, float) else str(value)
