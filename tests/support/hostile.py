"""Replies that must be refused: each spoils one thing, and has a word that the reason must contain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from common.prototypes import PrototypeSet
from common.wire.payload import Payload

Spoil = Callable[[Payload], Payload | None]


@dataclass(frozen=True)
class Attack:
    """One way to spoil an answer.

    Args:
        name: what it is.
        spoil: the spoiled answer, or ``None`` where the answer has nothing to spoil in this way.
        reason: part of the reason that the record must give.
    """

    name: str
    spoil: Spoil
    reason: str


def _part(payload: Payload, wanted: Callable[[Tensor], bool]) -> tuple[str, str] | None:
    """Part and name of the first tensor that is as wanted."""
    for part in ("weights", "extra"):
        tensors: Mapping[str, Tensor] = getattr(payload, part)
        for name in sorted(tensors):
            if tensors[name].numel() and wanted(tensors[name]):
                return part, name
    return None


def _tensor(wanted: Callable[[Tensor], bool], change: Callable[[Tensor], Tensor]) -> Spoil:
    def spoil(payload: Payload) -> Payload | None:
        found = _part(payload, wanted)
        if found is None:
            return None
        part, name = found
        tensors = dict(getattr(payload, part))
        tensors[name] = change(tensors[name].clone())
        return replace(payload, **{part: tensors})

    return spoil


def _with_first(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return change


def _header(**changes: Any) -> Spoil:
    return lambda payload: replace(payload, header={**payload.header, **changes})


def _prototypes(change: Callable[[PrototypeSet], dict[str, Tensor]]) -> Spoil:
    def spoil(payload: Payload) -> Payload | None:
        if payload.prototypes is None or not len(payload.prototypes):
            return None
        old = payload.prototypes
        fields = {"vectors": old.vectors.clone(), "labels": old.labels.clone(), "weights": old.weights.clone()}
        return replace(payload, prototypes=_unchecked(**{**fields, **change(old)}))

    return spoil


def _unchecked(vectors: Tensor, labels: Tensor, weights: Tensor) -> PrototypeSet:
    """A set as only a peer that does not use our class could make it."""
    made = PrototypeSet.empty()
    for name, value in {"vectors": vectors, "labels": labels, "weights": weights}.items():
        object.__setattr__(made, name, value)
    return made


def _first(tensor: Tensor, value: float) -> Tensor:
    changed = tensor.clone()
    changed.view(-1)[0] = value
    return changed


def _zero_model(payload: Payload) -> Payload | None:
    if not payload.weights:
        return None
    return replace(payload, weights={name: torch.zeros_like(tensor) for name, tensor in payload.weights.items()})


def _missing(payload: Payload) -> Payload | None:
    for part in ("weights", "extra"):
        tensors = dict(getattr(payload, part))
        if tensors:
            del tensors[min(tensors)]
            return replace(payload, **{part: tensors})
    return None


def _one_more(payload: Payload) -> Payload:
    return replace(payload, extra={**payload.extra, "more": torch.ones(1)})


def _no_prototypes(payload: Payload) -> Payload | None:
    return None if payload.prototypes is None else replace(payload, prototypes=None)


def _negative_variances(count: int | None, payload: Payload) -> Payload | None:
    """The first ``count`` variances of a layer below zero; all with ``None``."""
    name = next((name for name in payload.weights if name.endswith("running_var")), None)
    if name is None:
        return None
    variances = payload.weights[name].clone()
    variances[:count] = -variances[:count] - 1e-9
    return replace(payload, weights={**payload.weights, name: variances})


def _floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point()


def _whole(tensor: Tensor) -> bool:
    return not tensor.is_floating_point()


def _counter(payload: Payload) -> Payload | None:
    """Batches seen, samples of a class, labels: none of them is below zero. A lone number may be a fingerprint."""
    lone = {name: tensor for name, tensor in payload.extra.items() if not tensor.ndim}
    rest = {name: tensor for name, tensor in payload.extra.items() if tensor.ndim}
    changed = _tensor(_whole, _with_first(-9))(replace(payload, extra=rest))
    return changed and replace(changed, extra={**changed.extra, **lone})


def scaled(payload: Payload, factor: float) -> Payload | None:
    """Parameters, prototypes and further tensors ``factor`` times as large; ``None`` if there is nothing to enlarge.

    Running statistics and similarities stay: other checks would refuse them first. Similarities have a known range.
    """
    honest = ("running_", "similarities")

    def larger(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: tensor * factor if tensor.is_floating_point() and not any(word in name for word in honest) else tensor
            for name, tensor in tensors.items()
        }

    old = payload.prototypes
    if not payload.weights and not payload.extra and not old:
        return None
    prototypes = old and PrototypeSet(old.vectors * factor, old.labels, old.weights)
    return replace(payload, weights=larger(payload.weights), extra=larger(payload.extra), prototypes=prototypes)


ENDLESS = [{"domain": "dark", "count": 10**400, "correct": 0, "loss": 0.0}]
ELSEWHERE = [{"domain": "moon", "count": 1, "correct": 1, "loss": 0.0}]

ATTACKS = (
    Attack("not a number", _tensor(_floating, _with_first(float("nan"))), "not finite"),
    Attack("infinity", _tensor(_floating, _with_first(float("inf"))), "not finite"),
    Attack("count 1e30", _tensor(_floating, _with_first(1e30)), "norm"),
    Attack("counter -9", _counter, ""),
    Attack("counter as float", _tensor(_whole, lambda tensor: tensor.float()), "expected torch.int64"),
    Attack("all-zero model", _zero_model, "zero"),
    Attack("negative variances", partial(_negative_variances, None), "variance"),
    Attack("one negative variance", partial(_negative_variances, 1), "variance"),
    Attack(
        "(1,) for (n,)",
        _tensor(lambda tensor: tensor.ndim == 1 and len(tensor) > 1, lambda tensor: tensor[:1].clone()),
        "expected",
    ),
    Attack(
        "a row too many",
        _tensor(lambda tensor: tensor.ndim >= 1, lambda tensor: torch.cat([tensor, tensor[:1]])),
        "",
    ),
    Attack("another rank", _tensor(lambda tensor: tensor.ndim >= 1, lambda tensor: tensor[None]), "expected"),
    Attack("double precision", _tensor(_floating, lambda tensor: tensor.double()), "expected torch.float32"),
    Attack("a record too many", _one_more, "more"),
    Attack("a record too few", _missing, "missing"),
    Attack("prototype not a number", _prototypes(lambda old: {"vectors": _first(old.vectors, float("nan"))}), "finite"),
    Attack("prototype count 1e30", _prototypes(lambda old: {"weights": _first(old.weights, 1e30)}), "weigh"),
    Attack("prototype count -9", _prototypes(lambda old: {"weights": _first(old.weights, -9)}), "weight"),
    Attack("prototype counts 0", _prototypes(lambda old: {"weights": torch.zeros_like(old.weights)}), "weight"),
    Attack("prototype count NaN", _prototypes(lambda old: {"weights": _first(old.weights, float("nan"))}), "weight"),
    Attack(
        "prototype of class 99",
        _prototypes(lambda old: {"labels": torch.cat([old.labels[:-1], torch.tensor([99])])}),
        "class 99",
    ),
    Attack("prototypes too short", _prototypes(lambda old: {"vectors": old.vectors[:, :-1].clone()}), "features"),
    Attack("prototypes missing", _no_prototypes, "set"),
    Attack("another client's name", _header(client="bright-0"), "stale"),
    Attack("another round", _header(round=77), "stale"),
    Attack("claims 10^30 samples", _header(samples=10**30), "samples"),
    Attack("claims other classes", _header(class_counts=[9, 9, 9, 9]), "registered"),
    Attack("loss is a word", _header(losses={"cross_entropy": "low"}), "losses"),
    Attack("score without end", _header(scores=ENDLESS), "score"),
    Attack("scores more than asked", _header(scores=ELSEWHERE), "scores"),
)
