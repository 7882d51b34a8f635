"""Titles, authors, years and identifiers of papers, wherever they are printed, against the one list."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from goldfinch.papers import NAMES, PAPERS, Paper, cited
from goldfinch.reproduction.published import PUBLISHED, published_tables

ROOT = Path(__file__).resolve().parents[2]
METHODS = sorted(path.stem for path in (ROOT / "conf" / "method").glob("*.yaml"))


BASELINES = ("single_set", "pooled")
"""Lines of a table, without papers of their own."""


def plain(text: str) -> str:
    return " ".join(text.split())


def test_every_method_has_a_name_and_papers() -> None:
    assert sorted(PAPERS) == sorted(NAMES) == METHODS
    found = [paper for papers in PAPERS.values() for paper in papers]
    assert all(re.fullmatch(r"(arXiv:\d{4}\.\d{5}|doi:10\.\S+|\w[\w ]*:\S+)", paper.identifier) for paper in found)
    assert all(2016 < paper.year < 2027 for paper in found)
    # FedSAM has two papers; SingleSet, Pooled, FPL+HEAL and Combined have none of their own
    assert len({paper.identifier for paper in found}) == len({paper.title for paper in found}) == len(METHODS) - 3


def test_the_titles_that_were_once_invented_are_the_papers_own() -> None:
    assert PAPERS["fedplcc"][0].title == "An Enhanced Federated Prototype Learning Method under Domain Shift"
    assert PAPERS["fedapc"][0].title == "Robust Federated Learning on Edge Devices with Domain Heterogeneity"
    assert "for Federated Learning with Feature Drift" in PAPERS["fedpall"][0].title


def test_a_citation_has_title_authors_venue_year_and_identifier() -> None:
    paper = Paper("A Title", ("Ann B. Cee", "Dee E"), "CVPR", 2023, "arXiv:2301.00001")
    assert paper.citation == "A Title. Ann B. Cee, Dee E. CVPR 2023. arXiv:2301.00001."
    assert paper.short == "Cee et al., CVPR 2023"
    assert cited("fedbn").startswith("FedBN: Federated Learning on Non-IID Features")  # the name is not repeated


@pytest.mark.parametrize("method", METHODS)
def test_a_method_s_file_opens_with_its_papers(method: str) -> None:
    text = plain(ast.get_docstring(ast.parse((ROOT / "strategies" / f"{method}.py").read_text())) or "")
    assert text.startswith(f"{NAMES[method]}: ")
    assert all(paper.citation in text for paper in PAPERS[method])
    assert method in BASELINES or text.startswith(cited(method))


DASH = "\u2013"
ADDRESSES = {
    "arXiv": "https://arxiv.org/abs/{}",
    "doi": "https://doi.org/{}",
    "OpenReview": "https://openreview.net/forum?id={}",
    "PMLR": "https://proceedings.mlr.press/{}.html",
    "IEEE Xplore": "https://ieeexplore.ieee.org/document/{}",
}


def link(paper: Paper) -> str:
    kind, _, number = paper.identifier.partition(":")
    return f"[{paper.short}]({ADDRESSES[kind].format(number)})"


@pytest.mark.parametrize("method", METHODS)
def test_the_documentation_links_to_a_method_s_papers(method: str) -> None:
    text = (ROOT / "docs" / "methods.md").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith(f"| [{method}](")]
    others = {**dict.fromkeys(BASELINES, DASH), "fpl_heal": "FedHEAL and FPL", "combined": DASH}
    assert line.split(" | ")[1] == others.get(method, ", ".join(map(link, PAPERS[method])))


@pytest.mark.parametrize("path", sorted(PUBLISHED.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_published_table_names_its_paper_by_the_list(path: Path) -> None:
    content = OmegaConf.load(path)
    assert content.paper == path.stem
    assert {published_tables()[name].paper for name in content.tables} == {cited(path.stem)}


PAGES = [
    path
    for folder in ("small", "paper")
    for path in sorted((ROOT / "docs" / "results" / folder).glob("*.md"))
    if path.stem in published_tables()
]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_page_opens_with_its_paper(path: Path) -> None:
    table = published_tables()[path.stem]
    assert path.read_text().split("\n\n")[1] == f"{table.paper} {table.title}."


@pytest.mark.parametrize("path", sorted((ROOT / "conf" / "experiment").glob("f*.yaml")), ids=lambda path: path.stem)
def test_an_experiment_names_the_venue_of_its_paper(path: Path) -> None:
    method = max((name for name in NAMES if path.stem.startswith(f"{name}_")), key=len)
    for venue in re.findall(rf"{NAMES[method]} \(([A-Z]+ \d{{4}})\)", path.read_text()):
        assert venue == PAPERS[method][0].appeared
