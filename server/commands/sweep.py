"""Many runs by one command: every combination of the values given, finished ones skipped, then the table."""

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from common.choices import FOLDERS, choices_of
from common.config import compose_config, with_tuned
from common.errors import ConfigError, GoldfinchError
from common.metrics import PARTIAL, named_missing
from common.overrides import parse_overrides, quoted_override, unescaped
from common.regular_files import read_small
from common.settings import RunSettings, settings_of
from common.storage.files import write_json, write_text
from common.text import duration
from server.results.groups import group_runs
from server.results.run import Run
from server.results.table import RULES, markdown, print_whole, render
from server.run.accounting import spoken, total_reports
from server.run.conduct import check_not_in_a_run

INTERRUPTED = (130, 143, -signal.SIGINT, -signal.SIGTERM)
"""Exit codes of a run that somebody stopped: it is not to be started anew."""

LOOK_SECONDS = 1.0
"""How often a sweep looks how far its runs are."""


@dataclass(frozen=True)
class Job:
    """One run of a sweep.

    Args:
        overrides: everything that ``goldfinch run`` is given.
        settings: the same, checked.
        label: what tells this run from the others.
    """

    overrides: tuple[str, ...]
    settings: RunSettings
    label: str

    @property
    def folder(self) -> Path:
        """Where the run writes."""
        return self.settings.output_folder

    def summary(self) -> Mapping[str, Any] | None:
        """Return ``summary.json`` if the folder holds this very run and it came to its end, with a score or without.

        A run of other settings, scored otherwise, or of other code is another run.
        """
        try:
            summary = Run.open(self.folder).summary
        except GoldfinchError:
            return None
        if not self._long_enough(summary) or self.stale():
            return None
        return summary

    def _long_enough(self, summary: Mapping[str, Any]) -> bool:
        """Return whether a finished run has as many rounds as this job asks for, or stopped early as it would."""
        done, asked = summary.get("rounds", 0), self.settings.train.rounds
        early = summary.get("stopped_early")
        if early:
            return bool(early["patience"] == self.settings.train.patience and early["rounds_planned"] == asked)
        if self.settings.scheduled:
            return bool(done == asked)
        return bool(done >= asked)

    def stale(self) -> str:
        """Return why what the folder holds cannot be used or gone on with; empty if it can, or if there is nothing."""
        run = Run(self.folder)
        try:
            if run.code not in ("unknown", self.settings.code):
                return f"it is of other code ({run.code}; now {self.settings.code})"
            if not run.summary:
                return ""
            if run.summary.get("identity") != self.settings.identity:
                return "it is of other settings"
            if run.summary.get("scoring", self.settings.scoring) != self.settings.scoring:
                return "it is scored otherwise (rounds.test_samples, evaluate_every, last_rounds or test)"
        except GoldfinchError as error:
            return f"its record cannot be read ({error})"
        return ""

    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        summary = self.summary()
        return summary is not None and summary["average"] is not None


def plan(arguments: Sequence[str], output: Path) -> tuple[list[Job], dict[str, str]]:
    """Every combination of the values in ``arguments`` (``method=fpl,fedavg seed=0,1``; ``*`` is every option).

    All are checked before the first starts: the runs that fit, and why each of the others cannot be.

    Raises:
        ConfigError: a key or choice does not exist, or no combination fits; nothing has been run.
    """
    parsed = parse_overrides([all_options(item) for item in with_tuned(arguments)])
    axes = [item for item in parsed if item.is_sweep_override()]
    fixed = [unescaped(item.input_line) for item in parsed if not item.is_sweep_override()]
    jobs, skipped = [], {}
    for values in itertools.product(*(axis.sweep_string_iterator() for axis in axes)):
        chosen = [unescaped(f"{axis.key_or_group}={value}") for axis, value in zip(axes, values, strict=True)]
        folder = output.joinpath(*(re.sub(r"[^\w.+-]+", "-", item) for item in chosen))
        overrides = (*fixed, *chosen, quoted_override("output", folder.absolute()))
        label, composed = " ".join(chosen) or "run", compose_config(overrides)
        try:
            jobs.append(Job(overrides, settings_of(composed), label))
        except ConfigError as error:
            skipped[label] = str(error)
    if not jobs:
        raise ConfigError("nothing of the sweep fits:\n  " + "\n  ".join(map(": ".join, skipped.items())))
    return jobs, skipped


def all_options(item: str) -> str:
    """``group=*`` as ``group=a,b,c``; any other word as it is."""
    key, _, value = item.partition("=")
    if value != "*":
        return item
    options = sorted(choices_of(key))
    if not options:
        raise ConfigError(f"{item}: only a group of conf/ can be swept with *")
    return f"{key}={','.join(options)}"


def default_output(command: str, arguments: Sequence[str]) -> Path:
    """Return the folder of a command that was given none: another one for every choice of settings.

    The same words give the same folder, so that an interrupted command goes on.
    """
    digest = hashlib.sha256(json.dumps(sorted(arguments)).encode()).hexdigest()[:8]
    return Path("outputs", f"{command}-{digest}")


def check_folder(output: Path, arguments: Sequence[str], *, overwrite: bool = False) -> None:
    """Refuse to mix a sweep with another one, or to write it into a run.

    With ``overwrite`` the other sweep's table is replaced, and its runs that are none of this one are deleted.

    Raises:
        ConfigError: the folder holds another sweep, or lies in a run's folder.
    """
    check_not_in_a_run(output)
    path = output / "sweep.json"
    try:
        known = dict(json.loads(read_small(path)))
    except (OSError, ValueError, TypeError):
        return
    before = [str(word) for word in known.get("arguments", [])]
    if sorted(before) == sorted(arguments):
        return
    if not overwrite:
        raise ConfigError(
            f"{output} holds another sweep ({' '.join(before)}), whose table this one would replace: choose another "
            "--output, or --overwrite to put this one in its place (runs of the same settings are kept)"
        )
    kept = {job.folder.resolve() for job in plan(arguments, output)[0]}
    place = output.resolve()
    for name in known.get("runs", []):
        folder = (output / str(name)).resolve()  # the record may be a stranger's, so nothing outside is deleted
        if place in folder.parents and folder not in kept and (folder / "config.yaml").exists():
            shutil.rmtree(folder)
    path.unlink()


def sweep(arguments: Sequence[str], output: Path, jobs: int = 1, *, overwrite: bool = False) -> None:
    """Run what is not finished, ``jobs`` at a time, and print and write the table of all.

    Every run is a process of its own with its log in its folder; one that fails does not end the others.

    Raises:
        ConfigError: a value is not good, or some runs failed (they are named, with the end of their log).
    """
    console = Console()
    say = partial(console.print, highlight=False, markup=False)
    planned, skipped = plan(arguments, output)
    check_folder(output, arguments, overwrite=overwrite)
    for label, reason in skipped.items():
        say(f"skipped: {label}: {reason}")
    say(f"output in {output.absolute()}")
    output.mkdir(parents=True, exist_ok=True)
    _write_record(output, arguments, planned)
    failures = execute(planned, jobs, console)
    for line in privacy_lines(planned):
        say(line)
    ended = [job for job in planned if job.summary() is not None]
    if ended:
        _write_tables(ended, output, arguments, console)
    raise_failures(failures)


def execute(
    planned: Sequence[Job],
    jobs: int,
    console: Console,
    rule: str = "final",
    finished: Callable[[], None] = lambda: None,
) -> dict[Path, str]:
    """Do every run that is not finished, ``jobs`` at a time, and say what each came to by ``rule``.

    ``finished`` is called after each.

    Returns:
        What went wrong, with the label of the run, by its folder.
    """
    say = partial(console.print, highlight=False, markup=False)
    different = {job.folder: job for job in planned}
    waiting = [job for job in different.values() if not job.finished()]
    say(f"{len(different)} runs, {len(different) - len(waiting)} finished already")
    for job in waiting:
        if reason := job.stale():
            say(f"{job.label}: what is in its folder is not used, since {reason}; it is run again")
    started = time.perf_counter()
    failures: dict[Path, str] = {}
    running: dict[str, subprocess.Popen[bytes]] = {}
    with console.status("starting") as status, ThreadPoolExecutor(max(1, jobs)) as pool:
        show = Progress(status.update)
        try:
            ended = pool.map(partial(run_subprocess, running=running, show=show), waiting)
            for done, (job, problem) in enumerate(ended, 1):
                left = (time.perf_counter() - started) / done * (len(waiting) - done)
                said = f"FAILED: {problem}" if problem else _score(job, rule)
                say(f"[{done}/{len(waiting)}, {duration(left)} left] {job.label}: {said}")
                if problem:
                    failures[job.folder] = f"{job.label}: {problem} (see {job.folder / 'run.log'})"
                finished()
        except KeyboardInterrupt:
            for process in list(running.values()):
                process.terminate()  # each keeps its last complete round, and the next sweep goes on from it
            raise
    return failures


def privacy_lines(jobs: Sequence[Job]) -> list[str]:
    """Return what the runs have released together, one line for each data set; empty without differential privacy."""
    reports = total_reports([(job.settings, job.folder) for job in {job.folder: job for job in jobs}.values()])
    return [f"privacy, {report['runs']} runs on {data} together: {spoken(report)}" for data, report in reports.items()]


def raise_failures(failures: Mapping[Path, str]) -> None:
    """Refuse to go on from failures of :func:`execute`.

    Raises:
        ConfigError: there are some; all are named.
    """
    if failures:
        raise ConfigError("some runs failed:\n  " + "\n  ".join(failures.values()))


class Progress:
    """The last line of each run that goes on, in one place of the terminal."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self.write, self.lines = write, dict[str, str]()

    def __call__(self, label: str, line: str) -> None:
        """Show ``line`` for a run from here on; an empty one is none."""
        self.lines.pop(label, None)
        if line:
            self.lines[label] = line
        self.write(escape("\n".join(f"{label}: {line}" for label, line in list(self.lines.items()))))


def run_subprocess(
    job: Job,
    running: dict[str, subprocess.Popen[bytes]],
    show: Callable[[str, str], None],
    enough: Callable[[], bool] = lambda: False,
) -> tuple[Job, str]:
    """One run in a process of its own, which goes on where it was interrupted and is ended once it is ``enough``.

    Returns:
        The run, and what went wrong in words; empty if it came to its end, or it was enough.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    begun = any((job.folder / "checkpoint").glob("*"))
    way = "resume=true" if begun and not job.stale() else "overwrite=true"
    command = [sys.executable, "-P", "-m", "server.cli", "run", *job.overrides]
    command += [f"--config-dir={folder}" for folder in FOLDERS[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": str(job.settings.train.threads)}
    log = job.folder / "run.log"
    for choice in dict.fromkeys([way, "overwrite=true"]):  # an interrupted run of other settings is replaced
        if job.summary() is not None and choice != way:
            break  # it came to its end, without a score: from the start it would do the same
        with (
            log.open("w") as stream,
            subprocess.Popen(  # noqa: S603  # our own program, no shell
                [*command, choice], env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT
            ) as process,
        ):
            running[job.label] = process
            code = None
            while code is None:
                show(job.label, log.read_text(errors="replace").strip().rpartition("\n")[2])
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(LOOK_SECONDS)
                if code is None and enough():
                    process.terminate()
                    process.wait()
                    code = 0
        show(job.label, "")
        del running[job.label]
        if code == 0:
            return job, ""
        if code in INTERRUPTED:
            break
    lines = log.read_text(errors="replace").strip().splitlines()
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")] or lines
    return job, said[-1] if said else f"exit code {code}"


def _score(job: Job, rule: str) -> str:
    """What a run scored by a rule, with the rule's name; by its last round where the rule gives no score."""
    summary = Run.open(job.folder).summary
    known = rule if rule in summary["scores"] else "final"
    score = summary["scores"].get(known, summary)
    missing = score.get("missing", {})
    partial = f" {PARTIAL} PARTIAL, without {named_missing(missing)}" if missing else ""
    skipped = f", {summary['rounds_skipped']} of {summary['rounds']} rounds skipped" * bool(summary["rounds_skipped"])
    return f"average {score['average']:.2f}, worst {score['worst']:.2f} ({RULES[known].name}{skipped}){partial}"


def _write_record(output: Path, arguments: Sequence[str], jobs: Sequence[Job]) -> None:
    """Write which sweep the folder holds, so that another one is not mixed with it."""
    folders = [job.folder.relative_to(output.absolute()).as_posix() for job in jobs]
    write_json(output / "sweep.json", {"arguments": list(arguments), "runs": folders})


def _write_tables(jobs: Sequence[Job], output: Path, arguments: Sequence[str], console: Console) -> None:
    text = [f"`goldfinch sweep {' '.join(arguments)}`", ""]
    for board in group_runs([Run(job.folder) for job in jobs]):
        print_whole(render(board, "final"))
        text += [markdown(board, "final"), ""]
    text += [line + "\n" for line in privacy_lines(jobs)]
    write_text(output / "table.md", "\n".join(text))
    console.print(f"wrote {output.absolute() / 'table.md'}", markup=False)
