"""Files are whole or absent, and a state's hash sees everything and nothing else."""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from support.runs import run
from support.toy import toy_settings

from common import storage as files
from common.prototypes import PrototypeSet
from common.storage import (
    DTYPES,
    GlobalState,
    read_tensors,
    safetensors_pieces,
    tensors_sha256,
    write_bytes,
    write_tensors,
)


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("broken", ["write", "fsync", "replace"])
def test_a_crash_on_the_way_leaves_the_old_file(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "state"
    write_bytes(target, b"old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if broken == "write":
        monkeypatch.setattr(files.os, "fdopen", lambda handle, mode: _FullDisk(handle))
    elif broken == "fsync":
        monkeypatch.setattr(files.os, "fsync", fail)
    else:
        monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="No space left") as caught:
        write_bytes(target, b"new")
    assert caught.value.filename == str(target)
    monkeypatch.undo()
    assert target.read_bytes() == b"old"
    assert leftovers(tmp_path) == ["state"]


class _FullDisk:
    def __init__(self, handle: int) -> None:
        os.close(handle)

    def __enter__(self) -> _FullDisk:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def write(self, content: bytes) -> int:
        raise OSError(28, "No space left on device")


def test_files_of_a_run_follow_the_umask_and_only_the_owner_reads_states(tmp_path: Path) -> None:
    umask = 0o027
    before = os.umask(umask)
    try:
        run(toy_settings("moon", tmp_path, train={"rounds": 1}))
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*") if path.is_file()}
    states = [modes.pop(path) for path in tmp_path.glob("clients/**/*.safetensors")]
    assert len(modes) >= 7
    assert set(modes.values()) == {0o666 & ~umask}
    assert set(states) == {0o600}


def test_content_reaches_the_disk_before_the_name_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    real_sync, real_replace = os.fsync, Path.replace

    def sync(handle: int) -> None:
        order.append("sync folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "sync file")
        real_sync(handle)

    def replace(self: Path, target: Path) -> Path:
        order.append("rename")
        return real_replace(self, target)

    monkeypatch.setattr(files.os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", replace)
    write_bytes(tmp_path / "state", b"new")
    assert order == ["sync file", "rename", "sync folder"]


def tensors() -> dict[str, torch.Tensor]:
    return {"b": torch.arange(6.0).view(2, 3), "a": torch.tensor(3), "c": torch.zeros(0, 2, dtype=torch.bfloat16)}


def test_two_names_for_one_memory_become_two(tmp_path: Path) -> None:
    shared = torch.arange(4.0)
    trained = shared[2:].clone().requires_grad_()
    write_tensors(tmp_path / "t", {"whole": shared, "again": shared, "half": shared[2:], "trained": trained})
    back = read_tensors(tmp_path / "t")[0]
    assert [tensor.tolist() for tensor in back.values()] == [[0, 1, 2, 3], [2, 3], [2, 3], [0, 1, 2, 3]]


def test_the_format_is_the_library_s_to_the_byte() -> None:
    every = {
        f"{name}.ü\n{len(shape)}": torch.ones(shape).to(dtype)
        for shape in ((), (3,), (0, 2))
        for dtype, name in DTYPES.items()
    }
    for metadata in ({}, {"why": 'a "test"'}):
        assert b"".join(safetensors_pieces(every, metadata)) == safetensors.torch.save(every, metadata)


def test_pieces_of_tensors_are_not_copied() -> None:
    tensor = torch.arange(5.0)
    piece = memoryview(safetensors_pieces({"a": tensor})[1])
    assert np.frombuffer(piece, np.uint8).ctypes.data == tensor.data_ptr()


def test_every_truncated_tensor_file_is_an_error(tmp_path: Path) -> None:
    write_tensors(tmp_path / "t", tensors())
    whole = (tmp_path / "t").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "torn").write_bytes(whole[:length])
        with pytest.raises(ValueError, match="not a complete"):
            read_tensors(tmp_path / "torn")


def state(**changes: object) -> GlobalState:
    prototypes = PrototypeSet(torch.eye(2), torch.tensor([0, 3]), torch.tensor([1.0, 2.0]))
    fields: dict[str, object] = {
        "round": 4,
        "weights": tensors(),
        "prototypes": prototypes,
        "extra": {"h": torch.ones(1)},
    }
    return GlobalState(**{**fields, **changes})  # type: ignore[arg-type]  # the fields' own types


DIFFERENT = {
    "round": {"round": 5},
    "a bit": {"weights": {**tensors(), "a": torch.tensor(2)}},
    "minus zero": {"weights": {**tensors(), "b": torch.tensor([[-0.0, 1, 2], [3, 4, 5]])}},
    "a name": {"weights": {"b": tensors()["b"], "A": tensors()["a"], "c": tensors()["c"]}},
    "dtype": {"weights": {**tensors(), "a": torch.tensor(3, dtype=torch.int32)}},
    "shape": {"weights": {**tensors(), "b": tensors()["b"].view(3, 2)}},
    "shape of nothing": {"weights": {**tensors(), "c": torch.zeros(2, 0, dtype=torch.bfloat16)}},
    "part": {"weights": {**tensors(), "h": torch.ones(1)}, "extra": {}},
    "prototype weights": {
        "prototypes": PrototypeSet(torch.eye(2), torch.tensor([0, 3]), torch.tensor([1.0, 2.5])),
    },
    "prototype labels": {"prototypes": PrototypeSet(torch.eye(2), torch.tensor([0, 2]), torch.tensor([1.0, 2.0]))},
    "no prototypes": {"prototypes": PrototypeSet.empty(2)},
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_the_hash_sees(what: str) -> None:
    assert state(**DIFFERENT[what]).sha256() != state().sha256()


def test_the_hash_does_not_see_order_memory_or_device_layout() -> None:
    turned = {name: tensors()[name] for name in reversed(list(tensors()))}
    assert state(weights=turned).sha256() == state().sha256()
    strided = {**tensors(), "b": tensors()["b"].T.contiguous().T}
    assert not strided["b"].is_contiguous()
    assert state(weights=strided).sha256() == state().sha256()


def test_the_hash_is_of_these_bytes() -> None:
    """Written out, because the hashes of recorded runs must stay comparable."""
    digest = hashlib.sha256(b"round=1")
    digest.update(b"|n|torch.int64|()|" + struct.pack("<q", 3))
    digest.update(b"|w|torch.float32|(2,)|" + struct.pack("<2f", 1.0, -2.0))
    assert tensors_sha256({"w": torch.tensor([1.0, -2.0]), "n": torch.tensor(3)}, "round=1") == digest.hexdigest()
