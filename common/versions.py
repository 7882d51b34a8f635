"""Versions of code and packages, and the processor, for the record of a run."""

import hashlib
import importlib.util
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

from common.errors import ConfigError, some_of
from common.regular_files import read_small

VERSION = "0.1.0"
"""Goldfinch's version, as in pyproject.toml."""

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
CODE = ("common", "strategies", "client", "server")
"""The packages that compute. The code hash is over their files. None imports another package of Goldfinch."""

OURS = (*CODE, "goldfinch", "conf")
"""All packages. ``goldfinch`` starts runs and reads them; the values of ``conf`` are in a run's identity."""


def place_of(package: str) -> Path | None:
    """Return the folder of a package, or the file of a module, by its name on the top level; nothing is imported."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # the program that was called has no name
        return None
    if spec is None or not (spec.submodule_search_locations or spec.has_location):
        return None
    return Path(next(iter(spec.submodule_search_locations or ()), str(spec.origin)))


@lru_cache
def code_files(own: tuple[str, ...] = ()) -> dict[str, str]:
    """Return 16 hex digits for each file of the code that computes, by its path.

    Files are read once per process, as they are imported once.

    Args:
        own: packages of the user's, besides those of the application.
    """
    root = Path(__file__).resolve().parent.parent
    places = [root / package for package in CODE]
    for package in own:
        place = place_of(package)
        if place is not None:
            places.append(place)
    hashes: dict[str, str] = {}
    for place in places:
        paths = [place]
        if place.is_dir():
            paths = sorted(place.rglob("*"))
        for path in paths:
            if path.suffix in (".py", ".yaml") and "__pycache__" not in path.parts:
                name = path.relative_to(place.parent).as_posix()
                hashes[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return hashes


def check_imported_code(own: tuple[str, ...] = ()) -> None:
    """Refuse to go on with code that was changed since this process imported it, such as in a notebook.

    A file that is new since then is added to :func:`code_files`: nothing has imported it.

    Raises:
        ConfigError: a file of :func:`code_files` is not what it was when it was read first.
    """
    known, now = code_files(own), code_files.__wrapped__(own)
    changed = [name for name in differing(known, now) if name in known]
    if changed:
        raise ConfigError(
            f"{some_of(changed, 3)}: changed since this process imported it, and Python imports a file once: restart "
            "the notebook's kernel, or the program"
        )
    known.update(now)
    code_sha256.cache_clear()


@lru_cache
def code_sha256(own: tuple[str, ...] = ()) -> str:
    """Return 16 hex digits over all of :func:`code_files`, which are equal if both sides run the same code."""
    return hash_of_files(code_files(own))


def hash_of_files(files: Mapping[str, str]) -> str:
    """Return 16 hex digits over the names and hashes of files, independent of their order."""
    return hashlib.sha256(repr(dict(sorted(files.items()))).encode()).hexdigest()[:16]


def recorded_files(path: Path) -> dict[str, str]:
    """Return the hash of each file of code that a run's ``code.json`` lists; empty if it cannot be read."""
    return {name: digest for name, digest in _recorded(path).items() if _is_code(name)}


def recorded_versions(path: Path) -> dict[str, str]:
    """Return the version of each package that a run's ``code.json`` lists; empty if it cannot be read."""
    return {name: version for name, version in _recorded(path).items() if not _is_code(name)}


def _recorded(path: Path) -> dict[str, str]:
    try:
        content = dict(json.loads(read_small(path)))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}
    return {str(name): str(value) for name, value in content.items()}


def _is_code(name: str) -> bool:
    return name.endswith((".py", ".yaml"))


def differing(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names of files with other hashes, or that one side lacks, sorted."""
    return [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]


def shadows(folders: Iterable[str], packages: Sequence[str] = CODE) -> list[str]:
    """Return the files in ``folders`` that Python would import in place of ``packages`` of the application.

    The search ends at a folder with an application; if it is another one, the hashes of code differ.
    """
    files: list[str] = []
    for folder in folders:
        if (Path(folder) / "common" / "versions.py").exists():
            break
        for package in packages:
            spec = PathFinder.find_spec(package, [folder])
            if spec is not None and spec.origin:
                files.append(spec.origin)
    return files


RESTRICTIONS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
"""Environment variables that keep torch and oneDNN from newer instructions."""


@lru_cache(maxsize=1)
def package_versions() -> dict[str, str]:
    """Return the versions of Goldfinch, of each package that is installed, and of Python."""
    versions = {"python": platform.python_version(), "goldfinch": VERSION}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def processor() -> dict[str, str]:
    """Return the processor's model and instruction set in torch, on which the last bits of a result depend.

    The environment variables that restrict the instruction set are included if they are set.
    """
    import torch

    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    model = platform.processor() or platform.machine()
    for line in lines:
        name, _, value = line.partition(":")
        if name.startswith("model name") and value.strip():
            model = value.strip()
            break
    facts = {"model": model, "instruction_set": torch.backends.cpu.get_cpu_capability()}
    for variable in RESTRICTIONS:
        if variable in os.environ:
            facts[variable] = os.environ[variable]
    return facts


def processor_name(facts: Mapping[str, str]) -> str:
    """Return what :func:`processor` returns as one text: model, instruction set, and what restricts it."""
    names = sorted(facts, key=lambda name: (name != "model", name != "instruction_set", name))
    return ", ".join(facts[name] for name in names)


def combined_hash(hashes: Mapping[str, str]) -> str:
    """Return the SHA-256 (hex) over all clients' split hashes by client id, independent of their order."""
    digest = hashlib.sha256()
    for client, value in sorted(hashes.items()):
        digest.update(f"{client}={value}\n".encode())
    return digest.hexdigest()
