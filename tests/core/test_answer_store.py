"""Answers beyond ``rounds.memory`` lie in mapped files: the same bits, and the memory of a few."""

from __future__ import annotations

import errno
import re
import sys
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.halves import clients
from support.runs import TouchedEngine, run
from support.toy import toy_settings

from common import storage as module
from common.errors import GoldfinchError
from common.numerics import generator
from common.prototypes import PrototypeSet
from common.storage import ANSWER_PREFIX, AnswerStore
from common.wire.payload import Payload
from strategies.core.aggregation import Mean
from strategies.core.exchange import Update

SIZE = 2_000_000
"""Values of an answer: 8 MB."""


def answer(number: int, size: int = 100) -> Payload:
    draws = generator(number, "answer")
    rows = PrototypeSet(torch.randn(3, 8, generator=draws), torch.tensor([0, 1, 1]), torch.ones(3))
    weights = {"z": torch.randn(size, generator=draws), "count": torch.tensor(number), "a": torch.randn(4, 5).half()}
    return Payload(
        weights, rows if number % 2 else None, {"h": torch.randn(7, generator=draws)}, header={"round": number}
    )


def test_what_is_beyond_the_limit_is_the_same_to_the_bit(tmp_path: Path) -> None:
    kept = AnswerStore(tmp_path / "made", max_bytes=700)
    first, *others = [answer(number) for number in range(4)]
    assert kept.keep(first) is first
    for one in others:
        found = kept.keep(one)
        assert found is not one
        assert list(found.weights) == list(one.weights), "sums depend on the order"
        assert (found.header, found.prototypes is None) == (one.header, one.prototypes is None)
        for name, tensor in one.tensors().items():
            assert torch.equal(found.tensors()[name], tensor), name
    assert list((tmp_path / "made").iterdir()) == [], "no file has a name, so none outlives the process"
    update = Update(others[0].weights, client=clients()[0])
    assert torch.equal(kept.keep(update).weights["z"], update.weights["z"])
    kept.clear()
    assert kept.keep(first) is first, "another exchange has the memory to itself"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_answers_beyond_the_limit_take_no_memory(tmp_path: Path) -> None:
    """Anonymous memory: what the kernel cannot take back by reading a file again."""

    def anonymous() -> int:
        return int(re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024

    kept = AnswerStore(tmp_path, max_bytes=0)
    found = [kept.keep(answer(0, SIZE))]
    before = anonymous()
    found += [kept.keep(answer(number, SIZE)) for number in range(1, 9)]
    mean = Mean().combine([one.weights for one in found], [1.0] * 9)["z"]
    one_answer = 4 * SIZE
    assert anonymous() - before < 5 * one_answer, "the mean, one answer in flight, and what malloc keeps; eight are new"
    assert torch.equal(mean, Mean().combine([answer(number, SIZE).weights for number in range(9)], [1.0] * 9)["z"])


RUNS: dict[str, dict[str, Any]] = {
    "scaled": {"overrides": ("rounds.outliers=clip", "rounds.outlier_factor=1.001")},
    "rounded on the wire": {"overrides": ("rounds.transport=bfloat16",)},
    "encoded": {"engine": {"wire": True}},
}


@pytest.mark.parametrize("case", RUNS)
def test_a_run_has_the_same_state_with_all_answers_in_files(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: list[str] = []
    made = module.NamedTemporaryFile

    def counted(**options: Any) -> Any:
        file = made(**options)
        files.append(file.name)
        return file

    monkeypatch.setattr(module, "NamedTemporaryFile", counted)
    case_settings = partial(toy_settings, "fpl", train={"rounds": 1}, **RUNS[case])
    expected = run(case_settings(tmp_path / "memory"))
    assert files == []
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / f"{ANSWER_PREFIX}left").write_bytes(b"by a process that was killed")
    found = run(case_settings(tmp_path / "files", rounds={"memory": 0.0}, overwrite=True))
    assert found.sha256 == expected.sha256
    assert found.summary["scores"] == expected.summary["scores"]
    scaled = found.summary["answers"]["scaled"]
    assert len(files) == 3 * (2 if case == "rounded on the wire" else 1) + scaled
    assert scaled or case != "scaled"
    assert all(Path(name).parent == tmp_path / "files" for name in files)
    assert list((tmp_path / "files").glob(f"{ANSWER_PREFIX}*")) == []


def test_a_full_disk_is_the_server_s_trouble_and_no_client_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "NamedTemporaryFile", full)
    with pytest.raises(GoldfinchError, match=r"(?i)no space left"):
        run(toy_settings("fedavg", tmp_path, rounds={"memory": 0.0}))


def test_an_exchange_is_forgotten_before_the_next_has_answered(tmp_path: Path) -> None:
    """The answers of two exchanges are never held at the same time."""
    held: list[int] = []

    class Counting(TouchedEngine):
        def exchange(self, message: Payload, requests: Any, seconds: float, **more: Any) -> Any:
            replies, failures = super().exchange(message, requests, seconds, **more)
            held.append(sum(1 for reference in alive if reference() is not None))
            alive[:] = [weakref.ref(reply.payload) for reply in replies]
            self.messages.clear()
            return replies, failures

    alive: list[Any] = []
    settings = toy_settings("rucr", tmp_path)
    assert len(settings.method.exchanges) > 1
    run(settings, Counting(settings))
    assert held == [0] * len(held)
    assert len(held) >= 4


@pytest.mark.parametrize("block", [1, 40])
def test_sums_receive_blocks(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = generator(0, "blocks")
    states = [{"w": torch.randn(7, 3, generator=draws), "bn.running_var": torch.rand(9)} for _ in range(5)]
    sums = Mean().totals(states)
    monkeypatch.setattr("strategies.core.aggregation.STACKED_ELEMENTS", block)
    stacked: list[int] = []
    stack = torch.stack

    def counted(parts: list[torch.Tensor], *rest: Any) -> torch.Tensor:
        stacked.append(sum(part.numel() for part in parts))
        return stack(parts, *rest)

    monkeypatch.setattr(torch, "stack", counted)
    for name in sums:
        assert torch.equal(Mean().totals(states)[name], sums[name])
    assert 0 < max(stacked) <= max(block, len(states))
