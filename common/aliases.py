"""Other names of settings, as other tools have them: an error message names the setting of Goldfinch instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

ALIASES = {
    "algorithm": "method",
    "arch": "model",
    "batch": "train.batch_size",
    "bs": "train.batch_size",
    "comm_rounds": "train.rounds",
    "dataset": "data",
    "local_epochs": "train.epochs",
    "lr": "train.learning_rate",
    "net": "model",
    "network": "model",
    "num_rounds": "train.rounds",
    "optim": "train.optimizer",
    "output_dir": "output",
    "partition": "protocol",
    "random_seed": "seed",
    "round": "train.rounds",
    "rounds": "train.rounds",
    "strategy": "method",
    "wd": "train.weight_decay",
}
"""Settings by their names in other tools."""

CLIENT_ALIASES = ("clients", "client_count", "n_clients", "num_clients", "number_of_clients")
"""Names of the number of clients, which the protocol decides."""

SIMILAR = 0.8
"""Smallest similarity of a word and the last part of a key at which the key is suggested, from 0 to 1."""


def settings_meant(key: str, value: str, config: Mapping[str, Any]) -> str:
    """Return what to write instead of a key that does not exist.

    Args:
        key: the key that the user gave.
        value: its value as the user wrote it.
        config: the composed configuration, with nested mappings.

    Returns:
        A question such as ``did you mean train.learning_rate=0.1?``; empty if no setting is similar.

    >>> settings_meant("lr", "0.1", {"train": {"learning_rate": 0.01}})
    'did you mean train.learning_rate=0.1?'
    """
    word = key.rpartition(".")[2].lower().replace("-", "_")
    if word in CLIENT_ALIASES:
        return _number_of_clients(value, config)
    known = list(_keys(config))
    found = [name for name in known if name.rpartition(".")[2] == word]
    if not found and ALIASES.get(word) in [*known, *config]:
        found = [ALIASES[word]]
    if not found and "." not in key:
        found = _similar(word, known)
    if not found:
        return ""
    choices = " or ".join(f"{name}={value}" for name in found)
    return f"did you mean {choices}?"


def _similar(word: str, known: list[str]) -> list[str]:
    last = [name.rpartition(".")[2] for name in known]
    close = difflib.get_close_matches(word, last, n=1, cutoff=SIMILAR)
    return [name for name in known if name.rpartition(".")[2] in close]


def _keys(node: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the key of every setting that is not a mapping."""
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{name}.")
        elif not str(name).startswith("_"):
            yield f"{prefix}{name}"


def _number_of_clients(value: str, config: Mapping[str, Any]) -> str:
    protocol = config.get("protocol")
    if not isinstance(protocol, Mapping):
        protocol = {}
    if "client_count" in protocol:
        return f"did you mean protocol.client_count={value}?"
    if "counts" in protocol:
        counts = ",".join(f"{domain}:{count}" for domain, count in dict(protocol["counts"]).items())
        return f"the protocol counts clients by domain: protocol.counts={{{counts}}}"
    return (
        "the protocol decides how many clients there are, here one for each domain: choose another, such as "
        f"protocol=dirichlet protocol.client_count={value}; goldfinch list protocol shows all"
    )
