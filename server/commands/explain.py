"""``goldfinch explain``: a group, a choice or a setting, with types, ranges, defaults, meaning and papers' values."""

import shutil
import textwrap
from collections.abc import Sequence

from common.explanation import Explanation, Setting, explain

MIN_WIDTH = 60
MAX_WIDTH = 100


def print_explanations(names: Sequence[str]) -> None:
    """Print what each of ``names`` is, and its settings.

    Raises:
        ConfigError: a name is neither a group, nor a choice, nor a setting.
    """
    found = [explain(name.replace("=", ".", 1)) for name in names]
    columns = shutil.get_terminal_size((MAX_WIDTH, 24)).columns
    width = min(MAX_WIDTH, max(MIN_WIDTH, columns))
    print("\n\n".join(_page(each, width) for each in found))


def _page(found: Explanation, width: int) -> str:
    parts = [found.title]
    for paragraph in found.text.splitlines():
        parts.append(textwrap.fill(paragraph, width, subsequent_indent="  "))
    for setting in found.settings:
        parts += ["", *_lines(setting, width)]
    if not found.settings:
        parts += ["", "It has no settings."]
    return "\n".join(parts)


def _lines(setting: Setting, width: int) -> list[str]:
    """Return a line with key, default and type, and indented lines with the meaning."""
    head = f"{setting.key}={setting.default}"
    if setting.kind:
        head = f"{head}  ({setting.kind})"
    texts = [setting.meaning]
    if setting.search:
        texts.append(f"Searched by goldfinch compare: {setting.search}.")
    if setting.published:
        values = ", ".join(f"{value} ({data})" for data, value in setting.published.items())
        texts.append(f"In papers: {values}.")
    lines = [head]
    for text in texts:
        lines += textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    ")
    return lines
