"""The search: one tuning study of one method, and the final runs of the setting that it chose.

A trial's values depend on the study's seed, the trial's number and the trials of earlier batches alone, so that a study
that was interrupted, or that several processes share, ends as one that was not.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import optuna
from optuna import Study
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial

from common.choices import folder_options
from common.composition import compose_config
from common.errors import CheckpointError, ConfigError, EngineError, some_of
from common.metrics import named_missing
from common.overlays import overlay_text
from common.overrides import quoted_override
from common.run_config import result_settings
from common.settings import RunSettings, settings_of
from common.storage import write_text
from common.text import quantity, shell_line
from goldfinch.record import RunRecord
from goldfinch.study.options import STUDY_SEED, Rules
from goldfinch.study.rules import LEFT_OUT, Entrant, measure_of, overrides_for, starting_values
from goldfinch.study.storage import DONE, Task, damage, take
from server.engines.inline import InlineEngine
from server.run.conduct import FolderInUseError, run_federation, run_lock
from server.run.events import Listener
from server.run.existing import Step, changed_files, decide

UNPRUNED = 5
"""Complete trials of a study before one may be ended early."""

POLL_SECONDS = 1.0
"""Seconds after which a process that waits for another one looks again."""

OTHER_PLACE = "Choose another folder or storage"
"""What to do if the storage of a comparison holds another one."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class TuningStudy:
    """One study of one method in one case.

    Args:
        entrant: the method and its settings.
        number: the study's number, from 0.
        rules: the numbers of the comparison.
        output: the folder of the comparison.
        overwrite: whether it replaces studies and final runs of other settings or other code.
    """

    entrant: Entrant
    number: int
    rules: Rules
    output: Path
    overwrite: bool = False

    @property
    def name(self) -> str:
        """The name of the study in the storage."""
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
        """The number of its trials: :attr:`~goldfinch.study.options.Rules.trials` for each searched setting."""
        return self.rules.trials * len(self.entrant.space)

    @property
    def subject(self) -> dict[str, Any]:
        """Settings, ranges and code; a study of another subject is not continued."""
        settings = self.entrant.settings
        space = {name: list(each) for name, each in self.entrant.space.items()}
        start = starting_values(settings, self.entrant.space)
        subject = {**result_settings(settings.raw, ("rounds.test", "seed")), "space": space, "start": start}
        subject |= {"code": settings.code, "batch": self.rules.batch}
        return dict(json.loads(json.dumps(subject, default=str)))


@dataclass(frozen=True)
class SharedStudy:
    """A study in its storage, whose trials and final runs any number of processes take.

    Args:
        study: the study.
        trials: Optuna's study of its trials.
        finals: Optuna's study of its final runs.
        again: entries of ``finals`` that failed before this process opened the study, so that it tries them once more.
    """

    study: TuningStudy
    trials: Study
    finals: Study
    again: frozenset[int]

    @property
    def counted(self) -> list[FrozenTrial]:
        """The finished trials that are within the budget, in the order of a single process.

        The storage may hold more, of a comparison with a larger ``--trials``. A trial depends on those of earlier
        batches alone, so the first ones are the same for all budgets.
        """
        return [trial for trial in finished_trials(self.trials) if _number(trial) < self.study.budget]

    @property
    def searched(self) -> bool:
        """Whether all trials are done."""
        return len(self.counted) >= self.study.budget


def open_study(study: TuningStudy, storage: BaseStorage, place: str, remedy: str = OTHER_PLACE) -> SharedStudy:
    """Open a study in its storage; it is made if it is not there.

    A study of other settings or other code under the same name is kept, unless ``study`` is to replace it.

    Args:
        study: the study.
        storage: the storage.
        place: what to call it in messages.
        remedy: what to do if it holds another study.

    Raises:
        ConfigError: the storage holds another study under the same name.
        CheckpointError: the storage is damaged.
    """
    with damage(place):
        trials = _open(study.name, study, storage, place, remedy)
        finals = _open(f"{study.name}/final", study, storage, place, remedy)
        failed = [trial.number for trial in finals.get_trials(deepcopy=False) if "problem" in trial.user_attrs]
        return SharedStudy(study, trials, finals, frozenset(failed))


def _open(name: str, study: TuningStudy, storage: BaseStorage, place: str, remedy: str) -> Study:
    """Return Optuna's study with a name; a new one gets the subject of the study."""
    subject = study.subject
    opened, begun, known = _look_up(name, storage)
    if study.overwrite and isinstance(known, dict) and known != subject:
        with contextlib.suppress(KeyError):  # another process of the same comparison has deleted it
            storage.delete_study(opened._study_id)
        opened, begun, known = _look_up(name, storage)
    if known is None and not begun:
        opened.set_user_attr("subject", subject)
    elif not isinstance(known, dict):
        raise CheckpointError(f"{place} is damaged or from another program: its study {name} has no settings")
    elif known != subject:
        differ = sorted(key for key in known | subject if known.get(key) != subject.get(key))
        told = f"with other settings ({', '.join(differ[:5])})"
        if differ == ["code"]:
            told = f"of other code{_where(study)}"
        raise ConfigError(f"{place} holds a comparison {told}. {remedy}")
    return opened


def _look_up(name: str, storage: BaseStorage) -> tuple[Study, bool, Any]:
    """Return Optuna's study with a name, whether it has a trial, and its subject; ``None`` if it has none yet.

    Trials are read first: another process that begins the study at this moment writes the subject before a trial.
    """
    opened = _made(name, storage)
    begun = bool(opened.trials)
    return opened, begun, opened.user_attrs.get("subject")


def _made(name: str, storage: BaseStorage) -> Study:
    """Return Optuna's study with a name, which is made if it is not there; nothing is written if it is."""
    sampler = optuna.samplers.RandomSampler()  # asked for nothing: entries have their values
    with contextlib.suppress(KeyError):
        return optuna.load_study(study_name=name, storage=storage, sampler=sampler)
    return optuna.create_study(
        study_name=name, storage=storage, direction="maximize", load_if_exists=True, sampler=sampler
    )


def _where(study: TuningStudy) -> str:
    """Return in which files the code of a study's final runs differs from the present code; empty without such runs."""
    for path in sorted(study.folder.glob("seed-*/code.json")):
        files = changed_files(path.parent, study.entrant.settings.own_packages)
        if files:
            return f", which differs in {some_of(files)}"
    return ""


def next_trial(shared: SharedStudy, say: Say) -> bool:
    """Do a trial that no process has done or does, and return whether there was one.

    The first trial has the values in the settings. As many more as there are searched settings are drawn at random, and
    the others by Optuna's TPE. Values and the median of Optuna's pruner depend on the trial's number and on the trials
    of earlier batches alone (:attr:`~goldfinch.study.options.Rules.batch`), in whatever order processes do them. A
    trial counts whether it ends early, fails or not.

    Args:
        shared: the study.
        say: called with a line for each trial.
    """
    study, trials = shared.study, shared.trials
    finished = finished_trials(trials)
    begin = len(finished) - len(finished) % study.rules.batch
    numbers = range(begin, min(begin + study.rules.batch, study.budget))

    def values(task: Task) -> dict[str, float]:
        return dict(_drawn(study, task["trial"], finished[:begin]).params)

    def work(trial: Trial) -> float:
        return run_trial(study, trial, _drawn(study, _number(trial), finished[:begin]))

    def tell(trial: FrozenTrial) -> None:
        say(f"{study.name}: trial {_number(trial) + 1} of {study.budget}: {_outcome(trial)}")

    return take(trials, [{"trial": number} for number in numbers], values, work, tell)


def _drawn(study: TuningStudy, number: int, earlier: Sequence[FrozenTrial]) -> Trial:
    """Return a trial in memory with the values of a trial of the study.

    Args:
        study: the study.
        number: the trial's number, from 0.
        earlier: the trials of earlier batches, in their order.
    """
    space = study.entrant.space
    warm_up = study.entrant.settings.train.rounds // 4 + 1
    memory = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(n_startup_trials=1 + len(space), seed=study.seed * 1000 + number),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=UNPRUNED, n_warmup_steps=warm_up),
    )
    memory.add_trials(earlier)
    if number == 0:
        memory.enqueue_trial(starting_values(study.entrant.settings, space))
    trial = memory.ask()
    for name, (low, high, log) in space.items():
        trial.suggest_float(name, low, high, log=log)
    return trial


def finished_trials(study: Study) -> list[FrozenTrial]:
    """Return the trials that count, those that are complete or were ended early, in the order of a single process."""
    finished = [trial for trial in study.get_trials(deepcopy=False) if trial.state in DONE]
    return sorted(finished, key=_number)


def _number(trial: FrozenTrial | Trial) -> int:
    return int(trial.user_attrs["trial"])


def best_trial(trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """Return the trial with the highest score after its last round, the earliest of several; ``None`` without one."""
    scored = [trial for trial in trials if state_of(trial) == "complete"]
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
    """Reports a run's validation scores to trials, round by round.

    Args:
        trials: the trials.
    """

    def __init__(self, *trials: Trial) -> None:
        self.trials = trials
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
            for trial in self.trials:
                trial.report(self.scores[number], number)


def run_trial(study: TuningStudy, trial: Trial, drawn: Trial) -> float:
    """Do a run with a trial's values, and return its validation score after the last round; below all if it failed.

    Test images are not scored. The run's folder is deleted at its end. If the run was interrupted before, it goes on.

    Args:
        study: the study.
        trial: Optuna's trial in the storage; each round's score is reported to it.
        drawn: the same trial in memory, among the trials of earlier batches alone; it says whether the run ends early.

    Raises:
        TrialPruned: the run was below the median of the others and was ended.
        ConfigError: the run could not start.
    """
    values: dict[str, float] = {}
    for name, (low, high, log) in study.entrant.space.items():
        values[name] = trial.suggest_float(name, low, high, log=log)
    scores = ValidationScores(trial, drawn)
    chosen = (*study.entrant.overrides, *overrides_for(values), f"seed={study.seed}", "rounds.test=false")
    folder = study.folder / f"trial-{_number(trial)}"
    try:
        run_here(chosen, folder, scores, drawn.should_prune, own=True)
        if not scores.scores:
            raise EngineError("no round was validated")
        if not math.isfinite(scores.last):
            raise EngineError(f"its validation score is {scores.last}")
    except EngineError as error:
        trial.set_user_attr("problem", str(error).partition("\n")[0])
    trial.set_user_attr("rounds", len(scores.done))
    shutil.rmtree(folder, ignore_errors=True)
    if "problem" in trial.user_attrs:
        return -math.inf
    if len(scores.done) < study.entrant.settings.train.rounds and drawn.should_prune():
        raise optuna.TrialPruned
    return scores.last


def final_run(
    study: TuningStudy, values: Mapping[str, float], seed: int, listener: Listener | None = None
) -> RunRecord:
    """Do a run with the values that a study chose and a seed of its own, scored on test images, and return it.

    A run that is finished is not done again, and one that was interrupted goes on.

    Args:
        study: the study.
        values: the searched settings.
        seed: the run's seed.
        listener: called with every event.

    Raises:
        ConfigError: the folder holds another run, which the study does not replace.
        EngineError: the run could not be completed, or its last score lacks a domain.
    """
    chosen = (*study.entrant.overrides, *overrides_for(values), f"seed={seed}")
    folder = study.folder / f"seed-{seed}"
    run_here(chosen, folder, listener, overwrite=study.overwrite)
    run = RunRecord.open(folder)
    missing = run.rules.get("final", {}).get("missing")
    if missing:
        raise EngineError(f"{folder}: the score is without {named_missing(missing)}")
    return run


def run_here(
    overrides: tuple[str, ...],
    folder: Path,
    listener: Listener | None = None,
    stop: Callable[[], bool] = lambda: False,
    *,
    overwrite: bool = False,
    own: bool = False,
) -> None:
    """Do a run in this process, unless the folder holds it; a run that was interrupted goes on.

    While a process that was taken for dead still writes to the folder, this one waits.

    Args:
        overrides: the run's overrides, without its output.
        folder: the run's folder.
        listener: called with every event, also with those of a part that was interrupted.
        stop: called before every round; ``True`` ends the run.
        overwrite: whether a run of other settings or other code in the folder is replaced.
        own: whether the folder is a trial's, which is deleted in any case: another run in it is deleted first.

    Raises:
        ConfigError: the folder holds another run, which is kept.
    """
    settings = settings_of(compose_config([*overrides, quoted_override("output", folder.absolute())]))
    settings = replace(settings, overwrite=overwrite)
    while True:
        try:
            _run_or_resume(settings, listener, stop, own=own)
        except FolderInUseError:
            time.sleep(POLL_SECONDS)
        else:
            return


def _run_or_resume(
    settings: RunSettings, listener: Listener | None, stop: Callable[[], bool], *, own: bool = False
) -> None:
    listeners: list[Listener] = []
    if listener is not None:
        listeners.append(listener)
    folder = settings.output_folder
    kept = True
    with contextlib.suppress(ConfigError):  # of files without a run, whose deletion was interrupted
        kept = decide(settings, study=True).step is Step.KEEP
    if kept and own:
        with run_lock(folder):  # another process may have begun the trial
            shutil.rmtree(folder)
    decision = decide(settings, study=True)
    if decision.step is Step.KEEP:
        raise ConfigError(
            f"{folder} holds another run, which is kept: {decision.reason}. Choose another folder, or add "
            "overwrite=true to train again"
        )

    def tell_before(name: str, _: Mapping[str, Any]) -> None:
        if name == "resume":  # the rounds that are done again have been dropped
            for earlier in RunRecord(folder).told_events():
                for each in listeners:
                    each(str(earlier["event"]), earlier)

    if decision.step is Step.NOTHING:
        tell_before("resume", {})
        return
    settings = replace(settings, resume=decision.step is Step.GO_ON, overwrite=decision.replaces)
    run_federation(settings, InlineEngine(settings), [tell_before, *listeners], stop)


def write_best(shared: SharedStudy, best: FrozenTrial) -> Path:
    """Write ``best.yaml``, which ``goldfinch run tuned=`` takes, and return its path."""
    study, ends = shared.study, shared.counted
    entrant = study.entrant
    pruned = sum(trial.state.name == "PRUNED" for trial in ends)
    settings = entrant.settings
    unit = f" {measure_of(settings).unit}".rstrip()
    first = "no score" if state_of(ends[0]) == "failed" else f"{ends[0].value:.2f}{unit}"
    given: list[str] = []
    for item in entrant.overrides:
        key = item.partition("=")[0]
        if key not in entrant.space and f"train.{key}" not in entrant.space:  # learning_rate is train.learning_rate
            given.append(item)
    text = (
        f"{quantity(len(ends), 'trial')} ({pruned} ended early) of {quantity(settings.train.rounds, 'round')} "
        f"with seed {study.seed}, by "
        f"validation on {settings.protocol.validation:g} of each client's training samples after the last round: "
        f"{best.value or 0.0:.2f}{unit}, and {first} with the {entrant.start} values. No test set was looked at. "
        f"Settings: {' '.join(given)}"
    )
    if entrant.left_out is not None:
        text += f" ({LEFT_OUT}{entrant.left_out})"
    choices, values = settings.choices, {**entrant.fixed, **best.params}
    if study.rules.weighting and "weighting" in settings.raw["method"]:
        values["method.weighting"] = study.rules.weighting  # an option of the comparison, and none of its overrides
    path = study.folder / "best.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, overlay_text(tuned_command(path), text, choices["method"], choices["data"], values))
    return path


def tuned_command(path: Path) -> str:
    """Return the command of a run with the setting in ``path``."""
    return shell_line(["goldfinch", "run", f"tuned={path}", *folder_options()])
