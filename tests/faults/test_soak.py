"""Hundreds of rounds in which next to nothing is trained: memory and open files must stay where they are."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
from support.faults import events, forked, trials
from support.federation import ROOT
from support.toy import toy_settings

from server.engines.inline import InlineEngine
from server.run.conduct import prepare_output, run_federation

MAX_SLOPE, MAX_SLOPE_SHORT = 1.0, 5.0
"""MB of resident memory per 100 rounds: over a thousand, and over one or two hundred, where a step of the allocator by
a megabyte or two looks like a slope. A model that stays behind every round would be 50 (seen: 0.0 to 2.2)."""


def rounds_to_soak(usual: int) -> int:
    return 1000 if trials(0) else usual


def most(rounds: int) -> float:
    return MAX_SLOPE if rounds >= 1000 else MAX_SLOPE_SHORT


def soak(folder: str, rounds: int, place: str) -> None:
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
    run_federation(settings, InlineEngine(settings), [note])
    Path(place).write_text(json.dumps(notes))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rounds", [rounds_to_soak(100)])
@pytest.mark.long
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
    assert slope < most(rounds)


RAY_S_OWN = {"gcs_server", "raylet", "log_monitor.py", "main.py", "RAY_WORKER_DYNAMIC_OPTION_PLACEHOLDER"}
"""Programs of Ray's; their tables of finished tasks grow up to limits of their own."""

# ---- on Ray ----------------------------------------------------------------------------------------------------------


def look(mark: str) -> dict[tuple[int, str], tuple[float, int]]:
    """Of every process started under ``mark``, by id and name: resident memory in MB, open files."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"GOLDFINCH_TEST={mark}".encode() not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").split()
            names = (Path(word).name for word in words if word[:1] != "-")
            name = next((name for name in names if not name.startswith("python")), "?")
            pages = int((entry / "statm").read_text().split()[1])
            memory = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
            name = name.removesuffix(".run")  # an actor has it while it works
            found[int(entry.name), name] = (memory, len(list((entry / "fd").iterdir())))
    return found


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(7200)
def test_memory_and_open_files_stay_flat_on_ray(tmp_path: Path) -> None:
    rounds, output = 1000, tmp_path / "run"  # four minutes; an actor's allocator settles only after two hundred
    command = [sys.executable, "-m", "goldfinch.cli", "run", "engine=ray", "engine.actors=1", f"output={output}"]
    command += ["method=fedavg", "model=small", "protocol.samples=24", "train.device=cpu", "train.local_steps=1"]
    command += [f"train.rounds={rounds}", "rounds.evaluate_every=100", "--quiet"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GOLDFINCH_TEST": str(output)}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True)
    notes: dict[tuple[int, str], list[tuple[int, float, int]]] = {}
    while process.poll() is None:
        time.sleep(1)
        number = max((entry["round"] for entry in events(output, "round done")), default=0)
        for key, (memory, files) in look(str(output)).items() if 0 < number < rounds else ():
            notes.setdefault(key, []).append((number, memory, files))
    assert process.returncode == 0
    growth = {}
    for (_, name), seen in notes.items():
        settled = [note for note in seen if note[0] > rounds // 3]
        if len({number for number, _, _ in settled}) < 10 or settled[-1][0] < 0.8 * rounds:
            continue  # started later, or a worker of Ray's that was never used
        numbers, memory, files = zip(*settled, strict=True)
        slope = 100 * float(numpy.polyfit(numbers, memory, 1)[0])
        growth[name] = slope
        says = f"{memory[0]:.1f} -> {memory[-1]:.1f} MB, files {files[0]} -> {files[-1]}"
        print(f"{name}: {slope:+.3f} MB per 100 rounds, {says}")
        if name in RAY_S_OWN:
            continue
        assert slope < most(rounds), name
        assert files[-1] <= files[0] + 2, name
    assert {"goldfinch.cli", "flwr-simulation", "ray::ClientAppActor"} <= set(growth)
