"""What computes a result, for the record of a run: versions of code and packages, and the processor."""

import hashlib
import importlib.util
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

VERSION = "0.1.0"
"""Goldfinch's, as in pyproject.toml."""

PACKAGES = (
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
CODE = ("common", "strategies", "client", "server", "conf")


def place_of(package: str) -> Path | None:
    """The folder of a package, or the file of a module, by its name on the top level; nothing is imported."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # the program that was called has no name
        return None
    if spec is None or not (spec.submodule_search_locations or spec.has_location):
        return None
    return Path(next(iter(spec.submodule_search_locations or ()), str(spec.origin)))


@lru_cache
def code_files(own: tuple[str, ...] = ()) -> dict[str, str]:
    """16 hex digits for each file of source and configuration, by its path: the application's and ``own`` packages'.

    They are read once, as what they hold is imported once.
    """
    root = Path(__file__).resolve().parent.parent
    places = [*(root / package for package in CODE), *filter(None, map(place_of, own))]
    return {
        path.relative_to(place.parent).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for place in places
        for path in (sorted(place.rglob("*")) if place.is_dir() else [place])
        if path.suffix in (".py", ".yaml") and "__pycache__" not in path.parts
    }


@lru_cache
def code_sha256(own: tuple[str, ...] = ()) -> str:
    """16 hex digits over all of :func:`code_files`: equal where both sides run the same code."""
    return hash_of_files(code_files(own))


def hash_of_files(files: Mapping[str, str]) -> str:
    """16 hex digits over the names and hashes of files, in whatever order they are listed."""
    return hashlib.sha256(repr(dict(sorted(files.items()))).encode()).hexdigest()[:16]


def shadows(folders: Iterable[str], packages: Sequence[str] = CODE[:4]) -> list[str]:
    """Files in ``folders`` that Python imports in place of ``packages`` of the application, if it finds them first.

    A folder that holds an application ends the search: if it is another one, hashes tell.
    """
    found: list[str] = []
    for folder in folders:
        if (Path(folder) / "common" / "versions.py").exists():
            break
        specs = (PathFinder.find_spec(package, [folder]) for package in packages)
        found += [spec.origin for spec in specs if spec and spec.origin]
    return found


RESTRICTIONS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
"""Environment variables that keep torch and oneDNN from newer instructions."""


@lru_cache(maxsize=1)
def package_versions() -> dict[str, str]:
    """Version of Goldfinch, of each package that is installed, and of Python."""
    versions = {"python": platform.python_version(), "goldfinch": VERSION}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def processor() -> dict[str, str]:
    """Model and instruction set that torch computes with here, on which a result's last bits depend.

    The two environment variables that restrict it are named where they are set.
    """
    import torch

    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    restricted = {name: os.environ[name] for name in RESTRICTIONS if name in os.environ}
    return {
        "model": model or platform.processor() or platform.machine(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        **restricted,
    }
