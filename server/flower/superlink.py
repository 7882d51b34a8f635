"""A SuperLink for one simulation, started while this process imports its libraries and checks the settings."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from server.flower.processes import Child, Processes, flower_environment, free_port, program, wait_healthy

CONNECTION = "simulation"
"""The connection's name in the Flower configuration of this SuperLink."""


@dataclass
class SimulationLink:
    """The SuperLink of a run.

    Args:
        neutral: an empty folder that is removed with the SuperLink.
        environment: environment of Flower's programs; its Flower home has the connection :data:`CONNECTION`.
        child: the SuperLink's process.
        address: ``host:port``.
        logs: folder to keep the SuperLink's log in; ``None`` keeps none, because no run was submitted.
    """

    neutral: Path
    environment: Mapping[str, str]
    child: Child
    address: str
    logs: Path | None = None

    def wait(self, logs: Path) -> None:
        """Wait until the SuperLink answers.

        Args:
            logs: folder to keep the SuperLink's log in.

        Raises:
            EngineError: the SuperLink ended or does not answer. The message has the end of its log.
        """
        self.logs = logs
        wait_healthy(self.child, f"http://{self.address}/health", log=logs / self.child.log.name)

    def keep_log(self) -> None:
        """Append the SuperLink's log to the run's."""
        if self.logs is None or not self.child.log.exists():
            return
        self.logs.mkdir(parents=True, exist_ok=True)
        with self.child.log.open("rb") as source, (self.logs / self.child.log.name).open("ab") as target:
            shutil.copyfileobj(source, target)


@contextlib.contextmanager
def simulation_link(**more: str) -> Iterator[SimulationLink]:
    """Start a SuperLink in an empty folder; stop the SuperLink and all processes that it started after the block.

    Args:
        more: variables of its environment, such as the ``RAY_ADDRESS`` of a cluster to join.

    Yields:
        The SuperLink, which need not answer yet; see :meth:`SimulationLink.wait`.

    Raises:
        EngineError: Flower is not installed next to this Python.
    """
    with contextlib.ExitStack() as stack:
        neutral = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="goldfinch-", ignore_cleanup_errors=True))
        )
        port = str(free_port())
        address = f"127.0.0.1:{port}"
        home = neutral / "home"
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
            f'address = "{address}"\ninsecure = true\n'
        )
        environment = flower_environment(home, **more)
        command = [program("flower-superlink"), "--insecure", "--simulation", "--host", "127.0.0.1", "--port", port]
        command += ["--disable-runtime-dependency-installation"]
        processes = Processes(neutral / "cwd", neutral / "logs")
        child = processes.start("superlink", command, environment)
        link = SimulationLink(neutral, environment, child, address)
        stack.callback(link.keep_log)
        stack.callback(processes.stop)
        yield link
