from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.metrics import ClassTotals, cells_of, counts_fit
from common.prototypes import PrototypeSet
from common.scores import class_totals
from common.wire.messages import Request
from common.wire.payload import Payload
from goldfinch.record import RunRecord
from server.run.prototype_log import (
    MAX_ROUNDS,
    MAX_VALUES,
    PrototypeLog,
    kept_rounds,
    read_pages,
)
from server.run.schema import read_lines
from tests.support.runs import TouchedEngine, run
from tests.support.toy import toy_settings


def rows(labels: list[int], size: int = 3, scale: float = 1.0) -> PrototypeSet:
    count = len(labels)
    vectors = scale * torch.arange(count * size, dtype=torch.float32).reshape(count, size)
    return PrototypeSet(vectors, torch.tensor(labels), torch.ones(count))


def test_confusion_counts_come_back_in_coordinates() -> None:
    confusion = [[1, 2, 0], [0, 2, 0], [0, 0, 0]]
    cells = cells_of(confusion)
    assert cells == {"classes": 3, "true": [0, 0, 1], "predicted": [0, 1, 1], "count": [1, 2, 2]}
    totals = ClassTotals.empty(3)
    totals.add_cells(cells)
    assert totals == ClassTotals.of(confusion)


@pytest.mark.parametrize(
    "counts",
    [
        None,
        "many",
        [[3, 0]],  # a class is missing
        [[1, 2, 0], [1, 2, 0]],  # a class too many
        [[2, 1], [1, 2]],  # the diagonal is not what was right
        [[1, 2], [1, 3]],  # more images than were scored
        [[1, 3], [0, 2.0]],  # not counts
        [[-1, 2], [1, 4]],
        [[True, 2], [1, 2]],
    ],
    ids=str,
)
def test_confusion_counts_that_contradict_the_score_do_not_fit(counts: object) -> None:
    assert counts_fit([[1, 2], [1, 2]], 2, 6, 3)
    assert not counts_fit(counts, 2, 6, 3)


def test_counts_that_do_not_fit_are_left_out_and_so_is_the_domain_s_metric(tmp_path: Path) -> None:
    """Another client of the domain sent counts: a metric of its images alone would be of fewer images."""

    def edit(request: Request, payload: Payload) -> Payload:
        scores = [{**entry, "confusion": [[1]]} for entry in payload.header["scores"]]
        if request.client != "dark-0":
            return payload
        return replace(payload, header={**payload.header, "scores": scores})

    settings = toy_settings("fedbn", tmp_path, train={"rounds": 1})
    done = run(settings, TouchedEngine(settings, edit=edit))
    without = {line["client"] for line in read_lines(done.folder / "scores.jsonl") if "confusion" not in line}
    assert without == {"dark-0"}
    assert {domain for _, domain in RunRecord(done.folder).class_totals} == {"bright", "noisy"}
    line = read_lines(done.folder / "scores.jsonl")[0]
    both = class_totals([line, {**line, "client": "other"} | {"confusion": line.get("confusion", {})}])
    assert len(both) == 1
    assert class_totals([line, {name: line[name] for name in line if name != "confusion"}]) == {}


def test_uploaded_rows_keep_their_owners_though_sets_are_sorted_by_class(tmp_path: Path) -> None:
    prototype_log = PrototypeLog(tmp_path / "prototypes")
    uploads = [("b-0", rows([0, 2])), ("empty", rows([])), ("a-0", rows([0, 1, 2], scale=100.0))]
    prototype_log.add(7, rows([0, 1]), uploads)
    (page,) = read_pages(tmp_path / "prototypes")
    assert page.round == 7
    assert page.clients == ("b-0", "a-0")
    assert page.prototypes == rows([0, 1])
    for client, sent in uploads:
        if len(sent):
            mine = page.owners == page.clients.index(client)
            assert torch.equal(page.uploaded.vectors[mine], sent.vectors)
            assert torch.equal(page.uploaded.labels[mine], sent.labels)


def test_methods_without_prototypes_leave_no_folder(tmp_path: Path) -> None:
    PrototypeLog(tmp_path / "prototypes").add(1, PrototypeSet.empty(8), [("a-0", PrototypeSet.empty(8))])
    assert not (tmp_path / "prototypes").exists()


def test_large_uploads_are_thinned_evenly(tmp_path: Path) -> None:
    size = 512
    many = MAX_VALUES // size + 10
    prototype_log = PrototypeLog(tmp_path / "prototypes")
    prototype_log.add(1, rows([0], size), [("a", rows([0] * many, size)), ("b", rows([1] * 3, size))])
    (page,) = read_pages(tmp_path / "prototypes")
    assert page.uploaded.vectors.numel() <= MAX_VALUES
    kept = page.uploaded.vectors[page.owners == 0]
    assert len(kept) >= many / 4
    gaps = kept[1:, 0] - kept[:-1, 0]
    assert torch.unique(gaps).numel() == 1


@pytest.mark.parametrize("last", [1, 2, MAX_ROUNDS, 101, 1000])
def test_kept_rounds_are_few_and_span_the_run(last: int) -> None:
    kept = sorted(kept_rounds(last))
    assert kept[0] == 1
    assert kept[-1] == last
    assert len(kept) <= MAX_ROUNDS
    assert len(kept) >= min(last, MAX_ROUNDS // 2 - 1)


def test_an_interrupted_album_ends_like_an_uninterrupted_one(tmp_path: Path) -> None:
    prototype_log = PrototypeLog(tmp_path)
    for first, last in ((1, 17), (15, 50), (48, 60)):  # killed twice, three rounds after its checkpoint
        if first > 1:
            prototype_log = PrototypeLog(tmp_path, keep_until=first - 1)
        for number in range(first, last + 1):
            prototype_log.add(number, rows([0, 1]), [])
    assert [page.round for page in read_pages(tmp_path)] == sorted(kept_rounds(60))
    PrototypeLog(tmp_path)
    assert read_pages(tmp_path) == [], "a new run in the folder begins with none"
