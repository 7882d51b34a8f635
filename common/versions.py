"""What computes a result, for the record of a run: versions of packages, memory of this process."""

from __future__ import annotations

import platform
import resource
import sys
from functools import lru_cache
from importlib import metadata

PACKAGES = (
    "goldfinch",
    "flwr",
    "torch",
    "torchvision",
    "numpy",
    "ray",
    "finch-clust",
    "hydra-core",
    "safetensors",
    "triton",
)


@lru_cache(maxsize=1)
def package_versions() -> dict[str, str]:
    """Version of each package that is installed, and of Python."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def peak_bytes() -> int:
    """Peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
