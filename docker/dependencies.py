"""Print what a container installs: names of the project's own dependencies without those of the simulation.

Versions come from requirements.txt, given to pip as constraints. PyTorch is left out: the Dockerfile installs it first,
from the index that the build names. Extras of the project may be named as arguments.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

SEPARATE = {"torch", "torchvision"}
SIMULATION = {"ray"}


def dependencies(project: dict[str, object], extras: list[str]) -> list[str]:
    """Requirements without their version ranges, which the pins narrow anyway."""
    section = project["project"]
    assert isinstance(section, dict)
    required = list(section["dependencies"])
    for extra in extras:
        required += section["optional-dependencies"][extra]
    names = [re.split(r"[<>=!~;\[ ]", requirement, maxsplit=1)[0] for requirement in required]
    return [name for name in names if name not in SEPARATE | SIMULATION]


if __name__ == "__main__":
    content = tomllib.loads(Path(__file__).with_name("pyproject.toml").read_text())
    print(" ".join(dependencies(content, sys.argv[1:])))
