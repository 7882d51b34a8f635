"""Checkpoints: the global state after a round in one file, complete or absent, and found again after any crash."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from common.errors import CheckpointError
from common.storage.files import read_tensors, write_tensors
from common.storage.state import GlobalState, tensors_sha256, under_prefix, with_prefix

LENGTHS = "lengths/"
"""Prefix of what the bound on updates remembers."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A state and what it belongs to.

    Args:
        state: the global state.
        run: the run's id.
        method, identity, seed: what the run was; another run's checkpoint is refused.
        rounds: how many rounds the run was to have; 0 if the file does not say.
        seconds: wall seconds of the run so far, parts that crashed included up to their last checkpoint.
        lengths: what the bound on updates remembers, see :class:`strategies.core.bounds.Bounds`.
    """

    state: GlobalState
    run: str
    method: str
    identity: str
    seed: int
    rounds: int = 0
    seconds: float = 0.0
    lengths: Mapping[str, Tensor] = field(default_factory=dict)


class Checkpoints:
    """The last ``keep`` checkpoints of a run in ``folder``, newest last.

    Each is a safetensors file whose metadata holds the run and the state's SHA-256; a file that is torn, or whose
    content does not match its hash, is passed over for the one before.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep

    def paths(self) -> list[Path]:
        """Checkpoint files, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.iterdir() if re.fullmatch(r"round-\d{6}\.safetensors", path.name))

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, then drop the oldest beyond ``keep``."""
        state = checkpoint.state
        tensors = state.tensors() | with_prefix(LENGTHS, checkpoint.lengths)
        metadata: dict[str, Any] = {
            "round": state.round,
            "run": checkpoint.run,
            "method": checkpoint.method,
            "identity": checkpoint.identity,
            "seed": checkpoint.seed,
            "rounds": checkpoint.rounds,
            "seconds": checkpoint.seconds,
            "sha256": tensors_sha256(tensors, f"round={state.round}"),
        }
        path = self.folder / f"round-{state.round:06d}.safetensors"
        write_tensors(path, tensors, {"goldfinch": json.dumps(metadata, sort_keys=True)})
        for old in self.paths()[: -self.keep]:
            old.unlink(missing_ok=True)

    def load(self) -> Checkpoint | None:
        """The newest good checkpoint, or ``None`` if there are none.

        Raises:
            CheckpointError: there are checkpoints, but none is good.
        """
        problems = []
        for path in reversed(self.paths()):
            try:
                return _read(path)
            except (ValueError, KeyError) as error:
                problems.append(f"{path.name}: {error}")
        if problems:
            raise CheckpointError(
                f"no checkpoint in {self.folder} is good ({'; '.join(problems)}); start anew with overwrite=true"
            )
        return None

    def clear(self) -> None:
        """Remove all checkpoints."""
        for path in self.paths():
            path.unlink()


def _read(path: Path) -> Checkpoint:
    tensors, metadata = read_tensors(path)
    facts = json.loads(metadata["goldfinch"])
    if not isinstance(facts, dict):
        raise ValueError("its facts are not a JSON object")
    state = GlobalState.from_tensors(int(facts["round"]), tensors)
    if tensors_sha256(tensors, f"round={state.round}") != facts["sha256"]:
        raise ValueError("its content does not match its hash")
    if bad := state.not_finite():
        raise ValueError(f"{bad} has values that are not finite")
    rounds, seconds = int(facts.get("rounds", 0)), float(facts.get("seconds", 0.0))  # older files lack them
    lengths = under_prefix(LENGTHS, tensors)
    return Checkpoint(
        state, facts["run"], facts["method"], facts["identity"], int(facts["seed"]), rounds, seconds, lengths
    )


def check_belongs(checkpoint: Checkpoint, method: str, identity: str, seed: int) -> None:
    """Refuse to go on from another run's checkpoint.

    Raises:
        CheckpointError: method, seed or settings differ.
    """
    if checkpoint.method != method:
        raise CheckpointError(
            f"the checkpoint is of method {checkpoint.method}, this run is {method}; "
            f"use method={checkpoint.method} or another output="
        )
    if checkpoint.seed != seed:
        raise CheckpointError(f"the checkpoint is of seed {checkpoint.seed}, this run has {seed}")
    if checkpoint.identity != identity:
        raise CheckpointError(
            "the checkpoint was made with other settings (data, model, training or method options): "
            "compare config.yaml in the output folder, or choose another output="
        )


def check_length(checkpoint: Checkpoint, rounds: int) -> None:
    """Refuse to give a run whose method follows a schedule over all rounds another number of rounds.

    Raises:
        CheckpointError: the rounds that are done followed the schedule of a run of another length.
    """
    if checkpoint.rounds not in (0, rounds):
        raise CheckpointError(
            f"{checkpoint.method} follows a schedule over all rounds, and the {checkpoint.state.round} rounds that are "
            f"done followed that of train.rounds={checkpoint.rounds}; with train.rounds={rounds} the result would be "
            f"neither's: resume with train.rounds={checkpoint.rounds}, or start anew with overwrite=true"
        )
