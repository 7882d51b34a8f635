"""A cache of decoded or generated tensors: safetensors files, checked by CRC, memory-mapped when read.

Missing or damaged tensors are built again; a cache that cannot be written is not an error.
"""

import hashlib
import json
import logging
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from common.storage import read_tensors, write_tensors

CACHE_VARIABLE = "GOLDFINCH_CACHE"
_log = logging.getLogger(__name__)


def cache_directory() -> Path:
    """Return $GOLDFINCH_CACHE, or ~/.cache/goldfinch if it is not set."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    return Path.home() / ".cache" / "goldfinch"


def cached(kind: str, key: Sequence[str | int], build: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of ``build()``, from the cache if they are in it.

    Args:
        kind: the prefix of the file's name.
        key: everything the tensors depend on, such as file names, :func:`~common.regular_files.file_state` and options.
        build: builds the tensors. If it raises, the error is passed on and nothing is stored.
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


def _checksums(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: f"{zlib.crc32(tensor.numpy().data):08x}" for name, tensor in tensors.items()}


def _read(path: Path) -> dict[str, Tensor] | None:
    try:
        tensors, sums = read_tensors(path)
    except (OSError, ValueError) as error:
        if path.exists():
            _log.warning("the cache file %s cannot be read (%s); building it again", path, error)
        return None
    if not tensors or sums != _checksums(tensors):
        _log.warning("the cache file %s is damaged; building it again", path)
        return None
    return tensors


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        write_tensors(path, tensors, _checksums(tensors), private=True)  # of images that others may not read
    except OSError as error:
        _log.info("the cache file %s cannot be written (%s); it will be built again next time", path, error)
