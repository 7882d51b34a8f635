"""The server's side of a federation, whatever carries the messages: who is there, what is asked, what is let in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from common.errors import PayloadError
from common.seeding import generator
from common.settings import RunSettings, TrainSettings
from common.storage.state import GlobalState
from common.wire.cast import cast_down, cast_up
from common.wire.messages import Answer, Request
from common.wire.payload import Payload
from strategies.core.aggregation import Mean
from strategies.core.gate import Gate
from strategies.core.method import Client, Method, Update, feature_size
from strategies.core.outliers import outliers
from strategies.core.protection import check_protects
from strategies.core.registry import Registry


@dataclass
class ServerSide:
    """Implements :class:`strategies.core.method.Server`."""

    rounds: int
    class_count: int
    feature_size: int
    client_count: int
    clients: Sequence[Client]
    train: TrainSettings
    device: torch.device
    shared: Mapping[str, Tensor]
    parameters: frozenset[str]
    aggregation: Mean
    seed: int
    new_model: Callable[[], nn.Module]
    round: int = 0
    exchange: str = "train"

    def generator(self, *purpose: str | int) -> torch.Generator:
        """Random numbers keyed by (seed, purpose, round)."""
        return generator(self.seed, "server", *purpose, self.round)


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
        self._requests: dict[str, Request] = {}
        self._answered: set[str] = set()
        self._clients: dict[str, Client] = {}
        settings.aggregation.check(
            self.method.name, self.method.averages, settings.rounds.sampled(len(self.registry.expected))
        )
        check_protects(settings.privacy, self.method, self._model(), self.method.expects(self.server))

    def _server_side(self) -> ServerSide:
        data = self.settings.data
        model = self._model()
        names = self.method.shared_names(model)
        return ServerSide(
            rounds=self.settings.train.rounds,
            class_count=data.class_count,
            feature_size=feature_size(model),
            client_count=len(self.registry.expected),
            clients=(),
            train=self.settings.train,
            device=torch.device("cpu"),
            shared={name: tensor.clone() for name, tensor in model.state_dict().items() if name in names},
            parameters=frozenset(name for name, _ in model.named_parameters() if name in names),
            aggregation=self.settings.aggregation,
            seed=self.settings.seed,
            new_model=self._model,
        )

    def _model(self) -> nn.Module:
        """The run's model with its initial weights, a pure function of the settings and the seed."""
        data, seed = self.settings.data, self.settings.seed
        built = self.settings.model.build(data.class_count, data.image_size, seed)
        return self.method.extend(built, len(self.registry.expected), seed)

    def initial_state(self) -> GlobalState:
        """The global state before the first round, a pure function of the settings and the seed."""
        return self.method.initial_state(self.server.shared, self.server)

    def begin(self, round_number: int, exchange: str) -> None:
        """Turn to an exchange; answers to earlier ones are stale from here on."""
        self.server.clients = self.registry.clients()
        self.server.round, self.server.exchange = round_number, exchange
        self._clients = {client.id: client for client in self.server.clients}
        self.server.aggregation = self.settings.aggregation
        self._requests, self._answered = {}, set()

    def message(self, state: GlobalState) -> Payload:
        """The tensors every participant of the present exchange is sent."""
        download = self.method.download(state, self.server)
        message = Payload({}, download.weights, download.prototypes, download.extra)
        return cast_down(message, self.settings.rounds.transport)

    def requests(
        self, run: str, participants: Sequence[Client], *, score: bool, train: bool = True
    ) -> dict[str, Request]:
        """What each client is asked in the present exchange, by client id."""
        duties = self.registry.scorers(participants, personal=self.method.personal) if score else {}
        training = {client.id for client in participants} if train else set()
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
            )
            for client in self.server.clients
            if client.id in training or client.id in duties
        }
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
        gate = Gate(self.method.expects(self.server), self.server)
        payload = cast_up(payload, self.settings.rounds.transport)
        update = gate.admit(request, answer, payload, registered)
        if update is not None:
            self.method.inspect(update, self.server)
        self._answered.add(client)
        return update

    def outliers(self, state: GlobalState, updates: Sequence[Update]) -> dict[str, str]:
        """Why some of the admitted updates of an exchange must be left out after all, by client id.

        Args:
            state: what :meth:`message` was made from.
            updates: all that were admitted.
        """
        factor = self.settings.rounds.outlier_factor
        if factor is None:
            return {}
        return outliers(updates, state, self.method.expects(self.server), self.server, factor)

    def refused(self, count: int, admitted: int) -> None:
        """Tell the aggregation rule how many answers of the exchange were refused, for whatever reason, and let in."""
        self.server.aggregation = self.settings.aggregation.knowing(count, admitted)

    def needed(self, asked: int) -> tuple[int, str]:
        """How many of ``asked`` participants must have answered for an exchange to count, >= 1, and who says so."""
        quorum, least = math.ceil(self.settings.rounds.quorum * asked), self.server.aggregation.least
        return (quorum, "rounds.quorum") if quorum >= least else (least, "aggregation")
