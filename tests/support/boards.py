"""The arguments of tiny strict comparisons."""

from __future__ import annotations

from pathlib import Path

TINY = [
    *("data=glyphs", "data.domains=[handwritten,printed]", "model=small", "train.rounds=2"),
    *("train.local_steps=2", "train.batch_size=8", "protocol.samples=24", "protocol.validation=0.25"),
    *("rounds.test_samples=12", "train.device=cpu"),
]
NUMBERS = ["--studies", "2", "--trials", "2", "--runs", "3"]


def strict_command(folder: Path, methods: str, *more: str) -> list[str]:
    """The arguments of a tiny strict comparison with its record in the same folder."""
    return ["compare", "rules=strict", "--methods", methods, *TINY, *NUMBERS, "--output", str(folder), *more]
