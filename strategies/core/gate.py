"""The gate: checks every upload against what the exchange expects, before a method's server half uses it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from common.confidence import read_confidence
from common.errors import DIVERGED, PayloadError, some_of
from common.numerics import NORM_FLOOR
from common.own_metric import SumRange
from common.prototypes import PrototypeSet
from common.wire.messages import Answer, Request, Score
from common.wire.payload import Payload
from strategies.core.method import Client, ServerContext, Shape, Update, UploadSpec, tensor_specs

MAX_CLASS_ROWS, MAX_ROWS = 2_000, 20_000
"""Largest numbers of prototypes of a class and of a message. FINCH made 1,800 prototypes of 7,300 samples."""

MAX_CLUSTERED, MAX_PAIRS = 10_000, 10**9
"""Largest numbers of prototypes of a class, and of pairs of the same class, over all clients that are asked together.
Each client may send an equal part of them, and one prototype of each class in any case. FINCH compares all pairs of a
class: that many with 512 features took 16 to 21 s on one core, so longer ones have a lower limit. finch-clust takes at
most 10,000 of a class."""

MAX_REPEATS = 100
"""Most releases of a client per round: a round has few exchanges, and resuming a run repeats a round."""

MAX_PASSES = 100
"""Most forward passes of a sample in a local epoch, which limits how far batch norm's counters can move."""

MAX_NORM = 1e18
"""Largest L2 norm of a tensor that is accepted; its square is a finite float32. Only diverging training comes near."""

MAX_LOSS = 1e30
"""Largest mean loss that is accepted; even a diverged net stays below it."""


@dataclass(frozen=True)
class Gate:
    """Checks the answers of one exchange.

    Args:
        expected: what the method's uploads must carry.
        server: the exchange: names, shapes and dtypes of the shared state, feature size and classes.
        asked: clients that are asked for updates, >= 1.
        max_norm: largest accepted L2 norm of a floating-point tensor.
        sum_ranges: the sums that each score must have, those of the run's ``own_metric``, and what an image can add.
        confidence: whether each score must have counts of confidences.
    """

    expected: UploadSpec
    server: ServerContext
    asked: int = 1
    max_norm: float = MAX_NORM
    sum_ranges: Mapping[str, SumRange] = field(default_factory=dict)
    confidence: bool = False

    def admit(self, request: Request, answer: Answer, payload: Payload, client: Client) -> Update | None:
        """Check a reply and return its update; ``None`` if the client was only asked for scores.

        The update's tensors are in the order of the shared state, so that sums over them are equal on every engine.

        Args:
            request: what the client was asked.
            answer: the header of its reply.
            payload: the tensors of its reply.
            client: the client as it registered.

        Raises:
            PayloadError: the first check that failed; the message goes into the round's record.
        """
        self._check_sender(request, answer, client)
        self._check_scores(request, answer, client)
        if not request.train:
            return None
        weights: dict[str, Tensor] = {}
        if self.expected.weights:
            check_tensors("weights", payload.weights, tensor_specs(self.server.shared))
            weights = {name: payload.weights[name] for name in self.server.shared}
        elif payload.weights:
            raise PayloadError(f"the reply has weights that were not asked for: {some_of(sorted(payload.weights), 3)}")
        check_tensors("extra, as the method's expects declares it", payload.extra, self.expected.extra, client.samples)
        prototypes = self._check_prototypes(payload.prototypes, client)
        self._check_values(payload.weights)
        self._check_values(payload.extra)
        self._check_model(payload.weights)
        return Update(weights, prototypes, dict(sorted(payload.extra.items())), client=client)

    @cached_property
    def _largest_client(self) -> int:
        """The largest number of samples of a client."""
        return max(client.samples for client in self.server.clients)

    def _check_sender(self, request: Request, answer: Answer, client: Client) -> None:
        """Check that the answer belongs to the request and repeats the client's registration."""
        sender = (answer.run, answer.method, answer.round, answer.exchange, answer.attempt, answer.client)
        asked = (request.run, request.method, request.round, request.exchange, request.attempt, request.client)
        if sender != asked:
            raise PayloadError(f"the answer belongs to {sender}, not to {asked}: stale, replayed or of another run")
        if answer.samples != client.samples or tuple(answer.class_counts) != client.class_counts:
            raise PayloadError(
                f"the answer claims {answer.samples} samples in classes {answer.class_counts}; the client registered "
                f"{client.samples} in {list(client.class_counts)}"
            )
        measurements = {"steps": answer.steps, "peak_bytes": answer.peak_bytes, **answer.seconds}
        for name, value in measurements.items():
            if not 0 <= value < 2**63:
                raise PayloadError(f"the answer's {name} is {value:g}, not 0 to {2**63:g}")
        for name, value in answer.losses.items():
            if abs(value) > MAX_LOSS:
                raise PayloadError(f"the loss {name} is {value:g}; the bound is {MAX_LOSS:g}: {DIVERGED}")
        if not 0 <= answer.releases <= MAX_REPEATS * request.round:
            raise PayloadError(f"the answer claims {answer.releases} releases in {request.round} rounds")

    def _check_scores(self, request: Request, answer: Answer, client: Client) -> None:
        """Check that the scores are those that were asked for, and arithmetically possible."""
        if request.train and not answer.trained:
            raise PayloadError("the answer carries no update")
        if answer.trained and not request.train:
            raise PayloadError("the answer carries an update that was not asked for")
        domains = [entry["domain"] for entry in answer.scores]
        requested = [domain for domain in request.score if domain in domains]  # the records report missing scores
        if domains != requested:
            raise PayloadError(f"the answer scores {domains}; asked for were {request.score}")
        if request.validate and answer.validation is None:
            raise PayloadError("the validation score is missing")
        if answer.validation is not None and not request.validate:
            raise PayloadError("the answer carries a validation score that was not asked for")
        entries = list(answer.scores)
        if answer.validation is not None:
            entries.append(answer.validation)
            if answer.validation["domain"] != client.domain:
                domain = answer.validation["domain"]
                raise PayloadError(f"the validation is of {domain}; the client holds {client.domain}")
        for entry in entries:
            count, correct, loss = entry["count"], entry["correct"], entry["loss"]
            if not 0 <= correct <= count or count < 1:
                raise PayloadError(f"the score of {entry['domain']} claims {correct} correct of {count}")
            if not 0 <= loss <= MAX_LOSS:
                advice = f": {DIVERGED}" if loss > MAX_LOSS else ""
                raise PayloadError(f"the score of {entry['domain']} has loss {loss}, not 0 to {MAX_LOSS:g}{advice}")
            self._check_counts(entry)

    def _check_counts(self, entry: Score) -> None:
        """Check that a score has the sums and the counts of confidences that the run asks for, and no others."""
        sums = entry.get("sums", {})
        if set(sums) != set(self.sum_ranges):
            sent, wanted = some_of(sorted(sums), 3), some_of(sorted(self.sum_ranges), 3)
            raise PayloadError(f"the score of {entry['domain']} has the sums [{sent}]; asked for were [{wanted}]")
        for name, limits in self.sum_ranges.items():
            mistake = limits.mistake(sums[name], entry["count"])
            if mistake:
                raise PayloadError(f"the score of {entry['domain']}: the sum {name}: {mistake}")
        if not self.confidence:
            if "confidence" in entry:
                raise PayloadError(f"the score of {entry['domain']} has counts of confidences that were not asked for")
            return
        try:
            read_confidence(entry.get("confidence"), self.server.class_count, entry["count"], entry["correct"])
        except ValueError as error:
            raise PayloadError(f"the score of {entry['domain']}: {error}") from error

    def _check_prototypes(self, prototypes: PrototypeSet | None, client: Client) -> PrototypeSet:
        """Check the prototype set; return it, or an empty one if none is expected."""
        if not self.expected.prototypes:
            if prototypes is not None:
                raise PayloadError("the reply has a prototype set that was not asked for")
            return PrototypeSet.empty(self.server.feature_size)
        if prototypes is None:
            raise PayloadError("the prototype set is missing")
        if prototypes.feature_size != self.server.feature_size:
            raise PayloadError(f"prototypes have {prototypes.feature_size} features, not {self.server.feature_size}")
        if not len(prototypes):
            return prototypes
        if prototypes.classes[-1] >= self.server.class_count:
            raise PayloadError(f"a prototype is of class {prototypes.classes[-1]} of {self.server.class_count}")
        if not bool((prototypes.weights >= NORM_FLOOR).all()):  # losses take the logarithm of a share, also in float32
            raise PayloadError("a prototype's weight is not a positive number of samples")
        if len(prototypes) > MAX_ROWS:
            raise PayloadError(f"the answer carries {len(prototypes)} prototypes; at most {MAX_ROWS} are accepted")
        self._check_rows(prototypes, client)
        self._check_values({"prototypes": prototypes.vectors})
        return prototypes

    def _check_rows(self, prototypes: PrototypeSet, client: Client) -> None:
        """Check the number of prototypes of each class, and the number of samples they were made from."""
        rows = torch.bincount(prototypes.labels, minlength=self.server.class_count)
        mass = torch.zeros(self.server.class_count, dtype=torch.float64)
        mass.index_add_(0, prototypes.labels, prototypes.weights.double())
        accepted = max(1, min(self.expected.max_rows or MAX_CLASS_ROWS, MAX_CLUSTERED // self.asked))
        for label in prototypes.classes:
            samples, sent = client.class_counts[label], int(rows[label])
            limit = min(samples, accepted)
            if sent > limit:
                raise PayloadError(
                    f"{sent} prototypes of class {label}; "
                    f"at most {limit} are accepted from each of {self.asked} clients"
                )
            if float(mass[label]) > samples * (1 + 1e-6):
                raise PayloadError(f"prototypes of class {label} weigh {float(mass[label]):g}; {samples} samples exist")
        pairs = int(rows.square().sum())
        share = MAX_PAIRS * min(1.0, 512 / prototypes.feature_size) / self.asked**2
        if pairs > max(self.server.class_count, share):
            raise PayloadError(f"prototypes of {pairs} pairs; at most {share:.0f} from each of {self.asked} clients")

    def _check_model(self, weights: Mapping[str, Tensor]) -> None:
        """Check for values that training cannot produce: huge counters, variances < 0, parameters that are all zero.

        Raises:
            PayloadError: the model has such values.
        """
        trained = [tensor for name, tensor in weights.items() if name in self.server.parameters]
        if trained and not any(bool(tensor.any()) for tensor in trained):
            raise PayloadError("all parameters are zero")
        rounds = self.server.round
        for name, tensor in weights.items():
            if not tensor.is_floating_point():
                own = self.server.shared[name]
                if bool((tensor < 0).any()) and not bool((own < 0).any()):
                    raise PayloadError(f"{name} has negative values; the server's has none: it is a counter")
                max_batches = rounds * self.server.train.epochs * self._largest_client * MAX_PASSES
                counted = tensor.long() - own.long()
                if bool((counted > max_batches).any()):
                    raise PayloadError(f"{name} is {int(tensor.max())}, which {rounds} rounds of training cannot reach")
            if name.endswith("running_var") and bool((tensor < 0).any()):
                raise PayloadError(f"{name} has negative values; it is a variance")

    def _check_values(self, tensors: Mapping[str, Tensor]) -> None:
        """Check that numbers are finite and the norm of each tensor is at most ``max_norm``."""
        floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel()}
        if not floats:
            return
        norms = torch.stack(torch._foreach_norm(list(floats.values()))).double()  # the bound is infinite in float16
        if bool((norms <= self.max_norm / 1000).all()):
            return  # far below the bound, even if a float32 sum was rounded; NaN and infinity fail this test
        for name, tensor in floats.items():
            norm = float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
            if not math.isfinite(norm):  # a single value that is not finite makes the norm so
                raise PayloadError(f"{name} has values that are not finite: {DIVERGED}")
            if norm > self.max_norm:
                raise PayloadError(f"{name} has norm {norm:.3g}; the bound is {self.max_norm:g}: {DIVERGED}")


def check_tensors(
    part: str, tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[torch.dtype, Shape]], samples: int = 0
) -> None:
    """Check that names, dtypes and shapes are exactly the expected ones.

    Args:
        part: what the tensors are, for messages.
        tensors: the tensors by name.
        expected: dtype and shape by name. In a shape ``None`` allows any length, and ``"samples"`` is replaced by
            ``samples``.
        samples: the client's training samples.

    Raises:
        PayloadError: the first difference.
    """
    if set(tensors) != set(expected):
        missing = sorted(set(expected) - set(tensors))
        unknown = sorted(set(tensors) - set(expected))
        raise PayloadError(f"{part}: missing {missing[:3]}, not asked for {unknown[:3]}")
    named: dict[int | str | None, int | str] = {None: "any", "samples": samples}
    for name, (dtype, lengths) in expected.items():
        tensor = tensors[name]
        wanted = [named.get(length, length) for length in lengths]
        fits = tensor.dtype == dtype and tensor.ndim == len(wanted)
        for length, size in zip(wanted, tensor.shape, strict=False):
            fits = fits and length in ("any", size)
        if not fits:
            shape = tuple(tensor.shape)
            raise PayloadError(f"{name} is {tensor.dtype} {shape}; expected {dtype} {tuple(wanted)}")
