"""Finding image files in class folders and decoding them: in parallel, once, into one uint8 tensor."""

import os
import stat
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from common.data.cache import cached
from common.errors import DataError

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm", ".pgm"})
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF", "GIF", "PPM")
"""What is decoded, whatever a file's suffix says: Pillow would hand others to programs, such as EPS to Ghostscript."""

MAX_PIXELS = 2**26
"""Of one image, 8,192 x 8,192: a few kB of a file may claim many times as much."""

_VERSION = 1  # raise when decoding changes


def normal_name(name: str) -> str:
    """A folder name without case and separators, so that 'Real World' and 'real_world' are the same."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def subdirectory(parent: Path, name: str) -> Path | None:
    """The directory ``name`` in ``parent``, whatever its case and separators; ``None`` if there is none."""
    if (parent / name).is_dir():
        return parent / name
    wanted = normal_name(name)
    return next((path for path in sorted(parent.iterdir()) if path.is_dir() and normal_name(path.name) == wanted), None)


def is_image(path: Path) -> bool:
    """Whether it is an image file by its name; hidden ones, such as macOS leaves behind, are none."""
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def image_files(directory: Path) -> list[Path]:
    """The image files directly in ``directory``, sorted by name; hidden files are left out."""
    return sorted(filter(is_image, directory.iterdir()))


def class_folders(
    directory: Path,
    class_names: Sequence[str],
    *,
    aliases: Mapping[str, Sequence[str]] | None = None,
    exact: bool = False,
) -> list[tuple[Path, int]]:
    """Image files of class folders with their labels, in the order of the classes, then of the file names.

    Args:
        directory: holds one folder per class.
        class_names: the label is the index into them.
        aliases: other names a class's folder may have.
        exact: for people's own folders, where 'a' and 'A' may be two classes: names are taken as they are, and a class
            may be absent. Otherwise case and separators may differ, and every class must be there.

    Raises:
        DataError: a class folder is missing or empty and not ``exact``.
    """
    found: list[tuple[Path, int]] = []
    for label, name in enumerate(class_names):
        if exact:
            folder = directory / name if (directory / name).is_dir() else None
        else:
            names = (name, *(aliases or {}).get(name, ()))
            folder = next((path for path in (subdirectory(directory, each) for each in names) if path), None)
        files = image_files(folder) if folder is not None else []
        if not exact and not files:
            state = "is missing" if folder is None else "has no images"
            raise DataError(f"class folder {folder or directory / name} {state}; put that class's images there")
        found += [(path, label) for path in files]
    return found


def check_within(files: Sequence[Path], base: Path) -> None:
    """Refuse files that are elsewhere once links are followed; ``base`` may be a link itself.

    Raises:
        DataError: the first file, or its folder, that lies outside ``base``.
    """
    root = base.resolve()
    for place in dict.fromkeys(path if path.is_symlink() else path.parent for path in files):
        if not place.resolve().is_relative_to(root):
            raise DataError(f"{place} leads to {place.resolve()}, outside {root}; put the images themselves there")


def without_duplicates(test: Sequence[tuple[Path, int]], train: Sequence[tuple[Path, int]]) -> list[tuple[Path, int]]:
    """Return the labelled files of ``test`` without those that have the same bytes as a file of ``train``.

    Only files of equal length are read. What is equal after decoding alone, or nearly equal, stays.

    Raises:
        DataError: a file cannot be read.
    """
    lengths = _by_length([path for path, _ in train])
    kept = []
    for path, label in test:
        same_length = lengths.get(_length(path), [])
        if not any(_content(path) == _content(other) for other in same_length):
            kept.append((path, label))
    return kept


def _by_length(files: Sequence[Path]) -> dict[int, list[Path]]:
    found: dict[int, list[Path]] = {}
    for path in files:
        found.setdefault(_length(path), []).append(path)
    return found


def _length(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise DataError(f"image {path} cannot be read ({error.strerror}); restore it or unlist it") from error


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"image {path} cannot be read ({error.strerror}); restore it or unlist it") from error


def decode(files: Sequence[Path], image_size: int, base: Path) -> Tensor:
    """The images of ``files``, resized, as uint8 [N, 3, image_size, image_size]; cached on disk.

    The cache's key holds the names relative to ``base``, sizes and times of the files.

    Raises:
        DataError: a file cannot be read as an image, or is a link to somewhere outside ``base``; the first one in
            order is named.
    """
    check_within(files, base)
    key: list[str | int] = [_VERSION, image_size, str(base)]
    for path in files:
        try:
            status = path.stat()
        except OSError as error:
            raise DataError(f"image {path} cannot be read ({error.strerror}); restore it or unlist it") from error
        key += [str(path.relative_to(base)), status.st_size, status.st_mtime_ns]

    def build() -> dict[str, Tensor]:
        images = np.empty((len(files), image_size, image_size, 3), dtype=np.uint8)

        def put(index: int) -> None:
            images[index] = decode_image(files[index], image_size, str(files[index]))

        with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
            for _ in pool.map(put, range(len(files))):
                pass
        return {"images": torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()}

    return cached("images", key, build)["images"]


def decode_image(source: Path | BinaryIO, image_size: int, name: str) -> np.ndarray:
    """One image as uint8 [image_size, image_size, 3]: grey becomes RGB, the whole image is resized (bilinear).

    Raises:
        DataError: it is no regular file, no image of :data:`FORMATS`, truncated, or has too many pixels.
    """
    try:
        if isinstance(source, Path) and not stat.S_ISREG(source.stat().st_mode):
            raise OSError("not a regular file")  # a pipe would be waited for
        with Image.open(source, formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise OSError(f"{image.width} x {image.height} pixels; at most {MAX_PIXELS} are decoded")
            return np.asarray(_rgb(image).resize((image_size, image_size), Image.Resampling.BILINEAR))
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise DataError(f"image {name} cannot be decoded ({error}); replace it, or take it out") from error


def _rgb(image: Image.Image) -> Image.Image:
    """RGB; 16-bit grey is scaled to 8 bits (Pillow would clip it at 255)."""
    if image.mode.startswith("I;16") or image.mode == "I":
        grey = np.asarray(image).clip(0, 65535).astype(np.uint32)
        return Image.fromarray(((grey + 128) // 257).astype(np.uint8)).convert("RGB")
    return image.convert("RGB")
