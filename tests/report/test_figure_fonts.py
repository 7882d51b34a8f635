"""Characters that matplotlib's own font lacks: another font has them, or a line names them."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.t2CharStringPen import T2CharStringPen
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib.font_manager import fontManager

from goldfinch.results.figures import fonts
from goldfinch.results.figures.charts import convergence, rendered
from goldfinch.results.figures.svg import inline_svg
from goldfinch.results.seeds import Value


def font_file(path: Path, letters: str, *, truetype: bool) -> Path:
    """A font in which these letters are squares."""
    names = [".notdef", *[f"letter{number}" for number in range(len(letters))]]
    builder = FontBuilder(1000, isTTF=truetype)
    builder.setupGlyphOrder(names)
    builder.setupCharacterMap(dict(zip(map(ord, letters), names[1:], strict=True)))
    pen = TTGlyphPen(None) if truetype else T2CharStringPen(900, None)
    pen.moveTo((0, 0))
    for corner in ((0, 800), (800, 800), (800, 0)):
        pen.lineTo(corner)
    pen.closePath()
    if isinstance(pen, TTGlyphPen):
        builder.setupGlyf(dict.fromkeys(names, pen.glyph()))
    else:
        builder.setupCFF(path.stem, {}, dict.fromkeys(names, pen.getCharString()), {})
    builder.setupHorizontalMetrics(dict.fromkeys(names, (900, 0)))
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": path.stem, "styleName": "Regular", "psName": path.stem})
    builder.setupOS2(sTypoAscender=800, usWinAscent=800, usWinDescent=200)
    builder.setupPost()
    builder.save(path)
    return path


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files of the machine's fonts: none at first, besides one that is damaged."""
    damaged = tmp_path / "damaged.ttf"
    damaged.write_bytes(b"no font")
    found = [str(damaged)]
    monkeypatch.setattr(fonts, "findSystemFonts", lambda: found)
    monkeypatch.setattr(fontManager, "ttflist", list(fontManager.ttflist))
    return found


def drawn(label: str, form: str = "pdf") -> bytes:
    figure = convergence({label: {0: Value(10.0, None), 1: Value(50.0, None)}}, "title")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return rendered(figure, form)


@pytest.mark.parametrize("form", ["pdf", "svg"])
def test_characters_that_no_font_has_are_named_once(
    form: str, installed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    drawn("我的方法的", form)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("no font here has 我方法的")


def test_fonts_of_the_machine_are_taken_for_them(
    installed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    installed.append(str(font_file(tmp_path / "OneLetter.ttf", "法", truetype=True)))
    installed.append(str(font_file(tmp_path / "OtherLetters.ttf", "我的方", truetype=True)))
    content = drawn("我的方法")
    assert capsys.readouterr().err == ""
    assert b"OneLetter" in content
    assert b"OtherLetters" in content
    assert b"/Type3" not in content


def test_a_font_with_postscript_outlines_is_embedded_as_outlines(installed: list[str], tmp_path: Path) -> None:
    """As TrueType it would be a file that strict readers refuse."""
    installed.append(str(font_file(tmp_path / "APostScript.otf", "方法", truetype=False)))
    assert b"/Type3" in drawn("方法")
    installed.append(str(font_file(tmp_path / "TrueType.ttf", "方法", truetype=True)))
    assert b"/Type3" not in drawn("方法"), "TrueType goes first"


def test_no_font_is_read_for_text_that_has_one(installed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fonts, "findSystemFonts", lambda: pytest.fail("fonts were read"))
    assert drawn("FPL (ours), τ=0.02\nand more")


def test_a_figure_within_a_page_warns_of_nothing(installed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    figure = convergence({"方法": {0: Value(10.0, None)}}, "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "方法" in inline_svg(figure, "curves", "salt")
    assert capsys.readouterr().err == ""
