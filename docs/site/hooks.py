"""What the documentation site holds besides the pages in docs/: the root's pages, and a page for every module.

Pages in the repository link to files as they lie there, so that links work where the repository is shown. Here a link
to a module becomes a link to its page in the reference, and a link to a page of the root a link to its copy.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("goldfinch", "strategies", "common", "client", "server")
ROOT_PAGES = {"README.md": "index.md", "SECURITY.md": "SECURITY.md", "CHANGELOG.md": "CHANGELOG.md"}
ROOT_PAGES |= {"CONTRIBUTING.md": "CONTRIBUTING.md", "LICENSE": "LICENSE.md"}
ROOT_PAGES |= {"docs/README.md": "contents.md"}  # index.md is the README of the root
ONE_FILE = "fpl_in_one_file"
LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")


def modules() -> list[str]:
    """Dotted names of all modules with a docstring or code, packages first."""
    names = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name == "__init__.py" and not path.read_text().strip():
                continue
            if path.name == "__main__.py":
                continue
            parts = path.relative_to(ROOT).with_suffix("").parts
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root, the one-file method, measured rows that pages link to, and the reference."""
    for source, target in ROOT_PAGES.items():
        text = (ROOT / source).read_text()
        if source == "LICENSE":
            text = f"# Licence\n\n```\n{text}\n```\n"
        files.append(File.generated(config, target, content=text))
    code = (ROOT / "docs" / f"{ONE_FILE}.py").read_text()
    page = f"# The whole method in one file\n\n```python\n{code}```\n"
    files.append(File.generated(config, f"{ONE_FILE}.md", content=page))
    for path in sorted((ROOT / "bench" / "results").glob("*.csv")):
        files.append(File.generated(config, f"bench/results/{path.name}", abs_src_path=str(path)))
    index = ["# Reference", "", "Every module, by package. Made from the docstrings.", ""]
    for name in modules():
        files.append(File.generated(config, f"reference/{name}.md", content=f"# `{name}`\n\n::: {name}\n"))
        index.append(f"- [`{name}`]({name}.md)")
    files.append(File.generated(config, "reference/index.md", content="\n".join(index) + "\n"))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Point links that leave docs/ to what the site has instead."""
    here = page.file.src_uri
    lies_at = {target: source for source, target in ROOT_PAGES.items()}.get(here, f"docs/{here}")

    def replaced(match: re.Match[str]) -> str:
        start, target, anchor, end = match[1], match[2], match[3] or "", match[4]
        if re.match(r"[a-z]+:", target):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(lies_at), target))
        found = site_path(path)
        if found is None:
            return match[0]
        return f"{start}{posixpath.relpath(found, posixpath.dirname(here) or '.')}{anchor}{end}"

    return LINK.sub(replaced, markdown)


def site_path(path: str) -> str | None:
    """Where the site has the repository's file ``path``; ``None`` if it is not there."""
    if path in ROOT_PAGES:
        return ROOT_PAGES[path]
    if path == f"docs/{ONE_FILE}.py":
        return f"{ONE_FILE}.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith("bench/results/"):
        return path
    if path.endswith(".py") and path.partition("/")[0] in PACKAGES:
        return f"reference/{path.removesuffix('.py').replace('/', '.')}.md"
    return None
