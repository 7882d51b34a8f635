"""A simulated engine whose hostile clients do what the run's attack says (``attack=``)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from common.numerics import seeded_globals
from common.settings import RunSettings
from common.wire.messages import Registration, Request
from common.wire.payload import Payload, encode
from server.run.engine import Admit, Engine, Failure, Keep, as_it_is, without_the_late
from strategies.core.attacks import Attack, Seen
from strategies.core.federation import Closing, Reply


class AttackedEngine:
    """A simulated engine of any kind, with the registrations and replies of hostile clients changed.

    Args:
        inner: the simulated engine.
        settings: the run's settings.
    """

    def __init__(self, inner: Engine, settings: RunSettings) -> None:
        self.inner, self.settings = inner, settings
        self.simulated = inner.simulated
        self.attack: Attack = settings.attack
        self._clients = sorted(spec.id for spec in settings.clients)
        self._claims: dict[str, dict[str, Any]] = {}
        """The samples that hostile clients registered, which their answers must repeat."""
        self.harmless: set[str] = set()
        """Hostile clients that have sent updates, every one of them as honest clients do."""
        self._harmful: set[str] = set()

    def register(self, expected: Sequence[str], admit: Admit, seconds: float) -> list[Failure]:
        """Register the clients, hostile ones with the registration that the attack makes of theirs."""

        def admit_changed(registration: Registration) -> str | None:
            if registration.client in self.attack.clients:
                honest = registration
                with seeded_globals(self.settings.seed, "attack", "registered", honest.client):
                    registration = self.attack.registered(honest)
                if registration != honest or type(self.attack).data is not Attack.data:
                    self._harmful.add(registration.client)
                self._claims[registration.client] = {
                    "samples": registration.samples,
                    "class_counts": registration.class_counts,
                }
            return admit(registration)

        return self.inner.register(expected, admit_changed, seconds)

    def exchange(
        self,
        message: Payload,
        requests: Mapping[str, Request],
        seconds: float,
        *,
        keep: Keep = as_it_is,
        closing: Closing | None = None,
    ) -> tuple[list[Reply], list[Failure]]:
        """Exchange one message; replace the updates of hostile clients by those of the attack.

        An update that the attack withholds is reported as lost. The attack is given copies, so that one that works in
        place changes no honest update.
        """
        replies, failures = self.inner.exchange(message, requests, seconds, keep=keep)
        honest: dict[str, Payload] = {}
        for reply in sorted(replies, key=lambda item: item.client):  # sums depend on the order
            if reply.client not in self.attack.clients and requests[reply.client].train:
                honest[reply.client] = copy.deepcopy(reply.payload)
        sent: list[Reply] = []
        for reply in replies:
            request = requests[reply.client]
            if reply.client in self._claims:
                reply = replace(reply, answer=replace(reply.answer, **self._claims[reply.client]))
            if reply.client in self.attack.clients and request.train:
                seen = Seen(copy.deepcopy(message), request, honest, self._clients, self.settings.seed)
                with seeded_globals(self.settings.seed, "attack", request.round, request.exchange, reply.client):
                    payload = self.attack.sent(copy.deepcopy(reply.payload), seen)
                self._note(reply, payload)
                if payload is None:
                    failures = [*failures, Failure(reply.client, "lost", "its update is lost")]
                    continue
                reply = replace(reply, payload=payload)
            sent.append(reply)
        if closing is None:
            return sent, failures
        return without_the_late(sent, failures, closing)

    def _note(self, reply: Reply, sent: Payload | None) -> None:
        """Note whether a hostile client sends anything but its honest update."""
        if reply.client in self._harmful:
            return
        if sent is not None and encode(sent) == encode(reply.payload):
            self.harmless.add(reply.client)
        else:
            self._harmful.add(reply.client)
            self.harmless.discard(reply.client)

    def close(self) -> None:
        """Close the simulated engine."""
        self.inner.close()
