"""Drawing with arrays: font glyphs, affine and elastic warps, textures.

Only additions, multiplications, comparisons and table look-ups on float64 are used, no sums over axes and no
trigonometry, so that the pixels are equal on every processor.
"""

from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from common.extras import libraries_of

SIZE = 32  # pixels, of everything here
_INK_HEIGHT = 22  # pixels, of a glyph before it is warped
_FINE = 8  # a glyph is drawn larger by this factor and averaged down


@cache
def font_glyphs(fonts: tuple[str, ...]) -> np.ndarray:
    """Return the digits 0..9 of matplotlib's fonts: float64 [fonts, 10, 32, 32] in 0..1, ink height 22, centred."""
    with libraries_of("datasets", "data=glyphs"):
        import matplotlib as mpl  # slow to import: only who draws pays for it

    folder = Path(mpl.get_data_path()) / "fonts" / "ttf"
    glyphs = np.zeros((len(fonts), 10, SIZE, SIZE))
    for place, name in enumerate(fonts):
        font = ImageFont.truetype(str(folder / f"{name}.ttf"), 200, layout_engine=ImageFont.Layout.BASIC)
        for digit in range(10):
            left, top, right, bottom = font.getbbox(str(digit))
            canvas = Image.new("L", (int(right - left) + 2, int(bottom - top) + 2))
            ImageDraw.Draw(canvas).text((1 - left, 1 - top), str(digit), font=font, fill=255)
            height = _INK_HEIGHT * _FINE
            width = min(max(1, canvas.width * height // canvas.height), (SIZE - 2) * _FINE)
            fine = Image.new("L", (SIZE * _FINE, SIZE * _FINE))
            ink = canvas.resize((width, height), Image.Resampling.BILINEAR)
            fine.paste(ink, ((fine.width - width) // 2, (fine.height - height) // 2))
            glyphs[place, digit] = np.asarray(fine.reduce(_FINE)) / 255
    return glyphs


def bilinear(source: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return bilinear look-up: float64 [N, H, W] at fractional rows and columns, broadcast to [N, h, w]; 0 outside."""
    count, height, width = source.shape
    padded = np.zeros((count, height + 2, width + 2))
    padded[:, 1:-1, 1:-1] = source
    rows = np.clip(rows + 1, 0, height + 0.999)
    columns = np.clip(columns + 1, 0, width + 0.999)
    top, left = rows.astype(np.int64), columns.astype(np.int64)
    down, right = rows - top, columns - left
    which = np.arange(count)[:, None, None]
    upper = padded[which, top, left] * (1 - right) + padded[which, top, left + 1] * right
    lower = padded[which, top + 1, left] * (1 - right) + padded[which, top + 1, left + 1] * right
    return upper * (1 - down) + lower * down


def noise_field(draws: np.random.Generator, count: int, cells: int) -> np.ndarray:
    """Return smooth random fields: float64 [count, 32, 32] in 0..1, ``cells`` bumps across (value noise)."""
    grid = draws.random((count, cells + 1, cells + 1))
    place = (np.arange(SIZE) + 0.5) * cells / SIZE
    return bilinear(grid, place[:, None], place)


def warp(
    draws: np.random.Generator,
    masks: np.ndarray,
    *,
    turn: float,
    scale: tuple[float, float],
    shift: float,
    shear: float = 0.0,
    elastic: float = 0.0,
) -> np.ndarray:
    """Return each mask turned, scaled, sheared, moved and bent by its own random amounts.

    Args:
        draws: the random numbers.
        masks: float64 [N, 32, 32].
        turn: largest rotation, as the tangent of half the angle (0.1 is 11.4 degrees).
        scale: bounds of the magnification, for height and width separately.
        shift: largest move, pixels.
        shear: largest slant, as a tangent.
        elastic: largest local displacement, pixels.
    """
    count = len(masks)

    def uniform(low: float, high: float) -> np.ndarray:
        return low + (high - low) * draws.random((count, 1, 1))

    half = uniform(-turn, turn)
    cosine, sine = (1 - half * half) / (1 + half * half), 2 * half / (1 + half * half)
    tall, wide, slant = uniform(*scale), uniform(*scale), uniform(-shear, shear)
    centre = (SIZE - 1) / 2
    y = np.arange(SIZE)[None, :, None] - centre - uniform(-shift, shift)
    x = np.arange(SIZE)[None, None, :] - centre - uniform(-shift, shift)
    rows, columns = cosine * y + sine * x, cosine * x - sine * y
    rows, columns = rows / tall + centre, (columns + slant * rows) / wide + centre
    if elastic:
        rows = rows + elastic * (2 * noise_field(draws, count, 4) - 1)
        columns = columns + elastic * (2 * noise_field(draws, count, 4) - 1)
    return bilinear(masks, rows, columns)


def neighbourhood(masks: np.ndarray, largest: bool) -> np.ndarray:
    """Return largest or smallest value among each pixel and its four neighbours: a dilation or an erosion."""
    pick = np.maximum if largest else np.minimum
    padded = np.pad(masks, ((0, 0), (1, 1), (1, 1)))
    vertical = pick(padded[:, :-2, 1:-1], padded[:, 2:, 1:-1])
    horizontal = pick(padded[:, 1:-1, :-2], padded[:, 1:-1, 2:])
    return pick(masks, pick(vertical, horizontal))


def blur(masks: np.ndarray) -> np.ndarray:
    """Return binomial 3x3 smoothing (1, 2, 1)/4 in both directions; the border is repeated."""
    padded = np.pad(masks, ((0, 0), (1, 1), (1, 1)), mode="edge")
    vertical = (padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]) / 4
    return (vertical[:, :, :-2] + 2 * vertical[:, :, 1:-1] + vertical[:, :, 2:]) / 4
