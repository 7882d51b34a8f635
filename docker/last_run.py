"""When the containers were last run for real, and whether what they cover has changed since.

    python docker/last_run.py show                   # one line per command
    python docker/last_run.py covered                # before a command: the SHA-256 of the files that it covers
    python docker/last_run.py record NAME SHA256     # the command NAME, which began with them, has just ended well

The record is docker/last_run.json. Continuous integration has no Docker Engine, so it prints this instead.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docker" / "last_run.json"
NAMES = ("make compose-demo", "make test-compose")
PACKAGES = ("client", "common", "conf", "goldfinch", "server", "strategies")
COVERED = (*PACKAGES, "docker", "requirements.txt", "pyproject.toml")
"""What the containers are made of."""


def covered_sha256() -> str:
    """SHA-256 over the names and contents of the files that the containers are made of, without the record itself."""
    digest = hashlib.sha256()
    for name in COVERED:
        place = ROOT / name
        paths = [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())
        for path in paths:
            if path != RECORD and "__pycache__" not in path.parts:
                digest.update(f"{path.relative_to(ROOT).as_posix()}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def recorded() -> dict[str, dict[str, str]]:
    """The record: by command, when it last ended well, of which files, and on which engine."""
    if not RECORD.exists():
        return {}
    content: dict[str, dict[str, str]] = json.loads(RECORD.read_text())
    return content


def describe(name: str, entry: dict[str, str] | None, now: str) -> str:
    """One line about ``name``; ``now`` is the hash of the files as they are."""
    if entry is None:
        return f"{name} has never been recorded"
    changed = "nothing that it covers has changed since" if entry["covered"] == now else "its files have changed since"
    return f"{name} last ended well on {entry['date']}, Docker {entry['engine']}; {changed}"


def show() -> None:
    """Print a line for every command."""
    found, now = recorded(), covered_sha256()
    for name in NAMES:
        print(describe(name, found.get(name), now))


def record(name: str, covered: str) -> None:
    """Write down that ``name`` has just ended well.

    Args:
        name: the command.
        covered: the SHA-256 of the files that it covers, from when it began.

    Raises:
        SystemExit: the files were changed since.
    """
    if covered_sha256() != covered:
        sys.exit(f"{name} ended well, but is not recorded: files that it covers were changed meanwhile; run it again")
    version = ["docker", "version", "--format", "{{.Server.Version}}"]
    engine = subprocess.run(version, check=True, capture_output=True, text=True).stdout.strip()
    entry = {"date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}", "engine": engine, "covered": covered}
    RECORD.write_text(json.dumps({**recorded(), name: entry}, indent=2, sort_keys=True) + "\n")


def main(arguments: list[str]) -> int:
    """``show``, ``covered`` or ``record NAME SHA256``; the exit status."""
    if arguments == ["show"]:
        show()
        return 0
    if arguments == ["covered"]:
        print(covered_sha256())
        return 0
    if len(arguments) == 3 and arguments[0] == "record" and arguments[1] in NAMES:
        record(arguments[1], arguments[2])
        return 0
    print(f"usage: last_run.py show | covered | record {' | '.join(map(repr, NAMES))}, SHA256", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
