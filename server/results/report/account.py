"""The page's account of how the runs went and how to repeat them: events, settings, versions, hashes, commands."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from server.results.report.command import repeat_command
from server.results.report.figures import run_name
from server.results.report.markup import details, listing, table, text
from server.results.report.records import Board, RunRecord
from server.results.report.results import number_word
from server.trackers.events import describe

ORDINARY = ("round", "round done", "score", "registered")
STATES = {
    "finished": "finished",
    "stopped": "was stopped and can go on with resume=true",
    "unfinished": "has not finished",
}


def events_section(boards: Sequence[Board]) -> str:
    """Failures, refusals, resumes and the like, run by run; runs without any share a sentence."""
    calm, made = [], []
    for board in boards:
        for group in board.groups:
            for run in group.runs:
                name = run_name(group, run)
                rows, trouble = _events(run)
                content = table(["time (UTC)", "event", "what happened"], rows, f"Events of {name}", numbers=9)
                if not trouble and run.status == "finished":
                    calm.append((name, content))
                    continue
                what = f"{number_word(trouble, 'event')} out of the ordinary"
                made.append(f"<h3>{text(name)}</h3><p>The run {STATES[run.status]}: {what}.</p>{content}")
    if calm:
        names = text(listing([name for name, _ in calm]))
        made.append(f"<p>{names} finished without failures, refusals or resumes.</p>")
        made += [details(f"Start and end of {name}", content) for name, content in calm]
    return "".join(made)


def _events(run: RunRecord) -> tuple[list[list[str]], int]:
    """Rows of the table, and how many of them are out of the ordinary."""
    rows, trouble = [], 0
    total = int(run.config["train"]["rounds"])
    for entry in run.events:
        name = str(entry["event"])
        line = describe(name, entry, total)
        if name in ORDINARY or not line:
            continue
        trouble += name not in ("start", "finish")
        trace = str(entry.get("traceback") or "")
        shown = text(line) + (details("traceback", f"<pre>{text(trace)}</pre>") if trace else "")
        when = datetime.datetime.fromtimestamp(float(entry["time"]), datetime.UTC)
        rows.append([f"<time>{when:%Y-%m-%d %H:%M:%S}</time>", text(name), shown])
    return rows, trouble


def settings_section(boards: Sequence[Board]) -> str:
    """What differs between the groups, and all settings of each."""
    groups = [group for board in boards for group in board.groups]
    made = []
    if len(groups) > 1:
        keys = dict.fromkeys(key for group in groups for key in group.runs[0].settings)
        rows = []
        for key in keys:
            if key.endswith("_target_"):
                continue
            shown = [_setting(group.runs[0].settings, key) for group in groups]
            if len(set(shown)) > 1:
                rows.append([f"<code>{text(key)}</code>", *(f"<code>{text(value)}</code>" for value in shown)])
        head = ["setting", *(text(group.label) for group in groups)]
        made.append(table(head, rows, "Settings that differ", numbers=9, kind="settings") if rows else "")
    for board in boards:
        for group in board.groups:
            plain = OmegaConf.to_yaml(OmegaConf.create(dict(group.runs[0].config)))
            made.append(details(f"All settings of {group.label}", f"<pre>{text(plain)}</pre>"))
    return "".join(made)


def _setting(settings: Mapping[str, Any], key: str) -> str:
    if key not in settings:
        return "-"
    value = settings[key]
    return value if isinstance(value, str) else json.dumps(value, default=str)


def repeat_section(boards: Sequence[Board]) -> str:
    """The command, the hashes of data and result, and the versions of every run."""
    made, rows = [], []
    for board in boards:
        for group in board.groups:
            for run in group.runs:
                name = run_name(group, run)
                command = repeat_command(run.config)
                made.append(
                    f'<div class="command"><p>{text(name)}</p><pre tabindex="0">{text(command)}</pre>'
                    f'<button type="button" data-copy="{text(command)}">Copy<span class="hidden"> the command of '
                    f"{text(name)}</span></button></div>"
                )
                state = str(run.summary.get("state_sha256", "-"))
                identity = str(run.summary.get("identity", "-"))
                rows.append([text(name), f"<code>{text(identity)}</code>", f"<code>{text(state)}</code>"])
    head = ["run", "settings", "SHA-256 of the final state"]
    hashes = table(head, rows, "The same settings, seed and thread count give the same final state", numbers=9)
    runs = [run for board in boards for run in board.runs]
    return "".join(made) + hashes + _versions(runs) + _splits(runs)


def _versions(runs: Sequence[RunRecord]) -> str:
    found: dict[str, set[str]] = {}
    for run in runs:
        for name, version in run.summary.get("versions", {}).items():
            found.setdefault(str(name), set()).add(str(version))
    if not found:
        return ""
    rows = [[text(name), text(listing(sorted(versions)))] for name, versions in found.items()]
    return details("Versions", table(["package", "version"], rows, "Versions on the server", numbers=9))


def _splits(runs: Sequence[RunRecord]) -> str:
    rows: dict[tuple[str, str], None] = {}
    for run in runs:
        for client, split in run.summary.get("splits", {}).items():
            rows[str(client), str(split)] = None
    if not rows:
        return ""
    cells = [[text(client), f"<code>{text(split)}</code>"] for client, split in rows]
    return details("Hashes of the data", table(["client", "SHA-256 of its split"], cells, "Who held what", numbers=9))
