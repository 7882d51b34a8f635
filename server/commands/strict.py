"""``goldfinch compare --rules strict``: independent tuning studies, and final runs on fresh seeds and partitions.

docs/strict-rules.md states the rules. Runs are done in this process, one after another, because starting a process for
each of the hundreds of short runs takes longer than the runs. After every trial and every final run the board's record
is written, and what it holds is not done again.
"""

from __future__ import annotations

import itertools
import shlex
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from rich.console import Console

from common.config import compose_config
from common.errors import ConfigError, EngineError, libraries_of, nearest
from common.metrics import named_missing
from common.overrides import quoted_override
from common.settings import RunSettings, settings_of
from server.commands.sweep import all_options
from server.commands.tune import (
    PARTITION,
    TuningSearch,
    overrides_for,
    plain_printer,
    plan_search,
    space_of,
    starting_values,
)
from server.engines.inline import InlineEngine
from server.results.board.record import (
    IN_DOMAIN,
    LEFT_OUT,
    STUDY_SEED,
    BoardRecord,
    Case,
    FinalRun,
    Row,
    Rules,
    Study,
    Trial,
    differing_settings,
    read_record,
    shared_settings,
    write_record,
)
from server.run.conduct import run_federation, run_lock
from server.trackers.events import describe

if TYPE_CHECKING:
    import optuna

BASE = "fedavg"
UNPRUNED = 5
"""Complete trials of a study before one may be ended early."""

MAX_TRIALS = 3
"""Trials of a study are at most this multiple of its budget, however early they fail."""

VALIDATION = "protocol.validation=0.1"
WEIGHTINGS = ("uniform", "samples")
SCORES = (IN_DOMAIN, "leave_one_out")
OWN_KEYS = (
    *("method", "seed", "tuned", "printed", "output", "resume", "overwrite", "experiment"),
    *("rounds.test", "train.patience", PARTITION, "protocol.leave_out"),
)
"""Settings that the rules set themselves."""

Weighting = Literal["uniform", "samples"]


@dataclass(frozen=True)
class StrictRequest:
    """What was asked for on the command line.

    Args:
        methods: names of conf/method/; ``*`` is all. FedAvg is added.
        overrides: settings of all runs, without views and weighting.
        views: options of conf/views/; each is a board of its own.
        weightings: ``uniform``, ``samples`` or both; each is a board of its own.
        scores: ``in_domain``, ``leave_one_out`` or both.
        output: the folder of the final runs.
        records: the folder of the records.
        studies: tuning studies of each method.
        trials: trials of each study.
        runs: final runs of each method.
    """

    methods: tuple[str, ...]
    overrides: tuple[str, ...]
    views: tuple[str, ...]
    weightings: tuple[Weighting, ...]
    scores: tuple[str, ...]
    output: Path
    records: Path
    studies: int = 3
    trials: int = 8
    runs: int = 5

    @property
    def command(self) -> str:
        """The command that makes these boards, and continues them."""
        words = ["goldfinch", "compare", "rules=strict", "--methods", ",".join(self.methods), *self.overrides]
        words += [f"views={','.join(self.views)}", f"weighting={','.join(self.weightings)}"]
        words += [f"--scores={','.join(self.scores)}", f"--studies={self.studies}", f"--trials={self.trials}"]
        words += [f"--runs={self.runs}", f"--output={self.output}", f"--records={self.records}"]
        return shlex.join(words)


@dataclass(frozen=True)
class Entrant:
    """One method on one board, in one case.

    Args:
        method: its name in conf/method/.
        case: the name of the case.
        board: the record of the board.
        overrides: the overrides of all its runs, without seed and output.
        settings: the settings that they compose.
        output: the folder of its final runs.
    """

    method: str
    case: str
    board: BoardRecord
    overrides: tuple[str, ...]
    settings: RunSettings
    output: Path

    @property
    def record(self) -> Case:
        """The part of the board's record that it writes."""
        return self.board.rows[self.method].cases[self.case]

    def search(self, study: int) -> TuningSearch:
        """Return the search of a study: ranges, starting values and overrides."""
        chosen = [*self.overrides, f"seed={STUDY_SEED + study}"]
        rules = self.board.rules
        return plan_search(chosen, self.output, rules.trials, range(rules.runs))


def request_of(
    methods: Sequence[str],
    overrides: Sequence[str],
    output: Path,
    records: Path | None,
    scores: Sequence[str],
    studies: int,
    trials: int,
    runs: int,
) -> StrictRequest:
    """Return the request of a command line. ``views=`` and ``weighting=`` may name several; each is a board.

    Args:
        methods: names of conf/method/.
        overrides: the settings, with ``views=`` and ``weighting=``.
        output: the folder of the final runs.
        records: the folder of the records; ``None`` is ``output``.
        scores: the kinds of cases.
        studies: tuning studies of each method.
        trials: trials of each study.
        runs: final runs of each method.
    """
    views: tuple[str, ...] = ("none",)
    weightings: tuple[str, ...] = ("uniform",)
    others: list[str] = []
    for item in overrides:
        key, _, value = item.partition("=")
        if key == "views":
            views = tuple(value.split(","))
        elif key == "weighting":
            weightings = tuple(value.split(","))
        else:
            others.append(item)
    return StrictRequest(
        tuple(methods),
        tuple(others),
        views,
        cast(Any, weightings),
        tuple(scores),
        output,
        records or output,
        studies,
        trials,
        runs,
    )


def compare_strictly(request: StrictRequest) -> list[Path]:
    """Make or continue the boards, and return the paths of their records.

    Raises:
        ConfigError: a setting is not valid or is set by the rules; a record in the folder is of another board; or a
            run could not start.
    """
    with libraries_of("tune", "goldfinch compare --rules strict"):
        import optuna
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    console = Console()
    say = plain_printer(console)
    paths: list[Path] = []
    with run_lock(request.records, "board"):
        for path, board, entrants in plan_boards(request):
            paths.append(path)
            for name, reason in board.left_out.items():
                say(f"{board.name}: left out: {name}: {reason}")
            for entrant in entrants:
                _run_studies(entrant, path, say)
                _run_finals(entrant, path, say)
                say(_result_line(entrant))
    return paths


def _check(request: StrictRequest) -> None:
    if not request.methods:
        raise ConfigError("a comparison needs methods: goldfinch compare rules=strict --methods fedavg,fpl data=glyphs")
    for item in request.overrides:
        key = item.partition("=")[0].lstrip("+~")
        if key in OWN_KEYS or key.startswith("method."):
            raise ConfigError(
                f"{item}: the strict rules set {key} themselves, so that all rows have the same; leave it out"
            )
    _check_choices("weighting", request.weightings, WEIGHTINGS)
    _check_choices("--scores", request.scores, SCORES)
    if min(request.studies, request.trials, request.runs) < 1 or request.runs > STUDY_SEED:
        raise ConfigError(f"--studies, --trials and --runs are at least 1, and --runs at most {STUDY_SEED}")
    if request.runs < request.studies:
        raise ConfigError(f"--runs {request.runs}: each of {request.studies} studies needs a final run of its setting")


def _check_choices(name: str, items: Sequence[str], choices: Sequence[str]) -> None:
    for item in items:
        if item not in choices:
            raise ConfigError(f"{name} {item}: {nearest(item, choices)}")
    if not items:
        raise ConfigError(f"{name}: choose among {', '.join(choices)}")


# ---- the plan --------------------------------------------------------------------------------------------------------


def plan_boards(request: StrictRequest) -> list[tuple[Path, BoardRecord, list[Entrant]]]:
    """Return the path of each board's record, the record with all rows, and what is to be run. Nothing is written.

    Raises:
        ConfigError: see :func:`compare_strictly`.
    """
    _check(request)
    found: list[tuple[Path, BoardRecord, list[Entrant]]] = []
    for views, weighting in itertools.product(request.views, request.weightings):
        found.append(_plan(request, views, weighting))
    return found


def _plan(request: StrictRequest, views: str, weighting: Weighting) -> tuple[Path, BoardRecord, list[Entrant]]:
    """Return the path of a board's record, the record with all rows, and what is to be run, FedAvg first."""
    names = list(request.methods)
    if names == ["*"]:
        names = all_options("method=*").partition("=")[2].split(",")
    first = _compose(BASE, IN_DOMAIN, request.overrides, views, weighting)
    board = _new_board(request, views, weighting, settings_of(compose_config(first)))
    path = request.records / f"{board.name}.json"
    if path.exists():
        board = _continued(path, board, request)
    entrants: list[Entrant] = []
    for case in _cases(request, board):
        for name in dict.fromkeys([BASE, *names]):
            try:
                entrant = _entrant(request, board, name, case, views, weighting)
            except ConfigError as error:
                board.left_out[name] = str(error)
                continue
            entrants.append(entrant)
    return path, board, entrants


def _compose(
    method: str, case: str, overrides: Sequence[str], views: str, weighting: Weighting | None
) -> tuple[str, ...]:
    """Return the overrides of a method's runs in a case, without seed and output."""
    chosen = [f"method={method}", VALIDATION, *overrides, f"views={views}"]
    if case != IN_DOMAIN:
        chosen = [item for item in chosen if not item.startswith("protocol=")]
        chosen += ["protocol=leave_one_out", f"protocol.leave_out=[{case.removeprefix(LEFT_OUT)}]"]
    chosen.append(f"{PARTITION}=null")
    if weighting is not None and "weighting" in compose_config(chosen)["method"]:
        chosen.append(f"method.weighting={weighting}")
    return tuple(chosen)


def _new_board(request: StrictRequest, views: str, weighting: Weighting, settings: RunSettings) -> BoardRecord:
    rules = Rules(
        studies=request.studies,
        trials=request.trials,
        runs=request.runs,
        rounds=settings.train.rounds,
        startup=max(1, request.trials // 3),
        unpruned=UNPRUNED,
    )
    name = "-".join([settings.choices["data"], settings.choices["model"], f"views_{views}", weighting])
    return BoardRecord(
        name=name,
        data=settings.choices["data"],
        model=settings.choices["model"],
        views=views,
        weighting=weighting,
        rules=rules,
        overrides=list(request.overrides),
        shared=shared_settings(settings.raw),
        command=request.command,
    )


def _continued(path: Path, board: BoardRecord, request: StrictRequest) -> BoardRecord:
    """Return the record at ``path``, to go on with. Its command names the methods and scores of all its rows.

    Raises:
        ConfigError: it is of a board with other settings or rules.
    """
    known = read_record(path)
    differ = known.same_board(board)
    if differ:
        raise ConfigError(
            f"{path} holds a board with other settings ({', '.join(differ[:5])}): choose another --records folder, or "
            f"repeat the command that made it: {known.command}"
        )
    known.command = _command_of_all(known, request)
    return known


def _command_of_all(known: BoardRecord, request: StrictRequest) -> str:
    """Return a command for the rows and scores of the record and those of the request."""
    methods = list(dict.fromkeys([*known.rows, *known.left_out, *request.methods]))
    if "*" in request.methods:
        methods = ["*"]
    cases: set[str] = set()
    for row in known.rows.values():
        cases.update(row.cases)
    scores = list(request.scores)
    if IN_DOMAIN in cases:
        scores.append(IN_DOMAIN)
    if cases - {IN_DOMAIN}:
        scores.append("leave_one_out")
    ordered = [score for score in SCORES if score in scores]
    return replace(request, methods=tuple(methods), scores=tuple(ordered)).command


def _cases(request: StrictRequest, board: BoardRecord) -> list[str]:
    """Return the names of the cases.

    Raises:
        ConfigError: domains are to be left out, and the protocol is not one client per domain.
    """
    found: list[str] = []
    if IN_DOMAIN in request.scores:
        found.append(IN_DOMAIN)
    if "leave_one_out" in request.scores:
        settings = settings_of(compose_config(_compose(BASE, IN_DOMAIN, request.overrides, board.views, None)))
        if settings.choices["protocol"] != "one_per_domain":
            raise ConfigError(
                f"--scores leave_one_out leaves out one domain after another, with one client for each other domain; "
                f"protocol={settings.choices['protocol']} has its own clients: take --scores in_domain"
            )
        for domain in settings.data.domains:
            found.append(f"{LEFT_OUT}{domain}")
    return found


def _entrant(
    request: StrictRequest, board: BoardRecord, method: str, case: str, views: str, weighting: Weighting
) -> Entrant:
    """Return one method in one case, and make its place in the record.

    Raises:
        ConfigError: the method cannot run on this board, or would have other settings than the other rows.
    """
    overrides = _compose(method, case, request.overrides, views, weighting)
    output = request.output / board.name / method / case.replace(":", "-")
    settings = settings_of(compose_config(overrides))
    if case == IN_DOMAIN:
        differ = differing_settings(shared_settings(settings.raw), board.shared)
        if differ:
            raise ConfigError(f"it needs other settings than the other rows: {', '.join(differ)}")
    entrant = Entrant(method, case, board, overrides, settings, output)
    search = entrant.search(0)  # refuses what cannot be searched
    row = board.rows.setdefault(method, Row(method=method))
    row.personal = settings.method.personal
    row.start = search.start
    row.weighting = cast(Any, dict(settings.raw["method"]).get("weighting", "none"))
    row.cases.setdefault(case, Case())
    return entrant


# ---- studies ---------------------------------------------------------------------------------------------------------


def _run_studies(entrant: Entrant, path: Path, say: Any) -> None:
    """Run the trials of all studies that are not done."""
    rules, case = entrant.board.rules, entrant.record
    for number in range(rules.studies):
        if len(case.studies) <= number:
            case.studies.append(Study(seed=STUDY_SEED + number))
        study = case.studies[number]
        if study.done:
            continue
        search = entrant.search(number)
        while study.rounds + rules.rounds <= rules.budget and len(study.trials) < MAX_TRIALS * rules.trials:
            values = next_values(search, study, rules.startup)
            trial = run_trial(search, study, values, rules)
            study.trials.append(trial)
            write_record(path, entrant.board)
            say(
                f"{entrant.board.name} {entrant.method} {entrant.case} study {number}: {study.rounds}/{rules.budget} "
                f"rounds, validation {trial.score:.2f} ({trial.state}, {trial.seconds:.1f} s)"
            )
        study.done = True
        write_record(path, entrant.board)


def next_values(search: TuningSearch, study: Study, startup: int) -> dict[str, float]:
    """Return the values of a study's next trial.

    The first trial has the values in the settings; the next ones are drawn at random until there are ``startup``
    trials, and by TPE after that. The values depend on the study's seed and its earlier trials alone.

    Args:
        search: ranges and starting values.
        study: the trials so far.
        startup: trials that do not come from TPE, the first included.
    """
    import optuna

    if not study.trials:
        return starting_values(search.settings, space_of(search.settings))
    distributions: dict[str, optuna.distributions.BaseDistribution] = {}
    for name, (low, high, log) in space_of(search.settings).items():
        distributions[name] = optuna.distributions.FloatDistribution(low, high, log=log)
    sampler = optuna.samplers.TPESampler(n_startup_trials=startup, seed=study.seed * 1000 + len(study.trials))
    known = optuna.create_study(direction="maximize", sampler=sampler)
    for trial in study.trials:
        known.add_trial(_optuna_trial(trial, distributions))
    return dict(known.ask(distributions).params)


def _optuna_trial(
    trial: Trial, distributions: Mapping[str, optuna.distributions.BaseDistribution]
) -> optuna.trial.FrozenTrial:
    import optuna

    state = optuna.trial.TrialState.COMPLETE
    if trial.state == "pruned":
        state = optuna.trial.TrialState.PRUNED
    return optuna.trial.create_trial(
        state=state,
        value=trial.score,
        params=dict(trial.values),
        distributions=dict(distributions),
        intermediate_values=dict(trial.curve),
    )


def below_median(curve: Mapping[int, float], study: Study, rules: Rules) -> bool:
    """Return whether a running trial may be ended: its best score so far is below the median at the same round.

    The median is over the complete trials of the study. There is no decision before ``rules.unpruned`` trials are
    complete, nor in the first quarter of the rounds.

    Args:
        curve: the trial's validation score by round.
        study: the study's earlier trials.
        rules: the numbers of the rules.
    """
    complete = [trial for trial in study.trials if trial.state == "complete"]
    number = max(curve, default=0)
    if len(complete) < rules.unpruned or number <= max(1, rules.rounds // 4):
        return False
    others = [trial.curve[number] for trial in complete if number in trial.curve]
    if not others:
        return False
    return max(curve.values()) < statistics.median(others)


class Watcher:
    """Collects a run's events: scores by round, completed rounds and lines for the log.

    Args:
        rounds: the number of rounds of the run.
        domain: the score of this domain counts; ``None``: the average counts.
    """

    def __init__(self, rounds: int, domain: str | None = None) -> None:
        self.total, self.domain = rounds, domain
        self.validation: dict[int, float] = {}
        self.test: dict[int, float] = {}
        self.completed = 0
        self.lines: list[str] = []

    def __call__(self, name: str, entry: Mapping[str, Any]) -> None:
        """Take one event.

        Raises:
            EngineError: a score lacks clients or domains, so that the run cannot be compared with others. A trial has
                then failed; a final run gives its row no result.
        """
        if name in ("score", "validation") and entry.get("missing"):
            raise EngineError(
                f"round {entry['round']} was not scored by every client, so the run cannot be compared with others: "
                f"it is without {named_missing(entry['missing'])}"
            )
        if name == "validation":
            self.validation[int(entry["round"])] = float(entry["average"])
        if name == "score":
            value = entry["average"]
            if self.domain is not None:
                value = entry["accuracy"][self.domain]
            self.test[int(entry["round"])] = float(value)
        if name == "round done":
            self.completed += 1
        line = describe(name, entry, self.total)
        if line:
            self.lines.append(line)


def run_trial(search: TuningSearch, study: Study, values: Mapping[str, float], rules: Rules) -> Trial:
    """Do one trial and return it. Its files are in a temporary folder and are deleted.

    The score is that after the last round. A trial has failed if its state is no longer finite or a score lacks
    clients; it counts one round at least.

    Raises:
        ConfigError: the run could not start.
    """
    watcher = Watcher(rules.rounds)
    started = time.perf_counter()
    problem = ""
    with tempfile.TemporaryDirectory(prefix="goldfinch-trial-") as folder:
        chosen = [*search.overrides, *overrides_for(values), "rounds.test=false"]
        settings = settings_of(compose_config([*chosen, quoted_override("output", Path(folder, "run"))]))
        try:
            run_federation(
                settings, InlineEngine(settings), [watcher], lambda: below_median(watcher.validation, study, rules)
            )
        except EngineError as error:
            problem = str(error)
    state: Literal["complete", "pruned", "failed"] = "complete"
    if problem or not watcher.validation:
        state = "failed"
    elif watcher.completed < rules.rounds:
        state = "pruned"
    score = 0.0
    if state != "failed":
        score = watcher.validation[max(watcher.validation)]
    return Trial(
        values=dict(values),
        state=state,
        score=score,
        curve=watcher.validation,
        rounds=max(1, watcher.completed),
        seconds=round(time.perf_counter() - started, 3),
    )


# ---- final runs ------------------------------------------------------------------------------------------------------


def _run_finals(entrant: Entrant, path: Path, say: Any) -> None:
    """Do the final runs that the record does not hold."""
    rules, case = entrant.board.rules, entrant.record
    for number, study in enumerate(case.studies):
        if study.best is None:
            case.refused = f"no trial of study {number} ended with a score"
            write_record(path, entrant.board)
            return
    known = {run.seed for run in case.runs}
    for seed in range(rules.runs):
        if seed in known:
            continue
        try:
            run = run_final(entrant, seed)
        except EngineError as error:
            case.refused = f"the final run with seed {seed} failed: {str(error).partition(';')[0]}"
            write_record(path, entrant.board)
            return
        case.runs.append(run)
        write_record(path, entrant.board)
        say(
            f"{entrant.board.name} {entrant.method} {entrant.case} final run seed {seed} (study {run.study}): "
            f"{run.average:.2f}, {run.seconds:.1f} s"
        )


def run_final(entrant: Entrant, seed: int) -> FinalRun:
    """Do one final run and return its record.

    Raises:
        EngineError: the run could not be completed, or a score lacks domains.
    """
    rules = entrant.board.rules
    number = rules.study_of(seed)
    search, study = entrant.search(number), entrant.record.studies[number]
    if study.best is None:
        raise ConfigError(f"study {number} of {entrant.method} has chosen no setting")
    chosen = last_of_each((*search.overrides, *overrides_for(study.best.values), f"seed={seed}"))
    folder = entrant.output / f"seed-{seed}"
    place = [quoted_override("output", folder.absolute()), "overwrite=true"]
    settings = settings_of(compose_config([*chosen, *place]))
    domain = None
    if entrant.case != IN_DOMAIN:
        domain = entrant.case.removeprefix(LEFT_OUT)
    watcher = Watcher(rules.rounds, domain)
    summary = run_federation(settings, InlineEngine(settings), [watcher])
    return FinalRun(
        study=number,
        seed=seed,
        accuracy=summary["accuracy"],
        average=watcher.test[max(watcher.test)],
        curve=watcher.test,
        state_sha256=summary["state_sha256"],
        identity=summary["identity"],
        code=summary["code"],
        bytes=summary["bytes"],
        seconds=summary["wall_seconds"],
        processor=", ".join(map(str, summary["processor"].values())),
        command=shlex.join(["goldfinch", "run", *chosen]),
        log=watcher.lines,
    )


def last_of_each(overrides: Sequence[str]) -> list[str]:
    """Return the overrides, only the last one of each key."""
    last: dict[str, str] = {}
    for item in overrides:
        key = item.partition("=")[0]
        last.pop(key, None)  # a later override also comes later in the order
        last[key] = item
    return list(last.values())


def _result_line(entrant: Entrant) -> str:
    case = entrant.record
    if case.refused:
        return f"{entrant.board.name} {entrant.method} {entrant.case}: no result: {case.refused}"
    scores = [run.average for run in case.runs]
    mean = statistics.fmean(scores)
    return f"{entrant.board.name} {entrant.method} {entrant.case}: {mean:.2f} over {len(scores)} runs"
