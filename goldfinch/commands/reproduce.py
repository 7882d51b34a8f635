"""``goldfinch reproduce``: run a published table again, and show both tables side by side."""

import contextlib
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast, get_args

from rich.console import Console

from common.choices import folder_options
from common.errors import ConfigError, nearest
from common.overrides import parse_overrides, quoted_override
from common.regular_files import read_small
from common.settings import RunSettings, load_settings
from common.storage import write_bytes, write_json, write_text
from common.text import quantity, shell_line
from common.versions import combined_hash, package_versions
from goldfinch.commands.sweep import Job, check_data, execute, raise_failures, ways_on
from goldfinch.kept import split_overwrite
from goldfinch.record import RunRecord, varying
from goldfinch.reproduction.comparison import Comparison, Line
from goldfinch.reproduction.effects import Effect
from goldfinch.reproduction.pages import Picture, pages
from goldfinch.reproduction.published import (
    PublishedRow,
    PublishedTable,
    Scale,
    method_of,
    published_table,
    published_tables,
)
from goldfinch.results.figures.charts import bars, convergence, rendered, sensitivity
from goldfinch.results.rows import ScoreColumn, ScoreRow
from goldfinch.results.seeds import Value, curve
from server.run.conduct import check_not_in_a_run
from server.run.existing import Step
from server.run.schema import SCORES
from server.run.summary import SUMMARY

ENGINES = ("inline", "ray")

MAX_CURVES = 14
MAX_BARS = 7
"""Largest numbers of series in one plot."""


@dataclass(frozen=True)
class ReproductionRequest:
    """What the command line asked for.

    Args:
        table: the published table.
        scale: ``paper``, ``paper_net`` or ``small``.
        methods: rows, by label without its commas or by method; empty takes all rows of the scale.
        seeds: seeds of each row; empty takes those of the scale or the table.
        output: the output folder; ``None`` is ``outputs/reproduce/<scale>``.
        overrides: further settings of every row.
        records: a second folder for the page and each run's small files, written after every run; ``None`` for none.
        overwrite: whether runs of other code are replaced.
    """

    table: PublishedTable
    scale: Scale = "paper"
    methods: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    output: str | None = None
    overrides: tuple[str, ...] = ()
    records: str | None = None
    overwrite: bool = False

    @property
    def folder(self) -> Path:
        """``output`` as a path."""
        if self.output:
            return Path(self.output).expanduser()
        return Path("outputs", "reproduce", self.scale)

    @property
    def command(self) -> str:
        """The command of this request, without its output."""
        arguments = ["--scale", self.scale]
        if self.methods:
            arguments += ["--methods", ",".join(self.methods)]
        if self.seeds:
            arguments += ["--seeds", ",".join(map(str, self.seeds))]
        return shell_line(["goldfinch", "reproduce", self.table.name, *arguments, *self.overrides, *folder_options()])


def request_of(
    arguments: Sequence[str],
    scale: str = "paper",
    methods: Sequence[str] = (),
    seeds: Sequence[int] = (),
    output: Path | None = None,
    records: Path | None = None,
) -> ReproductionRequest:
    """Return the request for the table and the settings in ``arguments``, and the command's options.

    Raises:
        ConfigError: no table is named, or an argument or option is not valid.
    """
    names: list[str] = []
    overrides: list[str] = []
    reserved: list[str] = []
    arguments, overwrite = split_overwrite(arguments)
    for argument in arguments:
        key, equals, _ = argument.partition("=")
        if not equals:
            names.append(argument)
            continue
        overrides.append(argument)
        if key.partition(".")[0] == "attack":
            raise ConfigError(f"{argument}: no client of a paper's table is hostile; use goldfinch run or sweep")
        if key in ("seed", "method", "experiment", "resume"):
            reserved.append(argument)
    if len(names) != 1:
        given = "a table"
        if names:
            given = f"one table; got {' '.join(names)}"
        raise ConfigError(f"goldfinch reproduce needs {given}: {', '.join(published_tables())}")
    if scale not in get_args(Scale):
        raise ConfigError(f"--scale {scale}: {nearest(scale, get_args(Scale))}")
    if reserved:
        raise ConfigError(f"{' '.join(reserved)}: the table sets this; use --methods A,B and --seeds 0,1,2")
    return ReproductionRequest(
        published_table(names[0]),
        cast("Scale", scale),
        tuple(methods),
        tuple(seeds),
        str(output) if output else None,
        tuple(overrides),
        str(records) if records else None,
        overwrite,
    )


@dataclass(frozen=True)
class Planned(Job):
    """A run of a row of the table with one seed."""

    row: PublishedRow
    seed: int


def planned_jobs(
    table: PublishedTable,
    rows: Sequence[PublishedRow],
    seeds: Sequence[int],
    scale: Scale,
    output: Path,
    more: Sequence[str] = (),
) -> list[Planned]:
    """Return the run of every row and seed, below ``output/runs``; all settings are checked.

    A run's folder is named after all settings that its result depends on. So rows that two tables share are run once,
    and runs with different settings never share a folder.

    Args:
        table: the published table.
        rows: its rows that are run.
        seeds: seeds of each row.
        scale: the scale.
        output: the output folder.
        more: further overrides; of two with the same key the last one counts.

    Raises:
        ConfigError: a row's settings are not valid, or its engine is not available here.
    """
    jobs = []
    given = [item.text for item in parse_overrides(more)]  # with whole keys, as the table's own are
    for row in rows:
        overrides = table.overrides(row, scale, given)
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


def reproduce(request: ReproductionRequest, console: Console | None = None) -> Path:
    """Do the missing runs, write TABLE.md, TABLE.html, TABLE.json and figures, and return the HTML file's path.

    The pages are written from the finished runs even if the command is interrupted or runs fail.

    Raises:
        ConfigError: the request cannot be run, or runs failed; then the pages name them.
    """
    console, table = console or Console(), request.table
    reduced = table.reduction(request.scale)
    rows = table.rows_at(request.scale)
    if request.methods:
        rows = table.select(request.methods)
    seeds = request.seeds or (reduced and reduced.seeds) or table.seeds
    jobs = planned_jobs(table, rows, seeds, request.scale, request.folder, request.overrides)
    for job in jobs:
        check_not_in_a_run(job.folder)
    if request.overwrite:
        jobs = [replace(job, settings=replace(job.settings, overwrite=True)) for job in jobs]
    check_data([job for job in jobs if job.decision().step in (Step.START, Step.GO_ON)])
    shown = f"{quantity(len(rows), 'row')}, seeds {', '.join(map(str, seeds))}"
    console.print(f"{table.name}, scale={request.scale}: {shown}")
    failures: Mapping[Path, str] = {}
    try:
        failures = execute(jobs, 1, console, table.rule, lambda: keep_records(request, jobs, seeds, {}))
    finally:
        keep_records(request, jobs, seeds, failures)
        path = write_pages(request, jobs, seeds, failures)
        console.print(f"wrote {path.with_suffix('.md')} and {path}", highlight=False, soft_wrap=True, markup=False)
        splits: dict[str, str] = {}
        for job in jobs:
            record = job.record()
            if record is not None:
                splits |= record.facts.splits
        if splits:
            console.print(f"split, SHA-256: {combined_hash(splits)}", highlight=False, soft_wrap=True)
    command = request.command
    if request.records is not None:
        command += f" {shell_line(['--records', request.records])}"
    for line in ways_on(jobs, command, request.folder):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    raise_failures(failures)
    return path


def keep_records(
    request: ReproductionRequest, jobs: Sequence[Planned], seeds: Sequence[int], failures: Mapping[Path, str]
) -> None:
    """Write the page, its pictures, and each finished run's summary and history into ``request.records``."""
    if request.records is None:
        return
    folder = Path(request.records).expanduser()
    _page(folder, request, comparison_of(request, jobs, seeds, failures))
    for job in jobs:
        if job.finished():
            kept = folder / request.table.name / job.folder.parent.name / job.folder.name
            record = RunRecord(job.folder)
            write_json(kept / SUMMARY, record.summary)
            write_bytes(kept / SCORES, (job.folder / SCORES).read_bytes())


def write_pages(
    request: ReproductionRequest, jobs: Sequence[Planned], seeds: Sequence[int], failures: Mapping[Path, str]
) -> Path:
    """Write the pages from the finished runs, and return the HTML file's path."""
    comparison, path = comparison_of(request, jobs, seeds, failures), request.folder / f"{request.table.name}.html"
    write_text(path, _page(request.folder, request, comparison))
    write_json(path.with_suffix(".json"), numbers(comparison, request))
    return path


def _page(folder: Path, request: ReproductionRequest, comparison: Comparison) -> str:
    """Write the page as Markdown and its pictures into ``folder``, and return the page as HTML.

    A picture that was drawn of fewer rows, and is not drawn of these, leaves.
    """
    pictures = pictures_of(comparison, request.table.name)
    for kind in ("", "-bars"):
        (folder / f"{request.table.name}{kind}.png").unlink(missing_ok=True)
    for picture in pictures:
        write_bytes(folder / picture.name, picture.content)
    markdown, html = pages(comparison, request.command, pictures, request.overrides)
    write_text(folder / f"{request.table.name}.md", markdown)
    return html


def pictures_of(comparison: Comparison, name: str) -> list[Picture]:
    """Draw curves over rounds, bars of a table with few rows, and a heat map or line of each sweep.

    Args:
        comparison: the table and its reproduction.
        name: the beginning of the pictures' file names.
    """
    table = comparison.table
    finished = [line for line in comparison.lines if line.ours.runs]
    title = f"{table.name}, scale={comparison.scale}"
    pictures = []
    if 0 < len(finished) <= MAX_CURVES:
        curves = {line.printed.label: curve(line.ours.runs, comparison.average) for line in finished}
        pictures.append(Picture(rendered(convergence(curves, title)), f"{name}.png", "average test accuracy by round"))
    if 0 < len(finished) <= MAX_BARS and not table.sweeps:
        columns = comparison.columns
        heads = [column.scored for column in columns]
        series: dict[str, list[Value | None]] = {}
        for line in finished:
            keys: list[ScoreColumn] = [*[column.key for column in columns], comparison.average]
            series[line.printed.label] = [line.ours.whole(key, table.rule) for key in keys]
        content = rendered(bars([*heads, "average"], series, title))
        pictures.append(Picture(content, f"{name}-bars.png", "test accuracy by domain"))
    for place, sweep in enumerate(table.sweeps, 1):
        runs: list[RunRecord] = []
        for line in finished:
            if set(line.printed.point) == set(sweep.axes):
                runs += line.ours.runs
        if set(varying(runs)) != set(sweep.axes):
            continue
        with contextlib.suppress(ConfigError):  # of runs of other code and of partial scores, which the page names
            heat = sensitivity(runs, axes=list(sweep.axes), rule=table.rule, names=sweep.names)
            pictures.append(Picture(rendered(heat), f"{name}-sweep-{place}.png", ", ".join(sweep.names.values())))
    return pictures


def comparison_of(
    request: ReproductionRequest, jobs: Sequence[Planned], seeds: Sequence[int], failures: Mapping[Path, str]
) -> Comparison:
    """Return the published table with the results of our runs, read from their folders.

    Args:
        request: the request.
        jobs: its runs.
        seeds: its seeds.
        failures: error messages of runs that failed, by folder.
    """
    by_row: dict[str, list[Planned]] = {}
    for job in jobs:
        by_row.setdefault(job.row.label, []).append(job)
    lines: list[Line] = []
    for of_row in by_row.values():
        runs: list[RunRecord] = []
        absent: dict[str, str] = {}
        measured: list[float] = []
        for job in sorted(of_row, key=lambda job: job.seed):
            if not job.finished():
                absent[f"seed {job.seed}"] = failures.get(job.folder, "not run yet")
                continue
            runs.append(RunRecord(job.folder))
            if request.table.measure:
                measured.append(_information(job.folder))
        printed = of_row[0].row
        folders = {job.seed: job.folder for job in of_row}
        lines.append(Line(printed, ScoreRow(printed.label, runs, absent=absent), folders, tuple(measured)))
    return Comparison(request.table, request.scale, tuple(lines), tuple(seeds))


def _information(folder: Path) -> float:
    """Return the mutual information of a run.

    The estimate is kept in ``mutual_information.json``, with the hash of the state for which it was made.
    """
    from goldfinch.results.information import information_of_run

    path, state = folder / "mutual_information.json", RunRecord.open(folder).state_sha256
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # absent or damaged: it is made again
        kept = json.loads(read_small(path))
        if kept["state_sha256"] == state:
            return float(kept["nats"])
    information = information_of_run(folder)
    write_json(path, {"state_sha256": state, **asdict(information)})
    return information.nats


def numbers(comparison: Comparison, request: ReproductionRequest) -> dict[str, object]:
    """Return the page's numbers for other programs."""
    order = comparison.order()
    rows: list[dict[str, object]] = []
    for line in comparison.lines:
        ours: dict[str, float | None] = {}
        published: dict[str, float | None] = {}
        for column in comparison.columns:
            ours[column.scored] = _mean(line.ours.value(column.key, comparison.table.rule))
            published[column.published] = comparison.published(line, column)
        states = {str(seed): str(state) for seed, state in line.ours.states.items()}
        rows.append(
            {
                "label": line.printed.label,
                "folders": {str(seed): str(folder) for seed, folder in sorted(line.folders.items())},
                "states": states,
                "ours": ours,
                "average": _mean(line.ours.value(comparison.average, comparison.table.rule)),
                "published": published,
                "published_average": comparison.published_average(line, comparison.columns),
                "measured": list(line.measured),
                "point": dict(line.printed.point),
            }
        )
    return {
        "table": comparison.table.name,
        "scale": comparison.scale,
        "command": request.command,
        "rule": comparison.table.rule,
        "versions": dict(package_versions()),
        "effects": [_effect(effect) for effect in comparison.effects()],
        "spearman": order.correlation,
        "pairs_kept": [order.kept, order.pairs],
        "chance": order.chance,
        "rows": rows,
    }


def _effect(effect: Effect) -> dict[str, object]:
    return {
        "minus": effect.rival,
        "ours": effect.ours,
        "low": effect.low,
        "high": effect.high,
        "printed": effect.printed,
        "printed_lies": effect.lies,
    }


def _mean(value: Value | None) -> float | None:
    """Return the mean; ``None`` without one, and of a partial value, which is not marked in JSON."""
    if value is None or value.partial:
        return None
    return value.mean


def print_tables() -> None:
    """Print the tables that can be reproduced."""
    print("goldfinch reproduce TABLE --scale small|paper_net|paper; see --help for more. Tables:")
    for paper, tables in itertools.groupby(published_tables().values(), lambda table: table.paper):
        print(f"\n{paper}")
        for table in tables:
            print(f"  {table.name:28} {len(table.rows):>2} rows  {table.title}")
