"""``goldfinch evaluate``: how good an exported model is on any domain, also one that no client had."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from rich import box
from rich.table import Table
from torch import Tensor

from common.config import build, compose_config
from common.data.domain import Domain
from common.errors import ConfigError, nearest, writing
from common.exports.description import Description
from common.exports.formats import in_batches
from common.exports.model import load_model
from common.storage.files import write_json
from server.results.table import print_whole

Part = Literal["test", "train", "all"]
PARTS = ("test", "train", "all")
BINS = 15
"""Equal bins of confidence of the calibration error (Guo et al., ICML 2017)."""


def measures(probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    """How good ``probabilities [N, K]`` are for ``labels [N]``, N >= 1.

    ``count``; in per cent ``accuracy``, mean ``confidence`` in the predicted class, and the expected
    ``calibration_error``: how far these two are apart, bin by bin of confidence.
    """
    confidence, predicted = probabilities.double().max(1)
    right = (predicted == labels).double()
    place = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add(0, place, confidence - right).abs()
    sums = {"accuracy": right.sum(), "confidence": confidence.sum(), "calibration_error": gaps.sum()}
    return {"count": len(labels), **{name: 100 * float(value) / len(labels) for name, value in sums.items()}}


def domains_of(overrides: Sequence[str], description: Description) -> tuple[Tensor, dict[str, Domain]]:
    """The domains that settings of a data set name, in the model's image size, and the model's class of each label.

    Raises:
        ConfigError: a setting is not one of ``data``; or a class is unknown to the model.
        DataError: the data are not there.
    """
    other = next((item for item in overrides if item.split("=")[0].split(".")[0] != "data"), None)
    if other:
        raise ConfigError(f"{other}: only the data can be chosen: data=folder data.root=DIR data.domains=[a,b]")
    node = {**compose_config(overrides)["data"], "image_size": description.image_size}
    if "resize" in node:
        node["resize"] = description.resize
    source = build(node, "data")
    for name in source.class_names:
        if name not in description.classes:
            raise ConfigError(f"the model knows no class {name!r}; {nearest(name, description.classes)}")
    classes = torch.tensor([description.classes.index(name) for name in source.class_names])
    return classes, {name: source.load(name) for name in source.domains}


def evaluate(folder: Path, overrides: Sequence[str], part: Part = "test", output: Path | None = None) -> dict[str, Any]:
    """Print how good the exported model in ``folder`` is on each domain; what was printed, with the confusion counts.

    Arguments are those of ``goldfinch evaluate``.
    """
    model = load_model(folder)
    classes, domains = domains_of(overrides, model.description)
    said, labels = {}, {}
    for name, domain in domains.items():
        split = {"test": domain.test, "train": domain.train, "all": domain.whole}[part]
        said[name] = in_batches(lambda images: model(images)["probabilities"], split.images)
        labels[name] = classes[split.labels]
    every, truth = torch.cat(list(said.values())), torch.cat(list(labels.values()))
    confusion = torch.zeros(len(model.classes), len(model.classes), dtype=torch.int64)
    confusion.index_put_((truth, every.argmax(1)), torch.tensor(1), accumulate=True)
    right, known = confusion.diagonal(), model.description.data["domains"]
    shares = [[100 * value for value in (right / confusion.sum(axis)).tolist()] for axis in (1, 0)]
    found = {
        "model": str(folder),
        "part": part,
        "domains": {name: {**measures(said[name], labels[name]), "trained_on": name in known} for name in domains},
        "together": measures(every, truth),
        "recall": _by_class(model.classes, shares[0]),
        "precision": _by_class(model.classes, shares[1]),
        "confusion": confusion.tolist(),
    }
    if output is not None:
        with writing(output, "another place"):
            write_json(output, found)
    _show(found, model.classes)
    return found


def _by_class(names: Sequence[str], shares: Sequence[float]) -> dict[str, float | None]:
    """Shares by class; ``None`` where there was nothing to divide by."""
    return {name: None if math.isnan(share) else share for name, share in zip(names, shares, strict=True)}


def _show(found: Mapping[str, Any], names: Sequence[str]) -> None:
    title = f"{found['model']}: {found['part']} images, %"
    scores = Table("domain", title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("images", "accuracy", "confidence", "calibration error"):
        scores.add_column(column, justify="right", no_wrap=True)
    rows = {**found["domains"], **({"together": found["together"]} if len(found["domains"]) > 1 else {})}
    for name, row in rows.items():
        new = "" if row.get("trained_on", True) else " (no client had it)"
        values = (f"{row[key]:.2f}" for key in ("accuracy", "confidence", "calibration_error"))
        scores.add_row(name + new, str(row["count"]), *values)
    confusion = Table("class", title="rows: true class, columns: said", title_justify="left", box=box.SIMPLE_HEAD)
    for name in (*names, "recall", "precision"):
        confusion.add_column(name, justify="right", no_wrap=True)
    for name, counts in zip(names, found["confusion"], strict=True):
        shares = ["-" if found[key][name] is None else f"{found[key][name]:.1f}" for key in ("recall", "precision")]
        confusion.add_row(name, *(str(value) if value else "." for value in counts), *shares)
    for table in (scores, confusion):
        print_whole(table)
