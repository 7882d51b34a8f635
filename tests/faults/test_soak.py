"""A thousand rounds in which next to nothing is trained: memory and open files must stay where they are."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
from support.faults import forked, trials
from support.toy import toy_settings

from server.conduct import conduct, prepare_output
from server.inline import InlineEngine

MOST_SLOPE = 1.0
"""MB of resident memory per 100 rounds."""


def rounds_to_soak(usual: int) -> int:
    return 1000 if trials(0) else usual


def soak(folder: str, rounds: int, said: str) -> None:
    """A run that notes memory (MB) and open files every ten rounds."""
    settings = toy_settings(
        "fedavg",
        Path(folder),
        train={"rounds": rounds, "local_steps": 1},
        rounds={"evaluate_every": 100},
        overrides=("model=small",),
    )
    notes: list[tuple[int, float, int]] = []

    def note(name: str, entry: Mapping[str, Any]) -> None:
        if name == "round done" and entry["round"] % 10 == 0:
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            files = len(list(Path("/proc/self/fd").iterdir()))
            notes.append((entry["round"], pages * os.sysconf("SC_PAGE_SIZE") / 1e6, files))

    prepare_output(settings)
    conduct(settings, InlineEngine(settings), [note])
    Path(said).write_text(json.dumps(notes))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rounds", [rounds_to_soak(100)])
def test_memory_and_open_files_stay_flat(rounds: int, tmp_path: Path) -> None:
    process = forked(soak, str(tmp_path / "run"), rounds, str(tmp_path / "notes.json"))
    process.join(3000)
    assert process.exitcode == 0
    notes = json.loads((tmp_path / "notes.json").read_text())
    settled = [entry for entry in notes if entry[0] > rounds // 5]
    numbers, memory, files = zip(*settled, strict=True)
    slope = 100 * float(numpy.polyfit(numbers, memory, 1)[0])
    print(f"\n{rounds} rounds: {slope:+.3f} MB per 100 rounds, {memory[0]:.1f} -> {memory[-1]:.1f} MB, files {files}")
    assert max(files) == min(files)
    assert slope < MOST_SLOPE
