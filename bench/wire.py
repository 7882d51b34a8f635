"""The byte ledger against the wire: a SuperLink, one SuperNode, and between them a proxy that counts.

    python bench/wire.py [rounds]
    python bench/wire.py --dry-run     # two rounds of the small net

Prints bytes by call of Flower's fleet API, up and down, and the ledger's totals of the same run. Without TLS, so that
the proxy can tell the calls apart.
"""

from __future__ import annotations

import json
import re
import socket
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, before an installed copy

from bench.measuring import arguments, start
from common.settings import load_settings
from goldfinch.commands.deployment import LocalDeployment, one_node_per_client
from goldfinch.record import RunRecord
from server.run.conduct import prepare_output

CHOSEN = ["method=fedavg", "data=glyphs", "data.domains=[printed]", "model=resnet10", "protocol.samples=24"]
CHOSEN += ["train.local_steps=1", "train.batch_size=8", "rounds.test_samples=1", "train.device=cpu"]
CHOSEN += ["rounds.deadline=1500", "rounds.registration=1500"]


class CountingProxy:
    """Passes connections on to ``target`` and counts bytes by the path of the request that they belong to."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.bytes: dict[tuple[str, str], int] = defaultdict(int)
        self.calls: dict[str, int] = defaultdict(int)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            device, _ = self.listener.accept()
            try:
                link = socket.create_connection(("127.0.0.1", self.target))
            except OSError:  # the SuperLink is not there yet, or no longer
                device.close()
                continue
            place = {"path": "?"}
            threading.Thread(target=self._pass, args=(device, link, "up", place), daemon=True).start()
            threading.Thread(target=self._pass, args=(link, device, "down", place), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, way: str, place: dict[str, str]) -> None:
        try:
            while data := source.recv(1 << 18):
                if way == "up" and (found := re.match(rb"(?:GET|POST|PUT) (\S+) HTTP/1", data)):
                    place["path"] = re.sub(r"[0-9a-f]{16,}|\d+", "*", found[1].decode())
                    self.calls[place["path"]] += 1
                self.bytes[place["path"], way] += len(data)
                sink.sendall(data)
        except OSError:
            pass
        finally:
            for end in (source, sink):
                end.close()


def main() -> None:
    """One run through the proxy."""
    parser = arguments(__doc__)
    parser.add_argument("rounds", nargs="?", type=int, default=2)
    options = parser.parse_args()
    small = ["model=small"] if options.dry_run else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        chosen = [*CHOSEN, *small, f"train.rounds={options.rounds}", "engine=superlink"]
        chosen += [f"output={folder}/run", "overwrite=true"]
        settings = load_settings(chosen)
        prepare_output(settings)
        deployment = LocalDeployment(folder / "deployment", one_node_per_client(settings), secure=False)
        proxy = CountingProxy(deployment.port)
        deployment.node_address = f"127.0.0.1:{proxy.port}"
        with deployment:
            deployment.run(settings)
        summary = RunRecord.open(folder / "run").summary
    for path in sorted(proxy.calls, key=lambda item: -proxy.bytes[item, "down"] - proxy.bytes[item, "up"]):
        down, up = proxy.bytes[path, "down"], proxy.bytes[path, "up"]
        print(f"{path:60} calls {proxy.calls[path]:4} down {down:12,} up {up:12,}")
    print("ledger", json.dumps(summary["bytes_by_part"]))
    for way in ("down", "up"):
        wire = sum(size for (_, other), size in proxy.bytes.items() if other == way)
        ledger = summary["bytes_by_part"][way]["total"]
        print(f"{way}: wire {wire:,}, ledger {ledger:,}, wire / ledger {wire / ledger:.4f}")


if __name__ == "__main__":
    start(main)
