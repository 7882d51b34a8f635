"""What may change a published algorithm: every limit, floor, fallback and refusal between a formula and a run.

A plain run is the published algorithm. The list is ``alterations.yaml``: each entry is the paper's own, the released
code's, a value where the formula has none, off by default, or recorded: in the run's files and in a line under its
table. ``goldfinch list alterations`` prints the list; docs/design.md has what is not off by default as a table.
"""

from pathlib import Path
from typing import Any, Literal

import yaml

from common.config import build, checked
from common.regular_files import read_small

FILE = Path(__file__).resolve().with_name("alterations.yaml")

Whose = Literal["paper", "released code", "no value", "setting", "recorded"]
"""Why a plain run may have it. ``no value``: the formula, and the released code, have no value there, or stop."""

WHOSE: dict[Whose, str] = {
    "paper": "the paper's",
    "released code": "the released code's",
    "no value": "the formula has no value there",
    "setting": "off by default",
    "recorded": "in the record and under the table",
}


@checked
class Alteration:
    """One thing that may change an algorithm.

    Args:
        name: a few words, unique.
        changes: what is changed.
        when: the condition.
        whose: why a plain run may have it.
        default: the settings at which it is off, as ``KEY=VALUE``; for ``setting`` only.
    """

    name: str
    changes: str
    when: str
    whose: Whose
    default: tuple[str, ...] = ()


def alterations() -> list[Alteration]:
    """Return all of them, in the order of the file: by where they act.

    Raises:
        ConfigError: an entry of the file is not as it must be.
    """
    content: list[dict[str, Any]] = yaml.safe_load(read_small(FILE))
    return [build(node, f"{FILE.name}: {number}", Alteration) for number, node in enumerate(content, 1)]
