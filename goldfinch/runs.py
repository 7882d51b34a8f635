"""Train and read runs from Python."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import ConfigError
from common.metrics import COUNTED, METRICS, metric_of
from goldfinch.frames import frame, library
from goldfinch.overrides import overrides_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from common.exports.model import TrainedModel
    from server.results.run import Run as Records

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
        from server.results.run import Run as Records

        self.folder = Path(folder)
        self.records: Records = Records(self.folder)
        if not self.records.config_file.exists():
            raise ConfigError(f"{folder} holds no run: config.yaml is missing; give the folder that output= named")

    def __repr__(self) -> str:
        if not self.finished:
            return f"<Run {self.folder}: {self.records.status}>"
        average = f"average {self.average:.2f} %"
        if self.missing:
            average += " (partial)"
        return f"<Run {self.folder}: {self.method}, seed {self.seed}, {average}>"

    def _repr_html_(self) -> str:
        """Show the last score of every domain in a notebook."""
        head = f"<p><b>{self.method}</b>, seed {self.seed}, {self.records.status}: <code>{self.folder}</code></p>"
        scores = self.scores
        if not len(scores):
            return head
        return head + str(scores.tail(1).to_html(float_format="%.2f"))

    # ---- the result ------------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether the run has finished and has a summary."""
        return bool(self.records.summary)

    @property
    def summary(self) -> Mapping[str, Any]:
        """``summary.json``; empty if the run has not finished."""
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
        """The final accuracy in per cent, averaged over domains. It lacks the domains in :attr:`missing`."""
        return float(self._final["average"])

    @property
    def worst(self) -> float:
        """The lowest final accuracy of a domain, in per cent. It lacks the domains in :attr:`missing`."""
        return float(self._final["worst"])

    @property
    def missing(self) -> dict[str, int | None]:
        """Domains that the final score lacks, with the last round that scored each; empty for a whole score."""
        return dict(self._final["missing"])

    @property
    def sha256(self) -> str | None:
        """SHA-256 of the final state; ``None`` if the run has not finished."""
        return self.records.state_sha256

    @property
    def _final(self) -> Mapping[str, Any]:
        rules = self.records.rules
        if "final" not in rules:
            raise ConfigError(f"{self.folder} has no score yet; its state is: {self.records.status}")
        return rules["final"]

    # ---- records as DataFrames -------------------------------------------------------------------------------------

    @property
    def history(self) -> pd.DataFrame:
        """One row per round, client and scored domain: count, correct, accuracy in per cent, loss."""
        return frame(self.records.scores, NUMBERS)

    @property
    def scores(self) -> pd.DataFrame:
        """One row per scored round: accuracy of each domain in per cent, average, worst, and the missing domains."""
        pandas = library()
        rows: dict[int, dict[str, Any]] = {}
        for score in self.records.round_scores:
            rows[score.round] = {
                **score.accuracy,
                "average": score.average,
                "worst": score.worst,
                "missing": ", ".join(score.missing),
            }
        table = pandas.DataFrame.from_dict(rows, orient="index")
        table.index.name = "round"
        return table

    @property
    def activity(self) -> pd.DataFrame:
        """One row per round, exchange and client: status, samples, steps, losses, seconds, bytes."""
        return frame(self.records.activity, NUMBERS)

    def confusion(self, domain: str, round_number: int | None = None) -> pd.DataFrame:
        """Return the confusion counts of a domain: a row per true class, a column per predicted class.

        Args:
            domain: the domain.
            round_number: the scored round; ``None`` is the last.

        Raises:
            ConfigError: no confusion counts were recorded for the domain in that round.
        """
        by_domain: dict[str, dict[int, list[Mapping[str, Any]]]] = {}
        for line in self.records.confusions:
            by_round = by_domain.setdefault(str(line["domain"]), {})
            by_round.setdefault(int(line["round"]), []).append(line)
        found = by_domain.get(domain, {})
        chosen = round_number
        if chosen is None:
            chosen = max(found, default=-1)
        if chosen not in found:
            domains = ", ".join(sorted(by_domain)) or "none"
            rounds = ", ".join(map(str, sorted(found))) or "none"
            raise ConfigError(
                f"{self.folder} has no confusion counts of {domain!r} in round {chosen}; domains: {domains}; rounds of "
                f"{domain!r}: {rounds}"
            )
        names = self.records.class_names
        table = library().DataFrame(0, index=names, columns=names)
        table.index.name, table.columns.name = "true", "predicted"
        for line in found[chosen]:
            for true, predicted, count in zip(line["true"], line["predicted"], line["count"], strict=True):
                table.iloc[true, predicted] += count
        return table

    def metrics(self, round_number: int | None = None) -> pd.DataFrame:
        """Return a row per domain with accuracy, balanced accuracy, macro F1 and the worst class's recall, in per cent.

        Args:
            round_number: the scored round; ``None`` is the last.

        Raises:
            ConfigError: no confusion counts were recorded for a domain of the run in that round.
        """
        rows: dict[str, dict[str, float]] = {}
        for domain in self.records.domains:
            counts = self.confusion(domain, round_number).to_numpy().tolist()
            rows[domain] = {metric: metric_of(counts, metric) for metric in METRICS}
        return library().DataFrame.from_dict(rows, orient="index")

    def recall(self, round_number: int | None = None) -> pd.DataFrame:
        """Return the recall of each class in per cent: a row per class, a column per domain; NaN without test images.

        Args:
            round_number: the scored round; ``None`` is the last.

        Raises:
            ConfigError: no confusion counts were recorded for a domain of the run in that round.
        """
        columns: dict[str, Any] = {}
        for domain in self.records.domains:
            counts = self.confusion(domain, round_number).to_numpy()
            images = counts.sum(1)
            columns[domain] = 100 * counts.diagonal() / images.astype(float).clip(1)
            columns[domain][images == 0] = float("nan")
        return library().DataFrame(columns, index=self.records.class_names)

    # ---- figure, report, model -------------------------------------------------------------------------------------

    def plot(self) -> Figure:
        """Return a figure of the accuracy over rounds: the average and each domain, in per cent.

        The average has no point in a round that lacks a domain.
        """
        from server.plots.figures import draw_curves, legend, new_figure, plain
        from server.results.report.plots import accuracy_curves
        from server.results.seeds import Value

        curves: dict[str, dict[int, Value]] = {}
        for name, points in accuracy_curves(self.records).items():
            curves[name] = {number: Value(accuracy, None) for number, accuracy in points.items()}
        figure = new_figure(7.2, 4.2, f"{self.method} on {self.records.names[0]}, seed {self.seed}")
        axes = plain(figure.add_subplot())
        draw_curves(axes, curves)
        axes.set_ylabel("test accuracy, %")
        legend(axes)
        return figure

    def report(self, path: Path | str | None = None) -> Path:
        """Write the run's report, one HTML file, and return its path.

        Args:
            path: where to write it; ``None`` writes ``report.html`` into the run's folder.
        """
        from server.commands.report import report

        if path is not None:
            path = Path(path)
        return report([str(self.folder)], path)

    def model(self, *, client: str | None = None, chosen: str = "last") -> TrainedModel:
        """Return the trained model, on the CPU, in evaluation mode.

        Args:
            client: return the model of this client, for methods with a model for each client.
            chosen: ``last``, ``best`` by validation, or the number of a round with a checkpoint.
        """
        from server.commands.export import trained_model

        return trained_model(self.folder, client=client, chosen=chosen)


def run(*overrides: str, settings: Mapping[str, Any] | None = None, quiet: bool = False, **keywords: Any) -> Run:
    """Train one run and return it.

    It shows its progress and writes the same files in the same folder as ``goldfinch run``.

    Example::

        gf.run(method="fpl", data="glyphs", rounds=10, seed=0, settings={"method.temperature": 0.05})

    Args:
        overrides: settings as ``goldfinch run`` takes them, such as ``"method.temperature=0.05"``.
        settings: the same by key.
        quiet: show nothing.
        keywords: ``method``, ``data``, ``protocol``, ``model``, ``engine``, ``aggregation``, ``privacy``, ``views``,
            ``experiment``, ``tracker``, ``tuned``, ``seed``, ``output``, ``resume``, ``overwrite``; ``rounds``,
            ``epochs``, ``batch_size``, ``learning_rate`` and ``device`` of ``train``.

    Raises:
        ConfigError: a setting is wrong, or the output folder holds a run already.
        EngineError: the run could not be completed.
    """
    from common.config import compose_config
    from common.settings import settings_of
    from server.commands import running

    given = [*overrides_of(settings, keywords), *overrides]
    chosen = settings_of(compose_config(given))
    running.run(chosen, quiet=quiet)
    return Run(chosen.output_folder)


def resume(folder: Path | str, *overrides: str, quiet: bool = False, trust: bool = False, **keywords: Any) -> Run:
    """Resume a run with its own configuration, and return it.

    A run that has finished with a whole score stays as it is, unless there are more rounds to do.

    Args:
        folder: the run's folder.
        overrides: settings that change from now on, such as ``"train.rounds=20"``. They must not contradict the rounds
            that are done; see :data:`common.run_config.CHANGEABLE_ON_RESUME`. With ``"output=DIR"`` it is a new run in
            another folder.
        quiet: show nothing.
        trust: whether the folder is your own, so that its tracker writes where its configuration says.
        keywords: as in :func:`run`.

    Raises:
        CheckpointError: the run cannot be resumed; its folder is as it was.
    """
    from server.commands import running

    return Run(running.resume(Path(folder), [*overrides_of(None, keywords), *overrides], quiet=quiet, trust=trust))


def load_run(folder: Path | str) -> Run:
    """Return the run in ``folder``.

    Raises:
        ConfigError: the folder holds none.
    """
    return Run(folder)


def load_runs(*folders: Path | str, finished: bool = True) -> list[Run]:
    """Return the runs in and below ``folders``.

    Args:
        folders: run folders, or folders with runs below them.
        finished: leave out runs that are not finished.

    Raises:
        ConfigError: a folder is missing or holds no run.
    """
    from server.results.run import find_runs

    return [Run(records.folder) for records in find_runs(list(map(str, folders)), finished=finished)]


def sweep(
    *overrides: str,
    settings: Mapping[str, Any] | None = None,
    output: Path | str | None = None,
    jobs: int = 1,
    **keywords: Any,
) -> list[Run]:
    """Train one run for every combination of values, each in a process of its own, and return the runs.

    Example::

        gf.sweep(method=["fedavg", "fpl"], data="glyphs", seed=range(3))

    Args:
        overrides: settings as ``goldfinch sweep`` takes them.
        settings: the same by key; a list or range has one run for each value.
        output: folder of the runs; ``None`` takes a folder that is named after the settings. Finished runs are kept.
        jobs: runs at a time.
        keywords: as in :func:`run`; a list or range has one run for each value.
    """
    from server.commands import sweep as command

    given = [*overrides_of(settings, keywords, sweep=True), *overrides]
    folder = Path(output or command.default_output("sweep", given))
    command.sweep(given, folder, jobs)
    return load_runs(folder)
