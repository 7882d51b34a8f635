"""Check that pip installed the archives whose SHA-256 the project has recorded.

    pip install --report report.json ...
    python check_archives.py report.json hashes.txt

``hashes.txt`` is made by ``make lock``. pip's own ``--require-hashes`` refuses an editable install, and needs the exact
list for each choice of extras. What has no hash of an archive, such as a folder, is not from an index and is left out.

The exit status is 0 if every archive is one of those recorded.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def canonical(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def recorded(text: str) -> dict[tuple[str, str], set[str]]:
    """SHA-256 of every archive by name and version, from lines as ``uv pip compile --generate-hashes`` writes them."""
    found: dict[tuple[str, str], set[str]] = {}
    hashes: set[str] = set()
    for line in text.splitlines():
        pinned = re.match(r"([\w.-]+)(?:\[[\w,-]+\])?==([^\s;\\]+)", line)
        if pinned:
            hashes = found.setdefault((canonical(pinned[1]), pinned[2]), set())
        hashes.update(re.findall(r"--hash=sha256:(\w{64})", line))
    return found


def problems(report: dict[str, Any], known: dict[tuple[str, str], set[str]]) -> list[str]:
    """What was installed and is not recorded, a line each."""
    found = []
    for package in report["install"]:
        name, version = package["metadata"]["name"], package["metadata"]["version"]
        archive = package["download_info"].get("archive_info")
        if archive is None:
            continue
        expected = known.get((canonical(name), version))
        digest = archive.get("hashes", {}).get("sha256")
        if expected is None:
            found.append(f"{name} {version} is not in the list of hashes; make lock writes it anew")
        elif digest not in expected:
            found.append(f"{name} {version}: the archive's SHA-256 is {digest}, which is none of those recorded")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is wrong; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="what pip wrote with --report")
    parser.add_argument("hashes", type=Path, help="the hashes that are recorded")
    options = parser.parse_args(arguments)
    report = json.loads(options.report.read_text())
    found = problems(report, recorded(options.hashes.read_text()))
    for line in found:
        print(line, file=sys.stderr)
    if found:
        return 1
    print(f"{len(report['install'])} packages installed, every archive of the index as recorded")
    return 0


if __name__ == "__main__":
    sys.exit(main())
