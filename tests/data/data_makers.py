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
    """A PNG of 16 bits, which Pillow cannot write: uint16 [H, W, C], grey with alpha, RGB, or RGB with alpha."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    kind = {2: 4, 3: 2, 4: 6}[values.shape[2]]
    header = struct.pack(">IIBBBBB", values.shape[1], values.shape[0], 16, kind, 0, 0, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    )
    return path


def write_tiff(path: Path, values: np.ndarray, photometric: int) -> Path:
    """Write a raw TIFF of one band, in the byte order of the values."""
    order = "<"
    if values.dtype.str[0] == ">":
        order = ">"
    kind = {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    data = values.tobytes()
    tags = {256: values.shape[1], 257: values.shape[0], 258: 8 * values.itemsize, 259: 1, 262: photometric}
    tags |= {273: 8 + 2 + 12 * 10 + 4, 277: 1, 278: values.shape[0], 279: len(data), 339: kind}
    entries = b"".join(struct.pack(f"{order}HHII", tag, 4, 1, value) for tag, value in sorted(tags.items()))
    start = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(f"{order}IH", 8, len(tags))
    path.write_bytes(start + entries + bytes(4) + data)
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
