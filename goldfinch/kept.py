"""``overwrite=true`` of a sweep, a comparison or a reproduced table, and what they say of runs that they keep.

Which runs are kept decides :func:`server.run.existing.decide`.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

from common.errors import ConfigError


def split_overwrite(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Return the arguments without ``overwrite=true`` and ``overwrite=false``, and whether the first is among them.

    ``overwrite`` is no setting of the runs: without it, the same command goes on with the folder that it has begun.

    Raises:
        ConfigError: ``overwrite`` has another value.
    """
    others: list[str] = []
    overwrite = False
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key.lstrip("+") != "overwrite":
            others.append(argument)
        elif value.lower() in ("true", "false"):
            overwrite = value.lower() == "true"
        else:
            raise ConfigError(f"{argument}: expected overwrite=true or overwrite=false")
    return others, overwrite


def free_folder(output: Path) -> Path:
    """Return the first of ``<output>-2``, ``<output>-3`` ... that does not exist."""
    number = next(number for number in itertools.count(2) if not _numbered(output, number).exists())
    return _numbered(output, number)


def _numbered(output: Path, number: int) -> Path:
    return output.with_name(f"{output.name}-{number}")


def two_commands(both: str, again: str) -> list[str]:
    """Return the lines that tell how to go on after runs were kept.

    Args:
        both: the command that keeps them and trains again elsewhere, for a shell.
        again: the command that replaces them.
    """
    return [
        "What was kept is as it was. One of two commands goes on:",
        f"  keep both:   {both}",
        f"  train again: {again}",
    ]
