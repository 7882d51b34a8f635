"""A SuperLink for one simulation, started before it is needed: this process imports and checks in the meantime."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from server.flower.processes import Child, Processes, flower_environment, free_port, program, wait_healthy

CONNECTION = "simulation"
"""Its name in the Flower configuration that comes with it."""


@dataclass
class SimulationLink:
    """What a run needs to know of its SuperLink.

    Args:
        neutral: an empty folder that ends with it.
        environment: of Flower's programs; its Flower home knows :data:`CONNECTION`.
        child: the SuperLink's process.
        address: ``host:port``.
        logs: where its log is kept in the end; ``None``: nowhere, since no run was submitted.
    """

    neutral: Path
    environment: Mapping[str, str]
    child: Child
    address: str
    logs: Path | None = None

    def wait(self, logs: Path) -> None:
        """Until it answers; its log will be kept in ``logs``.

        Raises:
            EngineError: it ended or does not answer; the message has the end of its log.
        """
        self.logs = logs
        wait_healthy(self.child, f"http://{self.address}/health", log=logs / self.child.log.name)

    def keep_log(self) -> None:
        """Append its log to the run's."""
        if self.logs is not None and self.child.log.exists():
            self.logs.mkdir(parents=True, exist_ok=True)
            with self.child.log.open("rb") as source, (self.logs / self.child.log.name).open("ab") as target:
                shutil.copyfileobj(source, target)


@contextlib.contextmanager
def simulation_link() -> Iterator[SimulationLink]:
    """A SuperLink that is about to come up, in a neutral folder; it and all it started end with the block.

    Raises:
        EngineError: Flower is not installed beside this Python.
    """
    with contextlib.ExitStack() as stack:
        neutral = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="goldfinch-", ignore_cleanup_errors=True))
        )
        port, home = str(free_port()), neutral / "home"
        address = f"127.0.0.1:{port}"
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
            f'address = "{address}"\ninsecure = true\n'
        )
        environment = flower_environment(home)
        command = [program("flower-superlink"), "--insecure", "--simulation", "--host", "127.0.0.1", "--port", port]
        command += ["--disable-runtime-dependency-installation"]
        processes = Processes(neutral / "cwd", neutral / "logs")
        link = SimulationLink(neutral, environment, processes.start("superlink", command, environment), address)
        stack.callback(link.keep_log)
        stack.callback(processes.stop)
        yield link
