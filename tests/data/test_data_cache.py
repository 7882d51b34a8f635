from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from common.data import image_files
from common.data.cache import cache_directory, cached
from common.data.image_files import Reading, decode_files


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
    for _ in range(3):
        found = cached("kind", ["a", 1], build)
        assert same(found)
        found["images"].zero_()  # which does not change the cache
    assert build.calls == 1
    assert [path.suffix for path in own_cache.iterdir()] == [".safetensors"]


def test_decoded_images_are_read_by_their_user_alone(own_cache: Path) -> None:
    """A device's images may be closed to its other users, and the umask of most systems is not."""
    before = os.umask(0o022)
    try:
        cached("kind", ["key"], Builder())
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in own_cache.iterdir()] == [0o600]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[:-3],
    "flipped": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "rubbish": lambda content: b"rubbish" * 99,
    "headless": lambda content: b"\xff" * 8 + content[8:],
}


def test_another_key_is_another_entry() -> None:
    build = Builder()
    for key in (["a", 1], ["a", "1"], ["a1"], ["a", 1, ""]):
        cached("kind", key, build)
    assert build.calls == 4


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_again(own_cache: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    build = Builder()
    cached("kind", ["key"], build)
    (path,) = own_cache.iterdir()
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    for _ in range(2):
        assert same(cached("kind", ["key"], build))
        assert build.calls == 2
    assert str(path) in caplog.text


def test_a_folder_that_cannot_be_written_is_no_error(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = own_cache / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("GOLDFINCH_CACHE", str(blocked / "below"))
    assert same(cached("kind", ["key"], Builder()))


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


def test_a_line_tells_that_many_images_are_decoded_and_none_that_the_cache_has_them(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = [tmp_path / f"{number}.png" for number in range(3)]
    for number, path in enumerate(files):
        Image.new("RGB", (4, 4), (90 * number, 10, 200)).save(path)
    monkeypatch.setattr(image_files, "MANY", 4)
    decode_files(files, 8, tmp_path, Reading())
    assert not caplog.records
    monkeypatch.setattr(image_files, "MANY", 3)
    decode_files(files, 6, tmp_path, Reading())
    told = f"decoding 3 images ({files[0]} ...) to 6x6 pixels; the next run takes them from the cache"
    assert [record.getMessage() for record in caplog.records] == [told]
    decode_files(files, 6, tmp_path, Reading())
    assert len(caplog.records) == 1
