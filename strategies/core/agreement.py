"""Which updates work against the others: such an update is left out of the exchange (``rounds.opposing=refuse``).

A bound on the length (:mod:`strategies.core.bounds`) does not stop a client that pushes the model in a harmful
direction in every round, with updates of an ordinary length. This guard compares directions. Updates of clients of
different domains are nearly orthogonal: honest clients have a cosine of about 0 to the sum of the others. A client that
harms the model in every round is answered by the others, which undo the harm, and so its cosine becomes clearly
negative. Four tests find this:

- the cosine to the sum of the others' directions is below :data:`OPPOSED`;
- its average over the exchanges, which falls fast and recovers slowly, is below :data:`SUSPECT`;
- the cosine to the client's own earlier directions is below :data:`REVERSED`, and below the median client's by
  :data:`MARGIN`: a client that turns around;
- this cosine is above :data:`PERSISTENT`, and above the median client's by :data:`MARGIN`: a client that pushes in the
  same direction in every round, also when the others undo it.

The client with the lowest cosine is left out first and the others are compared again without it, so that one hostile
client cannot make honest ones look opposed. Less than half of the clients are left out. Clients that send nearly the
same direction do not vouch for each other.

SCAFFOLD, FCCL+ and FDSE turn the steps of honest clients against each other by design; there no directions are
compared.

Directions are compared in a sketch of :data:`SKETCH` numbers (Charikar et al., "Finding Frequent Items in Data
Streams", 2002), because those of earlier exchanges must be kept for each client. The sketch depends on the run's seed.
A client that knows the seed can make a direction that the sketch does not see; its length is bounded all the same.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from common.numerics import generator
from common.storage import GlobalState
from strategies.core.context import ServerContext
from strategies.core.exchange import Update

MIN_UPDATES = 3
"""Fewest updates that are compared. Of two, none is with the majority."""

MAX_UPDATES = 256
"""Most updates that are compared. In a larger exchange the bound on the length alone keeps a client's weight small."""

OPPOSED = -0.2
"""Cosine to the others below which an update is left out. Honest clients of the bundled data sets stay above -0.1."""

SUSPECT = -0.1
"""Remembered cosine below which an update is left out."""

REVERSED, PERSISTENT = -0.2, 0.7
"""Range of the cosine to the client's own earlier directions outside which an update is left out."""

MARGIN = 0.3
"""How far this cosine must also be from the median client's. Where the server overshoots, all clients turn around;
where steps are small, all keep their direction."""

FALL, RECOVERY = 0.5, 0.9
"""Share of the remembered cosine that stays when the new one is lower, and when it is higher."""

FADING = 0.5
"""Share of a client's remembered direction that stays when the next one is added."""

SAME = 0.5
"""Cosine above which two clients send the same direction and do not count in each other's comparison."""

SKETCH = 4096
"""Numbers of a direction's sketch. A cosine is exact to about 1 / 64."""

MAX_REMEMBERED = 2048
"""Clients that are remembered, 16 KiB each; those that took part longest ago are forgotten first."""

BLOCK = 256 * SKETCH
"""Numbers of an update that are summed into the sketch at a time."""


@dataclass(frozen=True)
class Opposition:
    """Why an update is left out.

    Args:
        others: cosine between the update and the sum of the others', in [-1, 1].
        remembered: the average of this cosine over the exchanges so far.
        own: cosine between the update and the client's own earlier ones; 0 if there was none.
    """

    others: float
    remembered: float
    own: float

    def __str__(self) -> str:
        return (
            f"its update works against the other clients': cosine {self.others:.2f} to theirs, {self.remembered:.2f} "
            f"on average over the rounds, {self.own:.2f} to its own earlier ones (rounds.opposing=refuse)"
        )


@dataclass
class Agreement:
    """Finds updates that work against the others, and remembers what clients did in earlier exchanges.

    Args:
        seed: the run's seed, which the sketch is drawn from.
        memory: ``<exchange>/clients [M]`` int64, the indices of the M clients that took part, the latest last; of each
            ``<exchange>/cosines [M]`` and ``<exchange>/directions [M, SKETCH]``, float32. A checkpoint must keep them.
    """

    seed: int
    memory: dict[str, Tensor] = field(default_factory=dict)

    def find(self, updates: Sequence[Update], state: GlobalState, server: ServerContext) -> dict[str, Opposition]:
        """Return the updates to leave out, by client id, and remember this exchange.

        Args:
            updates: of all participants that passed the gate.
            state: the state that the participants were sent.
            server: names of the parameters, and the exchange's name.
        """
        names = [name for name in server.shared if name in server.parameters]
        if not names or not MIN_UPDATES <= len(updates) <= MAX_UPDATES or not updates[0].weights:
            return {}
        directions = torch.stack([self._direction(update, state, names) for update in updates])
        cosines = directions @ directions.T
        self._recall([update.client.index for update in updates], server.exchange)
        before = self.memory[f"{server.exchange}/cosines"][-len(updates) :]
        own = _own_cosines(directions, self.memory[f"{server.exchange}/directions"][-len(updates) :])
        middle = statistics.median(own)
        lowest, highest = min(REVERSED, middle - MARGIN), max(PERSISTENT, middle + MARGIN)
        kept = list(range(len(updates)))
        while len(kept) - 1 > len(updates) / 2:
            opposed: list[tuple[float, int]] = []
            for position in kept:
                cosine = _cosine_to_others(cosines, position, kept)
                remembered = _remember(float(before[position]), cosine)
                against_others = cosine < OPPOSED or remembered < SUSPECT
                unlike_itself = not lowest <= own[position] <= highest
                if against_others or unlike_itself:
                    opposed.append((cosine, position))
            if not opposed:
                break
            kept.remove(min(opposed)[1])
        found: dict[str, Opposition] = {}
        for position, update in enumerate(updates):
            cosine = _cosine_to_others(cosines, position, kept)
            remembered = _remember(float(before[position]), cosine)
            before[position] = remembered
            if position not in kept:
                found[update.client.id] = Opposition(cosine, remembered, own[position])
        return found

    def _direction(self, update: Update, state: GlobalState, names: Sequence[str]) -> Tensor:
        """Return ``[SKETCH]`` float64 of length 1: the sketch of the update's step; zeros if it did not move.

        Every number of the step is added to one of the sketch's with a random sign, so that inner products are kept
        on average.
        """
        signs = generator(self.seed, "agreement")
        sketch = torch.zeros(SKETCH, dtype=torch.float64)
        for name in names:
            step = (update.weights[name] - state.weights[name]).flatten().cpu()
            for block in step.split(BLOCK):
                padded = torch.zeros(math.ceil(len(block) / SKETCH) * SKETCH)
                padded[: len(block)] = block
                padded *= 2 * torch.randint(2, padded.shape, generator=signs, dtype=torch.int8) - 1
                sketch += padded.view(-1, SKETCH).sum(0, dtype=torch.float64)
        return sketch / torch.linalg.vector_norm(sketch).clamp_min(1e-30)

    def _recall(self, clients: Sequence[int], exchange: str) -> None:
        """Move what is remembered of ``clients`` to the end of the memory, in this order; zeros for new clients."""
        known: list[int] = []
        cosines, directions = torch.zeros(0), torch.zeros(0, SKETCH)
        if f"{exchange}/clients" in self.memory:
            known = self.memory[f"{exchange}/clients"].tolist()
            cosines, directions = self.memory[f"{exchange}/cosines"], self.memory[f"{exchange}/directions"]
        present = set(clients)
        rows: dict[int, int] = {}
        others: list[int] = []
        for row, client in enumerate(known):
            rows[client] = row
            if client not in present:
                others.append(row)
        others = others[max(0, len(others) + len(clients) - MAX_REMEMBERED) :]
        kept = len(others)
        order = [known[row] for row in others]
        order.extend(clients)
        new_cosines = torch.zeros(kept + len(clients))
        new_directions = torch.zeros(kept + len(clients), SKETCH)
        new_cosines[:kept] = cosines[others]
        new_directions[:kept] = directions[others]
        for position, client in enumerate(clients):
            if client in rows:
                new_cosines[kept + position] = cosines[rows[client]]
                new_directions[kept + position] = directions[rows[client]]
        self.memory[f"{exchange}/clients"] = torch.tensor(order)
        self.memory[f"{exchange}/cosines"] = new_cosines
        self.memory[f"{exchange}/directions"] = new_directions


def _own_cosines(directions: Tensor, past: Tensor) -> list[float]:
    """Return the cosine of each direction to the client's earlier ones, and add it to them.

    Args:
        directions: float64 ``[clients, SKETCH]``.
        past: float32 of the same shape; changed in place.
    """
    cosines: list[float] = []
    for row, direction in enumerate(directions):
        earlier = past[row].double()
        length = torch.linalg.vector_norm(earlier).clamp_min(1e-30)
        cosines.append(float(earlier @ direction / length))
        past[row] = FADING * earlier + direction
    return cosines


def _cosine_to_others(cosines: Tensor, position: int, kept: Sequence[int]) -> float:
    """Return the cosine between a direction and the sum of the ``kept`` others that do not send the same one."""
    others: list[int] = []
    for other in kept:
        if other != position and float(cosines[position, other]) < SAME:
            others.append(other)
    if not others:
        return 0.0
    length = math.sqrt(max(0.0, float(cosines[others][:, others].sum())))
    return float(cosines[position, others].sum()) / max(length, 1e-12)


def _remember(before: float, cosine: float) -> float:
    stays = RECOVERY
    if cosine < before:
        stays = FALL
    return stays * before + (1 - stays) * cosine
