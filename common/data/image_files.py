"""Finding image files in class folders and decoding them: in parallel, once, into one uint8 tensor."""

import errno
import io
import logging
import os
import stat
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import ImageFileDirectory_v2, TiffImageFile
from torch import Tensor

from common.data.cache import cached
from common.data.file_kinds import kind_of_file
from common.data.names import SUFFIXES, normal_name
from common.data.value_ranges import (
    BLOCK_ROWS,
    DEEP,
    DEEP_STEP,
    FINITE,
    PHOTOMETRIC,
    NotFiniteError,
    Remark,
    check_remarks,
    ends_of,
    has_numbers,
    has_white_at_zero,
    image_values,
    mode_of,
    on_files,
    remark_on,
)
from common.errors import DataError, some_of
from common.extras import install_command
from common.regular_files import check_within, file_sha256, file_state
from common.text import quantity, warn_once

_log = logging.getLogger(__name__)

FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF", "GIF", "PPM")
"""Formats that are decoded, by content, not by suffix. Pillow would start programs for others: Ghostscript for EPS."""

BY_CONTENT = frozenset({"a PNG image", "a JPEG image", "a GIF image", "a WEBP image"})
"""Kinds of :data:`STARTS` that are images whatever their suffix. Cameras' raw files begin as TIFF files do."""

Resize = Literal["squash", "crop", "pad"]
"""How an image becomes a square. ``squash`` changes its proportions. ``crop`` keeps the centre of the longer side.
``pad`` adds black on both ends of the shorter side."""

MAX_PIXELS = 2**26
"""Pixels of the largest image that is decoded, 8,192 x 8,192. A small file may declare many more. Such an image takes
up to half a GiB while it is decoded."""

LARGE_PIXELS = 2**22
"""Pixels above which an image is decoded while no other large one is, so that threads do not multiply its memory."""

MANY = 1_000
"""Images whose decoding takes so long that a line says so."""

MAX_EXPANSION = 2**12
"""Decoded bytes for each byte of a large image's file. PNG, JPEG and GIF stay below it. The strips of a TIFF may all be
the same bytes, and a WebP of one colour has next to none."""

MAX_SCANS = 100
"""Scans of a JPEG. A progressive one of a camera or a program has about ten; each is a pass over all pixels."""

SCAN_BLOCK = 2**20
"""Bytes of a JPEG that are searched for scans at a time."""

TIFF_COMPRESSIONS = frozenset({
    "raw", "tiff_raw_16", "tiff_lzw", "jpeg", "tiff_jpeg", "tiff_adobe_deflate", "tiff_deflate", "packbits",
})  # fmt: skip
"""Compressions of TIFF files that are decoded. Others are rare in photographs, and slow or seldom tested decoders."""

TILE_SIZES = (322, 323)
"""TIFF tags with the width and the height of a tile. A tile is decoded whole, also if it is larger than the image."""

MAX_LISTED = 20
"""Files that one message names."""

_one_large_at_a_time = threading.Lock()

_VERSION = 7  # raise when decoding changes


def subdirectory(parent: Path, names: Sequence[str]) -> Path | None:
    """Return the directory in ``parent`` that has one of ``names``, ignoring case and separators.

    Raises:
        DataError: several directories have; the message names them.
    """
    wanted = {normal_name(name) for name in names}
    found: list[Path] = []
    for path in sorted(parent.iterdir()):
        if normal_name(path.name) in wanted and path.is_dir() and not path.name.startswith("."):
            found.append(path)
    if len({path.resolve() for path in found}) > 1:
        raise DataError(
            f"{found[0]} and {found[1]} are two folders of one name; join them, or take the one out that is not meant"
        )
    if found:
        return found[0]
    return None


def is_image(path: Path) -> bool:
    """Return whether a file is an image: by its suffix, or by its first bytes; hidden files are not images."""
    if path.name.startswith(".") or path.is_dir():
        return False
    return path.suffix.lower() in SUFFIXES or is_image_inside(path)


def is_image_inside(path: Path) -> bool:
    """Return whether a file's first bytes are those of an image that is decoded here; of no TIFF."""
    kind = kind_of_file(path)
    return kind in BY_CONTENT or (kind == "a HEIF image" and reads_heif())


@lru_cache(maxsize=1)
def reads_heif() -> bool:
    """Return whether HEIF images can be read here; if so, Pillow knows the format from the first call on."""
    try:
        import pillow_heif
    except ImportError:
        return False
    pillow_heif.register_heif_opener()
    return True


def formats() -> tuple[str, ...]:
    """Return the formats that are decoded here: :data:`FORMATS`, and HEIF if it can be read."""
    if reads_heif():
        return (*FORMATS, "HEIF")
    return FORMATS


def image_files(directory: Path) -> list[Path]:
    """Return the files with a suffix of images directly in ``directory``, sorted by name; hidden files are left out."""
    found: list[Path] = []
    for path in directory.iterdir():
        if not path.name.startswith(".") and path.suffix.lower() in SUFFIXES and not path.is_dir():
            found.append(path)
    return sorted(found)


def without_duplicates(
    test: Sequence[tuple[Path, int]], train: Sequence[tuple[Path, int]], base: Path
) -> list[tuple[Path, int]]:
    """Return the labelled files of ``test`` without those that have the bytes and the label of a file of ``train``.

    Only files of equal length are read, each once. Images that are equal only after decoding, or nearly equal, stay.
    A copy with another label stays, too, so that the comparison of images tells of it.

    Raises:
        DataError: a file cannot be read, or lies outside ``base``; or no file of ``test`` is left.
    """
    check_within([path for path, _ in (*train, *test)], base)
    by_length: dict[int, list[tuple[Path, int]]] = {}
    digests: dict[int, set[tuple[str, int]]] = {}
    kept: list[tuple[Path, int]] = []
    try:
        for path, label in train:
            by_length.setdefault(path.stat().st_size, []).append((path, label))
        for path, label in test:
            length = path.stat().st_size
            if length not in digests:
                digests[length] = {(file_sha256(other), known) for other, known in by_length.get(length, [])}
            if not digests[length] or (file_sha256(path), label) not in digests[length]:
                kept.append((path, label))
    except OSError as error:
        raise DataError(f"an image cannot be read ({error}); restore it or unlist it") from error
    if test and not kept:
        raise DataError(
            f"all {len(test)} test images of {base} have the bytes of a training image of it, and data.duplicates=drop "
            "leaves them out: add other test images, or set data.duplicates=warn to score these"
        )
    return kept


@dataclass(frozen=True)
class Reading:
    """How images become arrays: everywhere turned upright, as cameras and phones record it by EXIF, and in RGB.

    Args:
        resize: see :data:`Resize`.
        value_range: the values that become black and white; empty: 0 and 255, or 0 and 65535 of 16-bit images.
        page: the page of a TIFF that is read, from 1.
        skip_broken: leave out what is no image, and say so; otherwise it is an error.
    """

    resize: Resize = "squash"
    value_range: tuple[float, ...] = ()
    page: int = 1
    skip_broken: bool = False


def decode_files(files: Sequence[Path], image_size: int, base: Path, reading: Reading) -> tuple[Tensor, list[int]]:
    """Return the images of ``files``, and which of the files they are; cached on disk.

    The cache's key holds the names relative to ``base``, the files' state and the options.

    Args:
        files: paths of the images.
        image_size: height and width of the returned images, pixels.
        base: directory that holds all files.
        reading: how the files become arrays.

    Returns:
        uint8 [N, 3, image_size, image_size], and the positions of the N images in ``files``: all, or those that are
        images.

    Raises:
        DataError: files cannot be read as images, or a link leads outside ``base``; the message names them.
    """
    key = [_VERSION, image_size, str(base), repr(reading), *states_of(files, base)]
    names = [str(path) for path in files]
    return kept_images(cached("images", key, lambda: decode_each(files, names, image_size, reading)), names)


def states_of(files: Sequence[Path], base: Path) -> list[str | int]:
    """Return the names of files relative to ``base``, each with the file's state. Their content is not read.

    Raises:
        DataError: files cannot be found or may not be read, or a link leads outside ``base``; the message names them.
    """
    check_within(files, base)
    states: list[str | int] = []
    missing: list[str] = []
    for path in files:
        try:
            states += [str(path.relative_to(base)), *file_state(path)]
            if not os.access(path, os.R_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            missing.append(f"image {path} cannot be read ({error.strerror}): {_back(error)}")
    if len(missing) == 1:
        raise DataError(missing[0])
    if missing:
        raise DataError(f"{len(missing):,} files cannot be read: {some_of(missing, MAX_LISTED)}")
    return states


def decode_each(
    sources: Sequence[Path | bytes], names: Sequence[str], image_size: int, reading: Reading
) -> dict[str, Tensor]:
    """Return ``images``, ``kept`` (the positions of the images among ``sources``) and, if any, ``warning`` (UTF-8).

    Args:
        sources: paths, or the encoded images.
        names: what error messages call them.
        image_size: height and width of the returned images, pixels.
        reading: how they become arrays.

    Raises:
        DataError: some are no images, and ``reading`` does not skip them; or most come out black or flat.
    """
    images = np.empty((len(sources), image_size, image_size, 3), dtype=np.uint8)
    if len(sources) >= MANY:
        _log.warning(
            "decoding %s images (%s ...) to %dx%d pixels; the next run takes them from the cache",
            f"{len(sources):,}",
            names[0],
            image_size,
            image_size,
        )

    def put(index: int) -> Remark | BrokenImageError:
        source = sources[index]
        try:
            images[index], remark = decode_with_remark(_opened(source), image_size, names[index], reading)
        except BrokenImageError as error:
            return error
        return remark

    with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
        outcomes = list(pool.map(put, range(len(sources))))
    broken = [outcome for outcome in outcomes if isinstance(outcome, BrokenImageError)]
    if broken and not reading.skip_broken:
        raise _listed(broken, len(sources))
    kept = [index for index, outcome in enumerate(outcomes) if isinstance(outcome, Remark)]
    warning = check_remarks([outcome for outcome in outcomes if isinstance(outcome, Remark)], reading.value_range)
    tensor = torch.from_numpy(images).permute(0, 3, 1, 2)
    if broken:
        tensor = tensor[kept]
    found = {"images": tensor.contiguous(), "kept": torch.tensor(kept, dtype=torch.int64)}
    if warning:
        found["warning"] = torch.tensor(list(warning.encode()), dtype=torch.uint8)
    return found


def kept_images(found: Mapping[str, Tensor], names: Sequence[str]) -> tuple[Tensor, list[int]]:
    """Return images and positions of what :func:`decode_each` returned, and say what was skipped or may be lost."""
    if "warning" in found:
        warn_once(bytes(found["warning"].tolist()).decode())
    kept = found["kept"].tolist()
    if len(kept) < len(names):
        skipped = [names[index] for index in sorted(set(range(len(names))).difference(kept))]
        warn_once(f"{quantity(len(skipped), 'file')} skipped as no image (data.broken=skip): {some_of(skipped)}")
    return found["images"], kept


def _opened(source: Path | bytes) -> Path | BinaryIO:
    if isinstance(source, bytes):
        return io.BytesIO(source)
    return source


class BrokenImageError(DataError):
    """A file that cannot be read as an image.

    Args:
        name: what messages call it.
        reason: what is wrong, and what helps.
        program: a Python program that mends such files, for :func:`~.value_ranges.on_files`; empty if there is none.
    """

    def __init__(self, name: str, reason: str, program: str = "") -> None:
        self.name, self.reason, self.program = name, reason, program
        super().__init__(f"image {name} {reason}; {_advice([self], 1)}")


def _advice(broken: Sequence[BrokenImageError], total: int) -> str:
    advice = "replace what is broken, or take it out"
    if len(broken) < total:
        advice += "; data.broken=skip (of data=folder and data=table) leaves it out"
    if names := [each.name for each in broken if each.program]:
        return f"write numbers in their place ({on_files(broken[0].program or FINITE, names)}), {advice}"
    return advice


def _listed(broken: Sequence[BrokenImageError], total: int) -> DataError:
    """Return the error of the broken of all files, in one line, since some records keep only the first line."""
    if len(broken) == 1:
        return DataError(f"image {broken[0].name} {broken[0].reason}; {_advice(broken, total)}")
    problems = some_of([f"image {each.name} {each.reason}" for each in broken], MAX_LISTED)
    return DataError(f"{len(broken):,} files are not images that can be read: {problems}; {_advice(broken, total)}")


def decode_image(source: Path | BinaryIO, image_size: int, name: str, reading: Reading | None = None) -> np.ndarray:
    """Return one image as uint8 [image_size, image_size, 3]: upright, in RGB, and resized (bilinear).

    Every reader of files and every prediction decodes by it. The page on using a model has its lines for a service
    without Goldfinch.

    Args:
        source: a path, or an open binary file.
        image_size: height and width of the returned image, pixels.
        name: what error messages call the image.
        reading: how it becomes an array; ``None`` is the default.

    Raises:
        DataError: the file is no regular file, no image of :data:`FORMATS`, truncated, has too many pixels, would take
            far longer to decode than images of its size do, is a TIFF of a compression or with tiles that are not
            decoded, or has no such page.
    """
    return decode_with_remark(source, image_size, name, reading or Reading())[0]


def decode_with_remark(
    source: Path | BinaryIO, image_size: int, name: str, reading: Reading
) -> tuple[np.ndarray, Remark]:
    """Return one image as :func:`decode_image` does, and what reading made of it.

    Raises:
        DataError: see :func:`decode_image`.
    """
    try:
        if not isinstance(source, Path):
            return _decoded(source, image_size, name, reading)
        if not stat.S_ISREG(source.stat().st_mode):
            raise OSError("not a regular file")  # reading a pipe would block
        with source.open("rb") as stream:  # a path to a raw TIFF would be mapped into memory, and turned wrongly
            return _decoded(stream, image_size, name, reading)
    except UnidentifiedImageError as error:
        raise BrokenImageError(name, f"cannot be decoded ({_what_it_is(source)})") from error
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        if isinstance(error, OSError) and error.errno:  # of the system, which says nothing of the content
            raise DataError(f"image {name} cannot be read ({error.strerror}): {_back(error)}") from error
        raise BrokenImageError(name, f"cannot be decoded ({error})") from error


def _decoded(stream: BinaryIO, image_size: int, name: str, reading: Reading) -> tuple[np.ndarray, Remark]:
    with Image.open(stream, formats=formats()) as image:
        if reading.page > 1 and isinstance(image, TiffImageFile):
            _seek(image, reading.page)
        _check_size(image)
        _check_work(image, stream)
        with _one_large_at_a_time if image.width * image.height > LARGE_PIXELS else nullcontext():
            mode = mode_of(image)
            ImageOps.exif_transpose(image, in_place=True)
            try:
                values = image_values(image, mode)
            except NotFiniteError as error:
                raise BrokenImageError(name, f"cannot be read: {error}", FINITE) from error
            read = np.asarray(square(_rgb(image, mode, reading.value_range), image_size, reading.resize))
            return read, remark_on(image, mode, values, read, name, reading.value_range)


def _back(error: OSError) -> str:
    """Return what helps if the system does not give a file."""
    if error.errno in (errno.EACCES, errno.EPERM):
        return "give this user the right to read it"
    return "restore it or unlist it"


def _what_it_is(source: Path | BinaryIO) -> str:
    """Return what a file is that no decoder knows, by its first bytes and, of a TIFF, by its tags."""
    if not isinstance(source, Path):
        return "cannot identify image file"
    kind = kind_of_file(source)
    if kind == "a HEIF image" and not reads_heif():
        kind += f": {install_command('heif')} reads it"
    elif kind in {*BY_CONTENT, "a HEIF image"}:
        kind += " that is damaged or cut off"
    if kind:
        return f"it is {kind}"
    try:
        with source.open("rb") as stream:
            tags = ImageFileDirectory_v2(stream.read(8))
            stream.seek(tags.next)
            tags.load(stream)
        bands, bits = tags.get(277, 1), tags.get(258, (1,))
        if bands == 1 and tags.get(PHOTOMETRIC) == 0:
            return f"it is a TIFF of {bits[0]} bits where 0 is white: save it so that 0 is black (MinIsBlack)"
        return f"it is a TIFF of {bands} bands of {bits[0]} bits: save those that show the image as RGB, or one as grey"
    except (OSError, ValueError, SyntaxError, struct.error, TypeError, IndexError):
        return "cannot identify image file"


def _seek(image: TiffImageFile, page: int) -> None:
    try:
        image.seek(page - 1)
    except EOFError as error:
        raise OSError(f"it has no page {page}, which data.page names") from error


def square(image: Image.Image, size: int, resize: Resize) -> Image.Image:
    """Return the image resized (bilinear) to ``size`` x ``size`` pixels; see :data:`Resize`."""
    bilinear = Image.Resampling.BILINEAR
    if resize == "crop":
        return ImageOps.fit(image, (size, size), bilinear)
    if resize == "pad":
        return ImageOps.pad(image, (size, size), bilinear)
    return image.resize((size, size), bilinear)


def _check_size(image: Image.Image) -> None:
    """Check what an image's header declares, before pixels are decoded."""
    if image.width * image.height > MAX_PIXELS:
        raise OSError(f"{image.width} x {image.height} pixels; at most {MAX_PIXELS} are decoded")
    if not isinstance(image, TiffImageFile):
        return
    compression = image.info.get("compression", "raw")
    if compression not in TIFF_COMPRESSIONS:
        raise OSError(f"TIFF compression {compression}; save it as PNG, or with LZW or deflate compression")
    width, height = (int(image.tag_v2.get(tag, 1)) for tag in TILE_SIZES)
    if width * height > MAX_PIXELS:
        raise OSError(f"tiles of {width} x {height} pixels; at most {MAX_PIXELS} are decoded")


def _check_work(image: Image.Image, stream: BinaryIO) -> None:
    """Check how much there is to decode in relation to the file."""
    position = stream.tell()
    try:
        _check_stream(image, stream)
    finally:
        stream.seek(position)


def _check_stream(image: Image.Image, stream: BinaryIO) -> None:
    size = stream.seek(0, os.SEEK_END)
    pixels = image.width * image.height
    decoded = pixels * len(image.getbands())
    if pixels > LARGE_PIXELS and decoded > MAX_EXPANSION * size:
        raise OSError(f"its {size} bytes decode to {decoded}, more than {MAX_EXPANSION} times as many; save it as PNG")
    if image.format == "JPEG" and _scans(stream) > MAX_SCANS:
        raise OSError(f"a JPEG of more than {MAX_SCANS} scans; save it again")


def _scans(stream: BinaryIO) -> int:
    """Return how often a JPEG has the marker of a scan; a preview inside it counts as well."""
    stream.seek(0)
    count = 0
    last = b""
    while block := stream.read(SCAN_BLOCK):
        count += (last + block).count(b"\xff\xda")
        last = block[-1:]
    return count


def _rgb(image: Image.Image, mode: str, value_range: tuple[float, ...]) -> Image.Image:
    """Return the image in RGB, with the first of ``value_range`` as 0 and the second as 255."""
    low, high = ends_of(mode, value_range)
    black, white = low, high
    if has_white_at_zero(image) and has_numbers(mode):  # of 8 bits, Pillow has inverted it
        black, white = high, low

    def scale(block: np.ndarray) -> np.ndarray:
        return ((block.astype(np.float32) - black) * (255 / (white - black))).round().clip(0, 255)

    if has_numbers(mode) and mode != DEEP:
        return _in_blocks(image, scale)
    if (low, high) == ends_of(mode, ()):
        return image.convert("RGB")
    step = DEEP_STEP if mode == DEEP else 1
    table = scale(step * np.arange(256)).astype(np.uint8).tolist()
    return image.convert("RGB").point(3 * table)


def _in_blocks(image: Image.Image, scale: Callable[[np.ndarray], np.ndarray]) -> Image.Image:
    """Return a grey image in RGB whose values ``scale`` maps to 0..255, some rows at a time."""
    image.load()
    grey = np.empty((image.height, image.width), dtype=np.uint8)
    for top in range(0, image.height, BLOCK_ROWS):
        bottom = min(top + BLOCK_ROWS, image.height)
        grey[top:bottom] = scale(np.asarray(image.crop((0, top, image.width, bottom))))
    return Image.fromarray(grey).convert("RGB")
