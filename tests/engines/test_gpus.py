"""Several GPUs in one machine: actors on Ray share them, and the inline engine says that it uses one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.own import forget
from support.simulations import SMALL

from bench.ray_clusters import ray_cluster
from common.settings import load_settings
from goldfinch.commands.running import one_device
from server.flower.submit import ROOT, run_on_ray
from server.run.conduct import prepare_output

SEEN = """
import os
import time
from pathlib import Path
from common.config import checked
from strategies.fedavg import FedAvg

@checked
class Seen(FedAvg):
    folder: str = ""

    def begin(self, context):
        place = Path(self.folder)
        (place / str(os.getpid())).write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
        end = time.monotonic() + 120
        while len(list(place.iterdir())) < 4 and time.monotonic() < end:
            time.sleep(0.1)
        super().begin(context)
"""
"""A method whose clients write down which GPUs their process sees, and wait until four processes have."""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("where", ["this machine", "a cluster"])
def test_four_actors_share_two_gpus(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPUs are made up: Ray counts them and sets CUDA_VISIBLE_DEVICES, and no CUDA is there."""
    (tmp_path / "seenlib.py").write_text(SEEN)
    (tmp_path / "seen").mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(tmp_path)]))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    words = ["method=seenlib.Seen", f"method.folder={tmp_path / 'seen'}", *SMALL, "train.rounds=1"]
    words += ["engine=ray", "engine.actors=4", "engine.gpus=0.5", f"output={tmp_path / 'run'}"]
    with ray_cluster(tmp_path / "logs") as cluster:
        if where == "a cluster":
            cluster.add("--num-cpus=4", "--num-gpus=2")
            words.append(f"engine.address={cluster.address}")
        settings = load_settings(words)
        prepare_output(settings)
        run_on_ray(settings, [])
    assert sorted(path.read_text() for path in (tmp_path / "seen").iterdir()) == ["0", "0", "1", "1"]
    forget("seenlib")


@pytest.mark.parametrize(
    ("count", "device", "told"),
    [
        (0, "auto", ""),
        (1, "auto", ""),
        (2, "cpu", ""),
        (2, "auto", "one device, cuda:0, of 2; engine=ray engine.gpus=1"),
        (8, "cuda:3", "one device, cuda:3, of 8; engine=ray engine.gpus=1"),
    ],
)
def test_the_inline_engine_says_that_it_uses_one_gpu(
    count: int, device: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    found = one_device(device)
    assert told in found
    assert bool(found) == bool(told)
