"""Fonts of this machine for the characters that matplotlib's own font lacks, such as Chinese ones."""

from collections.abc import Collection
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, findSystemFonts, fontManager
from matplotlib.ft2font import FT2Font
from matplotlib.text import Text


class CompletedFonts(NamedTuple):
    """What :func:`complete_fonts` found.

    Args:
        boxes: the characters that no font has, sorted, each once; they are drawn as boxes.
        truetype: whether all fonts are TrueType, which matplotlib embeds in a PDF as they are. Of the others it can
            embed the outlines alone (Type 3).
    """

    boxes: str
    truetype: bool


class SystemFont(NamedTuple):
    """A font's file, its family, whether it is TrueType, and its characters."""

    path: str
    family: str
    truetype: bool
    characters: frozenset[str]


def complete_fonts(figure: Figure) -> CompletedFonts:
    """Give the texts of a figure further fonts for characters that matplotlib's own font lacks.

    If that font has all of them, no other is read.
    """
    texts = figure.findobj(Text)
    lacking: set[str] = set()
    for text in texts:
        lacking.update("".join(text.get_text().split()))
    own = _read(findfont(FontProperties()))
    if own is not None:
        lacking -= own.characters
    if not lacking:
        return CompletedFonts("", truetype=True)
    families = list(FontProperties().get_family())
    truetype = True
    for font in _fonts_with(lacking):
        fontManager.addfont(font.path)
        families.append(font.family)
        truetype = truetype and font.truetype
        lacking -= font.characters
    for text in texts:
        text.set_fontfamily(families)
    return CompletedFonts("".join(sorted(lacking)), truetype)


def _fonts_with(letters: Collection[str]) -> list[SystemFont]:
    """Return fonts of the machine that together have as many of ``letters`` as any has: few fonts, TrueType first."""
    fonts: list[SystemFont] = []
    for path in sorted(findSystemFonts()):
        font = _read(path)
        if font is not None:
            fonts.append(font)
    wanted = set(letters)
    chosen: list[SystemFont] = []
    while fonts:
        best = max(fonts, key=lambda font: (len(font.characters & wanted), font.truetype))
        if not best.characters & wanted:
            break
        chosen.append(best)
        wanted -= best.characters
    return chosen


def _read(path: str) -> SystemFont | None:
    """Return the font in a file; ``None`` if matplotlib cannot read or scale it."""
    try:
        font = FT2Font(path)
    except (OSError, RuntimeError):
        return None
    if not font.scalable:
        return None
    profile = font.get_sfnt_table("maxp")
    truetype = profile is not None and profile["version"] == (1, 0)  # with PostScript outlines it is (0, 0x5000)
    return SystemFont(path, font.family_name, truetype, frozenset(map(chr, font.get_charmap())))
