"""The outcome of each exchange of a run as lines of its history, and the best round by validation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from common.metrics import COUNTED, ClassTotals, RoundScore, best_round, cells_of, counts_fit, states
from common.scores import class_totals, lines_on
from common.settings import RunSettings
from common.wire.messages import SCALED, Request, completed_status, request_text
from common.wire.payload import Payload, encoded_size
from server.run.accounting import PrivacyAccount
from server.run.chance import chance, one_class, remedies
from server.run.engine import Failure
from server.run.events import COUNTS_LESS_EVENT, COUNTS_LESS_SETTINGS, SCALED_EVENT
from server.run.files import last_replies
from server.run.history import History
from server.run.measures import FurtherMeasures
from server.run.schema import REPLIES, stream_lines
from strategies.core.federation import Federation, Outcome, Reply
from strategies.core.method import ServerContext

EARLY_ROUNDS = 3
"""Before this round a model may assign all images to one class and recover, or be at chance and learn."""

Further = Mapping[str, float | None]
"""Values of further metrics of a domain, ``None`` for one that is not defined."""

PHASES = ("load", "score", "train", "save")
"""What a device does in an exchange, in this order, with a column of seconds each."""


class Recorder:
    """Writes the records of a run's exchanges.

    Scores that the history holds already, because the run was resumed, are taken into account first.

    Args:
        settings: the run's settings.
        federation: the exchange that is recorded; ``federation.best`` is set to the best round by validation.
        history: the run's files.
        account: what clients have released; ``None`` without differential privacy.
        run_id: the run's id.
    """

    def __init__(
        self,
        settings: RunSettings,
        federation: Federation,
        history: History,
        account: PrivacyAccount | None,
        run_id: str,
    ) -> None:
        self.settings, self.federation, self.history = settings, federation, history
        self.account, self.run_id = account, run_id
        self.registry = federation.registry
        self.scores_new_state = settings.method.scores_new_state
        self._capped = set(history.counts_less())
        """Clients that count for fewer samples than they registered, each reported once."""
        self._unscored: set[str] = set()
        """Domains that no client was asked to score in the last exchange."""
        self._further = FurtherMeasures(settings, history.event)
        self._steps, self._training_loss, self.registry.silent = last_replies(stream_lines(history.folder / REPLIES))
        """Steps of each client's last training; each domain's last loss in training; clients that did not reply."""
        self._skipped = set(history.rounds("round skipped"))
        scores = history.scores()
        self._collapsed = {entry["domain"] for entry in scores.events if entry["event"] == "collapsed"}
        """Domains in which the model predicts one class, each reported once."""
        if settings.resume != "anyway":
            for line in lines_on("test", scores.lines):
                federation.test_counts[line["client"], line["domain"]] = line["count"]
        self._tested = scores.series("test", "accuracy")
        self._validated = scores.series("validation", settings.rounds.metric)
        self._totals: dict[str, ClassTotals] = {}
        """Images by class of each domain in the last score."""
        self._choose_best()

    @property
    def server(self) -> ServerContext:
        """The present exchange."""
        return self.federation.server

    @property
    def validated(self) -> int:
        """The last round that was scored on validation samples; -1 if none was."""
        if not self._validated.scores:
            return -1
        return self._validated.scores[-1].round

    @property
    def rounds_since_best(self) -> int:
        """The trained states after the best, of which validation samples of as many domains were scored."""
        scores = states(self._validated.scores, self._skipped)
        best = best_round(scores)
        if best is None:
            return 0
        return sum(score.round > best.round and len(score.missing) <= len(best.missing) for score in scores)

    def _choose_best(self) -> None:
        """Set ``federation.best``; -1 without a score on validation samples."""
        best = best_round(states(self._validated.scores, self._skipped))
        self.federation.best = best.round if best else -1

    def record_skipped(self, number: int, outcome: Outcome) -> None:
        """Write that round ``number`` missed its quorum."""
        self._skipped.add(number)
        self.history.event(
            "round skipped", round=number, answered=len(outcome.updates), needed=outcome.needed, by=outcome.by
        )

    def count_requests(self, requests: Mapping[str, Request]) -> None:
        """Count each request to train as a release of a private run, before it is sent."""
        if self.account is not None:
            self.account.ledger.count_requests(
                self.run_id, [client for client, request in requests.items() if request.train]
            )

    def record(
        self,
        message: Payload,
        requests: Mapping[str, Request],
        replies: Sequence[Reply],
        outcome: Outcome,
        failures: Sequence[Failure],
    ) -> None:
        """Write the outcome of an exchange.

        Args:
            message: the tensors that every client was sent.
            requests: what each client was asked, by client id.
            replies: the replies that could be read.
            outcome: what was accepted of them.
            failures: clients without a reply, and replies that were not accepted.
        """
        scaled = [Failure(client, SCALED, reason) for client, reason in outcome.scaling_reasons().items()]
        self._write_replies(message, requests, replies, outcome.admitted, [*scaled, *failures])
        if self.server.scoring and not self.scores_new_state:  # scores of the round before come first
            self._write_scores(outcome, requests, failures)
        for failure in scaled:
            factors = {name: round(factor, 6) for name, factor in outcome.scaled[failure.client].items()}
            self._client_event(SCALED_EVENT, failure.client, reason=failure.reason, factors=factors)
        self._write_capped(outcome)
        for reply in outcome.admitted:
            if reply.answer.lost:
                self._write_lost_state(requests[reply.client])
        self._write_failures(failures)
        if self.server.scoring and self.scores_new_state and not outcome.skipped:  # else the scored state is discarded
            self._write_scores(outcome, requests, failures)

    # ---- replies ---------------------------------------------------------------------------------------------------

    def _write_replies(
        self,
        message: Payload,
        requests: Mapping[str, Request],
        replies: Sequence[Reply],
        admitted: Sequence[Reply],
        failures: Sequence[Failure],
    ) -> None:
        """Append one line per client that was asked, with the status and the reason of its failure if it has one.

        Bytes are those that Goldfinch hands to the engine and receives from it: the tensors, the request's text, and
        the error text of a client that failed. What a transport adds (framing, signatures, TLS, polls, the app's code)
        is not counted; docs/results/bytes.md compares them with what is sent on the wire.
        """
        message_parts, message_size = message.part_bytes(), encoded_size(message)
        arrived = {reply.client: reply for reply in replies}
        lines: list[dict[str, Any]] = []
        scaled = {failure.client: failure for failure in failures if failure.status == SCALED}
        for reply in admitted:
            line = self._reply_line(reply)
            if reply.answer.steps:  # of several exchanges, one trains
                self._steps[reply.client] = reply.answer.steps
            if reply.client in scaled:
                line |= {"status": SCALED, "reason": scaled[reply.client].reason}
            lines.append(line)
        for failure in failures:
            if failure.status != SCALED:
                lines.append(self._failure_line(failure, arrived.get(failure.client)))
        sent = {failure.client: failure.sent for failure in failures}
        for line in lines:
            client = line["client"]
            if client in requests and sent.get(client, True):  # a stranger's reply answers no request
                request_size = len(request_text(requests[client]).encode())
                line |= _byte_columns("down", message_parts, message_size + request_size)
        self.history.add_replies(lines)
        if self.account is not None:
            unsent = [client for client, was_sent in sent.items() if not was_sent]
            self.account.ledger.count_replies(self.run_id, lines, unsent)

    def _reply_line(self, reply: Reply) -> dict[str, Any]:
        """Return the line of an accepted reply, without the bytes of the message that was sent to the client."""
        answer = reply.answer
        line: dict[str, Any] = {
            "round": self.server.round,
            "exchange": self.server.exchange,
            "time": round(reply.time, 3),
            "client": reply.client,
            "domain": self.registry.domain(reply.client),
            "status": completed_status(train=answer.trained),
            "samples": answer.samples,
            "steps": answer.steps,
            "losses": {name: round(value, 6) for name, value in answer.losses.items()},
            "peak_bytes": answer.peak_bytes,
        }
        if answer.releases:
            line["releases"] = answer.releases
        if answer.randomness:
            line["randomness"] = answer.randomness
        for phase in PHASES:
            if phase in answer.seconds:
                line[f"seconds_{phase}"] = answer.seconds[phase]
        return line | _byte_columns("up", reply.payload.part_bytes(), reply.bytes_up)

    def _failure_line(self, failure: Failure, reply: Reply | None) -> dict[str, Any]:
        """Return the line of a client without an accepted reply, without the bytes of the message sent to it.

        Args:
            failure: what went wrong.
            reply: the client's reply if it arrived, could be read, and was refused.
        """
        line: dict[str, Any] = {
            "round": self.server.round,
            "exchange": self.server.exchange,
            "time": round(failure.time, 3),
            "client": failure.client,
            "status": failure.status,
            "domain": self.registry.domain(failure.client),
            "reason": failure.reason,
        }
        if reply is not None:
            return line | _byte_columns("up", reply.payload.part_bytes(), reply.bytes_up)
        size = failure.bytes_up
        if not size and failure.status not in ("lost", "late"):
            size = len(failure.reason.encode()) + len(failure.traceback.encode())
        return line | _byte_columns("up", {}, size)

    def _write_capped(self, outcome: Outcome) -> None:
        """Report once each client that counts for fewer samples than it registered."""
        for update in outcome.updates:
            client = update.client.id
            registered = self.registry.registrations[client].samples
            if update.samples < registered and client not in self._capped:
                self._capped.add(client)
                self.history.event(
                    COUNTS_LESS_EVENT,
                    round=self.server.round,
                    client=client,
                    reason=f"as {update.samples} of {registered} samples ({COUNTS_LESS_SETTINGS})",
                    counted=update.samples,
                    registered=registered,
                )

    def _write_lost_state(self, request: Request) -> None:
        """Report a client that started without its own state, because its device has lost it."""
        if request.own is not None:
            reason = (
                f"its device has lost its own state of round {request.own['round']}, the last that counted, and all "
                "others, so it started without one; if the disk was changed, put the old state folder back"
            )
            self._client_event("client state lost", request.client, reason=reason)

    def _write_failures(self, failures: Sequence[Failure]) -> None:
        late = sorted(failure.client for failure in failures if failure.status == "late")
        if late:
            self.history.event("late", round=self.server.round, exchange=self.server.exchange, clients=late)
        for failure in failures:
            if failure.status != "late":
                self._client_event(
                    f"client {failure.status}", failure.client, reason=failure.reason, traceback=failure.traceback
                )

    def _client_event(self, name: str, client: str, **content: Any) -> None:
        self.history.event(name, round=self.server.round, exchange=self.server.exchange, client=client, **content)

    # ---- scores ----------------------------------------------------------------------------------------------------

    def _write_scores(self, outcome: Outcome, requests: Mapping[str, Request], failures: Sequence[Failure]) -> None:
        scored_round = self.server.round if self.scores_new_state else self.server.round - 1
        tested: list[dict[str, Any]] = []
        validated: list[dict[str, Any]] = []
        for reply in outcome.admitted:
            if "cross_entropy" in reply.answer.losses:
                self._training_loss[self.registry.domain(reply.client)] = reply.answer.losses["cross_entropy"]
            for entry in reply.answer.scores:
                self._warn_of_collapse(scored_round, entry)
                tested.append(self._score_line(scored_round, reply, "test", entry))
            if reply.answer.validation is not None:
                validated.append(self._score_line(scored_round, reply, "validation", reply.answer.validation))
        self.history.add_scores([*tested, *validated])
        values = self._values(scored_round, outcome)
        if self.settings.rounds.test:
            self._report_missing(scored_round, requests, tested, failures)
        if tested:
            score = self._tested.add(scored_round, tested)
            self._score_event("score", score, values["test"], **self._resolution(outcome))
            self._totals = {domain: counts for (_, domain), counts in class_totals(tested).items()}
            self._tell_metrics(scored_round, values["test"])
        if validated:
            score = self._validated.add(scored_round, validated, values["validation"])
            metric = self.settings.rounds.metric
            named = {"metric": metric} if metric != "accuracy" else {}
            self._score_event("validation", score, values["validation"], **named)
            self._choose_best()

    def _values(self, scored_round: int, outcome: Outcome) -> dict[str, dict[tuple[int, str], Further]]:
        """Return the values of ``rounds.scores`` and ``own_metric``, of all clients that scored a domain together.

        Returns:
            By ``test`` or ``validation``, then by round and domain; empty mappings without such metrics.
        """
        values: dict[str, dict[tuple[int, str], Further]] = {"test": {}, "validation": {}}
        if not self._further.measures:
            return values
        for scored_on, by_domain in _entries_by_domain(outcome).items():
            for domain, entries in sorted(by_domain.items()):
                values[scored_on][scored_round, domain] = self._further.values(scored_round, entries)
        return values

    def _resolution(self, outcome: Outcome) -> dict[str, Any]:
        """Return how far the values on test images may be from the exact ones, by metric that is binned."""
        resolutions: dict[str, float] = {}
        if not self._further.measures:
            return {}
        for entries in _entries_by_domain(outcome)["test"].values():
            for metric, resolution in self._further.resolution(entries).items():
                resolutions[metric] = max(resolutions.get(metric, 0.0), resolution)
        if not resolutions:
            return {}
        return {"resolution": resolutions}

    def _tell_metrics(self, scored_round: int, values: Mapping[tuple[int, str], Further]) -> None:
        """Tell the listeners of the metrics of each domain, over all clients that scored it."""
        metrics: dict[str, dict[str, float]] = {}
        for metric in COUNTED:
            metrics[metric] = {}
            for domain, totals in sorted(self._totals.items()):
                metrics[metric][domain] = totals.metric(metric)
        for (_, domain), by_metric in values.items():
            for name, value in by_metric.items():
                if value is not None:
                    metrics.setdefault(name, {})[domain] = value
        self.history.tell("metrics", {"round": scored_round, "metrics": metrics})

    def _score_line(self, number: int, reply: Reply, scored_on: str, entry: Mapping[str, Any]) -> dict[str, Any]:
        line: dict[str, Any] = {
            "round": number,
            "client": reply.client,
            "client_domain": self.registry.domain(reply.client),
            "domain": entry["domain"],
            "scored_on": scored_on,
            "count": entry["count"],
            "correct": entry["correct"],
            "loss": round(entry["loss"], 6),
        }
        if counts_fit(entry.get("confusion"), self.server.class_count, entry["count"], entry["correct"]):
            line["confusion"] = cells_of(entry["confusion"])
        if self._further.measures:
            line |= self._further.recorded(number, entry)
        return line

    def _warn_of_collapse(self, scored_round: int, entry: Mapping[str, Any]) -> None:
        """Report once for a domain that training fits its images and evaluation assigns nearly all to one class.

        Batch normalisation causes it where domains differ: evaluation uses statistics averaged over all clients.
        """
        domain = entry["domain"]
        loss = self._training_loss.get(domain)
        guessing = math.log(max(2, self.server.class_count))  # the cross-entropy of equal probabilities
        early = scored_round < min(EARLY_ROUNDS, self.settings.train.rounds)
        averaged = any(name.endswith("running_mean") for name in self.server.shared)
        if not averaged or early or domain in self._collapsed or loss is None or loss > guessing / 2:
            return
        if not counts_fit(entry.get("confusion"), self.server.class_count, entry["count"], entry["correct"]):
            return
        predicted = one_class(entry["confusion"])
        if predicted is None:
            return
        label, share = predicted
        self._collapsed.add(domain)
        self.history.event(
            "collapsed",
            round=scored_round,
            domain=domain,
            label=self.settings.data.class_names[label],
            share=round(share, 3),
            loss=round(loss, 4),
        )

    def warn_if_at_chance(self) -> None:
        """Report that the last score is no better than predicting one class for every image, and what may help.

        The average over domains is compared with that of the most frequent class of each domain, and counts as better
        from two of its standard errors on, since a few test images can be predicted by luck.
        """
        counts = list(self._totals.values())
        scores = self._tested.scores
        if not counts or not scores or scores[-1].round < EARLY_ROUNDS:
            return
        average, at_most = scores[-1].average, chance(counts)
        if average > at_most.average + 2 * at_most.error:
            return
        steps = round(sum(self._steps.values()) / max(1, len(self._steps)))
        self.history.event(
            "at chance",
            round=scores[-1].round,
            average=round(average, 4),
            chance=round(at_most.average, 4),
            images=sum(sum(each.true) for each in counts),
            steps=steps,
            remedies=remedies(self.settings, steps),
        )

    def _score_event(
        self, name: str, score: RoundScore | None, values: Mapping[tuple[int, str], Further], **content: Any
    ) -> None:
        """Write the event of a round's score; its numbers are in ``scores.jsonl``, and the listeners get them.

        The event holds the values of ``rounds.scores`` and ``own_metric`` of all clients together. A reader could not
        compute those of ``own_metric``: it imports no class of a user's.
        """
        if score is None:  # the metric is defined in no domain
            return
        by_metric: dict[str, dict[str, float | None]] = {}
        for (_, domain), each in values.items():
            for metric, value in each.items():
                by_metric.setdefault(metric, {})[domain] = value
        if by_metric:
            content["values"] = by_metric
        self.history.event(name, round=score.round, told=score.content(), **content)

    def _report_missing(
        self,
        scored_round: int,
        requests: Mapping[str, Request],
        rows: Sequence[Mapping[str, Any]],
        failures: Sequence[Failure],
    ) -> None:
        """Report every score that was asked for and is missing, and once each domain that no client can score."""
        scored = {(row["client"], row["domain"]) for row in rows}
        failed = {failure.client: failure for failure in failures}
        asked: set[str] = set()
        for client, request in requests.items():
            asked.update(request.score)
            status, reason = "silent", "it answered without the score that it was asked for"
            if client in failed:
                status, reason = failed[client].status, failed[client].reason
            for domain in request.score:
                if (client, domain) not in scored:
                    content: dict[str, Any] = {"domain": domain, "client": client, "status": status, "reason": reason}
                    self.history.event("score missing", round=scored_round, **content)
        unscored = set(self.settings.test_scorers) - asked
        for domain in sorted(unscored - self._unscored):
            reason = "no client that takes part can score it"
            self.history.event("score missing", round=scored_round, domain=domain, status="unasked", reason=reason)
        self._unscored = unscored


def _entries_by_domain(outcome: Outcome) -> dict[str, dict[str, list[Mapping[str, Any]]]]:
    """Return the scores in the accepted replies, by ``test`` or ``validation``, then by domain."""
    scores: dict[str, dict[str, list[Mapping[str, Any]]]] = {"test": {}, "validation": {}}
    for reply in outcome.admitted:
        for entry in reply.answer.scores:
            scores["test"].setdefault(entry["domain"], []).append(entry)
        validation = reply.answer.validation
        if validation is not None:
            scores["validation"].setdefault(validation["domain"], []).append(validation)
    return scores


def _byte_columns(direction: str, parts: Mapping[str, int], total: int) -> dict[str, int]:
    """Return the bytes of a line of ``replies.jsonl`` for one direction.

    Args:
        direction: ``down`` or ``up``.
        parts: bytes of the message's tensors by part.
        total: bytes of the whole message; what no part accounts for is its header.
    """
    if not total:
        return {}
    columns = {f"bytes_{direction}": total}
    header = total
    for part, size in parts.items():
        if size:
            columns[f"bytes_{direction}_{part}"] = size
            header -= size
    columns[f"bytes_{direction}_header"] = header
    return columns
