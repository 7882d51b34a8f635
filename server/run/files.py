"""A run's folder as it was written: each file read once and checked, and the facts that its lines state.

Every fact has one home. ``config.yaml`` has the settings, ``code.json`` the code and the packages, ``scores.jsonl`` the
scores and ``replies.jsonl`` the replies. The other facts are in ``events.jsonl``: what each client registered, what a
part of the run began with (``start``, ``resume``), and what it ended with (``finish``, ``stopped``, ``failed``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from common.errors import IN_A_NEW_RUN, CheckpointError, ConfigError
from common.metrics import MEASURES, Measure
from common.run_config import configuration_of, identity_of, read_class_names, read_config, scoring_of
from common.scores import RunScores, Scorers
from common.text import listing
from common.versions import hash_of_files, recorded_files, recorded_versions
from common.wire.messages import COUNTED_STATUSES, UNUSED_STATUSES, trained_count
from server.run.events import COUNTS_LESS_EVENT
from server.run.measures import measures_in
from server.run.schema import EVENTS, REPLIES, SCORES, check_events, read_lines, stream_checked

PARTS = ("weights", "prototypes", "extra", "header")
"""Parts of a message. The header is everything besides tensors: names, shapes, JSON, padding."""

BEGINNINGS = ("start", "resume")
"""Events that begin a part of a run."""

ENDINGS = ("finish", "stopped", "failed")
"""Events that end a part of a run. Such an event holds the facts of :class:`End` if the part ended in order."""


def check_version(folder: Path) -> None:
    """Refuse a run that an older version of Goldfinch recorded.

    Raises:
        ConfigError: the folder has ``history.csv`` and lacks ``scores.jsonl``.
    """
    if (folder / "history.csv").exists() and not (folder / SCORES).exists():
        raise ConfigError(
            f"{folder} was written by an older version of Goldfinch: its scores are in history.csv, and this version "
            f"reads {SCORES}; keep the folder and choose another output=, or train again with overwrite=true"
        )


@dataclass(frozen=True)
class End:
    """The end of a run.

    Args:
        event: ``finish``, ``stopped``, or ``failed``: the rounds are done, and the last state has no score.
        round: rounds that are done, held or skipped.
        sha256: SHA-256 of the final state.
        seconds: wall seconds of all parts of the run.
        server_peak_bytes: the most memory that the server's process had.
        key: what the participants were drawn from.
        joined_batches: clients whose last batch of one sample joined the one before it.
        privacy: what was released under differential privacy; ``None`` without it.
    """

    event: str
    round: int
    sha256: str
    seconds: float
    server_peak_bytes: int
    key: int | None = None
    joined_batches: list[str] = field(default_factory=list)
    privacy: Mapping[str, Any] | None = None

    def content(self) -> dict[str, Any]:
        """Return the facts as the event holds them, besides its name and round; empty facts are left out."""
        facts = asdict(self)
        del facts["event"], facts["round"]
        return {name: value for name, value in facts.items() if value not in (None, [])}

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> End | None:
        """Return the facts in an event; ``None`` if it ends no run."""
        if entry["event"] not in ENDINGS or "sha256" not in entry:
            return None
        return cls(**{name: entry[name] for name in cls.__dataclass_fields__ if name in entry})


@dataclass(frozen=True)
class Facts:
    """What a run's files state of it besides its scores and replies.

    Args:
        method, data, protocol, model: their names.
        seed: the run's seed.
        identity: the settings that change the result, as a hash; see :attr:`common.settings.RunSettings.identity`.
        configuration: the same without the seed.
        scoring: the settings of its scores, as a hash.
        planned: rounds that its settings ask for.
        code: the hash of the code that ran, with ``(changed)`` if a part ran other code; ``unknown`` if it is not
            recorded.
        versions: the version of each package on the server.
        processor: the server's processor, see :func:`common.versions.processor`, and the cards that clients train on;
            empty before the run starts.
        scored: what was scored: ``global model``, ``own model`` of each client, or ``exported model``; empty before the
            run starts.
        bound: the line of a table that the method is, ``lower`` or ``upper``; ``None`` if it is ranked with others.
        held: the number of rounds that were held.
        skipped: the rounds that missed their quorum.
        latest: the last round that was held.
        scorers: the scored domains by ``test`` and ``validation``, with the number of scores that complete each.
        measures: the metrics that the run has.
        further: those of ``rounds.scores`` and ``own_metric`` among them.
        unseen: the scored domains of which no client holds training samples.
        registrations: the last registration of each client, by its id.
        taking_part: the clients that registered in the last part of the run.
        counts_less: see :func:`counts_less`.
        early_stop: the event of ``train.patience`` ending the run; ``None`` if it did not.
        end: how the run ended; ``None`` if it is going on, was killed, or ended by an error.
    """

    method: str
    data: str
    protocol: str
    model: str
    seed: int
    identity: str
    configuration: str
    scoring: str
    planned: int
    code: str
    versions: Mapping[str, str] = field(default_factory=dict)
    processor: Mapping[str, str] = field(default_factory=dict)
    scored: str = ""
    bound: str | None = None
    held: int = 0
    skipped: frozenset[int] = frozenset()
    latest: int = 0
    scorers: Mapping[str, Scorers] = field(default_factory=dict)
    measures: Mapping[str, Measure] = field(default_factory=lambda: dict(MEASURES))
    further: Mapping[str, Measure] = field(default_factory=dict)
    unseen: Sequence[str] = ()
    registrations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    taking_part: Sequence[str] = ()
    counts_less: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    early_stop: Mapping[str, Any] | None = None
    end: End | None = None

    @property
    def rounds(self) -> int:
        """Rounds that are done: of a run that has ended the skipped ones too, or else up to the last that was held."""
        if self.end is not None:
            return self.end.round
        return self.latest

    @property
    def trained(self) -> bool:
        """Whether there is a state to score: a round was held, or the method does not train."""
        return self.held > 0 or self.scored == EVALUATED

    @property
    def samples(self) -> dict[str, int]:
        """Training samples of each client of the last part of the run."""
        return {client: int(self.registrations[client]["samples"]) for client in self.taking_part}

    @property
    def splits(self) -> dict[str, str]:
        """SHA-256 of the training samples of each client of the last part of the run."""
        return {client: str(self.registrations[client].get("split", "")) for client in self.taking_part}


EVALUATED, OWN, SHARED = "exported model", "own model", "global model"
"""What is scored: the model of a method that does not train, each client's own model, or one model for all clients."""


class RunFiles:
    """The files of a run's folder, finished or not. A file is read when it is first needed, and only once.

    Every property raises :class:`~common.errors.ConfigError` if its file is damaged, or if an older version wrote it.

    Args:
        folder: the run's output folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def config_file(self) -> Path:
        """The file of :attr:`config`."""
        return self.folder / "config.yaml"

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """``config.yaml``, which may name classes that must not be imported.

        Raises:
            ConfigError: there is no such file.
        """
        if not self.config_file.exists():
            raise ConfigError(f"{self.folder} holds no run: it has no config.yaml")
        return read_config(self.config_file)

    @cached_property
    def class_names(self) -> Sequence[str]:
        """The classes by label, which ``config.yaml`` names."""
        return read_class_names(self.config_file)

    @cached_property
    def code_files(self) -> Mapping[str, str]:
        """The hash of each file of code that ran, from ``code.json``; empty if it cannot be read."""
        return recorded_files(self.folder / "code.json")

    @cached_property
    def events(self) -> Sequence[Mapping[str, Any]]:
        """Lines of ``events.jsonl``; none if there is no such file."""
        events = self._lines(EVENTS)
        check_events(self.folder / EVENTS, events)
        return events

    @cached_property
    def score_lines(self) -> Sequence[Mapping[str, Any]]:
        """Lines of ``scores.jsonl``; none if there is no such file."""
        return self._lines(SCORES)

    @cached_property
    def replies(self) -> Sequence[Mapping[str, Any]]:
        """Lines of ``replies.jsonl``; none if there is no such file."""
        return self._lines(REPLIES)

    def check_whole(self) -> None:
        """Check that the folder has the events of the rounds that are done, and the scores and replies that they name.

        Raises:
            CheckpointError: a file is missing.
        """
        names = {entry["event"] for entry in self.events}
        needed = [EVENTS]
        if names & {"score", "validation"}:
            needed.append(SCORES)
        if "round done" in names:
            needed.append(REPLIES)
        missing = [name for name in needed if not (self.folder / name).exists()]
        if missing:
            raise CheckpointError(
                f"{self.folder} has a checkpoint and no {listing(missing)}, so that the record of the rounds that are "
                "done is not whole: restore it from a copy, or start again with overwrite=true"
            )

    def _lines(self, name: str) -> list[dict[str, Any]]:
        check_version(self.folder)
        path = self.folder / name
        if not path.exists():
            return []
        return read_lines(path)

    @cached_property
    def reply_totals(self) -> ReplyTotals:
        """What the replies add up to; their lines, of which a long run has many, are not kept."""
        check_version(self.folder)
        path = self.folder / REPLIES
        if not path.exists():
            return ReplyTotals.of([])
        return ReplyTotals.of(stream_checked(path))

    @cached_property
    def facts(self) -> Facts:
        """What the files state of the run besides its scores and replies."""
        config, events = self.config, self.events
        choices = config["choices"]
        part = _last_part(events)
        beginning = part[0] if part else {}
        end, early_stop = None, None
        for entry in part:
            if entry["event"] == "stopped early":
                early_stop = entry
            end = End.of(entry) or end
        registrations: dict[str, Mapping[str, Any]] = {}
        for entry in events:
            if entry["event"] == "registered":
                registrations[str(entry["client"])] = entry
        held = [int(entry["round"]) for entry in events if entry["event"] == "round done"]
        further = measures_in(beginning.get("measures", {}))
        return Facts(
            method=str(beginning.get("method") or _module(config["method"]["_target_"])),
            data=str(beginning.get("data") or choices.get("data") or ""),
            protocol=str(choices.get("protocol") or ""),
            model=str(choices.get("model") or ""),
            seed=int(config["seed"]),
            identity=identity_of(config),
            configuration=configuration_of(config),
            scoring=scoring_of(config),
            planned=int(config["train"]["rounds"]),
            code=self._code_hash(events),
            versions=recorded_versions(self.folder / "code.json"),
            processor={**beginning.get("processor", {}), **_cards(registrations.values())},
            scored=str(beginning.get("scored", "")),
            bound=beginning.get("bound"),
            held=len(held),
            skipped=frozenset(int(entry["round"]) for entry in events if entry["event"] == "round skipped"),
            latest=max(held, default=0),
            scorers=scorers_in(beginning),
            measures={**MEASURES, **further},
            further=further,
            unseen=tuple(beginning.get("unseen", ())),
            registrations=dict(sorted(registrations.items())),
            taking_part=_taking_part(part, registrations.keys()),
            counts_less=counts_less(events),
            early_stop=early_stop,
            end=end,
        )

    def _code_hash(self, events: Iterable[Mapping[str, Any]]) -> str:
        if not self.code_files:
            return "unknown"
        code = hash_of_files(self.code_files)
        if any(entry["event"] == "code changed" for entry in events):
            return f"{code} (changed)"
        return code

    def scores_by(self, metric: str = "accuracy") -> RunScores:
        """Return the run's scores.

        Args:
            metric: by which test images are scored.
        """
        facts = self.facts
        chosen_by = str(self.config["rounds"].get("metric", "accuracy"))
        return RunScores(self.score_lines, self.events, facts.scorers, facts.measures, metric, chosen_by)

    def rules_by(self, metric: str = "accuracy") -> dict[str, dict[str, Any]]:
        """Return the scores under each rule so far, see :func:`common.metrics.summarise`.

        A run that has ended without a round has no scores. If the last state could not be scored, the run has no
        score by the rule ``final``.

        Args:
            metric: by which test images are scored.
        """
        facts = self.facts
        if facts.end is not None and not facts.trained:
            return {}
        last = int(self.config["rounds"]["last_rounds"])
        by_rule = self.scores_by(metric).rules(last, facts.unseen)
        if facts.end is not None and facts.end.event == "failed":
            by_rule.pop("final", None)
        return by_rule


def _module(target: str) -> str:
    """Return the name of the module in the full name of a class."""
    return target.rpartition(".")[0].rpartition(".")[2]


def _cards(registrations: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the names of the cards that clients registered with, as ``card``; empty if all train on processors."""
    names: set[str] = set()
    for entry in registrations:
        name, on_a_card, _ = str(entry.get("device", "")).partition(" (cuda")
        if on_a_card:
            names.add(name)
    if not names:
        return {}
    return {"card": " and ".join(sorted(names))}


def _last_part(events: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the events of a run from its last ``start`` or ``resume`` on."""
    for number in range(len(events) - 1, -1, -1):
        if events[number]["event"] in BEGINNINGS:
            return events[number:]
    return []


def scorers_in(beginning: Mapping[str, Any]) -> dict[str, Scorers]:
    """Return the scored domains by ``test`` and ``validation`` of a part of a run that began with this event."""
    return {kind: beginning[kind] for kind in ("test", "validation") if kind in beginning}


def _taking_part(part: Sequence[Mapping[str, Any]], registered: Collection[str]) -> Sequence[str]:
    """Return the clients that registered before a part of a run began, and while it ran."""
    clients: set[str] = set()
    for entry in part:
        if entry["event"] in BEGINNINGS:
            clients.update(entry["clients"])
        if entry["event"] == "registered":
            clients.add(str(entry["client"]))
        if End.of(entry) is not None:
            break
    return tuple(sorted(clients.intersection(registered)))


@dataclass(frozen=True)
class ReplyTotals:
    """What a run's replies add up to.

    Args:
        answers: updates that were used, as ``admitted``, and replies with each other status. Updates that were scaled
            are used, and are also counted on their own.
        parts: bytes by direction, ``down`` or ``up``, and part; ``total`` is the direction's total.
    """

    answers: Mapping[str, int]
    parts: Mapping[str, Mapping[str, int]]

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes to all clients (``down``) and from them (``up``)."""
        return {direction: self.parts[direction]["total"] for direction in ("up", "down")}

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]]) -> ReplyTotals:
        """Return the totals over lines of ``replies.jsonl``."""
        statuses: dict[str, int] = {}
        sums = {direction: dict.fromkeys((*PARTS, "total"), 0) for direction in ("down", "up")}
        for line in lines:
            statuses[line["status"]] = statuses.get(line["status"], 0) + 1
            for direction, parts in sums.items():
                for part in PARTS:
                    parts[part] += line.get(f"bytes_{direction}_{part}", 0)
                parts["total"] += line.get(f"bytes_{direction}", 0)
        answers = {"admitted": trained_count(statuses)}
        for status in COUNTED_STATUSES:
            answers[status] = statuses.get(status, 0)
        return cls(answers, sums)


def commonest_trouble(lines: Iterable[Mapping[str, Any]]) -> str:
    """Return the most frequent reason why a reply did not count, as text.

    Reasons that differ only in numbers or in the client's name are counted together.
    """
    kinds: Counter[tuple[str, str]] = Counter()
    shown: dict[tuple[str, str], str] = {}
    count = 0
    for row in lines:
        if row["status"] in UNUSED_STATUSES:
            reason = row.get("reason", "")
            kind = row["status"], re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "#", reason.replace(row["client"], "#"))
            kinds[kind] += 1
            shown.setdefault(kind, f"{row['client']} in round {row['round']}: {reason}")
            count += 1
    if not count:
        return "no client was asked, because none was available"
    (kind, times), *_ = kinds.most_common(1)
    return f"{times} of the {count} replies that did not count were {kind[0]}, such as {shown[kind]}"


def goes_on(lines: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether a resumed run may do better: some reply of the last round failed for another reason than settings.

    Args:
        lines: lines of ``replies.jsonl``.
    """
    last, reasons = 0, set[str]()
    for line in lines:
        if line["round"] > last:
            last, reasons = line["round"], set()
        if line["status"] in UNUSED_STATUSES:
            reasons.add(line.get("reason", ""))
    return not reasons or any(IN_A_NEW_RUN not in reason for reason in reasons)


def last_replies(lines: Iterable[Mapping[str, Any]]) -> tuple[dict[str, int], dict[str, float], set[str]]:
    """Return what the last replies tell, for a run that goes on.

    That is the steps of each client's last training, the last mean cross-entropy in training of each domain, and the
    clients that did not reply when they were asked last.

    Args:
        lines: lines of ``replies.jsonl``.
    """
    steps: dict[str, int] = {}
    losses: dict[str, float] = {}
    silent: set[str] = set()
    for line in lines:
        if line.get("steps"):
            steps[line["client"]] = line["steps"]
        if "cross_entropy" in line.get("losses", {}):
            losses[line["domain"]] = line["losses"]["cross_entropy"]
        if line["status"] == "lost":
            silent.add(line["client"])
        elif line["status"] not in ("failed", "late"):
            silent.discard(line["client"])
    return steps, losses, silent


def counts_less(events: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Return the clients that count for fewer samples than they registered (``rounds.largest_client``).

    Args:
        events: the run's events.

    Returns:
        By client, the samples that it ``registered`` and that it ``counted`` for in the first such ``round``.
    """
    by_client: dict[str, dict[str, int]] = {}
    for entry in events:
        if entry["event"] == COUNTS_LESS_EVENT:
            by_client[str(entry["client"])] = {key: int(entry[key]) for key in ("registered", "counted", "round")}
    return dict(sorted(by_client.items()))
