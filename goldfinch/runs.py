"""Train and read runs from Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, get_args

from common.errors import ConfigError
from common.metrics import COUNTED, METRICS, PARTIAL, RULES, ClassTotals
from common.scores import score_row
from goldfinch.folders import named_folder
from goldfinch.overrides import RunKeywords, SweepKeywords, check_jobs, check_reachable, overrides_of, with_signature
from server.run.history import reply_row
from server.run.signals import terminable

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from common.exports.model import TrainedModel
    from common.prototypes import PrototypeSet
    from goldfinch.record import RunRecord
    from goldfinch.results.frames import Values

NUMBERS = ("round", "count", "correct", "accuracy", *COUNTED, "loss", "samples", "steps", "peak_bytes", "releases")
"""Columns of records that hold numbers, besides those that begin with ``seconds`` or ``bytes``."""


class Run:
    """A run's folder.

    Args:
        folder: the folder that ``output`` named.

    Raises:
        ConfigError: the folder holds no run.
    """

    def __init__(self, folder: Path | str) -> None:
        from goldfinch.record import RunRecord

        self.folder = named_folder(folder)
        self.records: RunRecord = RunRecord(self.folder)
        if not self.records.config_file.exists():
            raise ConfigError(f"{folder} holds no run: config.yaml is missing; give the folder that output= named")

    def __repr__(self) -> str:
        if not self.finished or "final" not in self.records.rules:
            return f"<Run {self.folder}: {self.records.status}>"
        average = f"average {self._final['average']:.2f} %"
        if self.missing:
            average += f" {PARTIAL} partial"
        return f"<Run {self.folder}: {self.method}, seed {self.seed}, {average}>"

    def _repr_html_(self) -> str:
        """Show the last score of every domain in a notebook."""
        head = f"<p><b>{self.method}</b>, seed {self.seed}, {self.records.status}: <code>{self.folder}</code></p>"
        scores = self.scores
        if not len(scores):
            return head
        return head + str(scores.tail(1).round(2)._repr_html_())

    # ---- the result ------------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether the run has ended: its rounds are done, or it was asked to stop."""
        return self.records.ended

    @property
    def summary(self) -> Mapping[str, Any]:
        """What ``summary.json`` says, made of the run's other files; empty if the run has not ended."""
        return self.records.summary

    @property
    def settings(self) -> Mapping[str, Any]:
        """The whole configuration, nested as in ``conf/``."""
        return self.records.config

    @property
    def method(self) -> str:
        """The method's name."""
        return self.records.method_name

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.records.seed

    @property
    def accuracy(self) -> dict[str, float]:
        """The final accuracy of each domain, in per cent."""
        return dict(self._final["accuracy"])

    @property
    def average(self) -> float:
        """The final accuracy in per cent, averaged over domains; NaN if it lacks the domains in :attr:`missing`."""
        return self._whole("average")

    @property
    def worst(self) -> float:
        """The lowest final accuracy of a domain, in per cent; NaN if it lacks the domains in :attr:`missing`."""
        return self._whole("worst")

    @property
    def missing(self) -> dict[str, int | None]:
        """Domains that the final score lacks, with the last round that scored each; empty for a whole score."""
        return dict(self._final["missing"])

    @property
    def sha256(self) -> str | None:
        """SHA-256 of the final state; ``None`` if the run has not finished."""
        return self.records.state_sha256

    def _whole(self, column: str) -> float:
        """Return a number over all domains of the final score; NaN if it lacks a domain."""
        if self.missing:
            return float("nan")
        return float(self._final[column])

    @property
    def _final(self) -> Mapping[str, Any]:
        self._check_scored()
        return self.records.rules["final"]

    def _check_scored(self) -> None:
        """Check that the run has a score.

        Raises:
            ConfigError: it has none.
        """
        if not self.settings["rounds"].get("test", True):
            raise ConfigError(
                f"{self.folder} scores no test images: rounds.test=false; summary['validation'] has its best round"
            )
        if "final" not in self.records.rules:
            raise ConfigError(f"{self.folder} has no score yet; its state is: {self.records.status}")

    # ---- records as DataFrames -------------------------------------------------------------------------------------

    @property
    def history(self) -> pd.DataFrame:
        """One row per round, client and scored domain: count, correct, accuracy in per cent, loss."""
        from goldfinch.results.frames import record_frame

        return record_frame(list(map(score_row, self.records.test_lines)), NUMBERS)

    @property
    def scores(self) -> pd.DataFrame:
        """One row per scored round: accuracy of each domain in per cent, average, worst, and the missing domains.

        Average and worst of a round that lacks a domain are NaN.
        """
        from goldfinch.results.sheets import pandas_library

        rows: dict[int, dict[str, Any]] = {}
        for score in self.records.round_scores:
            row: dict[str, Any] = {**score.accuracy, "average": float("nan"), "worst": float("nan")}
            if not score.missing:
                row |= {"average": score.average, "worst": score.worst}
            rows[score.round] = {**row, "missing": ", ".join(score.missing)}
        table = pandas_library().DataFrame.from_dict(rows, orient="index")
        table.index.name = "round"
        return table

    @property
    def replies(self) -> pd.DataFrame:
        """One row per round, exchange and client: status, samples, steps, losses, seconds, bytes."""
        from goldfinch.results.frames import record_frame

        return record_frame(list(map(reply_row, self.records.replies)), NUMBERS)

    def confusion(self, domain: str, round_number: int | None = None) -> pd.DataFrame:
        """Return the confusion counts of a domain: a row per true class, a column per predicted class.

        Args:
            domain: the domain.
            round_number: the scored round; ``None`` is the last of the run.

        Raises:
            ConfigError: no confusion counts were recorded for the domain in that round.
        """
        from goldfinch.results.sheets import pandas_library

        totals, number = self._class_totals(round_number), self._scored_round(round_number)
        if domain not in totals:
            rounds = [str(scored) for scored, name in self.records.class_totals if name == domain]
            raise ConfigError(
                f"{self.folder} has no confusion counts of {domain!r} in round {number}; "
                f"domains of this round: {', '.join(totals)}; rounds of {domain!r}: {', '.join(rounds) or 'none'}"
            )
        names = self.records.class_names
        counts = [[0] * len(names) for _ in names]
        for line in self.records.test_lines:
            if (line["round"], line["domain"]) == (number, domain):
                cells = line["confusion"]
                for true, predicted, count in zip(cells["true"], cells["predicted"], cells["count"], strict=True):
                    counts[true][predicted] += count
        table = pandas_library().DataFrame(counts, index=names, columns=names)
        table.index.name, table.columns.name = "true", "predicted"
        return table

    def _scored_round(self, round_number: int | None) -> int:
        """Return the round, or for ``None`` the last that was scored."""
        if round_number is not None:
            return round_number
        return max(score.round for score in self.records.round_scores)

    def _class_totals(self, round_number: int | None) -> dict[str, ClassTotals]:
        """Return the images by class of a round by domain; only of domains that it scored by all clients.

        Args:
            round_number: the scored round; ``None`` is the last of the run.

        Raises:
            ConfigError: the round has no confusion counts.
        """
        self._check_scored()
        chosen = self._scored_round(round_number)
        partial: set[str] = set()
        for score in self.records.round_scores:
            if score.round == chosen:
                partial.update(score.missing)
        totals: dict[str, ClassTotals] = {}
        rounds: list[str] = []
        for (number, domain), of_domain in sorted(self.records.class_totals.items()):
            rounds.append(str(number))
            if number == chosen and domain not in partial:
                totals[domain] = of_domain
        if not totals:
            raise ConfigError(
                f"{self.folder} has no confusion counts in round {chosen!r}; "
                f"rounds: {', '.join(dict.fromkeys(rounds)) or 'none'}"
            )
        return totals

    def metrics(self, round_number: int | None = None) -> pd.DataFrame:
        """Return a row per domain with accuracy, balanced accuracy, macro F1 and the worst class's recall, in per cent.

        A domain that the round lacks has NaN.

        Args:
            round_number: the scored round; ``None`` is the last of the run.

        Raises:
            ConfigError: the round has no confusion counts.
        """
        from goldfinch.results.sheets import pandas_library

        totals = self._class_totals(round_number)
        rows: dict[str, dict[str, float]] = {}
        for domain in self.records.domains:
            rows[domain] = dict.fromkeys(METRICS, float("nan"))
            if domain in totals:
                rows[domain] = {metric: totals[domain].metric(metric) for metric in METRICS}
        return pandas_library().DataFrame.from_dict(rows, orient="index")

    def recall(self, round_number: int | None = None) -> pd.DataFrame:
        """Return the recall of each class in per cent: a row per class, a column per domain.

        The recall is NaN for a class without test images, and for a domain that the round lacks.

        Args:
            round_number: the scored round; ``None`` is the last of the run.

        Raises:
            ConfigError: the round has no confusion counts.
        """
        from goldfinch.results.sheets import pandas_library

        totals = self._class_totals(round_number)
        names = self.records.class_names
        columns: dict[str, list[float | None]] = {}
        for domain in self.records.domains:
            columns[domain] = [None] * len(names)
            if domain in totals:
                columns[domain] = [totals[domain].recall(label) for label in range(len(names))]
        return pandas_library().DataFrame(columns, index=names, dtype=float)

    def prototypes(self) -> dict[int, PrototypeSet]:
        """Return the global prototypes after each round that the run kept; empty if its method has none.

        A run keeps the prototypes of at most 40 rounds, the first and the last among them.
        """
        from goldfinch.run_model import RunModel

        return {page.round: page.prototypes for page in RunModel(self.records).pages}

    # ---- figure, report, model -------------------------------------------------------------------------------------

    def plot(self) -> Figure:
        """Return a figure of the accuracy over rounds: the average and each domain, in per cent.

        The average has no point in a round that lacks a domain.

        Raises:
            ConfigError: the run scores no test images, or has no score yet.
        """
        self._check_scored()
        from goldfinch.results.curves import accuracy_curves
        from goldfinch.results.figures.charts import draw_curves, legend, new_figure, plain_axes
        from goldfinch.results.seeds import Value

        curves: dict[str, dict[int, Value]] = {}
        for name, points in accuracy_curves(self.records).items():
            curves[name] = {number: Value(accuracy, None) for number, accuracy in points.items()}
        figure = new_figure(7.2, 4.2, f"{self.method} on {self.records.names[0]}, seed {self.seed}")
        axes = plain_axes(figure.add_subplot())
        draw_curves(axes, curves)
        axes.set_ylabel("test accuracy, %")
        legend(axes)
        return figure

    def report(self, path: Path | str | None = None) -> Path:
        """Write the run's report, one HTML file, and return its path.

        Args:
            path: where to write it; ``None`` writes ``report.html`` into the run's folder.
        """
        from goldfinch.results.report.page import write_report

        if path is not None:
            path = named_folder(path)
        return write_report([str(self.folder)], path)

    def model(self, *, client: str | None = None, chosen: str | int = "last") -> TrainedModel:
        """Return the trained model, on the CPU, in evaluation mode.

        Args:
            client: return the model of this client, for methods with a model for each client.
            chosen: ``last``, ``best`` by validation, or the number of a round with a checkpoint.
        """
        from goldfinch.commands.export import trained_model

        return trained_model(self.folder, client=client, chosen=str(chosen))


@with_signature(RunKeywords)
def run(
    *overrides: str,
    settings: Mapping[str, Any] | None = None,
    quiet: bool = False,
    **keywords: Unpack[RunKeywords],
) -> Run:
    """Train one run and return it.

    The function shows the progress and writes the same files in the same folder as ``goldfinch run``.

    Example::

        gf.run(method="fpl", data="glyphs", rounds=10, seed=0, settings={"method.temperature": 0.05})

    Args:
        overrides: settings as ``goldfinch run`` takes them, such as ``"method.temperature=0.05"``.
        settings: the same by key.
        quiet: show nothing.
        keywords: ``method`` (a name, or a class of your own), ``data``, ``protocol``, ``model``, ``engine``,
            ``aggregation``, ``privacy``, ``views``, ``experiment``, ``tracker``, ``tuned``, ``seed``, ``output``,
            ``resume``, ``overwrite``; ``rounds``, ``epochs``, ``batch_size``, ``learning_rate`` and ``device`` of
            ``train``.

    Raises:
        ConfigError: a setting is wrong, or the output folder holds a run already.
        EngineError: the run could not be completed.
    """
    from common.composition import compose_config
    from common.overrides import parse_overrides
    from common.settings import settings_of
    from goldfinch.commands import running

    given = parse_overrides(overrides_of(settings, keywords, overrides))
    chosen = settings_of(compose_config(given))
    with terminable():
        running.run(chosen, quiet=quiet)
    return Run(chosen.output_folder)


@with_signature(RunKeywords)
def resume(
    folder: Path | str,
    *overrides: str,
    settings: Mapping[str, Any] | None = None,
    quiet: bool = False,
    trust: bool = False,
    **keywords: Unpack[RunKeywords],
) -> Run:
    """Resume a run with its own configuration, and return it.

    A run that has finished with a whole score stays as it is, unless there are more rounds to do.

    Args:
        folder: the run's folder.
        overrides: settings that change from now on, such as ``"train.rounds=20"``. No setting may contradict the rounds
            that are done; see :data:`common.run_config.CHANGEABLE_ON_RESUME`. With ``"output=DIR"`` it is a new run in
            another folder.
        settings: the same by key.
        quiet: show nothing.
        trust: whether the folder is your own, so that its tracker writes where its configuration says.
        keywords: as in :func:`run`.

    Raises:
        CheckpointError: the run cannot be resumed; its folder is as it was.
    """
    from goldfinch.commands import running

    given = overrides_of(settings, keywords, overrides)
    with terminable():
        return Run(running.resume(named_folder(folder), given, quiet=quiet, trust=trust))


def load_run(folder: Path | str) -> Run:
    """Return the run in ``folder``.

    Raises:
        ConfigError: the folder holds none.
    """
    return Run(folder)


class Runs(list[Run]):
    """Several runs.

    Args:
        runs: the runs.
        unfinished: further runs of the same folders, left out since they have not ended. Tables name them.
    """

    def __init__(self, runs: Iterable[Run] = (), unfinished: Iterable[Run] = ()) -> None:
        super().__init__(runs)
        self.unfinished = list(unfinished)

    def table(
        self,
        *,
        rule: str = "final",
        values: Values = "text",
        metric: str = "accuracy",
        labels: str | Sequence[str] | Mapping[str, str] = (),
    ) -> pd.DataFrame:
        """Return the table of the runs: a row per method or setting, a column per domain, averaged over seeds.

        Runs that were scored on different images or with different networks do not share a table; the first level of
        the index then names the table. ``.attrs["notes"]`` is a list of sentences about missing domains, different
        code and other differences. A partial number is marked with a dagger in ``text``, and is NaN in ``mean`` and
        ``std``.

        Args:
            rule: ``final``, ``last_n``, ``best_round`` or ``validated``, as in docs/protocols.md.
            values: ``text`` gives ``mean ± standard deviation``; ``mean`` and ``std`` give one of the two as numbers.
            metric: ``accuracy``, ``balanced_accuracy``, ``macro_f1``, ``worst_class``, or another that all runs have.
            labels: other names of rows or methods, ``OLD=NEW``, such as ``"fpl=FPL (ours)"``; or new names by old one.

        Raises:
            ConfigError: no run was scored, no run has the metric, a label fits no row, or rule or values are unknown.
        """
        from goldfinch.results.frames import Values, wide_table
        from goldfinch.results.table import tables_of

        if rule not in RULES:
            raise ConfigError(f"rule={rule!r}: choose one of {', '.join(RULES)}")
        if values not in get_args(Values):
            raise ConfigError(f"values={values!r}: choose one of {', '.join(get_args(Values))}")
        if isinstance(labels, str):
            labels = [labels]
        if isinstance(labels, Mapping):
            labels = [f"{old}={new}" for old, new in labels.items()]
        unfinished = [run.records for run in self.unfinished]
        tables = tables_of([run.records for run in self], metric, labels, unfinished=unfinished)
        return wide_table(tables, rule, values)


def load_runs(*folders: Path | str, finished: bool = True) -> Runs:
    """Return the runs in and below ``folders``.

    Args:
        folders: run folders, or folders with runs below them.
        finished: leave out runs that are not finished. The table's notes name them.

    Raises:
        ConfigError: no folder is given, a folder is missing or holds no run, or a list of folders is given as one.
    """
    from goldfinch.record import find_runs
    from goldfinch.results.table import unfinished_runs

    if not folders:
        raise ConfigError("load_runs takes one folder or several, and was given none: load_runs('outputs')")
    for folder in folders:
        if not isinstance(folder, str | Path):
            kind = type(folder).__name__
            raise ConfigError(f"load_runs takes each folder by itself, not a {kind}: load_runs(*folders)")
    places = list(map(str, folders))
    runs = find_runs(places, finished=finished)
    left_out = unfinished_runs(places, runs) if finished else []
    return Runs([Run(run.folder) for run in runs], [Run(run.folder) for run in left_out])


@with_signature(SweepKeywords)
def sweep(
    *overrides: str,
    settings: Mapping[str, Any] | None = None,
    output: Path | str | None = None,
    jobs: int = 1,
    **keywords: Unpack[SweepKeywords],
) -> Runs:
    """Train one run for every combination of values, each in a process of its own, and return the runs.

    Example::

        gf.sweep(method=["fedavg", "fpl"], data="glyphs", seed=range(3))

    Args:
        overrides: settings as ``goldfinch sweep`` takes them.
        settings: the same by key; a list or range has one run for each value, and ``[["a", "b"]]`` is one list.
        output: folder of the runs; ``None`` takes a folder that is named after the settings. Finished runs are kept.
        jobs: runs at a time.
        keywords: as in :func:`run`; a list or range has one run for each value. ``overwrite=True`` replaces runs of
            other settings or other code, which are kept otherwise.

    Raises:
        ConfigError: a setting is wrong, or runs are missing: they failed, or their folders hold other runs.
    """
    from goldfinch.commands import sweep as command
    from goldfinch.kept import split_overwrite

    check_jobs(jobs)
    chosen, overwrite = split_overwrite(overrides_of(settings, keywords, overrides, sweep=True))
    values: dict[str, object] = {}
    for item in chosen:
        key, _, value = item.partition("=")
        values[key] = value
    check_reachable(values, "a sweep")  # each run has a process of its own
    folder = command.default_output("sweep", chosen) if output is None else named_folder(output)
    with terminable():
        command.sweep(chosen, folder, jobs, overwrite=overwrite)
    return load_runs(folder)
