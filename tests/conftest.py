"""What holds for every test: one thread, a cache of the session's own, and property tests that always try the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "goldfinch", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("goldfinch")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Sums round differently with another number of threads, and the machine is shared."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Generated data go to a folder of the session, so that the home folder need not be writable."""
    folder = tmp_path_factory.mktemp("goldfinch-cache")
    before = os.environ.get("GOLDFINCH_CACHE")
    os.environ["GOLDFINCH_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["GOLDFINCH_CACHE"]
    else:
        os.environ["GOLDFINCH_CACHE"] = before
