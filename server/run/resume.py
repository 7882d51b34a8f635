"""What a run was before it was resumed: whose data its rounds had, what code they ran, how well it did."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from common.metrics import RoundScore
from common.storage.files import write_json
from common.versions import code_files, package_versions
from common.wire.messages import Registration, printable
from server.run.schema import read_lines

MAX_NAMED = 5
"""Files and packages that are named of those that changed."""

_DATA = ("samples", "class_counts", "split", "content")


@dataclass
class ResumeCheck:
    """The registrations of the rounds that are done.

    Args:
        registrations: the last of each client; none for a new run.
        anyway: let clients in whose data have changed.
        changed: these clients, as they come, and what of their data.
    """

    registrations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    anyway: bool = False
    changed: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, folder: Path, *, anyway: bool) -> ResumeCheck:
        """Those in a run's folder."""
        found = read_lines(folder / "events.jsonl")
        return cls({entry.get("client", ""): entry for entry in found if entry["event"] == "registered"}, anyway)

    def refuses(self, registration: Registration) -> str:
        """Why a client cannot go on: its data are not what they were; empty if it can."""
        known = self.registrations.get(registration.client, {})
        other = [key for key in _DATA if known.get(key, "") not in ("", getattr(registration, key))]
        if not other:
            return ""
        self.changed.append(f"{registration.client} ({', '.join(other)})")
        return "" if self.anyway else f"its data are not what they were in the rounds that are done: {', '.join(other)}"

    def check(self) -> None:
        """Refuse to go on with other data, unless that is asked for.

        Raises:
            CheckpointError: whose data have changed.
        """
        if self.changed and not self.anyway:
            raise CheckpointError(
                f"the rounds that are done had other data of {', '.join(self.changed)}: bring them back, start anew "
                "with overwrite=true, or go on all the same with resume=anyway"
            )


def changed_code(folder: Path, own: tuple[str, ...] = (), *, resumed: bool) -> str:
    """What of code, that of the user's ``own`` packages too, and of installed versions is not as in the part before.

    ``code.json`` is written for the next.
    """
    path, now = folder / "code.json", {**code_files(own), **package_versions()}
    try:
        before = dict(json.loads(path.read_text())) if resumed and path.exists() else {}
    except (ValueError, TypeError, RecursionError):
        return "code.json, which would tell, cannot be read"
    finally:
        write_json(path, now)
    changed = sorted(name for name in before | now if before and before.get(name) != now.get(name))
    versions = package_versions()
    named = [
        f"{name} {before.get(name)} -> {now.get(name)}" if name in versions else name for name in changed[:MAX_NAMED]
    ]
    return printable(", ".join(named + [f"{len(changed) - MAX_NAMED} more"] * (len(changed) > MAX_NAMED)))


def best_of(scores: Sequence[RoundScore]) -> dict[str, float]:
    """The highest accuracy of each domain, of the average and of the worst, over rounds; means of whole scores only."""
    each = [
        score.accuracy if score.missing else {**score.accuracy, "average": score.average, "worst": score.worst}
        for score in scores
    ]
    names = dict.fromkeys(name for score in each for name in score)
    return {name: max(score[name] for score in each if name in score) for name in names}
