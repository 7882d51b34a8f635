from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from common.data.cache import cache_directory, cached


class Builder:
    """Counts how often it was asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, torch.Tensor]:
        self.calls += 1
        return {"images": torch.arange(24, dtype=torch.uint8).view(2, 3, 2, 2), "labels": torch.tensor([3, 4])}


def same(tensors: dict[str, torch.Tensor]) -> bool:
    wanted = Builder()()
    return set(tensors) == set(wanted) and all(torch.equal(tensors[name], wanted[name]) for name in wanted)


def test_made_once_and_read_again(own_cache: Path) -> None:
    build = Builder()
    assert same(cached("kind", ["a", 1], build))
    assert same(cached("kind", ["a", 1], build))
    assert build.calls == 1
    assert [path.suffix for path in own_cache.iterdir()] == [".safetensors"]


def test_another_key_is_another_entry() -> None:
    build = Builder()
    for key in (["a", 1], ["a", "1"], ["a1"], ["a", 1, ""]):
        cached("kind", key, build)
    assert build.calls == 4


@pytest.mark.parametrize("damage", ["empty", "truncated", "flipped", "rubbish", "headless"])
def test_a_damaged_file_is_made_again(own_cache: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    build = Builder()
    cached("kind", ["key"], build)
    (path,) = own_cache.iterdir()
    content = path.read_bytes()
    last = bytes([content[-1] ^ 1])
    path.write_bytes(
        {
            "empty": b"",
            "truncated": content[:-3],
            "flipped": content[:-1] + last,
            "rubbish": b"rubbish" * 99,
            "headless": b"\xff" * 8 + content[8:],
        }[damage]
    )
    assert same(cached("kind", ["key"], build))
    assert build.calls == 2
    assert str(path) in caplog.text
    assert same(cached("kind", ["key"], build))
    assert build.calls == 2


def test_changing_what_was_read_does_not_change_the_cache() -> None:
    build = Builder()
    cached("kind", ["key"], build)
    cached("kind", ["key"], build)["images"].zero_()
    assert same(cached("kind", ["key"], build))
    assert build.calls == 1


def test_a_folder_that_cannot_be_written_is_no_error(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = own_cache / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("GOLDFINCH_CACHE", str(blocked / "below"))
    assert same(cached("kind", ["key"], Builder()))


@contextmanager
def not_as_root() -> Iterator[None]:
    """As an unprivileged user where the tests run as root, who may write everywhere."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if user == 0:
            os.seteuid(0)


def test_a_read_only_folder_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:  # which others may enter, unlike pytest's
        Path(folder).chmod(0o555)
        monkeypatch.setenv("GOLDFINCH_CACHE", folder)
        with not_as_root():
            assert not os.access(folder, os.W_OK, effective_ids=True)
            assert same(cached("kind", ["key"], Builder()))
        assert not list(Path(folder).iterdir())
        Path(folder).chmod(0o755)


def test_a_failed_build_leaves_nothing(own_cache: Path) -> None:
    def fail() -> dict[str, torch.Tensor]:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cached("kind", ["key"], fail)
    assert not list(own_cache.iterdir())


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GOLDFINCH_CACHE", str(tmp_path))
    assert cache_directory() == tmp_path
    monkeypatch.delenv("GOLDFINCH_CACHE")
    assert cache_directory() == Path.home() / ".cache" / "goldfinch"
