"""The round loop, which is the same for every engine and every method.

Start reading at :meth:`RoundLoop.run`. :mod:`server.run.resume` opens a run's folder, :mod:`server.run.records` writes
the outcome of each exchange, and :mod:`strategies.core.federation` checks and aggregates the replies.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from common.errors import ConfigError, EngineError, some_of, summarised
from common.metrics import RoundScore, best_of, peak_bytes
from common.prototypes import PrototypeSet
from common.run_config import attack_text
from common.settings import RunSettings, check_deployable, inspect_run
from common.storage import GlobalState
from common.versions import processor
from common.wire.messages import Registration, Request
from common.wire.payload import Payload
from server.run.accounting import PrivacyAccount
from server.run.attacked import AttackedEngine
from server.run.checkpoint import BEST, Checkpoint, Checkpoints
from server.run.engine import ENOUGH, Engine, Failure
from server.run.events import Listener
from server.run.files import EVALUATED, OWN, SHARED, End
from server.run.measures import described
from server.run.records import Recorder
from server.run.resume import INTERRUPTED, ResumeCheck, RunStart, open_run, take_over
from server.run.schema import REPLIES
from server.run.signals import Terminated
from strategies.core.federation import Closing, Federation, Outcome, Reply
from strategies.core.last_batch import joined_clients
from strategies.core.method import Client, Method, ServerContext

KEY_BITS = 128
"""Bits of the random number that a deployment's participants are drawn from."""

MAX_LINES = 40
"""Lines of a traceback that end a run's error message."""

REGISTERED = ("client", "domain", "samples", "class_counts", "split", "content", "device", "versions")
"""Fields of a registration that the event ``registered`` holds."""


class RoundLoop:
    """One run: registration, rounds, scores, checkpoints.

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
        opened: whether the run's folder was opened; before that, nothing is written.
        stopped_early: whether the run ended before its last round, since validation scores no longer improved.
        registry: the clients, and the key that participants are drawn from. A deployment's devices know the seed, so
            its key is a random number. Checkpoints, ``summary.json`` and the last event of the run hold it. No message
            does, and no listener is told it.
        problem: why a run that reached its end has no final score; empty if it has one.
        history: the run's files.
    """

    def __init__(
        self,
        settings: RunSettings,
        engine: Engine,
        listeners: Sequence[Listener] = (),
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.settings, self.listeners, self.stop = settings, listeners, stop
        self.engine = engine
        if settings.attack.clients:
            self.engine = AttackedEngine(engine, settings)
        self.method: Method = settings.method
        self.federation = Federation(settings)
        self.registry = self.federation.registry
        if not engine.simulated:
            check_deployable(settings)
            self.registry.key = _secret_key(settings)
        folder = settings.output_folder
        self.checkpoints = Checkpoints(folder / "checkpoint", settings.rounds.checkpoints)
        self.best_checkpoint = Checkpoints(folder / "checkpoint", kind=BEST)
        self.run_id = uuid.uuid4().hex[:12]
        self.state: GlobalState
        self.trained = False
        self.opened = False
        self.stopped_early = False
        self.problem = ""
        self.earlier_seconds = 0.0
        self.resume_check = ResumeCheck()
        self._refused_registrations: list[str] = []
        self._failures: Sequence[Failure] = ()
        """Failures of the last exchange, if it admitted no reply at all."""
        self._started = time.perf_counter()

    @property
    def server(self) -> ServerContext:
        """The context of the method's functions on the server in the present exchange."""
        return self.federation.server

    @property
    def total(self) -> int:
        """Rounds of the whole run; 0 if the method does not train."""
        return self.settings.train.rounds if self.method.trains else 0

    # ---- the run ---------------------------------------------------------------------------------------------------

    def run(self) -> GlobalState:
        """Train until ``train.rounds`` rounds are done or ``train.patience`` ends the run; score the last state.

        Raises:
            EngineError: too few clients registered, too many rounds in a row missed their quorum, every client raised
                the same error, or the state is no longer finite.
            CheckpointError: the run is to be resumed, but the checkpoint belongs to another run.
        """
        start = self._open()
        self._register(self.settings.rounds.registration)
        self._check_changed_data()
        self._check_quorum()
        if not self.trained:
            self.state = self.federation.initial_state()
        take_over(self.settings, start, self.state.round)
        self.account = PrivacyAccount(self.settings, self._sent_parts())
        self.recorder = Recorder(self.settings, self.federation, self.history, self.account, self.run_id)
        self._announce()
        if self._train():
            self._finish()
        return self.state

    def _open(self) -> RunStart:
        """Open the run's folder; if it is resumed, go on from its checkpoint."""
        start = open_run(self.settings, self.checkpoints, self.best_checkpoint, self.listeners)
        self.history, self.resume_check = start.history, start.check
        self.opened = True
        self.trained = start.checkpoint is not None
        if start.checkpoint is not None:
            self.federation.check_fits(start.checkpoint.state)
            self.state = start.checkpoint.state
            self.run_id = start.checkpoint.run
            self.earlier_seconds = start.seconds
            self.registry.key = self.settings.seed
            if start.checkpoint.key is not None:
                self.registry.key = start.checkpoint.key
            self.federation.remember(start.checkpoint.memory)
            self.federation.counted = start.checkpoint.counted or {}
            self.federation.attempt = max(self.federation.attempt, start.checkpoint.attempt + 1)
        return start

    def record_end(self, error: BaseException) -> None:
        """Write why this part of the run ends before its last round.

        Args:
            error: what ends it: an error, Ctrl-C, or the exit that a signal or ``flwr stop`` causes.
        """
        if not self.opened:
            return
        if isinstance(error, EngineError):
            self.history.event("failed", round=self.server.round, reason=str(error).partition("\n")[0])
            return
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        if type(error) is KeyboardInterrupt:
            reason = "Ctrl-C"
        elif isinstance(error, Terminated | SystemExit):
            reason = "a signal to its process, or flwr stop"
        self.history.event(INTERRUPTED, reason=reason)

    def _announce(self) -> None:
        """Write the event ``start`` or ``resume``, and what the privacy settings do not protect."""
        event = "start"
        best: dict[str, Any] = {}
        if self.trained:
            event = "resume"
            best["best"] = best_of(self.history.round_scores())
        content: dict[str, Any] = {}
        if self.settings.attack.clients:
            content["attack"] = attack_text(self.settings.raw)
        if self.settings.further_measures:
            content["measures"] = described(self.settings.further_measures)
        self.history.event(
            event,
            round=self.state.round,
            rounds=self.total,
            method=self.method.name,
            data=self.settings.data.name,
            clients=sorted(self.registry.registrations),
            run=self.run_id,
            test=self.settings.test_scorers,
            validation=self.settings.validation_scorers,
            unseen=list(self.settings.unseen_domains),
            told=best,
            recorded={"scored": _scored(self.method), "bound": self.method.bound, "processor": processor()},
            **content,
        )
        for reason in self.account.warnings(self._samples()):
            self.history.event("privacy warning", round=self.state.round, reason=reason)

    def _train(self) -> bool:
        """Run the remaining rounds; return False if the run was stopped before its last round, otherwise True."""
        if not self.method.trains:
            self.trained = True
            self._save()
            return True
        missed = 0
        for number in range(self.state.round + 1, self.settings.train.rounds + 1):
            if self.stop():
                self._end("stopped", {})
                return False
            if self._out_of_patience():
                self._stop_early()
                return True
            held = self._round(number)
            missed += 1
            if held:
                missed = 0
            if held or self.trained:  # before the first round that was held, there is only the initial state
                self.trained = True
                self._save()
            if missed >= self.settings.rounds.failures:
                raise EngineError(f"{missed} rounds in a row missed their quorum; {self._trouble(number)}")
        return True

    def _out_of_patience(self) -> bool:
        """Return whether validation scores have not improved for ``train.patience`` rounds.

        Most methods score a round's state in the round after it, so such a run does one round more.
        """
        patience = self.settings.train.patience
        if patience is None or not self.trained:
            return False
        if self.method.scores_new_state and self.recorder.validated < self.state.round:
            return False  # the last state must have a score
        return self.federation.best >= 0 and self.recorder.validated - self.federation.best >= patience

    def _stop_early(self) -> None:
        self.stopped_early = True
        self.history.event(
            "stopped early",
            round=self.state.round,
            rounds=self.settings.train.rounds,
            best=self.federation.best,
            patience=self.settings.train.patience,
        )

    def _finish(self) -> None:
        """Score the last state and write how the run ended."""
        total = self.total
        if self.stopped_early:
            total = self.state.round
        if not self.trained:
            self.problem = f"no round was held, so nothing was trained and there is no score; {self._trouble(total)}"
        else:
            self._score_last(total)
            scores = self._scores()
            last_scored = scores[-1].round if scores else -1
            if last_scored < max(self.history.rounds("round done"), default=0):
                self.problem = (
                    f"no client could score the last state, so there is no final score; {self._trouble(total)}"
                )
        if self.problem:
            self._end("failed", {}, reason=self.problem)
            return
        if spent := self.account.summary(self._samples()):
            self.history.event("privacy spent", round=self.state.round, reason=spent)
        self.recorder.warn_if_at_chance()
        self._end("finish", {"missing": dict(self._scores()[-1].missing), "answers": self.history.answers()})

    def _end(self, event: str, told: Mapping[str, Any], **content: Any) -> None:
        """Write how a run ended whose last round is done, or that was asked to stop.

        Args:
            event: one of :data:`server.run.files.ENDINGS`.
            told: content that the listeners get.
            content: what the file has, too.
        """
        samples = self._samples()
        end = End(
            event=event,
            round=self.state.round,
            sha256=self.state.sha256(),
            seconds=round(self.seconds(), 3),
            server_peak_bytes=peak_bytes(),
            key=self.registry.key,
            joined_batches=joined_clients(self.settings, self.federation.new_model, samples),
            privacy=self.account.report(samples),
        )
        self.history.event(
            event, round=end.round, told={"sha256": end.sha256, **told}, recorded=end.content(), **content
        )

    def _scores(self) -> list[RoundScore]:
        """The scores that are the run's result: on test sets, or on validation samples if test sets are not used."""
        if self.settings.rounds.test:
            return self.history.round_scores()
        return self.history.validation_scores()

    def _trouble(self, number: int) -> str:
        """Why replies did not count, and what is kept."""
        kept = "fix it, then run again"
        if self.trained:
            kept = f"the state of round {number} is kept: resume=true goes on"
        return f"{self.history.commonest_trouble()}; all reasons are in {self.history.folder / REPLIES}; {kept}"

    def seconds(self) -> float:
        """Wall seconds of this process, plus those in the checkpoint that the run was resumed from."""
        return self.earlier_seconds + time.perf_counter() - self._started

    # ---- checkpoints and privacy -------------------------------------------------------------------------------------

    def _save(self) -> None:
        self.checkpoints.save(self._checkpoint())
        if self.method.scores_new_state and self.federation.best == self.state.round:
            self.best_checkpoint.replace(self._checkpoint())

    def _checkpoint(self) -> Checkpoint:
        return Checkpoint(
            self.state,
            run=self.run_id,
            method=self.method.name,
            identity=self.settings.identity,
            seed=self.settings.seed,
            rounds=self.settings.train.rounds,
            seconds=round(self.seconds(), 3),
            key=self.registry.key,
            memory=self.federation.memory(),
            attempt=self.federation.attempt,
            counted=self.federation.counted,
        )

    def _sent_parts(self) -> dict[str, bool]:
        return {"prototypes": self.method.prototypes_from != "none", "weights": bool(self.server.shared)}

    def _samples(self) -> dict[str, int]:
        registrations = self.registry.registrations
        return {client: registrations[client].samples for client in sorted(registrations)}

    # ---- registration ----------------------------------------------------------------------------------------------

    def _register(self, seconds: float) -> None:
        """Admit the clients that are there, waiting up to ``seconds`` for those that are not.

        In a simulation all data are here, and are compared first (:func:`common.data.inspection.inspect`).
        """
        if self.engine.simulated:
            inspect_run(self.settings)
        for failure in self.engine.register(self.registry.missing, self._admit, seconds):
            self.history.event(f"registration {failure.status}", client=failure.client, reason=failure.reason)
            self._refused_registrations.append(f"{failure.client}: {failure.reason}")

    def _admit(self, registration: Registration) -> str | None:
        reason = self.resume_check.refuses(registration) or self.registry.admit(registration)
        if not reason:
            self.history.event("registered", **{key: getattr(registration, key) for key in REGISTERED})
        return reason

    def _check_changed_data(self) -> None:
        """Refuse to resume with other data than before, unless that is asked for."""
        if self.resume_check.changed:
            self.history.event("data changed", round=self.state.round, reason=", ".join(self.resume_check.changed))
            self.resume_check.check()

    def _check_quorum(self) -> None:
        """Refuse to begin with fewer clients than a round needs."""
        registry, rounds = self.registry, self.settings.rounds
        needed, _ = self.federation.needed(len(registry.expected))
        if len(registry.registrations) < needed:
            raise EngineError(
                f"only {len(registry.registrations)} of {len(registry.expected)} clients registered within "
                f"{rounds.registration:g} s, {needed} are needed; missing: {some_of(registry.missing)}"
                + "".join(f"\n  {refusal}" for refusal in summarised(self._refused_registrations))
            )
        if registry.missing:
            self.history.event("missing", clients=registry.missing)

    # ---- one round -------------------------------------------------------------------------------------------------

    def _round(self, number: int) -> bool:
        """Run one round; return whether enough updates arrived to aggregate them.

        Otherwise the round is skipped: the state stays as it is, and only its round number advances.
        """
        before, counted_before = self.state, self.federation.counted
        started = time.perf_counter()
        self._register(0.0)
        participants, enough = self.registry.sample(number), self.registry.enough()
        self.history.event("round", round=number, clients=[client.id for client in participants])
        uploads: list[tuple[str, PrototypeSet]] = []
        for exchange in self.method.exchanges:
            self.federation.begin(number, exchange, score=exchange == self.method.scored_at and self._due(number))
            outcome = self._exchange(participants, enough)
            if outcome.skipped:
                self._check_reasons_differ(number)
                self.state, self.federation.counted = replace(before, round=number), counted_before
                self.recorder.skipped(number, outcome)
                return False
            self.state, self.federation.counted = outcome.state, outcome.counted
            participants = []
            for update in outcome.updates:
                participants.append(update.client)
                uploads.append((update.client.id, update.prototypes))
            enough = len(participants)  # oversampling is for the first exchange
            del outcome  # the next exchange has replies of its own to hold
        self._check_finite(before, number)
        self.state = replace(self.state, round=number)
        self.history.prototype_log.add(number, self.state.prototypes, uploads)
        seconds = round(time.perf_counter() - started, 3)
        self.history.event("round done", round=number, seconds=seconds, **self.history.round_totals(number))
        return True

    def _check_finite(self, before: GlobalState, number: int) -> None:
        bad = self.state.not_finite()
        if bad:
            self.state = replace(before, round=number - 1)
            raise EngineError(
                f"the state after round {number} has values in {bad} that are not finite, and training cannot recover "
                "from that: try a smaller train.learning_rate or train.clip_norm=1; the round before is kept"
            )

    def _check_reasons_differ(self, number: int) -> None:
        """Stop a run in which every client raised the same error: further rounds would be the same.

        One client's error may be its own fault, so at least two clients must have failed, or the only one.

        Raises:
            EngineError: with the traceback that they share.
        """
        failures = self._failures
        reasons: set[str] = set()
        for failure in failures:
            if failure.status != "failed" or not failure.reason:
                return
            reasons.add(failure.reason)
        if len(reasons) != 1 or len(failures) < min(2, len(self.registry.expected)):
            return
        lines = [line for line in failures[0].traceback.splitlines() if line.strip()]
        advice = "Every further round would fail the same way, so the run stops. Fix the cause; resume=true continues."
        message = [f"in round {number} every client that was asked raised the same: {reasons.pop()}", advice]
        raise EngineError("\n  ".join([*message, *lines[-MAX_LINES:]]))

    def _due(self, number: int) -> bool:
        """Whether round ``number`` is scored: every ``evaluate_every`` rounds, and the last if scored itself."""
        if self.method.scores_new_state and number == self.settings.train.rounds:
            return True
        return (number - 1) % self.settings.rounds.evaluate_every == 0

    def _score_last(self, total: int) -> None:
        """Run one exchange that only scores the final state, unless the last round scored it already."""
        if self.method.scores_new_state:
            return
        self.federation.begin(total + 1, self.method.exchanges[0])
        participants = self.registry.sample(total)
        if self.method.personal:
            participants = list(self.server.clients)
        self._exchange(participants)

    def _exchange(self, participants: Sequence[Client], enough: int = 0) -> Outcome:
        """Send one exchange's requests, collect the replies, check and aggregate them, and write the records.

        Args:
            participants: clients that are asked to train, or to score if ``enough`` is 0.
            enough: updates after which the exchange closes; 0 if clients are only asked to score.
        """
        message = self.federation.message(self.state)
        requests = self.federation.requests(self.run_id, participants, train=enough > 0)
        closing = None
        if 0 < enough < len(participants):
            scoring = [client for client, request in requests.items() if request.score]
            closing = Closing(enough, frozenset(scoring))
        self.account.asked(self.run_id, [client for client, request in requests.items() if request.train])
        replies, failures = self._ask(message, requests, closing)
        lost = [failure.client for failure in failures if failure.status == "lost"]
        self.registry.note_replies([reply.client for reply in replies], lost)
        outcome = self.federation.close(self.state, replies, enough)
        failures += [Failure(client, "refused", reason) for client, reason in outcome.refused]
        self._failures = () if outcome.admitted else failures
        best_before = self.federation.best
        self.recorder.record(message, requests, replies, outcome, failures)
        if self.federation.best != best_before and not self.method.scores_new_state:
            self.best_checkpoint.replace(self._checkpoint())  # self.state is still the one that clients scored
        return outcome

    def _ask(
        self, message: Payload, requests: Mapping[str, Request], closing: Closing | None
    ) -> tuple[list[Reply], list[Failure]]:
        """Send the requests by the engine; in simulation, decide afterwards which replies would have been late."""
        simulated = self.engine.simulated
        replies, failures = self.engine.exchange(
            message,
            requests,
            self.settings.rounds.deadline,
            keep=self.federation.answer_store.keep,
            closing=None if simulated else closing,
        )
        if closing and simulated:
            replies, late = self.federation.in_time(replies, closing)
            failures += [Failure(reply.client, "late", ENOUGH) for reply in late]
        return replies, failures


def _scored(method: Method) -> str:
    if not method.trains:
        return EVALUATED
    if method.personal:
        return OWN
    return SHARED


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
