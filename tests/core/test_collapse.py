"""A model that training fits and that predicts one class in evaluation is reported."""

from pathlib import Path

import pytest

import goldfinch as gf
from bench.normalisation import write_shapes
from server.run.history import read_lines
from server.run.records import one_class
from server.trackers.events import describe


@pytest.mark.parametrize(
    ("confusion", "expected"),
    [
        ([[5, 0], [5, 0]], (0, 1.0)),
        ([[1, 9], [0, 10]], (1, 0.95)),
        ([[5, 5], [3, 7]], None),
        ([[0, 0], [1, 9]], None),
        ([[0, 0], [0, 0]], None),
    ],
    ids=["all images", "nearly all", "both classes", "images of one class", "no images"],
)
def test_one_class_is_found_by_the_confusion_counts(
    confusion: list[list[int]], expected: tuple[int, float] | None
) -> None:
    assert one_class(confusion) == expected


def test_a_run_on_unlike_backgrounds_reports_each_domain_once_and_names_remedies(tmp_path: Path) -> None:
    write_shapes(tmp_path / "shapes")
    run = gf.run(
        "train.learning_rate=0.05", "train.epochs=10", "model=small", "tuned=none", "train.batch_size=16",
        method="fedavg", data="folder", rounds=4, settings={"data.root": tmp_path / "shapes"},
        output=tmp_path / "run", quiet=True,
    )  # fmt: skip
    found = [entry for entry in read_lines(run.folder / "events.jsonl") if entry["event"] == "collapsed"]
    domains = [entry["domain"] for entry in found]
    assert domains, "batch normalisation collapses on these backgrounds"
    assert len(domains) == len(set(domains))
    text = describe("collapsed", found[0], 4)
    assert "model.norm=group" in text
    assert "method.refresh_statistics=true" in text
