"""A deployment on this machine: a SuperLink and one SuperNode per device as real processes on the loopback interface.

With TLS and node authentication unless told otherwise. For trying things out, for demonstrations and for tests;
docs/deploy.md says how the same is done on several machines.
"""

from __future__ import annotations

import json
import ssl
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from common.errors import EngineError
from common.settings import RunSettings, check_deployable
from common.storage import write_text
from server.admission.certificates import Certificates, ensure
from server.admission.enrolment import Enrolment
from server.flower.processes import Child, Processes, flower_environment, free_port, program, wait_healthy
from server.flower.submit import submit
from server.run.events import Listener

Store = Literal["sqlite", "memory"]
"""What a SuperLink keeps its registry and messages in: an SQLite file, or its memory. docs/deploy.md compares them."""

MAX_NODES_IN_FILE = 50
"""Nodes beyond which a SuperLink spends more on its SQLite file than on everything else; see docs/scale.md."""

METRICS = "metrics.prom"
"""The file with a node's numbers, in its home."""

IN_MEMORY = ":flwr-in-memory:"
CONNECTION = "deployment"
START_SECONDS = 240.0
"""A program of Flower needs two seconds of processor time to start, which takes longer on a loaded machine."""

SOON = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}
"""Seconds between two polls of a SuperExec; Flower's default is one."""


@dataclass
class LocalDeployment:
    """SuperLink and SuperNodes as processes of this machine, ended on exit.

    Args:
        folder: everything the processes keep: homes, logs, certificates, the SuperLink's database, the nodes' state.
        nodes: each node's configuration by name, as in ``--node-config``; ``state-dir`` is added.
        threads: CPU threads of each node's programs.
        secure: TLS, and only nodes with enrolled keys; without it, anyone on this machine can take part.
        node_address: ``host:port`` that nodes are given, such as a reverse proxy's; ``None``: the SuperLink itself.
        store: where the SuperLink keeps keys, runs and messages: ``sqlite`` is a file, ``memory`` is lost when the
            SuperLink ends. In both cases :meth:`start_link` lets the same devices take part again.
    """

    folder: Path
    nodes: Mapping[str, Mapping[str, object]]
    threads: int = 1
    secure: bool = True
    node_address: str | None = None
    store: Store = "sqlite"
    children: dict[str, Child] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder = self.folder.absolute()
        self.processes = Processes(self.folder / "cwd", self.folder / "logs")
        self.port = free_port()
        self.home = self.folder / "home"
        self.certificates = Certificates(self.folder / "certificates")

    def __enter__(self) -> LocalDeployment:
        try:
            self.start_link()
            if self.secure and self.nodes:
                self.enrolment.enrol(list(self.nodes))
            for name in self.nodes:
                self.start_node(name)
            self.wait_for_nodes()
        except BaseException:
            self.processes.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.processes.stop()

    @property
    def address(self) -> str:
        """The SuperLink's ``host:port``."""
        return f"127.0.0.1:{self.port}"

    @property
    def enrolment(self) -> Enrolment:
        """The list of nodes that may take part."""
        return Enrolment(self.certificates.operator, CONNECTION, flower_environment(self.home))

    def start_link(self) -> Child:
        """Start the SuperLink; again after it ended, with the devices that were enrolled before."""
        files, verify = self.certificates, None
        scheme = "https" if self.secure else "http"
        if self.secure:
            ensure(files.folder, [], list(self.nodes))
            verify = ssl.create_default_context(cafile=str(files.authority))
            trust = f"root-certificates = {json.dumps(str(files.operator / 'ca.crt'))}"
            security = ["--ssl-ca-certfile", str(files.server.parent / "ca.crt"), "--ssl-certfile", str(files.server)]
            security += ["--ssl-keyfile", str(files.server_key), "--enable-supernode-auth"]
        else:
            trust, security = "insecure = true", ["--insecure"]
        write_text(
            self.home / "config.toml",
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "{self.address}"\n{trust}\n',
        )
        command = [program("flower-superlink"), *security, "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--database", self._database(), "--disable-runtime-dependency-installation"]
        child = self.processes.start("superlink", command, flower_environment(self.home, OMP_NUM_THREADS="1", **SOON))
        wait_healthy(child, f"{scheme}://{self.address}/health", START_SECONDS, verify or True)
        self.children["superlink"] = child
        if self.secure:
            self.enrolment.restore()
        return child

    def _database(self) -> str:
        """Return Flower's name of the SuperLink's store."""
        if self.store == "memory":
            return IN_MEMORY
        database = self.folder / "link.db"
        database.touch()
        database.chmod(0o600)  # it names devices and their keys; SQLite gives the files next to it the same mode
        return str(database)

    def start_node(self, name: str) -> Child:
        """Start one node; again under its name after it was killed."""
        home = self.folder / "nodes" / name
        home.mkdir(parents=True, exist_ok=True)
        config = {"state-dir": str(home / "state"), **self.nodes[name]}
        text = " ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in config.items())
        port = free_port()
        if self.secure:
            security = ["--root-certificates", str(self.certificates.node(name) / "ca.crt")]
            security += ["--auth-supernode-private-key", str(self.certificates.node_key(name))]
        else:
            security = ["--insecure"]
        command = [program("goldfinch-supernode"), *security, "--superlink", self.node_address or self.address]
        command += ["--port", str(port), "--node-config", text, "--metrics", str(home / METRICS)]
        environment = flower_environment(home, OMP_NUM_THREADS=str(self.threads), **SOON)
        child = self.processes.start(name, command, environment)
        self.children[name] = child
        self.ports[name] = port
        return child

    def wait_for_nodes(self, seconds: float = START_SECONDS) -> None:
        """Wait until every node answers.

        Raises:
            EngineError: a node ended or does not answer.
        """
        end = time.monotonic() + seconds
        for name, port in self.ports.items():
            wait_healthy(self.children[name], f"http://127.0.0.1:{port}/health", max(1.0, end - time.monotonic()))

    def run(self, settings: RunSettings, listeners: Sequence[Listener] = ()) -> None:
        """Submit a run and follow it to its end, as ``flwr run`` and ``flwr log`` do.

        Raises:
            EngineError: the run failed.
        """
        neutral = Path(tempfile.mkdtemp(dir=self.folder))
        submit(settings, CONNECTION, flower_environment(self.home), neutral, {}, listeners)


def store_for(nodes: int) -> Store:
    """Return the store that suits a number of nodes: a file for a few, which survives a restart, else memory."""
    if nodes > MAX_NODES_IN_FILE:
        return "memory"
    return "sqlite"


def one_node_per_client(settings: RunSettings) -> dict[str, dict[str, object]]:
    """Node configurations for every client of the run's protocol, by client id.

    Raises:
        ConfigError: the settings are only simulated.
        EngineError: the configuration leaves the data's place open and the data set needs one.
    """
    nodes: dict[str, dict[str, object]] = {}
    check_deployable(settings)
    for spec in settings.clients:
        nodes[spec.id] = {"domain": spec.domain, "index": spec.index}
        root = settings.data.root
        if root:
            if not Path(root).is_dir():
                raise EngineError(f"data.root={root} is not a folder")
            nodes[spec.id]["data-dir"] = str(Path(root).absolute())
    return nodes
