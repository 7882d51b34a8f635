"""``goldfinch tune``: a search for a method's settings by its score on validation samples; test sets are left alone."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from common.config import Search, Tuned, compose_config, printed_values, search_ranges, with_printed, with_tuned
from common.errors import CheckpointError, ConfigError, GoldfinchError, libraries_of
from common.metrics import METRICS, named_missing
from common.overrides import quoted_override
from common.privacy import GaussianPrivacy
from common.settings import RunSettings, result_settings, settings_of, yaml_of
from common.storage.files import write_text
from server.commands.sweep import Job, Progress, execute, raise_failures, run_subprocess
from server.plots.figures import COLOURS, new_figure, plain, save
from server.results.run import Run
from server.results.seeds import Value
from server.run.conduct import check_not_in_a_run, run_lock

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial, Trial

SEARCH_SEED = 1000
"""Seed of a search's runs; other seeds tell what was gained."""

VALIDATION = 0.1
RATE = "train.learning_rate"
RATE_FACTOR = 10.0
"""The learning rate is looked for between a tenth and ten times what the settings have."""

STARTUP = 5
"""Trials that are never broken off, and as many points drawn at random before the sampler learns."""

COUNTED = ("RUNNING", "COMPLETE", "PRUNED")


def space_of(settings: RunSettings) -> dict[str, Search]:
    """Return what is searched for a method, by setting: the fields that it marks, and the learning rate.

    A range reaches as far as the value that the settings have, such as the printed one for the data set.
    """
    rate = settings.train.learning_rate
    space = {RATE: Search(rate / RATE_FACTOR, rate * RATE_FACTOR)}
    for name, (low, high, log) in search_ranges(type(settings.method)).items():
        start = getattr(settings.method, name)
        if low < high and (start > 0 or not log):
            low, high = min(low, start), max(high, start)
        space[f"method.{name}"] = Search(low, high, log)
    return space


def starting_values(settings: RunSettings, space: Mapping[str, Search]) -> dict[str, float]:
    """Return the values that the settings have of what is searched."""
    groups = {"train": settings.train, "method": settings.method}
    return {name: getattr(groups[name.partition(".")[0]], name.partition(".")[2]) for name in space}


def overrides_for(values: Mapping[str, float]) -> list[str]:
    """Values as words of ``goldfinch run``."""
    return [f"{name}={value!r}" for name, value in values.items()]


@dataclass(frozen=True)
class TuningSearch:
    """One search.

    Args:
        words: the user's settings, without seed and output.
        settings: of the first trial.
        trials: how many there are to be, the first trial among them.
        start: what the first trial's values are: ``printed`` (a paper has them for this data set), ``default`` (the
            method's own), or ``given`` (the user's overrides).
        fixed: printed settings that are not searched. Every trial has them.
    """

    words: tuple[str, ...]
    settings: RunSettings
    folder: Path
    trials: int
    start: Literal["printed", "default", "given"] = "default"
    fixed: Mapping[str, float] = field(default_factory=dict)

    def job(self, label: str, kind: str, values: Mapping[str, float], *more: str, name: str = "") -> Job:
        """A run with ``values``, in the folder of its ``kind`` that is named after them, there under ``name``."""
        key = hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()[:12]
        place = quoted_override("output", (self.folder / kind / key / name).absolute())
        chosen = (*self.words, *overrides_for(values), *more, place)
        return Job(chosen, settings_of(compose_config(chosen)), label)

    @property
    def subject(self) -> dict[str, Any]:
        """What a study is of; another's is refused."""
        space = {name: list(each) for name, each in space_of(self.settings).items()}
        settings = result_settings(self.settings.raw, ("rounds.test",))
        return json.loads(json.dumps({**settings, "space": space, "code": self.settings.code}, default=str))


def plan_search(words: Sequence[str], output: Path, trials: int, seeds: Sequence[int]) -> TuningSearch:
    """Return the search that ``words`` describe, checked.

    It begins with the printed values for the data set where ``conf/printed/`` has some; ``printed=false`` begins with
    the method's defaults.

    Raises:
        ConfigError: a setting is not good, a range holds one value, or ``seeds`` has the search's own seed.
    """
    own = with_tuned([item for item in words if not item.startswith("printed=")])
    given = {item.partition("=")[0] for item in own}
    words, paper = _with_start(words, own)
    if trials < 1:
        raise ConfigError(f"--trials {trials}: a search needs one trial or more")
    if {"rounds.test", "resume", "overwrite"} & given:
        raise ConfigError("rounds.test, resume and overwrite are the search's own to set")
    words = [f"protocol.validation={VALIDATION}", f"seed={SEARCH_SEED}", *words]
    check_not_in_a_run(output)
    settings = settings_of(compose_config([*words, "rounds.test=false"]))
    if isinstance(settings.privacy, GaussianPrivacy):
        raise ConfigError(
            "privacy=gaussian: a search chooses by validation scores, which are exact functions of clients' images; "
            "search with privacy=none on data that need none, then give goldfinch run tuned= and privacy=gaussian"
        )
    if settings.seed in seeds:
        raise ConfigError(f"--seeds: {settings.seed} is the seed of the search; only others tell what was gained")
    for name, (low, high, log) in space_of(settings).items():
        if not (low < high and (low > 0 or not log)):
            raise ConfigError(f"{name} is searched from {low:g} to {high:g}: give it a range of more than one value")
    space = space_of(settings)
    fixed = {key: value for key, value in paper.items() if key not in {*space, *given}}
    start: Literal["printed", "default", "given"] = "printed" if paper else "default"
    if given & ({*space, *paper} - {RATE}):
        start = "given"
    folder = output / settings.choices["data"] / settings.choices["method"]
    return TuningSearch(tuple(words), settings, folder, trials, start, fixed)


def _with_start(words: Sequence[str], own: Sequence[str]) -> tuple[list[str], Mapping[str, float]]:
    """Return the overrides with the printed settings, if there are some and the user wants them, and these settings."""
    asked = [item for item in words if item.startswith("printed=")]
    choices = compose_config(own)["choices"]
    paper = printed_values(choices["method"], choices["data"])
    if (asked and asked[-1].lower() != "printed=true") or (paper is None and not asked):
        return with_printed([*own, *asked]), {}
    return with_printed([*own, "printed=true"]), paper.values if paper else {}


def plain_printer(console: Console) -> Callable[[str], None]:
    """What prints a text as it stands, however long its lines are."""
    return partial(console.print, highlight=False, markup=False, soft_wrap=True)


def run_search(search: TuningSearch, jobs: int, console: Console) -> Study:
    """Run the trials that are missing; only one process at a time may search in a folder.

    Raises:
        ConfigError: another process searches in the folder; or as in :func:`_run_trials`.
        CheckpointError: ``study.db`` cannot be read.
    """
    with run_lock(search.folder, "search"):
        return _run_trials(search, jobs, console)


def _run_trials(search: TuningSearch, jobs: int, console: Console) -> Study:
    """Run the trials that are missing, ``jobs`` at a time, with Optuna's ``study.optimize``.

    The first trial has the values that the settings have. A run that fails counts as a trial that scored 0. The study
    is kept in ``study.db``: a trial that was interrupted is run again, with the same values, by the next call. One
    trial at a time draws the same values whether the search is interrupted or not; with several, Optuna draws from
    the system's entropy.

    Raises:
        ConfigError: the folder's study is of other settings, or no run came to a score.
        CheckpointError: ``study.db`` cannot be read.
    """
    with libraries_of("tune", "goldfinch tune"):
        import optuna
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    say = plain_printer(console)
    study = _open_study(search)
    with _damage(search.folder):
        _enqueue_interrupted(study)
        finished_trials(study)
    done, total, space = len(finished_trials(study)), search.trials, space_of(search.settings)
    say(f"{search.settings.method.name}: {min(total, done)} of {total} trials done; output in {search.folder}")
    stopping = threading.Event()
    problems: list[BaseException] = []

    def use_own_seed(study: Study, _: FrozenTrial | None = None) -> None:
        """Give the next trial a seed of its own, so that a search which is resumed draws the same values."""
        begun = [trial for trial in study.get_trials(deepcopy=False) if trial.state.name in COUNTED]
        seed = search.settings.seed + len(begun)
        study.sampler = optuna.samplers.TPESampler(n_startup_trials=STARTUP, seed=seed, constant_liar=jobs > 1)

    def print_trial(study: Study, trial: FrozenTrial) -> None:
        chosen = " ".join(f"{name.rpartition('.')[2]}={value:.3g}" for name, value in trial.params.items())
        say(f"[{len(finished_trials(study))}/{total}] {chosen}: {trial.user_attrs['outcome']}")

    with console.status("starting") as status, ThreadPoolExecutor(1) as pool:
        show = Progress(status.update)

        def objective(trial: Trial) -> float:
            values = {
                name: trial.suggest_float(name, each.low, each.high, log=each.log) for name, each in space.items()
            }
            try:
                return run_trial(search, trial, values, show, stopping)
            except optuna.TrialPruned:
                raise
            except BaseException as error:
                problems.append(error)  # study.optimize does not raise what the last parallel trials raised
                stopping.set()
                raise

        use_own_seed(study)
        callbacks: list[Callable[[Study, FrozenTrial], None]] = [print_trial, use_own_seed]
        optimize = partial(study.optimize, n_trials=max(0, total - done), n_jobs=jobs, callbacks=callbacks)
        try:
            pool.submit(optimize, objective).result()
            if problems:
                raise problems[0]
        except BaseException as error:
            stopping.set()  # each run ends with its last complete round, and the next search goes on from it
            first = problems[0] if problems else error
            if isinstance(first, KeyboardInterrupt) and not first.args:
                first.args = ("stopped; the same command goes on where it was",)
            raise first from None
    if not any(trial.value for trial in finished_trials(study)):
        raise ConfigError(f"no trial came to a score; see run.log in {search.folder / 'trials'}")
    return study


def _open_study(search: TuningSearch) -> Study:
    """Return the study in the search's folder; a new one begins with the values that the settings have."""
    import optuna

    lock = threading.Lock()

    class LockedStudy(optuna.Study):
        """A study that one thread asks at a time: SQLite would give a queued trial to two of them."""

        def ask(self, fixed_distributions: dict[str, BaseDistribution] | None = None) -> Trial:
            with lock:
                return super().ask(fixed_distributions)

    search.folder.mkdir(parents=True, exist_ok=True)
    name, storage = "goldfinch", f"sqlite:///{(search.folder / 'study.db').absolute()}"
    warm_up = max(1, search.settings.train.rounds // 4)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=STARTUP, n_warmup_steps=warm_up)
    with _damage(search.folder):
        optuna.create_study(study_name=name, storage=storage, direction="maximize", load_if_exists=True)
        study = LockedStudy(study_name=name, storage=storage, pruner=pruner)
        known = study.user_attrs.get("subject")
    if known is None:
        study.set_user_attr("subject", search.subject)
        study.enqueue_trial(starting_values(search.settings, space_of(search.settings)))
    elif not isinstance(known, dict):
        raise CheckpointError(f"{search.folder / 'study.db'} is damaged or of another program: no settings are in it")
    elif known != search.subject:
        differ = sorted(key for key in known | search.subject if known.get(key) != search.subject.get(key))
        raise ConfigError(
            f"{search.folder} holds a study of other settings ({', '.join(differ[:5])}): choose another --output"
        )
    return study


def _enqueue_interrupted(study: Study) -> None:
    """Queue the trials again that were interrupted, each once: Optuna has them as failed, or as running if killed."""
    from optuna.trial import TrialState

    trials = study.get_trials(deepcopy=False)
    repeated = {trial.user_attrs.get("repeats") for trial in trials}
    for trial in trials:
        if trial.state == TrialState.RUNNING:
            study.tell(trial.number, state=TrialState.FAIL)
        if trial.state in (TrialState.RUNNING, TrialState.FAIL) and trial.number not in repeated:
            study.enqueue_trial(trial.params, user_attrs={"repeats": trial.number})


@contextlib.contextmanager
def _damage(folder: Path) -> Iterator[None]:
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (SQLAlchemyError, AssertionError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / 'study.db'} is damaged or of another program: {error}") from error


def finished_trials(study: Study) -> list[FrozenTrial]:
    """Return the trials that are complete or pruned, in their order."""
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state.name in ("COMPLETE", "PRUNED")]


def run_trial(
    search: TuningSearch,
    trial: Trial,
    values: Mapping[str, float],
    show: Callable[[str, str], None],
    stopping: threading.Event,
) -> float:
    """Return the best validation score of a run with ``values``, in percent; 0 if the run failed.

    Each round's score is reported to the trial. ``stopping`` ends the run; its next call goes on from its checkpoint.

    Raises:
        TrialPruned: the run was worse than the others' median and was ended.
        KeyboardInterrupt: ``stopping`` was set.
        ConfigError: no round was validated by every client, or the run did not start.
    """
    import optuna

    seed = f"seed={search.settings.seed}"
    job = search.job(f"trial {trial.number}", "trials", values, seed, "rounds.test=false")
    reported: set[int] = set()

    def hopeless() -> bool:
        with contextlib.suppress(GoldfinchError):
            for entry in Run(job.folder).events:
                number = int(entry.get("round", 0))
                whole = entry["event"] == "validation" and not entry.get("missing")  # others compare other domains
                if whole and number and number not in reported:
                    reported.add(number)
                    trial.report(float(entry["average"]), number)
                    if trial.should_prune():
                        return True
        return False

    problem = ""
    if job.summary() is None and not stopping.is_set():
        _, problem = run_subprocess(job, {}, show, lambda: stopping.is_set() or hopeless())
    if stopping.is_set():
        raise KeyboardInterrupt
    if hopeless() or (not problem and job.summary() is None):
        trial.set_user_attr("outcome", f"broken off after round {max(reported, default=0)}")
        raise optuna.TrialPruned
    summary = job.summary()
    if summary is not None and "validation" in summary:
        best = summary["validation"]
        if best.get("missing"):
            raise ConfigError(
                f"{job.label}: no round was validated by every client, so it cannot be compared with other trials: the "
                f"best is without {named_missing(best['missing'])} (see {job.folder / 'run.log'})"
            )
        trial.set_user_attr("outcome", f"validation {best['average']:.2f} in round {best['round']}")
        return float(best["average"])
    with contextlib.suppress(GoldfinchError):
        if Run(job.folder).status == "failed":  # such as a state that is no longer finite
            trial.set_user_attr("outcome", f"no score: {problem}")
            return 0.0
    raise ConfigError(f"{job.label}: {problem} (see {job.folder / 'run.log'})")


# ---- what came of it -------------------------------------------------------------------------------------------------


def write_best(search: TuningSearch, study: Study) -> Path:
    """``best.yaml``, which ``goldfinch run tuned=`` takes, and ``trials.png``; the former's place."""
    best, ends = study.best_trial, finished_trials(study)
    pruned = sum(trial.state.name == "PRUNED" for trial in ends)
    settings, chosen = search.settings, " ".join(search.words)
    found = (
        f"{len(ends)} trials ({pruned} broken off) of {settings.train.rounds} rounds with seed {settings.seed}, by "
        f"validation on {settings.protocol.validation:g} of each client's training samples: {best.value:.2f} %, and "
        f"{ends[0].value or 0.0:.2f} % with the {search.start} values. No test set was looked at. Settings: {chosen}"
    )
    choices, path = settings.choices, search.folder / "best.yaml"
    content = Tuned(choices["method"], choices["data"], found, {**search.fixed, **best.params})
    write_text(path, f"# goldfinch run tuned={path}\n{yaml_of(vars(content))}")
    _draw(search, ends)
    return path


def _draw(search: TuningSearch, ends: Sequence[FrozenTrial]) -> None:
    """Validation by trial with the best so far, then by each setting that was searched."""
    space = space_of(search.settings)
    measure = METRICS[search.settings.rounds.metric]
    figure = new_figure(
        3.0 * (1 + len(space)), 3.0, f"{search.settings.method.name}: validation {measure} in %, by trial"
    )
    panels = figure.subplots(1, 1 + len(space), sharey=True, squeeze=False)[0]
    values = [max(trial.intermediate_values.values(), default=0.0) for trial in ends]
    whole = [trial.state.name == "COMPLETE" for trial in ends]
    best = [
        max((v for v, done in zip(values[: n + 1], whole, strict=False) if done), default=0.0) for n in range(len(ends))
    ]
    panels[0].step(range(len(ends)), best, where="post", color=COLOURS[1], label="best so far")
    for panel, (name, each) in zip(panels, [("trial", None), *space.items()], strict=True):
        places = [trial.number if each is None else trial.params[name] for trial in ends]
        for state, marker, label in ((True, "o", "to the end"), (False, "x", "broken off")):
            chosen = [index for index, done in enumerate(whole) if done is state]
            points = [places[index] for index in chosen], [values[index] for index in chosen]
            plain(panel).scatter(*points, marker=marker, color=COLOURS[0], label=label)
        panel.set_xscale("log" if each is not None and each.log else "linear")
        panel.set_xlabel(name)
    panels[0].legend(fontsize=7)
    save(figure, search.folder / "trials.png")


PARTITION = "protocol.partition_seed"


def varies_partition(search: TuningSearch) -> bool:
    """Whether a fresh run's seed also draws its partition: the protocol has one, and the user did not fix it."""
    fixed = any(item.startswith(f"{PARTITION}=") for item in search.words)
    return "partition_seed" in search.settings.raw["protocol"] and not fixed


def fresh_runs(search: TuningSearch, label: str, values: Mapping[str, float], seeds: Sequence[int]) -> list[Job]:
    """Return runs with ``values`` and seeds that were not in the search, scored on test.

    A run's seed is the seed of its partition too (``protocol.partition_seed=null``), so that the deviation over runs
    has that of the partition in it. All runs of a row then have one configuration, which is why they are one group.
    """
    more = [f"{PARTITION}=null"] if varies_partition(search) else []
    return [search.job(f"{label} seed={n}", "fresh", values, *more, f"seed={n}", name=f"seed-{n}") for n in seeds]


def scores_of(jobs: Sequence[Job]) -> list[float]:
    """The runs' averages on test, in the round that is best on validation.

    Raises:
        ConfigError: one has none, or one that lacks a domain.
    """
    found = []
    for job in jobs:
        score = (job.summary() or {}).get("scores", {}).get("validated")
        if score is None:
            raise ConfigError(f"{job.label} has no score of its best round; see {job.folder / 'run.log'}")
        if missing := {**score.get("missing", {}), **score.get("validation_missing", {})}:
            raise ConfigError(
                f"{job.label} has a partial score, without {named_missing(missing)}: run it again "
                f"(see {job.folder / 'run.log'})"
            )
        found.append(float(score["average"]))
    return found


def tune(words: Sequence[str], output: Path, trials: int, seeds: Sequence[int], jobs: int = 1) -> None:
    """Search, write what was found, and say on fresh seeds what was gained on test."""
    console = Console()
    say = plain_printer(console)
    search = plan_search(words, output, trials, seeds)
    study = run_search(search, jobs, console)
    path, best = write_best(search, study), study.best_trial.params
    say(f"best: {' '.join(overrides_for(best))}")
    if seeds:
        start = starting_values(search.settings, space_of(search.settings))
        kinds = fresh_runs(search, search.start, start, seeds), fresh_runs(search, "found", best, seeds)
        raise_failures(execute([*kinds[0], *kinds[1]], jobs, console, "validated"))
        before, after = map(scores_of, kinds)
        gain = Value.of([new - old for new, old in zip(after, before, strict=True)])
        text = (
            f"{search.settings.method.name}: test accuracy in the round that is best on validation, "
            f"seeds {', '.join(map(str, seeds))}, none of them in the search"
            f"{', each with a partition of its own' * varies_partition(search)}\n"
            f"  {f'{search.start} values':14}  {Value.of(before)}\n"
            f"  found values    {Value.of(after)}\n"
            f"  gained          {gain} points"
        )
        write_text(search.folder / "gain.txt", text + "\n")
        say(text)
    say(f"wrote {path}, trials.png beside it\nnow: goldfinch run tuned={path}")
