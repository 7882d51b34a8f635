"""Several SuperLinks of this machine, and one Flower home that names them all, for runs with engine.connections."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from server.commands.deployment import LocalDeployment
from server.flower.processes import flower_environment

ROOT = Path(__file__).resolve().parents[2]


def shared(nodes: Sequence[str], count: int) -> list[list[str]]:
    """The nodes of each of ``count`` SuperLinks."""
    return [list(nodes[place::count]) for place in range(count)]


def write_home(folder: Path, deployments: Mapping[str, LocalDeployment]) -> Path:
    """A Flower home with a connection for each SuperLink."""
    lines = []
    for name, deployment in deployments.items():
        trust = "insecure = true"
        if deployment.secure:
            trust = f"root-certificates = {json.dumps(str(deployment.certificates.operator / 'ca.crt'))}"
        lines.append(f'[superlink.{name}]\naddress = "{deployment.address}"\n{trust}\n')
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text("\n".join(lines))
    return folder


@contextlib.contextmanager
def started(
    folder: Path, names: Sequence[str], make: Callable[[Path, int], LocalDeployment]
) -> Iterator[tuple[Path, dict[str, LocalDeployment]]]:
    """Start a deployment for each name; gives the Flower home of all, and the deployments."""
    with contextlib.ExitStack() as stack:
        deployments = {name: stack.enter_context(make(folder / name, place)) for place, name in enumerate(names)}
        yield write_home(folder / "home-of-all", deployments), deployments


def start_run(home: Path, overrides: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """``goldfinch run`` as a process of its own; its output goes to ``log``."""
    environment = flower_environment(home, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    with log.open("wb") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "server.cli", "run", *overrides],
            cwd=log.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def connections(names: Sequence[str]) -> str:
    """The override that names the SuperLinks."""
    return f"engine.connections=[{','.join(names)}]"


def environment_of(home: Path) -> dict[str, str]:
    """The variables of a process that submits to the SuperLinks of ``home``."""
    return {**os.environ, "FLWR_HOME": str(home)}
