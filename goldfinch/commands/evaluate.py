"""``goldfinch evaluate MODEL data=...``: score an exported model on any domain, also on one that no client had."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from common.composition import compose_config
from common.confidence import count_confidence, exact_auroc
from common.config import build
from common.data.domain import DataSource, Domain
from common.errors import ConfigError, nearest, writing
from common.exports.description import Description
from common.exports.model import load_model
from common.metrics import CONFIDENCE_MEASURES, MEASURES
from common.storage import write_json
from common.text import warn_once
from goldfinch.exports.formats import in_batches
from goldfinch.results.overrides import override
from goldfinch.results.sheets import Sheet, number_text

Part = Literal["test", "train", "all"]
PARTS = ("test", "train", "all")
SHOWN = {
    "accuracy": "accuracy",
    "confidence": "confidence",
    "calibration_error": "calibration error",
    "auroc": "AUROC",
    "brier_score": "Brier score",
    "log_loss": "log loss",
}
"""The scores in the table, and the heads of their columns."""

TOGETHER = "together"
"""The line and the key of all images; :data:`common.data.names.RESERVED` keeps domains from being called so."""


def measures(probabilities: Tensor, labels: Tensor) -> dict[str, float | None]:
    """Return the scores of predictions.

    Args:
        probabilities: ``[N, K]``, N >= 1.
        labels: ``[N]`` int64.

    Returns:
        ``count``, and in per cent ``accuracy``, mean ``confidence`` in the predicted class, ``calibration_error`` and
        ``auroc``, which is exact here; and ``brier_score`` and ``log_loss``. See
        :class:`common.confidence.ConfidenceCounts`. ``auroc`` is ``None`` if all images are of one class.
    """
    counts = count_confidence(probabilities.double().log(), labels)
    values = counts.values()
    return {
        "count": len(labels),
        "accuracy": 100 * sum(counts.correct) / len(labels),
        "confidence": 100 * sum(counts.confidence) / len(labels),
        "calibration_error": values["calibration_error"],
        "auroc": exact_auroc(probabilities, labels),
        "brier_score": values["brier_score"],
        "log_loss": values["log_loss"],
    }


def domains_of(overrides: Sequence[str], description: Description) -> tuple[DataSource, dict[str, Domain]]:
    """Return a data set whose classes the model knows, and its domains in the model's image size.

    Args:
        overrides: settings of ``data``.
        description: the model's.

    Raises:
        ConfigError: a setting does not belong to ``data``, or the model does not know a class.
        DataError: the data are missing.
    """
    for item in overrides:
        if item.partition("=")[0].partition(".")[0] != "data":
            raise ConfigError(f"{item}: only the data can be chosen: data=folder data.root=DIR data.domains=[a,b]")
    chosen = [item for item in overrides if item.startswith("data=")]
    prepared = preparation_of(description, compose_config(chosen)["data"])
    node = compose_config([*prepared, *overrides])["data"]
    check_preparation(node, description)
    source = build(node, "data")
    for name in source.class_names:
        if name not in description.classes:
            raise ConfigError(
                f"the model knows no class {name!r} of {source.name}; {nearest(name, description.classes)}"
            )
    warn_of_reading(source, description)
    source.forget()  # files may have changed since they were read by this process
    return source, {name: source.load(name) for name in source.domains}


def preparation_of(description: Description, node: Mapping[str, Any]) -> list[str]:
    """Return the overrides that prepare images as a model takes them, and read files as those that it was trained on.

    Args:
        description: the model's.
        node: the settings of the data set; it says how files are read if it has ``resize``.
    """
    given = [override(key, value) for key, value in _prepared(description).items()]
    if "resize" in node:
        given.append(override("data.resize", description.resize))
        given.append(override("data.range", list(description.value_range)))
        given.append(override("data.page", description.page))
    return given


def check_preparation(node: Mapping[str, Any], description: Description) -> None:
    """Refuse settings by which the model would get other images than it takes.

    Args:
        node: the settings of ``data``, composed of :func:`preparation_of` and what the user gave after it.
        description: the model's.

    Raises:
        ConfigError: the size of images or their normalisation differs from the model's.
    """
    for name, own in _prepared(description).items():
        value: Any = {"data": node}
        for key in name.split("."):
            value = (value or {}).get(key)
        found = f"{name}={value}"
        if value is None:  # another value was given for all of data.augmentation
            found = f"no {name}"
        if value != own:
            raise ConfigError(f"{found}: the model takes images with {own}; leave the setting out")


def _prepared(description: Description) -> dict[str, Any]:
    """Return the settings by which a model gets the images that it takes."""
    return {
        "data.image_size": description.image_size,
        "data.augmentation.mean": list(description.mean),
        "data.augmentation.std": list(description.std),
        "data.augmentation.normalisation": description.normalisation,
    }


def warn_of_reading(source: DataSource, description: Description) -> None:
    """Log that the files of a data set are read otherwise than those that the model was trained on."""
    read = replace(source.reading, skip_broken=False)
    if not source.generated and read != description.reading:
        advice = "data=folder reads them as the model does"
        if hasattr(source, "resize"):
            advice = "that is right only if these files need it"
        warn_once(
            f"data={source.name} reads images as {read}, and the model was trained on {description.reading}: {advice}"
        )


def evaluate(folder: Path, overrides: Sequence[str], part: Part = "test", output: Path | None = None) -> dict[str, Any]:
    """Print and return the scores of an exported model on each domain, with the confusion counts.

    Args:
        folder: the exported model.
        overrides: settings of the data set.
        part: the split.
        output: a .json file for the scores.

    Raises:
        ConfigError: see :func:`domains_of`; or the file cannot be written, or is of another kind.
    """
    if output is not None and output.suffix.lower() != ".json":
        raise ConfigError(f"--output {output}: scores are written as JSON: name a .json file")
    model = load_model(folder)
    source, domains = domains_of(overrides, model.description)
    classes = torch.tensor([model.classes.index(name) for name in source.class_names])
    probabilities: list[Tensor] = []
    labels: list[Tensor] = []
    scores: dict[str, dict[str, Any]] = {}
    for name, domain in domains.items():
        split = {"test": domain.test, "train": domain.train, "all": domain.whole}[part]
        probabilities.append(in_batches(lambda images: model(images)["probabilities"], split.images))
        labels.append(classes[split.labels])
        scores[name] = measures(probabilities[-1], labels[-1])
        scores[name]["trained_on"] = name in model.description.data["domains"]
    every, truth = torch.cat(probabilities), torch.cat(labels)
    confusion = torch.zeros(len(model.classes), len(model.classes), dtype=torch.int64)
    confusion.index_put_((truth, every.argmax(1)), torch.tensor(1), accumulate=True)
    correct = 100 * confusion.diagonal()
    results = {
        "model": str(folder),
        "data": source.name,
        "part": part,
        "domains": scores,
        TOGETHER: measures(every, truth),
        "recall": _by_class(model.classes, correct / confusion.sum(1)),
        "precision": _by_class(model.classes, correct / confusion.sum(0)),
        "confusion": confusion.tolist(),
    }
    if output is not None:
        with writing(output, "another place"):
            write_json(output, results)
    _show(results, model.classes)
    return results


def _by_class(names: Sequence[str], shares: Tensor) -> dict[str, float | None]:
    """Return ``shares [K]`` by class; ``None`` for a class without images."""
    shares_by_name: dict[str, float | None] = {}
    for name, share in zip(names, shares.tolist(), strict=True):
        shares_by_name[name] = share
        if math.isnan(share):
            shares_by_name[name] = None
    return shares_by_name


def _show(results: Mapping[str, Any], names: Sequence[str]) -> None:
    scores = dict(results["domains"])
    if len(scores) > 1:
        scores[TOGETHER] = results[TOGETHER]
    rows: list[list[str]] = []
    for name, row in scores.items():
        head = name
        if not row.get("trained_on", True):
            head = f"{name} (not trained on)"
        cells = [head, str(row["count"])]
        for key in SHOWN:
            digits = {**MEASURES, **CONFIDENCE_MEASURES}.get(key, MEASURES["accuracy"]).digits
            cells.append(number_text(row[key], digits))
        rows.append(cells)
    title = f"{results['model']} on {results['data']}: {results['part']} images, %; "
    title += "Brier score from 0 to 2, log loss in nats"
    Sheet(title, ["domain", "images", *SHOWN.values()], rows).show()
    rows = []
    for name, counts in zip(names, results["confusion"], strict=True):
        cells = [name, *[str(count or ".") for count in counts]]
        for key in ("recall", "precision"):
            cells.append(number_text(results[key][name], 1))
        rows.append(cells)
    Sheet("rows: true class, columns: predicted class", ["class", *names, "recall", "precision"], rows).show()
