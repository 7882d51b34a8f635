"""Decoded or generated tensors kept on disk: safetensors files, checked by CRC, mapped into memory when read.

A cache file is never needed: what is missing, damaged or cannot be written is simply made again.
"""

import hashlib
import json
import logging
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from common.storage.files import read_tensors, write_tensors

CACHE_VARIABLE = "GOLDFINCH_CACHE"
_log = logging.getLogger(__name__)


def cache_directory() -> Path:
    """$GOLDFINCH_CACHE, else ~/.cache/goldfinch."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "goldfinch"


def cached(kind: str, key: Sequence[str | int], build: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of ``build()``, from the cache when they are there.

    Args:
        kind: what they are; begins the file's name.
        key: everything they depend on, such as file names, sizes, times and options.
        build: makes them; whatever it raises is passed on and nothing is stored.
    """
    digest = hashlib.sha256(json.dumps(list(key)).encode()).hexdigest()[:32]
    try:
        path = cache_directory() / f"{kind}-{digest}.safetensors"
    except RuntimeError:  # no home directory
        return build()
    found = _read(path)
    if found is not None:
        return found
    tensors = {name: tensor.contiguous() for name, tensor in build().items()}
    _write(path, tensors)
    return tensors


def _checksum(tensor: Tensor) -> str:
    return f"{zlib.crc32(tensor.numpy().data):08x}"


def _read(path: Path) -> dict[str, Tensor] | None:
    try:
        tensors, sums = read_tensors(path)
    except (OSError, ValueError) as error:
        if path.exists():
            _log.warning("the cache file %s cannot be read (%s); making it again", path, error)
        return None
    if any(sums.get(name) != _checksum(tensor) for name, tensor in tensors.items()) or not tensors:
        _log.warning("the cache file %s is damaged; making it again", path)
        return None
    return tensors


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        write_tensors(path, tensors, {name: _checksum(tensor) for name, tensor in tensors.items()})
    except OSError as error:
        _log.info("the cache file %s cannot be written (%s); it will be made again next time", path, error)
