"""The folder of a run that is going on: how the run begins and how it ends in its record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import EngineError, PayloadError, places_of
from common.metrics import RoundScore, best_of, peak_bytes
from common.run_config import attack_text
from common.settings import RunSettings
from common.storage import GlobalState
from common.versions import processor
from server.run.accounting import PrivacyAccount
from server.run.checkpoint import RunCheckpoints
from server.run.events import Listener
from server.run.files import EVALUATED, OWN, SHARED, End
from server.run.history import History
from server.run.measures import described
from server.run.records import Recorder
from server.run.resume import INTERRUPTED, ResumeCheck, RunStart, open_run, take_over
from server.run.signals import Terminated
from server.run.stopping import trouble
from strategies.core.federation import Federation
from strategies.core.last_batch import joined_clients
from strategies.core.method import Method


class OpenFolder:
    """The folder of a run that is going on.

    Call :meth:`open`, then :meth:`begin` when the clients have registered, and :meth:`finish` after the last round.

    Args:
        settings: the run's settings.
        federation: what it has learned of the clients is in every checkpoint.
        listeners: called with every event.

    Attributes:
        history: the run's files, once the folder is open.
        checkpoints: the folder's checkpoints, and the run's id.
        resume_check: what the clients registered in the rounds that are done.
        recorder: writes the outcome of each exchange, once the run has begun.
        account: what clients have released; ``None`` without differential privacy.
    """

    history: History
    recorder: Recorder
    account: PrivacyAccount | None = None

    def __init__(self, settings: RunSettings, federation: Federation, listeners: Sequence[Listener] = ()) -> None:
        self.settings, self.federation, self.listeners = settings, federation, listeners
        self.checkpoints = RunCheckpoints(settings, federation)
        self.resume_check = ResumeCheck()
        self._start: RunStart | None = None

    # ---- the beginning -----------------------------------------------------------------------------------------------

    def open(self) -> GlobalState | None:
        """Open the folder; return the state that a resumed run goes on from, ``None`` for a new run.

        Raises:
            CheckpointError: the run is to be resumed, but the checkpoint belongs to another run.
        """
        start = open_run(self.settings, self.listeners)
        self.history, self.resume_check, self._start = start.history, start.check, start
        if start.checkpoint is None:
            return None
        state = self.checkpoints.restore(start.checkpoint)
        self.checkpoints.earlier_seconds = start.seconds
        self.federation.attempt = max(self.federation.attempt, start.attempt + 1)  # the clock may have been set back
        return state

    def begin(self, state: GlobalState) -> Recorder:
        """Write that the run begins or goes on with ``state``; return the recorder of its exchanges.

        Raises:
            CheckpointError: what the clients of a private run released is not known; its records are as they were.
        """
        assert self._start is not None, "open() comes first"
        resumed = self._start.checkpoint is not None
        self.account = PrivacyAccount.of(self.settings, self.federation, resumed=resumed)
        take_over(self.settings, self._start, state.round)
        self.recorder = Recorder(self.settings, self.federation, self.history, self.account, self.checkpoints.run_id)
        self._announce(state)
        return self.recorder

    def _announce(self, state: GlobalState) -> None:
        """Write the event ``start`` or ``resume``, and what the privacy settings do not protect."""
        settings, method = self.settings, self.settings.method
        event = "start"
        best: dict[str, Any] = {}
        if self._start is not None and self._start.checkpoint is not None:
            event = "resume"
            best["best"] = best_of(self.history.round_scores())
        content: dict[str, Any] = {}
        if settings.attack.clients:
            content["attack"] = attack_text(settings.raw)
        if settings.further_measures:
            content["measures"] = described(settings.further_measures)
        self.history.event(
            event,
            round=state.round,
            rounds=settings.train.rounds if method.trains else 0,
            method=method.name,
            data=settings.data.name,
            clients=sorted(self.federation.registry.registrations),
            run=self.checkpoints.run_id,
            test=settings.test_scorers,
            validation=settings.validation_scorers,
            unseen=list(settings.unseen_domains),
            told=best,
            recorded={
                "scored": what_is_scored(method),
                "bound": method.bound,
                "processor": processor(),
                "attempt": self.federation.attempt,
            },
            **content,
        )
        if self.account is not None:
            for reason in self.account.warnings():
                self.history.event("privacy warning", round=state.round, reason=reason)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def record_early_stop(self, state: GlobalState) -> None:
        """Write that validation scores no longer improve (``train.patience``)."""
        self.history.event(
            "stopped early",
            round=state.round,
            rounds=self.settings.train.rounds,
            best=self.federation.best,
            patience=self.settings.train.patience,
        )

    def record_stop(self, state: GlobalState) -> None:
        """Write that the run was asked to stop before its last round."""
        self._end("stopped", state, {})

    def finish(self, state: GlobalState, total: int, *, trained: bool) -> str:
        """Write how a run ended whose rounds are done; return why it has no final score, empty if it has one.

        Args:
            state: the last state.
            total: rounds that are done.
            trained: whether any round was held.
        """
        problem = ""
        scores = self._scores()
        last_scored = scores[-1].round if scores else -1
        if not trained:
            problem = "no round was held, so nothing was trained and there is no score"
        elif last_scored < max(self.history.rounds("round done"), default=0):
            problem = "no client could score the last state, so there is no final score"
        if problem:
            problem = f"{problem}; {trouble(self.history, total, trained=trained)}"
            self._end("failed", state, {}, reason=problem)
            return problem
        if self.account is not None:
            self.history.event("privacy spent", round=state.round, reason=self.account.summary())
        self.recorder.warn_if_at_chance()
        self._end("finish", state, {"missing": dict(scores[-1].missing), "answers": self.history.answers()})
        return ""

    def _end(self, event: str, state: GlobalState, told: Mapping[str, Any], **content: Any) -> None:
        """Write how a run ended that is not going on.

        Args:
            event: one of :data:`server.run.files.ENDINGS`.
            state: the last state.
            told: content that the listeners get, and other files hold.
            content: what the file has, too.
        """
        registrations = self.federation.registry.registrations
        samples = {client: registrations[client].samples for client in sorted(registrations)}
        end = End(
            event=event,
            round=state.round,
            sha256=state.sha256(),
            seconds=round(self.checkpoints.seconds(), 3),
            server_peak_bytes=peak_bytes(),
            key=self.federation.registry.key,
            joined_batches=joined_clients(self.settings, self.federation.new_model, samples),
            privacy=None if self.account is None else self.account.report(),
        )
        self.history.event(
            event, round=end.round, told={"sha256": end.sha256, **told}, recorded=end.content(), **content
        )

    def _scores(self) -> list[RoundScore]:
        """The scores that are the run's result: on test sets, or on validation samples if test sets are not used."""
        if self.settings.rounds.test:
            return self.history.round_scores()
        return self.history.validation_scores()

    def record_error(self, error: BaseException) -> None:
        """Write why this part of the run ends before its last round; nothing before the folder is open.

        Args:
            error: what ends it: an error, Ctrl-C, or the exit that a signal or ``flwr stop`` causes.
        """
        if self._start is None:
            return
        if isinstance(error, EngineError | PayloadError):  # a message that cannot be made stays so
            reason = str(error).partition("\n")[0]
            self.history.event("failed", round=self.federation.server.round, reason=reason, recorded=raised(error))
            return
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        if type(error) is KeyboardInterrupt:
            reason = "Ctrl-C"
        elif isinstance(error, Terminated | SystemExit):
            reason = "a signal to its process, or flwr stop"
        self.history.event(INTERRUPTED, reason=reason, recorded=raised(error))


def raised(error: BaseException) -> dict[str, object]:
    """Return what a record holds of an error besides its text: its class, and where it passed in Goldfinch's files."""
    return {"error": type(error).__name__, "places": places_of(error)}


def what_is_scored(method: Method) -> str:
    """Return which model a method's run scores: one of the names in :mod:`server.run.files`."""
    if not method.trains:
        return EVALUATED
    if method.personal:
        return OWN
    return SHARED
