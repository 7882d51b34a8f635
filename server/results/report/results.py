"""The page's words and tables on what came out: the first sentences, scores, clients, cost."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from server.results.report.figures import client_rows, cost, run_name
from server.results.report.markup import bar, details, duration, listing, size, strip, table, text
from server.results.report.records import Board, Group, RunRecord

RULES = {
    "final": ("last round", "after the last scored round"),
    "last_n": ("mean of the last", "mean over the last scored rounds, the rule of FPL and FedAPC"),
    "best_round": ("best round", "of the round with the best test average, which flatters: it picks by the test set"),
}
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def number_word(count: int, noun: str) -> str:
    """``three clients``."""
    word = NUMBERS[count] if count < len(NUMBERS) else str(count)
    return f"{word} {noun}{'' if count == 1 else 's'}"


def values(group: Group, column: str, rule: str) -> list[float]:
    """A column's value in each of the group's runs: ``average``, ``worst``, ``spread`` or ``domain:<name>``."""
    found = []
    for run in group.runs:
        score = run.rules.get(rule)
        if score is None:
            continue
        name = column.removeprefix("domain:")
        value = score["accuracy"].get(name) if column.startswith("domain:") else score[column]
        if value is not None:
            found.append(float(value))
    return found


def mean(group: Group, column: str, rule: str = "final") -> float | None:
    """The column's mean over seeds; ``None`` where nothing was scored."""
    found = values(group, column, rule)
    return statistics.fmean(found) if found else None


def title(boards: Sequence[Board]) -> str:
    """The page's title."""
    labels = list(dict.fromkeys(group.runs[0].method for board in boards for group in board.groups))
    data = list(dict.fromkeys(board.data for board in boards))
    shown = listing(labels) if len(labels) <= 4 else f"{len(labels)} methods"
    return f"{shown} on {listing(data)}"


def standfirst(boards: Sequence[Board]) -> str:
    """The first sentences: what ran, and what came out."""
    return " ".join(f"<p>{' '.join(_sentences(board, len(boards) > 1))}</p>" for board in boards)


def _sentences(board: Board, named: bool) -> list[str]:
    runs = board.runs
    clients = max((len(run.registrations) for run in runs), default=0)
    rounds = sorted({run.rounds for run in runs})
    length = f"{rounds[0]}" if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
    first = number_word(len(runs), "run").capitalize()
    place = f" of {text(board.title)}" if named else ""
    sentences = [
        f"{first}{place}: {length} rounds with {number_word(clients, 'client')} "
        f"on {number_word(len(board.domains), 'domain')}."
    ]
    scored = [group for group in board.groups if mean(group, "average") is not None]
    scored.sort(key=lambda group: -(mean(group, "average") or 0.0))
    for index, group in enumerate(scored[:3]):
        worst = _worst_domain(group, board.domains)
        average, low = mean(group, "average") or 0.0, mean(group, "worst") or 0.0
        name, verb = f"<strong>{text(group.label)}</strong>", "reaches" if index == 0 else "comes to"
        tail = f", and {low:.1f} on its worst, {text(worst)}" if len(board.domains) > 1 else ""
        sentences.append(f"{name} {verb} {average:.1f} % on average over domains{tail}.")
    return sentences


def _worst_domain(group: Group, domains: Sequence[str]) -> str:
    scored = [(mean(group, f"domain:{name}"), name) for name in domains]
    return min((value, name) for value, name in scored if value is not None)[1]


def key_figures(boards: Sequence[Board]) -> str:
    """A row of the few numbers that a reader looks for first."""
    runs = [run for board in boards for run in board.runs]
    groups = [group for board in boards for group in board.groups if mean(group, "average") is not None]
    figures: list[tuple[str, str, str]] = []
    if groups:
        best = max(groups, key=lambda group: mean(group, "average") or 0.0)
        safest = max(groups, key=lambda group: mean(group, "worst") or 0.0)
        figures.append((f"{mean(best, 'average'):.1f} %", "best average", best.label))
        figures.append((f"{mean(safest, 'worst'):.1f} %", "best worst domain", safest.label))
    trouble = sum(1 for run in runs for row in run.activity if row["status"] in ("failed", "refused", "lost"))
    seconds = statistics.fmean(float(run.summary.get("wall_seconds") or _wall(run)) for run in runs)
    traffic = statistics.fmean(sum(cost(run)["bytes"].values()) for run in runs)
    figures.append((duration(seconds), "wall time", "mean of a run"))
    figures.append((size(traffic), "traffic", "both ways, mean of a run"))
    figures.append((str(trouble), "failed or refused", f"of {sum(len(run.activity) for run in runs)} answers"))
    cells = "".join(
        f"<div><dt>{text(name)}</dt><dd>{text(value)}<small>{text(note)}</small></dd></div>"
        for value, name, note in figures
    )
    return f'<dl class="figures">{cells}</dl>'


def _wall(run: RunRecord) -> float:
    return float(run.events[-1]["time"]) - float(run.events[0]["time"]) if run.events else 0.0


def score_tables(board: Board) -> str:
    """Accuracy per domain by method, one table per rule; all but the first are hidden until chosen."""
    made = []
    for position, (rule, (_, note)) in enumerate(RULES.items()):
        hidden = " hidden" if position else ""
        made.append(f'<div data-rule="{rule}"{hidden}>{_score_table(board, rule, note)}</div>')
    return "".join(made)


def _score_table(board: Board, rule: str, note: str) -> str:
    columns = [f"domain:{name}" for name in board.domains] + ["average", "worst", "spread"]
    best: dict[str, float] = {}
    for column in columns:
        means = [value for group in board.groups if (value := mean(group, column, rule)) is not None]
        if len(board.groups) > 1 and means:
            best[column] = min(means) if column == "spread" else max(means)
    rows = []
    for index, group in enumerate(board.groups):
        cells = [f'<span class="key group{index % 8}"></span>{text(group.label)}']
        cells += [_score(values(group, column, rule), best.get(column)) for column in columns]
        rounds = sorted({run.rounds for run in group.runs})
        cells += [listing([str(number) for number in rounds]), text(", ".join(map(str, group.seeds)))]
        rows.append(cells)
    head = ["method", *(text(name) for name in board.domains), "average", "worst", "spread", "rounds", "seeds"]
    caption = f"{board.title}: accuracy in %, {note}; spread is the standard deviation between domains"
    return table(head, rows, caption, kind="scores")


def _score(found: Sequence[float], best: float | None) -> str:
    if not found:
        return "-"
    middle = statistics.fmean(found)
    shown = f"{middle:.2f}"
    if best is not None and abs(middle - best) < 1e-9:
        shown = f"<strong>{shown}</strong>"
    return f"{shown} <small>± {statistics.stdev(found):.2f}</small>" if len(found) > 1 else shown


def client_table(group: Group, run: RunRecord) -> str:
    """What each client of a run brought and cost."""
    rows = client_rows(run)
    most = {key: max((row[key] for row in rows), default=0) for key in ("samples", "seconds")}
    tallest = max((max(row["classes"], default=0) for row in rows), default=0)
    body = []
    for row in rows:
        trouble = sum(row["answers"].get(status, 0) for status in ("failed", "refused", "lost"))
        body.append(
            [
                text(row["client"]),
                text(row["domain"]),
                _with_bar(f"{row['samples']}", row["samples"], most["samples"]),
                strip(row["classes"], run.class_names, tallest),
                f"{row['answers'].get('trained', 0)}",
                f'<span class="bad">{trouble}</span>' if trouble else "0",
                size(row["down"]),
                size(row["up"]),
                _with_bar(duration(row["seconds"]), row["seconds"], most["seconds"]),
                size(row["memory"]) if row["memory"] else "-",
            ]
        )
    head = ["client", "domain", "samples", "per class", "trained", "failed", "down", "up", "time", "memory"]
    devices = listing(sorted({row["device"] for row in rows if row["device"]}))
    note = f"<p class=note>Time is the client's own, over all rounds. {text(devices)}.</p>" if devices else ""
    return table(head, body, f"Clients of {run_name(group, run)}", numbers=2, kind="clients") + note


def _with_bar(shown: str, value: float, whole: float) -> str:
    return f"{shown}{bar([(shown, value)], whole, shown)}"


def cost_table(board: Board) -> str:
    """Bytes and time of each method, mean over its runs."""
    made = []
    for what, shown in (("bytes", size), ("seconds", duration)):
        totals = []
        for group in board.groups:
            each = [cost(run)[what] for run in group.runs]
            totals.append({key: statistics.fmean(entry[key] for entry in each) for key in each[0]})
        whole = max((sum(parts.values()) for parts in totals), default=0.0)
        names = list(totals[0]) if totals else []
        rows = []
        for group, parts in zip(board.groups, totals, strict=True):
            said = listing([f"{name} {shown(value)}" for name, value in parts.items()])
            stacked = bar([(f"{name}: {shown(value)}", value) for name, value in parts.items()], whole, said)
            cells = [shown(parts[name]) for name in names]
            rows.append([text(group.label), stacked, *cells, shown(sum(parts.values()))])
        head = [
            "method",
            "",
            *(f'<span class="key part{i}"></span>{text(name)}' for i, name in enumerate(names)),
            "all",
        ]
        caption = "Bytes between server and clients, a run" if what == "bytes" else "Clients' seconds by phase, a run"
        made.append(table(head, rows, caption, numbers=2, kind="cost"))
    return "".join(made)


def clients_section(boards: Sequence[Board]) -> str:
    """Client tables of all runs; the first run's is open."""
    made = []
    for board in boards:
        for group in board.groups:
            for run in group.runs:
                made.append((run_name(group, run), client_table(group, run)))
    first, *others = made
    return first[1] + "".join(details(name, content) for name, content in others)
