"""What may change a published algorithm: every limit, floor, fallback and refusal between a formula and a run.

A plain run is the published algorithm, but for this list. ``alterations.yaml`` has what holds for all methods: each
entry is the paper's own, the released code's, a value where the formula has none, off by default, or recorded: in the
run's files and in a line under its table. The methods' own files have their readings; those in which a plain run does
neither what the paper prints nor what the released code does follow in the list. ``goldfinch list alterations`` prints
it; docs/design.md and docs/methods.md have what is not off by default as tables.
"""

from pathlib import Path
from typing import Any, Literal

import yaml

from common.config import build, checked
from common.regular_files import read_small
from goldfinch.papers import NAMES
from goldfinch.readings import plain_methods

FILE = Path(__file__).resolve().with_name("alterations.yaml")

Whose = Literal["paper", "released code", "no value", "setting", "recorded", "reading"]
"""Why a plain run may have it. ``no value``: the formula, and the released code, have no value there, or stop."""

WHOSE: dict[Whose, str] = {
    "paper": "the paper's",
    "released code": "the released code's",
    "no value": "the formula has no value there",
    "setting": "off by default",
    "recorded": "in the record and under the table",
    "reading": "ours: neither the paper's nor the release's",
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
    """Return all of them: those of the file in its order, which is by where they act, then the methods' readings.

    Raises:
        ConfigError: an entry of the file is not as it must be.
    """
    content: list[dict[str, Any]] = yaml.safe_load(read_small(FILE))
    listed = [build(node, f"{FILE.name}: {number}", Alteration) for number, node in enumerate(content, 1)]
    return [*listed, *readings_of_our_own()]


def readings_of_our_own() -> list[Alteration]:
    """Return the readings in which a plain run is neither the paper's nor the released code's, method by method."""
    exceptions: list[Alteration] = []
    for name, method in plain_methods().items():
        for reading in method.readings:
            if not reading.is_exception(method):
                continue
            others: list[str] = []
            for whose, value in (("paper", reading.paper), ("release", reading.released)):
                if value in reading.known:
                    others.append(f"the {whose} has {reading.words(value)}")
            ours = reading.words(reading.of(method))
            exceptions.append(Alteration(f"{NAMES[name]}: {reading.about}", ours, "; ".join(others), "reading"))
    return exceptions
