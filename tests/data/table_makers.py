"""Small tables of images for the tests of ``data=table``, as people write them."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
from data_makers import write_image
from PIL import Image

CLASSES = ("cat", "dog")
ROWS = [(10, 0), (20, 1), (30, 0), (40, 1), (50, 0), (60, 1)]
"""The grey level and the label of six images."""

datasets.disable_progress_bars()


def encoded(level: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (12, 8), (level, level, level)).save(stream, "PNG")
    return stream.getvalue()


def make_set(
    rows: Sequence[tuple[int, int]], classes: Sequence[str] = CLASSES, **columns: Sequence[Any]
) -> datasets.Dataset:
    """A set with an image and a label for each row, and further columns."""
    features: dict[str, Any] = {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(classes))}
    cells: dict[str, Any] = {
        "image": [{"bytes": encoded(level), "path": None} for level, _ in rows],
        "label": [label for _, label in rows],
    }
    for name, values in columns.items():
        cells[name] = list(values)
        features[name] = datasets.Value("string")
    return datasets.Dataset.from_dict(cells, features=datasets.Features(features))


def write_set(folder: Path, rows: Sequence[tuple[int, int]] = ROWS, **columns: Any) -> Path:
    make_set(rows, **columns).save_to_disk(folder)
    return folder


def write_images(folder: Path, images: Sequence[bytes]) -> Path:
    """A saved set of files as they are, all of one label."""
    cells = {"image": [{"bytes": image, "path": None} for image in images], "label": [0] * len(images)}
    datasets.Dataset.from_dict(cells, features=make_set(ROWS).features).save_to_disk(folder)
    return folder


def write_splits(folder: Path, **splits: Sequence[tuple[int, int]]) -> Path:
    datasets.DatasetDict({name: make_set(rows) for name, rows in splits.items()}).save_to_disk(folder)
    return folder


def write_parquet(place: Path, columns: Mapping[str, Sequence[Any]]) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict(dict(columns)).to_parquet(place)
    return place


def write_list(place: Path, text: str, images: int = 6) -> Path:
    """A CSV file, and flat images 0.png to 5.png in ``pictures`` beside it."""
    for number in range(images):
        write_image(place.parent / "pictures" / f"{number}.png", number)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text, encoding="utf-8")
    return place
