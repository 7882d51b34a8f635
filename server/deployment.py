"""A deployment on this machine: a SuperLink and one SuperNode per device as real processes on the loopback interface.

For trying things out, for demonstrations and for tests; docs/deploy.md says how the same is done on several machines.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import httpx

from common.errors import EngineError
from common.settings import RunSettings
from server.history import Listener
from server.processes import Child, Processes, flower_environment, free_port, program, wait_healthy
from server.submit import submit


@dataclass
class LocalDeployment:
    """SuperLink and SuperNodes as processes of this machine, ended on exit.

    Args:
        folder: everything the processes keep: homes, logs, the SuperLink's database, the nodes' state.
        nodes: each node's configuration by name, as in ``--node-config``; ``state-dir`` is added.
        threads: CPU threads of each node's programs.
    """

    folder: Path
    nodes: Mapping[str, Mapping[str, object]]
    threads: int = 1
    children: dict[str, Child] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder = self.folder.absolute()
        self.processes = Processes(self.folder / "cwd", self.folder / "logs")
        self.port = free_port()
        self.home = self.folder / "home"

    def __enter__(self) -> LocalDeployment:
        try:
            self.start_link()
            for name in self.nodes:
                self.start_node(name)
            self.wait_for_nodes()
        except BaseException:
            self.processes.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.processes.stop()

    def start_link(self) -> Child:
        """Start the SuperLink, with its registry in a database so that it survives a restart."""
        self.home.mkdir(parents=True, exist_ok=True)
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "deployment"\n\n[superlink.deployment]\n'
            f'address = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        command = [program("flower-superlink"), "--insecure", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--database", str(self.folder / "link.db"), "--disable-runtime-dependency-installation"]
        child = self.processes.start("superlink", command, flower_environment(self.home, OMP_NUM_THREADS="1"))
        wait_healthy(child, f"http://127.0.0.1:{self.port}/health")
        self.children["superlink"] = child
        return child

    def start_node(self, name: str) -> Child:
        """Start one node; again under its name after it was killed."""
        home = self.folder / "nodes" / name
        home.mkdir(parents=True, exist_ok=True)
        config = {"state-dir": str(home / "state"), **self.nodes[name]}
        text = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        port = free_port()
        command = [program("flower-supernode"), "--insecure", "--superlink", f"127.0.0.1:{self.port}"]
        command += ["--port", str(port), "--node-config", text]
        environment = flower_environment(home, OMP_NUM_THREADS=str(self.threads))
        child = self.processes.start(name, command, environment)
        self.children[name] = child
        self.ports[name] = port
        return child

    def wait_for_nodes(self, seconds: float = 60.0) -> None:
        """Wait until every node answers.

        Raises:
            EngineError: a node ended or does not answer.
        """
        end = time.monotonic() + seconds
        for name, port in self.ports.items():
            wait_healthy(self.children[name], f"http://127.0.0.1:{port}/health", max(1.0, end - time.monotonic()))

    def run(self, settings: RunSettings, overrides: Sequence[str], listeners: Sequence[Listener] = ()) -> None:
        """Submit a run and follow it to its end, as ``flwr run`` and ``flwr log`` do.

        Raises:
            EngineError: the run failed.
        """
        neutral = Path(tempfile.mkdtemp(dir=self.folder))
        submit(settings, overrides, "deployment", flower_environment(self.home), neutral, {}, listeners)

    def healthy(self) -> bool:
        """Whether the SuperLink answers."""
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=2.0).is_success
        except httpx.HTTPError:
            return False


def one_node_per_client(settings: RunSettings) -> dict[str, dict[str, object]]:
    """Node configurations for every client of the run's protocol, by client id.

    Raises:
        EngineError: the configuration leaves the data's place open and the data set needs one.
    """
    nodes: dict[str, dict[str, object]] = {}
    for spec in settings.protocol.clients(settings.data):
        nodes[spec.id] = {"domain": spec.domain, "index": spec.index}
        root = settings.data.root
        if root:
            if not Path(root).is_dir():
                raise EngineError(f"data.root={root} is not a folder")
            nodes[spec.id]["data-dir"] = str(Path(root).absolute())
    return nodes
