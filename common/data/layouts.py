"""What folders hold: classes, splits and domains; and for a layout that is not read, what was found and what helps."""

import difflib
import os
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import combinations, islice
from pathlib import Path

from common.data.file_kinds import kind_of_file
from common.data.image_files import is_image, is_image_inside
from common.data.names import SUFFIXES, coinciding, normal_name, split_of
from common.errors import DataError, some_of
from common.extras import install_command
from common.overrides import written_override
from common.text import quantity, shell_line

SYSTEM = frozenset({
    "__macosx", "__pycache__", "@eadir", "@recycle", "#recycle", "lost+found", "$recycle.bin",
    "system volume information",
})  # fmt: skip
"""Folders that systems make, in lower case, beside hidden ones and those with a CACHEDIR.TAG."""

MAX_PLACES = 200
"""Folders that are looked into for a layout that is read."""

MAX_FOUND = 8
"""Names in a message of what a folder holds."""

ANY = "any"
"""A level of folders, or all levels below, in ``data.path``, that is neither of domains, splits nor classes."""

MAX_WAYS, MAX_NAMED = 3, 4
"""Ways to read a layout, and names of each, in one message."""

MAX_DEPTH = 12
"""How deep folders are entered."""

MAX_SAMPLED = 10_000
"""Files in folders of systems that are examined."""


def is_system(folder: Path) -> bool:
    """Return whether a folder is a system's or a program's own: hidden, of a known name, or with a CACHEDIR.TAG."""
    name = folder.name.casefold()
    return name.startswith(".") or name in SYSTEM or (folder / "CACHEDIR.TAG").exists()


def leads_back(folder: Path) -> bool:
    """Return whether a folder is a link to one that it lies in, whose images would be found again below it."""
    return folder.is_symlink() and folder.parent.resolve().is_relative_to(folder.resolve())


def directories(parent: Path) -> list[Path]:
    """Return the folders in ``parent`` that may be domains or classes, sorted: no system's, and no link back."""
    with os.scandir(parent) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir())
    return [parent / name for name in names if not is_system(parent / name) and not leads_back(parent / name)]


def images_below(folder: Path, depth: int = MAX_DEPTH) -> Iterator[Path]:
    """Yield the images in a folder, then those in the folders in it, sorted; none of a system's folders."""
    yield from filter(is_image, sorted(folder.iterdir()))
    if depth:
        for inner in directories(folder):
            yield from images_below(inner, depth - 1)


def loose_images(folder: Path) -> list[Path]:
    """Return the images directly in a folder."""
    return list(images_below(folder, 0))


def with_images(parent: Path) -> list[Path]:
    """Return the folders in ``parent`` that hold images, directly or deeper: those that are read."""
    return [folder for folder in directories(parent) if any(True for _ in images_below(folder))]


def part_folders(directory: Path) -> tuple[Path | None, Path | None]:
    """Return the folders of a domain's train and test images; ``None`` for one that does not exist.

    A folder of validation images is that of the test images if there is no other.

    Raises:
        DataError: two folders are of one split.
    """
    found: dict[str, Path] = {}
    for path in directories(directory):
        part = split_of(path.name)
        if part in found:
            raise DataError(
                f"folder: {found[part]} and {path} are both of the {part} images; join them, or set "
                "data.path=domain/class if they are classes or domains"
            )
        if part:
            found[part] = path
    return found.get("train"), found.get("test", found.get("validation"))


def has_parts(directory: Path) -> bool:
    """Return whether a folder holds both a folder of train images and one of test images."""
    return None not in part_folders(directory)


def bases(directory: Path) -> list[Path]:
    """Return the folders that hold a domain's class folders.

    These are its train and test folders if it has both, its only folder if that is of a split, and else itself.
    """
    train, test = part_folders(directory)
    if train is not None and test is not None:
        return [train, test]
    only = with_images(directory)
    if len(only) == 1 and split_of(only[0].name) and not loose_images(only[0]) and not loose_images(directory):
        return only
    return [directory]


def not_read(folder: Path, apart: Collection[Path] = (), *, deep: bool = True) -> list[str]:
    """Return what in a folder is not read: counted, and named if it holds images, might hold them, or is a folder.

    Args:
        folder: the folder.
        apart: folders in it that are not read.
        deep: whether to look into the folders that are read.

    Raises:
        DataError: a folder holds nothing but images of a kind that is not read.
    """
    found: list[str] = []
    others: Counter[str] = Counter()
    hints: dict[str, str] = {}
    places = [folder]
    for place in places:  # which grows
        for path in sorted(place.iterdir()):
            if not path.is_dir():
                if path.name.startswith("."):
                    others["hidden images"] += _is_any_image(path)
                elif not is_image(path):
                    kind = path.suffix.lower() or "without a suffix"
                    others[kind] += 1
                    hints.setdefault(kind, unreadable(path))
            elif is_system(path):
                files = (Path(above, name) for above, _, names in os.walk(path) for name in names)
                if count := sum(map(_is_any_image, islice(files, MAX_SAMPLED))):
                    found.append(f"{path.relative_to(folder)}/ ({quantity(count, 'image')} in a system's folder)")
            elif leads_back(path):
                found.append(f"{path.relative_to(folder)}/ (a link to a folder that it lies in)")
            elif path in apart or not any(True for _ in images_below(path)):
                if hint := unreadable(path) if path not in apart else "":
                    raise DataError(f"folder: {path} has no images that are read{hint}; or take it out of {place}")
                count = sum(1 for _ in images_below(path))
                found.append(f"{path.relative_to(folder)}/ ({count or 'no'} images)")
            elif deep:
                places.append(path)
    return found + [f"{count} {kind}{hints.get(kind, '')}" for kind, count in sorted(others.items()) if count]


def unreadable(place: Path) -> str:
    """Return which image of a kind that is not read is in a folder, and what helps; empty if there is none.

    Args:
        place: the folder, or the file itself.
    """
    for path in islice([place] if place.is_file() else sorted(place.rglob("*")), MAX_SAMPLED):
        kind = kind_of_file(path)
        if kind.startswith("a HEIF"):
            kind += f": {install_command('heif')} reads it, or convert it to JPEG"
        if not path.name.startswith(".") and ("convert" in kind or "save it as" in kind):
            return f" ({path.name} is {kind})"
    return ""


def _is_any_image(path: Path) -> bool:
    """Return whether a file is an image, hidden or not; macOS keeps what it knows of a file in another, ``._name``."""
    if path.name.startswith("._"):
        return False
    return path.is_file() and (path.suffix.lower() in SUFFIXES or is_image_inside(path))


def found_in(place: Path) -> str:
    """Return what a folder holds, for messages: ``found in photos: cat/, dog/, notes.txt``."""
    if not place.is_dir():
        return f"{place} does not exist"
    names: list[str] = []
    for path in sorted(place.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            names.append(f"{path.name}/")
        else:
            names.append(path.name)
    if not names:
        return f"{place} is empty"
    return f"found in {place}: {some_of(names, MAX_FOUND)}"


def near_folder(name: str, folders: Sequence[Path]) -> str:
    """Return what to do if one of ``folders`` is called much like ``name``; empty if none is."""
    names = [path.name for path in folders]
    close = difflib.get_close_matches(name.casefold(), [each.casefold() for each in names], n=1, cutoff=0.5)
    for each in names:
        if close and each.casefold() == close[0]:
            return f"if {each}/ is meant, rename it to {name}, and others likewise"
    return ""


def has_same_names(inner: Path, outer: Path) -> bool:
    """Return whether ``outer`` has something of the name of what is in ``inner``, so that none of it can be moved."""
    names = [path.name for path in inner.iterdir() if not path.name.startswith(".")]
    return any((outer / name).exists() for name in names)


def moved_up(inner: Path, outer: Path) -> str:
    """Return what to do if the class folders that ``outer`` should hold are in ``inner``, a folder in it."""
    command = f"mv {shlex.quote(str(inner))}/* {shlex.quote(str(outer))}/"
    return f"the class folders are one level deeper, in {inner.name}/: move them up ({command})"


def below(root: Path) -> Iterator[Path]:
    """Yield ``root``, the folders in it, and the folders in those: at most :data:`MAX_PLACES`."""
    level = [root]
    count = 0
    for _ in range(3):
        deeper: list[Path] = []
        for place in level:
            if count == MAX_PLACES:
                return
            count += 1
            yield place
            deeper += directories(place)
        level = deeper


def read_as_folders(root: Path, image_size: int, names: Collection[str]) -> str:
    """Return the command that reads the images under ``root`` as they lie, by ``data=folder``; empty if it cannot.

    Args:
        root: it, or a folder up to two levels below, holds a folder for each of several domains, all with the same
            classes.
        image_size: of the data set that was asked for.
        names: of its domains. If fewer than half of the folders have one, they are another data set.
    """
    expected = {normal_name(name) for name in names}
    for place in below(root):
        domains = _domains_in(place)
        known = [domain for domain in domains if normal_name(domain) in expected]
        if len(domains) < 2 or 2 * len(known) < len(domains):
            continue
        settings = ["data=folder", written_override("data.root", str(place))]
        if len(domains) < len(with_images(place)):
            settings.append(written_override("data.domains", domains))
        settings.append(f"data.image_size={image_size}")
        return f"data=folder reads the folders as they are: {shell_line(['goldfinch', 'run', *settings])}"
    return ""


def _domains_in(place: Path) -> list[str]:
    """Return the folders in ``place`` with the same class folders; none if two folders' classes differ."""
    classes = {folder.name: _classes_in(folder) for folder in with_images(place)}
    found = {name: inside for name, inside in classes.items() if len(inside) > 1}
    if any(map(split_of, classes)) or len(set(found.values())) != 1:
        return []
    return list(found)


def _classes_in(domain: Path) -> frozenset[str]:
    """Return the names of a domain's class folders; none if ``data=folder`` would refuse them."""
    try:
        parts = bases(domain)
    except DataError:
        return frozenset()
    loose = [path for place in {domain, *parts} for path in loose_images(place)]
    folders = [folder for place in parts for folder in with_images(place)]
    names = frozenset(folder.name for folder in folders)
    if loose or coinciding(names) or any(map(with_images, folders)):
        return frozenset()
    return names


# ---- what helps ------------------------------------------------------------------------------------------------------


def nothing_read(root: Path) -> str:
    """Return why no folder in ``root`` is a domain: what is there, and what helps."""
    found = f"no folder in {root} holds images; {found_in(root)}"
    names = [path for path in sorted(root.iterdir()) if not path.name.startswith(".")]
    commands: list[str] = []
    for path in names[:MAX_FOUND]:
        kind, target = kind_of_file(path), root / path.name.partition(".")[0]
        if "ZIP" in kind:
            commands.append(shell_line(["python", "-m", "zipfile", "-e", path, target]))
        elif "archive" in kind:
            commands.append(
                f"{shell_line(['mkdir', '-p', target])} && {shell_line(['tar', '-xf', path, '-C', target])}"
            )
    if commands:
        return f"{found}. Unpack the archives: {' && '.join(commands)}"
    if any("\\" in path.name for path in names):
        rename = 'g="${f//\\\\//}"; mkdir -p "$(dirname "$g")" && mv "$f" "$g"'
        command = f"(cd {_quoted_path(root)} && for f in *\\\\*; do {rename}; done)"
        return f"{found}. Names with \\ are paths of Windows: {command}"
    if table := _table_in(root):
        return f"{found}. {table}"
    if loose_images(root):
        return f"{found}. {layout_advice(root)}"
    if hint := unreadable(root):
        return f"{found}{hint}"
    return f"{found}. Put images there as <domain>/<class>/*.png, or <domain>/{{train,test}}/<class>/*.png"


def _table_in(root: Path) -> str:
    """Return the settings that read a table in a folder; empty if there is none."""
    for path in sorted(root.iterdir()):
        if path.suffix.lower() in (".csv", ".tsv", ".parquet"):
            settings = [written_override("data.root", root), written_override("data.path", path.name)]
            return f"a table is read by {shell_line(['data=table', *settings])}"
    return ""


def layout_advice(root: Path, inside: Path | None = None, in_use: str = "") -> str:
    """Return the settings by which ``data=folder`` reads images that lie otherwise: one for each way to read them.

    What a folder is follows from where it lies: levels whose names are all of splits are splits, a level with one name
    says nothing, and of the others one is of domains and a deeper one of classes.

    Args:
        root: the folder that holds the domains.
        inside: the one domain in it that is looked into; ``None`` for all.
        in_use: the present ``data.path``.
    """
    places = Counter(path.relative_to(root).parts[:-1] for path in images_below(inside or root))
    depths: Counter[int] = Counter()
    for place, count in places.items():
        depths[len(place)] += count
    most = depths.most_common(1)[0][0]
    if most == 0:
        return f"make a folder for each domain in {root}, in it one for each class, and move them there"
    usual = [place for place in places if len(place) == most]
    patterns = ["domain/split/class", "domain/class"]
    if in_use:
        patterns = [in_use]
    elif has_parts(root):
        patterns = ["split/class"]
        usual = [place for place in usual if split_of(place[0])] or usual
    odd = sorted(place for place in places if not any(roles_of(place, pattern) for pattern in patterns))
    others = sorted(place for place in places if len(place) != most)
    splits = sorted(place for place in usual if split_of(place[-1]))
    if not odd and (len(splits) == len(usual) or not others):  # images in no class folder, or these are the classes
        good = others or [place for place in usual if place not in splits]
        moves: list[str] = []
        if good:
            moves = [_put_right(place, good, root, ["domain/split/class"]) for place in splits[:MAX_FOUND]]
        if moves and len(splits) < len(usual):
            return "; ".join(moves)
        return "; ".join([*moves, *_as_settings(usual, root, inside)])
    if not odd:  # a class or a domain has the name of a split
        patterns = [pattern for pattern in patterns if any(roles_of(place, pattern) for place in usual)]
        odd = others
    good = [place for place in usual if place not in odd]
    if 2 * len(good) > len(usual):
        return "; ".join(dict.fromkeys(_put_right(place, good, root, patterns) for place in odd[:MAX_FOUND]))
    return "; ".join(_as_settings(usual, root, inside))


def _as_settings(usual: Sequence[Sequence[str]], root: Path, inside: Path | None) -> list[str]:
    """Return the settings of :func:`layout_advice`, each with the domains and the classes that it reads."""
    ways: list[str] = []
    for roles in _ways(usual)[:MAX_WAYS]:
        shown: list[str] = []
        for role, several in (("domain", "domains"), ("class", "classes")):
            names = sorted({roles_of(place, "/".join(roles)).get(role, root.name) for place in usual})
            shown.append(f"{several} {some_of(names, MAX_NAMED)}")
        if inside is None or roles[0] == "domain":
            ways.append(f"data.path={'/'.join(roles)} reads {' and '.join(shown)}")
    if len(ways) > 1:
        ways.append("classes may also lie above domains, as in class/domain")
    if table := _table_in(root):
        ways.append(table)
    return ways


def paths_to(root: Path, domain: str) -> list[str]:
    """Return the values of ``data.path`` by which images below ``root`` are of the domain ``domain``."""
    places = [path.relative_to(root).parts[:-1] for path in images_below(root)]
    holding = [place for place in dict.fromkeys(places) if domain in place]
    usual = [place for place in holding if len(place) == len(holding[0])]
    patterns = ["/".join(roles) for roles in _ways(usual)] if usual else []
    return [
        pattern
        for pattern in dict.fromkeys([*patterns, "class/domain"])
        if any(roles_of(place, pattern).get("domain") == domain for place in usual)
    ]


def roles_of(place: Sequence[str], pattern: str) -> dict[str, str]:
    """Return the domain, the split and the class of the images in a folder; empty if it does not fit.

    Args:
        place: names of the folders from the root to the images.
        pattern: what they are, as ``data.path`` has it.
    """
    roles = pattern.split("/")
    if roles[-1] == ANY and len(place) >= len(roles) - 1:
        place = place[: len(roles) - 1]
        roles.pop()
    if len(place) != len(roles):
        return {}
    found = dict(zip(roles, place, strict=True))
    if "split" in found and not split_of(found["split"]):
        return {}
    return found


def _ways(places: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return what the levels of folders may be, the likeliest first; last, that words of splits are names."""
    levels = range(len(places[0]))
    splits = [level for level in levels if all(split_of(place[level]) for place in places)]
    ranked: list[tuple[bool, int, list[str]]] = []
    for split in [*splits, None]:
        others = [level for level in levels if level != split]
        telling: list[int] = []
        for level in others:
            above = {tuple(place[:level]) for place in places}
            if len({tuple(place[: level + 1]) for place in places}) > len(above):
                telling.append(level)
        pairs = [*combinations(telling, 2), *combinations(others, 2), *((None, level) for level in telling or others)]
        for rank, (domain, label) in enumerate(pairs):
            named: dict[int | None, str] = {split: "split", domain: "domain", label: "class"}
            roles = [named.get(level, ANY) for level in levels]
            while roles[-2:] == [ANY, ANY]:
                roles.pop()
            ranked.append((split is None, rank, roles))
    found: list[list[str]] = []
    for _, _, roles in sorted(ranked, key=lambda each: each[:2]):
        if roles not in found:
            found.append(roles)
    return found


def _put_right(place: Sequence[str], good: Collection[tuple[str, ...]], root: Path, patterns: Sequence[str]) -> str:
    """Return what to do with the images in a folder that is not where those of others are, the good ones."""
    folder = root.joinpath(*place)
    pattern = next((each for each in patterns if roles_of(place, f"{each}/{ANY}")), "")
    classes: set[str] = set()
    for names in good:
        roles = roles_of(names, pattern)
        if "class" in roles:
            classes.add(roles["class"])
    if not pattern or all(split_of(name) for name in classes):
        target = _left(place, root)
        command = (
            f"{shell_line(['mkdir', '-p', target])} && find {_quoted_path(folder)} -maxdepth 1 -type f -exec mv {{}}"
        )
        example = root.joinpath(*min(good))
        return (
            f"move it into a folder such as {example}, or take all of {folder} out "
            f"({command} {_quoted_path(target)} ';')"
        )
    roles = roles_of(place, f"{pattern}/{ANY}")
    if place[-1] in classes and roles["class"] not in classes:
        inner, outer = folder.parent, root.joinpath(*place[: pattern.count("/")])
        if not has_same_names(inner, outer):
            return moved_up(inner, outer)
        target = _left(place[:-1], root)
        command = f"{shell_line(['mkdir', '-p', target.parent])} && {shell_line(['mv', '-n', inner, target])}"
        return f"{inner} holds class folders that {outer} has, too: join those of one name, or take it out ({command})"
    return f"data.path={pattern}/{ANY} reads what lies deeper as of its class folder"


def _left(place: Sequence[str], root: Path) -> Path:
    """Return where what is taken out of a folder below ``root`` is kept: beside it, and apart from that of others."""
    beside = root.with_name(f"{root.name}-left")
    while beside.joinpath(*place).exists():
        beside = beside.with_name(f"{beside.name}-too")
    return beside.joinpath(*place)


def _quoted_path(path: Path) -> str:
    return shell_line([path])
