"""Compare methods: tune each in independent studies, run what they chose on fresh seeds, and rank them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from common.choices import folder_options
from common.errors import ConfigError, EngineError
from common.extras import libraries_of
from common.run_config import attack_text
from common.storage import write_text
from common.text import shell_line
from common.versions import code_sha256
from server.results.run import RunFolder
from server.run.conduct import check_not_in_a_run, run_lock
from server.run.own_processes import OwnProcesses
from server.study.ranking import Ranking, StudyRun, notes, rank_methods, ranked_table, runs_csv
from server.study.rules import Entrant, Rules, entrants_of
from server.study.search import (
    Say,
    TuningStudy,
    best_trial,
    final_run,
    finished_trials,
    run_study,
    state_of,
    tuned_command,
    write_best,
)

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
    """

    methods: tuple[str, ...]
    overrides: tuple[str, ...]
    output: Path
    rules: Rules

    @property
    def words(self) -> list[str]:
        """The arguments of ``goldfinch`` that make this comparison, and continue it."""
        words = ["compare", "--methods", ",".join(self.methods), *self.overrides, *self.rules.options]
        return [*words, f"--output={self.output}"]


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
        found: list[str] = []
        for table in self.tables:
            found += notes(table)
        return [*found, *self.notes]


def compare(request: CompareRequest, jobs: int = 1, console: Console | None = None) -> ComparedMethods:
    """Make or continue a comparison, print and write its table, and return it.

    What is done is not done again: the same command continues a comparison that was stopped or killed, and ends with
    the same numbers. The folder then holds ``runs.csv`` (every trial and final run), ``compare.md`` (the table),
    ``journal.log`` (Optuna's studies), and for each method, case and study ``best.yaml`` and the final runs.

    Args:
        request: what to compare.
        jobs: studies at the same time, each in a process of its own. The numbers do not depend on it.
        console: where to print; ``None`` is the terminal.

    Raises:
        ConfigError: a setting is not valid, the folder holds another comparison, or no method has a result.
        CheckpointError: the journal is damaged.
    """
    with libraries_of("tune", "goldfinch compare"):
        import optuna  # noqa: F401
    console = console or Console()
    say: Say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    check_not_in_a_run(request.output)
    entrants, left_out = entrants_of(request.methods, request.overrides, request.rules)
    studies = studies_of(entrants, request)
    budget = {study.entrant.method: study.budget for study in studies}
    for name, trials in budget.items():
        say(f"{name}: {request.rules.studies} studies of {trials} trials")
    with run_lock(request.output, "comparison"), _continuable():
        if jobs > 1:
            _in_processes(request, studies, jobs)
        found: list[StudyRun] = []
        remarks = [f"{name} is left out: {reason}." for name, reason in left_out.items()]
        for study in studies:
            runs, problem = do_study(study, say)
            found += runs
            if problem:
                remarks.append(f"{study.name} has no result: {problem}.")
        tables = rank_methods(found)
        write_text(request.output / RUNS, runs_csv(found))
        text = page(request, entrants[0], tables, remarks)
        write_text(request.output / PAGE, text)
    say(text)
    found_by_one = tuned_command(studies[0].folder / "best.yaml")
    say(f"wrote {request.output / PAGE}, {RUNS}; what a study found: {found_by_one}")
    return ComparedMethods(found, tables, remarks, request.output)


def studies_of(entrants: Sequence[Entrant], request: CompareRequest) -> list[TuningStudy]:
    """Return the studies of all methods in all cases."""
    found: list[TuningStudy] = []
    for entrant in entrants:
        for number in range(request.rules.studies):
            found.append(TuningStudy(entrant, number, request.rules, request.output))
    return found


def do_study(study: TuningStudy, say: Say) -> tuple[list[StudyRun], str]:
    """Do the trials and final runs of a study that are not done.

    Returns:
        All its trials and final runs, and why it has no result; empty if it has one.
    """
    tuned = run_study(study, say)
    found: list[StudyRun] = []
    for trial in finished_trials(tuned):
        seconds = 0.0
        if trial.duration is not None:
            seconds = round(trial.duration.total_seconds(), 3)
        score = trial.value or 0.0
        if trial.state.name == "PRUNED":
            score = trial.intermediate_values[max(trial.intermediate_values)]
        found.append(
            StudyRun(
                board_of(study),
                study.entrant.method,
                study.entrant.case,
                study.number,
                "trial",
                len(found),
                state_of(trial),
                score,
                int(trial.user_attrs["rounds"]),
                seconds,
                dict(trial.params),
                code=code_sha256(),
                bound=study.entrant.settings.method.bound or "",
            )
        )
    best = best_trial(tuned)
    if best is None:
        return found, "no trial ended with a score"
    write_best(study, tuned, best)
    for seed in study.rules.seeds_of(study.number):
        try:
            run = final_run(study, best.params, seed)
        except EngineError as error:
            return found, f"its final run with seed {seed} failed: {str(error).partition(';')[0]}"
        found.append(_line(study, best.params, seed, run))
        say(f"{study.name}: final run with seed {seed}: {found[-1].score:.2f}")
    return found, ""


def _line(study: TuningStudy, values: dict[str, float], seed: int, run: RunFolder) -> StudyRun:
    """Return the line of a final run."""
    summary = run.summary
    score = float(summary["average"])
    if study.entrant.left_out is not None:
        score = float(summary["accuracy"][study.entrant.left_out])
    return StudyRun(
        board_of(study),
        study.entrant.method,
        study.entrant.case,
        study.number,
        "final",
        seed,
        "complete",
        score,
        int(summary["rounds"]),
        float(summary["wall_seconds"]),
        dict(values),
        {domain: float(value) for domain, value in summary["accuracy"].items()},
        sum(summary["bytes"].values()),
        str(summary["state_sha256"]),
        run.code_by_package["goldfinch"],
        str(summary["scored"]),
        str(summary.get("bound") or ""),
    )


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


def _in_processes(request: CompareRequest, studies: Sequence[TuningStudy], jobs: int) -> None:
    """Do each study in a process of its own, ``jobs`` at a time; the caller reads what they did from the folder.

    Raises:
        ConfigError: a process failed; it has printed why.
    """
    threads = studies[0].entrant.settings.train.threads
    with ThreadPoolExecutor(jobs) as pool, OwnProcesses() as processes:  # ended before the pool is waited for

        def run(study: TuningStudy) -> str:
            process = processes.start([*request.words, "--only", study.name], threads)
            if process.wait():
                return study.name
            return ""

        failed = list(filter(None, pool.map(run, studies)))
    if failed:
        raise ConfigError(f"some studies failed ({', '.join(failed)}); the reasons are above")


def do_one(request: CompareRequest, name: str) -> None:
    """Do one study of a comparison; :func:`compare` starts a process with it.

    Args:
        request: the comparison.
        name: the study's name, such as ``fpl/in_domain/0``.
    """
    method = name.partition("/")[0]
    entrants, _ = entrants_of([method], request.overrides, request.rules)
    with _continuable():
        for study in studies_of(entrants, request):
            if study.name == name:
                do_study(study, partial(print, flush=True))


@contextlib.contextmanager
def _continuable() -> Iterator[None]:
    """Say of a comparison that is stopped how it goes on."""
    try:
        yield
    except KeyboardInterrupt as error:
        if not error.args:
            error.args = ("stopped; the same command continues the comparison",)
        raise


def page(request: CompareRequest, first: Entrant, tables: Sequence[Ranking], remarks: Sequence[str]) -> str:
    """Return the page of a comparison in Markdown: its command, what its rows share, and its tables."""
    settings, rules = first.settings, request.rules
    weighting = rules.weighting or "each method's own"
    attack = attack_text(settings.raw)
    if attack:
        weighting += f", under attack: {attack}"
    lines = [
        f"`{shell_line(['goldfinch', *request.words, *folder_options()])}`",
        "",
        f"{settings.choices['data']} ({', '.join(settings.data.domains)}), protocol {settings.choices['protocol']}, "
        f"model {settings.choices['model']}, views {settings.choices['views']}, weighting {weighting}, "
        f"{settings.train.rounds} rounds. Each method has {rules.studies} studies of {rules.trials} trials for each "
        f"searched setting, by validation on {settings.protocol.validation:g} of each client's training samples. "
        f"Final runs of each study, with fresh seeds and partitions: {rules.runs}. Accuracy on test in % after the "
        "last round, mean over domains. Intervals are Student's t over the means of the studies.",
    ]
    for table in tables:
        lines += ["", f"## {table.title}", "", ranked_table(table)]
    if remarks:
        lines.append("")
    for remark in remarks:
        lines.append(f"- {remark}")
    return "\n".join(lines) + "\n"
