"""What a deployment on this machine costs: processor seconds, memory, and the errors in its logs."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path


class Meter:
    """Processor seconds and memory of a SuperLink, of the server process it starts and of a proxy, twice a second.

    Args:
        link: the SuperLink's process.
        proxy: the proxy's process; ``None`` without one.
    """

    def __init__(self, link: int, proxy: int | None = None) -> None:
        self.link, self.proxy = link, proxy
        self.seen: list[tuple[float, dict[str, float]]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(0.5):
            with contextlib.suppress(OSError, IndexError, ValueError):
                found = self._look()
                found["nodes processor"] = time.process_time()
                self.seen.append((time.time(), found))

    def _look(self) -> dict[str, float]:
        """What all processes have used and hold now, by kind; those of one kind are added."""
        kinds = [("superlink", self.link)]
        for pid in descendants(self.link):
            if "flwr-serverapp" in Path(f"/proc/{pid}/cmdline").read_text():
                kinds.append(("server", pid))
        if self.proxy is not None:
            kinds += [("proxy", pid) for pid in [self.proxy, *descendants(self.proxy)]]
        found: dict[str, float] = {}
        for kind, pid in kinds:
            for name, value in self._of(kind, pid):
                found[name] = found.get(name, 0.0) + value
        return found

    def _of(self, name: str, pid: int) -> Iterator[tuple[str, float]]:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        yield f"{name} processor", (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
        yield f"{name} memory", int(words[21]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    def between(self, begun: float, ended: float) -> Mapping[str, float]:
        """Processor seconds that were used, and the most memory that was held, MiB."""
        inside = [values for when, values in self.seen if begun <= when <= ended]
        found = {}
        for name in inside[-1] if inside else ():
            values = [one[name] for one in inside if name in one]
            # the most, not the last: a process of the proxy may be gone by the end
            found[name] = max(values) - (0.0 if name.endswith("memory") else values[0])
        return found


def descendants(pid: int) -> Iterator[int]:
    """All processes that ``pid`` started, and those they started."""
    for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield int(word)
        yield from descendants(int(word))


def wrong(logs: Path) -> list[str]:
    """Return the log lines of SuperLink and proxy for calls that failed: one of each kind, with its count."""
    found: Counter[str] = Counter()
    for path in sorted(logs.glob("*")):
        for line in path.read_text(errors="replace").splitlines():
            if "UnexpectedError" in line or "ApiError" in line or re.search(r" [45]\d\d$", line):
                found[f"{path.name}: " + re.sub(r"[0-9a-f]{8,}|\d{2,}", "#", line)[:300]] += 1
    return [f"{count} x {line}" for line, count in found.most_common(20)]
