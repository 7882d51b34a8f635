"""Who takes part in a run: its clients register before the first round, and between rounds when they come or return."""

from __future__ import annotations

import secrets

from common.errors import ConfigError, EngineError, some_of, summarised
from common.settings import RunSettings, check_deployable
from common.wire.messages import Registration
from server.run.deployment import slow_start
from server.run.engine import Engine
from server.run.open_folder import OpenFolder
from strategies.core.federation import Federation

KEY_BITS = 128
"""Bits of the random number that a deployment's participants are drawn from."""

STATED = ("start_seconds", "clock_ahead")
"""Fields that a deployed device states of itself; 0 is left out."""

REGISTERED = ("client", "domain", "samples", "class_counts", "split", "content", "device", "versions", *STATED)
"""Fields of a registration that the event ``registered`` holds."""


class Registrar:
    """Registers the clients of a run.

    A deployment's devices know the seed, so the key that participants are drawn from is a random number there.
    Checkpoints, ``summary.json`` and the run's last event hold it; no message does, and no listener is told it.

    Args:
        settings: the run's settings.
        engine: how clients are reached.
        federation: its registry gets the clients.
        folder: the run's folder, which gets the events.

    Raises:
        ConfigError: the devices of a deployment would receive ``rounds.key``, or the settings are only simulated.
    """

    def __init__(self, settings: RunSettings, engine: Engine, federation: Federation, folder: OpenFolder) -> None:
        self.settings, self.engine, self.federation, self.folder = settings, engine, federation, folder
        self.registry = federation.registry
        self._refused: list[str] = []
        if not engine.simulated:
            check_deployable(settings)
            self.registry.key = _secret_key(settings)

    def begin(self, done: int) -> None:
        """Wait up to ``rounds.registration`` seconds for the clients, and check that the run can begin with them.

        Args:
            done: rounds that are done.

        Raises:
            EngineError: fewer clients registered than a round needs.
            CheckpointError: a resumed run's clients have other data than before, and ``resume=anyway`` is not set.
        """
        self.register(self.settings.rounds.registration)
        check = self.folder.resume_check
        if check.changed:
            self.folder.history.event("data changed", round=done, reason=", ".join(check.changed))
            check.check()
        self._check_quorum()

    def register(self, seconds: float = 0.0) -> None:
        """Admit the clients that are there, and wait up to ``seconds`` for those that are not."""
        for failure in self.engine.register(self.registry.missing, self._admit, seconds):
            name = f"registration {failure.status}"
            self.folder.history.event(name, client=failure.client, reason=failure.reason)
            self._refused.append(f"{failure.client}: {failure.reason}")

    def _admit(self, registration: Registration) -> str | None:
        reason = self.folder.resume_check.refuses(registration) or self.registry.admit(registration)
        if not reason:
            content = {key: getattr(registration, key) for key in REGISTERED}
            for key in STATED:
                if not content[key]:
                    del content[key]
            self.folder.history.event("registered", **content)
            if slow := slow_start(registration, self.settings.rounds.deadline):
                number = self.federation.server.round
                self.folder.history.event("client starts slowly", round=number, client=registration.client, reason=slow)
        return reason

    def _check_quorum(self) -> None:
        """Refuse to begin with fewer clients than a round needs."""
        registry, rounds = self.registry, self.settings.rounds
        needed, _ = self.federation.needed(len(registry.expected))
        if len(registry.registrations) < needed:
            raise EngineError(
                f"only {len(registry.registrations)} of {len(registry.expected)} clients registered within "
                f"{rounds.registration:g} s, {needed} are needed; missing: {some_of(registry.missing)}"
                + "".join(f"\n  {refusal}" for refusal in summarised(self._refused))
            )
        if registry.missing:
            self.folder.history.event("missing", clients=registry.missing)


def _secret_key(settings: RunSettings) -> int:
    """Return a new key for a deployment.

    Raises:
        ConfigError: the settings, which devices receive, have a key.
    """
    if settings.rounds.key is not None:
        raise ConfigError(
            f"rounds.key={settings.rounds.key} would be sent to the devices with the settings, and tell them who takes "
            "part in which round. Leave it out: the server of a deployment makes a key of its own and writes it to "
            "summary.json; rounds.key repeats its choices on engine=inline or engine=ray"
        )
    return secrets.randbits(KEY_BITS)
