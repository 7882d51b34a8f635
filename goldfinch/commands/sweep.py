"""``goldfinch sweep``: run every combination of the given values that is not finished, then show the table."""

import contextlib
import hashlib
import itertools
import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from common.choices import choices_of, folder_options
from common.composition import compose_config
from common.data.domain import DataSource
from common.errors import ConfigError, UnknownKeyError, some_of
from common.metrics import PARTIAL, RULES, named_missing
from common.overrides import Override, parse_overrides, quoted_override
from common.regular_files import read_small
from common.settings import RunSettings, settings_of
from common.storage import write_json, write_text
from common.text import duration, quantity, shell_line
from goldfinch.commands.running import write_summary
from goldfinch.kept import free_folder, two_commands
from goldfinch.record import RunRecord
from goldfinch.results.frames import score_sheet
from goldfinch.results.groups import group_runs
from goldfinch.results.table import table_text
from server.run.accounting import report_line, total_reports
from server.run.conduct import FolderInUseError, check_not_in_a_run, run_lock
from server.run.existing import Decision, Step, decide
from server.run.own_processes import OwnProcesses

POLL_SECONDS = 1.0
"""Seconds between two polls of the progress of the runs."""


@dataclass(frozen=True)
class Job:
    """One run of a sweep.

    Args:
        overrides: all overrides of ``goldfinch run``.
        settings: the settings that they compose.
        label: the overrides that tell this run from the others.
    """

    overrides: tuple[str, ...]
    settings: RunSettings
    label: str

    @property
    def folder(self) -> Path:
        """The run's output folder."""
        return self.settings.output_folder

    def decision(self) -> Decision:
        """Return what becomes of the run in the folder; ``overwrite`` of the settings lets it be replaced."""
        return decide(self.settings, study=True)

    def record(self) -> RunRecord | None:
        """Return the record if the folder holds this run and it has finished, with or without a score.

        A run with other settings or other scoring is another run. Of one of other code, the table says so.
        """
        if not self.decision().finished:
            return None
        return RunRecord.open(self.folder)

    def finished(self) -> bool:
        """Return whether the run has finished with a score."""
        record = self.record()
        return record is not None and "final" in record.rules


def plan(arguments: Sequence[str], output: Path, *, overwrite: bool = False) -> tuple[list[Job], dict[str, str]]:
    """Return the run of every combination of values, and the reasons against combinations that cannot be run.

    All settings are checked before the first run starts.

    Args:
        arguments: overrides with one or more values, such as ``method=fpl,fedavg``; ``*`` is every option of a group.
        output: the folder of the runs.
        overwrite: whether the runs may replace others.

    Raises:
        ConfigError: a key or choice does not exist, one has several values and is given twice, or no combination can be
            run.
    """
    axes: list[list[Override]] = []
    fixed: list[Override] = []
    given = parse_overrides(list(map(all_options, arguments)))
    _check_keys(given)
    for item in given:
        if not item.several:
            fixed.append(item)
        elif item.values:
            axes.append(parse_overrides([f"{item.key}={value}" for value in item.values]))
        else:
            raise ConfigError(f"{item.text}: a sweep takes values one by one: {item.key}=A,B")
    jobs: list[Job] = []
    skipped: dict[str, str] = {}
    for chosen in itertools.product(*axes):
        folder = output
        for item in chosen:
            folder = folder / re.sub(r"[^\w.+-]+", "-", item.text)
        words = [*fixed, *chosen, *parse_overrides([quoted_override("output", folder.absolute())])]
        overrides = tuple(item.text for item in words)
        label = " ".join(item.text for item in chosen) or "run"
        try:
            composed = compose_config(words)
        except UnknownKeyError as error:  # a method of the sweep may lack a setting that another one has
            skipped[label] = str(error)
            continue
        try:
            jobs.append(Job(overrides, replace(settings_of(composed), overwrite=overwrite), label))
        except ConfigError as error:
            skipped[label] = str(error)
    if not jobs:
        raise ConfigError("no run of the sweep is possible:\n  " + "\n  ".join(_reasons(skipped)))
    return _one_a_folder(jobs), skipped


def _check_keys(words: Sequence[Override]) -> None:
    """Refuse a key that is given twice, if it has several values: the later word would count in the former's folders.

    Raises:
        ConfigError: a key is.
    """
    for one, other in itertools.combinations(words, 2):
        if one.key == other.key and (one.several or other.several):
            raise ConfigError(f"{one.text} and {other.text}: write all values of {one.key} in one word, {one.key}=A,B")


def _one_a_folder(jobs: Sequence[Job]) -> list[Job]:
    """Return the runs, each once: values that are written otherwise can be the same, such as 0.1 and 1e-1.

    Raises:
        ConfigError: two runs of other settings would have the same folder.
    """
    by_folder: dict[Path, Job] = {}
    for job in jobs:
        other = by_folder.setdefault(job.folder, job)
        if other.settings.raw != job.settings.raw:
            raise ConfigError(
                f"{other.label} and {job.label} would both be in {job.folder}, which is named after the letters and "
                "digits of the values: make two sweeps of them, each with its own folder"
            )
    return list(by_folder.values())


def _reasons(skipped: Mapping[str, str]) -> list[str]:
    """Return a line for each reason against combinations, with the combinations that it is against."""
    labels: dict[str, list[str]] = {}
    for label, reason in skipped.items():
        labels.setdefault(reason, []).append(label)
    return [f"{some_of(against, 3)}: {reason}" for reason, against in labels.items()]


def check_data(jobs: Sequence[Job]) -> None:
    """Check once for each data set, before the first run starts, that its files are where they are expected.

    Runs on devices are left out: their data are not on this machine.

    Raises:
        DataError: files are missing; the message says which, and where to put them.
    """
    checked: list[DataSource] = []
    for job in jobs:
        data = job.settings.data
        if job.settings.engine.get("name") != "superlink" and data not in checked:
            data.check_files()
            checked.append(data)


def all_options(item: str) -> str:
    """Return ``group=*`` as ``group=a,b,c``, and any other override as it is."""
    key, _, value = item.partition("=")
    if value != "*":
        return item
    options = sorted(choices_of(key))
    if not options:
        raise ConfigError(f"{item}: only a group of conf/ can be swept with *")
    return f"{key}={','.join(options)}"


def default_output(command: str, arguments: Sequence[str]) -> Path:
    """Return the default output folder of a command.

    The same arguments give the same folder, so that an interrupted command is resumed; others give another folder.
    """
    digest = hashlib.sha256(json.dumps(list(arguments)).encode()).hexdigest()[:8]
    return Path("outputs", f"{command}-{digest}")


def check_folder(output: Path, arguments: Sequence[str], *, overwrite: bool = False) -> None:
    """Refuse to mix a sweep with another one.

    With ``overwrite`` the other sweep's table is replaced, and its runs that do not belong to this sweep are deleted.

    Raises:
        ConfigError: the folder holds another sweep.
    """
    path = output / "sweep.json"
    try:
        known = dict(json.loads(read_small(path)))
    except (OSError, ValueError, TypeError):
        return
    before = list(map(str, known.get("arguments", [])))
    if before == list(arguments):
        return
    if not overwrite:
        raise ConfigError(
            f"{output} holds another sweep ({shell_line(before)}), and its table would be replaced: choose another "
            "folder, or add overwrite=true to put this one in its place (finished runs of the same settings are kept)"
        )
    kept = {job.folder.resolve() for job in plan(arguments, output)[0]}
    place = output.resolve()
    for name in known.get("runs", []):
        folder = (output / str(name)).resolve()  # the record may come from elsewhere: delete nothing outside
        if place in folder.parents and folder not in kept and (folder / "config.yaml").exists():
            shutil.rmtree(folder)
    path.unlink()


def sweep(arguments: Sequence[str], output: Path, jobs: int = 1, *, overwrite: bool = False) -> None:
    """Do the runs that are not finished, then print and write the table of all.

    Every run is a process of its own and has its log in its folder. A run that fails does not end the others.

    Args:
        arguments: overrides, see :func:`plan`.
        output: the folder of the runs and the table.
        jobs: runs at the same time.
        overwrite: whether to replace another sweep in ``output``, and runs of other settings or other code.

    Raises:
        ConfigError: a value is not valid, or some runs are missing, because they failed or their folders hold other
            runs, which are kept; the message names them.
    """
    console = Console()
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    planned, skipped = plan(arguments, output, overwrite=overwrite)
    check_data(planned)  # before runs are deleted
    for job in planned:
        check_not_in_a_run(job.folder)
    check_folder(output, arguments, overwrite=overwrite)
    for label, reason in skipped.items():
        say(f"skipped: {label}: {reason}")
    say(f"output in {output.absolute()}")
    output.mkdir(parents=True, exist_ok=True)
    _write_record(output, arguments, planned)
    failures = execute(planned, jobs, console)
    for line in privacy_lines(planned):
        say(line)
    ended = [job for job in planned if job.record() is not None]
    if ended:
        _write_tables(ended, _unfinished(planned), output, arguments, console)
    words = ["goldfinch", "sweep", *arguments, *folder_options()]
    if jobs > 1:
        words += ["--jobs", str(jobs)]
    for line in ways_on(planned, shell_line(words), output):
        say(line)
    raise_failures(failures)


def execute(
    planned: Sequence[Job],
    jobs: int,
    console: Console,
    rule: str = "final",
    finished: Callable[[], None] = lambda: None,
) -> dict[Path, str]:
    """Do every run that is not finished, and print its score. A run that is kept is said, with the reason.

    Args:
        planned: the runs; those with the same folder are one run.
        jobs: runs at the same time.
        console: where to print.
        rule: the rule of the scores.
        finished: called after each run.

    Returns:
        Why runs are missing, by folder: their errors, or the runs that their folders hold.
    """
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    different = {job.folder: job for job in planned}
    missing: dict[Path, str] = {}
    waiting: list[Job] = []
    kept: list[str] = []
    for job in different.values():
        decision = job.decision()
        if decision.step is Step.KEEP:
            kept.append(f"{job.label}: the run in its folder is kept: {decision.reason}")
            if not decision.finished:
                missing[job.folder] = f"{job.label}: not run, since its folder holds another run: {decision.reason}"
        elif decision.step is Step.NOTHING:
            write_summary(job.folder)
        else:
            waiting.append(job)
    count = f"{quantity(len(different), 'run')}, {len(different) - len(waiting) - len(kept)} finished already"
    if kept:
        count += f", {len(kept)} kept"
    for line in (count, *kept):
        say(line)
    try:
        return missing | _execute(waiting, jobs, console, rule, finished)
    except KeyboardInterrupt as error:
        if str(error):
            raise
        raise type(error)("stopped; finished runs are kept, and the same command does the others") from None


def _execute(
    waiting: Sequence[Job], jobs: int, console: Console, rule: str, finished: Callable[[], None]
) -> dict[Path, str]:
    """Do the runs, and return the errors of those that failed, by folder."""
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    started = time.perf_counter()
    failures: dict[Path, str] = {}
    pool = ThreadPoolExecutor(max(1, jobs))
    if waiting:
        first = waiting[0]
        say(f"[{_now()}] starting {first.label}; its log is {first.folder / 'run.log'}")
    with console.status("starting") as status, pool, OwnProcesses() as processes:  # ended before the pool is waited for
        show = Progress(status.update)
        ended = pool.map(partial(run_subprocess, processes=processes, show=show), waiting)
        for done, (job, problem) in enumerate(ended, 1):
            left = (time.perf_counter() - started) / done * (len(waiting) - done)
            if problem:
                outcome = f"FAILED: {problem}"
                failures[job.folder] = f"{job.label}: {problem} (see {job.folder / 'run.log'})"
            else:
                outcome = _score(job, rule)
            say(f"[{done}/{len(waiting)}, {duration(left)} left] {job.label}: {outcome}")
            finished()
    return failures


def ways_on(planned: Sequence[Job], command: str, output: Path) -> list[str]:
    """Return two commands to choose from where runs were kept; empty if none was kept.

    Args:
        planned: the runs.
        command: the command without ``--output``, for a shell.
        output: its output folder.
    """
    if not any(job.decision().step is Step.KEEP for job in planned):
        return []
    both = f"{command} {shell_line(['--output', free_folder(output)])}"
    return two_commands(both, f"{command} {shell_line(['--output', output, 'overwrite=true'])}")


def _now() -> str:
    return time.strftime("%H:%M:%S")


def privacy_lines(jobs: Sequence[Job]) -> list[str]:
    """Return the total epsilon of the runs, one line for each data set; empty without differential privacy."""
    runs: dict[Path, tuple[RunSettings, Path]] = {}
    for job in jobs:
        runs[job.folder] = (job.settings, job.folder)
    lines: list[str] = []
    for data, report in total_reports(list(runs.values())).items():
        lines.append(f"privacy, {report['runs']} runs on {data} together: {report_line(report)}")
    return lines


def raise_failures(failures: Mapping[Path, str]) -> None:
    """Raise why runs are missing, as :func:`execute` returns it.

    Raises:
        ConfigError: some are; the message has all reasons.
    """
    if failures:
        raise ConfigError("some runs are missing:\n  " + "\n  ".join(failures.values()))


class Progress:
    """Shows the last log line of each running process in one place of the terminal."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self.write = write
        self.lines: dict[str, str] = {}

    def __call__(self, label: str, line: str) -> None:
        """Show ``line`` for the run ``label``; an empty line removes the run."""
        self.lines.pop(label, None)
        if line:
            self.lines[label] = line
        self.write(escape("\n".join(map(": ".join, list(self.lines.items())))))


def run_subprocess(job: Job, processes: OwnProcesses, show: Callable[[str, str], None]) -> tuple[Job, str]:
    """Do one run in a process of its own; a run that was interrupted is resumed.

    While another process writes to the folder, such as one that a killed sweep has left, this one waits, and then looks
    at the folder again.

    Args:
        job: the run.
        processes: the group of the run's process.
        show: called with the run's label and the last line of its log.

    Returns:
        The run, and its error message; empty if it finished.
    """
    while True:
        while _is_in_use(job.folder) and not processes.ended:
            show(job.label, "waits for another process, which writes to its folder")
            time.sleep(POLL_SECONDS)
        decision = job.decision()
        if decision.step in (Step.NOTHING, Step.KEEP):
            show(job.label, "")
            return job, decision.reason
        problem = _run_once(job, decision, processes, show)
        if not problem or processes.ended or not _is_in_use(job.folder):
            return job, problem


def _is_in_use(folder: Path) -> bool:
    """Return whether another process writes a run to a folder."""
    if not folder.exists():
        return False
    try:
        with run_lock(folder):
            return False
    except FolderInUseError:
        return True


def _run_once(job: Job, decision: Decision, processes: OwnProcesses, show: Callable[[str, str], None]) -> str:
    """Do one run in a process, and return its error message; empty if it finished. See :func:`run_subprocess`."""
    choices: list[str] = []
    if decision.step is Step.GO_ON:
        choices.append("resume=true")
    elif decision.replaces:
        choices.append("overwrite=true")
    job.folder.mkdir(parents=True, exist_ok=True)
    log = job.folder / "run.log"
    begin = log.stat().st_size if log.exists() else 0
    with log.open("a") as stream:  # it may hold the rounds before an interruption
        process = processes.start(["run", *job.overrides, *choices], job.settings.train.threads, stream)
    code = None
    while code is None:
        show(job.label, _log_since(log, begin).rpartition("\n")[2])
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(POLL_SECONDS)
    show(job.label, "")
    if code == 0:
        return ""
    lines = _log_since(log, begin).splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    if not errors and not shutil.disk_usage(log.parent).free:
        return f"exit code {code}: no space left on the disk of {log}; free space there and repeat the command"
    return (errors or lines or [f"exit code {code}"])[-1].removeprefix("error: ")


def _log_since(log: Path, begin: int) -> str:
    """Return what was written to a log after its first ``begin`` bytes."""
    return log.read_bytes()[begin:].decode(errors="replace").strip()


def _score(job: Job, rule: str) -> str:
    """Return a run's score and the rule's name; by the last round if the rule gives no score."""
    record = RunRecord.open(job.folder)
    if not record.scored:
        return f"finished after round {record.rounds_done}; rounds.test=false scores no test images"
    known = "final"
    if rule in record.rules:
        known = rule
    score = record.rules[known]
    text = f"average {score['average']:.2f}, worst {score['worst']:.2f} ({RULES[known].name}"
    skipped = len(record.facts.skipped)
    if skipped:
        text += f", {skipped} of {record.facts.rounds} rounds skipped"
    text += ")"
    if score.get("missing"):
        text += f" {PARTIAL} PARTIAL, without {named_missing(score['missing'])}"
    return text


def _write_record(output: Path, arguments: Sequence[str], jobs: Sequence[Job]) -> None:
    """Record the sweep in its folder, so that no other sweep is mixed with it."""
    folders = [job.folder.relative_to(output.absolute()).as_posix() for job in jobs]
    write_json(output / "sweep.json", {"arguments": list(arguments), "runs": folders})


def _unfinished(planned: Sequence[Job]) -> list[RunRecord]:
    """Return the runs that have begun and not ended, without those that are kept, which are other runs."""
    runs: list[RunRecord] = []
    for job in planned:
        decision = job.decision()
        if decision.step is not Step.KEEP and not decision.finished and (job.folder / "config.yaml").exists():
            runs.append(RunRecord(job.folder))
    return runs


def _write_tables(
    jobs: Sequence[Job], unfinished: Sequence[RunRecord], output: Path, arguments: Sequence[str], console: Console
) -> None:
    text = [f"`{shell_line(['goldfinch', 'sweep', *arguments, *folder_options()])}`", ""]
    runs = [RunRecord(job.folder) for job in jobs]
    scored = [run for run in runs if run.scored]
    if not scored:
        console.print("no table: no run scores test images (rounds.test=false)", markup=False)
        return
    tables = group_runs(scored, left_out=[*unfinished, *[run for run in runs if not run.scored]])
    for table in tables:
        score_sheet(table, "final").show()
    text.append(table_text(tables, "final", "md"))
    for line in privacy_lines(jobs):
        text.append(line + "\n")
    write_text(output / "table.md", "\n".join(text))
    console.print(f"wrote {output.absolute() / 'table.md'}", markup=False)
