"""The server's side of a federation, whatever carries the messages: who is there, what is asked, what is let in."""

from __future__ import annotations

import contextlib
import ctypes
import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Lock
from typing import TypeVar

import torch

from common.errors import PayloadError
from common.seeding import generator
from common.settings import RunSettings
from common.storage.files import read_tensors, safetensors_pieces
from common.storage.state import GlobalState, named_tensors, split_tensors
from common.wire.messages import Answer, Request
from common.wire.payload import Payload, cast_down, cast_up
from strategies.core.aggregation import at_most, cap_samples
from strategies.core.bounds import Bounds
from strategies.core.gate import Gate, Registry
from strategies.core.method import Client, Method, ServerContext, Update, build_model, feature_size
from strategies.core.protection import check_protects

PREFIX = ".answer-"
MMAP_THRESHOLD, LARGE = -3, 2**20
"""Of glibc's ``mallopt``: blocks of so many bytes are given back when they are freed, instead of kept and cut up. What
comes with each answer and goes again would otherwise leave its size behind each time."""
Kept = TypeVar("Kept", Payload, Update)


@dataclass(frozen=True, eq=False)
class Reply:
    """A client's answer and the bytes it cost.

    Args:
        client: the client that was asked.
        answer: what it says.
        payload: its tensors.
        bytes_down: encoded size of the message, and the request's text.
        bytes_up: encoded size of the answer.
    """

    client: str
    answer: Answer
    payload: Payload
    bytes_down: int = 0
    bytes_up: int = 0


@dataclass(frozen=True)
class Closing:
    """When an exchange closes before all have answered (``rounds.oversample``).

    Args:
        enough: so many updates have come, >= 1,
        awaited: and none of these clients is still to answer: each scores a domain that nobody else does.
    """

    enough: int
    awaited: frozenset[str]

    def reached(self, updates: int, pending: Collection[str]) -> bool:
        """Whether it does, with so many updates there, and the answers of ``pending`` still to come."""
        return updates >= self.enough and self.awaited.isdisjoint(pending)


@dataclass(frozen=True, eq=False)
class Outcome:
    """What an exchange came to.

    Args:
        state: the next global state; the one before if the exchange was skipped, or asked for scores alone.
        admitted: answers that were let in, by client id.
        updates: theirs, by client id, as they were aggregated: with the samples that they count for.
        refused: the others' reasons, with their clients.
        clipped: by client id, the factors that its parts were scaled by, in (0, 1).
        needed: how many updates the exchange needed, and ``by`` whose word.
        skipped: whether it had fewer, so that nothing was aggregated.
    """

    state: GlobalState
    admitted: list[Reply]
    updates: list[Update]
    refused: list[tuple[str, str]]
    clipped: dict[str, dict[str, float]]
    needed: int = 0
    by: str = ""

    @property
    def skipped(self) -> bool:
        """Whether there were fewer updates than needed, so that nothing was aggregated."""
        return len(self.updates) < self.needed


class AnswerStore:
    """Where an exchange's answers wait for the last one: in memory up to a limit, beyond it in files that are mapped.

    A mapped tensor is read from its file when it is looked at, and the kernel takes its memory back whenever it needs
    it. Sums over many answers read them block by block, so that no whole answer is copied
    (:mod:`strategies.core.aggregation`).

    A file loses its name as soon as it is mapped: its place on the disk is free when the last tensor is gone, and when
    the process is, however it ends.

    Args:
        folder: where files are made; on a disk, since what lies in a file system in memory is memory.
        most: bytes that stay in memory, >= 0.
    """

    def __init__(self, folder: Path, most: float) -> None:
        self.folder, self.most = folder, most
        self._held = 0
        self._lock = Lock()  # engines keep from several threads

    def clear(self) -> None:
        """Begin anew: what was kept is nobody's any more. A killed process may have left what it was writing."""
        self._held = 0
        for left in self.folder.glob(f"{PREFIX}*"):
            left.unlink(missing_ok=True)

    def keep(self, answer: Kept) -> Kept:
        """The same answer with the same values, in memory or in a file.

        Raises:
            OSError: the disk is full, or the folder cannot be written.
        """
        tensors = named_tensors(answer.weights, answer.prototypes, answer.extra)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        with self._lock:
            if not size or self._held + size <= self.most:
                self._held += size
                return answer
        with contextlib.suppress(OSError, AttributeError):  # another libc has no such trouble
            ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, LARGE)
        self.folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=self.folder, prefix=PREFIX) as file:
            file.writelines(safetensors_pieces(tensors))
            file.flush()
            mapped, _ = read_tensors(Path(file.name))
        weights, prototypes, extra = split_tensors(mapped)
        weights = {name: weights[name] for name in answer.weights}  # in the answer's own order
        extra = {name: extra[name] for name in answer.extra}
        if answer.prototypes is None:
            return replace(answer, weights=weights, extra=extra)
        return replace(answer, weights=weights, prototypes=prototypes, extra=extra)


class Federation:
    """What the server needs to make requests and judge answers.

    Args:
        settings: the run's settings.
    """

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self.method: Method = settings.method
        self.registry = Registry(settings)
        self.server = self._server_side()
        self.answer_store = AnswerStore(settings.output_folder, settings.rounds.memory * 2**30)
        self._requests: dict[str, Request] = {}
        self._answered: set[str] = set()
        self._asked = 0
        self._clients: dict[str, Client] = {}
        self._tested: dict[tuple[str, str], int] = {}
        self.best = -1
        """The round that is best by validation so far; devices keep their part of it. -1 is none."""
        self.bounds = Bounds(settings.rounds.outlier_factor, len(self.registry.expected))
        settings.aggregation.check(
            self.method.name, self.method.averages, settings.rounds.sampled(len(self.registry.expected))
        )
        check_protects(
            settings.privacy,
            self.method,
            self.server.new_model(),
            self.method.expects(self.server),
            settings.protocol.validation,
        )

    def _server_side(self) -> ServerContext:
        data = self.settings.data
        new_model = partial(build_model, self.settings, len(self.registry.expected))
        model = new_model()
        names = self.method.shared_names(model)
        return ServerContext(
            rounds=self.settings.train.rounds,
            class_count=data.class_count,
            feature_size=feature_size(model),
            client_count=len(self.registry.expected),
            train=self.settings.train,
            device=torch.device("cpu"),
            shared={name: tensor.clone() for name, tensor in model.state_dict().items() if name in names},
            parameters=frozenset(name for name, _ in model.named_parameters() if name in names),
            aggregation=self.settings.aggregation,
            seed=self.settings.seed,
            new_model=new_model,
        )

    def initial_state(self) -> GlobalState:
        """The global state before the first round, a pure function of the settings and the seed."""
        return self.method.initial_state(self.server.shared, self.server)

    def begin(self, round_number: int, exchange: str, *, score: bool = True) -> None:
        """Turn to an exchange, in which the model is scored or not; answers to earlier ones are stale from here on."""
        clients = self.registry.clients()
        self._clients = {client.id: client for client in clients}
        usual = statistics.median([client.samples for client in clients] or [0])
        self.server.clients = at_most(clients, self.settings.rounds.largest_client * usual)
        self.server.round, self.server.exchange, self.server.scoring = round_number, exchange, score
        self.server.aggregation = self.settings.aggregation
        self._requests, self._answered, self._asked = {}, set(), 0
        self.answer_store.clear()

    def message(self, state: GlobalState) -> Payload:
        """The tensors every participant of the present exchange is sent."""
        download = self.method.download(state, self.server)
        message = Payload({}, download.weights, download.prototypes, download.extra)
        return cast_down(message, self.settings.rounds.transport)

    def requests(self, run: str, participants: Sequence[Client], *, train: bool = True) -> dict[str, Request]:
        """What each client is asked in the present exchange, by client id.

        A client that does not take part may be asked for scores alone: of a domain that no participant can score, and
        of its validation samples, which every client scores, so that rounds can be compared.
        """
        scored = self.server.scoring and self.settings.rounds.test
        duties = self.registry.scorers(participants, personal=self.method.personal) if scored else {}
        validates = self.server.scoring and self.settings.protocol.validation > 0
        here = {client.id for client in participants}
        training = here if train else set()
        self._requests = {
            client.id: Request(
                run=run,
                identity=self.settings.identity,
                method=self.method.name,
                round=self.server.round,
                exchange=self.server.exchange,
                client=client.id,
                client_count=client.client_count,
                client_index=client.index,
                train=client.id in training,
                score=duties.get(client.id, []),
                code=self.settings.code,
                validate=validates,
                keep=self.best,
            )
            for client in self.server.clients
            if client.id in duties or validates or client.id in training
        }
        self._asked = sum(request.train for request in self._requests.values())
        return dict(self._requests)

    def admit(self, client: str, answer: Answer, payload: Payload) -> Update | None:
        """The update in a client's answer, checked; ``None`` if only a score was asked for.

        Raises:
            PayloadError: the client was not asked, answered already, or its answer is not as it must be.
        """
        request = self._requests.get(client)
        if request is None:
            raise PayloadError(f"{client} was not asked in round {self.server.round}")
        if client in self._answered:
            raise PayloadError(f"{client} has answered already in round {self.server.round}")
        registered = self._clients[client]
        gate = Gate(self.method.expects(self.server), self.server, self._asked)
        if self.settings.rounds.transport != "float32":
            payload = self.answer_store.keep(cast_up(payload, self.settings.rounds.transport))
        update = gate.admit(request, answer, payload, registered)
        if update is not None:
            self.method.inspect(update, self.server)
        self._check_tested(answer)
        self._answered.add(client)
        return update

    def _check_tested(self, answer: Answer) -> None:
        """A client's test set of a domain is as large as when it first scored it, and as ``rounds`` allows."""
        most = self.settings.rounds.test_samples or self.settings.rounds.max_samples
        said = {(answer.client, entry["domain"]): entry["count"] for entry in answer.scores}
        for (_, domain), count in said.items():
            known = self._tested.get((answer.client, domain), count)
            if count > most or count != known:
                raise PayloadError(f"the score of {domain} counts {count} images; it was {known}, at most {most} are")
        self._tested |= said
        held = self.registry.registrations[answer.client].validation
        if answer.validation is not None and answer.validation["count"] != held:
            raise PayloadError(f"the validation counts {answer.validation['count']} images; {held} were registered")

    def in_time(self, answers: Sequence[Reply], closing: Closing) -> tuple[list[Reply], list[Reply]]:
        """Those of ``answers`` that came before the exchange closed, had each taken its time, and the others.

        How long each takes is drawn from the seed, the round and the client, so that all simulations agree.
        """

        def took(arrived: Reply) -> float:
            draws = generator(self.settings.seed, "delay", self.server.round, arrived.client)
            return float(torch.rand(1, generator=draws))

        coming = sorted(answers, key=lambda item: (took(item), item.client))
        for count in range(len(coming)):
            there, later = coming[:count], coming[count:]
            if closing.reached(sum(one.answer.trained for one in there), [one.client for one in later]):
                return there, later
        return coming, []

    def close(self, state: GlobalState, answers: Sequence[Reply], refused: int = 0, enough: int = 0) -> Outcome:
        """Judge an exchange's answers and aggregate them: the one way for every engine and for Flower's own loop.

        Each answer passes the gate or is refused; updates that are too long are scaled down or refused
        (``rounds.outliers``); the aggregation rule is told how many were refused; and if as many are left as
        :meth:`needed` says, they are aggregated. The bounds remember an exchange even if it is skipped.

        Args:
            state: what :meth:`message` was made from.
            answers: whatever came, in any order.
            refused: answers that came and could not even be read.
            enough: how many of those that were asked it waited for; 0: for all.
        """
        admitted: list[Reply] = []
        updates: list[Update] = []
        refusals: list[tuple[str, str]] = []
        for arrived in sorted(answers, key=lambda item: item.client):
            try:
                update = self.admit(arrived.client, arrived.answer, arrived.payload)
            except PayloadError as error:
                refusals.append((arrived.client, str(error)))
                continue
            admitted.append(arrived)
            updates += [update] if update is not None else []
        updates, too_long, clipped = self._bounded(state, updates)
        refusals += too_long.items()
        admitted = [arrived for arrived in admitted if arrived.client not in too_long]
        updates = cap_samples(updates, self.server.clients, self.settings.rounds.largest_share)
        self.server.aggregation = self.settings.aggregation.after_refusals(refused + len(refusals), len(updates))
        asked = min(self._asked, enough or self._asked)
        needed, by = self.needed(asked) if asked else (0, "")
        if needed and len(updates) >= needed:
            state = self.method.aggregate(state, updates, self.server)
        return Outcome(state, admitted, updates, refusals, clipped, needed, by)

    def _bounded(
        self, state: GlobalState, updates: list[Update]
    ) -> tuple[list[Update], dict[str, str], dict[str, dict[str, float]]]:
        """The updates without those that are too long, why they are; or all, and what those were scaled by."""
        rounds, expected = self.settings.rounds, self.method.expects(self.server)
        if rounds.outliers == "off":
            return updates, {}, {}
        found = self.bounds.find(updates, state, expected, self.server)
        if rounds.outliers == "clip":
            bounds = {client: {name: bound for name, (_, bound, _) in parts.items()} for client, parts in found.items()}
            return (
                [
                    self.answer_store.keep(
                        self.bounds.clip(update, state, expected, self.server, bounds[update.client.id])
                    )
                    if update.client.id in bounds
                    else update
                    for update in updates
                ],
                {},
                {
                    client: {name: bound / length for name, (length, bound, _) in parts.items()}
                    for client, parts in found.items()
                },
            )
        reasons = {}
        for client, parts in found.items():
            name, (length, bound, middle) = max(parts.items(), key=lambda item: item[1][0] / item[1][1])
            reasons[client] = (
                f"the length of its {name} is {length:.3g}, {length / middle:.3g} times the round's median; at most "
                f"{bound:.3g} is let in (rounds.outliers=refuse, rounds.outlier_factor={rounds.outlier_factor:g})"
            )
        return [update for update in updates if update.client.id not in reasons], reasons, {}

    def needed(self, asked: int) -> tuple[int, str]:
        """How many of ``asked`` participants must have answered for an exchange to count, >= 1, and who says so."""
        quorum, least = math.ceil(self.settings.rounds.quorum * asked), self.server.aggregation.min_answers
        return (quorum, "rounds.quorum") if quorum >= least else (least, "aggregation")
