"""Many runs by one command: every combination of the values given, finished ones skipped, then the table."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from rich.console import Console

from common.config import CONF, quoted_override
from common.errors import ConfigError, GoldfinchError
from common.settings import RunSettings, load_settings
from common.storage.files import write_text
from server.results.entries import read_entries
from server.results.table import boards, group_rows, markdown, render
from server.run.conduct import read_summary

INTERRUPTED = (130, 143, -signal.SIGINT, -signal.SIGTERM)
"""Exit codes of a run that somebody stopped: it is not to be started anew."""


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

    def finished(self) -> bool:
        """Whether the folder holds this very run, complete."""
        try:
            summary = read_summary(self.folder)
        except GoldfinchError:
            return False
        done, asked = summary.get("rounds", 0), self.settings.train.rounds
        enough = done == asked if self.settings.method.scheduled else done >= asked
        return bool(summary.get("identity") == self.settings.identity and enough)


def plan(arguments: Sequence[str], output: Path) -> list[Job]:
    """Every combination of the values in ``arguments`` (``method=fpl,fedavg seed=0,1``; ``*`` is every option).

    All are checked before the first starts.

    Raises:
        ConfigError: a value is not good; nothing has been run.
    """
    parsed = OverridesParser.create().parse_overrides([_all_options(item) for item in arguments])
    axes = [item for item in parsed if item.is_sweep_override()]
    fixed = [str(item.input_line) for item in parsed if not item.is_sweep_override()]
    jobs = []
    for values in itertools.product(*(_values(axis) for axis in axes)):
        chosen = [f"{axis.key_or_group}={value}" for axis, value in zip(axes, values, strict=True)]
        folder = output.joinpath(*(re.sub(r"[^\w.+-]+", "-", item) for item in chosen))
        overrides = (*fixed, *chosen, quoted_override("output", folder.absolute()))
        jobs.append(Job(overrides, load_settings(overrides), " ".join(chosen) or "run"))
    return jobs


def _all_options(item: str) -> str:
    key, _, value = item.partition("=")
    if value != "*":
        return item
    options = sorted(path.stem for path in (CONF / key).glob("*.yaml")) if (CONF / key).is_dir() else []
    if not options:
        raise ConfigError(f"{item}: only a group of conf/ can be swept with *")
    return f"{key}={','.join(options)}"


def _values(axis: Override) -> list[str]:
    return [str(value) for value in axis.sweep_string_iterator()]


def sweep(arguments: Sequence[str], output: Path, jobs: int = 1) -> None:
    """Run what is not finished, ``jobs`` at a time, and print and write the table of all.

    Every run is a process of its own with its log in its folder; one that fails does not end the others.

    Raises:
        ConfigError: a value is not good, or some runs failed (they are named, with the end of their log).
    """
    console = Console()
    planned = plan(arguments, output)
    waiting = [job for job in planned if not job.finished()]
    console.print(f"{len(planned)} runs, {len(planned) - len(waiting)} finished already; output in {output.absolute()}")
    started = time.perf_counter()
    done = 0
    failures: list[str] = []
    running: dict[str, subprocess.Popen[bytes]] = {}
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        try:
            for job, problem in pool.map(partial(_run, running=running), waiting):
                done += 1
                elapsed = time.perf_counter() - started
                left = elapsed / done * (len(waiting) - done)
                said = f"FAILED: {problem}" if problem else _score(job)
                console.print(f"[{done}/{len(waiting)}, {left / 60:.1f} min left] {job.label}: {said}", highlight=False)
                if problem:
                    failures.append(f"{job.label}: {problem} (see {job.folder / 'run.log'})")
        except KeyboardInterrupt:
            for process in list(running.values()):
                process.terminate()  # each keeps its last complete round, and the next sweep goes on from it
            raise
    finished = [job for job in planned if job.finished()]
    if finished:
        _write_tables(finished, output, arguments, console)
    if failures:
        raise ConfigError("some runs failed:\n  " + "\n  ".join(failures))


def _run(job: Job, running: dict[str, subprocess.Popen[bytes]]) -> tuple[Job, str]:
    job.folder.mkdir(parents=True, exist_ok=True)
    way = "resume=true" if any((job.folder / "checkpoint").glob("*")) else "overwrite=true"
    command = [sys.executable, "-m", "server.cli", "run", *job.overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": str(job.settings.train.threads)}
    log = job.folder / "run.log"
    for choice in dict.fromkeys([way, "overwrite=true"]):  # an interrupted run of other settings is replaced
        with (
            log.open("w") as stream,
            subprocess.Popen(  # noqa: S603  # our own program, no shell
                [*command, choice], env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT
            ) as process,
        ):
            running[job.label] = process
            code = process.wait()
        del running[job.label]
        if code == 0:
            return job, ""
        if code in INTERRUPTED:
            break
    lines = log.read_text(errors="replace").strip().splitlines()
    return job, lines[-1] if lines else f"exit code {code}"


def _score(job: Job) -> str:
    summary = read_summary(job.folder)
    return f"average {summary['average']:.2f}, worst {summary['worst']:.2f}"


def _write_tables(jobs: Sequence[Job], output: Path, arguments: Sequence[str], console: Console) -> None:
    text = [f"`goldfinch sweep {' '.join(arguments)}`", ""]
    for members in boards(read_entries([job.folder for job in jobs])):
        rows = group_rows(members)
        table = render(rows, "final")
        needed = Console(width=1000).measure(table).maximum
        Console(width=max(console.width, needed)).print(table)
        text += [markdown(rows, "final"), ""]
    write_text(output / "table.md", "\n".join(text))
    write_text(output / "sweep.json", json.dumps({"arguments": list(arguments)}, indent=2) + "\n")
    console.print(f"wrote {output.absolute() / 'table.md'}")
