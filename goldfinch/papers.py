"""The papers that the methods are from: one list of titles, authors, years and identifiers, ``papers.yaml``.

Method files, the documentation, the published tables and the pages of reproduced tables take them from here; a test
compares what they print with this list.
"""

from pathlib import Path
from typing import Any

import yaml

from common.config import build, checked
from common.regular_files import read_small

FILE = Path(__file__).resolve().with_name("papers.yaml")


@checked
class Paper:
    """A paper, as it is cited.

    Args:
        title: the full title.
        authors: full names, in order.
        venue: where it appeared; empty for a preprint.
        year: of the venue, or of the preprint.
        identifier: ``arXiv:NUMBER``, ``doi:...``, or the number of the publisher.
    """

    title: str
    authors: tuple[str, ...]
    venue: str
    year: int
    identifier: str

    @property
    def short(self) -> str:
        """First author, venue and year: ``Huang et al., CVPR 2023``."""
        return f"{self.authors[0].rpartition(' ')[2]} et al., {self.appeared}"

    @property
    def appeared(self) -> str:
        """Venue and year; the year alone of a preprint."""
        return f"{self.venue} {self.year}".strip()

    @property
    def citation(self) -> str:
        """Title, authors, venue, year and identifier, as sentences."""
        return f"{self.title}. {', '.join(self.authors)}. {self.appeared}. {self.identifier}."


def _read() -> tuple[dict[str, str], dict[str, tuple[Paper, ...]]]:
    """Return the name and the papers of each option of ``conf/method/``.

    Raises:
        ConfigError: a paper in the file is not as it must be.
    """
    content: Any = yaml.safe_load(read_small(FILE))
    papers: dict[str, Paper] = {}
    for key, node in content["papers"].items():
        papers[key] = build(node, f"{FILE.name}: papers.{key}", Paper)
    names: dict[str, str] = {}
    of_methods: dict[str, tuple[Paper, ...]] = {}
    for method, node in content["methods"].items():
        names[method] = node["name"]
        of_methods[method] = tuple(papers[key] for key in node["papers"])
    return names, of_methods


NAMES, PAPERS = _read()
"""What each option of ``conf/method/`` is called in papers, and its papers."""


def cited(method: str) -> str:
    """Return a method's name and the citations of its papers, as a page prints them.

    Args:
        method: an option of ``conf/method/``.

    Returns:
        ``NAME: TITLE. AUTHORS. VENUE YEAR. IDENTIFIER.``, one after another where there are several papers. The name is
        left out where the first title begins with it.

    Raises:
        KeyError: the list has no such method.
    """
    name = NAMES[method]
    text = " ".join(paper.citation for paper in PAPERS[method])
    if text.startswith(f"{name}: "):
        return text
    return f"{name}: {text}"
