"""The rounds of a run, the same for every engine and every method.

Read :class:`RoundLoop` from :meth:`~RoundLoop.run` to its end: ask, train, check, aggregate, record, keep.
:mod:`strategies.core.federation` makes the requests, and sorts, filters and aggregates the replies;
:mod:`server.run.registration` says who takes part; :mod:`server.run.records` writes the outcome of each exchange;
:mod:`server.run.open_folder` begins and ends the run's record; :mod:`server.run.checkpoint` keeps its states.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from common.errors import DIVERGED, EngineError, PayloadError
from common.prototypes import PrototypeSet
from common.settings import RunSettings
from common.storage import GlobalState
from common.wire.payload import Payload, cast_down
from server.run.attacked import AttackedEngine
from server.run.deployment import DEADLINE_SECONDS, ExchangePatience
from server.run.engine import Engine, Failure
from server.run.events import Listener
from server.run.history import History
from server.run.open_folder import OpenFolder
from server.run.records import Recorder
from server.run.registration import Registrar
from server.run.stopping import check_errors_differ, is_out_of_patience, trouble, unusable
from strategies.core.federation import Federation, Outcome
from strategies.core.method import Client, Method


class RoundLoop:
    """The rounds of one run.

    Args:
        settings: the run's settings.
        engine: how clients are reached.
        listeners: called with every event.
        stop: called before every round; ``True`` ends the run. The last round's checkpoint is kept.

    Raises:
        ConfigError: the devices of a deployment would receive ``rounds.key``, or the settings are only simulated.

    Attributes:
        state: the present global state.
        trained: whether any round was held, in this part of the run or before.
        problem: why a run that reached its end has no final score; empty if it has one.
        registry: the clients, and the key that participants are drawn from.
        folder: the run's folder.
        history: the run's files, once :meth:`run` has opened them.
        recorder: writes the outcome of each exchange, once the run has begun.
    """

    state: GlobalState
    history: History
    recorder: Recorder

    def __init__(
        self,
        settings: RunSettings,
        engine: Engine,
        listeners: Sequence[Listener] = (),
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.settings, self.engine, self.stop = settings, engine, stop
        if settings.attack.clients:
            self.engine = AttackedEngine(engine, settings)
        self.method: Method = settings.method
        self.federation = Federation(settings)
        self.registry = self.federation.registry
        self.folder = OpenFolder(settings, self.federation, listeners)
        self.checkpoints = self.folder.checkpoints
        self.registrar = Registrar(settings, self.engine, self.federation, self.folder)
        self.trained = False
        self.problem = ""

    def run(self) -> GlobalState:
        """Train until ``train.rounds`` rounds are done or ``train.patience`` ends the run; score the last state.

        Raises:
            EngineError: too few clients registered, too many rounds in a row missed their quorum, every client raised
                the same error, or the state is no longer finite.
            CheckpointError: the run is to be resumed, but the checkpoint belongs to another run.
        """
        checkpoint = self.folder.open()
        self.history = self.folder.history
        self.patience = ExchangePatience(self.settings.rounds.deadline, self.history.event)
        if checkpoint is None:
            self.state = self.federation.initial_state()
        else:
            self.state, self.trained = checkpoint, True
        self.registrar.begin(self.state.round)
        self.recorder = self.folder.begin(self.state)
        if self._hold_rounds():
            self._finish()
        return self.state

    def _hold_rounds(self) -> bool:
        """Hold the remaining rounds; return False if the run was stopped before its last round, otherwise True."""
        if not self.method.trains:
            self.trained = True
            self.checkpoints.save(self.state)
            return True
        missed = 0
        for number in range(self.state.round + 1, self.settings.train.rounds + 1):
            if self.stop():
                self.folder.record_stop(self.state)
                return False
            if self.trained and is_out_of_patience(self.settings, self.state.round, self.recorder):
                self.folder.record_early_stop(self.state)
                return True
            held = self._round(number)
            if held:
                self.trained = True
                missed = 0
            else:
                missed += 1
            if self.trained:  # before the first round that was held, there is only the initial state
                self.checkpoints.save(self.state)
            if missed >= self.settings.rounds.failures:
                reason = trouble(self.history, number, trained=self.trained)
                raise EngineError(f"rounds in a row that missed their quorum: {missed}; {reason}")
        return True

    def _round(self, number: int) -> bool:
        """Hold one round; return whether enough updates arrived to aggregate them.

        Otherwise the round is skipped: the state stays as it is, and only its round number advances.
        """
        started = time.perf_counter()
        self.registrar.register()
        participants, enough = self.registry.sample(number), self.registry.enough()
        self.history.event("round", round=number, clients=[client.id for client in participants])
        state, counted = self.state, self.federation.counted
        uploads: list[tuple[str, PrototypeSet]] = []
        for exchange in self.method.exchanges:
            scores = exchange == self.method.scored_at and self._is_scored(number)
            self.federation.begin(number, exchange, score=scores)
            outcome, failures = self._exchange(state, participants, enough)
            if outcome.skipped:
                if not outcome.admitted:
                    check_errors_differ(failures, number, self.settings, trained=self.trained)
                self.state, self.federation.counted = replace(self.state, round=number), counted
                self.recorder.record_skipped(number, outcome)
                return False
            state, self.federation.counted = outcome.state, outcome.counted
            participants = []
            for update in outcome.updates:
                participants.append(update.client)
                uploads.append((update.client.id, update.prototypes))
            enough = len(participants)  # oversampling is for the first exchange
            del outcome  # the next exchange has replies of its own to hold
        if names := state.not_finite():
            problem = f"has values in {names} that are not finite, made of finite replies: {DIVERGED}"
            raise unusable(problem, number, trained=self.trained)
        try:
            cast_down(Payload(state.weights), self.settings.rounds.transport)
        except PayloadError as error:
            raise unusable(f"cannot be sent: {error}", number, trained=self.trained) from error
        self.state = replace(state, round=number)
        self.history.prototype_log.add(number, self.state.prototypes, uploads)
        seconds = round(time.perf_counter() - started, 3)
        self.history.event("round done", round=number, seconds=seconds, **self.history.round_totals(number))
        return True

    def _exchange(
        self, state: GlobalState, participants: Sequence[Client], enough: int = 0
    ) -> tuple[Outcome, list[Failure]]:
        """Ask the clients, wait while they train, aggregate their replies, and write the records.

        Args:
            state: the global state.
            participants: clients that are asked to train, or to score if ``enough`` is 0.
            enough: updates after which the exchange closes; 0 if clients are only asked to score.

        Returns:
            The outcome of the exchange, and the clients without an accepted reply.
        """
        # Ask.
        message = self.federation.message(state)
        requests = self.federation.requests(self.checkpoints.run_id, participants, train=enough > 0)
        self.recorder.count_requests(requests)

        # The clients score the state, and train.
        began, seconds = time.time(), self.settings.rounds.deadline or DEADLINE_SECONDS
        if not self.engine.simulated:
            seconds = self.patience.seconds(self.federation.server.round)
        replies, failures = self.engine.exchange(
            message, requests, seconds, keep=self.federation.answer_store.keep, closing=self.federation.closing(enough)
        )
        if not self.engine.simulated:
            self.patience.note(began, replies)
        lost = [failure.client for failure in failures if failure.status == "lost"]
        self.registry.note_replies([reply.client for reply in replies], lost)

        # Sort the replies, filter the updates, aggregate them.
        outcome = self.federation.close(state, replies, enough)
        failures += [Failure(client, "refused", reason) for client, reason in outcome.refused]

        # Record; keep the state if it has the best score so far.
        best = self.federation.best
        self.recorder.record(message, requests, replies, outcome, failures)
        if self.federation.best != best and not self.method.scores_new_state:
            self.checkpoints.save_best(self.state)  # the clients scored it before they trained
        return outcome, failures

    def _is_scored(self, number: int) -> bool:
        """Return whether round ``number`` is scored: every ``evaluate_every`` rounds, and the last if scored itself."""
        done = number - 1
        if self.method.scores_new_state:
            if number == self.settings.train.rounds:
                return True
            done = number
        return done % self.settings.rounds.evaluate_every == 0

    def _finish(self) -> None:
        """Score the last state, unless its own round scored it, and write how the run ended."""
        total = self.state.round
        if isinstance(self.engine, AttackedEngine) and self.engine.harmless:
            self.history.event("harmless attack", round=total, clients=sorted(self.engine.harmless))
        if self.trained and not self.method.scores_new_state:
            self.federation.begin(total + 1, self.method.exchanges[0])
            participants = self.registry.sample(total)
            if self.method.personal:
                participants = list(self.federation.server.clients)
            self._exchange(self.state, participants)
        self.problem = self.folder.finish(self.state, total, trained=self.trained)
