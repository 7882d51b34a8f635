"""Whether an image survives being read: values outside 0..255, pages and transparency can leave it black or flat."""

import io
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, ImageSequence
from PIL.TiffImagePlugin import TiffImageFile

from common.errors import DataError
from common.text import shell_line

SMALLEST_SPAN = 32
"""Grey levels of 256 that a domain's images must differ by: an eighth of the range."""

HALF_SPAN = 128
"""Grey levels of 256 that the numbers of a domain use, unless ``data.range`` says how they are read."""

ALPHA_MODES = frozenset({"RGBA", "RGBa", "LA", "La", "PA"})

PLAIN_MODES = frozenset({"1", "L", "RGB"})
"""Modes of Pillow whose values are those of the image in RGB."""

DEEP = "RGB;16"
"""The mode, here, of an image with colours of 16 bits, of which Pillow gives the upper 8 bits as RGB or RGBA."""

DEEP_STEP = 257
"""What a step of the upper 8 bits of 16 stands for: 65535 / 255."""

TAIL = 0.001
"""Share of an image's values at each end that says nothing of its range: hot and dead pixels."""

SAMPLE = 2**22
"""Values of a larger image that its percentiles are computed of."""

BLOCK_ROWS = 256
"""Rows of a file with numbers that are looked at, and scaled to 8 bits, at a time."""

PHOTOMETRIC = 262
"""The TIFF tag that is 0 if 0 is white."""

MAX_PAGES = 64
"""Pages of a TIFF that are looked into for one that is not of a single colour."""

PROGRAM = "import sys; from common.data.value_ranges import {0}; {0}(sys.argv[1:])"
ON_WHITE = PROGRAM.format("lay_on_white")
FINITE = PROGRAM.format("make_finite")
"""Programs that write files again: on white, and with 0 in place of what is not finite."""

KEPT = "each file that it replaces stays beside, as .NAME.original"
"""What becomes of files that a program writes again."""


class NotFiniteError(ValueError):
    """Some values of an image are no finite numbers; the message counts them."""


@dataclass(frozen=True)
class Values:
    """The values of one image's file.

    Args:
        low: the smallest value.
        high: the largest value.
        first: the smallest value of what is shown: the 0.1 percentile of numbers, without :attr:`nothing`.
        last: the largest one: the 99.9 percentile.
        varied: whether there is more than one colour.
        nothing: a value at one end, far from all others and more than one pixel's, that stands for no measurement.
        share: share of the pixels with that value.
    """

    low: float
    high: float
    first: float
    last: float
    varied: bool
    nothing: float | None = None
    share: float = 0


@dataclass(frozen=True)
class Remark:
    """What reading made of one image.

    Args:
        name: what messages call the image.
        mode: Pillow's mode of the file.
        values: of the file.
        black: smallest value after reading, 0..255.
        white: largest value after reading, 0..255.
        cause: ``transparency``, ``pages`` or ``values``: what would explain a loss.
        page: the first page that is not of one colour, if the cause is the page that was read.
        lost: whether the file's content is lost.
        transparent: whether some of its pixels are transparent.
    """

    name: str
    mode: str
    values: Values
    black: int
    white: int
    cause: str
    page: int
    lost: bool
    transparent: bool = False

    @property
    def varied(self) -> bool:
        """Whether the file holds more than one colour, or more than one page."""
        return self.values.varied or self.cause == "pages"


def mode_of(image: Image.Image) -> str:
    """Return Pillow's mode of an image that is not decoded yet, or :data:`DEEP`."""
    if not image.mode.startswith(("I", "F")) and any(";16" in str(tile[3]) for tile in getattr(image, "tile", ())):
        return DEEP
    return image.mode


def has_numbers(mode: str) -> bool:
    """Return whether images of a mode hold numbers of more than 8 bits."""
    return mode == DEEP or mode.startswith(("I", "F"))


def has_white_at_zero(image: Image.Image) -> bool:
    """Return whether an image is a TIFF whose values grow from white to black."""
    return isinstance(image, TiffImageFile) and image.tag_v2.get(PHOTOMETRIC) == 0


def ends_of(mode: str, value_range: Sequence[float]) -> tuple[float, float]:
    """Return the values that become black and white: ``data.range``, or the ends of the file's type.

    A range that ends above 255 is not that of a file of 8 bits, which may lie among others of more.
    """
    if value_range and (has_numbers(mode) or value_range[1] <= 255):
        return value_range[0], value_range[1]
    if mode == DEEP or mode.startswith("I"):
        return 0.0, 65535.0
    return 0.0, 255.0


def image_values(image: Image.Image, mode: str) -> Values:
    """Return the values of an image's colours, as they are read; transparency counts as a difference alone.

    Args:
        image: the image.
        mode: its :func:`mode_of`.

    Raises:
        NotFiniteError: some are no finite numbers.
    """
    if not has_numbers(mode):
        colours = image
        if image.mode not in PLAIN_MODES:
            colours = image.convert("RGB")
        extrema = np.asarray(colours.getextrema(), dtype=np.float64)
        low, high = float(extrema.min()), float(extrema.max())
        return Values(low, high, low, high, _varies(image))
    image.load()
    step = math.ceil(image.width * image.height / SAMPLE)
    infinite = 0
    low, high = math.inf, -math.inf
    parts: list[np.ndarray] = []
    for top in range(0, image.height, BLOCK_ROWS):
        bottom = min(top + BLOCK_ROWS, image.height)
        rows = image.crop((0, top, image.width, bottom))
        block = np.asarray(rows.convert("RGB") if mode == DEEP else rows)
        if mode == DEEP:
            block = np.uint32(DEEP_STEP) * block
        block = block.ravel()
        infinite += int((~np.isfinite(block)).sum())
        low, high = min(low, float(block.min())), max(high, float(block.max()))
        parts.append(block[::step])
    if infinite:
        count = image.width * image.height
        raise NotFiniteError(f"{infinite:,} of its {count:,} values are not finite (NaN or infinity)")
    values = _measured(np.sort(np.concatenate(parts)), low, high)
    if mode == DEEP:
        return replace(values, varied=_varies(image))
    return values


def _varies(image: Image.Image) -> bool:
    """Return whether an image of 8 bits has more than one colour, or more than one transparency."""
    extrema = np.asarray(image.getextrema(), dtype=np.float64).reshape(-1, 2)
    return bool((extrema[:, 0] < extrema[:, 1]).any())


def _measured(ordered: np.ndarray, low: float, high: float) -> Values:
    """Return the values of an image with numbers, of a sorted sample of them: a value for nothing is set apart."""
    nothing: float | None = None
    rest = ordered
    below = int(np.searchsorted(ordered, ordered[0], "right"))
    above = int(np.searchsorted(ordered, ordered[-1], "left"))
    if 1 < below < len(ordered) and _is_far(ordered[0], ordered[below:]):
        nothing, rest = float(ordered[0]), ordered[below:]
    elif 0 < above < len(ordered) - 1 and _is_far(ordered[-1], ordered[:above]):
        nothing, rest = float(ordered[-1]), ordered[:above]
    first, last = _percentiles(rest)
    if first == last:  # few values that differ from all others may be what is shown
        first, last = float(rest[0]), float(rest[-1])
    return Values(low, high, first, last, low < high, nothing, 1 - len(rest) / len(ordered))


def _percentiles(ordered: np.ndarray) -> tuple[float, float]:
    most = len(ordered) - 1
    return float(ordered[math.ceil(TAIL * most)]), float(ordered[math.floor((1 - TAIL) * most)])


def _is_far(value: float, rest: np.ndarray) -> bool:
    """Return whether a value is farther from others than these are from each other."""
    first, last = _percentiles(rest)
    return first < last and max(first - float(value), float(value) - last) > last - first


def remark_on(
    image: Image.Image, mode: str, values: Values, read: np.ndarray, name: str, value_range: Sequence[float]
) -> Remark:
    """Return what reading made of an image.

    Args:
        image: the image as it was opened.
        mode: its :func:`mode_of`.
        values: of its file.
        read: the image after reading, uint8 [H, W, 3].
        name: what messages call it.
        value_range: ``data.range``.
    """
    black, white = int(read.min()), int(read.max())
    span = int((read.max((0, 1)).astype(int) - read.min((0, 1))).max())
    cause, page, transparent = "values", 0, False
    if isinstance(image, TiffImageFile) and getattr(image, "is_animated", False):
        cause = "pages"
    elif not has_numbers(image.mode) and (image.mode in ALPHA_MODES or "transparency" in image.info):
        transparent = int(np.asarray(image.convert("RGBA").getchannel("A")).min()) < 255
        if transparent and (mode != DEEP or span == 0):  # colours of 16 bits that differ may need a range
            cause = "transparency"
    lost = (values.varied or cause == "pages") and span < SMALLEST_SPAN
    if cause == "values":
        low, high = ends_of(mode, value_range)
        cut = values.first < low or values.last > high
        narrow = 255 * (values.last - values.first) / (high - low) < SMALLEST_SPAN
        lost = values.varied and (cut or (narrow and has_numbers(mode)))  # of 8 bits, check_remarks() judges the domain
    if lost and cause == "pages":
        page = _page_with_content(image)
    return Remark(name, mode, values, black, white, cause, page, lost, transparent)


def _page_with_content(image: Image.Image) -> int:
    """Return the first page of a TIFF that is not of one colour, from 1; 0 if there is none."""
    for page in range(min(int(getattr(image, "n_frames", 1)), MAX_PAGES)):
        image.seek(page)
        extrema = np.asarray(image.getextrema(), dtype=np.float64).reshape(-1, 2)
        if (extrema[:, 0] < extrema[:, 1]).any():
            return page + 1
    return 0


def check_remarks(remarks: Sequence[Remark], value_range: Sequence[float]) -> str:
    """Check that most of a domain's images survive being read.

    Images of one colour in their files are left out: nothing of them is lost. With a ``data.range``, which somebody
    has chosen, only a domain that comes out of one colour is refused.

    Args:
        remarks: of all images of the domain.
        value_range: ``data.range``.

    Returns:
        A warning if some do not; empty if all do.

    Raises:
        DataError: most do not, or all of the domain's values lie in a small part of the range; with the first file,
            what became of it, and the remedy.
    """
    lost = [remark for remark in remarks if remark.lost]
    varied = [remark for remark in remarks if remark.varied]
    if not varied:
        return ""
    span = max(each.white for each in varied) - min(each.black for each in varied)
    smallest = SMALLEST_SPAN
    numbers = [each for each in varied if has_numbers(each.mode) and each.cause == "values"]
    if numbers:
        low, high = ends_of(numbers[0].mode, value_range)
        first, last = min(each.values.first for each in numbers), max(each.values.last for each in numbers)
        span = math.ceil(255 * (min(last, high) - max(first, low)) / (high - low))
        if not value_range:
            smallest = HALF_SPAN
    weak = span < smallest
    if not lost and not weak:
        return _partly_lost(remarks, value_range)
    shown = lost or numbers or varied
    message = f"{len(shown):,} of {len(remarks):,} images {_loss(span, bool(lost))}: {_described(shown[0])}; "
    message += _remedy(shown, value_range, span)
    most = not numbers or 2 * len(numbers) > len(varied)
    refused = 2 * len(lost) > len(remarks) or (weak and most)
    if value_range and shown[0].cause == "values":
        refused = span < 2
    if refused:
        raise DataError(message)
    return message


def _partly_lost(remarks: Sequence[Remark], value_range: Sequence[float]) -> str:
    """Return a warning about what pixels show that is not all of what is stored; empty if there is nothing to say."""
    count = f"of {len(remarks):,} images have"
    found: list[str] = []
    if blank := [remark for remark in remarks if remark.varied and remark.values.nothing is not None]:
        found.append(f"{len(blank):,} {count} pixels without a measurement: {_described(blank[0])}")
    deep = [remark for remark in remarks if remark.mode == DEEP]
    if deep and value_range:
        levels = math.ceil((value_range[1] - value_range[0]) / DEEP_STEP)
        found.append(
            f"{len(deep):,} {count} colours of 16 bits, such as {deep[0].name}: the upper 8 are read, which are "
            f"{min(levels, 256)} levels in data.range"
        )
    if clear := [remark for remark in remarks if remark.transparent]:
        remedy = f"to lay the images on white: {on_files(ON_WHITE, [remark.name for remark in clear])}; {KEPT}"
        if any(remark.mode == DEEP for remark in clear):
            remedy = "to lay images of 16 bits on white, export them without transparency"
        found.append(
            f"{len(clear):,} {count} transparent pixels, such as {clear[0].name}: they are read in the colours that "
            f"they hide; {remedy}"
        )
    return "; ".join(found)


def _loss(span: int, lost: bool) -> str:
    if lost or span < SMALLEST_SPAN:
        return "are black, flat or nearly so, or cut off, when they are read"
    return f"use only {max(span, 1)} of 256 grey levels when they are read"


def _described(remark: Remark) -> str:
    """Return what an image holds and what became of it."""
    values = remark.values
    text = f"{remark.name} holds {values.low:g} to {values.high:g} (mode {remark.mode})"
    if values.nothing is not None:
        text += f", {values.nothing:g} in {values.share:.1%} of its pixels where nothing was measured"
    for extreme, end in ((values.low, values.first), (values.high, values.last)):
        if abs(extreme - end) > values.last - values.first and extreme != values.nothing:
            text += f", {extreme:g} in a few pixels (dead or hot ones)"
    return f"{text} and is read as {remark.black} to {remark.white} of 0 to 255"


def sliver_of(images: np.ndarray) -> tuple[int, int] | None:
    """Return the smallest and the largest value of images that all lie in a sliver of the range; ``None`` if not.

    Images of one value are left out.

    Args:
        images: uint8 [N, ...].
    """
    rows = images.reshape(len(images), -1)
    low, high = rows.min(1), rows.max(1)
    varied = low < high
    if not varied.any():
        return None
    black, white = int(low[varied].min()), int(high[varied].max())
    if white - black >= SMALLEST_SPAN:
        return None
    return black, white


def on_files(program: str, names: Sequence[str]) -> str:
    """Return the command that runs a Python program on all files of a kind in the folder that holds ``names``."""
    folder = os.path.commonpath([str(Path(name).parent) for name in names])
    if not Path(names[0]).is_file():
        return "write the files again"
    found = ["find", folder, "-name", f"*{Path(names[0]).suffix}", "-exec"]
    python = [sys.executable, "-P", "-c"]  # no file of the folder that it is run in is imported
    return shell_line([*found, *python, program, "{}", "+"])


def lay_on_white(paths: Sequence[str]) -> None:
    """Write image files again, of 8 bits, with white behind what is transparent; others stay as they are."""
    for path in paths:
        _write_again(path, _on_white)


def _on_white(page: Image.Image) -> Image.Image:
    if page.mode not in ALPHA_MODES and "transparency" not in page.info:
        return page
    drawn = page.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", page.size, "white"), drawn).convert("RGB")


def make_finite(paths: Sequence[str]) -> None:
    """Write image files again with 0 in place of what is not finite; others stay as they are."""
    for path in paths:
        _write_again(path, _finite)


def _finite(page: Image.Image) -> Image.Image:
    values = np.asarray(page)
    if np.isfinite(values).all():
        return page
    return Image.fromarray(np.nan_to_num(values, posinf=0, neginf=0))


def _write_again(path: str, change: Callable[[Image.Image], Image.Image]) -> None:
    """Write the pages of an image file again, upright, if one of them changes; the file itself stays, hidden.

    A file that cannot be decoded stays as it is: those beside it are mended all the same.
    """
    place = Path(path)
    if place.name.startswith(".") or not place.is_file():  # a file that was replaced, or a folder
        return
    before: list[Image.Image] = []
    try:
        with place.open("rb") as stream, Image.open(stream) as image:
            tags = {PHOTOMETRIC: 0} if has_white_at_zero(image) and has_numbers(image.mode) else {}
            for page in ImageSequence.Iterator(image):
                before.append(ImageOps.exif_transpose(page))
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError):
        return
    after = [change(page) for page in before]
    if all(new is old for new, old in zip(after, before, strict=True)):
        return
    written = io.BytesIO()
    after[0].save(written, image.format, save_all=len(after) > 1, append_images=after[1:], lossless=True, tiffinfo=tags)
    kept = place.with_name(f".{place.name}.original")
    while kept.exists():
        kept = kept.with_name(f"{kept.name}.original")
    place.rename(kept)
    place.touch(kept.stat().st_mode & 0o777)  # whoever may not read the file may not read the new one
    place.write_bytes(written.getvalue())


def _remedy(shown: Sequence[Remark], value_range: Sequence[float], span: int) -> str:
    first = shown[0]
    if first.cause == "transparency":
        command = on_files(ON_WHITE, [remark.name for remark in shown if remark.cause == "transparency"])
        return (
            "what is drawn is in the transparency, which is not read: lay the images on a background "
            f"({command}); {KEPT}"
        )
    if first.cause == "pages":
        if first.page:
            return f"the file has several pages, and data.page={first.page} reads one that is not of one colour"
        return "the file has several pages, all of one colour: take it out"
    values = [remark.values for remark in shown if remark.cause == "values"]
    suggested = suggested_range(min(each.first for each in values), max(each.last for each in values), first.mode)
    in_use = ends_of(first.mode, value_range)
    if suggested == in_use:
        return "the values of these files are what they are: take flat images out"
    text = f"{_written(suggested)} reads the first as black and the last as white (data=folder and data=table have it)"
    if value_range:
        return f"{text}; if another domain needs the range in use, write the files of one on the other's scale"
    if span >= SMALLEST_SPAN:
        text += f"; {_written(in_use)} keeps the scale of the files"
    return text


def _written(value_range: tuple[float, float]) -> str:
    """Return the setting of a range; whole numbers without a fraction."""
    ends = [str(int(end)) if end == int(end) else repr(end) for end in value_range]
    return f"data.range=[{','.join(ends)}]"


def suggested_range(first: float, last: float, mode: str) -> tuple[float, float]:
    """Return a range that holds the values from ``first`` to ``last``, rounded outward.

    Shares lie in 0..1, and whole numbers of a counter in 0..2^n - 1; others are rounded to a hundredth of their span.
    """
    if first >= 0 and mode == "F" and 0.5 < last <= 1:
        return 0.0, 1.0
    if mode != "F" and 0 <= first <= last / 8:
        return 0.0, float(2 ** math.ceil(math.log2(last + 1)) - 1)
    if first == last:
        return first - 1, last + 1
    unit = 10.0 ** (math.floor(math.log10(last - first)) - 2)
    digits = max(0, 1 - round(math.log10(unit)))
    return round(math.floor(first / unit) * unit, digits), round(math.ceil(last / unit) * unit, digits)
