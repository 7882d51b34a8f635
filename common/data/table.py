"""Tables of the user's own images: CSV, Parquet, sets saved by Hugging Face's ``datasets``, and sets on its Hub."""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from common.config import check, checked
from common.data.cache import cached
from common.data.domain import Domain, ImageSize
from common.data.image_files import decode_each, kept_images, states_of, without_duplicates
from common.data.image_folders import Files, decoded_domain, read_images
from common.data.layouts import MAX_SAMPLED, directories
from common.data.names import DOMAIN_NAMES, NO, SUFFIXES, YES, can_be_domain, coinciding, name_key, split_of
from common.data.own_images import OwnImages
from common.data.table_files import (
    HUB_NAME,
    MAX_ABOVE,
    MAX_CELL,
    PARQUET,
    SEPARATED,
    Columns,
    Row,
    is_saved,
    is_table,
    sites_in,
)
from common.data.table_process import OpenTable, encoded_images, open_table
from common.errors import DataError, nearest, some_of
from common.overrides import written_override
from common.regular_files import check_within
from common.text import quantity, shell_line, warn_once

_VERSION = 3  # raise when decoding changes

ELSEWHERE = re.compile(r"[A-Za-z]:[\\/]|\\\\|[A-Za-z][A-Za-z0-9+.-]*://")
"""What a drive or a share of Windows, or an address, begins with."""

OF_DOMAINS = {*SEPARATED, *PARQUET, *SUFFIXES} - {".txt"}
"""Suffixes of tables and images, by which a folder seems to be meant as a domain; a text may be a note."""

MAX_OFF = 0.1
"""How far whole groups may take the share of train images from ``train_fraction`` without a warning."""


@checked
class Table(OwnImages):
    """A table with a row for each image: ``<root>/<path>``, with a column of domains, or ``<root>/<domain>/<path>``.

    A CSV file, a Parquet file, a folder of Parquet files, an ImageFolder with ``metadata.csv`` or ``metadata.parquet``,
    a folder of ``save_to_disk``, or a name of the Hugging Face Hub. Its splits, or a column of splits, say which images
    are train and test; without, the leading ``train_fraction`` of each class is train. A table of one domain needs no
    column of domains.

    Attributes:
        domains: names of the domains; empty: all of the table, or all folders under ``root`` that hold one.
        path: the table, below ``root``; without a root, a path or a name of the Hub. Empty: the folder itself.
        image: column of the images, or of their paths, which are relative to the table's folder; empty: the one that
            holds such cells.
        label: column of the classes; likewise.
        domain: column of the domains; likewise, or ``none``.
        split: column of the splits; likewise, or ``none``. ``COLUMN:CELL`` scores the rows with that cell.
        group: column of what an image belongs to, such as its patient; empty: there is none. All images of a group
            are in one split: without a column of splits, whole groups are train, to about ``train_fraction`` of the
            images (:func:`leading_groups`). ``privacy.unit=group`` protects all images of a group together.
    """

    name: ClassVar[str] = "table"

    image_size: ImageSize = 32
    path: str = ""
    image: str = ""
    label: str = ""
    domain: str = ""
    split: str = ""
    group: str = ""

    def __post_init__(self) -> None:
        for key, value in placed({"root": self.root, "path": self.path}).items():
            object.__setattr__(self, key, value)
        texts = (self.path, self.image, self.label, self.domain, self.split, self.group)
        check(all(len(text) <= MAX_CELL and "\0" not in text for text in texts), "path and columns: too long, or a NUL")
        inside = not Path(self.path).is_absolute() and ".." not in Path(self.path).parts
        check(self.root is None or inside, f"path: {self.path!r} must lie below data.root={self.root}")
        if not self.domains:
            object.__setattr__(self, "domains", self._found_domains())
        super().__post_init__()

    def _found_domains(self) -> tuple[str, ...]:
        """Return the domains of a table, or the folders under the root that hold one."""
        if self._is_shared():
            if sites := sites_in(Path(self._whole())):
                return sites
            table = self._open(self._whole(), shared=True)
            if not table.columns.domain:
                return (Path(self.path or self.root or "").stem,)
            return tuple(sorted(_domains_of(table)))
        root = Path(self.root or "")
        found: list[str] = []
        if self.root and root.is_dir():
            found = [each.name for each in sorted(root.iterdir()) if is_table(each / self.path)]
            others = [each.name for each in directories(root) if each.name not in found and _holds_data(each)]
            if found and others:
                wanted = self.path or "table"
                warn_once(
                    f"table: {root}: folders that hold no {wanted} are no domains: {some_of(others, 5)}; if one is "
                    f"meant to be, put its {wanted} there"
                )
        if not found:
            raise ValueError(f"{self._missing()}, or name the domains (data.domains=[a,b])")
        return tuple(found)

    def _missing(self) -> str:
        problem = "data.path is not set"
        if self.root or self.path:
            problem = f"data.path: {'/'.join(filter(None, (self.root, self.path)))} is no table"
        return (
            f"{problem}; set it to a CSV or Parquet file, a folder with metadata.csv, one of "
            "save_to_disk, or a name of the Hugging Face Hub such as flwrlabs/pacs. Folders of classes are data=folder"
        )

    def layout(self) -> str:
        """See :meth:`DataSource.layout`."""
        return (
            "Put a table there with the columns path, label and, optionally, domain and split, and set data.path to it."
        )

    # ---- places ------------------------------------------------------------------------------------------------------

    def _whole(self) -> Path | str:
        """Return the place of the table that holds all domains: a text is a name of the Hub."""
        if self.root is not None:
            return Path(self.root).expanduser().absolute() / self.path
        if HUB_NAME.fullmatch(self.path) and not Path(self.path).exists():
            return self.path
        return Path(self.path).absolute()

    def _is_shared(self) -> bool:
        """Return whether there is a table at the root, which may hold several domains."""
        whole = self._whole()
        if isinstance(whole, str):
            return True
        return bool(self.path or self.root) and is_table(whole)

    def _open(self, place: Path | str, domains: tuple[str, ...] = (), *, shared: bool) -> OpenTable:
        asked = Columns(self.image, self.label, self.domain, self.split, self.group)
        site = None
        if isinstance(place, Path):
            site = Path(self.root or place.parent)
        return open_table(place, asked, site, domains or self.domains, shared=shared)

    def _table_of(self, domain: str) -> OpenTable:
        """Return the table of a domain: its own, or that of all."""
        own = Path(self.root or "") / domain / self.path
        if self.root and is_table(own):
            return self._open(own, shared=False)
        if not self._is_shared():
            raise DataError(f"table: domain {domain!r}: {self._missing()}")
        if domain in sites_in(Path(self._whole())):
            return self._open(self._whole(), (domain,), shared=False)
        return self._open(self._whole(), shared=True)

    def read_as(self, domain: str, root: str | None = None) -> dict[str, object]:
        """See :meth:`DataSource.read_as`; columns that are not named are those that the table decides."""
        columns = self._at(self._root(root))._table_of(domain).columns
        split = columns.split
        if columns.scored:
            split += f":{columns.scored}"
        chosen = {"image": columns.image, "label": columns.label, "domain": columns.domain, "split": split}
        chosen["group"] = columns.group
        return {**super().read_as(domain, root), **chosen}

    @property
    def grouped(self) -> bool:
        """See :attr:`DataSource.grouped`."""
        return bool(self.group)

    def find_files(self, domain: str) -> None:
        """See :meth:`DataSource.find_files`. Paths of images are looked up, and no image is decoded."""
        source = self
        if not self.classes:  # whatever is missing of other domains
            source = replace(self, classes=self._classes_of([domain]))
        images = source._images_of(domain, own=False)
        self.check_parts(domain, images.table.name, images.train, images.test)
        if not images.table.encoded:
            images.places.check()
            states_of(images.places.found, Path(self.root or ""))

    def _root(self, root: str | None = None) -> str | None:
        """Return the root that was given. Tables are no part of the folder of the public data sets."""
        chosen = root or self.root
        if not chosen:
            return None
        return str(Path(chosen).expanduser().absolute())

    # ---- classes and rows --------------------------------------------------------------------------------------------

    @cached_property
    def class_names(self) -> tuple[str, ...]:
        """``classes``, or the sorted union of the labels of all domains.

        Raises:
            DataError: ``classes`` is empty, and a domain has no table.
        """
        return self.classes or self._classes_of(self.domains)

    def _classes_of(self, domains: Sequence[str]) -> tuple[str, ...]:
        """Return the sorted union of the labels of ``domains``."""
        found: dict[str, str] = {}
        for domain in domains:
            table = self._table_of(domain)
            rows = self._rows_of(table, domain, own=False)  # a table of one device alone does not tell of all classes
            for name in table.names or [row.label for row in rows]:
                found.setdefault(name, table.name)
        return self.sorted_classes(found)

    def _rows_of(self, table: OpenTable, domain: str, *, own: bool) -> list[Row]:
        """Return the rows of a domain."""
        if not table.columns.domain:
            several = len(self.domains) > 1 and not own and domain not in sites_in(Path(self._whole()))
            if several and self._is_shared():
                raise DataError(
                    f"table: {table.name} has no column of domains, so all of {', '.join(self.domains)} would be the "
                    "same images: choose one by data.domain=, or give each domain a table of its own, "
                    f"{self.root}/<domain>/{self.path} ({_at(Path(table.name), Path(self.root or ''))}). On devices, "
                    "each with its own images there, name the classes, so that all agree on the labels: "
                    "data.classes=[a,b]"
                )
            return list(table.rows)
        names = _domains_of(table)
        if pair := coinciding(names):
            raise DataError(
                f"table: {table.name}: the domains {pair[0]!r} and {pair[1]!r} are two spellings of one name"
            )
        found = [row for row in table.rows if row.domain == domain]
        if not found:
            raise DataError(
                f"table: {table.name} has no rows of {domain!r} in {table.columns.domain!r}; {nearest(domain, names)}. "
                "If another column has the domains, choose it by data.domain="
            )
        return found

    def _read(self, domain: str) -> Domain:
        return self._read_from(domain, own=False)

    def _read_own(self, domain: str) -> Domain:
        return self._read_from(domain, own=True)

    def _read_from(self, domain: str, *, own: bool) -> Domain:
        images = self._images_of(domain, own=own)
        found = self._read_parts(domain, images)
        if not images.table.columns.group:
            return found
        groups = images.groups
        train_groups = tuple(groups[path] for path in found.train_files)
        return replace(found, train_groups=train_groups, test_groups=tuple(groups[path] for path in found.test_files))

    def _images_of(self, domain: str, *, own: bool) -> "ListedImages":
        """Return the images of a domain, which its table lists."""
        table = self._table_of(domain)
        if own and not table.columns.domain and self._is_shared():
            self.check_own(Path(self.root or ""), domain)
        places = Places(table, Path(self.root or ""))
        every: dict[str, Files] = {}
        groups: dict[Path, str] = {}
        listed: Counter[Path] = Counter()
        unmarked = _unmarked(table)
        rows = self._rows_of(table, domain, own=own)
        if table.columns.group:
            _check_group_names(table, rows)
        for row in rows:
            if not row.label.strip():
                raise DataError(f"table: {table.name}, {row.where}: no label; give it one, or take the row out")
            item = places.of(row), self.label_of(row.label, table.name)
            every.setdefault(_part(table, row) or unmarked, []).append(item)
            listed[item[0]] += 1
            group = row.group.strip()
            if groups.setdefault(item[0], group) != group:
                raise DataError(
                    f"table: {table.name}, {row.where}: {item[0]} is of the group {groups[item[0]]!r} and of "
                    f"{group!r} in {table.columns.group!r}; give all of its rows one"
                )
        _check_listed(domain, table, every, listed)
        train, test = self.divided(domain, table.name, every)
        if table.columns.group:
            if len(every) == 1:
                train, test = leading_groups(sorted([*train, *test]), groups, self.train_fraction)
                self._warn_of_groups(table, domain, train, test)
            _check_groups(table, groups, train, test)
        return ListedImages(table, places, train, test, groups)

    def _warn_of_groups(self, table: OpenTable, domain: str, train: Files, test: Files) -> None:
        """Log what whole groups make of a domain's split: a share far from ``train_fraction``, or a class on one side.

        A class of one image is on one side in any case.
        """
        found: list[str] = []
        share = len(train) / len([*train, *test])
        if train and test and abs(share - self.train_fraction) > MAX_OFF:
            found.append(f"{share:.0%} of the images are train, and data.train_fraction={self.train_fraction:g}")
        images = Counter(label for _, label in {*train, *test})
        for part, files in (("train", train), ("test", test)):
            missing = sorted(set(images) - {label for _, label in files})
            if names := [self.class_names[label] for label in missing if files and images[label] > 1]:
                found.append(f"no {part} image is of {some_of(names, 5)}")
        if found:
            warn_once(
                f"table: {table.name}: groups of {table.columns.group!r} stay whole, so of {domain} "
                f"{'; '.join(found)}. To divide them yourself, add a column with train or test in each row, the same "
                "in all rows of a group, and choose it by data.split=COLUMN"
            )

    def _read_parts(self, domain: str, images: "ListedImages") -> Domain:
        """Return the domain of the images of its train and its test split."""
        table, train, test = images.table, images.train, images.test
        if table.encoded:
            return self._decoded(domain, table, train, test)
        base = Path(self.root or "")
        images.places.check()
        if self.duplicates == "drop":
            test = without_duplicates(test, train, base)
        self.check_parts(domain, table.name, train, test)
        return read_images(domain, train, test, self.image_size, base, self.reading)

    def _decoded(self, domain: str, table: OpenTable, train: Files, test: Files) -> Domain:
        """Return a domain whose images are in its table."""
        if self.duplicates == "drop":
            digests = encoded_images(table, [_number(path) for path, _ in (*train, *test)]).digests
            known = {(digests[_number(path)], label) for path, label in train}
            test = [(path, label) for path, label in test if (digests[_number(path)], label) not in known]
        self.check_parts(domain, table.name, train, test)
        numbers = [_number(path) for path, _ in (*train, *test)]
        names = [f"{table.name}, {table.rows[number].where}" for number in numbers]
        rows = hashlib.sha256(repr(numbers).encode()).hexdigest()
        key = [
            _VERSION,
            "table",
            self.image_size,
            repr(self.reading),
            table.name,
            table.columns.image,
            rows,
            *table.key,
        ]

        def build() -> dict[str, Any]:
            return decode_each(encoded_images(table, numbers), names, self.image_size, self.reading)

        return decoded_domain(domain, train, test, *kept_images(cached("table-images", key, build), names))


def _holds_data(folder: Path) -> bool:
    """Return whether a folder is a saved set, or holds images or tables, directly or deeper, by their suffixes."""
    inside = islice(folder.rglob("*"), MAX_SAMPLED)
    return is_saved(folder) or any(path.suffix.lower() in OF_DOMAINS for path in inside)


def _domains_of(table: OpenTable) -> list[str]:
    """Return the names in a table's column of domains, each once.

    Raises:
        DataError: a row has none, so that no domain would have its image.
    """
    names: dict[str, None] = {}
    for row in table.rows:
        if not row.domain.strip():
            raise DataError(
                f"table: {table.name}, {row.where}: no domain in {table.columns.domain!r}; give it one, or take the "
                "row out. If the column is none of domains: data.domain=none"
            )
        if not can_be_domain(row.domain):
            raise DataError(
                f"table: {table.name}, {row.where}: {row.domain!r} in {table.columns.domain!r} cannot be a domain; "
                f"{DOMAIN_NAMES}"
            )
        names[row.domain] = None
    return list(names)


def _check_listed(domain: str, table: OpenTable, every: Mapping[str, Files], listed: Mapping[Path, int]) -> None:
    """Say which images are listed several times, and check that the cell of the scored rows divides a domain.

    Args:
        domain: the domain.
        table: its table.
        every: its images by split.
        listed: how many of its rows list each image.

    Raises:
        DataError: ``data.split=COLUMN:CELL`` scores none or all of its rows.
    """
    repeated = [path for path, count in listed.items() if count > 1]
    if repeated:
        warn_once(
            f"table: {table.name}: {quantity(len(repeated), 'image')} of {domain} listed in several rows, such as "
            f"{repeated[0]}; each row is a sample"
        )
    columns = table.columns
    if columns.scored and len(every) < 2:
        scored = "none"
        if "test" in every:
            scored = "all"
        cells = some_of(sorted({row.split for row in table.rows}), 5)
        raise DataError(
            f"table: {table.name}: {scored} of the rows of {domain} have {columns.scored!r} in {columns.split!r}, and "
            f"those that have it are scored; the table's cells are {cells}: choose one that some rows of each domain "
            f"have, by data.split={columns.split}:CELL, or data.split=none"
        )


@dataclass(frozen=True)
class ListedImages:
    """The images of a domain by a table.

    Args:
        table: the table.
        places: the paths of all images.
        train: the images of the train split, with their labels.
        test: likewise.
        groups: the group of each image; empty texts without a column of groups.
    """

    table: OpenTable
    places: "Places"
    train: Files
    test: Files
    groups: Mapping[Path, str]


def placed(data: dict[str, Any]) -> dict[str, Any]:
    """Return settings of a table with its folder as the root, if its path leads to it from the present folder.

    A path is relative to the folder where a run begins, not to that of another engine's process or of a later resume.
    On a device, the root gives way to its data-dir.
    """
    path = data.get("path")
    if data.get("root") is not None or not isinstance(path, str) or not path or "\0" in path or len(path) > MAX_CELL:
        return data
    place = Path(os.path.normpath(Path(path).expanduser().absolute()))
    try:
        found = place.exists()
    except OSError:  # a name that is too long for the disk
        found = False
    if not found:
        return data
    return {**data, "root": str(place.parent), "path": place.name}


class Places:
    """Paths of a table's images, relative to the table's folder, or to the root if they are there.

    Args:
        table: the table.
        root: folder that they must lie in.
    """

    def __init__(self, table: OpenTable, root: Path) -> None:
        self.table, self.root = table, root
        self.found: list[Path] = []

    def of(self, row: Row) -> Path:
        """Return the path of a row's image; of one that is in the table, a name that no other row has.

        Raises:
            DataError: it is no path below the root.
        """
        if self.table.encoded:
            return Path(self.table.name) / f"row {row.number:08}"
        where = f"table: {self.table.name}, {row.where}"
        place = row.place
        if not place or len(place) > MAX_CELL or any(len(os.fsencode(part)) > 255 for part in Path(place).parts):
            raise DataError(f"{where}: {place[:100]!r} is no path of an image; write one relative to {row.base}")
        if ELSEWHERE.match(place):
            raise DataError(
                f"{where}: {place!r} is a path of Windows or an address; copy the images to {row.base} and write paths "
                "relative to it"
            )
        if "\\" in place and not (row.base / place).exists():
            warn_once(f"table: {self.table.name}: its paths are of Windows; each \\ is read as /")
            place = place.replace("\\", "/")
        base = row.base
        if not (base / place).exists() and (self.root / place).exists():
            base = self.root
        path = Path(os.path.normpath(base / place))
        if not path.is_relative_to(self.root):
            if path.resolve().is_relative_to(self.root.resolve()):
                path = self.root / path.resolve().relative_to(self.root.resolve())
            else:
                raise DataError(f"{where}: {place} leads to {path}, outside {self.root}; {self._allowed()}")
        self.found.append(path)
        return path

    def check(self) -> None:
        """Check that some images exist, and that no link leads out of the root.

        Raises:
            DataError: none exists, or a link does.
        """
        if self.found and not any(path.exists() for path in self.found):
            raise DataError(
                f"table: {self.table.name}: none of its {len(self.found):,} images exists, such as {self.found[0]}; "
                f"{self._relative_to(os.path.relpath(self.found[0], Path(self.table.name).parent))}"
            )
        try:
            check_within(self.found, self.root)
        except DataError as error:
            raise DataError(f"table: {self.table.name}: {error}, or {self._allowed()}") from error

    def _relative_to(self, place: str) -> str:
        """Return what helps if the path of an image is relative to another folder than that of its table."""
        table = Path(self.table.name)
        for above in table.parents[1 : MAX_ABOVE + 1]:
            if (above / place).exists():
                return f"its paths are relative to {above}: {_at(table, above)}"
        for inside in sorted(path for path in table.parent.iterdir() if path.is_dir()):
            if (inside / place).exists():
                moved = inside / table.name
                command = shell_line(["mv", table, moved])
                return f"its paths are relative to {inside}: {command} and {_at(moved, self.root)}"
        return (
            f"paths are relative to its own folder or to {self.root}, the data.root: write them so, or move the table"
        )

    def _allowed(self) -> str:
        """Return the settings with a root that holds the table and all of its images."""
        table = Path(self.table.name).resolve()
        found = [
            (row.base / row.place).resolve().parent for row in self.table.rows if row.place and "\0" not in row.place
        ]
        above = Path(os.path.commonpath([table.parent, *found]))
        if above == above.parent:
            return f"copy the images to {table.parent} and write paths relative to it"
        return f"set data.root to the folder that holds the table and the images: {_at(table, above)}"


def _at(table: Path, root: Path) -> str:
    """Return the settings that read a table below a root."""
    settings = {"data.root": root, "data.path": table.relative_to(root)}
    return shell_line(written_override(key, str(value)) for key, value in settings.items())


def leading_groups(files: Files, groups: Mapping[Path, str], fraction: float) -> tuple[Files, Files]:
    """Return train and test of whole groups, in order of their names, with about ``fraction`` of the images in train.

    A group is train if that brings the share of train images nearer to ``fraction`` than leaving it out. If this
    leaves one side without a group, it gets the one that keeps the share nearest: the last of several for test, the
    first for train. A single group is train.
    """
    by_group: dict[str, Files] = {}
    for item in files:
        by_group.setdefault(groups[item[0]], []).append(item)
    names, wanted = sorted(by_group), fraction * len(files)
    chosen: list[str] = []
    count = 0
    for name in names:
        size = len(by_group[name])
        if abs(count + size - wanted) < abs(count - wanted):
            chosen.append(name)
            count += size
    if not chosen:
        chosen = [min(names, key=lambda name: abs(len(by_group[name]) - wanted))]
    elif len(chosen) == len(names) > 1:
        rest = len(files) - wanted
        chosen.remove(min(reversed(names), key=lambda name: abs(len(by_group[name]) - rest)))
    train: Files = []
    test: Files = []
    for name in names:
        if name in chosen:
            train += by_group[name]
        else:
            test += by_group[name]
    return train, test


def _check_group_names(table: OpenTable, rows: Sequence[Row]) -> None:
    """Check that rows have a group each, and that no two names of groups differ in blanks at their ends alone."""
    column = table.columns.group
    first: dict[str, str] = {}
    for row in rows:
        name = row.group.strip()
        if not name:
            raise DataError(
                f"table: {table.name}, {row.where}: a row has no {column!r}, the group; write the group of each image"
            )
        if (other := first.setdefault(name, row.group)) != row.group:
            raise DataError(
                f"table: {table.name}, {row.where}: {other!r} and {row.group!r} in {column!r} are two spellings of one "
                "group; write it without blanks at the ends"
            )


def _check_groups(table: OpenTable, groups: Mapping[Path, str], train: Files, test: Files) -> None:
    """Check that no group is in both splits."""
    trained = {groups[path] for path, _ in train}
    column = table.columns.group
    if both := sorted(trained & {groups[path] for path, _ in test}):
        raise DataError(
            f"table: {table.name}: {some_of(both, 3)} of {column!r} are groups with images in train and in test; put "
            "all images of a group into one split, or data.split=none divides the table by whole groups"
        )


def _number(path: Path) -> int:
    return int(path.name.removeprefix("row "))


def _unmarked(table: OpenTable) -> str:
    """Return the split of rows without a cell of it: train if the column only marks those to score, else none."""
    scored = name_key(table.columns.scored)
    if scored and {name_key(row.split) for row in table.rows if row.split.strip()} == {scored}:
        return "train"
    return ""


def _part(table: OpenTable, row: Row) -> str:
    """Return the split of a row: ``train``, ``test``, ``validation`` or empty."""
    word, columns = row.split, table.columns
    if not word.strip():
        return ""
    if columns.scored:
        return "test" if name_key(word) == name_key(columns.scored) else "train"
    flag, answer = split_of(columns.split), name_key(word)
    if flag and not split_of(word) and answer in YES | NO:
        if answer in YES:
            return flag
        return "test" if flag == "train" else "train"
    part = split_of(word)
    if not part and not table.columns.split:
        warn_once(f"table: {table.name}: the images of {word!r} are not read, since it is no train, test or validation")
        return "unread"
    if not part:
        raise DataError(
            f"table: {table.name}, {row.where}: {word!r} in {table.columns.split!r} is no split; write train, test or "
            "validation. If the column is none of splits: data.split=none"
        )
    return part
