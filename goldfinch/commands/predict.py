"""``goldfinch evaluate MODEL IMAGE...``: the class of images, by an exported model."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from common.data.image_files import is_image
from common.errors import ConfigError, DataError, writing
from common.exports.model import TrainedModel, load_model
from common.storage import write_text
from common.text import printable, quantity
from goldfinch.exports.formats import finite_outputs
from goldfinch.folders import files_below

MAX_SHOWN = 40
"""Lines that are printed; a file has all."""


def predict(folder: Path, places: Sequence[Path], output: Path | None = None) -> int:
    """Print the class of every image and write the chosen files; return 1 if an image has no result, else 0.

    Args:
        folder: an exported model.
        places: image files, or folders of them.
        output: a .csv or .json file for the results.

    Raises:
        ConfigError: there are no images, or the output is of another kind.
        CheckpointError: the model is damaged.
    """
    if output is not None and output.suffix.lower() not in (".csv", ".json"):
        raise ConfigError(f"--output {output}: name a .csv or a .json file")
    model, files = load_model(folder), _files(places)
    rows: list[dict[str, Any]] = []
    remarks: list[Any] = []
    console = Console(stderr=True)
    for path in track(files, "images", console=console, transient=True, disable=not console.is_terminal):
        try:
            rows.append(_row(model, path, remarks))
        except DataError as error:
            console.print(f"skipped: {printable(str(error))}", markup=False, highlight=False, soft_wrap=True)
    for row in rows[:MAX_SHOWN]:
        print(_line(row))
    if len(rows) > MAX_SHOWN:
        advice = ": --output FILE.csv holds all"
        if output:
            advice = ""
        print(f"... and {len(rows) - MAX_SHOWN} more{advice}")
    if output is not None:
        text = _csv(rows)
        if output.suffix.lower() == ".json":
            text = json.dumps(rows, indent=2) + "\n"
        with writing(output, "another place"):
            write_text(output, text)
        print(f"wrote {output}: {quantity(len(rows), 'image')}")
    if doubts := model.doubts(remarks):
        console.print(f"warning: {printable(doubts)}", markup=False, highlight=False, soft_wrap=True)
    return int(len(rows) < len(files))


def _files(places: Sequence[Path]) -> list[Path]:
    files: dict[Path, None] = {}
    for place in places:
        if not place.exists():
            raise ConfigError(f"{place} does not exist")
        if not place.is_dir():
            files[place] = None
            continue
        inside = list(filter(is_image, files_below(place)))
        if not inside:
            raise ConfigError(f"{place} holds no images")
        files |= dict.fromkeys(inside)
    return list(files)


@torch.no_grad()
def _row(model: TrainedModel, path: Path, remarks: list[Any]) -> dict[str, Any]:
    """Return the result for one image, and add to ``remarks`` what reading made of it.

    Raises:
        DataError: the image cannot be read, or the model's outputs for it are not finite.
    """
    outputs = model(model.read(path, remarks=remarks)[None])
    probabilities = finite_outputs(outputs["probabilities"], str(path))[0]
    chosen = int(probabilities.argmax())
    row = {"image": str(path), "class": model.classes[chosen], "probability": round(float(probabilities[chosen]), 6)}
    if "distances" in outputs:
        distance, nearest = outputs["distances"][0].min(0)
        row |= {"nearest_prototype": model.classes[int(nearest)], "distance": round(float(distance), 6)}
        threshold = (model.description.prototypes or {}).get("threshold")
        if threshold is not None:
            row["none_of_these"] = float(distance) > threshold
    row["probabilities"] = dict(zip(model.classes, [round(value, 6) for value in probabilities.tolist()], strict=True))
    return row


def _line(row: Mapping[str, Any]) -> str:
    """Return a prediction for the terminal. Names of files and classes may be a stranger's: they are escaped."""
    line = f"{printable(row['image'])}  {printable(row['class'])}  {row['probability']:.1%}"
    if "distance" in row:
        line += f"  (nearest prototype: {printable(row['nearest_prototype'])}, at {row['distance']:.3f})"
    if row.get("none_of_these"):
        line += "  like none of the classes"
    return line


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = ["image", "class", "probability"]
    if rows:
        columns = list(rows[0])
        columns.remove("probabilities")
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:  # a spreadsheet takes a cell that begins with = or @ for a formula
        writer.writerow({name: printable(value) if isinstance(value, str) else value for name, value in row.items()})
    return stream.getvalue()
