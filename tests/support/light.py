"""Light nodes of bench/light_nodes.py with different replies, at several SuperLinks of this machine."""

from __future__ import annotations

import contextlib
import os
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.shards import ROOT, shared, write_home

os.environ.setdefault("CHECKOUT", str(ROOT))
sys.path.append(str(ROOT / "bench"))

import light_nodes

from common.settings import RunSettings

RUN = light_nodes.settings_of


class DifferingNode(light_nodes.LightNode):
    """A light node that changes the model a little, each in its own way, so that an average depends on all."""

    def trained(self, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        factor = 1 + 1e-3 * (1 + zlib.crc32(self.client.client.encode()) % 17)
        return {name: tensor * factor if tensor.is_floating_point() else tensor for name, tensor in weights.items()}


class LightShards:
    """SuperLinks with light nodes.

    Args:
        folder: everything of the processes.
        names: the SuperLinks' names.
        settings: a run; each of its clients has a node, at one SuperLink after the other.
        secure: TLS and enrolled keys.
        store: of the SuperLinks.
    """

    def __init__(
        self, folder: Path, names: Sequence[str], settings: RunSettings, *, secure: bool, store: Any = "sqlite"
    ) -> None:
        self.folder = folder
        self.names = names
        self.settings = settings
        self.secure = secure
        self.store = store
        specs = settings.protocol.clients(settings.data)
        self.clients = dict(zip(names, shared([spec.id for spec in specs], len(names)), strict=True))
        self.domains = {spec.id: spec.domain for spec in specs}

    @contextlib.contextmanager
    def running(self) -> Iterator[LightShards]:
        """Start all; they are stopped after the block."""
        with contextlib.ExitStack() as stack:
            self.deployments = {}
            nodes = []
            for name, clients in self.clients.items():
                keys: dict[str, dict[str, object]] = {}
                if self.secure:
                    keys = {client: {} for client in clients}
                deployment = light_nodes.LightDeployment(self.folder / name, keys, secure=self.secure, store=self.store)
                self.deployments[name] = stack.enter_context(deployment)
                nodes += [self._node(deployment, client) for client in clients]
            self.home = write_home(self.folder / "home-of-all", self.deployments)
            self.nodes = stack.enter_context(light_nodes.LightNodes(nodes, 8))
            yield self

    def _node(self, deployment: light_nodes.LightDeployment, client: str) -> DifferingNode:
        registration = light_nodes.registration_of(self.settings, client, self.domains[client])
        if not self.secure:
            key = light_nodes.generate_key_pairs()
            return DifferingNode(deployment.address, None, key, registration, registered=False)
        files = deployment.certificates
        private: Any = light_nodes.load_ssh_private_key(files.node_key(client).read_bytes(), None)
        key = (private, private.public_key())
        authority = str(files.operator / "ca.crt")
        return DifferingNode(deployment.address, authority, key, registration, registered=True)
