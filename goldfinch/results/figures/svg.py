"""Figures as SVG within a page: their text is the page's text, and their colours follow its light or dark ground."""

import io
import re
import warnings
from xml.etree import ElementTree

import matplotlib as mpl
from matplotlib.figure import Figure

from goldfinch.results.figures.charts import COLOURS, DARK, GRID, NO_GLYPH, clean_texts

SVG = "{http://www.w3.org/2000/svg}"
LINK = "{http://www.w3.org/1999/xlink}href"
FONT_SIZE = re.compile(r"[\d.]+px")
REFERENCE = re.compile(r"#(\w+)")

PIXELS = 120
"""Pixels of a page for an inch of a figure; text of 8 points is 13 pixels high."""

PAGE_COLOURS = {"#000000": "currentColor", DARK: "currentColor", "#ffffff": "var(--paper)", GRID: "var(--rule)"}
"""What the page has instead of a colour: its ink, its paper, its rules, and the lines' colours on a dark ground."""

for _place, _colour in enumerate(COLOURS[:-1]):  # the last is black, which is ink
    PAGE_COLOURS[_colour.lower()] = f"var(--line{_place}, {_colour})"


def inline_svg(figure: Figure, description: str, salt: str, *, paper: bool = False) -> str:
    """Return the figure as an ``<svg>`` element for an HTML page.

    The element has neither ``style`` attributes nor a ``<style>``, which the page's content security policy forbids.

    Args:
        figure: the figure; its background is left out.
        description: what it shows, for who does not see it; empty for a mark that has words beside it.
        salt: text that no other figure of the page has, so that the ids of the two differ.
        paper: whether the colours stay as they are drawn, for white paper, and do not follow the page's.
    """
    clean_texts(figure)
    stream = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", NO_GLYPH)  # the page's reader has the fonts
        figure.savefig(stream, format="svg", metadata={"Date": None}, transparent=True)
    ElementTree.register_namespace("", SVG.strip("{}"))
    root = ElementTree.fromstring(stream.getvalue())  # noqa: S314  # it was written above
    for part in (root.find(f"{SVG}metadata"), root.find(f"{SVG}defs")):
        if part is not None:
            root.remove(part)
    used = _references(root)
    for element in root.iter():
        _plain_attributes(element, used, paper)
    for name in ("height", "version"):
        root.attrib.pop(name, None)
    root.set("width", f"{PIXELS * figure.get_figwidth():.0f}")
    if description:
        root.attrib |= {"role": "img", "aria-label": description}
    else:
        root.set("aria-hidden", "true")
    root.attrib |= {"stroke-linejoin": "round", "stroke-linecap": "butt", "class": "figure"}
    return ElementTree.tostring(root, encoding="unicode")


def _references(root: ElementTree.Element) -> set[str]:
    """Return the ids that elements refer to."""
    ids: set[str] = set()
    for element in root.iter():
        for name, value in element.attrib.items():
            if name == LINK or value.startswith("url("):
                ids.update(REFERENCE.findall(value))
    return ids


def _plain_attributes(element: ElementTree.Element, used: set[str], paper: bool) -> None:
    """Write the element's style as attributes, without the font's name; leave out an id that nothing refers to."""
    for item in element.attrib.pop("style", "").split(";"):
        name, _, value = (part.strip() for part in item.partition(":"))
        size = FONT_SIZE.search(value)
        if name == "font" and size:  # matplotlib below 3.10 writes size and name as one
            element.set("font-size", size[0])
        elif name and name != "font-family":
            element.set(name, value)
    if element.get("id") not in used:
        element.attrib.pop("id", None)
    if LINK in element.attrib:
        element.set("href", element.attrib.pop(LINK))
    if element.tag == f"{SVG}text" and "fill" not in element.attrib:
        element.set("fill", "#000000")
    if paper:
        return
    for name in ("fill", "stroke"):
        if element.get(name) in PAGE_COLOURS:
            element.set(name, PAGE_COLOURS[element.get(name, "")])
