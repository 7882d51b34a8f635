"""When a run stops before its last round: scores no longer improve, or further rounds could not help."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import BUDGET_SPENT, IN_A_NEW_RUN, EngineError
from common.settings import RunSettings
from server.run.engine import Failure
from server.run.files import commonest_trouble, goes_on
from server.run.history import History
from server.run.records import Recorder
from server.run.schema import REPLIES, stream_lines

MAX_LINES = 40
"""Lines of a traceback that end a run's error message."""


def is_out_of_patience(settings: RunSettings, done: int, recorder: Recorder) -> bool:
    """Return whether validation scores have not improved for ``train.patience`` rounds.

    Most methods score a round's state in the round after it, so such a run does one round more. A round without a
    client's score says nothing of an improvement, and does not count.

    Args:
        settings: the run's settings.
        done: rounds that are done.
        recorder: knows the scores.
    """
    patience = settings.train.patience
    if patience is None:
        return False
    if settings.method.scores_new_state and recorder.validated < done:
        return False  # the last state must have a score
    return recorder.rounds_since_best >= patience


def unusable(problem: str, number: int, *, trained: bool) -> EngineError:
    """Return the error that ends a run whose state after round ``number`` cannot be used.

    Args:
        problem: why.
        number: the round.
        trained: whether any round before was held.
    """
    kept = "the round before is kept" if trained else "no round was complete, so nothing is kept"
    return EngineError(f"the state after round {number} {problem}; {kept}")


def check_errors_differ(failures: Sequence[Failure], number: int, settings: RunSettings, *, trained: bool) -> None:
    """Stop a run in which every client raised the same error: further rounds would be the same.

    Where a round asks some of the clients, theirs may be lies, or faults of their own: the others were not asked.

    Args:
        failures: the failures of an exchange without an accepted reply.
        number: the round.
        settings: the run's settings.
        trained: whether any round before was held.

    Raises:
        EngineError: all clients raised the same error; the message has its traceback.
    """
    reasons: set[str] = set()
    for failure in failures:
        if failure.status != "failed" or not failure.reason:
            return
        reasons.add(failure.reason)
    if len(reasons) != 1 or len(failures) < len(settings.clients):
        return
    reason = reasons.pop()
    lines = [line for line in failures[0].traceback.splitlines() if line.strip()]
    advice = "Every further round would fail the same way, so the run stops."
    if IN_A_NEW_RUN not in reason:
        advice += " Fix the cause; resume=true continues."
    if reason.startswith(BUDGET_SPENT):
        advice = "No further round can be held."
        if trained and not settings.scheduled:
            advice += f" The state of round {number - 1} is kept: resume=true train.rounds={number - 1} scores it."
    message = [f"in round {number} every client raised the same: {reason}", advice]
    raise EngineError("\n  ".join([*message, *lines[-MAX_LINES:]]))


def trouble(history: History, number: int, *, trained: bool) -> str:
    """Return why replies did not count, and what is kept.

    Args:
        history: the run's files.
        number: rounds that are done.
        trained: whether any round was held.
    """
    replies = history.folder / REPLIES
    kept = "fix it, then run again"
    if trained:
        kept = f"the state of round {number} is kept: resume=true goes on"
        if not goes_on(stream_lines(replies)):
            kept = f"the state of round {number} is kept, but resume=true would end the same way"
    return f"{commonest_trouble(stream_lines(replies))}; all reasons are in {replies}; {kept}"
