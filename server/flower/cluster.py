"""An existing Ray cluster that a simulation joins: whether it can be joined, and what its machines have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import ConfigError
from server.flower.processes import QUIET, in_one_line

ENDS_RUN = 6
"""Code of a reply by which :class:`server.flower.simulation.ClusterBackend` ends the run; the reason is for the user.

The code is Flower's ``ErrorCode.MOD_FAILED_PRECONDITION``, written as a number to save an import of Flower. No client
has a module that sends this code.
"""

JOIN_SECONDS = 60.0
"""Seconds that Ray may take to join the cluster. With nobody at the address, it tries for 107 s and then ends its
process without an error, so :data:`PROBE` connects to the address first."""

PROBE = """
import json, socket, sys
import ray
from ray._private.services import canonicalize_bootstrap_address
address = canonicalize_bootstrap_address(sys.argv[1])
host, _, port = address.rpartition(":")
socket.create_connection((host, int(port)), 5).close()
ray.init(address=address, log_to_driver=False, logging_level="ERROR")
print(json.dumps({"address": address, "nodes": ray.nodes()}))
"""
"""Joins the cluster as the simulation's process will, and prints its machines."""


@dataclass(frozen=True)
class Machine:
    """A machine of a cluster.

    Args:
        name: its host name and address.
        cpus: the CPUs that it offers to Ray.
        gpus: the GPUs that it offers to Ray.
    """

    name: str
    cpus: float
    gpus: float

    def places(self, gpus: float) -> int:
        """Return how many actors fit.

        Args:
            gpus: the share of a GPU that an actor takes, besides one CPU; it has it on one GPU.
        """
        places = int(self.cpus)
        if gpus:
            places = min(places, int(self.gpus) * int(1 / gpus))
        return places


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster that this machine belongs to.

    Args:
        address: ``host:port`` of its head.
        machines: the machines that are alive.
    """

    address: str
    machines: tuple[Machine, ...]


def places_on(machines: Sequence[Machine], gpus: float) -> int:
    """Return how many actors fit on the machines.

    Args:
        machines: the machines of a simulation.
        gpus: as in :meth:`Machine.places`.

    Raises:
        ConfigError: no actor fits.
    """
    places = sum(machine.places(gpus) for machine in machines)
    if places == 0:
        offers = [f"{machine.name} has {machine.cpus:g} CPU and {machine.gpus:g} GPU" for machine in machines]
        raise ConfigError(
            f"no actor fits: each takes one CPU and engine.gpus={gpus:g} GPU, but {'; '.join(offers)}. Choose an "
            "engine.gpus that they have; in a Ray cluster a machine has what its ray start --num-cpus --num-gpus says"
        )
    return places


def find_cluster(address: str) -> Cluster:
    """Return the cluster at ``address``.

    Args:
        address: ``HOST:PORT`` of the cluster's head, or ``auto``: the environment's ``RAY_ADDRESS``, else the cluster
            that ``ray start`` made on this machine.

    Raises:
        ConfigError: no cluster is there, or this machine cannot join the cluster.
    """
    with tempfile.TemporaryDirectory(prefix="goldfinch-", ignore_cleanup_errors=True) as folder:
        try:
            done = subprocess.run(  # noqa: S603  # our own command, no shell
                [sys.executable, "-c", PROBE, address],
                env={**os.environ, **QUIET},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=JOIN_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            problem = f"what listens there does not answer as Ray's head does within {JOIN_SECONDS:.0f} s"
            raise _not_joined(address, problem) from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"Ray ended with exit status {done.returncode}"]
        raise _not_joined(address, in_one_line(lines[-1]))
    cluster = json.loads(done.stdout.strip().splitlines()[-1])
    machines = [machine_of(node) for node in cluster["nodes"] if node["Alive"]]
    return Cluster(cluster["address"], tuple(machines))


def machine_of(node: dict[str, object]) -> Machine:
    """Return the machine of an entry of ``ray.nodes()``."""
    resources = node["Resources"]
    assert isinstance(resources, dict)
    name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
    return Machine(name, resources.get("CPU", 0.0), resources.get("GPU", 0.0))


def _not_joined(address: str, problem: str) -> ConfigError:
    """Return the error of an address that leads to no cluster, or to one that this machine cannot join."""
    return ConfigError(
        f"engine.address={address}: this machine joined no Ray cluster there: {problem}. Expected is HOST:PORT as "
        "printed by ray start --head, or auto, on a machine that has joined it by ray start --address=HOST:PORT with "
        "the same versions of Ray and Python; ray status --address=HOST:PORT shows a cluster. Without engine.address "
        "the simulation runs on this machine alone"
    )
