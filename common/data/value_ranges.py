"""Whether an image survives being read: values outside 0..255, pages and transparency can leave it black or flat."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image
from PIL.TiffImagePlugin import TiffImageFile

from common.errors import DataError

SMALLEST_SPAN = 32
"""Grey levels of 256 that a domain's images must differ by: an eighth of the range."""

ALPHA_MODES = frozenset({"RGBA", "RGBa", "LA", "La", "PA"})

BYTE_MODES = frozenset({"1", "L", "P", "RGB", "CMYK", "YCbCr", "HSV", "LAB"})
"""Modes of Pillow with 8 bits and no transparency, whose values are read as they are."""


@dataclass(frozen=True)
class Remark:
    """What reading made of one image.

    Args:
        name: what messages call the image.
        mode: Pillow's mode of the file.
        low: smallest value in the file.
        high: largest value in the file.
        black: smallest value after reading, 0..255.
        white: largest value after reading, 0..255.
        varied: whether the file holds more than one colour, or more than one page.
        cause: ``transparency``, ``pages`` or ``values``: what would explain a loss.
        lost: whether the file's content is lost.
    """

    name: str
    mode: str
    low: float
    high: float
    black: int
    white: int
    varied: bool
    cause: str
    lost: bool


def remark_on(image: Image.Image, extrema: np.ndarray, read: np.ndarray, name: str, *, ranged: bool) -> Remark:
    """Return what reading made of an image.

    Args:
        image: the image as it was opened.
        extrema: the smallest and the largest value of each of its bands, [bands, 2].
        read: the image after reading, uint8 [H, W, 3].
        name: what messages call it.
        ranged: whether ``data.range`` maps its values.
    """
    low, high = float(extrema.min()), float(extrema.max())
    black, white = int(read.min()), int(read.max())
    span = int((read.max((0, 1)).astype(int) - read.min((0, 1))).max())
    varied = bool((extrema[:, 0] < extrema[:, 1]).any())
    cause = "values"
    if isinstance(image, TiffImageFile) and getattr(image, "is_animated", False):
        cause, varied = "pages", True
    elif image.mode in ALPHA_MODES or "transparency" in image.info:
        cause = "transparency"
    lost = varied and span < SMALLEST_SPAN
    if image.mode in BYTE_MODES and cause == "values":
        lost = False  # nothing is lost by reading; check_remarks() judges the domain's range
    if image.mode.startswith("I") and not ranged:
        lost = lost or low < 0 or high > 65535
    if image.mode == "F" and not ranged:
        lost = lost or low < 0 or high > 255
    return Remark(name, image.mode, low, high, black, white, varied, cause, lost)


def extrema_of(image: Image.Image) -> np.ndarray:
    """Return the smallest and the largest value of each band of an image, transparency included: float64 [bands, 2]."""
    try:
        return np.asarray(image.getextrema(), dtype=np.float64).reshape(-1, 2)
    except ValueError:  # a mode that Pillow has no extrema of, such as I;16B
        values = np.asarray(image)
        return np.array([[values.min(), values.max()]], dtype=np.float64)


def check_remarks(remarks: Sequence[Remark]) -> str:
    """Check that most of a domain's images survive being read.

    Images of one colour in their files are left out: nothing of them is lost.

    Returns:
        A warning if some do not; empty if all do.

    Raises:
        DataError: most do not, or all of the domain's values lie in a sliver of the range; with the first file, what
            became of it, and the remedy.
    """
    lost = [remark for remark in remarks if remark.lost]
    varied = [remark for remark in remarks if remark.varied]
    sliver = bool(varied) and max(each.white for each in varied) - min(each.black for each in varied) < SMALLEST_SPAN
    if not lost and not sliver:
        return ""
    shown = lost or varied
    first = shown[0]
    message = (
        f"{len(shown):,} of {len(remarks):,} images are black, flat or nearly so when they are read: {first.name} "
        f"holds {first.low:g} to {first.high:g} (mode {first.mode}) and is read as {first.black} to {first.white} of "
        f"0 to 255; {_remedy(first, shown)}"
    )
    if sliver or 2 * len(lost) > len(remarks):
        raise DataError(message)
    return message


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


def _remedy(first: Remark, shown: Sequence[Remark]) -> str:
    if first.cause == "transparency":
        return (
            "what is drawn is in the transparency, which is not read: lay the images on a background, such as "
            "mogrify -background white -alpha remove -alpha off *.png"
        )
    if first.cause == "pages":
        return "the file has several pages, and data=folder data.page=2 reads the second"
    low, high = min(remark.low for remark in shown), max(remark.high for remark in shown)
    if low >= 0 and first.mode == "F" and high <= 1:
        low, high = 0, 1
    elif low >= 0 and first.mode != "F":
        low, high = 0, 2 ** math.ceil(math.log2(high + 1)) - 1
    return (
        f"data=folder data.range=[{math.floor(low)},{math.ceil(high)}] reads the first as black and the last as white"
    )
