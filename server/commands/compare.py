"""``goldfinch compare``: tune methods with the same budget, and compare them on other seeds."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from common.errors import ConfigError
from common.storage import write_json, write_text
from server.commands.sweep import Job, all_options, execute, raise_failures
from server.commands.tune import (
    TuningSearch,
    finished_trials,
    fresh_runs,
    plain_printer,
    plan_search,
    run_search,
    scores_of,
    varies_partition,
    write_best,
)
from server.results.seeds import Value
from server.results.table import OWN_MODELS

BASE = "fedavg"


@dataclass(frozen=True)
class TunedMethod:
    """One method of a comparison.

    Args:
        search: its search.
        validation: the best validation score of the search, in per cent.
        runs: its runs with the best values and other seeds.
        search_hours: hours of all trials.
    """

    search: TuningSearch
    validation: float
    runs: list[Job]
    search_hours: float

    @property
    def name(self) -> str:
        """The method's name, with a star if each client was scored with a model of its own."""
        method = self.search.settings.method
        return method.name + " *" * method.personal


def compare(
    methods: Sequence[str],
    overrides: Sequence[str],
    output: Path,
    trials: int,
    seeds: Sequence[int],
    jobs: int = 1,
) -> None:
    """Tune each method, run its best values with ``seeds``, and print and write the table.

    Trials and runs that are finished are not repeated.

    Args:
        methods: names of conf/method/; ``*`` is all of them. FedAvg is added.
        overrides: settings of all runs.
        output: the folder of the searches, the runs and the table.
        trials: trials of each search.
        seeds: seeds of the runs.
        jobs: runs at the same time.

    Raises:
        ConfigError: a method or setting is not valid, there is no method or seed, or a run failed.
    """
    if not methods or not seeds:
        raise ConfigError("a comparison needs methods and seeds: goldfinch compare --methods fedavg,fpl --seeds 0,1,2")
    for item in overrides:
        if item.startswith("method="):
            raise ConfigError(f"{item}: choose the methods of a comparison by --methods A,B")
    every = list(methods) == ["*"]
    names = list(methods)
    if every:
        names = all_options("method=*").partition("=")[2].split(",")
    console = Console()
    searches: list[TuningSearch] = []
    say = plain_printer(console)
    for name in dict.fromkeys([BASE, *names]):
        try:
            searches.append(plan_search([f"method={name}", *overrides], output, trials, seeds))
        except ConfigError as error:
            if not every:
                raise
            say(f"left out: {name}: {error}")
    if not searches:
        raise ConfigError("no method is left to compare; the reasons are above")
    tuned: list[TunedMethod] = []
    planned: list[Job] = []
    for search in searches:
        study = run_search(search, jobs, console)
        write_best(search, study)
        seconds = 0.0
        for trial in finished_trials(study):
            if trial.duration:
                seconds += trial.duration.total_seconds()
        runs = fresh_runs(search, search.settings.method.name, study.best_trial.params, seeds)
        tuned.append(TunedMethod(search, study.best_value, runs, seconds / 3600))
        planned += runs
    raise_failures(execute(planned, jobs, console, "validated"))
    text = table(tuned, seeds)
    options = ["--trials", str(trials), "--seeds", ",".join(map(str, seeds))]
    command = " ".join(["goldfinch compare --methods", ",".join(methods), *overrides, *options])
    write_text(output / "compare.md", f"`{command}`\n\n{text}\n")
    scores = {method.search.settings.method.name: scores_of(method.runs) for method in tuned}
    write_json(output / "compare.json", {"seeds": list(seeds), "scores": scores})
    console.print(Markdown(text))
    say(f"wrote {output / 'compare.md'}")


def table(tuned: Sequence[TunedMethod], seeds: Sequence[int]) -> str:
    """Return the table in Markdown.

    Its columns are rank, method, mean and deviation over seeds, validation score, difference from FedAvg with its
    interval, hours, and megabytes of a run.
    """
    scores = {method.name: scores_of(method.runs) for method in tuned}
    order = sorted(tuned, key=lambda method: -statistics.fmean(scores[method.name]))
    base: Sequence[float] = ()
    for method in tuned:
        if method.search.settings.method.name == BASE:
            base = scores[method.name]
    settings = tuned[0].search.settings
    partition = f"partition_seed={getattr(settings.protocol, 'partition_seed', None)}"
    if varies_partition(tuned[0].search):
        partition = "partitions drawn by the same seeds, the search by its own"
    lines = [
        f"{settings.choices['data']}, protocol {settings.choices['protocol']}, model {settings.choices['model']}, "
        f"{settings.train.rounds} rounds: average accuracy over domains in %, on test, in the round that is best on "
        f"validation (a share of {settings.protocol.validation:g} of each client's training samples). Each method had "
        f"{tuned[0].search.trials} trials on validation alone, with seed {settings.seed}, "
        f"{_first_trials(tuned)}; the runs below have seeds {', '.join(map(str, seeds))}, {partition}.",
        "",
        "| rank | method | test | validation in the search | minus FedAvg, 95 % interval | hours | MB a run |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for rank, method in enumerate(order, 1):
        found = scores[method.name]
        against = ""
        if method.search.settings.method.name != BASE:
            against = interval(found, base)
        hours = method.search_hours
        megabytes: list[float] = []
        for job in method.runs:
            summary = job.summary() or {}
            hours += summary["wall_seconds"] / 3600
            megabytes.append((summary["bytes"]["up"] + summary["bytes"]["down"]) / 1e6)
        size = f"{statistics.fmean(megabytes):.1f}"
        cells = (rank, method.name, Value.of(found), f"{method.validation:.2f}", against, f"{hours:.2f}", size)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    if any(method.search.settings.method.personal for method in tuned):
        lines += ["", f"A star: {OWN_MODELS.partition(';')[0].removeprefix('* ')}, not one shared model."]
    return "\n".join(lines)


def _first_trials(tuned: Sequence[TunedMethod]) -> str:
    """Return which methods' first trials had printed values, defaults, or values that the user gave."""
    parts: list[str] = []
    for start in ("printed", "default", "given"):
        names = [method.search.settings.method.name for method in tuned if method.search.start == start]
        if names:
            parts.append(f"{start} values for {', '.join(names)}")
    return f"the first trial with {' and '.join(parts)}"


def interval(scores: Sequence[float], base: Sequence[float]) -> str:
    """Return the mean difference of pairs with its 95 % confidence interval (Student's t); a single pair has none."""
    from scipy.stats import ttest_rel

    mean = statistics.fmean([one - other for one, other in zip(scores, base, strict=True)])
    if len(scores) < 2:
        return f"{mean:+.2f}"
    low, high = ttest_rel(scores, base).confidence_interval(0.95)
    return f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]"
