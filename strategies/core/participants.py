"""Clients of a federation: which may register, which take part in a round, and which score which domain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from common.errors import some_of
from common.numerics import generator
from common.settings import RunSettings
from common.versions import code_files, differing
from common.wire.messages import Registration
from strategies.core.method import Client

DATA_FIELDS = ("samples", "class_counts", "validation", "split", "content")
"""Fields of a registration that say which samples the client has; they stay equal over a run."""

_MAX_NAMED = 5
"""Largest number of files that a refusal names."""


@dataclass
class Registry:
    """The clients that the protocol names, and what each of them registered.

    Args:
        settings: the run's settings.
        registrations: each client's registration, by client id.

    Attributes:
        expected: ids of the protocol's clients, ascending.
        test_domains: the domains that are scored.
        key: what participants are drawn from (``rounds.key``); the seed unless it is replaced.
        silent: ids of clients that did not reply when they were asked last.
    """

    settings: RunSettings
    registrations: dict[str, Registration] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._clients: list[Client] | None = None
        self._domains: dict[str, str] = {}
        for spec in self.settings.clients:
            self._domains[spec.id] = spec.domain
        self.expected: list[str] = sorted(self._domains)
        self.test_domains: list[str] = list(self.settings.protocol.test_domains(self.settings.data))
        self.silent: set[str] = set()
        self.key = self.settings.seed if self.settings.rounds.key is None else self.settings.rounds.key

    @property
    def missing(self) -> list[str]:
        """Expected clients that have not registered."""
        return [client for client in self.expected if client not in self.registrations]

    # ---- registration ------------------------------------------------------------------------------------------------

    def admit(self, registration: Registration) -> str | None:
        """Register a client.

        Returns:
            Why the client cannot belong to this run; ``None`` if it is registered.
        """
        reason = self._wrong_run(registration) or self._wrong_data(registration)
        if reason:
            return reason
        other = self._other_data(registration)
        if other:
            return (
                f"client {registration.client} is registered already, with other data ({', '.join(other)}): restore "
                "them, or end the run and go on with resume=anyway"
            )
        self.registrations[registration.client] = registration
        self._clients = None
        return None

    def _other_data(self, registration: Registration) -> list[str]:
        """Return which fields of its data differ from those that the client registered before."""
        known = self.registrations.get(registration.client)
        if known is None:
            return []
        return [key for key in DATA_FIELDS if getattr(known, key) not in ("", getattr(registration, key))]

    def _wrong_run(self, registration: Registration) -> str | None:
        """Return how the client's name, code or settings differ from the run's; ``None`` if they do not."""
        if registration.client not in self._domains:
            return f"the protocol has no client {registration.client}; it has {some_of(self.expected)}"
        if registration.code != self.settings.code:
            return f"it runs {code_text(registration, self.settings)}: install {self.settings.software} on both"
        if registration.identity != self.settings.identity:
            return "it was configured with other overrides than the server"
        if registration.domain != self._domains[registration.client]:
            return f"it holds domain {registration.domain}, not {self._domains[registration.client]}"
        return None

    def _wrong_data(self, registration: Registration) -> str | None:
        """Return which of the registered numbers are impossible; ``None`` if all are possible."""
        class_count = self.settings.data.class_count
        samples, counts = registration.samples, registration.class_counts
        if registration.classes != self.settings.data.classes_sha256:
            return "its data number the classes unlike the server's: let settings name them, as data.classes=[a,b] does"
        if len(counts) != class_count or min(counts) < 0:
            return f"it registered classes {counts}; {class_count} exist"
        if sum(counts) != samples or samples < 2:
            return f"it registered {samples} samples in classes {counts}"
        if samples > self.settings.rounds.max_samples:
            return (
                f"it registered {samples} samples; rounds.max_samples={self.settings.rounds.max_samples} is the limit"
            )
        share = self.settings.protocol.validation
        lowest, highest = 0.0, 0.0
        if share:
            lowest, highest = 1.0, share / (1 - share) * samples + 1
        if not lowest <= registration.validation <= highest:
            return (
                f"it registered {registration.validation} validation samples; "
                f"protocol.validation={share:g} gives {lowest:.0f} to {highest:.0f}"
            )
        return None

    def clients(self) -> list[Client]:
        """Return the registered clients, by id. Indices count all expected clients, so they never change."""
        if self._clients is not None:
            return self._clients
        clients: list[Client] = []
        for index, client in enumerate(self.expected):
            if client not in self.registrations:
                continue
            known = self.registrations[client]
            counts = tuple(known.class_counts)
            clients.append(Client(client, known.domain, known.samples, counts, index, len(self.expected)))
        self._clients = clients
        return clients

    def domain(self, client: str) -> str:
        """Return the domain of an expected client; empty for any other."""
        return self._domains.get(client, "")

    # ---- participation -----------------------------------------------------------------------------------------------

    def sample(self, number: int) -> list[Client]:
        """Return the participants of round ``number``, by id; never empty.

        A share ``rounds.participation`` of the clients is drawn, keyed by :attr:`key` and round.
        """
        clients = self.clients()
        count = self.settings.rounds.asked(len(clients))
        draws = generator(self.key, "participants", number)
        chosen = torch.randperm(len(clients), generator=draws)[:count]
        return [clients[index] for index in sorted(chosen.tolist())]

    def enough(self) -> int:
        """Return how many participants of a round must have replied before its first exchange may close."""
        return self.settings.rounds.sampled(len(self.clients()))

    def scorers(self, participants: Sequence[Client], *, personal: bool) -> dict[str, list[str]]:
        """Return the domains that each client scores, by client id.

        Personal models are scored by each client on its own domain. The global model is scored once on every domain: by
        a participant that holds the domain, else by a participant that can score it, else by any client that can.
        Clients that did not reply last (:meth:`note_replies`) are asked only if no other client can score the domain.

        Args:
            participants: the round's participants.
            personal: whether clients have models of their own.
        """
        duties: dict[str, list[str]] = {}
        if personal:
            for client in participants:
                if self._able([client], client.domain) and client.domain in self.test_domains:
                    duties[client.id] = [client.domain]
            return duties
        for domain in self.test_domains:
            able = self._able(participants, domain)
            if self.silent.issuperset(client.id for client in able):
                able += self._able(self.clients(), domain)
            if not able:
                continue

            def preference(client: Client, domain: str = domain) -> tuple[bool, bool, int, str]:
                others = client.domain != domain
                return client.id in self.silent, others, len(duties.get(client.id, [])), client.id

            scorer = min(able, key=preference)
            duties.setdefault(scorer.id, []).append(domain)
        return duties

    def note_replies(self, replied: Iterable[str], lost: Iterable[str]) -> None:
        """Remember which clients did not reply in time when they were asked last; others are asked to score.

        Args:
            replied: clients with a reply, by id.
            lost: clients that were asked and did not reply.
        """
        self.silent.difference_update(replied)
        self.silent.update(lost)

    def _able(self, clients: Sequence[Client], domain: str) -> list[Client]:
        """Return the clients that can score a domain."""
        return [client for client in clients if domain in self.registrations[client.id].scores]


def code_text(registration: Registration, settings: RunSettings) -> str:
    """Return how the code of a client differs from this process's, for messages.

    The files of the user's own packages are not known: a server could name any package, and read what a device has.
    """
    text = f"code {registration.code}, the server {settings.code}"
    if not registration.files:
        return text
    changed = differing(code_files(), registration.files)
    if not changed:
        changed = list(settings.own_packages)
    return f"{text}, which differ in {some_of(changed, _MAX_NAMED)}"
