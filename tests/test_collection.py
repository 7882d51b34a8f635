"""The list of tests is the same in every process: test workers compare theirs before they start.

So ``make test`` would stop at a difference between two processes of one second; the slow test here leaves more time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def collected(hash_seed: int) -> list[str]:
    """The names of all tests, as another process finds them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTEST_ADDOPTS": ""}
    found = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [line for line in found.stdout.splitlines() if "::" in line]


@pytest.mark.slow
def test_another_process_collects_the_same_tests_more_than_a_second_later(request: pytest.FixtureRequest) -> None:
    """This process's own list is the first; the second process costs as much as a worker's start."""
    started = time.monotonic()
    first = [item.nodeid for item in request.session.items]
    if len(first) < 1000:  # only a few files were asked for
        first = collected(hash_seed=1)
    second = collected(hash_seed=2)
    assert time.monotonic() > started + 1
    assert len(second) == len(set(second)) >= len(first) > 1000
    assert not set(first) - set(second)


@pytest.mark.parametrize(
    "value",
    [b"\x1f\x8b", object(), {object()}, "two\nlines", "x" * 101, [object()], lambda: 0],
    ids=["bytes", "object", "set", "lines", "long text", "a list with an address", "function without a name"],
)
def test_values_without_a_readable_text_need_written_ids(value: object, request: pytest.FixtureRequest) -> None:
    with pytest.raises(TypeError, match="write ids"):
        request.config.hook.pytest_make_parametrize_id(config=request.config, val=value, argname="value")
