"""The numbers that the trackers log: which values of which event, under which tag."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from common.metrics import METRICS
from common.wire.messages import trained_count


class Scalar(NamedTuple):
    """One number of one round.

    Args:
        tag: what the number is, from the general to the particular, such as ``accuracy/<domain>/<client>``.
        round: the round that the number belongs to.
        value: the number.
    """

    tag: str
    round: int
    value: float


def scalars(name: str, entry: Mapping[str, Any]) -> list[Scalar]:
    """Return the numbers of an event, or of the rows of ``scores`` and ``replies``; empty for all other events.

    - ``scores``: ``accuracy/<domain>/<client>`` in per cent and ``test_loss/<domain>/<client>`` of every row; where
      confusion counts are recorded, also ``balanced_accuracy/...``, ``macro_f1/...`` and ``worst_class/...``;
      likewise each metric of ``rounds.scores`` and ``own_metric``.
    - ``metrics``: ``summary/<metric>/<domain>`` of the same three in per cent, and of those of ``rounds.scores`` and
      ``own_metric`` in their units, over all clients that scored the domain.
    - ``replies``: ``train_loss/<term>/<client>``, ``seconds/<phase>/<client>`` and ``bytes/<way>/<client>`` of every
      row.
    - ``score``: ``summary/accuracy/<domain>``, ``summary/average``, ``summary/worst`` and ``summary/missing_domains``,
      the number of domains without a score. If a domain is missing, average and worst are logged as
      ``summary/partial/...``.
    - ``validation``: ``summary/validation``, or ``summary/partial/validation``; with the name of ``rounds.metric``,
      such as ``summary/validation_macro_f1``, unless that is accuracy.
    - ``round done``: ``round/...``: seconds, bytes, mean losses, and the number of clients by outcome.

    Args:
        name: the event's name.
        entry: the event's content.
    """
    if name == "scores":
        return _scores(entry["rows"], (*METRICS, *entry.get("measures", ())))
    if name == "replies":
        return _replies(entry["rows"])
    if name == "metrics":
        return _metrics(entry)
    if name == "score":
        values = _summary(entry)
    elif name == "validation":
        tag = f"{_summary_prefix(entry)}/validation"
        if "metric" in entry:
            tag += f"_{entry['metric']}"
        values = {tag: entry["average"]}
    elif name == "round done":
        values = _round(entry)
    else:
        return []
    number = int(entry["round"])
    return [Scalar(tag, number, float(value)) for tag, value in values.items()]


def _scores(rows: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> list[Scalar]:
    scalars = []
    for row in rows:
        number = int(row["round"])
        place = f"{row['domain']}/{row['client']}"
        for metric in metrics:
            if row.get(metric) is not None:  # none without confusion counts, or where it is not defined
                scalars.append(Scalar(f"{metric}/{place}", number, float(row[metric])))
        scalars.append(Scalar(f"test_loss/{place}", number, float(row["loss"])))
    return scalars


def _metrics(entry: Mapping[str, Any]) -> list[Scalar]:
    scalars = []
    for metric, values in entry["metrics"].items():
        for domain, value in values.items():
            scalars.append(Scalar(f"summary/{metric}/{domain}", int(entry["round"]), float(value)))
    return scalars


def _replies(rows: Sequence[Mapping[str, Any]]) -> list[Scalar]:
    """Return the losses, seconds and bytes of rows of replies; columns without a value are left out."""
    scalars = []
    for row in rows:
        number = int(row["round"])
        client = row["client"]
        losses = json.loads(row.get("losses") or "{}")
        for term, value in losses.items():
            scalars.append(Scalar(f"train_loss/{term}/{client}", number, float(value)))
        for column, value in row.items():
            quantity, _, which = column.partition("_")  # seconds_train, bytes_up
            if quantity not in ("seconds", "bytes") or not which:
                continue
            if value in ("", None):
                continue
            scalars.append(Scalar(f"{quantity}/{which}/{client}", number, float(value)))
    return scalars


def _summary(entry: Mapping[str, Any]) -> dict[str, float]:
    values: dict[str, float] = {}
    for domain, accuracy in entry["accuracy"].items():
        values[f"summary/accuracy/{domain}"] = accuracy
    prefix = _summary_prefix(entry)
    values[f"{prefix}/average"] = entry["average"]
    values[f"{prefix}/worst"] = entry["worst"]
    values["summary/missing_domains"] = len(entry.get("missing", {}))
    return values


def _summary_prefix(entry: Mapping[str, Any]) -> str:
    if entry.get("missing"):
        return "summary/partial"
    return "summary"


def _round(entry: Mapping[str, Any]) -> dict[str, float]:
    outcomes = entry["outcomes"]
    values: dict[str, float] = {"round/seconds": entry["seconds"]}
    for status, count in outcomes.items():
        values[f"round/clients_{status}"] = count
    values["round/clients_trained"] = trained_count(outcomes)
    for term, value in entry["losses"].items():
        values[f"round/{term}"] = value
    values["round/bytes_up"] = entry["bytes_up"]
    values["round/bytes_down"] = entry["bytes_down"]
    return values
