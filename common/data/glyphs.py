"""Glyphs: digits in five styles, made on the spot. The embedded data set: nothing to fetch, real domain shift."""

from collections.abc import Callable
from typing import ClassVar

import numpy as np
import PIL
import torch
from PIL import features
from torch import Tensor

from common.config import Names, check, checked
from common.data.batches import Split
from common.data.cache import cached
from common.data.domain import DataSource, Domain
from common.data.glyph_rendering import SIZE, bilinear, blur, font_glyphs, neighbourhood, noise_field, warp
from common.extras import libraries_of
from common.numerics import numpy_generator

_VERSION = 1  # raise when a pixel changes: it is the seed, and part of the cache's key
_SERIF = (
    "DejaVuSerif", "DejaVuSerif-Bold", "STIXGeneral", "STIXGeneralBol", "cmr10", "cmb10", "cmtt10", "DejaVuSansMono",
)  # fmt: skip
_SANS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono-Bold", "cmss10", "STIXGeneralBol", "DejaVuSerif-Bold")
_SLANTED = (
    "DejaVuSans-Oblique", "DejaVuSerif-Italic", "STIXGeneralItalic", "STIXGeneralBolIta", "cmti10", "DejaVuSans-Bold",
)  # fmt: skip


@checked
class Glyphs(DataSource):
    """Ten digits, 32x32 RGB, in up to five domains of different sizes.

    handwritten, 1437 training and 360 test images: scikit-learn's UCI digits (real 8x8 scans), light on black.

    printed, 1200 and 600: upright serif and typewriter fonts, dark on paper.

    signs, 2400 and 800: sans-serif fonts, colour on colour, between parts of other digits.

    sketch, 240 and 400: slanted fonts, drawn as bent outlines; the small domain.

    blended, 1437 and 360: the handwritten digits, subtracted from coloured textures.
    """

    name: ClassVar[str] = "glyphs"
    known_domains: ClassVar[tuple[str, ...]] = ("handwritten", "printed", "signs", "sketch", "blended")
    generated: ClassVar[bool] = True

    domains: Names = ("handwritten", "printed", "signs", "sketch")

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.image_size == SIZE, f"glyphs are {SIZE}x{SIZE}; image_size={self.image_size} cannot be had")

    @property
    def class_names(self) -> tuple[str, ...]:
        """The digits 0 to 9."""
        return tuple(map(str, range(10)))

    def _read(self, domain: str) -> Domain:
        # Pillow brings the font renderer; another version of it may draw other pixels.
        key: list[str | int] = [_VERSION, domain, PIL.__version__, str(features.version("freetype2"))]
        arrays = cached(f"glyphs-{domain}", key, lambda: _make(domain))
        train, test = (Split(arrays[f"{part}_images"], arrays[f"{part}_labels"]) for part in ("train", "test"))
        return Domain(domain, train, test)


def _make(domain: str) -> dict[str, Tensor]:
    found = {}
    for part in ("train", "test"):
        draws = numpy_generator(_VERSION, "glyphs", domain, part)
        if domain == "handwritten":
            masks, labels = _handwriting(part)
            images = np.repeat(masks[..., None], 3, axis=3)
        elif domain == "blended":
            masks, labels = _handwriting(part)
            images = _blended(draws, masks)
        else:
            count, fonts, style = _STYLES[domain]
            labels = draws.permutation(np.arange(count[part]) % 10)
            images = style(draws, font_glyphs(fonts), labels)
        pixels = (np.clip(images, 0, 1) * 255 + 0.5).astype(np.uint8)
        found[f"{part}_images"] = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
        found[f"{part}_labels"] = torch.from_numpy(labels.astype(np.int64))
    return found


def _handwriting(part: str) -> tuple[np.ndarray, np.ndarray]:
    """Return scans as float64 [N, 32, 32] in 0..1 and labels [N]; the last 360 are the test split."""
    with libraries_of("datasets", "data=glyphs"):
        from sklearn.datasets import load_digits  # slow to import: only who draws pays for it

    digits = load_digits()
    chosen = slice(-360, None) if part == "test" else slice(None, -360)
    small, labels = digits.images[chosen] / 16, digits.target[chosen]
    place = (np.arange(SIZE) + 0.5) / 4 - 0.5
    return bilinear(small, place[:, None], place), labels


def _pick(draws: np.random.Generator, glyphs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return glyphs[draws.integers(len(glyphs), size=len(labels)), labels]


def _colours(draws: np.random.Generator, count: int) -> np.ndarray:
    return draws.random((count, 1, 1, 3))


def _mix(mask: np.ndarray, ink: np.ndarray, ground: np.ndarray) -> np.ndarray:
    return ground + mask[..., None] * (ink - ground)


def _grain(draws: np.random.Generator, images: np.ndarray, strength: float) -> np.ndarray:
    return images + strength * (2 * draws.random(images.shape) - 1)


def _printed(draws: np.random.Generator, glyphs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    count = len(labels)
    masks = warp(draws, _pick(draws, glyphs, labels), turn=0.06, scale=(0.7, 1.1), shift=2.0, shear=0.05)
    light = 1 - 0.25 * draws.random((count, 1, 1)) * noise_field(draws, count, 1)
    paper = light[..., None] * (0.85 + 0.15 * _colours(draws, count))
    ink = np.repeat(0.35 * draws.random((count, 1, 1, 1)), 3, axis=3)
    return _grain(draws, _mix(masks, ink, paper), 0.04)


def _signs(draws: np.random.Generator, glyphs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    count = len(labels)
    masks = warp(draws, _pick(draws, glyphs, labels), turn=0.1, scale=(0.8, 1.15), shift=1.5, shear=0.15)
    for side in (-1, 1):
        others = _pick(draws, glyphs, draws.integers(10, size=count))
        offset = side * (15 + (4 * draws.random((count, 1, 1))))
        place = np.arange(SIZE, dtype=np.float64)
        masks = np.maximum(masks, bilinear(others, place[:, None], place - offset))
    ground = _colours(draws, count)
    ink = _colours(draws, count)
    # Keep ink and ground apart: move the ink's every channel by at least 0.35, to the side that has room.
    ink = np.where(ground > 0.5, np.minimum(ink, ground - 0.35), np.maximum(ink, ground + 0.35))
    light = 0.6 + 0.5 * noise_field(draws, count, 2)
    images = _mix(blur(masks), ink, ground) * light[..., None]
    return _grain(draws, images, 0.06)


def _sketch(draws: np.random.Generator, glyphs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    count = len(labels)
    source = _pick(draws, glyphs, labels)
    masks = warp(draws, source, turn=0.15, scale=(0.8, 1.2), shift=2.0, shear=0.3, elastic=2.5)
    outline = np.clip(1.4 * (neighbourhood(masks, True) - neighbourhood(masks, False)), 0, 1)
    hatching = noise_field(draws, count, 16)
    paper = 0.8 + 0.2 * noise_field(draws, count, 3)[..., None] * np.ones(3)
    ink = 0.15 + 0.3 * draws.random((count, 1, 1, 1)) * np.ones(3)
    return _grain(draws, _mix(outline * (0.5 + 0.5 * hatching), ink, paper), 0.05)


def _blended(draws: np.random.Generator, masks: np.ndarray) -> np.ndarray:
    count = len(masks)
    layers = [np.stack([noise_field(draws, count, cells) for _ in range(3)], axis=3) for cells in (2, 5, 11)]
    texture = (2 * layers[0] + 2 * layers[1] + layers[2]) / 5
    # MNIST-M's way (Ganin & Lempitsky, ICML 2015): the absolute difference of texture and digit.
    return np.abs(texture - masks[..., None] * (0.6 + 0.4 * _colours(draws, count)))


_STYLES: dict[str, tuple[dict[str, int], tuple[str, ...], Callable[..., np.ndarray]]] = {
    "printed": ({"train": 1200, "test": 600}, _SERIF, _printed),
    "signs": ({"train": 2400, "test": 800}, _SANS, _signs),
    "sketch": ({"train": 240, "test": 400}, _SLANTED, _sketch),
}
