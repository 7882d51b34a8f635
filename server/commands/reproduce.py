"""``goldfinch reproduce``: a published table made again by one command, and both side by side."""

import hashlib
import itertools
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast, get_args

from rich.console import Console

from common.data.protocols import combined_hash
from common.errors import ConfigError, nearest
from common.overrides import quoted_override
from common.regular_files import read_small
from common.settings import RunSettings, load_settings
from common.storage.files import write_bytes, write_json, write_text
from server.commands.sweep import Job, execute, raise_failures
from server.plots.figures import bars, convergence, rendered, sensitivity
from server.reproduction.comparison import Comparison, Line
from server.reproduction.pages import Picture, pages
from server.reproduction.published import (
    PublishedRow,
    PublishedTable,
    Scale,
    method_of,
    published_table,
    published_tables,
)
from server.results.run import Run, varying
from server.results.seeds import Value
from server.run.conduct import check_not_in_a_run

ENGINES = ("inline", "ray")

MAX_CURVES = 14
MAX_BARS = 7
"""Series that can still be told apart in one plot."""


@dataclass(frozen=True)
class Request:
    """What the command line asked for.

    Args:
        scale: ``paper``, ``paper_net`` or ``small``.
        methods: rows by label, without commas of its own, or by method; empty is all that the scale has.
        seeds: seeds of each row; empty takes the scale's or the table's own.
        output: folder of everything that is written; ``None`` is ``outputs/reproduce/<scale>``.
        records: folder of what is worth keeping, written after every run; ``None`` keeps nothing besides ``output``.
    """

    table: PublishedTable
    scale: Scale = "paper"
    methods: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    output: str | None = None
    overrides: tuple[str, ...] = ()
    records: str | None = None

    @property
    def folder(self) -> Path:
        """``output`` as a path."""
        return Path(self.output).expanduser() if self.output else Path("outputs", "reproduce", self.scale)

    @property
    def command(self) -> str:
        """The command that asks for the same."""
        words = ["--scale", self.scale]
        if self.methods:
            words += ["--methods", ",".join(self.methods)]
        if self.seeds:
            words += ["--seeds", ",".join(map(str, self.seeds))]
        return shlex.join(["goldfinch", "reproduce", self.table.name, *words, *self.overrides])


def request_of(
    arguments: Sequence[str],
    scale: str = "paper",
    methods: Sequence[str] = (),
    seeds: Sequence[int] = (),
    output: Path | None = None,
    records: Path | None = None,
) -> Request:
    """Return the request for the table and the settings in ``arguments``, and the command's options.

    Raises:
        ConfigError: no table is named, or an argument or option means nothing.
    """
    names = [word for word in arguments if "=" not in word]
    if len(names) != 1:
        given = f"one table; got {' '.join(names)}" if names else "a table"
        raise ConfigError(f"goldfinch reproduce needs {given}: {', '.join(published_tables())}")
    if scale not in get_args(Scale):
        raise ConfigError(f"--scale {scale}: {nearest(scale, get_args(Scale))}")
    overrides = [word for word in arguments if "=" in word]
    reserved = [word for word in overrides if word.partition("=")[0] in ("seed", "method", "experiment", "resume")]
    if reserved:
        raise ConfigError(f"{' '.join(reserved)}: the table sets this; use --methods A,B and --seeds 0,1,2")
    return Request(
        published_table(names[0]),
        cast("Scale", scale),
        tuple(methods),
        tuple(seeds),
        str(output) if output else None,
        tuple(overrides),
        str(records) if records else None,
    )


@dataclass(frozen=True)
class Planned(Job):
    """A run of a row of the table with one seed."""

    row: PublishedRow
    seed: int


def plan(
    table: PublishedTable,
    rows: Sequence[PublishedRow],
    seeds: Sequence[int],
    scale: Scale,
    output: Path,
    more: Sequence[str] = (),
) -> list[Planned]:
    """Every row with every seed, below ``output/runs``; all settings are checked before the first run starts.

    A run's folder is named after everything that its result depends on, so that rows which two tables share are run
    once, and a changed setting never meets another setting's files. Of the overrides ``more`` the last word counts.

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
            chosen = (*overrides, f"seed={seed}", quoted_override("output", folder))
            raw = {**first.raw, "seed": seed, "output": folder}
            settings = replace(first, seed=seed, output=folder, raw=raw)
            jobs.append(Planned(chosen, settings, f"{row.label}, seed {seed}", row, seed))
    return jobs


def _key(settings: RunSettings) -> str:
    rounds = settings.rounds
    parts = (settings.identity, settings.train.rounds, rounds.test_samples, rounds.evaluate_every, rounds.last_rounds)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:8]


def reproduce(request: Request, console: Console | None = None) -> Path:
    """Run what is missing, then write ``<table>.md``, ``.html``, ``.json`` and figures; the HTML file's path.

    The pages are written from what is finished even when the runs are interrupted or some fail.

    Raises:
        ConfigError: the request cannot be run, or runs failed; then the pages name them.
    """
    console, table = console or Console(), request.table
    reduced = table.reduction(request.scale)
    rows = table.select(request.methods) if request.methods else table.rows_at(request.scale)
    seeds = request.seeds or (reduced and reduced.seeds) or table.seeds
    check_not_in_a_run(request.folder)
    jobs = plan(table, rows, seeds, request.scale, request.folder, request.overrides)
    console.print(f"{table.name}, scale={request.scale}: {len(rows)} rows, seeds {', '.join(map(str, seeds))}")
    failures: Mapping[Path, str] = {}
    try:
        failures = execute(jobs, 1, console, table.rule, lambda: keep_records(request, jobs, seeds))
    finally:
        keep_records(request, jobs, seeds)
        path = write_pages(request, jobs, seeds, failures)
        console.print(f"wrote {path.with_suffix('.md')} and {path}", highlight=False, soft_wrap=True, markup=False)
        splits = {client: split for job in jobs for client, split in (job.summary() or {}).get("splits", {}).items()}
        if splits:
            console.print(f"split, SHA-256: {combined_hash(splits)}", highlight=False, soft_wrap=True)
    raise_failures(failures)
    return path


def keep_records(request: Request, jobs: Sequence[Planned], seeds: Sequence[int]) -> None:
    """Write ``request.records``: page and pictures, and ``<table>/<method>-<key>/seed-N/`` of each finished run."""
    if request.records is None:
        return
    folder = Path(request.records).expanduser()
    _page(folder, request, compare(request, jobs, seeds, {}))
    for job in jobs:
        if job.finished():
            kept = folder / request.table.name / job.folder.parent.name / job.folder.name
            for record in Run(job.folder).records:
                write_bytes(kept / record.name, record.read_bytes())


def write_pages(request: Request, jobs: Sequence[Planned], seeds: Sequence[int], failures: Mapping[Path, str]) -> Path:
    """Write the pages of what is finished; the HTML file's path."""
    comparison, path = compare(request, jobs, seeds, failures), request.folder / f"{request.table.name}.html"
    write_text(path, _page(request.folder, request, comparison))
    write_json(path.with_suffix(".json"), numbers(comparison, request))
    return path


def _page(folder: Path, request: Request, comparison: Comparison) -> str:
    """Write the page as Markdown and its pictures into ``folder``; the page as HTML."""
    pictures = draw(comparison, request.table.name)
    for picture in pictures:
        write_bytes(folder / picture.name, picture.content)
    markdown, html = pages(comparison, request.command, pictures, request.overrides)
    write_text(folder / f"{request.table.name}.md", markdown)
    return html


def draw(comparison: Comparison, name: str) -> list[Picture]:
    """Curves over rounds; bars of a table of few rows; a heat map, or a line, for each sweep; in files of ``name``."""
    table = comparison.table
    finished = [line for line in comparison.lines if line.summaries]
    title = f"{table.name}, scale={comparison.scale}"
    pictures = []
    if 0 < len(finished) <= MAX_CURVES:
        curves = {line.row.label: comparison.curve(line) for line in finished}
        pictures.append(Picture(rendered(convergence(curves, title)), f"{name}.png", "average test accuracy by round"))
    if 0 < len(finished) <= MAX_BARS and not table.sweeps:
        columns = comparison.columns
        bar = {
            line.row.label: [*(comparison.ours(line, each) for each in columns), comparison.our_average(line, columns)]
            for line in finished
        }
        content = rendered(bars([*(column.scored for column in columns), "average"], bar, title))
        pictures.append(Picture(content, f"{name}-bars.png", "test accuracy by domain"))
    for place, sweep in enumerate(table.sweeps, 1):
        mine = [line for line in finished if set(line.row.point) == set(sweep.axes)]
        runs = [Run(line.folders[seed]) for line in mine for seed in line.summaries]
        if set(varying(runs)) == set(sweep.axes):
            heat = sensitivity(runs, axes=list(sweep.axes), rule=table.rule, names=sweep.names)
            pictures.append(Picture(rendered(heat), f"{name}-sweep-{place}.png", ", ".join(sweep.names.values())))
    return pictures


def compare(
    request: Request, jobs: Sequence[Planned], seeds: Sequence[int], failures: Mapping[Path, str]
) -> Comparison:
    """Ours beside the published numbers, from the runs' folders."""
    lines = []
    for row in dict.fromkeys(job.row.label for job in jobs):
        mine = [job for job in jobs if job.row.label == row]
        finished = {job.seed: job.summary() or {} for job in mine if job.finished()}
        measured = [job.folder for job in mine if job.seed in finished and request.table.measure]
        lines.append(
            Line(
                mine[0].row,
                {job.seed: job.folder for job in mine},
                finished,
                {job.seed: failures[job.folder] for job in mine if job.folder in failures},
                tuple(map(_information, measured)),
            )
        )
    return Comparison(request.table, request.scale, tuple(lines), tuple(seeds))


def _information(folder: Path) -> float:
    """The estimate for a run, kept in ``mutual_information.json`` beside the state it is of."""
    from server.results.information import information_of_run

    path, state = folder / "mutual_information.json", Run.open(folder).summary["state_sha256"]
    if path.exists():
        kept = json.loads(read_small(path))
        if kept["state_sha256"] == state:
            return float(kept["nats"])
    found = information_of_run(folder)
    write_json(path, {"state_sha256": state, **asdict(found)})
    return found.nats


def numbers(comparison: Comparison, request: Request) -> dict[str, object]:
    """The page's numbers for other programs."""
    overall = comparison.order()

    def mean(value: Value | None) -> float | None:
        return None if value is None else value.mean

    return {
        "table": comparison.table.name,
        "scale": comparison.scale,
        "command": request.command,
        "rule": comparison.table.rule,
        "verdict": comparison.verdict().word,
        "spearman": overall.correlation,
        "pairs_kept": [overall.kept, overall.pairs],
        "rows": [
            {
                "label": line.row.label,
                "folders": {str(seed): str(folder) for seed, folder in sorted(line.folders.items())},
                "ours": {each.scored: mean(comparison.ours(line, each)) for each in comparison.columns},
                "average": mean(comparison.our_average(line, comparison.columns)),
                "published": {column.published: comparison.published(line, column) for column in comparison.columns},
                "published_average": comparison.published_average(line, comparison.columns),
                "measured": list(line.measured),
                "point": dict(line.row.point),
            }
            for line in comparison.lines
        ],
    }


def print_tables() -> None:
    """Print what can be reproduced."""
    print("goldfinch reproduce TABLE --scale small|paper_net|paper; --help says what else. Tables:")
    for paper, tables in itertools.groupby(published_tables().values(), lambda table: table.paper):
        print(f"\n{paper}")
        for table in tables:
            print(f"  {table.name:28} {len(table.rows):>2} rows  {table.title}")
