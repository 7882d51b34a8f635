"""A filter of one's own, the FoolsGold of docs/methods.md, tried with an attack by settings alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.own import forget
from support.runs import run
from support.toy import attacked_settings, toy_settings

from common.choices import CONF
from common.config import checked
from common.errors import ConfigError
from common.numerics import generator
from common.settings import load_settings
from common.storage import GlobalState
from server.run.checkpoint import Checkpoints
from strategies.core.aggregation import Mean
from strategies.core.context import ServerContext
from strategies.core.exchange import Client, Update, UploadSpec
from strategies.core.federation import Federation, Outcome
from strategies.core.filters import Filtered

PAGE = CONF.parent / "docs" / "methods.md"


@pytest.fixture(autouse=True)
def foolsgold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package that the page describes."""
    (source,) = re.findall(r"`mylib/foolsgold.py`:\n\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "mylib").mkdir()
    (tmp_path / "mylib" / "foolsgold.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    forget("mylib")


def reference(sums: np.ndarray) -> np.ndarray:
    """FoolsGold's shares as the authors' code computes them, in loops."""
    rows = sums / np.linalg.norm(sums, axis=1, keepdims=True)
    count = len(rows)
    alike = np.zeros((count, count))
    for one in range(count):
        for other in range(count):
            if one != other:
                alike[one, other] = rows[one] @ rows[other]
    highest = alike.max(1)
    pardoned = alike.copy()
    for one in range(count):
        for other in range(count):
            if highest[one] < highest[other]:
                pardoned[one, other] = alike[one, other] * highest[one] / highest[other]
    shares = np.clip(1 - pardoned.max(1), 0, 1)
    shares = shares / shares.max()
    shares[shares >= 0.99] = 0.99
    return np.clip(np.log(shares / (1 - shares)) + 0.5, 0, 1)


def test_the_shares_are_those_of_the_formula() -> None:
    federation = Federation(load_settings(["method=fedavg", "data=glyphs", "aggregation=mylib.foolsgold.FoolsGold"]))
    (own,) = federation.filters
    server = federation.server
    draws = generator(0, "own filter")
    shared = {name: torch.zeros_like(server.shared[name]) for name in server.shared}
    common = {name: torch.randn(shared[name].shape, generator=draws) for name in sorted(server.parameters)}
    updates = []
    for number in range(4):  # the last is unlike the others
        weights = dict(shared)
        for name, step in common.items():
            noise = torch.randn(step.shape, generator=draws)
            weights[name] = noise if number == 3 else step + 0.1 * (number + 1) * noise
        updates.append(Update(weights, client=Client(f"a-{number}", "a", 10, (10,))))
    found = own.apply(updates, GlobalState(shared, round=0), UploadSpec(), server)
    sums = np.stack([own.sums[f"a-{number}"].double().numpy() for number in range(4)])  # type: ignore[attr-defined]
    expected = reference(sums)
    name = sorted(server.parameters)[0]
    for update, changed, share in zip(updates, found.updates, expected, strict=True):
        assert torch.allclose(changed.weights[name], share * update.weights[name], atol=1e-5)
    assert expected[3] == 1, "who is unlike counts in full"
    assert "a-3" not in found.scaled
    assert set(found.scaled) >= {"a-0"}


def test_the_sentence_below_the_command_is_about_its_clients() -> None:
    text = " ".join(PAGE.read_text().split())
    command, sentence = re.findall(r"goldfinch run (method=fedavg aggregation=mylib\S+ \S+ \S+) ``` (.*?\.) ", text)[0]
    settings = load_settings(command.split())
    clients = settings.protocol.clients(settings.data)
    assert len(clients) == 4
    assert "signs-0" in {client.id for client in clients}
    assert sentence.startswith("Of its four clients")


def test_clients_that_are_all_alike_count_alike_and_nothing_is_no_number() -> None:
    federation = Federation(load_settings(["method=fedavg", "data=glyphs", "aggregation=mylib.foolsgold.FoolsGold"]))
    (own,) = federation.filters
    server = federation.server
    shared = {name: torch.zeros_like(server.shared[name]) for name in server.shared}
    weights = {name: tensor + 1 for name, tensor in shared.items()}
    updates = [Update(dict(weights), client=Client(f"a-{number}", "a", 10, (10,))) for number in range(3)]
    found = own.apply(updates, GlobalState(shared, round=0), UploadSpec(), server)
    assert len({scale["parameters"] for scale in found.scaled.values()}) == 1
    for changed in found.updates:
        assert all(bool(tensor.isfinite().all()) for tensor in changed.weights.values())


def test_a_run_tries_it_with_an_attack_and_resumes_with_its_memory(tmp_path: Path) -> None:
    chosen = ("aggregation=mylib.foolsgold.FoolsGold",)
    done = run(attacked_settings("sign_flip", "fedavg", tmp_path / "run", chosen, train={"rounds": 3}))
    assert {row["status"] for row in done.replies()} <= {"trained", "scaled", "scored"}
    checkpoint = Checkpoints(done.folder / "checkpoint").load()
    assert checkpoint is not None
    assert {f"alike/{name}-0" for name in ("bright", "dark", "noisy")} <= set(checkpoint.memory)


@pytest.mark.parametrize("method", ["scaffold", "feddyn", "fedgca"])
def test_a_method_whose_clients_keep_their_step_refuses_it(method: str) -> None:
    reason = r"aggregation=mylib\.foolsgold\.FoolsGold may change them.*set aggregation=mean"
    with pytest.raises(ConfigError, match=reason):
        load_settings([f"method={method}", "data=glyphs", "aggregation=mylib.foolsgold.FoolsGold"])


@checked
class Half(Mean):
    """A rule of a user that makes another state of the updates than their average, without filters."""


def test_a_rule_without_filters_is_refused_there_too() -> None:
    settings = load_settings(["method=fedavg", "data=glyphs"])
    assert not settings.alters_updates
    assert list(replace(settings, aggregation=Half()).alters_updates.values()) == ["aggregation=mean"]


class Shorter:
    """A filter that scales the parameters of one client by a factor."""

    def __init__(self, client: str, factor: float, why: str) -> None:
        self.client, self.factor, self.why = client, factor, why

    def apply(
        self, updates: Sequence[Update], state: GlobalState, expected: UploadSpec, server: ServerContext
    ) -> Filtered:
        return Filtered(list(updates), {self.client: {"parameters": self.factor}}, self.why)

    def memory(self) -> dict[str, torch.Tensor]:
        return {}

    def remember(self, memory: Mapping[str, torch.Tensor]) -> None: ...


def test_a_client_that_two_filters_scale_has_both_reasons_and_the_product_in_the_record() -> None:
    federation = Federation(load_settings(["method=fedavg", "data=glyphs"]))
    federation.filters = [Shorter("a-0", 0.5, "too long"), Shorter("a-0", 0.4, "alike"), Shorter("b-0", 0.3, "alike")]
    _, scaled, why = federation._filter([], GlobalState({}, round=0))
    assert scaled == {"a-0": {"parameters": pytest.approx(0.2)}, "b-0": {"parameters": 0.3}}
    outcome = Outcome(GlobalState({}, round=0), [], [], {}, scaled, scaled_why=why)
    assert outcome.scaling_reasons() == {"a-0": "too long, alike, parameters by 0.2", "b-0": "alike, parameters by 0.3"}


class Dropping(Shorter):
    """A filter that leaves an update out."""

    def apply(
        self, updates: Sequence[Update], state: GlobalState, expected: UploadSpec, server: ServerContext
    ) -> Filtered:
        return Filtered([update for update in updates if update.client.id != self.client], {})


def test_a_filter_that_leaves_an_update_out_is_refused_since_the_record_would_count_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropping = Dropping("bright-0", 1.0, "")
    monkeypatch.setattr("strategies.core.federation.filters_of", lambda *_: [dropping])
    with pytest.raises(ConfigError, match=r"filter Dropping was given the updates of bright-0.*return every update"):
        run(toy_settings("fedavg", tmp_path, train={"rounds": 1}))


class Noise:
    """A filter that adds draws to each update, and keeps the first."""

    first: float | None = None

    def apply(
        self, updates: Sequence[Update], state: GlobalState, expected: UploadSpec, server: ServerContext
    ) -> Filtered:
        changed = []
        self.first = float(torch.rand(()))
        for update in updates:
            weights = {name: value + torch.rand(()).to(value.dtype) for name, value in update.weights.items()}
            changed.append(replace(update, weights=weights))
        return Filtered(changed, {})

    def memory(self) -> dict[str, torch.Tensor]:
        return {}

    def remember(self, memory: Mapping[str, torch.Tensor]) -> None:
        """There is nothing."""


class Forgetful:
    """A filter that a resumed run could not go on with."""

    apply = Noise.apply
    memory = Noise.memory


@checked
class Noisy(Mean):
    """The mean of updates with noise."""

    def filters(self) -> Sequence[object]:
        return (Noise(),)


@checked
class Forgets(Mean):
    """The mean with a filter that lacks a function."""

    def filters(self) -> Sequence[object]:
        return (Forgetful(),)


@checked
class HalfARule(Mean):
    """Replaces only the average of models."""

    def average(self, updates: Sequence[Update], *, uniform: bool = False) -> dict[str, torch.Tensor]:
        return dict(updates[0].weights)


def test_what_a_filter_draws_depends_on_the_seed_alone(tmp_path: Path) -> None:
    hashes = set()
    for number in (1, 2):
        torch.manual_seed(number)
        settings = toy_settings("fedavg", tmp_path / str(number), train={"rounds": 1})
        hashes.add(run(replace(settings, aggregation=Noisy())).sha256)
    assert len(hashes) == 1


def test_two_filters_draw_apart(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path, train={"rounds": 1})
    filters = (Noise(), Noise())

    @checked
    class Twice(Mean):
        """Two filters of one kind."""

        def filters(self) -> Sequence[object]:
            return filters

    run(replace(settings, aggregation=Twice()))
    first = [applied.first for applied in filters]
    assert None not in first
    assert first[0] != first[1]


def test_half_a_filter_and_half_a_rule_are_refused(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path)
    with pytest.raises(ConfigError, match="filter Forgetful needs the functions apply, memory and remember"):
        Federation(replace(settings, aggregation=Forgets()))
    with pytest.raises(ConfigError, match="HalfARule: override combine, not average alone"):
        Federation(replace(settings, aggregation=HalfARule()))
