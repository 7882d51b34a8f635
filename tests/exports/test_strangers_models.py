"""A model's folder from a stranger: it is loaded, or refused with a message, without blocking or filling memory."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common import regular_files
from common import storage as files
from common.errors import GoldfinchError
from common.exports.model import load_model
from common.models.specs import DigitCNN
from common.regular_files import read_small
from common.storage import read_tensors

VALUES: tuple[Any, ...] = (None, True, -1, 0, 10**30, 1e308, "", "x", "../x", [], [[]], {}, {"_target_": "os.system"})


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    shutil.copytree(exported, tmp_path / "model")
    return tmp_path / "model"


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in nested dictionaries and lists; of a list, only its first entry."""
    if path:
        yield path
    if isinstance(content, dict):
        for key, value in content.items():
            yield from places(value, (*path, key))
    if isinstance(content, list) and content:
        yield from places(content[0], (*path, 0))


def changed(content: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(json.dumps(content))
    holder: Any = result
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return result


@pytest.mark.long
def test_every_change_of_a_description_is_loaded_or_refused_with_a_message(folder: Path) -> None:
    """About a thousand descriptions. An exception of another kind would be a traceback for a user."""
    place = folder / "model.json"
    content = json.loads(place.read_text())
    refused = 0
    for path in places(content):
        for value in VALUES:
            place.write_text(json.dumps(changed(content, path, value)))
            try:
                load_model(folder)
            except GoldfinchError:
                refused += 1
            except Exception as error:
                pytest.fail(f"{'.'.join(map(str, path))} = {value!r}: {type(error).__name__}: {error}")
    assert refused > 100


@pytest.mark.parametrize("name", ["model.json", "model.safetensors"])
def test_a_pipe_is_refused_instead_of_read(name: str, folder: Path) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(GoldfinchError, match="not a regular file"):
        load_model(folder)


def test_a_file_beyond_the_limit_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_TENSOR_FILE", 100)
    with pytest.raises(OSError, match="at most 100 are read"):
        read_tensors(folder / "model.safetensors")
    monkeypatch.setattr(regular_files, "MAX_TEXT", 100)
    with pytest.raises(OSError, match="at most 100 are read"):
        read_small(folder / "model.json")


def test_files_that_training_started_from_are_not_opened(folder: Path) -> None:
    place = folder / "model.json"
    content = json.loads(place.read_text())
    pipe = folder / "pipe"
    pipe.mkdir()
    os.mkfifo(pipe / "model.safetensors")
    content["architecture"]["model"]["pretrained"] = str(pipe)
    place.write_text(json.dumps(content))
    load_model(folder)


def test_a_network_of_many_gibibytes_is_refused_before_it_is_allocated(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A DigitCNN for images of 512 pixels has 7.8 GB of weights in one layer."""
    place = folder / "model.json"
    content = json.loads(place.read_text())
    content["architecture"]["model"] = {"_target_": "common.models.specs.DigitCNN"}
    content["image_size"] = 512
    place.write_text(json.dumps(content))
    built: list[str] = []
    build = DigitCNN.build

    def watched(self: DigitCNN, *args: Any) -> Any:
        model = build(self, *args)
        built.extend({parameter.device.type for parameter in model.parameters()})
        return model

    monkeypatch.setattr(DigitCNN, "build", watched)
    with pytest.raises(GoldfinchError, match="not those of the network"):
        load_model(folder)
    assert built == ["meta"]
