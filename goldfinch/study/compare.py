"""Compare methods: tune each in independent studies, run what they chose on fresh seeds, and rank them."""

from __future__ import annotations

import contextlib
import csv
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial, Trial
from rich.console import Console

from common.choices import folder_options
from common.errors import ConfigError, EngineError, some_of, writing
from common.run_config import attack_text, result_settings
from common.storage import write_text
from common.text import counted, quantity, shell_line
from common.versions import code_sha256, combined_hash
from goldfinch.kept import free_folder, two_commands
from goldfinch.record import RunRecord
from goldfinch.results.rows import differences_note, setting_differences
from goldfinch.study.options import Rules
from goldfinch.study.ranking import Ranking, StudyRun, notes, rank_methods, ranked_table, runs_csv
from goldfinch.study.rules import Entrant, entrants_of
from goldfinch.study.search import (
    POLL_SECONDS,
    Say,
    SharedStudy,
    TuningStudy,
    best_trial,
    final_run,
    next_trial,
    open_study,
    state_of,
    tuned_command,
    write_best,
)
from goldfinch.study.storage import (
    DONE,
    JOURNAL,
    SILENCE,
    STORAGE_VARIABLE,
    Task,
    damage,
    database_errors,
    entries,
    storage_of,
    take,
)
from server.run.conduct import check_not_in_a_run
from server.run.own_processes import OwnProcesses

RUNS = "runs.csv"
PAGE = "compare.md"


@dataclass(frozen=True)
class CompareRequest:
    """What was asked for.

    Args:
        methods: names of conf/method/; ``*`` is all.
        overrides: settings of all runs.
        output: the folder of the journal, the runs and the table.
        rules: the numbers of the comparison.
        storage: the URL of a database in place of the journal; empty is the journal.
        overwrite: whether it replaces a comparison of other settings or other code.
    """

    methods: tuple[str, ...]
    overrides: tuple[str, ...]
    output: Path
    rules: Rules
    storage: str = ""
    overwrite: bool = False

    @property
    def words(self) -> list[str]:
        """The arguments of ``goldfinch`` that make this comparison, and continue it."""
        return self._words_in(self.output)

    def _words_in(self, output: Path) -> list[str]:
        words = ["compare", "--methods", ",".join(self.methods), *self.overrides, *self.rules.options]
        return [*words, f"--output={output}"]

    @property
    def remedy(self) -> str:
        """Two commands to choose from if the storage holds another comparison."""
        database, other_database = [], []
        if self.storage:  # its URL can hold a password
            database, other_database = ["--storage=URL"], ["--storage=ANOTHER"]
        both = ["goldfinch", *self._words_in(free_folder(self.output)), *other_database, *folder_options()]
        again = ["goldfinch", *self.words, *database, *folder_options(), "overwrite=true"]
        return "\n".join(two_commands(shell_line(both), shell_line(again)))


@dataclass(frozen=True)
class ComparedMethods:
    """A finished comparison.

    Args:
        runs: all trials and final runs.
        tables: a table for each kind of score.
        notes: what the notes of the tables do not say.
        folder: its folder.
    """

    runs: list[StudyRun]
    tables: list[Ranking]
    notes: list[str]
    folder: Path

    @property
    def all_notes(self) -> list[str]:
        """All notes, those of the tables first."""
        all_notes: list[str] = []
        for table in self.tables:
            all_notes += notes(table)
        return [*all_notes, *self.notes]


def compare(request: CompareRequest, jobs: int = 1, console: Console | None = None) -> ComparedMethods:
    """Make, join or continue a comparison, print and write its table, and return it.

    Any number of processes may do this at the same time, on any machines: each takes trials and final runs that no
    other has, and all end with the same table. What is done is not done again: the same command continues a comparison
    that was stopped or killed. A comparison of other settings or other code in the folder is kept unless ``overwrite``
    is set, and so is the table of a larger one; then the studies that differ are searched again, and their final runs
    are replaced one by one.

    The folder then holds ``runs.csv`` (every trial and final run), ``compare.md`` (the table), ``journal.log``
    (Optuna's studies, unless a database has them), and for each method, case and study ``best.yaml`` and the final
    runs.

    Args:
        request: what to compare.
        jobs: processes at the same time. The numbers do not depend on it.
        console: where to print; ``None`` is the terminal.

    Raises:
        ConfigError: a setting is not valid, the folder or the database holds another comparison, the folder has the
            table of a larger one, the database cannot be used, or no method has a result.
        CheckpointError: the journal is damaged.
    """
    console = console or Console()
    say: Say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    check_not_in_a_run(request.output / RUNS)
    entrants, left_out = entrants_of(request.methods, request.overrides, request.rules)
    for entrant in entrants:
        entrant.settings.check_code()
    studies = studies_of(entrants, request)
    budget = {study.entrant.method: study.budget for study in studies}
    for name, trials in budget.items():
        say(f"{name}: {counted(request.rules.studies, 'study', 'studies')} of {counted(trials, 'trial')}")
    with _continuable(), database_errors():
        shared = _opened(studies, request)
        check_table(studies, request)
        if jobs > 1:
            _in_processes(request, jobs, entrants[0].settings.train.threads, say)
        do_all(shared, say)
        study_runs: list[StudyRun] = []
        remarks = [f"{name} is left out: {reason}." for name, reason in left_out.items()]
        for each in shared:
            runs, problems = result_of(each)
            study_runs += runs
            remarks += [f"{each.study.name}: {problem}." for problem in problems]
    remarks += settings_notes(entrants)
    tables = rank_methods(study_runs, request.rules)
    write_text(request.output / RUNS, runs_csv(study_runs))
    text = page(request, entrants[0], tables, remarks, max((run.validation_images for run in study_runs), default=0))
    write_text(request.output / PAGE, text)
    say(text)
    found = [study.folder / "best.yaml" for study in studies if (study.folder / "best.yaml").exists()]
    if not any(run.kind == "final" for run in study_runs):
        raise ConfigError(f"no method has a result; {request.output / PAGE} says why, and {RUNS} has the trials")
    say(f"wrote {request.output / PAGE}, {RUNS}; what a study found: {tuned_command(found[0])}")
    return ComparedMethods(study_runs, tables, remarks, request.output)


def studies_of(entrants: Sequence[Entrant], request: CompareRequest) -> list[TuningStudy]:
    """Return the studies of all methods in all cases."""
    studies: list[TuningStudy] = []
    for entrant in entrants:
        for number in range(request.rules.studies):
            studies.append(TuningStudy(entrant, number, request.rules, request.output, request.overwrite))
    return studies


def _opened(studies: Sequence[TuningStudy], request: CompareRequest) -> list[SharedStudy]:
    """Return the studies in the storage of a comparison, and make its folder."""
    with writing(request.output, "another folder"):
        request.output.mkdir(parents=True, exist_ok=True)
    storage = storage_of(request.output, request.storage)
    place = str(request.output / JOURNAL)
    if request.storage:
        place = "the database"
    return [open_study(study, storage, place, request.remedy) for study in studies]


def check_table(studies: Sequence[TuningStudy], request: CompareRequest) -> None:
    """Refuse to replace the table of a comparison of more methods, cases, studies, trials or final runs.

    Args:
        studies: the studies of this comparison.
        request: what was asked for; with ``overwrite`` the table is replaced.

    Raises:
        ConfigError: ``runs.csv`` has more of a study than this comparison, or final runs with seeds of another study.
    """
    path = request.output / RUNS
    if request.overwrite or not path.is_file():
        return
    asked: dict[tuple[str, str], int] = {}
    seeds: dict[str, range] = {}
    for study in studies:
        seeds[study.name] = study.rules.seeds_of(study.number)
        asked[study.name, "trial"] = study.budget
        asked[study.name, "final"] = study.rules.runs
    had: Counter[tuple[str, str]] = Counter()
    moved: Counter[str] = Counter()
    with damage(path), path.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            name = f"{line['method']}/{line['case']}/{line['study']}"
            had[name, line["kind"]] += 1
            if line["kind"] == "final" and name in seeds and int(line["number"]) not in seeds[name]:
                moved[name] += 1
    more: list[str] = []
    for (name, kind), count in had.items():
        noun = "trial"
        if kind == "final":
            noun = "final run"
        if count > asked.get((name, kind), 0):
            more.append(f"{quantity(count, noun)} of {name}")
    if more:
        raise ConfigError(
            f"{request.output} holds a larger comparison ({some_of(more, 3)}), and its table would be "
            "replaced: choose another folder, or add overwrite=true to put this one in its place (what is done is "
            "kept)"
        )
    if moved:
        raise ConfigError(
            f"{request.output} holds a comparison with another number of --runs, by which {some_of(list(moved), 3)} "
            "would take seeds that are another study's there: choose another folder, or the number of before"
        )


def do_all(studies: Sequence[SharedStudy], say: Say) -> None:
    """Do trials and final runs that no process has done or does, until all are done.

    Args:
        studies: the studies; the work of the first comes first.
        say: called with a line for each piece of work.
    """
    waits = False
    while left := [shared for shared in studies if not is_done(shared)]:
        if any(next_trial(shared, say) or next_final_run(shared, say) for shared in left):
            waits = False
            continue
        if not waits:
            names = ", ".join(shared.study.name for shared in left)
            say(f"waits for other processes, which have {names}; one that is silent for {SILENCE} s is replaced")
        waits = True
        time.sleep(POLL_SECONDS)


def is_done(shared: SharedStudy) -> bool:
    """Return whether all trials of a study are done, and the final runs with what it chose."""
    if not shared.searched:
        return False
    tasks = final_tasks(shared)
    done = [trial for trial in entries(shared.finals, tasks, shared.again).values() if trial.state in DONE]
    return len(done) == len(tasks)


def final_tasks(shared: SharedStudy) -> list[Task]:
    """Return the final runs of a study: seeds and the values that it chose; none if no trial has a score."""
    best = best_trial(shared.counted)
    if best is None:
        return []
    return [{"seed": seed, "values": dict(best.params)} for seed in shared.study.rules.seeds_of(shared.study.number)]


def next_final_run(shared: SharedStudy, say: Say) -> bool:
    """Do a final run that no process has done or does, and return whether there was one.

    The storage keeps the line of the run in ``runs.csv``, or the reason why the run failed.
    """
    best = best_trial(shared.counted)
    if best is None or not shared.searched:
        return False
    study = shared.study

    def work(trial: Trial) -> float:
        seed = trial.user_attrs["seed"]

        def count(name: str, entry: Mapping[str, Any]) -> None:
            if name == "round done":
                trial.set_user_attr("rounds", entry["round"])  # which fails if another process took the run over

        try:
            run = final_run(study, best.params, seed, count)
        except EngineError as error:
            trial.set_user_attr("problem", str(error).partition(";")[0])
            return 0.0
        line = _line(study, best.params, seed, run)
        trial.set_user_attr("run", asdict(line))
        return line.score

    def tell(trial: FrozenTrial) -> None:
        outcome = trial.user_attrs.get("problem", f"{trial.value:.2f}")
        say(f"{study.name}: final run with seed {trial.user_attrs['seed']}: {outcome}")

    return take(shared.finals, final_tasks(shared), lambda task: {**task["values"]}, work, tell, shared.again)


def settings_notes(entrants: Sequence[Entrant]) -> list[str]:
    """Return the notes on settings that are fixed, and in which the methods differ; one for each kind of score."""
    notes: dict[str, None] = {}
    for case in dict.fromkeys(entrant.case for entrant in entrants):
        options: dict[str, dict[str, Any]] = {}
        for entrant in entrants:
            if entrant.case == case:
                settings = result_settings(entrant.settings.raw, ("seed",))
                options[entrant.method] = {key: settings[key] for key in settings if key not in entrant.space}
        differences = setting_differences(options)
        if differences:
            notes[differences_note(differences)] = None
    return list(notes)


def result_of(shared: SharedStudy) -> tuple[list[StudyRun], list[str]]:
    """Return all trials and final runs of a study that is done, and write its ``best.yaml``.

    Returns:
        The runs, and what failed: why the study has no result, or why final runs have none.
    """
    study = shared.study
    runs: list[StudyRun] = []
    for trial in shared.counted:
        seconds = 0.0
        if trial.duration is not None:
            seconds = round(trial.duration.total_seconds(), 3)
        state, score = state_of(trial), 0.0
        if state == "complete":
            score = trial.value or 0.0
        elif state == "pruned":
            score = trial.intermediate_values[max(trial.intermediate_values)]
        runs.append(
            StudyRun(
                board_of(study),
                study.entrant.method,
                study.entrant.case,
                study.number,
                "trial",
                len(runs),
                state,
                score,
                int(trial.user_attrs["rounds"]),
                seconds,
                dict(trial.params),
                code=code_sha256(),
                bound=study.entrant.settings.method.bound or "",
            )
        )
    best = best_trial(shared.counted)
    if best is None:
        return runs, ["it has no result: no trial ended with a score"]
    write_best(shared, best)
    problems: list[str] = []
    final = entries(shared.finals, final_tasks(shared), shared.again)
    for index in sorted(final):
        attributes = final[index].user_attrs
        if "run" in attributes:
            runs.append(StudyRun(**attributes["run"]))
        else:
            problems.append(f"its final run with seed {attributes['seed']} failed: {attributes['problem']}")
    return runs, problems


def _line(study: TuningStudy, values: dict[str, float], seed: int, run: RunRecord) -> StudyRun:
    """Return the line of a final run."""
    facts, final = run.facts, run.rules["final"]
    if facts.end is None:
        raise ConfigError(f"{run.folder} holds no finished run")
    score = float(final["average"])
    if study.entrant.left_out is not None:
        score = float(final["accuracy"][study.entrant.left_out])
    return StudyRun(
        board_of(study),
        study.entrant.method,
        study.entrant.case,
        study.number,
        "final",
        seed,
        "complete",
        score,
        facts.rounds,
        facts.end.seconds,
        dict(values),
        {domain: float(value) for domain, value in final["accuracy"].items()},
        sum(run.reply_totals.bytes.values()),
        facts.end.sha256,
        run.code_by_package["goldfinch"],
        facts.scored,
        facts.bound or "",
        run.processor,
        "yes" if run.at_chance else "",
        run.validation_images,
        _images_of(run),
    )


def _images_of(run: RunRecord) -> str:
    """Return the hashes of which training samples all clients of a run have, and of their pixels; empty if unknown."""
    if not run.client_images:
        return ""
    samples: dict[str, str] = {}
    pixels: dict[str, str] = {}
    for (client, which), images in run.client_images.items():
        samples[client] = which
        pixels[client] = images
    return f"{combined_hash(samples)} {combined_hash(pixels)}"


def board_of(study: TuningStudy) -> str:
    """Return what a comparison is of: data set, net, views, the weighting of all methods, and the attack."""
    choices = study.entrant.settings.choices
    parts = [choices["data"], choices["model"], f"views_{choices['views']}"]
    if study.rules.weighting:
        parts.append(study.rules.weighting)
    attack = attack_text(study.entrant.settings.raw)
    if attack:
        parts.append(f"under attack: {attack}")
    return "-".join(parts)


def _in_processes(request: CompareRequest, jobs: int, threads: int, say: Say) -> None:
    """Share the work of a comparison among processes, and wait until they end; the caller does what they left."""
    words = [*request.words, "--worker"]
    if request.overwrite:
        words.append("overwrite=true")
    with OwnProcesses() as processes:
        more = {STORAGE_VARIABLE: request.storage}  # all users of a machine see the command lines of its processes
        started = [processes.start(words, threads, more=more) for _ in range(jobs)]
        for process in started:
            code = process.wait()
            if code:
                say(f"a process ended with exit code {code}; its work is done by the others")


def take_part(request: CompareRequest) -> None:
    """Take trials and final runs of a comparison until all are done; :func:`compare` starts processes with it."""
    entrants, _ = entrants_of(request.methods, request.overrides, request.rules)
    with _continuable(), database_errors():
        do_all(_opened(studies_of(entrants, request), request), partial(print, flush=True))


@contextlib.contextmanager
def _continuable() -> Iterator[None]:
    """Say of a comparison that is stopped how it goes on."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise type(error)("stopped; the same command continues the comparison") from None


def page(
    request: CompareRequest, first: Entrant, tables: Sequence[Ranking], remarks: Sequence[str], images: int
) -> str:
    """Return the page of a comparison in Markdown: its command, what its rows share, and its tables.

    Args:
        request: what was asked for.
        first: one of its methods.
        tables: the ranked methods.
        remarks: what else a reader must know.
        images: the validation samples of all clients.
    """
    settings, rules = first.settings, request.rules
    weighting = rules.weighting or "each method's own"
    attack = attack_text(settings.raw)
    if attack:
        weighting += f", under attack: {attack}"
    unit = "study"
    over = "studies"
    if rules.studies == 1:
        unit = "seed"
        over = "the final runs"
    tuned = f"{counted(rules.studies, 'study', 'studies')} of {counted(rules.trials, 'trial')}"
    lines = [
        f"`{shell_line(['goldfinch', *request.words, *folder_options()])}`",
        "",
        f"{settings.choices['data']} ({', '.join(settings.data.domains)}), protocol {settings.choices['protocol']}, "
        f"model {settings.choices['model']}, views {settings.choices['views']}, weighting {weighting}, "
        f"{quantity(settings.train.rounds, 'round')}. Each method has {tuned} for each searched setting, by "
        f"validation on {settings.protocol.validation:g} of each client's training samples, {images:,} images in all. "
        f"Final runs of each study, with fresh seeds and partitions: {rules.runs}. Accuracy on test in % after the "
        f"last round, mean over domains: mean ± standard deviation over {over}. [a, b] is the 95 % interval of a "
        f"difference, paired by {unit} "
        "(Student's t). An interval is of one comparison, not corrected; a verdict is corrected for all. "
        f"Chance, one of {settings.data.class_count} classes for every image, is "
        f"{100 / settings.data.class_count:.3g} %.",
    ]
    for table in tables:
        lines += ["", f"## {table.title}", "", ranked_table(table)]
    if remarks:
        lines.append("")
    for remark in remarks:
        lines.append(f"- {remark}")
    return "\n".join(lines) + "\n"
