"""The gate: every upload is checked against what the exchange expects before a method's server half sees it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import PayloadError
from common.prototypes import PrototypeSet
from common.wire.messages import Answer, Request
from common.wire.payload import Payload
from strategies.core.method import Client, ServerContext, Shape, Update, UploadSpec

MAX_CLASS_ROWS, MAX_ROWS = 2_000, 20_000
"""Prototypes of a class, and of a message. FINCH made 1,800 of 7,300 samples."""

MAX_CLUSTERED, MAX_PAIRS = 10_000, 10**9
"""Prototypes of a class, and pairs of the same class in all, of those who are asked together: each may send its equal
part, and one of each class in any case. FINCH compares all pairs of a class. So many of 512 features took 16 to 21 s of
one core, and of longer ones fewer are let in; finch-clust gets no more than 10,000 of a class."""

MAX_REPEATS = 100
"""How often a client can have released something per round: a round has few exchanges, and is repeated on resume."""

MAX_PASSES = 100
"""How often local training sends a sample through the net in an epoch: a counter cannot have moved further."""

MAX_LOSS = 1e30
"""A diverged net's mean loss is below it; what is not finite cannot be written down."""


@dataclass(frozen=True)
class Gate:
    """Checks one exchange's answers.

    Args:
        expected: what the method's uploads carry.
        server: names, shapes and dtypes of the shared state; feature size and classes.
        asked: clients that are asked for updates in the exchange, >= 1.
        max_norm: largest L2 norm of a floating-point tensor that is let in.
    """

    expected: UploadSpec
    server: ServerContext
    asked: int = 1
    max_norm: float = 1e8

    def admit(self, request: Request, answer: Answer, payload: Payload, client: Client) -> Update | None:
        """The update, if everything about it is as it must be; ``None`` if only a score was asked for.

        Its tensors come in the order of the shared state, whatever order the message had, so that sums over them are
        the same on every engine.

        Raises:
            PayloadError: the first thing that is not, in words for the round's record.
        """
        self._check_sender(request, answer, client)
        self._check_scores(request, answer, client)
        if not request.train:
            return None
        if self.expected.weights:
            check_tensors("weights", payload.weights, {name: _spec(tensor) for name, tensor in self._shared.items()})
        elif payload.weights:
            raise PayloadError(f"weights came that were not asked for: {', '.join(sorted(payload.weights)[:3])}")
        check_tensors("extra", payload.extra, self.expected.extra, client.samples)
        prototypes = self._check_prototypes(payload.prototypes, client)
        for name, tensor in {**payload.weights, **payload.extra}.items():
            self._check_values(name, tensor)
        self._check_model(payload.weights)
        weights = {name: payload.weights[name] for name in self._shared} if self.expected.weights else {}
        return Update(client, weights, prototypes, dict(sorted(payload.extra.items())))

    @property
    def _shared(self) -> Mapping[str, Tensor]:
        return self.server.shared

    def _check_sender(self, request: Request, answer: Answer, client: Client) -> None:
        said = (answer.run, answer.method, answer.round, answer.exchange, answer.client)
        asked = (request.run, request.method, request.round, request.exchange, request.client)
        if said != asked:
            raise PayloadError(f"the answer belongs to {said}, not to {asked}: stale, replayed or of another run")
        if answer.samples != client.samples or tuple(answer.class_counts) != client.class_counts:
            raise PayloadError(
                f"the answer claims {answer.samples} samples in classes {answer.class_counts}; the client registered "
                f"{client.samples} in {list(client.class_counts)}"
            )

        for name, count in {"steps": answer.steps, "peak_bytes": answer.peak_bytes, **answer.seconds}.items():
            if count < 0:
                raise PayloadError(f"the answer's {name} is {count:g}; it measures what was spent")
        if not 0 <= answer.releases <= MAX_REPEATS * request.round:
            raise PayloadError(f"{answer.releases} releases in {request.round} rounds cannot be")

    def _check_scores(self, request: Request, answer: Answer, client: Client) -> None:
        """Scores are what was asked for, and arithmetically possible."""
        if answer.trained != request.train:
            raise PayloadError("the answer carries no update" if request.train else "an update came unasked")
        domains = [entry["domain"] for entry in answer.scores]
        if domains != [domain for domain in request.score if domain in domains]:  # one that is not there is reported
            raise PayloadError(f"scores of {domains} came; asked for {request.score}")
        if (answer.validation is not None) != request.validate:
            raise PayloadError("the validation score is missing" if request.validate else "a validation came unasked")
        if answer.validation is not None and answer.validation["domain"] != client.domain:
            raise PayloadError(f"the validation is of {answer.validation['domain']}; the client holds {client.domain}")
        for entry in [*answer.scores, *([answer.validation] if answer.validation is not None else [])]:
            count, correct, loss = entry["count"], entry["correct"], entry["loss"]
            if not 0 <= correct <= count or count < 1:
                raise PayloadError(f"the score of {entry['domain']} claims {correct} correct of {count}")
            if not 0 <= loss <= MAX_LOSS:
                raise PayloadError(f"the score of {entry['domain']} has loss {loss}")

    def _check_prototypes(self, prototypes: PrototypeSet | None, client: Client) -> PrototypeSet:
        if not self.expected.prototypes:
            if prototypes is not None:
                raise PayloadError("a prototype set came that was not asked for")
            return PrototypeSet.empty(self.server.feature_size)
        if prototypes is None:
            raise PayloadError("the prototype set is missing")
        if prototypes.feature_size != self.server.feature_size:
            raise PayloadError(f"prototypes have {prototypes.feature_size} features, not {self.server.feature_size}")
        if not len(prototypes):
            return prototypes
        if prototypes.classes[-1] >= self.server.class_count:
            raise PayloadError(f"a prototype is of class {prototypes.classes[-1]} of {self.server.class_count}")
        if not bool((prototypes.weights > 0).all()):  # a cluster of nobody: its logarithm would be -inf in every loss
            raise PayloadError("a prototype's weight is not a positive number of samples")
        if len(prototypes) > MAX_ROWS:
            raise PayloadError(f"{len(prototypes)} prototypes came; at most {MAX_ROWS} are let in")
        rows = torch.bincount(prototypes.labels, minlength=self.server.class_count)
        mass = torch.zeros(self.server.class_count, dtype=torch.float64)
        mass.index_add_(0, prototypes.labels, prototypes.weights.double())
        let_in = max(1, min(self.expected.max_rows or MAX_CLASS_ROWS, MAX_CLUSTERED // self.asked))
        for label in prototypes.classes:
            held, sent = client.class_counts[label], int(rows[label])
            most = min(held, let_in)
            if sent > most:
                raise PayloadError(
                    f"{sent} prototypes of class {label}; at most {most} can be from each of {self.asked} clients"
                )
            if float(mass[label]) > held * (1 + 1e-6):
                raise PayloadError(f"prototypes of class {label} weigh {float(mass[label]):g}; {held} samples exist")
        pairs, share = int(rows.square().sum()), MAX_PAIRS * min(1.0, 512 / prototypes.feature_size) / self.asked**2
        if pairs > max(self.server.class_count, share):
            raise PayloadError(f"prototypes of {pairs} pairs; at most {share:.0f} from each of {self.asked} clients")
        self._check_values("prototypes", prototypes.vectors)
        return prototypes

    def _check_model(self, weights: Mapping[str, Tensor]) -> None:
        """What no training leaves: runaway counters, variances that are not positive, a net of zeros: no gradient."""
        trained = [tensor for name, tensor in weights.items() if name in self.server.parameters]
        if trained and not any(bool(tensor.any()) for tensor in trained):
            raise PayloadError("all parameters are zero")
        for name, tensor in weights.items():
            if not tensor.is_floating_point():
                if bool((tensor < 0).any()):
                    raise PayloadError(f"{name} has negative values; it counts")
                largest = max(client.samples for client in self.server.clients)
                most = self.server.round * self.server.train.epochs * largest * MAX_PASSES
                if bool((tensor.long() - self._shared[name].long() > most).any()):
                    raise PayloadError(f"{name} is {int(tensor.max())}; {self.server.round} rounds cannot count so far")
            if name.endswith("running_var") and bool((tensor <= 0).any()):
                raise PayloadError(f"{name} has values that are not positive; it measures a variance")

    def _check_values(self, name: str, tensor: Tensor) -> None:
        if not tensor.is_floating_point() or not tensor.numel():
            return
        if float(torch.linalg.vector_norm(tensor)) <= self.max_norm / 1000:
            return  # far below the bound, however its float32 sum was rounded; NaN and infinity are not
        norm = float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
        if not math.isfinite(norm):  # one look at the values serves both: a single one spoils the sum
            raise PayloadError(f"{name} has values that are not finite")
        if norm > self.max_norm:
            raise PayloadError(f"{name} has norm {norm:.3g}; the bound is {self.max_norm:g}")


def _spec(tensor: Tensor) -> tuple[torch.dtype, Shape]:
    return tensor.dtype, tuple(tensor.shape)


def check_tensors(
    part: str,
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, tuple[torch.dtype, Shape]],
    samples: int = 0,
) -> None:
    """Names, dtypes and shapes must be exactly the expected ones; a length ``samples`` is the client's.

    Raises:
        PayloadError: the first difference.
    """
    if set(tensors) != set(expected):
        missing, unknown = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
        raise PayloadError(f"{part}: missing {missing[:3]}, not asked for {unknown[:3]}")
    for name, (dtype, lengths) in expected.items():
        tensor = tensors[name]
        shape = tuple(samples if length == "samples" else length for length in lengths)
        fits = len(shape) == tensor.ndim and all(
            want in (None, have) for want, have in zip(shape, tensor.shape, strict=True)
        )
        if tensor.dtype != dtype or not fits:
            wanted = tuple("any" if length is None else length for length in shape)
            raise PayloadError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; expected {dtype} {wanted}")
