"""Check the record of the demonstration's run: all rounds done, and a node that was killed is back before the end.

A node that is killed before it has fetched its request, and is back before the round's deadline, misses no round: the
server waits for it. One that is killed later misses the rounds until Flower admits it again.

    python check_record.py FOLDER --rounds 6 --clients 4 --killed sketch-0

Prints one line per round and what is wrong; the exit status is 0 if nothing is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import GoldfinchError
from common.wire.messages import update_was_used
from goldfinch.record import RunRecord

MAX_ROUNDS_AWAY = 2
"""Rounds after the one in which a node is killed in which it may still be missing."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the rounds of the run, then what is wrong with it; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder of the run")
    parser.add_argument("--rounds", type=int, required=True, help="rounds that were asked for")
    parser.add_argument("--clients", type=int, required=True, help="clients of the federation")
    parser.add_argument("--killed", required=True, help="the client whose node was killed after round 1")
    options = parser.parse_args(arguments)
    try:
        run = RunRecord.open(options.folder)
        for line in describe(run, options.rounds, options.clients, options.killed):
            print(line)
        problems = check(run, options.rounds, options.clients, options.killed)
    except GoldfinchError as error:
        problems = [str(error)]
    for problem in problems:
        print(f"wrong: {problem}", file=sys.stderr)
    return 1 if problems else 0


def clients_of_rounds(run: RunRecord, rounds: int) -> dict[int, list[str]]:
    """The clients that trained, by round from 1 to ``rounds``."""
    found: dict[int, list[str]] = {number: [] for number in range(1, rounds + 1)}
    for row in run.replies:
        number = int(row["round"])
        if number in found and update_was_used(str(row["status"])):
            found[number].append(str(row["client"]))
    return found


def describe(run: RunRecord, rounds: int, clients: int, killed: str) -> list[str]:
    """One line per round, with why the killed client did not train; then where it came back, state and bytes."""
    lines = []
    by_round = clients_of_rounds(run, rounds)
    for number, present in by_round.items():
        reasons = "; ".join(_reason(row) for row in run.replies if _is_failure(row, number, killed))
        lines.append(
            f"round {number}: {len(present)} of {clients} nodes trained" + (f"  ({reasons})" if reasons else "")
        )
    away = [number for number, present in by_round.items() if killed not in present]
    back = [number for number in by_round if away and number > max(away)]
    if away:
        rounds_away = f"was missed in rounds {away} and trained again in rounds {back}"
    else:
        rounds_away = "was back before its round was closed and was missed in none"
    lines.append(f"{killed} {rounds_away}, with its own key and state")
    size = run.reply_totals.bytes
    lines.append(f"state {str(run.state_sha256)[:16]}, {size['up'] + size['down']:,} bytes both ways")
    return lines


def check(run: RunRecord, rounds: int, clients: int, killed: str) -> list[str]:
    """What is wrong with the record, one sentence each; empty if nothing is."""
    problems = []
    done = run.facts.rounds
    if done != rounds:
        problems.append(f"{done} rounds were done instead of {rounds}")
    by_round = clients_of_rounds(run, rounds)
    away = [number for number, present in by_round.items() if killed not in present]
    if away and max(away) == rounds:
        problems.append(f"{killed} was not back before the end; it was missed in rounds {away}")
    elif len(away) > 1 + MAX_ROUNDS_AWAY:
        problems.append(f"{killed} was missed in {len(away)} rounds {away}; at most {1 + MAX_ROUNDS_AWAY} are expected")
    for number, present in by_round.items():
        others = [client for client in present if client != killed]
        if len(others) < clients - 1:
            problems.append(f"in round {number} only {sorted(present)} trained; another node than {killed} was lost")
    if run.rules.get("final", {}).get("missing"):
        missing = ", ".join(run.rules["final"]["missing"])
        problems.append(f"the last score lacks the domains {missing}, although all nodes were there")
    return problems


def _is_failure(row: Mapping[str, Any], number: int, client: str) -> bool:
    return int(row["round"]) == number and row["client"] == client and not update_was_used(str(row["status"]))


def _reason(row: Mapping[str, Any]) -> str:
    words = " ".join(str(row.get("reason", "")).split())
    return f"{row['client']} {row['status']}: {words[:90]}"


if __name__ == "__main__":
    sys.exit(main())
