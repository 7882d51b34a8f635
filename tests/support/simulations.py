"""Flower simulations started by hand, where the product's own way would not go wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from common.settings import load_settings
from server.flower.processes import Processes, flower_environment, free_port, program, wait_healthy
from server.flower.submit import submit
from server.results.run import RunFolder
from server.run.conduct import prepare_output

SMALL = (
    "data=glyphs",
    "protocol.samples=24",
    "train.rounds=2",
    "train.batch_size=8",
    "train.device=cpu",
    "rounds.registration=400",
    "rounds.deadline=400",
)


class Simulation:
    """A simulation SuperLink: submits runs to it.

    Args:
        folder: homes, logs and bundles.
        port: where it listens.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port, self.count = folder, port, 0

    def run(self, output: Path, overrides: Sequence[str], **federation: object) -> Mapping[str, object]:
        """The summary of a run with ``federation`` options such as ``num_supernodes``."""
        self.count += 1
        neutral = self.folder / f"run-{self.count}"
        neutral.mkdir()
        chosen = ["method=fpl", *SMALL, *overrides, "overwrite=true", f"output={output}"]
        settings = load_settings(chosen)
        prepare_output(settings)
        options: dict[str, object] = {"num-supernodes": 4, "client-resources-num-cpus": 1, "init-args-num-cpus": 2}
        options |= {key.replace("_", "-"): value for key, value in federation.items()}
        submit(settings, "simulation", flower_environment(self.folder / "home"), neutral, options, [])
        return RunFolder.open(output).summary


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
        yield Simulation(folder, port)
