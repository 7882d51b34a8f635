"""What may change a published algorithm: every limit, floor, fallback and refusal between a formula and a run.

A plain run is the published algorithm. Each entry is the paper's own, the released code's, a value where the formula
has none, off by default, or recorded: in the run's files and in a line under its table. ``goldfinch list alterations``
prints the list; docs/design.md has what is not off by default as a table.
"""

from dataclasses import dataclass
from typing import Literal

Whose = Literal["paper", "released code", "no value", "setting", "recorded"]
"""Why a plain run may have it. ``no value``: the formula, and the released code, have no value there, or stop."""

WHOSE: dict[Whose, str] = {
    "paper": "the paper's",
    "released code": "the released code's",
    "no value": "the formula has no value there",
    "setting": "off by default",
    "recorded": "in the record and under the table",
}


@dataclass(frozen=True)
class Alteration:
    """One thing that may change an algorithm.

    Args:
        name: a few words, unique.
        changes: what is changed.
        when: the condition.
        whose: why a plain run may have it.
        default: the settings at which it is off, as ``KEY=VALUE``; for ``setting`` only.
    """

    name: str
    changes: str
    when: str
    whose: Whose
    default: tuple[str, ...] = ()


ALTERATIONS = (
    # aggregation
    Alteration(
        "refused reply",
        "a reply is left out: it belongs to another run, round or client, has other names, dtypes or shapes, values "
        "that are not finite, negative variances, more prototypes or more weight than samples",
        "always",
        "recorded",
    ),
    Alteration(
        "refused size",
        "a reply is left out: a tensor of norm above 1e18, a mean loss above 1e30, parameters that are all zero; more "
        "than 2,000 prototypes of a class, 20,000 in all, or the client's equal part of 10,000 of a class or 1e9 pairs",
        "always; the server could not compute with more",
        "recorded",
    ),
    Alteration(
        "skipped round",
        "the state stays as it was",
        "fewer replies than rounds.quorum (0.5) of those asked",
        "recorded",
    ),
    Alteration(
        "missing reply",
        "a client does not count",
        "its training fails, or its reply arrives after rounds.deadline (an hour)",
        "recorded",
    ),
    Alteration(
        "stop", "the run ends with the round before", "the new state has a value that is not finite", "recorded"
    ),
    Alteration(
        "scaled update",
        "an update that is longer than the bound is scaled down to it",
        "rounds.outliers=clip",
        "setting",
        ("rounds.outliers=off",),
    ),
    Alteration(
        "capped samples",
        "a client counts for fewer samples than it has, and so do its rows (ADCOL, FedPall) and its prototypes' "
        "weights; earned shares (FedHEAL, FedDG-GA, I2PFL) are capped",
        "rounds.largest_client, or rounds.largest_share below 1",
        "setting",
        ("rounds.largest_client=null", "rounds.largest_share=1.0"),
    ),
    Alteration(
        "robust rule", "another rule than the average", "aggregation=geometric_median", "setting", ("aggregation=mean",)
    ),
    Alteration(
        "oversampling", "late clients do not count", "rounds.oversample above 1", "setting", ("rounds.oversample=1.0",)
    ),
    Alteration(
        "rounded transport",
        "tensors are rounded on the wire",
        "rounds.transport=bfloat16 or float16",
        "setting",
        ("rounds.transport=float32",),
    ),
    Alteration(
        "attack",
        "hostile clients send or train on something else",
        "attack, simulated only",
        "setting",
        ("attack=none",),
    ),
    Alteration(
        "privacy", "updates are clipped and noised on the device", "privacy=gaussian", "setting", ("privacy=none",)
    ),
    Alteration(
        "counters",
        "batch normalisation's counters are the lower median",
        "always; no result depends on them",
        "no value",
    ),
    Alteration("one client at least", "a round samples max(1, C K) clients", "rounds.participation below 1", "paper"),
    # local training
    Alteration(
        "joined batch",
        "a last batch of one sample joins the batch before it",
        "the network's batch normalisation, or a discriminator's, would see one value of each channel; the released "
        "codes stop there, and train on such a batch otherwise, as a run here does",
        "recorded",
    ),
    Alteration(
        "dropped or merged batch",
        "a short last batch is dropped or merged; the only batch of a client is kept",
        "train.last_batch=drop or merge",
        "setting",
        ("train.last_batch=keep",),
    ),
    Alteration(
        "clipped gradient",
        "a gradient's norm is limited",
        "train.clip_norm, or method.clip of FedDyn",
        "setting",
        ("train.clip_norm=null",),
    ),
    Alteration(
        "changed loss",
        "smoothed labels, weighted classes",
        "train.label_smoothing, train.class_weights",
        "setting",
        ("train.label_smoothing=0.0", "train.class_weights=none"),
    ),
    Alteration(
        "lower precision",
        "training runs under autocast",
        "train.precision=bfloat16",
        "setting",
        ("train.precision=float32",),
    ),
    Alteration(
        "held-out samples",
        "a share of the training samples is scored instead",
        "protocol.validation above 0",
        "setting",
        ("protocol.validation=0.0",),
    ),
    Alteration(
        "one batch",
        "Per-FedAvg divides the batch into its pair of batches",
        "a client has one batch an epoch",
        "no value",
    ),
    Alteration(
        "steps under momentum",
        "SCAFFOLD divides by the number of gradients that K steps with momentum add up to, not by K",
        "train.momentum above 0; the paper has plain SGD, and without it training diverges",
        "no value",
    ),
    # losses
    Alteration(
        "no prototypes yet", "a loss without the prototype's term", "before the first prototypes", "released code"
    ),
    Alteration(
        "class without prototype", "a sample adds 0 to the term and is counted", "no client sent its class", "no value"
    ),
    Alteration("zero vector", "its direction is zero", "a feature or prototype is shorter than 1e-12", "no value"),
    Alteration(
        "power of a cosine",
        "the cosine is 1e-4 and passes no gradient",
        "FedPLVM, FedPLCC: it is below 1e-4 and alpha below 1",
        "no value",
    ),
    Alteration("constant column", "it counts as zeros", "FCCL+: a logit is the same for all public images", "no value"),
    Alteration("probability floor", "probabilities are at least 1e-7 in logarithms", "FedGCA", "released code"),
    Alteration("norm floor", "1e-12 is added to the gradient's norm", "FedSAM", "released code"),
    Alteration("variance floor", "1e-8 is added to variances and to lengths of steps", "FDSE", "released code"),
    Alteration("positive scale", "the scale is a softplus, so that its logarithm exists", "FedSR", "no value"),
    Alteration("no other class", "features are not mixed", "I2PFL: a batch has one class", "no value"),
    # the server
    Alteration(
        "few rows", "FINCH makes one cluster", "three rows of a class or fewer: FINCH's own graph joins them", "paper"
    ),
    Alteration("class without an upload", "the last prototype stays", "FedProc", "released code"),
    Alteration("class without an upload, smoothed", "the last prototype stays", "I2PFL", "no value"),
    Alteration("equal means", "the plain mean", "I2PFL: all clients' means of a class are equal", "no value"),
    Alteration(
        "element without an upload", "it stays as it was sent", "FedHEAL: every client masks it", "released code"
    ),
    Alteration("no gaps", "the shares stay", "FedDG-GA: the largest gap is below 1e-9", "no value"),
    Alteration("no shares", "equal shares", "FedDG-GA: all participants' shares are 0", "no value"),
    Alteration(
        "measured loss",
        "a whole number of 1e-6, at most 1e6",
        "FedDG-GA with method.metric=loss",
        "setting",
        ("method.metric=accuracy",),
    ),
    Alteration(
        "nets on the server",
        "a last batch of one row joins the batch before it; a single row trains nothing",
        "ADCOL, FedPall: the net has batch normalisation",
        "no value",
    ),
)
"""All of them, by where they act."""
