"""The Flower strategy that runs any method, with requests and answers as FitIns and FitRes.

``Parameters(tensors=[blob], tensor_type="safetensors")`` carries all tensors of a message in one blob, the same for
every participant, so that Flower's object store keeps one copy. The parts that differ between clients are JSON text in
``FitIns.config["request"]``.

:class:`FlowerStrategy` also works in any Flower app of yours::

    ServerAppComponents(strategy=FlowerStrategy(FPL(temperature=0.02)), config=ServerConfig(num_rounds=10))
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from logging import INFO, WARNING

from flwr.common import (
    Code,
    EvaluateIns,
    FitIns,
    FitRes,
    GetPropertiesIns,
    GetPropertiesRes,
    Parameters,
    Scalar,
    Status,
)
from flwr.common.logger import log
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import Strategy

from common.errors import DIVERGED, ConfigError, PayloadError
from common.metrics import domain_accuracy
from common.settings import RunSettings, load_settings, with_method
from common.text import printable
from common.wire.messages import Answer, Registration, Request, read_header, request_text
from common.wire.payload import TENSOR_TYPE, Payload, decode, encode
from strategies.core.codec import only_blob, read_registrations, read_request, write_registrations
from strategies.core.federation import Federation, Reply
from strategies.core.method import Client, Method

OK_METRICS: Mapping[str, Scalar] = {"code": Code.OK.value, "message": ""}
"""Metrics of a reply: equal to the record in which Flower sends an OK status.

Equal records are one object of Flower's object store, so a reply is seven objects instead of eight.
"""

MAX_LOGGED = 2_000
"""Most characters of a client's text that are logged."""


def request_to_fit_ins(blob: bytes, request: Request) -> FitIns:
    """Return a request and its tensors as Flower's instruction."""
    return FitIns(Parameters([blob], TENSOR_TYPE), {"request": request_text(request)})


def fit_ins_to_request(instruction: FitIns) -> tuple[Request, Payload]:
    """Return the request and its tensors, the inverse of :func:`request_to_fit_ins`.

    Raises:
        PayloadError: the instruction was not made by Goldfinch, or its blob is not valid.
    """
    parameters = instruction.parameters
    return read_request(instruction.config.get("request"), parameters.tensor_type, parameters.tensors)


def answer_to_fit_res(payload: Payload) -> FitRes:
    """Return a client's answer as Flower's result."""
    answer = read_header(Answer, payload.header)
    parameters = Parameters([encode(payload)], TENSOR_TYPE)
    return FitRes(Status(Code.OK, ""), parameters, answer.samples, {**OK_METRICS})


def fit_res_to_answer(result: FitRes) -> tuple[Answer, Payload, int]:
    """Return the answer in ``result``, its tensors, and its size in bytes.

    Raises:
        PayloadError: the blob is not valid.
    """
    blob = only_blob(result.parameters.tensor_type, result.parameters.tensors)
    payload = decode(blob)
    return read_header(Answer, payload.header), payload, len(blob)


def registrations_to_properties(registrations: Sequence[Registration]) -> GetPropertiesRes:
    """Return the registrations of the clients that a node hosts, as Flower's result."""
    return GetPropertiesRes(Status(Code.OK, ""), {"registrations": write_registrations(registrations)})


def properties_to_registrations(result: GetPropertiesRes) -> list[Registration]:
    """Return the clients that a node hosts: one in a deployment, several if a simulation has fewer nodes than clients.

    Raises:
        PayloadError: the node does not reply as a Goldfinch client does; the message contains its own message.
    """
    text = result.properties.get("registrations")
    if result.status.code != Code.OK or not isinstance(text, str):
        raise PayloadError(result.status.message or "the node does not answer as a Goldfinch client")
    sent, start = result.properties.get("time"), result.properties.get("start_seconds")
    if not isinstance(sent, float) or not isinstance(start, float):
        return read_registrations(text)
    start, ahead = round(start, 1), round(sent - time.time(), 1)
    return [replace(each, start_seconds=start, clock_ahead=ahead) for each in read_registrations(text)]


def _shown(text: object) -> str:
    """Return a client's text so that it is safe to log: shortened, and with control characters escaped."""
    return printable(str(text)[:MAX_LOGGED])


FitResults = list[tuple[ClientProxy, FitRes]]
FitFailures = list[tuple[ClientProxy, FitRes] | BaseException]


class FlowerStrategy(Strategy):
    """A method as a Flower strategy. One Flower round is one exchange of the method.

    The strategy works with Flower's own ``Server``: nodes register in the first round, every node takes part in every
    round, updates are checked and aggregated, and the devices' scores appear as Flower's fit metrics. If an exchange
    misses its quorum, the round ends: its further exchanges ask no client, and the state of the previous round is kept.
    Goldfinch's own round loop adds sampling, deadlines, checkpoints and history, and uses this module's encoding.

    Args:
        method: the method.
        settings: data, model, training and seed; the defaults of ``conf/`` if left out. Nodes must run with the same.
        run: id under which nodes keep their own state.

    Raises:
        ConfigError: the settings have an attack, or cannot be combined. In a round: it is beyond the schedule of the
            method or of the learning rate, or the state is no longer finite.
    """

    def __init__(self, method: Method, settings: RunSettings | None = None, run: str = "flower") -> None:
        settings = with_method(settings or load_settings(), method)
        if settings.attack.clients:
            raise ConfigError("attack: Flower's own server runs no attack; use goldfinch run, or set attack=none")
        self.federation = Federation(settings)
        self.settings, self.run = settings, run
        self.state = self.federation.initial_state()
        self._nodes: dict[str, str] = {}
        self._before, self._counted_before = self.state, self.federation.counted
        self._participants: set[str] = set()

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters | None:  # noqa: ARG002
        """Return the initial shared state, made from the seed."""
        return self._parameters()

    def _parameters(self) -> Parameters:
        message = self.federation.message(self.state)
        return Parameters([encode(message)], TENSOR_TYPE)

    def configure_fit(
        self,
        server_round: int,
        parameters: Parameters,  # noqa: ARG002  # the state is kept here, with prototypes and extra tensors
        client_manager: ClientManager,
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Return a request to every registered node; new nodes register first."""
        proxies = client_manager.all()
        for node in sorted(set(proxies) - set(self._nodes.values())):
            self._register(node, proxies)
        exchanges = self.settings.method.exchanges
        logical_round, step = divmod(server_round - 1, len(exchanges))
        self._check_schedule(logical_round + 1)
        exchange = exchanges[step]
        self.federation.begin(logical_round + 1, exchange, score=exchange == self.settings.method.scored_at)
        if step == 0:
            self._before, self._participants = self.state, set(self._nodes)
            self._counted_before = self.federation.counted
        participants: list[Client] = []
        for client in self.federation.registry.clients():
            if client.id in self._participants and self._nodes[client.id] in proxies:
                participants.append(client)
        if not participants:
            return []
        blob = encode(self.federation.message(self.state))
        instructions: list[tuple[ClientProxy, FitIns]] = []
        for name, request in self.federation.requests(self.run, participants).items():
            proxy = proxies[self._nodes[name]]
            instructions.append((proxy, request_to_fit_ins(blob, request)))
        return instructions

    def _check_schedule(self, number: int) -> None:
        """Refuse a round beyond the schedule that the method or the learning rate follows."""
        rounds = self.settings.train.rounds
        if self.settings.scheduled and number > rounds:
            raise ConfigError(
                f"round {number}: {self.settings.method.name} follows a schedule over train.rounds={rounds} rounds; "
                "give FlowerStrategy settings with as many rounds as Flower's ServerConfig has (num_rounds, divided by "
                f"{len(self.settings.method.exchanges)}), and the nodes the same"
            )

    def _register(self, node: str, present: Mapping[str, ClientProxy]) -> None:
        try:
            result = present[node].get_properties(
                GetPropertiesIns({"code": self.federation.settings.code}), timeout=None, group_id=None
            )
            registrations = properties_to_registrations(result)
        except Exception as error:  # Flower can raise any type on records of a client that is not ours
            log(WARNING, "node %s was not admitted: %s", node, _shown(error))
            return
        for registration in registrations:
            other = self._nodes.get(registration.client, node)
            reason: str | None
            if other != node and other in present:
                reason = f"nodes {other} and {node} both claim to be it"
            else:
                reason = self.federation.registry.admit(registration)
            if reason:
                log(WARNING, "client %s was not admitted: %s", registration.client, _shown(reason))
            else:
                self._nodes[registration.client] = node

    def aggregate_fit(
        self, server_round: int, results: FitResults, failures: FitFailures
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Check every reply, aggregate those that pass, and report the devices' scores."""
        arrived: list[Reply] = []
        unread: list[tuple[str, str]] = []
        for proxy, result in results:
            try:
                answer, payload, size = fit_res_to_answer(result)
                if self._nodes.get(answer.client) != proxy.cid:
                    raise PayloadError(f"node {proxy.cid} does not host {answer.client}")
                arrived.append(Reply(answer.client, answer, payload, bytes_up=size))
            except PayloadError as error:
                unread.append((f"node {proxy.cid}", str(error)))
        closed = self.federation.close(self.state, arrived)
        for sender, reason in unread + closed.refused:
            log(WARNING, "round %s: the answer of %s is refused: %s", server_round, _shown(sender), _shown(reason))
        for client, reason in closed.scaling_reasons().items():
            log(WARNING, "round %s: the update of %s: %s", server_round, client, reason)
        if failures:
            log(WARNING, "round %s: %s clients failed", server_round, len(failures))
        server = self.federation.server
        if closed.skipped:
            answered = len(closed.updates)
            log(WARNING, "round %s: %s updates, %s needs %s: skipped", server_round, answered, closed.by, closed.needed)
            self.state, self._participants = replace(self._before, round=server.round), set()
            self.federation.counted = self._counted_before
        else:
            self.state, self.federation.counted = closed.state, closed.counted
            if server.exchange == self.settings.method.exchanges[-1]:
                if names := closed.state.not_finite():
                    raise ConfigError(
                        f"the state after round {server.round} has values in {names} that are not finite, made of "
                        f"finite replies: {DIVERGED}"
                    )
                self.state = replace(closed.state, round=server.round)
            self._participants = {update.client.id for update in closed.updates}
        scores: list[tuple[str, int, int]] = []
        for reply in closed.admitted:
            for entry in reply.answer.scores:
                scores.append((entry["domain"], entry["correct"], entry["count"]))
        accuracy: dict[str, float] = {}
        if scores:
            accuracy = domain_accuracy(scores)
        log(INFO, "round %s: accuracy %s", server_round, accuracy)
        missing = sorted(set(self.settings.test_scorers) - set(accuracy))
        if missing and server.scoring and self.settings.rounds.test:
            log(WARNING, "round %s: the accuracy is partial, without %s", server_round, ", ".join(missing))
        return self._parameters(), {f"accuracy {domain}": value for domain, value in accuracy.items()}

    def configure_evaluate(self, *_: object, **__: object) -> list[tuple[ClientProxy, EvaluateIns]]:
        """Return no instructions: devices score the received model in the same exchange in which they train."""
        return []

    def aggregate_evaluate(self, *_: object, **__: object) -> tuple[float | None, dict[str, Scalar]]:
        """Return no scores; see :meth:`configure_evaluate`."""
        return None, {}

    def evaluate(self, server_round: int, parameters: Parameters) -> tuple[float, dict[str, Scalar]] | None:  # noqa: ARG002
        """Return no scores: the server holds no data."""
        return None
