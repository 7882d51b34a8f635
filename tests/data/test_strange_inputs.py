"""Folders and tables as chance makes them: read right, or counted, or refused with a remedy that works; never other."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from remedies import Attempt, Case, Image, attempt, bare, digest, fits, follow
from test_remedies import numbers, picture, spoilt, write

EACH = 3
SUITE, MANY = 150, 2500
"""Cases of folders, and as many of tables: the same in every run of the tests, and new ones once in a while."""

Build = Callable[[Path, dict[str, Any]], tuple[Case, int]]

SITES = st.lists(
    st.sampled_from(["a", "b", "site 1", "__x", "cache", "Z\u00fcrich", "-c", "worst", "train", "p=1", "it's", "test"]),
    min_size=2,
    max_size=3,
    unique=True,
).filter(lambda names: not {"train", "test"} <= set(names))  # which are splits; others beside them are counted
CLASSES = st.lists(
    st.sampled_from(["cat", "dog", "_bg", "__background__", "cache", "@home", "-1", "0", "val", "a,b", "k\u00e4fer"]),
    min_size=2, max_size=3, unique=True,
)  # fmt: skip
PATTERNS = st.sampled_from([
    "{site}/{label}", "{site}/{label}", "{site}/{part}/{label}", "{site}/{part}_set/{label}", "{part}/{site}/{label}",
    "{site}/{label}/{part}", "{site}/only/{label}", "all/{site}/{label}", "{site}/fold{number}/{label}",
    "{site}/{label}/p{number}", "{site}/train/{label}", "{label}", "{part}/{label}", "a/b/{site}/{label}",
    "{site}/{label}/x/y{number}",
])  # fmt: skip
SUFFIXES = st.sampled_from([".png", ".png", ".PNG", ".tif", "", ".img", ".jfif"])
VALUES = st.sampled_from(["bytes", "bytes", "bytes", "12 bits", "14 bits", "warm", "shares", "no data", "NaN"])
BESIDE = st.lists(
    st.sampled_from(["empty", "notes", "hidden", "system", "hidden folder", "loose", "avif", "deep", "list", "broken"]),
    max_size=2, unique=True,
)  # fmt: skip
MAKERS = {
    "bytes": picture,
    "12 bits": numbers(0, 4095, np.uint16),
    "14 bits": numbers(20, 16383, np.uint16),
    "warm": numbers(51241, 52181, np.uint16),
    "shares": numbers(0, 1, np.float32),
    "no data": spoilt(numbers(0, 200, np.float32), -9999, 40),
    "NaN": spoilt(numbers(0, 255, np.float32), np.nan, 3),
}


def beside(root: Path, what: str, first: Path) -> int:
    """Write what else there is, and return how many more images there are."""
    if what == "empty":
        (root / "lost+found").mkdir(exist_ok=True)
        (root / "nothing").mkdir(exist_ok=True)
    elif what == "notes":
        (first.parent / "notes.txt").write_text("words")
        (root / "README.md").write_text("words")
    elif what == "list":
        (root / "train_list.txt").write_text("a/cat/0.png 0\n")
    elif what == "avif":
        (first.parent / "x.jpg").write_bytes(b"\0\0\0\x1cftypavif\0\0\0\0avifmif1" + bytes(99))
    elif what == "broken":
        (first.parent / "y.png").write_bytes(b"\x89PNG\r\n\x1a\nno")
    else:
        places = {
            "hidden": first.parent / ".h.png",
            "system": first.parent / "@eaDir" / "t.png",
            "hidden folder": root / ".trash" / "t.png",
            "loose": root / "loose.png",
            "deep": first.parent / "more" / "d.png",
        }
        write(places[what], picture(9000 + len(what)))
        return 1
    return 0


def build_folder(root: Path, spec: dict[str, Any]) -> tuple[Case, int]:
    """Write a folder, and return it with the number of its images."""
    values = spec["values"] if spec["suffix"] in (".png", ".tif") else "bytes"
    suffix = ".tif" if values in ("shares", "no data", "NaN") else spec["suffix"]
    parts = ["train", "test"] if "{part}" in spec["pattern"] else [""]
    sites = spec["sites"] if "{site}" in spec["pattern"] else ["data"]
    truth: set[Image] = set()
    files: list[Path] = []
    for site in sites:
        for label in spec["classes"]:
            for part in parts:
                for number in range(EACH):
                    place = spec["pattern"].format(site=site, label=label, part=part, number=number)
                    files.append(root / place / f"{number}{suffix}")
                    content = digest(write(files[-1], MAKERS[values](len(files))))
                    if values == "NaN":  # a remedy writes numbers in its place
                        content = f"written again {len(files)}"
                    truth.add(Image(content, site, label, part if "{part}" in spec["pattern"] else ""))
    more = sum(beside(root, what, files[0]) for what in spec["beside"])
    return Case(root, ["data=folder", f"data.root={root}"], frozenset(truth)), len(truth) + more


FOLDERS = st.fixed_dictionaries({
    "sites": SITES, "classes": CLASSES, "pattern": PATTERNS, "suffix": SUFFIXES, "values": VALUES, "beside": BESIDE,
})  # fmt: skip

TABLES = st.fixed_dictionaries({
    "separator": st.sampled_from([",", ",", ";", "\t", "|", " "]),
    "header": st.booleans(),
    "image": st.sampled_from(["path", "image", "file", "photo", "x", "pfad"]),
    "label": st.sampled_from(["label", "class", "species", "diagnosis", "ziel"]),
    "labels": st.sampled_from([("cat", "dog"), ("0", "1"), ("-1", "+1"), ("NA", "null"), ("yes", "no"), ("a b", "c")]),
    "site": st.sampled_from(["", "", "domain", "institution", "scanner", "hospital_id", "klinik"]),
    "sites": st.sampled_from([("A", "B"), ("1", "2"), ("north wing", "south"), ("10.5", "11")]),
    "split": st.sampled_from(["", "", "split", "data_split", "subset", "heldout", "is_test", "fold", "usage"]),
    "words": st.sampled_from([("train", "test"), ("Training", "TEST"), ("trn", "val"), ("0", "1"), ("no", "yes")]),
    "more": st.lists(st.sampled_from(["id", "sex", "age", "mask", "view", "note"]), max_size=2, unique=True),
    "above": st.sampled_from(["", "", "", "# made by hand\n", "sep=SEP\n", "\n"]),
    "encoding": st.sampled_from(["utf-8", "utf-8", "utf-8-sig", "latin-1", "utf-16"]),
    "place": st.sampled_from(["t.csv", "t.csv", "lists/t.csv", "lists/v1/t.csv"]),
    "paths": st.sampled_from(["beside", "beside", "above", "windows"]),
    "suffix": st.sampled_from([".png", ".png", ".tif", ""]),
})  # fmt: skip


def build_table(root: Path, spec: dict[str, Any]) -> tuple[Case, int]:
    """Write a table with its images, and return it with the number of its images."""
    count = 24
    columns = [spec["image"], spec["label"], *([spec["site"]] if spec["site"] else [])]
    columns += [*([spec["split"]] if spec["split"] else []), *spec["more"]]
    up = "../" * spec["place"].count("/") if spec["paths"] != "above" else ""
    truth: set[Image] = set()
    rows = [columns] if spec["header"] else []
    for n in range(count):
        place = f"images/{n}{spec['suffix']}"
        content = digest(write(root / place, picture(n)))
        label = spec["labels"][n % 2]
        site, part = spec["sites"][n // 12], spec["words"][n % 3 == 0]
        cells = {"id": f"p{n}", "sex": "mf"[n // 2 % 2], "age": str(20 + n % 3), "mask": f"masks/{n}.png"}
        cells |= {"view": ("front", "side", "back")[n // 3 % 3], "note": "" if n % 5 else "x y"}
        cells |= {spec["site"]: site, spec["split"]: part, spec["label"]: label}
        cells[spec["image"]] = up + (place.replace("/", "\\") if spec["paths"] == "windows" and not up else place)
        rows.append([cells[name] for name in columns])
        truth.add(Image(content, site if spec["site"] else "", label, ""))
    separator = spec["separator"]
    if any(separator in cell for row in rows for cell in row):
        rows = [[f'"{cell}"' for cell in row] for row in rows]
    text = spec["above"].replace("SEP", separator) + "\n".join(separator.join(row) for row in rows) + "\n"
    path = root / spec["place"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode(spec["encoding"]))
    return Case(root, ["data=table", f"data.path={path}"], frozenset(truth)), count


def is_right(result: Attempt, case: Case) -> bool:
    """Return whether a reading has every image in its class, and in its domain if the table has one."""
    read = result.images
    if any(image.content.startswith("written again") for image in case.truth):
        return Counter((bare(each.domain), bare(each.label)) for each in read) >= Counter(
            (bare(each.domain), bare(each.label)) for each in case.truth
        )
    if all(image.domain for image in case.truth):
        return fits(read, case.truth)
    return {(each.content, each.label) for each in read} >= {(each.content, each.label) for each in case.truth}


def check_one(case: Case, total: int) -> None:
    """Check the property of one case."""
    first = attempt(case.settings)
    if not first.error:
        assert len(first.images) + first.counted >= total, ("images are lost in silence", first.said)
        assert is_right(first, case) or said_otherwise(first), ("read otherwise in silence", first.said)
        return
    found = follow(case, lambda reading: is_right(reading, case))
    assert any(is_right(result, case) for result in found), ("no remedy leads to what is meant", first.error)


def said_otherwise(result: Attempt) -> bool:
    """Return whether it is said what was taken for what, so that a wrong guess is seen."""
    return "columns are taken as" in result.said or "if it is the other way round" in result.said


def failures(build: Build, specs: st.SearchStrategy[dict[str, Any]], many: int = 0) -> list[str]:
    """Return what came of the cases that fail, all of them, as they were made: making them smaller takes minutes.

    Args:
        build: writes a case.
        specs: the cases.
        many: how many new ones to try; 0: those that every run of the tests tries.
    """
    found: list[str] = []

    @settings(max_examples=many or SUITE, derandomize=not many, phases=[Phase.generate])
    @given(specs)
    def try_each(spec: dict[str, Any]) -> None:
        try:
            with tempfile.TemporaryDirectory() as folder:
                check_one(*build(Path(folder) / "place" / "data", spec))
        except Exception as error:
            found.append(f"{spec}\n{type(error).__name__}: {error}")

    try_each()
    return found


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_strange_folders() -> None:
    assert failures(build_folder, FOLDERS) == []


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_strange_tables() -> None:
    assert failures(build_table, TABLES) == []


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_strange_folders() -> None:
    assert failures(build_folder, FOLDERS, MANY) == []


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_strange_tables() -> None:
    assert failures(build_table, TABLES, MANY) == []
