"""The round loop: the same for every engine and method."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from common.errors import EngineError
from common.metrics import Coverage, RoundScore, best_round, states
from common.privacy import GaussianPrivacy
from common.prototypes import PrototypeSet
from common.settings import RunSettings, differing, yaml_of
from common.storage.files import write_text
from common.storage.state import GlobalState
from common.wire.messages import CLIPPED, Registration, Request, completed_status
from server.run.accounting import Ledger, conditions, privacy_report, spoken, unprotected, warnings_of
from server.run.checkpoint import BEST, Checkpoint, Checkpoints, check_belongs, check_length
from server.run.engine import ENOUGH, MAX_REASON, Engine, Failure
from server.run.history import History, exchange_rows
from server.run.resume import ResumeCheck, best_of, changed_code
from server.trackers.events import Listener
from strategies.core.federation import Closing, Federation, Outcome, Reply
from strategies.core.method import Client, Method

MAX_LINES = 40
"""Lines of a traceback that end a run's error message."""

_REGISTERED = ("client", "domain", "samples", "class_counts", "split", "content", "device", "versions")


@dataclass
class RoundLoop:
    """One run: registration, rounds, scores, checkpoints.

    Args:
        settings: the run's settings.
        engine: how clients are reached.
        listeners: told of every event.
        stop: asked before every round; ``True`` ends the run after its checkpoint.
    """

    settings: RunSettings
    engine: Engine
    listeners: Sequence[Listener] = ()
    stop: Callable[[], bool] = lambda: False
    state: GlobalState = field(init=False)
    history: History = field(init=False)
    trained: bool = field(init=False, default=False)
    """Whether any round has held, in this part of the run or before."""
    problem: str = field(init=False, default="")
    """Why a run that came to its end is no success all the same; its summary has no final score."""

    def __post_init__(self) -> None:
        self.method: Method = self.settings.method
        folder = self.settings.output_folder
        self.checkpoints = Checkpoints(folder / "checkpoint", self.settings.rounds.checkpoints)
        self.best_checkpoint = Checkpoints(folder / BEST)
        self.run_id = uuid.uuid4().hex[:12]
        self.federation = Federation(self.settings)
        self.registry = self.federation.registry
        self.server = self.federation.server
        self.refusals: list[str] = []
        self.resume_check = ResumeCheck()
        self._count_less: set[str] = set()
        self._tested = Coverage(self.settings.test_scorers)
        self._validated = Coverage(self.settings.validation_scorers)
        self._validation: list[RoundScore] = []
        self._skipped: set[int] = set()
        self._unasked: set[str] = set()  # domains that no client can score, which is told once
        self.ledger: Ledger | None = None
        self._failures: Sequence[Failure] = ()  # of an exchange in which no answer was let in
        self.earlier_seconds = 0.0
        self._started = time.perf_counter()

    # ---- the run ---------------------------------------------------------------------------------------------------

    def run(self) -> GlobalState:
        """Train until ``train.rounds`` rounds are done, score the last state, return it.

        Raises:
            EngineError: too few clients registered, too many rounds in a row missed their quorum, every client raised
                the same, or the state is no longer finite.
            CheckpointError: the run is to be resumed, but the checkpoint is another run's.
        """
        resumed = self._resume()
        self.trained = resumed is not None
        self._register(self.settings.rounds.registration)
        if self.resume_check.changed:
            self.history.event("data changed", round=self.state.round, reason=", ".join(self.resume_check.changed))
            self.resume_check.check()
        self._insist_on_quorum()
        if resumed is None:
            self.state = self.federation.initial_state()
        total = self.settings.train.rounds
        self._take_over(total)
        self._open_ledger()
        self.history.event(
            "start" if resumed is None else "resume",
            round=self.state.round,
            rounds=total,
            method=self.method.name,
            data=self.settings.data.name,
            clients=sorted(self.registry.registrations),
            run=self.run_id,
            test=self.settings.test_scorers,
            validation=self.settings.validation_scorers,
            unseen=list(self.settings.unseen_domains),
            **({"best": best_of(self.history.round_scores())} if resumed else {}),
        )
        self._warn_of_privacy()
        missed = 0
        for number in range(self.state.round + 1, total + 1):
            if self.stop():
                self.history.event("stopped", round=number - 1)
                return self.state
            held = self._round(number)
            missed = 0 if held else missed + 1
            if held or self.trained:  # the first state is a function of the settings: nothing to go on from
                self.trained = True
                self._save()
            if missed >= self.settings.rounds.failures:
                raise EngineError(f"{missed} rounds in a row missed their quorum; {self._trouble(number)}")
        if self.trained:
            self._score_last(total)
        if not self.trained:
            self.problem = f"no round was held, so nothing was trained and there is no score; {self._trouble(total)}"
        elif self._last_scored() < self.history.rounds("round done")[-1]:
            self.problem = f"no client could score the last state, so there is no final score; {self._trouble(total)}"
        if self.problem:
            self.history.event("failed", round=self.state.round, reason=self.problem)
        else:
            self._tell_privacy()
            missing = dict(self._scores()[-1].missing)
            self.history.event("finish", round=self.state.round, sha256=self.state.sha256(), missing=missing)
        return self.state

    def _scores(self) -> list[RoundScore]:
        """The scores that the run's result is: on test sets, or on validation samples if these are left alone."""
        return self.history.round_scores() if self.settings.rounds.test else self.history.validation_scores()

    def _last_scored(self) -> int:
        """The last scored round; -1 if none was."""
        return max((score.round for score in self._scores()), default=-1)

    # ---- privacy ---------------------------------------------------------------------------------------------------

    def _open_ledger(self) -> None:
        """Begin to count what clients release, or go on counting."""
        if isinstance(self.settings.privacy, GaussianPrivacy):
            sent = {"prototypes": self.method.prototypes_from != "none", "weights": bool(self.server.shared)}
            self.ledger = Ledger(self.settings.output_folder, sent, anew=not self.settings.resume)

    def _warn_of_privacy(self) -> None:
        """Say before the first round what the settings do not protect."""
        privacy = self.settings.privacy
        if self.ledger is None or not isinstance(privacy, GaussianPrivacy):
            return
        for reason in conditions(unprotected(privacy, self.ledger.sent), ()):
            self.history.event("privacy warning", round=self.state.round, reason=f"no epsilon: {reason}")
        for reason in warnings_of(privacy, self._samples()):
            self.history.event("privacy warning", round=self.state.round, reason=reason)

    def _tell_privacy(self) -> None:
        """Say what was spent."""
        report = self.privacy_report()
        if report:
            self.history.event("privacy spent", round=self.state.round, reason=spoken(report))

    def privacy_report(self) -> dict[str, Any] | None:
        """Return what has been released so far; ``None`` without differential privacy."""
        return privacy_report(self.settings, self.ledger, self._samples())

    def _samples(self) -> dict[str, int]:
        registrations = self.registry.registrations
        return {client: registrations[client].samples for client in sorted(registrations)}

    def _trouble(self, number: int) -> str:
        """Why answers did not count, and what is kept."""
        kept = (
            f"the state of round {number} is kept: resume=true goes on" if self.trained else "mend it, then run again"
        )
        return f"{self.history.commonest_trouble()}; all reasons are in {self.history.folder / 'activity.csv'}; {kept}"

    def _resume(self) -> Checkpoint | None:
        checkpoint = self.checkpoints.load() if self.settings.resume else None
        settings, folder = self.settings, self.settings.output_folder
        if checkpoint is None:
            self.checkpoints.clear()
            self.best_checkpoint.clear()
            self.history = self._history()
            changed_code(folder, self.settings.own_packages, resumed=False)
            return None
        differ = differing(settings.raw, folder / "config.yaml")
        check_belongs(checkpoint, self.method.name, settings.identity, settings.seed, differ)
        if self.method.scheduled:
            check_length(checkpoint, self.settings.train.rounds)
        self.state, self.run_id, self.earlier_seconds = checkpoint.state, checkpoint.run, checkpoint.seconds
        self.federation.bounds.lengths = dict(checkpoint.lengths)
        done = self.state.round
        self.history = self._history(done, done if self.late else done - 1)
        self.resume_check = ResumeCheck.of(folder, anyway=settings.resume == "anyway")
        if changed := changed_code(folder, self.settings.own_packages, resumed=True):
            self.history.event("code changed", round=done, reason=changed)
        for score in self.history.round_scores():
            self._tested.take(score)
        for score in self.history.validation_scores():
            self._validated.take(score)
            self._validation.append(score)
        self._skipped = set(self.history.rounds("round skipped"))
        best = best_round(states(self._validation, self._skipped))
        self.federation.best = best.round if best else -1
        return checkpoint

    def _history(self, keep_until: int = -1, scores_until: int = -1) -> History:
        settings = self.settings
        return History(
            settings.output_folder,
            keep_until,
            scores_until,
            self.listeners,
            scorers=settings.test_scorers,
            validators=settings.validation_scorers,
        )

    def _take_over(self, total: int) -> None:
        """Make the folder this run's, if another part of it, or another run that got nowhere, left it."""
        folder = self.settings.output_folder
        if self.settings.resume:
            write_text(folder / "config.yaml", yaml_of(self.settings.raw))  # more rounds, say, from here on
            if self.state.round < total:
                (folder / "summary.json").unlink(missing_ok=True)  # it is no longer the end of the run

    def _save(self) -> None:
        self.checkpoints.save(self._checkpoint())
        if self.late and self.federation.best == self.state.round:
            self.best_checkpoint.replace(self._checkpoint())

    def _checkpoint(self) -> Checkpoint:
        settings, seconds = self.settings, round(self.seconds(), 3)
        facts = (self.run_id, self.method.name, settings.identity, settings.seed, settings.train.rounds, seconds)
        return Checkpoint(self.state, *facts, self.federation.bounds.lengths)

    @property
    def late(self) -> bool:
        """Whether a round's own state is scored, and not that of the round before."""
        return self.method.scored_at != self.method.exchanges[0]

    def seconds(self) -> float:
        """Wall seconds so far; of earlier parts, what their last checkpoint counted."""
        return self.earlier_seconds + time.perf_counter() - self._started

    # ---- clients ---------------------------------------------------------------------------------------------------

    def _register(self, seconds: float) -> None:
        """Admit the clients that are there."""
        for failure in self.engine.register(self.registry.missing, self._admit, seconds):
            self.history.event("registration refused", client=failure.client, reason=failure.reason)
            self.refusals.append(f"{failure.client}: {failure.reason}")

    def _admit(self, registration: Registration) -> str:
        reason = self.resume_check.refuses(registration) or self.registry.admit(registration)
        if not reason:
            self.history.event("registered", **{key: getattr(registration, key) for key in _REGISTERED})
        return reason

    def _insist_on_quorum(self) -> None:
        registry, rounds = self.registry, self.settings.rounds
        needed, _ = self.federation.needed(len(registry.expected))
        if len(registry.registrations) < needed:
            raise EngineError(
                f"only {len(registry.registrations)} of {len(registry.expected)} clients registered within "
                f"{rounds.registration:g} s, {needed} are needed; missing: {', '.join(registry.missing)}"
                + "".join(f"\n  {refusal}" for refusal in self.refusals)
            )
        if registry.missing:
            self.history.event("missing", clients=registry.missing)

    # ---- one round -------------------------------------------------------------------------------------------------

    def _round(self, number: int) -> bool:
        """One round; whether it held. If it does not, the state stays as it was, but for the round number."""
        before = self.state
        started = time.perf_counter()
        self._register(0.0)
        participants, enough = self.registry.sample(number), self.registry.enough(number)
        self.history.event("round", round=number, clients=[client.id for client in participants])
        uploads: list[tuple[str, PrototypeSet]] = []
        for exchange in self.method.exchanges:
            self.federation.begin(number, exchange, score=exchange == self.method.scored_at and self._due(number))
            first = exchange == self.method.exchanges[0]
            closed = self._exchange(participants, enough if first else len(participants))
            updates = closed.updates
            if closed.skipped:
                self._insist_on_different_reasons(number)
                self.state = replace(before, round=number)
                self._skipped.add(number)
                self.history.event(
                    "round skipped", round=number, answered=len(updates), needed=closed.needed, by=closed.by
                )
                return False
            self.state = closed.state
            participants = [update.client for update in updates]
            uploads += [(update.client.id, update.prototypes) for update in updates]
            del closed, updates  # the next exchange has answers of its own to hold
        if bad := self.state.not_finite():
            self.state = replace(before, round=number - 1)
            raise EngineError(
                f"the state after round {number} has values in {bad} that are not finite, and training cannot recover "
                "from that: try a smaller train.learning_rate or train.clip_norm=1; the round before is kept"
            )
        self.state = replace(self.state, round=number)
        self.history.prototype_log.add(number, self.state.prototypes, uploads)
        seconds = round(time.perf_counter() - started, 3)
        self.history.event("round done", round=number, seconds=seconds, **self.history.round_totals(number))
        return True

    def _insist_on_different_reasons(self, number: int) -> None:
        """What every client raises alike lies in the method or the settings: further rounds would be the same.

        A single one of several clients may be in a trouble of its own, so two must have been asked where there are two.

        Raises:
            EngineError: with the traceback that they share.
        """
        failures = self._failures
        reasons = {failure.reason if failure.status == "failed" else "" for failure in failures}
        if len(reasons) != 1 or "" in reasons or len(failures) < min(2, len(self.registry.expected)):
            return
        lines = [line for line in failures[0].traceback.splitlines() if line.strip()]
        raise EngineError(
            f"in round {number} every client that was asked raised the same: {reasons.pop()}\n  "
            + "\n  ".join(["It would in every round, so the run stops; resume=true goes on.", *lines[-MAX_LINES:]])
        )

    def _due(self, number: int) -> bool:
        """Whether round ``number`` scores: every so many rounds, and the last where it scores its own state."""
        every = self.settings.rounds.evaluate_every
        return (number - 1) % every == 0 or (self.late and number == self.settings.train.rounds)

    def _score_last(self, total: int) -> None:
        """One trip that only scores the final state."""
        if not self.late:
            self.federation.begin(total + 1, self.method.exchanges[0])
            participants = list(self.server.clients) if self.method.personal else self.registry.sample(total)
            self._exchange(participants)

    def _exchange(self, participants: Sequence[Client], enough: int = 0) -> Outcome:
        """Ask ``participants`` to train, ``enough`` of whom are needed, or for scores alone; judge what comes."""
        message = self.federation.message(self.state)
        requests = self.federation.requests(self.run_id, participants, train=enough > 0)
        closing = None
        if 0 < enough < len(participants):
            closing = Closing(enough, frozenset(name for name, request in requests.items() if request.score))
        if self.ledger is not None:
            self.ledger.asked(self.run_id, [name for name, request in requests.items() if request.train])
        replies, failures = self.engine.exchange(
            message,
            requests,
            self.settings.rounds.deadline,
            keep=self.federation.answer_store.keep,
            closing=None if self.engine.simulated else closing,
        )
        if closing and self.engine.simulated:
            replies, late = self.federation.in_time(replies, closing)
            failures += [Failure(reply.client, "late", ENOUGH) for reply in late]
        unread = sum(failure.status == "refused" for failure in failures)
        closed = self.federation.close(self.state, replies, unread, enough)
        failures += [Failure(client, "refused", reason) for client, reason in closed.refused]
        self.history.add_bytes(exchange_rows(message, requests, replies, failures))
        self._record(closed, requests, failures)
        return closed

    # ---- the record ------------------------------------------------------------------------------------------------

    def _record(self, closed: Outcome, requests: Mapping[str, Request], failures: Sequence[Failure]) -> None:
        self._failures = () if closed.admitted else failures
        self._record_activity(closed, failures)
        if self.server.scoring and not (self.late and closed.skipped):  # then what was scored is thrown away
            self._record_scores(closed, requests, failures)

    def _record_activity(self, closed: Outcome, failures: Sequence[Failure]) -> None:
        number, exchange = self.server.round, self.server.exchange
        activity: list[dict[str, Any]] = []
        for reply in closed.admitted:
            row = _activity_row(number, exchange, reply, self.registry.domain(reply.client))
            if reply.client in closed.clipped:
                row["status"] = CLIPPED
                row["reason"] = _factors(closed.clipped[reply.client])[:MAX_REASON]
            activity.append(row)
        activity += [
            {"round": number, "exchange": exchange, "client": failure.client, "status": failure.status}
            | {"domain": self.registry.domain(failure.client), "reason": failure.reason}
            for failure in failures
        ]
        self.history.add_activity(activity)
        if self.ledger is not None:
            self.ledger.answered(self.run_id, activity)
        for client, factors in closed.clipped.items():
            told = {name: round(factor, 6) for name, factor in factors.items()}
            reason = _factors(factors)[:MAX_REASON]
            self.history.event(
                "client clipped", round=number, exchange=exchange, client=client, reason=reason, factors=told
            )
        for update in closed.updates:
            registered = self.registry.registrations[update.client.id].samples
            if update.samples < registered and update.client.id not in self._count_less:
                self._count_less.add(update.client.id)
                reason = f"as {update.samples} of {registered} samples (rounds.largest_client, rounds.largest_share)"
                self.history.event("client counts less", round=number, client=update.client.id, reason=reason)
        if late := sorted(failure.client for failure in failures if failure.status == "late"):
            self.history.event("late", round=number, exchange=exchange, clients=late)
        for failure in [failure for failure in failures if failure.status != "late"]:
            self.history.event(
                "client " + failure.status, round=number, exchange=exchange, client=failure.client,
                reason=failure.reason, traceback=failure.traceback,
            )  # fmt: skip

    def _record_scores(self, closed: Outcome, requests: Mapping[str, Request], failures: Sequence[Failure]) -> None:
        scored_round = self.server.round if self.late else self.server.round - 1
        rows: list[dict[str, Any]] = []
        validated: list[dict[str, Any]] = []
        for reply in closed.admitted:
            for entry in reply.answer.scores:
                rows.append(self._score_row(scored_round, reply, entry))
                self.history.confusions.add(scored_round, reply.client, entry, self.server.class_count)
            if reply.answer.validation is not None:
                validated.append(self._score_row(scored_round, reply, reply.answer.validation))
        self.history.add_scores(rows)
        self.history.add_validation(validated)
        if self.settings.rounds.test:
            self._report_missing(scored_round, requests, rows, failures)
        if rows:
            self._score_event("score", self._tested.score(scored_round, _entries(rows)))
        if validated:
            score = self._validated.score(scored_round, _entries(validated))
            self._validation.append(score)
            self._score_event("validation", score)
            if best_round(states(self._validation, self._skipped)) is score:
                self.federation.best = scored_round
                if not self.late:  # what was scored is the state that the next one is about to replace
                    self.best_checkpoint.replace(self._checkpoint())

    def _score_event(self, name: str, score: RoundScore) -> None:
        self.history.event(
            name,
            round=score.round,
            accuracy=dict(score.accuracy),
            average=score.average,
            worst=score.worst,
            missing=dict(score.missing),
        )

    def _report_missing(
        self,
        scored_round: int,
        requests: Mapping[str, Request],
        rows: Sequence[Mapping[str, Any]],
        failures: Sequence[Failure],
    ) -> None:
        """Tell of every score that was asked for and did not come, and once of each domain that no client can score."""
        came = {(row["client"], row["domain"]) for row in rows}
        failed = {failure.client: failure for failure in failures}
        asked: set[str] = set()
        for client, request in requests.items():
            asked |= set(request.score)
            for domain in [domain for domain in request.score if (client, domain) not in came]:
                failure = failed.get(client)
                status = failure.status if failure else "silent"
                reason = failure.reason if failure else "it answered without the score that it was asked for"
                told = {"domain": domain, "client": client, "status": status, "reason": reason}
                self.history.event("score missing", round=scored_round, **told)
        unasked = set(self.settings.test_scorers) - asked
        for domain in sorted(unasked - self._unasked):
            reason = "no client that takes part can score it"
            self.history.event("score missing", round=scored_round, domain=domain, status="unasked", reason=reason)
        self._unasked = unasked

    def _score_row(self, number: int, reply: Reply, entry: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "round": number, "client": reply.client, "client_domain": self.registry.domain(reply.client),
            "domain": entry["domain"], "count": entry["count"], "correct": entry["correct"],
            "accuracy": round(100.0 * entry["correct"] / max(1, entry["count"]), 4), "loss": round(entry["loss"], 6),
        }  # fmt: skip


def _entries(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, int, int]]:
    return [(row["domain"], row["correct"], row["count"]) for row in rows]


def _factors(factors: Mapping[str, float]) -> str:
    """What a client's update was scaled by, the most first."""
    parts = sorted(factors.items(), key=lambda item: item[1])
    return "longer than the bound, scaled: " + ", ".join(f"{name} by {factor:.3g}" for name, factor in parts)


def _activity_row(number: int, exchange: str, reply: Reply, domain: str) -> dict[str, Any]:
    answer, parts = reply.answer, reply.payload.part_bytes()
    return {
        "round": number,
        "exchange": exchange,
        "client": reply.client,
        "domain": domain,
        "status": completed_status(train=answer.trained),
        "samples": answer.samples,
        "steps": answer.steps,
        "losses": json.dumps({name: round(value, 6) for name, value in answer.losses.items()}),
        **{f"seconds_{phase}": answer.seconds.get(phase, "") for phase in ("load", "score", "train", "save")},
        "bytes_down": reply.bytes_down,
        "bytes_up": reply.bytes_up,
        **{f"bytes_up_{part}": size for part, size in parts.items()},
        "peak_bytes": answer.peak_bytes,
        "releases": answer.releases or "",
        "randomness": answer.randomness,
    }
