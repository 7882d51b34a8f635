"""The search: one tuning study of one method, and the final runs of the setting that it chose.

The studies of a comparison are in one journal (``journal.log``), which Optuna writes and reads. A trial's values depend
on the study's seed and its finished trials alone, so that a study that was interrupted ends as one that was not.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.choices import folder_options
from common.config import compose_config
from common.errors import CheckpointError, ConfigError, EngineError, GoldfinchError
from common.metrics import named_missing
from common.overlays import overlay_text
from common.overrides import quoted_override
from common.regular_files import check_regular
from common.run_config import result_settings
from common.settings import RunSettings, settings_of
from common.storage import write_text
from common.text import shell_line
from server.engines.inline import InlineEngine
from server.results.run import RunFolder
from server.run.conduct import run_federation
from server.study.rules import LEFT_OUT, STUDY_SEED, Entrant, Rules, measure_of, overrides_for, starting_values
from server.trackers.events import Listener

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial, Trial

JOURNAL = "journal.log"
MAX_JOURNAL = 2**30
"""Largest journal that is read, in bytes."""

UNPRUNED = 5
"""Complete trials of a study before one may be ended early."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class TuningStudy:
    """One study of one method in one case.

    Args:
        entrant: the method and its settings.
        number: the study's number, from 0.
        rules: the numbers of the comparison.
        output: the folder of the comparison.
    """

    entrant: Entrant
    number: int
    rules: Rules
    output: Path

    @property
    def name(self) -> str:
        """Its name in the journal."""
        return f"{self.entrant.method}/{self.entrant.case}/{self.number}"

    @property
    def folder(self) -> Path:
        """The folder of its runs and of ``best.yaml``."""
        case = self.entrant.case.replace(":", "-")
        return self.output / self.entrant.method / case / f"study-{self.number}"

    @property
    def seed(self) -> int:
        """The seed of its runs, of their partition and of the values that are drawn."""
        return STUDY_SEED + self.number

    @property
    def budget(self) -> int:
        """The number of its trials: :attr:`~server.study.rules.Rules.trials` for each searched setting."""
        return self.rules.trials * len(self.entrant.space)

    @property
    def subject(self) -> dict[str, Any]:
        """Settings, ranges and code; a study of another subject is not continued."""
        settings = self.entrant.settings
        space = {name: list(each) for name, each in self.entrant.space.items()}
        start = starting_values(settings, self.entrant.space)
        found = {**result_settings(settings.raw, ("rounds.test", "seed")), "space": space, "start": start}
        return dict(json.loads(json.dumps({**found, "code": settings.code}, default=str)))


def run_study(study: TuningStudy, say: Say) -> Study:
    """Run the trials of a study that are not done, with Optuna's TPE and median pruner, and return the study.

    The first trial has the values in the settings. As many more as there are searched settings are drawn at random. A
    trial counts whether it ends early, fails or not.

    Args:
        study: the study.
        say: called with a line for each trial.

    Raises:
        ConfigError: the journal holds a study of other settings under the same name.
        CheckpointError: the journal is damaged.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    _check_journal(study.output / JOURNAL)
    with _damage(study.output / JOURNAL):
        found = _open(study, storage_of(study.output))
        done = len(finished_trials(found))

    def objective(trial: Trial) -> float:
        values: dict[str, float] = {}
        for name, (low, high, log) in study.entrant.space.items():
            values[name] = trial.suggest_float(name, low, high, log=log)
        return run_trial(study, trial, values)

    def tell(of: Study, trial: FrozenTrial) -> None:
        say(f"{study.name}: trial {len(finished_trials(of))} of {study.budget}: {_outcome(trial)}")

    while done < study.budget:
        seed = study.seed * 1000 + done
        found.sampler = optuna.samplers.TPESampler(n_startup_trials=1 + len(study.entrant.space), seed=seed)
        found.optimize(objective, n_trials=1, callbacks=[tell])
        done = len(finished_trials(found))
    return found


def storage_of(output: Path) -> BaseStorage:
    """Return the storage of a comparison's studies, for ``optuna.load_study`` too."""
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock, JournalStorage

    path = str((output / JOURNAL).absolute())
    return JournalStorage(JournalFileBackend(path, lock_obj=JournalFileOpenLock(path)))


def _open(study: TuningStudy, storage: BaseStorage) -> Study:
    """Return the study in the journal; a new one begins with the values in the settings."""
    import optuna
    from optuna.trial import TrialState

    warm_up = study.entrant.settings.train.rounds // 4 + 1
    found = optuna.create_study(
        study_name=study.name,
        storage=storage,
        direction="maximize",
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=UNPRUNED, n_warmup_steps=warm_up),
    )
    known = found.user_attrs.get("subject")
    if known is None and not found.trials:
        found.set_user_attr("subject", study.subject)
    elif not isinstance(known, dict):
        raise CheckpointError(f"{study.output / JOURNAL} is damaged or from another program: it has no settings")
    elif known != study.subject:
        subject = study.subject
        differ = sorted(key for key in known | subject if known.get(key) != subject.get(key))
        raise ConfigError(
            f"{study.output} holds a comparison with other settings ({', '.join(differ[:5])}): choose another --output"
        )
    for trial in found.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):  # its process was killed
        found.tell(trial.number, state=TrialState.FAIL)
    waiting = found.get_trials(deepcopy=False, states=(TrialState.WAITING,))
    if not waiting and not finished_trials(found):
        found.enqueue_trial(starting_values(study.entrant.settings, study.entrant.space))
    return found


def _check_journal(path: Path) -> None:
    """Check that the journal, if there is one, can be read without blocking.

    Raises:
        CheckpointError: it is no regular file.
    """
    try:
        check_regular(path, MAX_JOURNAL)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise CheckpointError(f"{error}; delete it to search again, or choose another --output") from error


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    try:
        yield
    except (AssertionError, LookupError, RecursionError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, GoldfinchError):
            raise
        raise CheckpointError(
            f"{path} is damaged or from another program: {error}; delete it to search again, or choose another --output"
        ) from error


def finished_trials(study: Study) -> list[FrozenTrial]:
    """Return the trials that count: those that are complete or were ended early, in their order."""
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state.name in ("COMPLETE", "PRUNED")]


def best_trial(study: Study) -> FrozenTrial | None:
    """Return the trial with the highest score after its last round, the earliest of several; ``None`` without one."""
    scored = [trial for trial in finished_trials(study) if state_of(trial) == "complete"]
    return max(scored, key=_score, default=None)


def _score(trial: FrozenTrial) -> float:
    return trial.value or 0.0


def state_of(trial: FrozenTrial) -> str:
    """Return ``complete``, ``pruned`` (ended early) or ``failed`` (it has no score)."""
    if "problem" in trial.user_attrs:
        return "failed"
    return str(trial.state.name.lower())


def _outcome(trial: FrozenTrial) -> str:
    values = " ".join(f"{name.rpartition('.')[2]}={value:.3g}" for name, value in trial.params.items())
    if "problem" in trial.user_attrs:
        return f"{values}: no score: {trial.user_attrs['problem']}"
    curve = trial.intermediate_values
    text = f"{values}: validation {curve[max(curve)]:.2f}"
    if trial.state.name == "PRUNED":
        text += f", ended early after round {max(curve)}"
    return text


# ---- runs ------------------------------------------------------------------------------------------------------------


class ValidationScores:
    """Reports a run's validation scores to a trial, round by round.

    Args:
        trial: the trial.
    """

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.scores: dict[int, float] = {}
        self.done: set[int] = set()

    @property
    def last(self) -> float:
        """The score after the last round that was scored."""
        return self.scores[max(self.scores)]

    def __call__(self, name: str, entry: Mapping[str, Any]) -> None:
        """Take one event of the run.

        Raises:
            EngineError: a client was not scored, so that the trial cannot be compared with others.
        """
        if name == "round done":
            self.done.add(int(entry["round"]))
        if name != "validation":
            return
        number = int(entry["round"])
        if entry.get("missing"):
            raise EngineError(
                f"round {number} was not validated by every client: it is without {named_missing(entry['missing'])}"
            )
        self.scores[number] = float(entry["average"])
        if number:
            self.trial.report(self.scores[number], number)


def run_trial(study: TuningStudy, trial: Trial, values: Mapping[str, float]) -> float:
    """Do a run with ``values``, and return its validation score after the last round; 0 if it failed.

    Test images are not scored. The run's folder is deleted at its end. If the run was interrupted before, it goes on.

    Args:
        study: the study.
        trial: Optuna's trial; each round's score is reported to it.
        values: the searched settings.

    Raises:
        TrialPruned: the run was below the median of the others and was ended.
        ConfigError: the run could not start.
    """
    import optuna

    scores = ValidationScores(trial)
    chosen = (*study.entrant.overrides, *overrides_for(values), f"seed={study.seed}", "rounds.test=false")
    folder = study.folder / "trial"
    try:
        run_here(chosen, folder, scores, trial.should_prune)
        if not scores.scores:
            raise EngineError("no round was validated")
        if not math.isfinite(scores.last):
            raise EngineError(f"its validation score is {scores.last}")
    except EngineError as error:
        trial.set_user_attr("problem", str(error).partition("\n")[0])
    trial.set_user_attr("rounds", len(scores.done))
    shutil.rmtree(folder, ignore_errors=True)
    if "problem" in trial.user_attrs:
        return 0.0
    if len(scores.done) < study.entrant.settings.train.rounds and trial.should_prune():
        raise optuna.TrialPruned
    return scores.last


def final_run(study: TuningStudy, values: Mapping[str, float], seed: int) -> RunFolder:
    """Do a run with the values that a study chose and a seed of its own, scored on test images, and return it.

    A run that is finished is not done again, and one that was interrupted goes on.

    Raises:
        EngineError: the run could not be completed, or its last score lacks a domain.
    """
    chosen = (*study.entrant.overrides, *overrides_for(values), f"seed={seed}")
    folder = study.folder / f"seed-{seed}"
    run_here(chosen, folder)
    run = RunFolder.open(folder)
    if run.summary.get("missing"):
        raise EngineError(f"{folder}: the score is without {named_missing(run.summary['missing'])}")
    return run


def run_here(
    overrides: tuple[str, ...],
    folder: Path,
    listener: Listener | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Do a run in this process, unless the folder holds it; a run that was interrupted goes on.

    Args:
        overrides: the run's overrides, without its output.
        folder: the run's folder.
        listener: called with every event, also with those of a part that was interrupted.
        stop: called before every round; ``True`` ends the run.
    """
    settings = settings_of(compose_config([*overrides, quoted_override("output", folder.absolute())]))
    listeners: list[Listener] = []
    if listener is not None:
        listeners.append(listener)
    known = _same_run(settings)
    if known is None:
        settings = replace(settings, overwrite=True)
    else:
        for entry in known.events:
            for each in listeners:
                each(str(entry["event"]), entry)
        if known.summary:
            return
        settings = replace(settings, resume=True)
    run_federation(settings, InlineEngine(settings), listeners, stop)


def _same_run(settings: RunSettings) -> RunFolder | None:
    """Return the run in the output folder if it is of these settings and this code and has a checkpoint."""
    run = RunFolder(settings.output_folder)
    try:
        same = run.code == settings.code and run.settings.identity == settings.identity
        if same and any((run.folder / "checkpoint").glob("*")):
            return run
    except GoldfinchError:
        pass
    return None


def write_best(study: TuningStudy, found: Study, best: FrozenTrial) -> Path:
    """Write ``best.yaml``, which ``goldfinch run tuned=`` takes, and return its path."""
    entrant, ends = study.entrant, finished_trials(found)
    pruned = sum(trial.state.name == "PRUNED" for trial in ends)
    settings = entrant.settings
    unit = f" {measure_of(settings).unit}".rstrip()
    text = (
        f"{len(ends)} trials ({pruned} ended early) of {settings.train.rounds} rounds with seed {study.seed}, by "
        f"validation on {settings.protocol.validation:g} of each client's training samples after the last round: "
        f"{best.value or 0.0:.2f}{unit}, and {ends[0].value or 0.0:.2f}{unit} with the {entrant.start} values. No test "
        f"set was looked at. Settings: {' '.join(entrant.overrides)}"
    )
    if entrant.left_out is not None:
        text += f" ({LEFT_OUT}{entrant.left_out})"
    choices, values = settings.choices, {**entrant.fixed, **best.params}
    path = study.folder / "best.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, overlay_text(tuned_command(path), text, choices["method"], choices["data"], values))
    return path


def tuned_command(path: Path) -> str:
    """Return the command of a run with the setting in ``path``."""
    return shell_line(["goldfinch", "run", f"tuned={path}", *folder_options()])
