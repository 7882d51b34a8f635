"""``goldfinch doctor --report RUN``: one file about a run for a public issue, without paths, names and data."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.choices import CONF, choices_of
from common.composition import compose_config
from common.errors import GoldfinchError
from common.storage import write_text
from common.versions import VERSION, package_versions
from goldfinch.record import RunRecord
from goldfinch.run_model import RunModel
from server.run.schema import EVENTS, REPLIES, read_lines, stream_lines

REPORT = "goldfinch-report.txt"
"""The file, in the working folder."""

MAX_MESSAGES = 20
"""Different messages of events that the file has."""

TOLD = ("failed", "interrupted", "metric failed", "tracker failed", "data changed", "code changed")
"""Events whose reason the file has, besides those of clients and registrations."""

PATH = re.compile(r"""[^\s'"(),;]*[/\\][^\s'"(),;]*""")
SUFFIXES = "png|jpe?g|tiff?|bmp|webp|gif|heic|dcm|npy|npz|mat|csv|parquet|zip|pt|pth"
FILE = re.compile(rf"""[^\s'"(),;/]+\.(?:{SUFFIXES})\b""", re.IGNORECASE)
ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b|[\w-]+(?:\.[\w-]+)+:\d{2,5}\b|\S+@\S+")
QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|«[^»]*»")


def write_public_report(folder: Path) -> Path:
    """Write the file about the run in ``folder``, and return its path.

    The file has versions, the settings that are numbers or choices of Goldfinch's own, how many clients, rounds and
    events of each kind there were, and the messages of errors. In the messages, names of clients, domains, classes,
    users and hosts, paths, addresses and everything in quotes are replaced.

    Raises:
        ConfigError: the folder holds no run, or its record cannot be read.
    """
    run = RunRecord(folder)
    config = run.config
    events = _events(folder)
    lines = [f"goldfinch {VERSION}", *_versions(), "", "settings", *_settings(config), "", "events"]
    for name, count in sorted(Counter(_kind(entry["event"]) for entry in events).items()):
        lines.append(f"  {name}: {count}")
    lines += ["", "replies"]
    for status, count in sorted(_statuses(folder).items()):
        lines.append(f"  {status}: {count}")
    lines += ["", "messages", *_messages(events, Names.of(run, events))]
    path = Path(REPORT)
    write_text(path, "\n".join([*lines, ""]))
    return path


def _events(folder: Path) -> list[dict[str, Any]]:
    path = folder / EVENTS
    if not path.exists():
        return []
    return read_lines(path)


def _kind(name: str) -> str:
    """Return the name of an event if it is a word or two of Goldfinch's own, which a folder from elsewhere may lack."""
    if re.fullmatch(r"[a-z]+( [a-z]+){0,2}", name):
        return name
    return "other"


def _statuses(folder: Path) -> Counter[str]:
    path = folder / REPLIES
    if not path.exists():
        return Counter()
    return Counter(_kind(str(line.get("status"))) for line in stream_lines(path))


def _versions() -> Iterator[str]:
    for name, version in sorted(package_versions().items()):
        yield f"  {name} {version}"
    yield f"  {os.cpu_count()} CPUs"


def _settings(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the choice of each group, and each setting of ``conf/`` that is a number, true, false or not set."""
    chosen: list[str] = []
    for group, choice in sorted(config.get("choices", {}).items()):
        if choice in choices_of(group, [CONF]):
            chosen.append(f"{group}={choice}")
            yield f"  {group}={choice}"
        elif choice is not None:
            yield f"  {group}: a class or file of the user's own"
    known = [choice for choice in chosen if not choice.startswith(("experiment=", "printed=", "tuned="))]
    yield from _numbers(config, compose_config(known))


def _numbers(given: Mapping[str, Any], known: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the settings of ``given`` that ``known`` has, and that are no text and no list."""
    for key, default in known.items():
        value = given.get(key)
        if key == "choices" or key not in given:
            continue
        if isinstance(default, Mapping) and isinstance(value, Mapping):
            yield from _numbers(value, default, f"{prefix}{key}.")
        elif isinstance(value, bool | int | float) or value is None:
            yield f"  {prefix}{key}={value}"


class Names:
    """Replaces what says whose run it is.

    Args:
        names: names by what stands in their place, such as ``domain``.
    """

    def __init__(self, names: Mapping[str, Iterable[str]]) -> None:
        self._instead: dict[str, str] = {}
        for kind, names_of_kind in names.items():
            for number, name in enumerate(sorted(set(names_of_kind) - {""}), 1):
                self._instead.setdefault(name.lower(), f"<{kind} {number}>")
        longest_first = sorted(self._instead, key=len, reverse=True)
        written = "|".join(map(re.escape, longest_first)) or "$."  # which matches nothing
        self._names = re.compile(rf"(?<!\w)(?:{written})(?!\w)", re.IGNORECASE)

    @classmethod
    def of(cls, run: RunRecord, events: Sequence[Mapping[str, Any]]) -> Names:
        """Return the names that the record of a run and this machine have."""
        names: dict[str, set[str]] = {"client": set(), "domain": set(), "class": set(), "user": set(), "host": set()}
        for entry in events:
            names["client"].update([str(entry.get("client", "")), *entry.get("clients", ())])
            names["domain"].update([str(entry.get("domain", "")), *entry.get("accuracy", ())])
            names["class"].add(str(entry.get("label", "")))
        data = run.config.get("data", {})
        names["domain"].update(map(str, data.get("domains") or ()))
        names["class"].update(map(str, data.get("classes") or ()))
        with contextlib.suppress(GoldfinchError, OSError):
            source = RunModel(run).settings.data
            names["domain"].update(source.domains)
            names["class"].update(source.class_names)
        names["host"].update([socket.gethostname(), socket.getfqdn()])
        with contextlib.suppress(OSError, KeyError):
            names["user"].update([getpass.getuser(), Path.home().name])
        return cls(names)

    def hidden(self, text: str) -> str:
        """Return ``text`` without paths, files, addresses, quotations and names."""
        for shape, instead in ((QUOTED, "<...>"), (PATH, "<path>"), (FILE, "<file>"), (ADDRESS, "<address>")):
            text = shape.sub(instead, text)
        return self._names.sub(lambda match: self._instead[match[0].lower()], text)


def _messages(events: Sequence[Mapping[str, Any]], names: Names) -> list[str]:
    """Return the different messages of errors, the commonest first, each with where in the code it was raised."""
    counts: Counter[str] = Counter()
    for entry in events:
        name = str(entry["event"])
        if name not in TOLD and not name.startswith(("client ", "registration ")):
            continue
        text = names.hidden(f"{name}: {entry.get('reason', '')}")
        places = [f"\n      {place}" for place in _places(str(entry.get("traceback", "")))]
        counts["".join([text, *places])] += 1
    lines = [f"  {count} x {text}" for text, count in counts.most_common(MAX_MESSAGES)]
    return lines or ["  none"]


def _places(traceback: str) -> Iterator[str]:
    """Yield file, line and function of each frame in Goldfinch's own code; files of others are not named."""
    for path, line, function in re.findall(r'File "([^"]+)", line (\d+), in (\w+)', traceback):
        own = re.search(r"(?:^|/)((?:client|common|strategies|server)/[\w/]+\.py)$", path)
        if own:
            yield f"{own[1]}, line {line}, in {function}"
        else:
            yield f"elsewhere, line {line}"
