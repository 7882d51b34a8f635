"""The server's side of an exchange, the same for every engine: requests to the clients, and checks of their replies.

An exchange calls the functions of :class:`Federation` in this order: :meth:`~Federation.begin`,
:meth:`~Federation.message` and :meth:`~Federation.requests` make what the server sends;
:meth:`~Federation.close` checks the replies, applies the filters that the settings ask for, and aggregates.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from common.errors import CheckpointError, ConfigError, PayloadError, some_of
from common.metrics import COUNTED, counts_fit
from common.numerics import seeded_globals
from common.settings import RunSettings
from common.storage import AnswerStore, GlobalState
from common.wire.messages import Answer, OwnVersion, Request
from common.wire.payload import CARRIED, Payload, cast_down, cast_up
from strategies.core.aggregation import limit_samples
from strategies.core.bounds import check_bounds, least_answers
from strategies.core.exchange import tensor_specs
from strategies.core.filters import Factors, Filter, filters_of
from strategies.core.gate import Gate
from strategies.core.method import Client, Method, Update, build_model, server_context
from strategies.core.participants import Registry
from strategies.core.protection import UNKNOWN, check_request


@dataclass(frozen=True, eq=False)
class Reply:
    """A client's answer and its size.

    Args:
        client: the client that was asked.
        answer: scores and costs.
        payload: the tensors.
        bytes_up: encoded size of the answer.
        time: when it arrived, in seconds since 1970 (UTC).
    """

    client: str
    answer: Answer
    payload: Payload
    bytes_up: int = 0
    time: float = field(default_factory=time.time, compare=False)


@dataclass(frozen=True)
class Closing:
    """When an exchange closes before all clients have replied (``rounds.oversample``).

    Args:
        enough: updates that must have arrived, >= 1.
        awaited: clients that must have replied, because each is the only one to score a domain.
        round: the round, from which a simulation draws who is late.
        seed: the run's seed, from which it draws, too.
    """

    enough: int
    awaited: frozenset[str]
    round: int = 0
    seed: int = 0

    def reached(self, updates: int, pending: Collection[str]) -> bool:
        """Return whether the exchange closes with ``updates`` updates, while clients ``pending`` have not replied."""
        return updates >= self.enough and self.awaited.isdisjoint(pending)


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of an exchange.

    Args:
        state: the next global state; the one before if the exchange was skipped or only asked for scores.
        admitted: accepted replies, by client id.
        updates: the updates that were aggregated, sorted by client id, as the filters returned them.
        refused: clients whose replies were not accepted, with the reasons.
        scaled: by client id, the factors in (0, 1) by which parts of its update were scaled down.
        needed: updates that the exchange needed.
        by: the setting that ``needed`` comes from.
        counted: by client id, the version of its own state that belongs to ``state``; see :attr:`Federation.counted`.
        scaled_why: by client id, why its update was scaled, for each filter that did.
    """

    state: GlobalState
    admitted: list[Reply]
    updates: list[Update]
    refused: list[tuple[str, str]]
    scaled: Factors
    needed: int = 0
    by: str = ""
    counted: Mapping[str, OwnVersion] = field(default_factory=dict)
    scaled_why: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def scaling_reasons(self) -> dict[str, str]:
        """Return what was scaled of accepted replies and by how much, by client id, as text for the record."""
        texts: dict[str, str] = {}
        for client, factors in self.scaled.items():
            ascending = sorted(factors.items(), key=lambda item: item[1])
            parts = [f"{name} by {factor:.3g}" for name, factor in ascending]
            texts[client] = ", ".join([*self.scaled_why[client], *parts])
        return texts

    @property
    def skipped(self) -> bool:
        """Whether there were fewer updates than needed, so that nothing was aggregated."""
        return len(self.updates) < self.needed


class Federation:
    """Makes the requests of each exchange, checks the replies, and aggregates them.

    Args:
        settings: the run's settings.

    Attributes:
        registry: the clients.
        server: the context of the method's functions on the server (``download``, ``expects``, ``aggregate`` ...); a
            new object for each exchange.
        filters: what may change accepted updates before they are aggregated; none by default.
        answer_store: where replies wait until the exchange closes.
        best: number of the round with the best validation score so far; -1 if there is none. Requests contain it, so
            that devices keep their own state of that round.
        attempt: number of this part of the run: the time in milliseconds, which is larger than the number of every
            earlier part, also of a part that ended without a checkpoint.
        counted: by client id, the version of the client's own state whose update the server counted last. These
            versions belong to the global state: a return to an earlier state sets them back, too. Requests contain the
            version, so that no client goes on from a reply that was lost, late, refused or left out.
        test_counts: test images by client and domain, as each client first reported them.

    Raises:
        ConfigError: the method cannot be combined with the aggregation rule, a filter or the privacy settings.
    """

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self.method: Method = settings.method
        self.registry = Registry(settings)
        self.answer_store = AnswerStore(settings.output_folder, settings.rounds.memory * 2**30)
        self.filters = [*filters_of(settings.rounds, self.answer_store.keep), *settings.aggregation.filters()]
        for each in self.filters:
            if not isinstance(each, Filter):
                raise ConfigError(f"the filter {type(each).__name__} needs the functions apply, memory and remember")
        self.best = -1
        self.attempt = time.time_ns() // 10**6
        self.counted: Mapping[str, OwnVersion] = {}
        self._requests: dict[str, Request] = {}
        self._asked_to_train = 0
        self._answered: set[str] = set()
        self._gate: Gate | None = None
        """The checks of the current exchange's replies, made when the first reply arrives."""
        self._clients: dict[str, Client] = {}
        self._sum_ranges = settings.own_metric.ranges()
        self.test_counts: dict[tuple[str, str], int] = {}
        model = self.new_model()
        self.server = server_context(settings, model, len(self.registry.expected))
        seen: dict[int, str] = {}
        self._first: dict[str, str] = {}
        """By the name of each shared parameter, the first name of the same tensor: networks may tie several."""
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in self.server.shared:
                self._first[name] = seen.setdefault(id(parameter), name)
        check_combination(settings, model, len(self.registry.expected))

    def new_model(self, domain: str | None = None) -> nn.Module:
        """Return a model with its initial weights: of a domain's clients, or the server's."""
        return build_model(self.settings, len(self.registry.expected), domain)

    def initial_state(self) -> GlobalState:
        """Return the global state before the first round, a pure function of the settings and the seed."""
        with seeded_globals(self.settings.seed, "server"):
            return self.method.initial_state(self.server.shared, self.server)

    def check_fits(self, state: GlobalState) -> None:
        """Check that a checkpoint's state is one of the run's.

        Raises:
            CheckpointError: a tensor is missing, is not one of the model's, or has another shape or dtype; or a
                prototype is of no class of the run's, or has another number of features.
        """
        self._check_fitting_prototypes(state)
        initial = self.initial_state()
        expected = tensor_specs(initial.weights)
        loaded = tensor_specs(state.weights)
        differ = sorted(name for name in expected.keys() | loaded.keys() if expected.get(name) != loaded.get(name))
        for name, tensor in initial.extra.items():  # a method may add others later, and rows to one without any
            if name in state.extra and tensor.numel() and tensor.shape != state.extra[name].shape:
                differ.append(name)
        if differ:
            raise CheckpointError(
                f"the checkpoint's model is not the one that the settings describe: {some_of(differ, 5)} "
                "is missing or has another shape; start again with overwrite=true"
            )

    def _check_fitting_prototypes(self, state: GlobalState) -> None:
        """Check the prototypes of a checkpoint as the gate checks those of a reply."""
        prototypes = state.prototypes
        if not len(prototypes):
            return
        wrong = ""
        if prototypes.feature_size != self.server.feature_size:
            wrong = f"have {prototypes.feature_size} features; the run's model has {self.server.feature_size}"
        elif prototypes.classes[-1] >= self.server.class_count:
            wrong = f"are of classes {list(prototypes.classes)}; the run has {self.server.class_count}"
        if wrong:
            raise CheckpointError(
                f"the checkpoint's prototypes {wrong}. It is of another run or damaged; start again with overwrite=true"
            )

    # ---- requests ----------------------------------------------------------------------------------------------------

    def begin(self, round_number: int, exchange: str, *, score: bool = True) -> None:
        """Begin an exchange. Replies to earlier exchanges are refused from here on.

        Args:
            round_number: the round, >= 1.
            exchange: the exchange's name.
            score: whether clients score the model in it.

        Raises:
            ConfigError: the method expects tensors that messages cannot contain.
        """
        clients = self.registry.clients()
        self._clients = {client.id: client for client in clients}
        limited = clients
        if clients and self.settings.rounds.largest_client is not None:
            median_samples = statistics.median([client.samples for client in clients])
            limited = limit_samples(clients, self.settings.rounds.largest_client * median_samples)
        self.server = replace(self.server, clients=limited, round=round_number, exchange=exchange, scoring=score)
        expected = self.method.expects(self.server)
        for name, (dtype, _) in expected.extra.items():
            if dtype not in CARRIED.values():
                known = some_of([str(carried) for carried in CARRIED.values()])
                raise ConfigError(f"{self.method.name}.expects: {name} is {dtype}, not one of {known}")
        self._requests, self._asked_to_train, self._answered, self._gate = {}, 0, set(), None
        self.answer_store.clear()

    def message(self, state: GlobalState) -> Payload:
        """Return the tensors that every participant of the current exchange receives."""
        with seeded_globals(self.settings.seed, "server", self.server.round, self.server.exchange, "download"):
            download = self.method.download(state, self.server)
        message = Payload(download.weights, download.prototypes, download.extra)
        return cast_down(message, self.settings.rounds.transport)

    def requests(self, run: str, participants: Sequence[Client], *, train: bool = True) -> dict[str, Request]:
        """Return the request to each client in the current exchange, by client id.

        A client that does not participate is asked for scores alone: of domains that no participant can score, and of
        its validation samples, which every client scores, so that rounds can be compared.

        Args:
            run: the run's id.
            participants: the clients that take part.
            train: whether participants train; otherwise they only score.
        """
        duties: dict[str, list[str]] = {}
        if self.server.scoring and self.settings.rounds.test:
            duties = self.registry.scorers(participants, personal=self.method.personal)
        validates = self.server.scoring and self.settings.protocol.validation > 0
        training = {client.id for client in participants if train}
        self._requests = {}
        for client in self.server.clients:
            if client.id not in training and client.id not in duties and not validates:
                continue
            self._requests[client.id] = Request(
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
                attempt=self.attempt,
                own=self.counted.get(client.id),
            )
        self._asked_to_train = sum(request.train for request in self._requests.values())
        return dict(self._requests)

    def closing(self, enough: int) -> Closing | None:
        """Return when the current exchange closes before all clients have replied; ``None`` if it waits for all.

        Args:
            enough: updates after which it closes; 0 if clients are only asked to score.
        """
        if not 0 < enough < self._asked_to_train:
            return None
        scoring = frozenset(client for client, request in self._requests.items() if request.score)
        return Closing(enough, scoring, self.server.round, self.settings.seed)

    # ---- replies -----------------------------------------------------------------------------------------------------

    def close(self, state: GlobalState, replies: Sequence[Reply], enough: int = 0) -> Outcome:
        """Check an exchange's replies and aggregate them. Every engine and Flower's own server aggregate through it.

        The gate accepts or refuses each reply. The filters change accepted updates; by default there is none, so that
        every accepted update counts unchanged, with the method's weighting. If as many updates came as :meth:`needed`
        says, they are aggregated. Filters remember the exchange even if too few came.

        Args:
            state: the state that :meth:`message` was made from.
            replies: the replies that arrived, in any order.
            enough: updates after which the exchange was closed (``rounds.oversample``); 0 if it waited for all,
                or if no client was asked to train.
        """
        # Sort the replies into accepted and refused ones.
        admitted: list[Reply] = []
        updates: list[Update] = []
        refused: list[tuple[str, str]] = []
        for reply in sorted(replies, key=lambda item: item.client):
            try:
                update = self.admit(reply.client, reply.answer, reply.payload)
            except PayloadError as error:
                refused.append((reply.client, str(error)))
                continue
            admitted.append(reply)
            if update is not None:
                updates.append(update)

        # Filter the accepted updates.
        updates, scaled, scaled_why = self._filter(updates, state)

        # Aggregate them, if there are enough.
        needed, by = 0, ""
        asked = min(self._asked_to_train, enough) if enough else self._asked_to_train
        if asked:
            needed, by = self.needed(asked)
        counted = dict(self.counted)
        if needed and len(updates) >= needed:
            specs = tensor_specs(state.weights)
            with seeded_globals(self.settings.seed, "server", self.server.round, self.server.exchange, "aggregate"):
                state = self.method.aggregate(state, updates, self.server)
            if tensor_specs(state.weights) != specs:
                raise ConfigError(f"{self.method.name}.aggregate returned weights of other names, dtypes or shapes")
            tied = {name: state.weights[self._first.get(name, name)] for name in state.weights}
            state = replace(state, weights=tied)
            keeping = {update.client.id for update in updates}
            keeping &= {reply.client for reply in admitted if reply.answer.kept}
            made = OwnVersion(round=self.server.round, exchange=self.server.exchange, attempt=self.attempt)
            counted |= dict.fromkeys(keeping, made)
        return Outcome(state, admitted, updates, refused, scaled, needed, by, counted, scaled_why)

    def _filter(self, updates: list[Update], state: GlobalState) -> tuple[list[Update], Factors, dict[str, list[str]]]:
        """Return the updates as the filters return them; by client id, the product of each part's factors; and why.

        Raises:
            ConfigError: a filter did not return the updates of the clients that it was given.
        """
        scaled: Factors = {}
        why: dict[str, list[str]] = {}
        for place, applied in enumerate(self.filters):
            with seeded_globals(self.settings.seed, "filter", place, self.server.round, self.server.exchange):
                filtered = applied.apply(updates, state, self.method.expects(self.server), self.server)
            _check_same_clients(applied, updates, filtered.updates)
            updates = filtered.updates
            for client, factors in filtered.scaled.items():
                product = scaled.setdefault(client, {})
                for part, factor in factors.items():
                    product[part] = product.get(part, 1.0) * factor
                why.setdefault(client, []).append(filtered.why)
        return updates, scaled, why

    def needed(self, asked: int) -> tuple[int, str]:
        """Return how many of ``asked`` participants must have replied for an exchange to count, and the setting's name.

        Args:
            asked: clients that were asked to train, >= 1.
        """
        quorum = max(1, math.ceil(self.settings.rounds.quorum * asked - 1e-9))  # 0.55 * 100 is above 55
        needs = {"rounds.quorum": quorum, "aggregation": self.settings.aggregation.min_answers}
        if self.settings.rounds.outliers != "off":
            needs["rounds.outliers"] = least_answers(self.settings)
        by = max(needs, key=needs.__getitem__)
        return needs[by], by

    def admit(self, client: str, answer: Answer, payload: Payload) -> Update | None:
        """Check a client's answer; return its update, or ``None`` if it was only asked for scores.

        Raises:
            PayloadError: the client was not asked or has answered already, or its answer does not pass the gate.
        """
        request = self._requests.get(client)
        if request is None:
            raise PayloadError(f"{client} was not asked in round {self.server.round}")
        if client in self._answered:
            raise PayloadError(f"{client} has answered already in round {self.server.round}")
        if self._gate is None:
            self._gate = Gate(
                self.method.expects(self.server),
                self.server,
                self._asked_to_train,
                sum_ranges=self._sum_ranges,
                confidence=self.settings.rounds.scores,
            )
        if self.settings.rounds.transport != "float32":
            payload = self.answer_store.keep(cast_up(payload, self.settings.rounds.transport))
        update = self._gate.admit(request, answer, payload, self._clients[client])
        if update is not None:
            self.method.inspect(update, self.server)
        self._check_counts(answer)
        self._answered.add(client)
        return update

    def _check_counts(self, answer: Answer) -> None:
        """Check that scores count as many images as when the client first scored the domain, and as ``rounds`` allows.

        Raises:
            PayloadError: a count differs, or exceeds the limit.
        """
        limit = self.settings.rounds.test_samples or self.settings.rounds.max_samples
        counts: dict[tuple[str, str], int] = {}
        for entry in answer.scores:
            domain, count = entry["domain"], entry["count"]
            known = self.test_counts.get((answer.client, domain), count)
            if count != known:
                raise PayloadError(
                    f"the score on {domain} is over {count} test images; earlier ones were over {known}: restore the "
                    "images, or end the run and go on with resume=anyway"
                )
            if count > limit:
                raise PayloadError(f"the score on {domain} is over {count} test images; at most {limit} are accepted")
            counts[answer.client, domain] = count
        self.test_counts |= counts
        registered = self.registry.registrations[answer.client].validation
        if answer.validation is not None and answer.validation["count"] != registered:
            count = answer.validation["count"]
            raise PayloadError(f"the validation counts {count} images; {registered} were registered")
        metric = self.settings.rounds.metric
        if answer.validation is not None and metric in COUNTED:
            entry = answer.validation
            if not counts_fit(entry.get("confusion"), self.server.class_count, entry["count"], entry["correct"]):
                raise PayloadError(
                    "the validation score's confusion counts are missing or contradict its numbers of images and "
                    f"correct ones; rounds.metric={metric} is computed from them"
                )

    def memory(self) -> dict[str, Tensor]:
        """Return what the filters remember from one exchange to the next; a checkpoint must keep it."""
        memory: dict[str, Tensor] = {}
        for applied in self.filters:
            memory |= applied.memory()
        return memory

    def remember(self, memory: Mapping[str, Tensor]) -> None:
        """Continue with the memory of a checkpoint, see :meth:`memory`."""
        for applied in self.filters:
            applied.remember(memory)


def check_combination(settings: RunSettings, model: nn.Module, client_count: int) -> None:
    """Check that the method can be combined with the run's other settings.

    Args:
        settings: the run's settings.
        model: its model, extended.
        client_count: number of clients of the run.

    Raises:
        ConfigError: the method cannot be combined with the aggregation rule, a filter, the network or privacy.
    """
    method: Method = settings.method
    settings.aggregation.check(method.name, method.averages, settings.rounds.sampled(client_count))
    check_bounds(settings, client_count)
    method.check(settings)
    _check_kept_part(method, model)
    check_request(UNKNOWN, settings, model, client_count)


def _check_kept_part(method: Method, model: nn.Module) -> None:
    """Check that clients keep a part of the network if the method says so, and only then.

    Raises:
        ConfigError: a personal method shares every tensor of the network, or another keeps one that is scored.
    """
    shared = set(method.shared_names(model))
    kept = [name for name in model.state_dict() if name not in shared]
    scored = [name for name in kept if name.startswith(("backbone.", "head."))]
    if scored and not method.personal:
        raise ConfigError(
            f"method={method.name}: shared_names leaves {some_of(scored, 3)} on each client, so there is no one model "
            "to score: let personal return True (each client's own model is scored, at home), or share them"
        )
    if not kept and method.personal and type(method).shared_names is not Method.shared_names:
        raise ConfigError(
            f"method={method.name}: each client keeps a part of the network, and this network has no such part, so the "
            "result would be that of one model for all; set model.norm=batch if the part is batch normalisation, or "
            "method=fedavg"
        )


def _check_same_clients(applied: Filter, given: Sequence[Update], returned: Sequence[Update]) -> None:
    """Refuse a filter that leaves an update out: the record would say that the client's update counted.

    Raises:
        ConfigError: the updates are not those of the same clients, in the same order.
    """
    before = [update.client.id for update in given]
    after = [update.client.id for update in returned]
    if before != after:
        raise ConfigError(
            f"the filter {type(applied).__name__} was given the updates of {some_of(before, 5)}, and returned those of "
            f"{some_of(after, 5) or 'no client'}: return every update, in the same order; what clients were sent, in "
            "place of an update, leaves it without effect"
        )
