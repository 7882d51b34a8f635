from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from common.data.batches import Split
from common.data.domain import DataSource, Domain
from common.errors import DataError


def split(count: int = 6) -> Split:
    images = torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 32, 32).clone()
    return Split(images, torch.arange(count) % 3)


@dataclass(frozen=True)
class MadeUp(DataSource):
    """Counts its readings; what it reads is set by each test."""

    name: ClassVar[str] = "made_up"
    reads: ClassVar[list[str]] = []
    content: ClassVar[Split]

    domains: tuple[str, ...] = ("one", "two")

    @property
    def class_names(self) -> tuple[str, ...]:
        return ("a", "b", "c")

    def _read(self, domain: str) -> Domain:
        self.reads.append(domain)
        return Domain(domain, self.content, split())


def test_subset_takes_the_samples_in_the_order_asked_for_and_copies() -> None:
    whole = split()
    part = whole.subset(torch.tensor([4, 0]))
    assert part.images[:, 0, 0, 0].tolist() == [4, 0]
    assert part.labels.tolist() == [1, 0]
    part.images.zero_()
    assert whole.images[4].unique().tolist() == [4]


def test_length_counts_and_device() -> None:
    whole = split(7)
    assert len(whole) == 7
    assert whole.class_counts(5).tolist() == [3, 2, 2, 0, 0]
    assert whole.to("cpu") is whole
    assert whole.to("meta").labels.device.type == "meta"
    assert whole.to("meta") is whole.to(torch.device("meta"))  # one copy for all clients of a process


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.zeros(2, 3, 4, 4), torch.zeros(2, dtype=torch.int64), "uint8"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), r"\[N, 3, H, W\]"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(2), "int64"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64), "as many labels"),
    ],
    ids=["images in float32", "one channel", "labels in float32", "a label more"],
)
def test_other_tensors_are_refused(images: torch.Tensor, labels: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Split(images, labels)


@pytest.mark.parametrize("size", [(16, 16), (32, 16)])
def test_images_of_another_size_than_the_run_s_are_refused(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exported model resizes every image to ``image_size``, so it would get others than it was trained on."""
    MadeUp.forget()
    images = torch.zeros(6, 3, *size, dtype=torch.uint8)
    monkeypatch.setattr(MadeUp, "content", Split(images, split().labels), raising=False)
    told = rf"train images of 'one' are \[6, 3, {size[0]}, 16\], and data\.image_size is 32: set it to their side"
    with pytest.raises(DataError, match=told):
        MadeUp().load("one")
    monkeypatch.setattr(MadeUp, "content", split())
    MadeUp.forget()
    assert len(MadeUp().load("one").train) == 6
    with pytest.raises(DataError, match=r"the train images of 'two' are \[6, 3, 32, 32\]"):
        MadeUp(image_size=16).load("two")


def test_a_domain_is_read_once_also_by_threads_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MadeUp, "reads", [])
    monkeypatch.setattr(MadeUp, "content", split(), raising=False)
    found: list[Domain] = []
    threads = [threading.Thread(target=lambda: found.append(MadeUp(root="/threads").load("two"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert MadeUp.reads == ["two"]
    assert len({id(domain) for domain in found}) == 1


def test_an_empty_split_and_a_wrong_label_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MadeUp, "content", split(0), raising=False)
    with pytest.raises(DataError, match=r"domain 'one' under /empty has no train images"):
        MadeUp(root="/empty").load("one")
    monkeypatch.setattr(MadeUp, "content", Split(split(1).images, torch.tensor([3])))
    with pytest.raises(DataError, match="has the label 3, of 3 classes"):
        MadeUp(root="/label").load("one")
    monkeypatch.setattr(MadeUp, "content", Split(split(2).images, torch.tensor([-1, 0])))
    with pytest.raises(DataError, match="has the label -1, of 3 classes"):
        MadeUp(root="/negative").load("one")


def test_the_given_root_wins_over_the_configured_and_that_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOLDFINCH_DATA", "/environment")
    assert MadeUp(root="/configured")._root("/given") == "/given"
    assert MadeUp(root="/configured")._root() == "/configured"
    assert MadeUp()._root() == "/environment"
    monkeypatch.delenv("GOLDFINCH_DATA")
    assert MadeUp()._root() is None
