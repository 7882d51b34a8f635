"""Small made-up images and domains for the tests of the data layer."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from common.data.batches import Split
from common.data.domain import Domain


def write_image(path: Path, level: int, size: int = 8, mode: str = "RGB") -> Path:
    """A flat image; its grey level tells which one it is after decoding (PNG keeps it exactly)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (size, size), level if mode == "L" else (level, level, level)).save(path)
    return path


def write_deep_colours(path: Path, values: np.ndarray) -> Path:
    """A PNG with colours of 16 bits, which Pillow reads and cannot write: uint16 [H, W, 3]."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    header = struct.pack(">IIBBBBB", values.shape[1], values.shape[0], 16, 2, 0, 0, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    )
    return path


def write_classes(directory: Path, counts: dict[str, int], start: int = 0) -> None:
    """``counts[name]`` images per class folder with levels start, start + 1, ... in order."""
    level = start
    for name in sorted(counts):
        for index in range(counts[name]):
            write_image(directory / name / f"image_{index:03}.png", level)
            level += 1


def levels(split: Split) -> list[int]:
    """The grey level of each image, which must be flat."""
    assert (split.images == split.images[:, :1, :1, :1]).all()
    return split.images[:, 0, 0, 0].tolist()


def made_up_domain(name: str, labels: Iterable[int]) -> Domain:
    """A domain with two test images. Its i-th train image is flat with level i % 256."""
    train = torch.tensor(list(labels), dtype=torch.int64)
    images = (torch.arange(len(train)) % 256).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 2, 2).clone()
    test = Split(torch.zeros(2, 3, 2, 2, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))
    return Domain(name, Split(images, train), test)


def even_labels(count: int, classes: int = 10) -> np.ndarray:
    """0, 1, ..., classes - 1, 0, 1, ..."""
    return np.arange(count) % classes
