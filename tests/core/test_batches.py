"""How an epoch is cut into batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from common.data.batches import Split, split_batches


def lengths(count: int, size: int, last: str) -> list[int]:
    batches = split_batches(torch.arange(count), size, last)
    assert torch.cat(batches).tolist() == list(range(sum(map(len, batches))))
    return [len(batch) for batch in batches]


@pytest.mark.parametrize(
    ("count", "size", "last", "expected"),
    [
        (24, 8, "keep", [8, 8, 8]),
        (26, 8, "keep", [8, 8, 8, 2]),
        (25, 8, "keep", [8, 8, 9]),
        (26, 8, "drop", [8, 8, 8]),
        (25, 8, "drop", [8, 8, 8]),
        (26, 8, "merge", [8, 8, 10]),
        (24, 8, "merge", [8, 8, 8]),
        (5, 8, "drop", [5]),
        (5, 8, "merge", [5]),
        (8, 8, "drop", [8]),
        (2, 2, "keep", [2]),
        (3, 2, "keep", [3]),
        (3, 2, "drop", [2]),
    ],
)
def test_batches(count: int, size: int, last: str, expected: list[int]) -> None:
    assert lengths(count, size, last) == expected


@pytest.mark.parametrize(("last", "expected"), [("keep", [8, 8, 8, 1]), ("merge", [8, 8, 9]), ("drop", [8, 8, 8])])
def test_a_single_sample_is_a_batch_where_it_can_be(last: str, expected: list[int]) -> None:
    assert [len(batch) for batch in split_batches(torch.arange(25), 8, last, single=True)] == expected


def test_no_batch_has_one_sample() -> None:
    for count in range(2, 70):
        for size in (2, 3, 8, 64):
            for last in ("keep", "drop", "merge"):
                found = lengths(count, size, last)
                assert min(found) >= 2
                if last != "drop":
                    assert sum(found) == count


def test_arrays_are_refused_as_such() -> None:
    images, labels = torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    array: Any = np.zeros((2, 3, 8, 8), np.uint8)
    with pytest.raises(ValueError, match=r"must be tensors: torch.from_numpy; got .*ndarray"):
        Split(array, labels)
    with pytest.raises(ValueError, match=r"must be tensors.*list"):
        Split(images, labels.tolist())
