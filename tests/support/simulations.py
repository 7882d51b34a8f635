"""Flower simulations started by hand, where the product's own way would not go wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from server.flower.processes import Processes, flower_environment, free_port, program, wait_healthy

SMALL = (
    "data=glyphs",
    "protocol.samples=24",
    "train.rounds=2",
    "train.batch_size=8",
    "train.device=cpu",
    "rounds.registration=400",
    "rounds.deadline=400",
)


@dataclass
class Simulation:
    """A simulation SuperLink; ``folder`` has its homes and logs."""

    folder: Path


@contextmanager
def simulation(folder: Path, working_folder: Path) -> Iterator[Simulation]:
    """A simulation SuperLink with processes that work in ``working_folder``; all are ended with the block."""
    port = free_port()
    home = folder / "home"
    home.mkdir(parents=True)
    address = f'address = "127.0.0.1:{port}"\ninsecure = true\n'
    (home / "config.toml").write_text(f'[superlink]\ndefault = "simulation"\n\n[superlink.simulation]\n{address}')
    command = [program("flower-superlink"), "--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--disable-runtime-dependency-installation"]
    with Processes(working_folder, folder / "logs") as processes:
        link = processes.start("superlink", command, flower_environment(home))
        wait_healthy(link, f"http://127.0.0.1:{port}/health", 120)
        yield Simulation(folder)
