"""``goldfinch tune``: search a method's settings by its score on validation samples, without using test sets."""

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
from common.metrics import MEASURES, Measure, named_missing
from common.overrides import quoted_override
from common.privacy import GaussianPrivacy
from common.run_config import result_settings, yaml_of
from common.settings import RunSettings, settings_of
from common.storage import write_text
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
"""Seed of a search's runs; the gain is measured with other seeds."""

VALIDATION = 0.1
RATE = "train.learning_rate"
RATE_FACTOR = 10.0
"""The learning rate is searched from a tenth to ten times its value in the settings."""

STARTUP = 5
"""The number of first trials. Their values are drawn at random, and they are never pruned."""

COUNTED = ("RUNNING", "COMPLETE", "PRUNED")


def space_of(settings: RunSettings) -> dict[str, Search]:
    """Return the ranges of the search, by setting: the method's fields with a search range, and the learning rate.

    A range is extended to include the value in the settings, such as the printed value for the data set.
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
    """Return the values of the searched settings before the search."""
    groups = {"train": settings.train, "method": settings.method}
    values: dict[str, float] = {}
    for name in space:
        group, _, field_name = name.partition(".")
        values[name] = getattr(groups[group], field_name)
    return values


def overrides_for(values: Mapping[str, float]) -> list[str]:
    """Return the overrides of ``goldfinch run`` for ``values``."""
    return [f"{name}={value!r}" for name, value in values.items()]


@dataclass(frozen=True)
class TuningSearch:
    """One search.

    Args:
        overrides: the user's overrides, without seed and output.
        settings: the settings of the first trial.
        folder: the folder of the search.
        trials: the number of trials, including the first.
        start: the origin of the first trial's values: ``printed`` (in a paper, for this data set), ``default`` (the
            method's defaults), or ``given`` (the user's overrides).
        fixed: printed settings that are not searched. Every trial has them.
    """

    overrides: tuple[str, ...]
    settings: RunSettings
    folder: Path
    trials: int
    start: Literal["printed", "default", "given"] = "default"
    fixed: Mapping[str, float] = field(default_factory=dict)

    def job(self, label: str, kind: str, values: Mapping[str, float], *more: str, name: str = "") -> Job:
        """Return a run with ``values``.

        Args:
            label: the run's name in messages.
            kind: the folder below the search's folder, ``trials`` or ``fresh``.
            values: the searched settings.
            more: further overrides.
            name: a folder below the one that is named after the values.
        """
        key = hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()[:12]
        place = quoted_override("output", (self.folder / kind / key / name).absolute())
        chosen = (*self.overrides, *overrides_for(values), *more, place)
        return Job(chosen, settings_of(compose_config(chosen)), label)

    @property
    def subject(self) -> dict[str, Any]:
        """Settings, ranges and code of the search; a study with another subject is refused."""
        space = {name: list(each) for name, each in space_of(self.settings).items()}
        settings = result_settings(self.settings.raw, ("rounds.test",))
        return json.loads(json.dumps({**settings, "space": space, "code": self.settings.code}, default=str))


def plan_search(overrides: Sequence[str], output: Path, trials: int, seeds: Sequence[int]) -> TuningSearch:
    """Return the search that ``overrides`` describe.

    It starts from the printed values for the data set if ``conf/printed/`` has some; ``printed=false`` starts from the
    method's defaults.

    Args:
        overrides: the user's overrides.
        output: the folder of the search, below which each data set and method has its own.
        trials: the number of trials.
        seeds: seeds of the runs that measure the gain.

    Raises:
        ConfigError: a setting is not valid, a range holds one value, or ``seeds`` has the search's own seed.
        DataError: the data set's files are not there.
    """
    own: list[str] = []
    asked: list[str] = []
    for item in overrides:
        if item.startswith("printed="):
            asked.append(item)
        else:
            own.append(item)
    own = with_tuned(own)
    given = {item.partition("=")[0] for item in own}
    started, paper = _with_start(own, asked)
    if trials < 1:
        raise ConfigError(f"--trials {trials}: a search needs one trial or more")
    if {"rounds.test", "resume", "overwrite"} & given:
        raise ConfigError("rounds.test, resume and overwrite are set by the search; leave them out")
    chosen = (f"protocol.validation={VALIDATION}", f"seed={SEARCH_SEED}", *started)
    check_not_in_a_run(output)
    settings = settings_of(compose_config([*chosen, "rounds.test=false"]))
    if isinstance(settings.privacy, GaussianPrivacy):
        raise ConfigError(
            "privacy=gaussian: a search chooses by validation scores, which are exact functions of clients' images; "
            "search with privacy=none on data that need none, then give goldfinch run tuned= and privacy=gaussian"
        )
    if settings.engine.get("name") != "superlink":
        settings.data.check_files()
    if measure_of(settings).lower_is_better:
        raise ConfigError(
            f"rounds.metric={settings.rounds.metric}: a search looks for the highest score, and of this metric lower "
            "is better; choose another one for the search"
        )
    if settings.seed in seeds:
        raise ConfigError(f"--seeds: {settings.seed} is the seed of the search; the gain needs other seeds")
    space = space_of(settings)
    for name, (low, high, log) in space.items():
        if not (low < high and (low > 0 or not log)):
            raise ConfigError(f"{name} is searched from {low:g} to {high:g}: give it a range of more than one value")
    fixed = dict(paper)
    for name in (*space, *given):
        fixed.pop(name, None)
    start: Literal["printed", "default", "given"] = "default"
    if given & ({*space, *paper} - {RATE}):
        start = "given"
    elif paper:
        start = "printed"
    folder = output / settings.choices["data"] / settings.choices["method"]
    return TuningSearch(chosen, settings, folder, trials, start, fixed)


def measure_of(settings: RunSettings) -> Measure:
    """Return the metric that a run's ``rounds.metric`` names."""
    return {**MEASURES, **settings.further_measures}[settings.rounds.metric]


def _with_start(own: Sequence[str], asked: Sequence[str]) -> tuple[list[str], Mapping[str, float]]:
    """Return the overrides with the printed settings, and these settings.

    They are empty if ``conf/printed/`` has none for the method and data set, or the user set ``printed=false``.

    Args:
        own: the user's overrides without ``printed=``.
        asked: the user's overrides ``printed=``.
    """
    choices = compose_config(own)["choices"]
    paper = printed_values(choices["method"], choices["data"])
    refused = asked and asked[-1].lower() != "printed=true"
    if refused or (paper is None and not asked):
        return with_printed([*own, *asked]), {}
    started = with_printed([*own, "printed=true"])
    if paper is None:
        return started, {}
    return started, paper.values


def plain_printer(console: Console) -> Callable[[str], None]:
    """Return a function that prints a text without markup and without wrapping its lines."""
    return partial(console.print, highlight=False, markup=False, soft_wrap=True)


def run_search(search: TuningSearch, jobs: int, console: Console) -> Study:
    """Run the trials that are not done, and return the study.

    Args:
        search: the search.
        jobs: trials at the same time.
        console: where to print.

    Raises:
        ConfigError: another process searches in the folder, the folder's study has other settings, or no run was
            scored.
        CheckpointError: ``study.db`` cannot be read.
    """
    with run_lock(search.folder, "search"):
        return _run_trials(search, jobs, console)


def _run_trials(search: TuningSearch, jobs: int, console: Console) -> Study:
    """Run the trials that are not done, ``jobs`` at a time, with Optuna's ``study.optimize``.

    The first trial has the values in the settings. A run that fails counts as a trial with score 0. The study is kept
    in ``study.db``; the next call runs an interrupted trial again with the same values. One trial at a time draws the
    same values whether the search is interrupted or not; with several, Optuna draws from the system's entropy.
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
        seed = search.settings.seed
        for trial in study.get_trials(deepcopy=False):
            seed += trial.state.name in COUNTED
        study.sampler = optuna.samplers.TPESampler(n_startup_trials=STARTUP, seed=seed, constant_liar=jobs > 1)

    def print_trial(study: Study, trial: FrozenTrial) -> None:
        chosen = [f"{name.rpartition('.')[2]}={value:.3g}" for name, value in trial.params.items()]
        say(f"[{len(finished_trials(study))}/{total}] {' '.join(chosen)}: {trial.user_attrs['outcome']}")

    with console.status("starting") as status, ThreadPoolExecutor(1) as pool:
        show = Progress(status.update)

        def objective(trial: Trial) -> float:
            values: dict[str, float] = {}
            for name, each in space.items():
                values[name] = trial.suggest_float(name, each.low, each.high, log=each.log)
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
            stopping.set()  # each run keeps its last complete round, and the next search resumes it
            first = [*problems, error][0]
            if isinstance(first, KeyboardInterrupt) and not first.args:
                first.args = ("stopped; the same command resumes the search",)
            raise first from None
    for trial in finished_trials(study):
        if trial.value:
            return study
    raise ConfigError(f"no trial scored above 0 % on validation samples; see run.log in {search.folder / 'trials'}")


def _open_study(search: TuningSearch) -> Study:
    """Return the study in the search's folder; a new study begins with the values in the settings."""
    import optuna

    lock = threading.Lock()

    class LockedStudy(optuna.Study):
        """A study that one thread at a time asks for a trial; SQLite would give a queued trial to two threads."""

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
        raise CheckpointError(f"{search.folder / 'study.db'} is damaged or from another program: it has no settings")
    elif known != search.subject:
        differ = sorted(key for key in known | search.subject if known.get(key) != search.subject.get(key))
        raise ConfigError(
            f"{search.folder} holds a study of other settings ({', '.join(differ[:5])}): choose another --output"
        )
    return study


def _enqueue_interrupted(study: Study) -> None:
    """Queue each interrupted trial again, once. Its state in Optuna is failed, or running if it was killed."""
    from optuna.trial import TrialState

    trials = study.get_trials(deepcopy=False)
    repeated: set[int | None] = set()
    for trial in trials:
        repeated.add(trial.user_attrs.get("repeats"))
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
        raise CheckpointError(f"{folder / 'study.db'} is damaged or from another program: {error}") from error


def finished_trials(study: Study) -> list[FrozenTrial]:
    """Return the trials that are complete or pruned, in their order."""
    trials = study.get_trials(deepcopy=False)
    return [trial for trial in trials if trial.state.name in ("COMPLETE", "PRUNED")]


def run_trial(
    search: TuningSearch,
    trial: Trial,
    values: Mapping[str, float],
    show: Callable[[str, str], None],
    stopping: threading.Event,
) -> float:
    """Do a run with ``values``, and return its best validation score in per cent; 0 if the run failed.

    Each round's score is reported to the trial.

    Args:
        search: the search.
        trial: Optuna's trial.
        values: the searched settings.
        show: called with the run's label and the last line of its log.
        stopping: ends the run when it is set; the next search resumes it.

    Raises:
        TrialPruned: the run was worse than the median of the others and was ended.
        KeyboardInterrupt: ``stopping`` was set.
        ConfigError: no round was validated by every client, or the run did not start.
    """
    import optuna

    seed = f"seed={search.settings.seed}"
    job = search.job(f"trial {trial.number}", "trials", values, seed, "rounds.test=false")
    reported: set[int] = set()

    def should_prune() -> bool:
        """Report the new rounds' scores to the trial, and return whether it should be pruned."""
        with contextlib.suppress(GoldfinchError):
            for entry in Run(job.folder).events:
                number = int(entry.get("round", 0))
                whole = entry["event"] == "validation" and not entry.get(
                    "missing"
                )  # a partial score is of fewer domains
                if whole and number and number not in reported:
                    reported.add(number)
                    trial.report(float(entry["average"]), number)
                    if trial.should_prune():
                        return True
        return False

    problem = ""
    if job.summary() is None and not stopping.is_set():
        _, problem = run_subprocess(job, {}, show, lambda: stopping.is_set() or should_prune())
    if stopping.is_set():
        raise KeyboardInterrupt
    if should_prune() or (not problem and job.summary() is None):
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


# ---- the result of a search ------------------------------------------------------------------------------------------


def write_best(search: TuningSearch, study: Study) -> Path:
    """Write ``best.yaml``, which ``goldfinch run tuned=`` takes, and ``trials.png``; return the path of the first."""
    best, ends = study.best_trial, finished_trials(study)
    pruned = sum(trial.state.name == "PRUNED" for trial in ends)
    settings, chosen = search.settings, " ".join(search.overrides)
    unit = f" {measure_of(settings).unit}".rstrip()
    found = (
        f"{len(ends)} trials ({pruned} broken off) of {settings.train.rounds} rounds with seed {settings.seed}, by "
        f"validation on {settings.protocol.validation:g} of each client's training samples: {best.value:.2f}{unit}, "
        f"and {ends[0].value or 0.0:.2f}{unit} with the {search.start} values. No test set was looked at. "
        f"Settings: {chosen}"
    )
    choices, path = settings.choices, search.folder / "best.yaml"
    content = Tuned(choices["method"], choices["data"], found, {**search.fixed, **best.params})
    write_text(path, f"# goldfinch run tuned={path}\n{yaml_of(vars(content))}")
    _draw(search, ends)
    return path


def _draw(search: TuningSearch, ends: Sequence[FrozenTrial]) -> None:
    """Draw the validation score by trial with the best so far, and by each searched setting, as ``trials.png``."""
    space = space_of(search.settings)
    title = f"{search.settings.method.name}: validation {measure_of(search.settings).title}, by trial"
    figure = new_figure(3.0 * (1 + len(space)), 3.0, title)
    panels = figure.subplots(1, 1 + len(space), sharey=True, squeeze=False)[0]
    scores: list[float] = []
    best_so_far: list[float] = []
    best = 0.0
    for trial in ends:
        score = max(trial.intermediate_values.values(), default=0.0)
        scores.append(score)
        if trial.state.name == "COMPLETE":
            best = max(best, score)
        best_so_far.append(best)
    panels[0].step(range(len(ends)), best_so_far, where="post", color=COLOURS[1], label="best so far")
    for panel, name in zip(panels, ["trial", *space], strict=True):
        for state, marker, label in (("COMPLETE", "o", "to the end"), ("PRUNED", "x", "broken off")):
            x: list[float] = []
            y: list[float] = []
            for trial, score in zip(ends, scores, strict=True):
                if trial.state.name == state:
                    x.append({"trial": trial.number, **trial.params}[name])
                    y.append(score)
            plain(panel).scatter(x, y, marker=marker, color=COLOURS[0], label=label)
        if name in space and space[name].log:
            panel.set_xscale("log")
        panel.set_xlabel(name)
    panels[0].legend(fontsize=7)
    save(figure, search.folder / "trials.png")


PARTITION = "protocol.partition_seed"


def varies_partition(search: TuningSearch) -> bool:
    """Return whether the seed of a fresh run also draws its partition.

    It does if the protocol draws a partition and the user did not fix its seed.
    """
    fixed = any(item.startswith(f"{PARTITION}=") for item in search.overrides)
    return "partition_seed" in search.settings.raw["protocol"] and not fixed


def fresh_runs(search: TuningSearch, label: str, values: Mapping[str, float], seeds: Sequence[int]) -> list[Job]:
    """Return runs with ``values`` and seeds that were not in the search, scored on test sets.

    A run's seed also draws its partition (``protocol.partition_seed=null``), so that the deviation over runs includes
    that of the partition. All these runs have the same settings besides the seed, so tables show them in one row.
    """
    more: list[str] = []
    if varies_partition(search):
        more.append(f"{PARTITION}=null")
    jobs: list[Job] = []
    for seed in seeds:
        jobs.append(search.job(f"{label} seed={seed}", "fresh", values, *more, f"seed={seed}", name=f"seed-{seed}"))
    return jobs


def scores_of(jobs: Sequence[Job]) -> list[float]:
    """Return each run's average on test sets in the round that is best on validation, in per cent.

    Raises:
        ConfigError: a run has no such score, or a partial one.
    """
    found: list[float] = []
    for job in jobs:
        score = (job.summary() or {}).get("scores", {}).get("validated")
        if score is None:
            raise ConfigError(f"{job.label} has no score of its best round; see {job.folder / 'run.log'}")
        missing = {**score.get("missing", {}), **score.get("validation_missing", {})}
        if missing:
            raise ConfigError(
                f"{job.label} has a partial score, without {named_missing(missing)}: run it again "
                f"(see {job.folder / 'run.log'})"
            )
        found.append(float(score["average"]))
    return found


def tune(overrides: Sequence[str], output: Path, trials: int, seeds: Sequence[int], jobs: int = 1) -> None:
    """Search, write the best values, and measure the gain on test sets with other seeds.

    Args:
        overrides: the user's overrides.
        output: the folder of the search.
        trials: the number of trials.
        seeds: seeds of the runs with the values before and after the search; empty skips them.
        jobs: trials and runs at the same time.

    Raises:
        ConfigError: see :func:`plan_search` and :func:`run_search`.
    """
    console = Console()
    say = plain_printer(console)
    search = plan_search(overrides, output, trials, seeds)
    study = run_search(search, jobs, console)
    path, best = write_best(search, study), study.best_trial.params
    say(f"best: {' '.join(overrides_for(best))}")
    if seeds:
        start = starting_values(search.settings, space_of(search.settings))
        runs_before = fresh_runs(search, search.start, start, seeds)
        runs_after = fresh_runs(search, "found", best, seeds)
        raise_failures(execute([*runs_before, *runs_after], jobs, console, "validated"))
        before, after = scores_of(runs_before), scores_of(runs_after)
        gain = Value.of([new - old for new, old in zip(after, before, strict=True)])
        partition = ""
        if varies_partition(search):
            partition = ", each with a partition of its own"
        text = (
            f"{search.settings.method.name}: test accuracy in the round that is best on validation, "
            f"seeds {', '.join(map(str, seeds))}, none of them in the search{partition}\n"
            f"  {f'{search.start} values':14}  {Value.of(before)}\n"
            f"  found values    {Value.of(after)}\n"
            f"  gained          {gain} points"
        )
        write_text(search.folder / "gain.txt", text + "\n")
        say(text)
    say(f"wrote {path} and trials.png\nnext: goldfinch run tuned={path}")
