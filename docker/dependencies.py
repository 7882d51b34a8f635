"""Print what a container installs: the names of the project's own dependencies and of those of the extras named.

Versions come from requirements.txt, given to pip as constraints. PyTorch is left out: the Dockerfile installs it first,
from the index that the build names.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

SEPARATE = {"torch", "torchvision"}


def dependencies(project: dict[str, Any], extras: list[str]) -> list[str]:
    """Requirements without their version ranges, which the pins narrow anyway."""
    own, optional = project["project"]["name"], project["project"]["optional-dependencies"]
    required, found = list(project["project"]["dependencies"]), []
    for extra in extras:
        required += optional[extra]
    while required:
        name, more = re.match(r"([\w.-]+)(?:\[([\w,]+)\])?", required.pop(0)).groups()
        if name == own:
            required += [item for extra in more.split(",") for item in optional[extra]]
        elif name not in SEPARATE:
            found.append(f"{name}[{more}]" if more else name)
    return found


if __name__ == "__main__":
    content = tomllib.loads(Path(__file__).with_name("pyproject.toml").read_text())
    print(" ".join(dependencies(content, sys.argv[1:])))
