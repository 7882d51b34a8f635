"""Does what an error about data advises, as a user would, until a run starts or nothing new is told."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.composition import compose_config
from common.config import build
from common.data import domain as domain_module
from common.data.domain import DataSource
from common.data.inspection import inspect
from common.data.names import check_names
from common.errors import GoldfinchError
from common.models.pretrained import load_weights
from common.models.residual import ResidualBackbone
from common.text import warn_once

WORD = r"(?:'[^']*'|\"[^\"]*\"|\\.|[^\s'\"();])+"
"""A word of a shell, quoted or not."""

SETTING = rf"(?:data=table )?(?=['\"]?(?:data\.\w+|model\.weights)=)(?:{WORD})+"
COMMANDS = (
    r"\(cd .*? done\)",
    rf"(?:mkdir -p {WORD} && )?(?:python -m zipfile -e {WORD} {WORD}|tar -xf {WORD} -C {WORD})",
    rf"mkdir -p {WORD} && mv -n {WORD} {WORD}",
    rf"mkdir -p {WORD} && find {WORD} -maxdepth 1 -type f -exec mv \{{\}} {WORD} ';'",
    rf"find {WORD} -name {WORD} -exec {WORD} -P -c {WORD} '\{{\}}' \+",
    rf"iconv -f {WORD} -t UTF-8 {WORD} > {WORD}",
    rf"mv (?:-n )?{WORD} {WORD}",
    rf"{WORD} -P -c {WORD}",
)
STEP = re.compile("|".join((*COMMANDS, SETTING)))
JOINED = (" and ", " ", " && ", ": as one table: ")
"""What stands between the steps of one remedy."""

MAX_STEPS = 12
KINDS = r"hidden images?|images?|validation images are not read|\.[\w.]+|without a suffix|files? skipped as no image"
COUNTED = re.compile(rf"(?<!of )(?<!\d)(\d+) (?:{KINDS})")


@dataclass(frozen=True)
class Image:
    """An image that was read: its file's content, and what it was read as."""

    content: str
    domain: str
    label: str
    part: str


@dataclass
class Attempt:
    """What came of one reading: the error or the images, and what was said."""

    error: str
    images: frozenset[Image]
    said: str

    @property
    def counted(self) -> int:
        """Images that were counted as not read."""
        return sum(map(int, COUNTED.findall(self.said)))

    @property
    def finding(self) -> str:
        """What was told, without numbers."""
        return re.sub(r"\d+", "", self.error)


@dataclass
class Case:
    """Images in a folder as somebody has them.

    Args:
        root: the folder; remedies may change it, and write beside it.
        settings: of ``goldfinch run``.
        truth: how they are meant; empty: several readings are right.
    """

    root: Path
    settings: list[str]
    truth: frozenset[Image] = frozenset()
    tried: list[str] = field(default_factory=list)


class _Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def attempt(settings: Sequence[str]) -> Attempt:
    """Read all domains as a run does before its first round."""
    warn_once.cache_clear()
    domain_module._load.cache_clear()
    said = _Said()
    logging.root.addHandler(said)
    error, images = "", frozenset[Image]()
    try:
        if settings[0].startswith("model.weights="):
            backbone = ResidualBackbone((1, 1, 1, 1), width=2)
            load_weights(backbone, Path(settings[0].partition("=")[2]), "model.weights", (), "check model.name")
        else:
            source = build(compose_config([*settings, "data.image_size=8"])["data"], "data")
            check_names("class", source.class_names)
            inspect(source, source.domains)
            images = frozenset(_images(source))
    except GoldfinchError as caught:
        error = str(caught)
    finally:
        logging.root.removeHandler(said)
    return Attempt(error, images, "\n".join(said.lines))


def _images(source: DataSource) -> Iterator[Image]:
    for name in source.domains:
        domain = source.load(name)
        for part, split, files in (
            ("train", domain.train, domain.train_files),
            ("test", domain.test, domain.test_files),
        ):
            for path, label in zip(files, split.labels.tolist(), strict=True):
                content = str(path)
                if path.is_file():
                    content = digest(path.read_bytes())
                yield Image(content, name, source.class_names[label], part)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def remedies(error: str) -> list[list[str]]:
    """Return the remedies that an error names, each as commands and settings in order."""
    found: list[list[str]] = []
    end = -1
    for step in STEP.finditer(error):
        text = re.sub(r"(?<!=)[.,]+$", "", step[0])
        if found and error[end : step.start()] in JOINED:
            found[-1].append(text)
        else:
            found.append([text])
        end = step.end()
    return [steps for number, steps in enumerate(found) if steps not in found[:number]]


def obey(case: Case, steps: Sequence[str]) -> None:
    """Run the commands of a remedy, and take over its settings.

    Each runs in a folder whose own ``common`` is not Goldfinch's.
    """
    for step in steps:
        if not re.fullmatch(SETTING, step):
            line = step.replace("python -m ", f"{shlex.quote(sys.executable)} -m ")
            with tempfile.TemporaryDirectory() as elsewhere:
                Path(elsewhere, "common.py").write_text("raise SystemExit(1)")
                subprocess.run(["bash", "-c", line], check=True, capture_output=True, cwd=elsewhere)
            continue
        for setting in shlex.split(step):
            key, _, value = setting.partition("=")
            assert value or setting == "data=table", f"the command line refuses {setting}"
            kept = [item for item in case.settings if not item.startswith(f"{key}=")]
            case.settings = [*kept, setting]


BY_HAND: dict[str, Callable[[Case, re.Match[str]], None]] = {}
"""What a user does about errors without a command, by what they say."""


def by_hand(pattern: str) -> Callable[[Callable[[Case, re.Match[str]], None]], Callable[[Case, re.Match[str]], None]]:
    def remember(action: Callable[[Case, re.Match[str]], None]) -> Callable[[Case, re.Match[str]], None]:
        BY_HAND[pattern] = action
        return action

    return remember


@dataclass
class Followed:
    """What the remedies of one state of a case led to.

    Args:
        readings: those that a run starts with, or whose remedy was not meant.
        findings: what was told on the way.
    """

    readings: list[Attempt] = field(default_factory=list)
    findings: set[str] = field(default_factory=set)


States = dict[tuple[frozenset[str], tuple[tuple[str, int, int], ...]], Followed]
"""What the remedies led to, by settings and files: of two remedies, either may come first."""


def follow(case: Case, until: Callable[[Attempt], bool] = lambda reading: False) -> list[Attempt]:
    """Try the remedies of a case, and every remedy of what is told next; return the readings that a run starts with.

    Args:
        case: the case.
        until: ends the search with the first reading that it is true of.

    Raises:
        AssertionError: a finding comes again after its remedy, or has no remedy.
    """
    return _follow(case, (), {}, until).readings


def _follow(case: Case, chain: tuple[str, ...], known: States, until: Callable[[Attempt], bool]) -> Followed:
    state = frozenset(case.settings), _files(case.root.parent)
    if state in known:
        assert not known[state].findings & set(chain), f"a loop after {case.tried}"
        return known[state]
    result = attempt(case.settings)
    if not result.error:
        known[state] = Followed([result])
        return known[state]
    assert "Traceback" not in result.error
    assert result.finding not in chain, f"a loop: {result.error}\nafter {case.tried}"
    assert len(chain) < MAX_STEPS, f"no end: {result.error}\nafter {case.tried}"
    ways = [steps for steps in remedies(result.error) if not set(steps) <= set(case.settings)]
    action = next(((BY_HAND[each], found) for each in BY_HAND if (found := re.search(each, result.error))), None)
    found = Followed([], {result.finding})
    known[state] = found
    if chain and not (ways or action):  # of several remedies, another was meant
        found.readings.append(result)
    assert ways or action or chain, f"no remedy: {result.error}"
    for steps in ways[:4] or [None] * (action is not None):
        again = Case(case.root, list(case.settings), case.truth, [*case.tried, str(steps)])
        changes = steps is None or not all(re.fullmatch(SETTING, step) for step in steps)
        with _kept(case.root.parent, needed=changes):
            if steps is not None:
                obey(again, steps)
            elif action is not None:
                action[0](again, action[1])
            _add(found, _follow(again, (*chain, result.finding), known, until))
        if any(map(until, found.readings)):
            break
    return found


def _add(found: Followed, other: Followed) -> None:
    found.readings += other.readings
    found.findings |= other.findings


def _files(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Return the names, sizes and times of all files below a folder."""
    found: list[tuple[str, int, int]] = []
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        found.append((str(path), status.st_size * path.is_file(), status.st_mtime_ns * path.is_file()))
    return tuple(found)


@contextlib.contextmanager
def _kept(folder: Path, *, needed: bool = True) -> Iterator[None]:
    """Put a folder back as it was after the context, where that is needed."""
    if not needed:
        yield
        return
    with tempfile.TemporaryDirectory() as beside:
        saved = Path(beside) / "saved"
        shutil.copytree(folder, saved, symlinks=True)
        yield
        shutil.rmtree(folder)
        shutil.copytree(saved, folder, symlinks=True)


def check(case: Case, found: Sequence[Attempt], total: int) -> None:
    """Check that a remedy leads to what is meant, and that no image is lost in silence."""
    assert any(not result.error for result in found), found
    for result in found:
        assert result.error or len(result.images) + result.counted >= total or case.tried, (
            result.said,
            len(result.images),
            total,
        )
    if case.truth:
        assert any(fits(result.images, case.truth) for result in found), [
            sorted(map(str, each.images))[:4] for each in found
        ]


def bare(name: str) -> str:
    """Return what a name and the one by which a remedy replaces it have in common."""
    return name.lstrip("=+-@").rstrip("_")


def fits(images: frozenset[Image], truth: frozenset[Image]) -> bool:
    """Return whether images were read as they are meant; a split that nobody gave may be any."""
    read = {(image.content, bare(image.domain), bare(image.label)): image.part for image in images}
    for image in truth:
        part = read.get((image.content, bare(image.domain), bare(image.label)), "none")
        if image.part not in ("", part) or part == "none":
            return False
    return True
