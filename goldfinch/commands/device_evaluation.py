"""``goldfinch evaluate MODEL engine=...``: clients score an exported model on their test data, without training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.composition import compose_config, trust_overrides
from common.errors import ConfigError, GoldfinchError
from common.exports.description import Description
from common.exports.model import read_export
from common.metrics import METRICS
from common.models.pretrained import WEIGHTS
from common.overrides import parse_overrides, quoted_override
from common.regular_files import file_sha256
from common.scores import recorded_values
from common.settings import settings_of
from goldfinch.commands.evaluate import check_preparation, preparation_of, warn_of_reading
from goldfinch.commands.running import run
from goldfinch.record import RunRecord
from goldfinch.results.groups import notes_on_bins
from goldfinch.results.overrides import override
from goldfinch.results.sheets import Sheet, number_text

METHOD = "strategies.core.exported.ExportedModel"


def is_federated(overrides: Sequence[str]) -> bool:
    """Return whether the settings choose an engine, so that clients score the model."""
    return any(item.partition("=")[0].partition(".")[0] == "engine" for item in overrides)


def evaluate_on_devices(
    folder: Path, overrides: Sequence[str], output: Path | None = None, *, quiet: bool = False
) -> RunRecord:
    """Let every client score the exported model in ``folder``; print and return the records.

    Args:
        folder: the exported model. On a SuperLink, the ServerApp reads it at the same absolute path.
        overrides: the engine, the data, the protocol and other settings, as of ``goldfinch run``.
        output: the folder of the records; by default ``outputs/evaluate/NAME``, after the model's folder.
        quiet: show no progress.

    Raises:
        ConfigError: a setting chooses another model or method, the data have other classes than the model, or
            ``output`` is named as a file.
        CheckpointError: a file of the model is missing or changed.
    """
    if output is not None and output.suffix.lower() in (".json", ".csv"):
        raise ConfigError(f"--output {output}: with engine=... it is a folder; name one without {output.suffix}")
    given = evaluation_overrides(folder, overrides)
    given.append(quoted_override("output", output or Path("outputs", "evaluate", folder.absolute().name)))
    settings = settings_of(compose_config(given, own=overrides))
    description, _, _ = read_export(folder)
    if settings.data.class_names != description.classes:
        raise ConfigError(
            f"the classes of data={settings.data.name} are {', '.join(settings.data.class_names)}, in this order, and "
            f"those of the model {', '.join(description.classes)}: choose data with the model's classes"
        )
    warn_of_reading(settings.data, description)
    try:
        run(settings, quiet=quiet)
    except GoldfinchError as error:
        text = str(error).replace("another output=", "another --output")  # as it is written here
        error.args = (text.replace("output=DIR", "--output DIR"),)
        raise
    record = RunRecord(settings.output_folder)
    show_scores(record)
    return record


def evaluation_overrides(folder: Path, overrides: Sequence[str]) -> list[str]:
    """Return the overrides of the evaluation: those that rebuild the exported network, then ``overrides``.

    Raises:
        ConfigError: the folder holds no whole model, or an override chooses another model or method.
    """
    trust_overrides(overrides)
    folder = folder.expanduser().absolute()
    description, _, _ = read_export(folder)
    if not description.complete:
        raise ConfigError(
            f"{folder} holds what clients of {description.method} share, and each keeps the rest: export the model of "
            "one client with --client, or evaluate on a device (docs/use-the-model.md)"
        )
    for item in parse_overrides(overrides):
        group = item.key.partition(".")[0]
        if group in ("method", "model", "privacy") or item.key in ("train.rounds", "rounds.test"):
            raise ConfigError(f"{item.text}: the model in {folder} is evaluated as it is; leave the setting out")
    chosen = [item for item in overrides if item.startswith("data=")]
    prepared = _of_data(description, compose_config(chosen)["data"])
    check_preparation(compose_config([*prepared, *overrides])["data"], description)
    parts = description.architecture
    given = _of_class("model", parts["model"])
    given += [f"method._target_={METHOD}", override("method.trained", parts["method"])]
    given += [override("method.folder", str(folder)), override("method.sha256", file_sha256(folder / WEIGHTS))]
    given += [override("method.clients", parts["clients"]), override("method.seed", parts["seed"])]
    return [*given, *prepared, "train.rounds=1", *overrides]


def _of_class(group: str, node: Mapping[str, Any]) -> list[str]:
    """Return the overrides that choose a class and its settings."""
    given = [f"{group}._target_={node['_target_']}"]
    for key, value in node.items():
        if key != "_target_":
            given.append(override(f"{group}.{key}", value))
    return given


def _of_data(description: Description, node: Mapping[str, Any]) -> list[str]:
    """Return the overrides that prepare images as the model takes them."""
    given = preparation_of(description, node)
    if "classes" in node:
        given.append(override("data.classes", list(description.classes)))
    return given


def show_scores(run: RunRecord) -> None:
    """Print a row for each domain: clients and images, and every metric, over all clients that scored it."""
    score = run.round_scores[-1]
    further = run.facts.further
    values = recorded_values(run.events, "test")
    heads = [measure.title.removesuffix(" in %") for measure in further.values()]
    rows: list[list[str]] = []
    for domain in run.domains:
        scored = [row for row in run.test_lines if row["domain"] == domain]
        images = sum(int(row["count"]) for row in scored)
        cells = [domain, str(len(scored)), str(images)]
        totals = run.class_totals.get((score.round, domain))
        for metric in METRICS:
            cells.append(number_text(totals.metric(metric) if totals is not None else None))
        for name, measure in further.items():
            cells.append(number_text(values.get((score.round, domain), {}).get(name), measure.digits))
        rows.append(cells)
    title = f"{run.folder}: test images of each client, %"
    Sheet(title, ["domain", "clients", "images", *METRICS.values(), *heads], rows).show()
    for name in further:
        for note in notes_on_bins([run.by_metric(name)]):
            print(note)
    print(f"records: {run.folder}; goldfinch table and report show them")
