"""A message's tensors are put into Ray's object store once, also when Flower's threads pickle it at the same time."""

from __future__ import annotations

import pickle
import sys
import threading
from types import SimpleNamespace

import pytest

from server.engines.flower import InRay

THREADS = 4


def test_threads_share_one_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each put waits until other threads could have begun."""
    stored: list[bytes] = []
    pickled: list[bytes] = []

    def put(blob: bytes) -> str:
        threading.Event().wait(0.2)
        stored.append(blob)
        return "place"

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(put=put, get=len))
    message, begin = InRay(b"weights"), threading.Barrier(THREADS)

    def send() -> None:
        begin.wait()
        pickled.append(pickle.dumps(message))

    threads = [threading.Thread(target=send) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stored == [b"weights"]
    assert [pickle.loads(each) for each in pickled] == [len("place")] * THREADS  # what ``get`` gives
