"""Conformance runs write thousands of small files; waiting for the disk is what they would mostly do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.storage import files


@pytest.fixture(autouse=True, scope="module")
def no_waiting_for_the_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_sync_folder", lambda folder: None)
        patch.setattr(files.os, "fsync", lambda handle: None)
        yield
