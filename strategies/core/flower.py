"""The one Flower strategy: requests and answers as FitIns and FitRes, for every method.

``Parameters(tensors=[blob], tensor_type="safetensors")`` carries all tensors of a message in one blob, the same for
every participant, so that Flower's object store keeps one copy. What differs between clients travels as JSON text in
``FitIns.config["request"]``.

:class:`FlowerStrategy` also works in any Flower app of yours::

    ServerAppComponents(strategy=FlowerStrategy(FPL(temperature=0.02)), config=ServerConfig(num_rounds=10))
"""

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

from common.errors import PayloadError
from common.metrics import domain_accuracy
from common.settings import RunSettings, load_settings, with_method
from common.wire.messages import Answer, Registration, Request, printable, read_header, request_text
from common.wire.payload import TENSOR_TYPE, Payload, decode, encode
from strategies.core.codec import only_blob, read_registrations, read_request, write_registrations
from strategies.core.federation import Federation, Reply
from strategies.core.method import Method

MAX_WORDS = 2_000
"""Characters of a client's words that are logged."""


def request_to_fit_ins(blob: bytes, request: Request) -> FitIns:
    """A request and its tensors as Flower carries them."""
    return FitIns(Parameters([blob], TENSOR_TYPE), {"request": request_text(request)})


def fit_ins_to_request(instruction: FitIns) -> tuple[Request, Payload]:
    """Inverse of :func:`request_to_fit_ins`.

    Raises:
        PayloadError: the instruction was not made by Goldfinch, or its blob is not good.
    """
    parameters = instruction.parameters
    return read_request(instruction.config.get("request"), parameters.tensor_type, parameters.tensors)


def answer_to_fit_res(payload: Payload) -> FitRes:
    """A client's answer as Flower carries it."""
    answer = read_header(Answer, payload.header)
    return FitRes(Status(Code.OK, ""), Parameters([encode(payload)], TENSOR_TYPE), answer.samples, {})


def fit_res_to_answer(result: FitRes) -> tuple[Answer, Payload, int]:
    """The answer in ``result``, its tensors, and its bytes.

    Raises:
        PayloadError: the blob is not good.
    """
    blob = only_blob(result.parameters.tensor_type, result.parameters.tensors)
    payload = decode(blob)
    return read_header(Answer, payload.header), payload, len(blob)


def registrations_to_properties(registrations: Sequence[Registration]) -> GetPropertiesRes:
    """The registrations of the clients that a node hosts, as Flower carries them."""
    return GetPropertiesRes(Status(Code.OK, ""), {"registrations": write_registrations(registrations)})


def properties_to_registrations(result: GetPropertiesRes) -> list[Registration]:
    """The clients that a node hosts: one in a deployment, several where a simulation has fewer nodes than clients.

    Raises:
        PayloadError: it does not answer as a Goldfinch client; the message holds its own words.
    """
    text = result.properties.get("registrations")
    if result.status.code != Code.OK or not isinstance(text, str):
        raise PayloadError(result.status.message or "the node does not answer as a Goldfinch client")
    return read_registrations(text)


def _shown(words: object) -> str:
    """A stranger's words as they may stand in a log."""
    return printable(str(words)[:MAX_WORDS])


FitResults = list[tuple[ClientProxy, FitRes]]
FitFailures = list[tuple[ClientProxy, FitRes] | BaseException]


class FlowerStrategy(Strategy):
    """A method as a Flower strategy. One Flower round is one exchange of the method.

    With Flower's own ``Server`` it stands alone: nodes register in the first round, every node takes part in every
    round, updates are checked and aggregated, and the devices' scores appear as Flower's fit metrics. A round that
    misses its quorum in one exchange is over: its further exchanges ask nobody, and the state is the one before it.
    Goldfinch's round loop adds sampling, deadlines, checkpoints and history, and uses this module's encoding.

    Args:
        method: the method.
        settings: data, model, training and seed; the defaults of ``conf/`` if left out. Nodes must run with the same.
        run: id under which nodes keep their own state.
    """

    def __init__(self, method: Method, settings: RunSettings | None = None, run: str = "flower") -> None:
        settings = with_method(settings or load_settings(), method)
        self.federation = Federation(settings)
        self.settings, self.run = settings, run
        self.state = self.federation.initial_state()
        self._nodes: dict[str, str] = {}
        self._before = self.state
        self._participants: set[str] = set()

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters | None:  # noqa: ARG002
        """The initial shared state, made from the seed."""
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
        """A request to every registered node; new nodes register first."""
        proxies = client_manager.all()
        for node in sorted(set(proxies) - set(self._nodes.values())):
            self._register(node, proxies)
        exchanges = self.settings.method.exchanges
        logical_round, step = divmod(server_round - 1, len(exchanges))
        self.federation.begin(
            logical_round + 1, exchanges[step], score=exchanges[step] == self.settings.method.scored_at
        )
        if step == 0:
            self._before, self._participants = self.state, set(self._nodes)
        participants = [
            client
            for client in self.federation.registry.clients()
            if client.id in self._participants and self._nodes[client.id] in proxies
        ]
        if not participants:
            return []
        blob = encode(self.federation.message(self.state))
        requests = self.federation.requests(self.run, participants)
        return [
            (proxies[self._nodes[client]], request_to_fit_ins(blob, request)) for client, request in requests.items()
        ]

    def _register(self, node: str, present: Mapping[str, ClientProxy]) -> None:
        try:
            result = present[node].get_properties(GetPropertiesIns({}), timeout=None, group_id=None)
            registrations = properties_to_registrations(result)
        except (PayloadError, ValueError) as error:
            log(WARNING, "node %s was not admitted: %s", node, _shown(error))
            return
        for registration in registrations:
            other = self._nodes.get(registration.client, node)
            taken = f"nodes {other} and {node} both claim to be it" if other != node and other in present else ""
            reason = taken or self.federation.registry.admit(registration)
            if reason:
                log(WARNING, "client %s was not admitted: %s", registration.client, _shown(reason))
            else:
                self._nodes[registration.client] = node

    def aggregate_fit(
        self, server_round: int, results: FitResults, failures: FitFailures
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Check every answer, aggregate those that pass, and report the devices' scores."""
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
        closed = self.federation.close(self.state, arrived, len(unread))
        for sender, reason in unread + closed.refused:
            log(WARNING, "round %s: the answer of %s is refused: %s", server_round, _shown(sender), _shown(reason))
        for client, reason in closed.reductions().items():
            log(WARNING, "round %s: the update of %s: %s", server_round, client, reason)
        if failures:
            log(WARNING, "round %s: %s clients failed", server_round, len(failures))
        server = self.federation.server
        if closed.skipped:
            answered = len(closed.updates)
            log(WARNING, "round %s: %s updates, %s needs %s: skipped", server_round, answered, closed.by, closed.needed)
            self.state, self._participants = replace(self._before, round=server.round), set()
        else:
            last = server.exchange == self.settings.method.exchanges[-1]
            self.state = replace(closed.state, round=server.round) if last else closed.state
            self._participants = {update.client.id for update in closed.updates}
        scores = [
            (entry["domain"], entry["correct"], entry["count"])
            for arrival in closed.admitted
            for entry in arrival.answer.scores
        ]
        accuracy = domain_accuracy(scores) if scores else {}
        log(INFO, "round %s: accuracy %s", server_round, accuracy)
        missing = sorted(set(self.settings.test_scorers) - set(accuracy))
        if missing and server.scoring and self.settings.rounds.test:
            log(WARNING, "round %s: the accuracy is partial, without %s", server_round, ", ".join(missing))
        return self._parameters(), {f"accuracy {domain}": value for domain, value in accuracy.items()}

    def configure_evaluate(self, *_: object, **__: object) -> list[tuple[ClientProxy, EvaluateIns]]:
        """Nothing: devices score what they receive in the same trip that trains."""
        return []

    def aggregate_evaluate(self, *_: object, **__: object) -> tuple[float | None, dict[str, Scalar]]:
        """Nothing; see :meth:`configure_evaluate`."""
        return None, {}

    def evaluate(self, server_round: int, parameters: Parameters) -> tuple[float, dict[str, Scalar]] | None:  # noqa: ARG002
        """Nothing: the server holds no data."""
        return None
