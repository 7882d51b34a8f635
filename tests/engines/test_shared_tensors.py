"""A message's tensors are put into Ray's object store once, also when Flower's threads pickle it at the same time."""

import pickle
import sys
import threading
from types import SimpleNamespace

import pytest

from server.engines.flower import InRay

THREADS = 4


@pytest.fixture
def stored(monkeypatch):
    """What was put into a store that stands for Ray's; each put waits until other threads could have begun."""
    kept: list[bytes] = []
    others = threading.Event()

    def put(blob: bytes) -> int:
        others.wait(0.2)
        kept.append(blob)
        return len(kept) - 1

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(put=put, get=get))
    monkeypatch.setattr(sys.modules[__name__], "STORE", kept)
    return kept


STORE: list[bytes] = []


def get(reference: int) -> bytes:
    return STORE[reference]


def test_threads_share_one_reference(stored):
    message, begin = InRay(b"weights"), threading.Barrier(THREADS)
    pickled: list[bytes] = []

    def send() -> None:
        begin.wait()
        pickled.append(pickle.dumps(message))

    threads = [threading.Thread(target=send) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stored == [b"weights"]
    assert [pickle.loads(each) for each in pickled] == [b"weights"] * THREADS
