"""The runs behind a table: planned, and done as far as they are not done yet."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from common.errors import CheckpointError, ConfigError, GoldfinchError, nearest
from common.overrides import quoted_override
from common.settings import RunSettings, load_settings
from server.reproduction.published import PublishedRow, PublishedTable, Scale, method_of
from server.results.run import Run
from server.run.checkpoint import Checkpoints
from server.run.conduct import conduct, prepare_output
from server.trackers.events import Listener

ENGINES = ("inline", "ray")


@dataclass(frozen=True)
class Job:
    """One run: a row of the table with one seed.

    Args:
        row: the row.
        seed: the run's seed.
        overrides: everything that ``goldfinch run`` would be given.
        settings: the same, checked.
    """

    row: PublishedRow
    seed: int
    overrides: tuple[str, ...]
    settings: RunSettings

    @property
    def folder(self) -> Path:
        """Where the run writes."""
        return self.settings.output_folder

    def summary(self) -> Mapping[str, Any] | None:
        """``summary.json``, if the folder holds this very run, complete and with a score."""
        try:
            found = Run.open(self.folder).summary
        except GoldfinchError:
            return None
        same = found.get("identity") == self.settings.identity and found["average"] is not None
        return found if same and found.get("rounds") == self.settings.train.rounds else None

    def rounds_done(self) -> int:
        """Rounds in the checkpoint; 0 if there is none of this run."""
        try:
            checkpoint = Checkpoints(self.folder / "checkpoint").load()
        except CheckpointError:
            return 0
        if checkpoint is None or checkpoint.identity != self.settings.identity:
            return 0
        return min(checkpoint.state.round, self.settings.train.rounds)


def plan(
    table: PublishedTable,
    rows: Sequence[PublishedRow],
    seeds: Sequence[int],
    scale: Scale,
    output: Path,
    more: Sequence[str] = (),
) -> list[Job]:
    """Every row with every seed; all settings are checked before the first run starts.

    A run's folder is named after everything that its result depends on, so that rows which two tables share are run
    once, and a changed setting never meets another setting's files.

    Args:
        table: the table.
        rows: which of its rows.
        seeds: seeds of each row.
        scale: ``paper``, ``paper_net`` or ``small``.
        output: the runs are written below ``output/runs``.
        more: overrides of every row; the last word counts.

    Raises:
        ConfigError: a row's settings are not good, or its engine cannot be used here.
    """
    jobs = []
    for row in rows:
        overrides = table.overrides(row, scale, more)
        first = load_settings([*overrides, "seed=0"])
        engine = first.engine.get("name")
        if engine not in ENGINES:
            raise ConfigError(f"goldfinch reproduce runs on {' or '.join(ENGINES)}; got {engine}")
        family = output / "runs" / f"{method_of(row)}-{_key(first)}"
        for seed in seeds:
            folder = str((family / f"seed-{seed}").absolute())
            raw = {**first.raw, "seed": seed, "output": folder}
            chosen = (*overrides, f"seed={seed}", quoted_override("output", folder))
            jobs.append(Job(row, seed, chosen, replace(first, seed=seed, output=folder, raw=raw)))
    return jobs


def _key(settings: RunSettings) -> str:
    rounds = settings.rounds
    parts = (settings.identity, settings.train.rounds, rounds.test_samples, rounds.evaluate_every, rounds.last_rounds)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:8]


def check_names(values: Sequence[str], known: Sequence[str], what: str) -> None:
    """Refuse a name that is not known, naming the nearest.

    Raises:
        ConfigError: one of ``values`` is not in ``known``.
    """
    for value in values:
        if value not in known:
            raise ConfigError(f"{what}={value}; {nearest(value, known)}")


def execute(jobs: Sequence[Job], console: Console, finished: Callable[[], None] = lambda: None) -> dict[Path, str]:
    """Do every run that is not finished; one that fails does not end the others.

    Interrupted runs go on from their checkpoint. In a terminal there is a bar over all rounds; elsewhere, one line per
    run. Both say how much time is left, from the rounds that were done since the start. ``finished`` is called after
    each run.

    Returns:
        What went wrong, by folder.
    """
    unique = list({job.folder: job for job in jobs}.values())
    waiting = [job for job in unique if job.summary() is None]
    total = sum(job.settings.train.rounds - job.rounds_done() for job in waiting)
    console.print(f"{len(unique)} runs, {len(unique) - len(waiting)} finished already; {total} rounds to do")
    failures: dict[Path, str] = {}
    if not waiting:
        return failures
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total, left="")
        for number, job in enumerate(waiting, 1):
            label = f"{job.row.label}, seed {job.seed}"
            bar.update(task, description=f"[{number}/{len(waiting)}] {label}")
            try:
                summary = _conduct(job, _listener(bar, label))
                line = f"average {summary['average']:.2f}, worst {summary['worst']:.2f}"
                finished()
            except GoldfinchError as error:
                failures[job.folder] = str(error)
                total -= job.settings.train.rounds - job.rounds_done()
                bar.update(task, total=total)
                line = f"FAILED: {error}"
            told = f"[{number}/{len(waiting)}] {label}: {line}; {_left(bar)} left"
            console.print(told, highlight=False, markup=False)
    return failures


def _conduct(job: Job, listener: Listener) -> Mapping[str, Any]:
    from server.engines.inline import InlineEngine
    from server.flower.submit import run_on_ray
    from server.trackers.progress import logging_to_file

    resume = job.rounds_done() > 0
    settings = replace(job.settings, resume=resume, overwrite=not resume)
    with logging_to_file(settings):
        prepare_output(settings)
        if settings.engine["name"] == "inline":
            return conduct(settings, InlineEngine(settings), [listener])
        run_on_ray(settings, [*job.overrides, f"resume={resume}", f"overwrite={not resume}"], [listener])
        return Run.open(job.folder).summary


def _left(bar: Progress) -> str:
    """Such as ``12 min``; ``?`` before the first round is done."""
    task = bar.tasks[0]
    if not task.completed:
        return "?"
    return duration((task.elapsed or 0.0) / task.completed * max(0.0, (task.total or 0.0) - task.completed))


def duration(seconds: float) -> str:
    """Seconds as a person would say them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _listener(bar: Progress, label: str) -> Listener:
    shown = ""

    def listen(name: str, entry: Mapping[str, Any]) -> None:
        nonlocal shown
        if name == "score":
            shown = f"{label}: {entry['average']:.1f}; "
        if name in ("round done", "round skipped"):
            bar.update(bar.task_ids[0], advance=1)
            bar.update(bar.task_ids[0], left=f"{shown}{_left(bar)} left")

    return listen
