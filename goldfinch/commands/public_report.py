"""``goldfinch doctor --report RUN``: one file about a run for a public issue, without paths, names and data.

The file is made of what is known to be nobody's: numbers, versions, names of settings, of shipped choices, of events,
of errors' classes and of Goldfinch's own files. No text of a run is copied, so there is none to clean.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from common.choices import CONF, choices_of
from common.composition import compose_config
from common.storage import write_text
from common.versions import VERSION, package_versions
from goldfinch.record import RunRecord
from server.run.events import public_lines

REPORT = "goldfinch-report.txt"
"""The file, in the working folder."""


def write_public_report(folder: Path) -> Path:
    """Write the file about the run in ``folder``, and return its path.

    The file has versions, the settings that are numbers or choices of Goldfinch's own, how many events and replies of
    each kind there were, and of each error its class and where in Goldfinch's own files it was raised. Of its text
    there is only that it is left out.

    Raises:
        ConfigError: the folder holds no run, or its record cannot be read.
    """
    settings = _settings(RunRecord(folder).config)
    lines = [f"goldfinch {VERSION}", *_versions(), "", "settings", *settings, *public_lines(folder)]
    path = Path(REPORT)
    write_text(path, "\n".join([*lines, ""]))
    return path


def _versions() -> Iterator[str]:
    for name, version in sorted(package_versions().items()):
        yield f"  {name} {version}"
    yield f"  {os.cpu_count()} CPUs"


def _settings(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the choice of each group, and each setting of ``conf/`` that is a number, true, false or not set."""
    chosen: list[str] = []
    for group, choice in sorted(config.get("choices", {}).items()):
        shipped = choices_of(group, [CONF])
        if choice in shipped:
            chosen.append(f"{group}={choice}")
            yield f"  {group}={choice}"
        elif shipped and choice is not None:
            yield f"  {group}: a class or file of the user's own"
    known = [choice for choice in chosen if not choice.startswith(("experiment=", "printed=", "tuned="))]
    yield from _numbers(config, compose_config(known))


def _numbers(given: Mapping[str, Any], known: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the settings of ``given`` that ``known`` has, and that are no text and no list."""
    for key, default in known.items():
        value = given.get(key)
        if key == "choices" or key not in given:
            continue
        if isinstance(default, Mapping) and isinstance(value, Mapping):
            yield from _numbers(value, default, f"{prefix}{key}.")
        elif isinstance(value, bool | int | float) or value is None:
            yield f"  {prefix}{key}={value}"
