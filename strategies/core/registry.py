"""Clients of a federation: which may register, which take part in a round, and which score which domain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from common.seeding import generator
from common.settings import RunSettings
from common.wire.messages import Registration
from strategies.core.method import Client


@dataclass
class Registry:
    """The clients that the protocol names, and what each of them registered.

    Args:
        settings: the run's settings.
    """

    settings: RunSettings
    registrations: dict[str, Registration] = field(default_factory=dict)

    def __post_init__(self) -> None:
        specs = self.settings.protocol.clients(self.settings.data)
        self.expected: list[str] = sorted(spec.id for spec in specs)
        self._domains = {spec.id: spec.domain for spec in specs}
        self.test_domains: list[str] = list(self.settings.protocol.test_domains(self.settings.data))

    @property
    def missing(self) -> list[str]:
        """Expected clients that have not registered."""
        return [client for client in self.expected if client not in self.registrations]

    def admit(self, registration: Registration) -> str:
        """Take note of a client; the reason if it cannot belong to this run, else an empty string."""
        data = self.settings.data
        if registration.client not in self.expected:
            return f"the protocol has no client {registration.client}; it has {', '.join(self.expected)}"
        code = self.settings.code
        if registration.code != code:
            return f"it runs code {registration.code}, the server {code}: install {self.settings.software} on both"
        if registration.identity != self.settings.identity:
            return "it was configured with other overrides than the server"
        if registration.domain != self._domains[registration.client]:
            return f"it holds domain {registration.domain}, not {self._domains[registration.client]}"
        if len(registration.class_counts) != data.class_count or min(registration.class_counts) < 0:
            return f"it registered classes {registration.class_counts}; {data.class_count} exist"
        if sum(registration.class_counts) != registration.samples or registration.samples < 2:
            return f"it registered {registration.samples} samples in classes {registration.class_counts}"
        if registration.samples > self.settings.rounds.max_samples:
            return f"it registered {registration.samples} samples; at most rounds.max_samples are let in"
        share = self.settings.protocol.validation
        least, most = (1, share / (1 - share) * registration.samples + 1) if share else (0, 0)
        if not least <= registration.validation <= most:
            return f"it registered {registration.validation} validation samples; {least} to {most:.0f} can be"
        known = self.registrations.get(registration.client)
        if known and (known.split, known.class_counts) != (registration.split, registration.class_counts):
            return f"client {registration.client} is registered already, with other data"
        self.registrations[registration.client] = registration
        return ""

    def clients(self) -> list[Client]:
        """The registered clients, by id; indices count all expected clients, so that they never change."""
        return [
            Client(
                client,
                self.registrations[client].domain,
                self.registrations[client].samples,
                tuple(self.registrations[client].class_counts),
                index,
                len(self.expected),
            )
            for index, client in enumerate(self.expected)
            if client in self.registrations
        ]

    def domain(self, client: str) -> str:
        """The domain of an expected client; empty for any other."""
        return self._domains.get(client, "")

    def sample(self, number: int) -> list[Client]:
        """The participants of round ``number``, keyed by (seed, round), sorted by id: never empty.

        Of the clients that have joined by then a share of ``participation`` is drawn; of these, those stay that are not
        absent, or the one that was least likely to be, if all are.
        """
        clients = self._joined(number)
        count = self.settings.rounds.asked(len(clients))
        draws = generator(self.settings.seed, "participants", number)
        chosen = torch.randperm(len(clients), generator=draws)[:count]
        drawn = [clients[index] for index in sorted(chosen.tolist())]
        return self._present(drawn, number) if self.settings.rounds.absence else drawn

    def enough(self, number: int) -> int:
        """How many of the participants of round ``number`` must have answered before its first exchange may close."""
        return self.settings.rounds.sampled(len(self._joined(number)))

    def _joined(self, number: int) -> list[Client]:
        return [client for client in self.clients() if self._joins(client) <= number] or self.clients()

    def _joins(self, client: Client) -> int:
        """The first round of a client: what is said of it or of its domain, whichever is later."""
        joins = self.settings.rounds.joins or {}
        return max(joins.get(client.id, 1), joins.get(client.domain, 1))

    def _present(self, clients: Sequence[Client], number: int) -> list[Client]:
        """Those of ``clients`` that are not absent in round ``number``, keyed by (seed, round, client)."""
        draws = {
            client.id: float(torch.rand(1, generator=generator(self.settings.seed, "absence", number, client.id)))
            for client in clients
        }
        there = [client for client in clients if draws[client.id] >= self.settings.rounds.absence]
        return there or [max(clients, key=lambda client: draws[client.id])]

    def scorers(self, participants: Sequence[Client], *, personal: bool) -> dict[str, list[str]]:
        """Which client scores which domains.

        Personal models are scored by each client on its own domain. The global model is scored once on every domain: by
        a participant that holds the domain, else by one that can, else by a client that is asked for the score alone.
        """
        if personal:
            return {client.id: [client.domain] for client in participants if client.domain in self.test_domains}
        duties: dict[str, list[str]] = {}
        for domain in self.test_domains:
            able = [client for client in participants if domain in self.registrations[client.id].scores]
            able = able or [client for client in self.clients() if domain in self.registrations[client.id].scores]
            if able:
                own = [client for client in able if client.domain == domain]
                chosen = min(own or able, key=lambda client: (len(duties.get(client.id, [])), client.id))
                duties.setdefault(chosen.id, []).append(domain)
        return duties
