"""What the page says in words and tables: scores, clients, cost, events, settings, versions. No markup here."""

import datetime
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from common.metrics import COUNTED, METRICS
from common.text import duration, listing, size
from common.wire.messages import CLIPPED, trained
from server.results.columns import cell_marks, domain_heads, summary_columns
from server.results.groups import Board, Group, cells, comparable, ranked
from server.results.run import Run
from server.results.seeds import Value
from server.results.table import RULES, Rule
from server.trackers.events import describe

TROUBLE = ("failed", "refused", "lost")
ORDINARY = ("round", "round done", "score", "validation", "registered")
STATES = {
    "finished": "finished",
    "stopped": "was stopped and can go on with resume=true",
    "unfinished": "has not finished",
}


def title(boards: Sequence[Board]) -> str:
    """The page's title."""
    labels = list(dict.fromkeys(group.runs[0].title for board in boards for group in board.groups))
    shown = listing(labels) if len(labels) <= 4 else f"{len(labels)} methods"
    return f"{shown} on {listing(list(dict.fromkeys(board.data for board in boards)))}"


def worst_domain(group: Group, domains: Sequence[str]) -> str:
    """The domain of the lowest mean accuracy."""
    return min((value.mean, name) for name in domains if (value := group.value(f"domain:{name}")))[1]


def key_figures(boards: Sequence[Board]) -> list[tuple[str, str, str]]:
    """The few numbers that a reader looks for first: number, name, note."""
    runs = [run for board in boards for run in board.runs]
    groups = comparable(ranked([group for board in boards for group in board.groups]))
    figures = []
    for column, name in (("average", "best average"), ("worst", "best worst domain")) if groups else ():
        found = [(value.mean, group.label) for group in groups if (value := group.value(column))]
        best, label = max(found, key=lambda pair: pair[0])
        figures.append((f"{best:.1f} %", name, label))
    trouble = sum(1 for run in runs for row in run.activity if row["status"] in TROUBLE)
    seconds = statistics.fmean(float(run.summary.get("wall_seconds") or _wall(run)) for run in runs)
    traffic = statistics.fmean(sum(cost(run)["bytes"].values()) for run in runs)
    figures.append((duration(seconds), "wall time", "mean of a run"))
    figures.append((size(traffic), "traffic", "both ways, mean of a run"))
    figures.append((str(trouble), "failed or refused", f"of {sum(len(run.activity) for run in runs)} answers"))
    return figures


def _wall(run: Run) -> float:
    return float(run.events[-1]["time"]) - float(run.events[0]["time"]) if run.events else 0.0


def rules_of(boards: Sequence[Board]) -> dict[str, Rule]:
    """Return the rules by which a run of the page was scored."""
    known = {rule for board in boards for run in board.runs for rule in run.rules}
    return {key: rule for key, rule in RULES.items() if key != "validated" or key in known}


def metric_boards(board: Board) -> list[tuple[str, Board]]:
    """Return the board with its scores by each other metric, after the metric's name; none without confusion counts."""
    found: list[tuple[str, Board]] = []
    for metric in COUNTED:
        other = board.by_metric(metric)
        if other is not None:
            found.append((METRICS[metric], other))
    return found


def score_heads(board: Board) -> list[str]:
    """The heads of the columns of :func:`score_rows`."""
    return [*domain_heads(board.groups, board.domains), *summary_columns(board.groups, spread=True).values()]


def score_rows(board: Board, rule: str) -> Iterator[tuple[Group, list[tuple[Value | None, bool]]]]:
    """Each group with its cells: the value over seeds, ``None`` without a score, and whether it is the best.

    Columns are the domains and then :func:`server.results.seeds.summary_columns`; of spread the least is best. Rows
    scored on clients' own models are not ranked with those of one shared model, and partial scores with none.
    """
    return zip(board.groups, cells(board.groups, _columns(board), rule), strict=True)


def _columns(board: Board) -> list[str]:
    return [*(f"domain:{name}" for name in board.domains), *summary_columns(board.groups, spread=True)]


def score_marks(board: Board, group: Group, rule: str) -> list[str]:
    """The marks of a group's cells: partial, and on a domain that it has not trained on; mostly empty."""
    return cell_marks(board.groups, group, _columns(board), rule)


def partial_groups(board: Board) -> list[tuple[str, str]]:
    """Label of each group whose final score is partial, and what it lacks."""
    return [(group.label, "; ".join(found)) for group in board.groups if (found := group.missing())]


def client_rows(run: Run) -> list[dict[str, Any]]:
    """What each client brought and cost over the run; ``trained`` counts exchanges, ``clipped`` ones among them."""
    rows: dict[str, dict[str, Any]] = {client: _client(client, entry) for client, entry in run.registrations.items()}
    for row in run.activity:
        found = rows.setdefault(str(row["client"]), _client(str(row["client"]), row))
        status = str(row["status"])
        found["trained"] += trained(status)
        found["clipped"] += status == CLIPPED
        found["trouble"] += status in TROUBLE
        for way in ("up", "down"):
            found[way] += int(row.get(f"bytes_{way}") or 0)
        for phase in ("load", "score", "train", "save"):
            found["seconds"] += float(row.get(f"seconds_{phase}") or 0)
        found["memory"] = max(found["memory"], int(row.get("peak_bytes") or 0))
    return list(rows.values())


def _client(client: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "client": client,
        "domain": str(entry.get("domain", "")),
        "samples": int(entry.get("samples") or 0),
        "classes": (counts := list(entry.get("class_counts") or [])),
        "tallest": max(counts, default=0),
        "device": str(entry.get("device", "")),
        **dict.fromkeys(("trained", "clipped", "trouble", "up", "down", "seconds", "memory"), 0),
    }


def cost(run: Run) -> dict[str, dict[str, float]]:
    """Totals of a run: ``seconds`` over clients by phase, and ``bytes`` by what they carried."""

    def total(column: str) -> float:
        return sum(float(row.get(column) or 0) for row in run.activity)

    parts = {f"up, {part}": total(f"bytes_up_{part}") for part in ("weights", "prototypes", "extra")}
    headers = max(0.0, total("bytes_up") - sum(parts.values()))
    return {
        "bytes": {"down": total("bytes_down")} | parts | {"up, header": headers},
        "seconds": {phase: total(f"seconds_{phase}") for phase in ("train", "score", "load", "save")},
    }


def group_costs(board: Board, what: str) -> list[dict[str, Any]]:
    """``label``, ``parts`` (see :func:`cost`, mean over runs) and ``all`` of each group."""
    found = []
    for group in board.groups:
        each = [cost(run)[what] for run in group.runs]
        parts = {key: statistics.fmean(entry[key] for entry in each) for key in each[0]}
        found.append({"label": group.label, "parts": parts, "all": sum(parts.values())})
    return found


def event_rows(run: Run) -> list[dict[str, str | bool]]:
    """Events other than the ordinary round's: ``time`` (UTC), ``name``, ``line``, ``traceback``, and ``trouble``."""
    rows: list[dict[str, str | bool]] = []
    for entry in run.events:
        name = str(entry["event"])
        line = describe(name, entry, int(run.config["train"]["rounds"]))
        if name not in ORDINARY and line:
            when = datetime.datetime.fromtimestamp(float(entry["time"]), datetime.UTC)
            row: dict[str, str | bool] = {"time": f"{when:%Y-%m-%d %H:%M:%S}", "name": name, "line": line}
            rows.append(
                row | {"traceback": str(entry.get("traceback") or ""), "trouble": name not in ("start", "finish")}
            )
    return rows


def headline(run: Run) -> str:
    """What became of a run, and of one that did not end well why: its last event out of the ordinary."""
    told = [str(row["line"]) for row in event_rows(run) if row["trouble"]]
    if run.status == "failed":
        return told[-1]
    return f"{STATES[run.status]}: {told[-1]}" if run.status == "unfinished" and told else STATES[run.status]


def differing_settings(groups: Sequence[Group]) -> list[tuple[str, list[str]]]:
    """Settings in which the groups differ, each with its value in every group."""
    found = []
    for key in dict.fromkeys(key for group in groups for key in group.runs[0].options):
        values = [group.runs[0].options.get(key, "-") for group in groups]
        shown = [value if isinstance(value, str) else json.dumps(value, default=str) for value in values]
        if not key.endswith("_target_") and len(set(shown)) > 1:
            found.append((key, shown))
    return found


def versions(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Versions of packages on the server."""
    pairs = dict.fromkeys(
        (str(name), str(value)) for run in runs for name, value in run.summary.get("versions", {}).items()
    )
    return {name: sorted(value for other, value in pairs if other == name) for name, _ in pairs}


def splits(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Each client with the SHA-256 of its split; twice if runs differ in it."""
    return list(dict.fromkeys(pair for run in runs for pair in run.summary.get("splits", {}).items()))


def privacy_rows(runs: Sequence[tuple[str, Run]]) -> list[dict[str, str]]:
    """What each private run covers and has released: ``run``, ``unit``, ``covers``, ``releases``, ``epsilon``, ``why``.

    Args:
        runs: names on the page, and runs; those without differential privacy have no row.
    """
    rows = []
    for name, run in runs:
        report = run.privacy
        if report is None:
            continue
        spent = [value for value in report["conditional_epsilon"].values() if value is not None]
        most = f"{max(spent):g}" if spent else "infinite"
        conditions = list(report["conditions"])
        rows.append(
            {
                "run": name,
                "unit": f"one {report['unit']}",
                "covers": listing(report["covers"]) or "nothing",
                "releases": str(max(report["releases"].values(), default=0)),
                "epsilon": "none" if conditions else most,
                "why": "; ".join(conditions) + f" (otherwise {most})" if conditions else "",
            }
        )
    return rows
