"""A run and its exported model, made once."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest
from PIL import Image
from support.runs import run
from support.toy import CLASSES, DOMAINS, Toy, toy_settings

from common.data.batches import Split
from goldfinch.commands.export import export
from goldfinch.record import RunRecord

HERE = ["onnx"] if importlib.util.find_spec("onnxscript") else []


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """FPL on the toy domains, far enough to have prototypes and to know the classes."""
    folder = tmp_path_factory.mktemp("trained") / "fpl"
    run(toy_settings("fpl", folder, train={"rounds": 4, "epochs": 2}))
    return RunRecord(folder)


@pytest.fixture(scope="session")
def exported(trained: RunRecord, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of its exported model, in every format that the installed packages can write."""
    folder = tmp_path_factory.mktemp("exported") / "model"
    export(trained.folder, folder, HERE, licence="CC-BY-4.0")
    return folder


@dataclass(frozen=True)
class Apart:
    """A run as its server has it, without what clients keep, which is in ``devices``; and the exported shared part."""

    run: Path
    devices: Path
    shared: Path


@pytest.fixture(scope="session")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Apart]:
    """A run of a method whose clients keep a part of their network; each is made once."""

    @lru_cache
    def made(method: str) -> Apart:
        folder = tmp_path_factory.mktemp(method)
        found = Apart(folder / "run", folder / "devices", folder / "shared")
        run(toy_settings(method, found.run, train={"rounds": 1}))
        (found.run / "clients").rename(found.devices)
        export(found.run, found.shared)
        return found

    return made


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy domains as files: ``<domain>/{train,test}/<class>/<number>.png``."""
    root = tmp_path_factory.mktemp("pictures")
    toy = Toy()
    for name in DOMAINS:
        domain = toy.load(name)
        for part, split in (("train", domain.train), ("test", domain.test)):
            write(split, root / name / part, toy.class_names)
    return root


def write(split: Split, folder: Path, names: tuple[str, ...]) -> None:
    assert len(names) == CLASSES
    for number, (image, label) in enumerate(zip(split.images, split.labels.tolist(), strict=True)):
        path = folder / names[label] / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
