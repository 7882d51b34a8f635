"""Checkpoints: the global state after a round in one file, complete or absent, and found again after any crash."""

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter
from torch import Tensor

from common.errors import CheckpointError
from common.settings import RunSettings
from common.storage import Entry, GlobalState, Series, check_run_id, under_prefix, with_prefix
from common.wire.messages import OwnVersion
from strategies.core.federation import Federation

BEST = "best"
"""What the file of the best round by validation is called instead of ``round``."""

MEMORY = "memory/"
"""Prefix of the memory of the guards against hostile updates."""

_COUNTED = TypeAdapter(dict[str, OwnVersion])


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A state and what it belongs to.

    Args:
        method, identity, seed: the run's; another run's checkpoint is refused.
        rounds: how many rounds the run was to have.
        key: what participants are drawn from (``rounds.key``).
        seconds: wall seconds of the run so far, parts that crashed included up to their last checkpoint.
        memory: what the guards remember, see :meth:`strategies.core.federation.Federation.memory`.
        attempt: number of the part of the run that wrote it.
        counted: the version of each client's own state that belongs to the state, by client id, see
            :attr:`strategies.core.federation.Federation.counted`.
    """

    state: GlobalState
    run: str
    method: str
    identity: str
    seed: int
    rounds: int
    key: int
    seconds: float = 0.0
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    attempt: int = 0
    counted: Mapping[str, OwnVersion] = field(default_factory=dict)


class Checkpoints:
    """The last ``keep`` checkpoints of a run, newest last.

    If a file is torn or changed, or has values that are not finite, the one before is used.

    Args:
        folder: the folder ``checkpoint`` in the run's folder.
        keep: the number of checkpoints that are kept.
        kind: ``round``, or :data:`BEST` for the checkpoint of the best round by validation.
    """

    def __init__(self, folder: Path, keep: int = 2, kind: str = "round") -> None:
        self.series, self.count = Series(folder, kind), keep

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, then drop the oldest beyond ``keep``."""
        facts = {name: value for name, value in vars(checkpoint).items() if name not in ("state", "memory")}
        tensors = checkpoint.state.tensors() | with_prefix(MEMORY, checkpoint.memory)
        self.series.write(checkpoint.state.round, tensors, facts)
        self.series.prune_except(self.series.numbers()[-self.count :])

    def replace(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, then drop all others, later ones too."""
        self.save(checkpoint)
        self.series.prune_except((checkpoint.state.round,))

    def load(self) -> Checkpoint | None:
        """The newest good checkpoint, or ``None`` if there are none.

        Raises:
            CheckpointError: there are checkpoints, but none is good.
        """
        try:
            return self.series.newest(_understand)
        except ValueError as error:
            raise CheckpointError(
                f"no checkpoint in {self.series.folder} is good ({error}); start again with overwrite=true"
            ) from error

    def at(self, number: int) -> Checkpoint:
        """The checkpoint of round ``number``.

        Raises:
            CheckpointError: the checkpoint is no longer kept, or is damaged.
        """
        kept = self.series.numbers()
        if number not in kept:
            there = ", ".join(map(str, kept)) or "none"
            raise CheckpointError(
                f"round {number} is not in {self.series.folder}, which has {there}; rounds.checkpoints=N keeps N rounds"
            )
        try:
            return _understand(self.series.read(number))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{self.series.path(number)} is damaged: {error}") from error

    def clear(self) -> None:
        """Remove all checkpoints."""
        self.series.prune_except(())


class RunCheckpoints:
    """The checkpoints of a run that is going on: those of its last rounds, and that of its best round by validation.

    A checkpoint holds the state and what the federation has learned of the clients; a resumed run gets both back.

    Args:
        settings: the run's settings.
        federation: what the run's exchanges go through.

    Attributes:
        last: the checkpoints of the last rounds.
        best: the checkpoint of the best round.
        run_id: the run's id; a resumed run keeps it.
        earlier_seconds: wall seconds of the run before this process.
    """

    def __init__(self, settings: RunSettings, federation: Federation) -> None:
        self.settings, self.federation = settings, federation
        folder = settings.output_folder / "checkpoint"
        self.last = Checkpoints(folder, settings.rounds.checkpoints)
        self.best = Checkpoints(folder, kind=BEST)
        self.run_id = uuid.uuid4().hex[:12]
        self.earlier_seconds = 0.0
        self._started = time.perf_counter()

    def restore(self, checkpoint: Checkpoint) -> GlobalState:
        """Go on from a checkpoint; return its state.

        Raises:
            CheckpointError: the state is not one of the run's.
        """
        federation = self.federation
        federation.check_fits(checkpoint.state)
        federation.registry.key = checkpoint.key
        federation.remember(checkpoint.memory)
        federation.counted = checkpoint.counted
        self.run_id, self.earlier_seconds = checkpoint.run, checkpoint.seconds
        return checkpoint.state

    def save(self, state: GlobalState) -> None:
        """Keep the state of a round that is done; as the best, too, if the round itself scored it so.

        The best is written first: what is killed in between holds the round again, and writes both.
        """
        if self.settings.method.scores_new_state and self.federation.best == state.round:
            self.save_best(state)
        self.last.save(self._checkpoint(state))

    def save_best(self, state: GlobalState) -> None:
        """Keep the state with the best score on validation samples."""
        self.best.replace(self._checkpoint(state))

    def _checkpoint(self, state: GlobalState) -> Checkpoint:
        return Checkpoint(
            state,
            run=self.run_id,
            method=self.settings.method.name,
            identity=self.settings.identity,
            seed=self.settings.seed,
            rounds=self.settings.train.rounds,
            seconds=round(self.seconds(), 3),
            key=self.federation.registry.key,
            memory=self.federation.memory(),
            attempt=self.federation.attempt,
            counted=self.federation.counted,
        )

    def seconds(self) -> float:
        """Return the wall seconds of the run: of this process, and of the parts before."""
        return self.earlier_seconds + time.perf_counter() - self._started


def _understand(entry: Entry) -> Checkpoint:
    state = GlobalState.from_tensors(entry.number, entry.tensors)
    if bad := state.not_finite():
        raise ValueError(f"{bad} has values that are not finite")
    check_run_id(entry.facts.get("run"))  # clients keep their state in a folder of this name
    _COUNTED.validate_python(entry.facts.get("counted"), strict=True)
    return Checkpoint(state, **entry.facts, memory=under_prefix(MEMORY, entry.tensors))
