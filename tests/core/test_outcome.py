"""A run reports whether it trained: its summary, its error, its exit code, its row in a table."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import TouchedEngine, run
from support.toy import Toy, toy_settings
from torch import Tensor

from client.scoring import ScoreCounter
from common.errors import DIVERGED, CheckpointError, EngineError, PayloadError
from common.settings import with_method
from common.storage import GlobalState
from common.text import shell_line
from common.wire.messages import Request
from common.wire.payload import Payload
from goldfinch.cli import main
from goldfinch.commands import sweep as sweep_module
from goldfinch.commands.sweep import plan
from server.engines.inline import InlineEngine
from server.run.checkpoint import Checkpoint, Checkpoints
from server.run.conduct import prepare_output, run_federation
from server.run.engine import Failure
from server.run.existing import Step, decide
from server.run.files import goes_on
from server.run.stopping import check_errors_differ
from strategies.core.exchange import Batch
from strategies.core.federation import Reply
from strategies.core.method import ClientContext, Losses, ServerContext, Update
from strategies.fedavg import FedAvg

ROOT = Path(__file__).resolve().parents[2]


def summary_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def spoiled(request: Request, payload: Payload) -> Payload:
    """Each client's weights are not finite."""
    weights = {
        name: tensor * torch.nan if tensor.is_floating_point() else tensor for name, tensor in payload.weights.items()
    }
    return replace(payload, weights=weights)


def test_the_summary_counts_rounds_and_answers(tmp_path: Path) -> None:
    def failing(request: Request) -> bool:
        return request.train and (request.round, request.client) in {(2, "dark-0"), (2, "noisy-0"), (3, "dark-0")}

    def edit(request: Request, payload: Payload) -> Payload:
        hostile = request.train and request.round == 1 and request.client == "bright-0"
        return spoiled(request, payload) if hostile else payload

    settings = toy_settings("fedavg", tmp_path, train={"rounds": 3})
    summary = run(settings, TouchedEngine(settings, failing=failing, edit=edit)).summary
    assert (summary["rounds"], summary["rounds_held"], summary["rounds_skipped"]) == (3, 2, 1)
    found = {status: count for status, count in summary["answers"].items() if count}
    assert found == {"admitted": 2 + 1 + 2, "refused": 1, "failed": 3}
    assert summary["processor"]["instruction_set"] == torch.backends.cpu.get_cpu_capability()


def test_of_a_run_that_diverged_nobody_says_that_it_goes_on(tmp_path: Path) -> None:
    def edit(request: Request, payload: Payload) -> Payload:
        return spoiled(request, payload) if request.round > 1 else payload

    settings = toy_settings("fedavg", tmp_path, train={"rounds": 5})
    with pytest.raises(EngineError, match=r"clip_norm, in a new run; .* is kept, but resume=true would end the same"):
        run(settings, TouchedEngine(settings, edit=edit))
    reason = f"the model that is scored gives a loss that is not finite: {DIVERGED}"
    with pytest.raises(EngineError) as told:
        check_errors_differ(
            [Failure(client, "failed", reason) for client in ("a", "b", "c")], 2, settings, trained=True
        )
    assert "resume=true" not in str(told.value)


def test_a_run_goes_on_unless_every_reply_of_its_last_round_needs_other_settings() -> None:
    lasting, passing = {"status": "failed", "reason": DIVERGED}, {"status": "lost", "reason": "gone home"}
    assert goes_on([])
    assert goes_on([{"round": 1, "status": "trained"}])
    assert not goes_on([{"round": 1, **lasting}, {"round": 1, "status": "trained"}])
    assert goes_on([{"round": 1, **lasting}, {"round": 1, **passing}])
    assert goes_on([{"round": 1, **lasting}, {"round": 2, "status": "trained"}])
    assert not goes_on([{"round": 1, **passing}, {"round": 2, **lasting}])


def test_a_score_whose_loss_is_not_finite_names_cause_and_remedy(tmp_path: Path) -> None:
    counter = ScoreCounter(toy_settings("fedavg", tmp_path), torch.device("cpu"))
    logits = torch.full((2, 4), torch.nan)
    counter.add(logits, logits, torch.tensor([0, 1]))
    with pytest.raises(PayloadError, match=r"training diverged; lower train\.learning_rate or set train\.clip_norm"):
        counter.result(2)


def test_a_state_that_the_transport_cannot_carry_is_not_kept(tmp_path: Path) -> None:
    hyper = {"server_learning_rate": 1e6}
    settings = toy_settings("fedopt", tmp_path, hyper=hyper, rounds={"transport": "float16"})
    with pytest.raises(EngineError, match=r"round 1 cannot be sent: .*in a new run; no round was complete"):
        run(settings)
    assert Checkpoints(tmp_path / "checkpoint").load() is None
    ending = json.loads((tmp_path / "events.jsonl").read_text().splitlines()[-1])
    assert ending["event"] == "failed"


def test_a_run_that_never_held_a_round_is_no_success(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path, train={"rounds": 2})
    with pytest.raises(EngineError, match=r"no round was held.*6 of the 6 replies.*refused.*not finite"):
        run(settings, TouchedEngine(settings, edit=spoiled))
    summary = summary_in(tmp_path)
    assert (summary["rounds_held"], summary["rounds_skipped"], summary["answers"]["refused"]) == (0, 2, 6)
    assert (summary["average"], summary["worst"], summary["scores"], summary["accuracy"]) == (None, None, {}, {})
    events = [json.loads(line)["event"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert events[-1] == "failed"
    assert "finish" not in events
    again = run(settings)  # there is nothing in the folder that could be lost
    assert again.summary["rounds_held"] == 2


@dataclass(frozen=True)
class Broken(FedAvg):
    """Its loss asks for a term that is not there."""

    def loss(self, batch: Batch, local: ClientContext) -> Losses:
        terms: dict[str, Tensor] = {}
        return Losses({"ce": terms["ce"]})


def broken(folder: Path, **top: Any) -> Any:
    return with_method(toy_settings("fedavg", folder, **top), Broken())


def test_what_every_client_raises_alike_stops_the_run_with_its_traceback(tmp_path: Path) -> None:
    settings = broken(tmp_path, train={"rounds": 9})
    prepare_output(settings)
    with pytest.raises(EngineError) as caught:
        run_federation(settings, InlineEngine(settings))
    lines = str(caught.value).splitlines()
    assert lines[0] == "in round 1 every client raised the same: KeyError: 'ce'"
    assert "resume=true" in lines[1]
    assert all(line.startswith("  ") and line.strip() for line in lines[2:]), "or Flower's log would cut them off"
    assert 'terms["ce"]' in lines[-3] + lines[-2]
    assert lines[-1] == "  KeyError: 'ce'"
    assert not list((tmp_path / "checkpoint").glob("*"))
    last = json.loads((tmp_path / "events.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["round"], last["reason"]) == ("failed", 1, lines[0])


def test_what_the_only_client_raises_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="in round 1 every client raised the same"):
        run(broken(tmp_path, data=Toy(domains=("bright",)), train={"rounds": 9}))


def test_only_what_all_raise_stops_a_run_at_once(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path, train={"rounds": 2})
    engine = TouchedEngine(settings, failing=lambda request: request.train and request.client != "dark-0")
    with pytest.raises(EngineError, match="no round was held"):
        run(settings, engine)


def test_a_round_that_asks_two_hostile_clients_does_not_end_the_run(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path, train={"rounds": 6}, rounds={"participation": 0.67})
    engine = TouchedEngine(settings, failing=lambda request: request.train and request.client != "dark-0")
    summary = run(settings, engine).summary
    assert summary["rounds_held"] + summary["rounds_skipped"] == 6
    assert summary["rounds_skipped"] > 0


def test_a_single_client_s_own_trouble_is_not_the_method_s(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path, train={"rounds": 3}, rounds={"participation": 0.34})
    done = run(settings, TouchedEngine(settings, failing=lambda request: request.train and request.round == 2))
    assert done.summary["rounds_skipped"] == 1


class NoLastScore(TouchedEngine):
    """No client can score the last state."""

    def exchange(
        self, message: Payload, requests: Mapping[str, Request], seconds: float, **more: Any
    ) -> tuple[list[Reply], list[Failure]]:
        replies, failures = super().exchange(message, requests, seconds, **more)
        if any(request.train for request in requests.values()):
            return replies, failures
        return [], [Failure(client, "lost", "gone home") for client in requests]


def test_a_last_state_that_no_client_scores_has_no_score(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path)
    with pytest.raises(EngineError, match=r"no client could score the last state.*lost.*gone home.*resume=true"):
        run(settings, NoLastScore(settings))
    summary = summary_in(tmp_path)
    assert (summary["average"], summary["accuracy"], summary["answers"]["lost"]) == (None, {}, 3)
    assert set(summary["scores"]) == {"last_n", "best_round"}
    assert decide(settings, study=True).step is Step.GO_ON
    assert run(replace(settings, resume=True)).summary["average"] is not None


def test_a_run_whose_last_score_lacks_a_domain_is_not_finished(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path)
    done = run(settings, TouchedEngine(settings, lost=lambda asked: asked.client == "dark-0" and not asked.train))
    assert set(done.summary["missing"]) == {"dark"}
    assert decide(replace(settings, resume=True)).step is Step.GO_ON
    assert run(replace(settings, resume=True)).summary["missing"] == {}


@dataclass(frozen=True)
class Overflowing(FedAvg):
    """Adds to infinity in the second round."""

    def aggregate(self, state: GlobalState, updates: Sequence[Update], server: ServerContext) -> GlobalState:
        found = super().aggregate(state, updates, server)
        if server.round < 2:
            return found
        return replace(found, weights={name: (tensor / 0).to(tensor.dtype) for name, tensor in found.weights.items()})


def test_a_state_that_is_not_finite_ends_the_run_at_the_round_before(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"after round 2 has values in weights/.* not finite.*; the round before"):
        run(with_method(toy_settings("fedavg", tmp_path, train={"rounds": 3}), Overflowing()))
    found = Checkpoints(tmp_path / "checkpoint").load()
    assert found is not None
    assert found.state.round == 1


def test_a_checkpoint_that_is_not_finite_is_passed_over(tmp_path: Path) -> None:
    def checkpoint(number: int, value: float) -> Checkpoint:
        return Checkpoint(GlobalState({"w": torch.tensor([1.0, value])}, round=number), "run", "fpl", "abcd", 7, 12, 7)

    store = Checkpoints(tmp_path)
    store.save(checkpoint(2, torch.nan))
    with pytest.raises(CheckpointError, match="weights/w has values that are not finite"):
        store.load()
    store.save(checkpoint(1, 2.0))
    found = store.load()
    assert found is not None
    assert found.state.round == 1


# ---- the command line ------------------------------------------------------------------------------------------------


SMALL = [
    *("engine=inline", "data.domains=[printed,signs]", "protocol.samples=16", "model=small", "train.device=cpu"),
    *("train.rounds=2", "train.local_steps=1", "rounds.test_samples=8"),
]


@pytest.mark.long
def test_a_sweep_names_the_runs_that_trained_nothing_and_never_prints_them_bold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The good run is made here, as a run that an earlier sweep has finished."""
    words = [*SMALL, "method=fedavg", "train.learning_rate=0.01,1e30"]
    first, second = plan(words, tmp_path)[0]
    run(first.settings)
    assert main(["sweep", *words, "--output", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "2 runs, 1 finished already" in printed.out
    assert "train.learning_rate=1e+30: FAILED: no round was held" in printed.out
    assert "train.learning_rate=1e+30: no round was held" in printed.err
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert lines[0] == f"`{shell_line(['goldfinch', 'sweep', *words])}`", "quoted for a shell"
    good, bad = (line for line in lines if "learning_rate" in line and "|" in line)
    assert "skipped" not in good
    assert "**" not in bad
    assert "| - | - | 2 (2 skipped) |" in bad
    assert (first.finished(), second.finished()) == (True, False), "the next sweep tries the second again"


def test_a_sweep_s_table_names_the_runs_that_have_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*SMALL, "method=fedavg", "seed=0,1,2"]
    first, second, _ = plan(words, tmp_path)[0]
    run(first.settings)
    run(second.settings, stop_after=1)
    monkeypatch.setattr(sweep_module, "execute", lambda *_: {})
    assert main(["sweep", *words, "--output", str(tmp_path)]) == 0
    text = (tmp_path / "table.md").read_text()
    assert f"Left out, since they have not ended: fedavg with seed 1 ({second.folder}), " in text
    assert "seed 2" not in text, "it has not begun"


def test_exit_codes_are_those_of_the_documentation() -> None:
    """130 and 143 are in tests/faults/test_terminated.py."""
    table = re.findall(r"^\| (\d+) \|", (ROOT / "docs" / "quickstart.md").read_text(), flags=re.MULTILINE)
    assert table == ["0", "1", "2", "130", "143"]
    assert main(["list", "method"]) == 0
    assert main(["run", "method=fedpol"]) == 1
    assert main(["table", "--no-such-option"]) == 2
