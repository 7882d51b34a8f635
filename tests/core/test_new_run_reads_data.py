"""A device reads its data again for a new run: a process that outlives runs sees images that were changed between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import client.node
from client.node import Node
from client.resident.messages import Question
from strategies.core.codec import read_registrations


@pytest.fixture(autouse=True)
def no_devices() -> Iterator[None]:
    client.node._DEVICES.clear()
    yield
    client.node._DEVICES.clear()


def write_images(folder: Path, seed: int) -> None:
    draws = np.random.default_rng(seed)
    for domain in ("day", "night"):
        for label in ("cat", "dog"):
            place = folder / domain / label
            place.mkdir(parents=True, exist_ok=True)
            for number in range(10):
                pixels = draws.integers(0, 256, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{number}.png")


def content(run: int, folder: Path) -> str:
    """Return the hash of the images with which the device registers in a run."""
    overrides = (
        f"method=fedavg data=folder data.root={folder / 'data'} data.domains=[day,night] data.classes=[cat,dog] "
        f"data.image_size=16 model=small protocol=one_per_domain train.device=cpu output={folder / 'out'}"
    )
    place = {"domain": "day", "data-dir": str(folder / "data"), "state-dir": str(folder / "state")}
    reply = Node(Question("register", run, {"overrides": overrides}, place)).register()
    return read_registrations(reply.text)[0].content


def test_images_that_changed_between_runs_are_seen(tmp_path: Path) -> None:
    write_images(tmp_path / "data", 0)
    first = content(1, tmp_path)
    assert content(1, tmp_path) == first
    write_images(tmp_path / "data", 1)
    assert content(1, tmp_path) == first, "a run keeps the images that it began with"
    assert content(2, tmp_path) != first
