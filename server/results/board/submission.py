"""Rows that somebody else ran: what is checked before a board takes them.

A submission is a folder that ``goldfinch compare --rules strict`` wrote: the record, and the folder of each final run.
All that a record states of a final run is compared with the run's own files, the hash of the state with the checkpoint,
and the score with the model, which is scored again. Trials leave no files; their number, rounds, seeds and states are
checked against the rules, and their scores are taken as they are. Everybody can repeat them by the command.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from common.errors import ConfigError, DataError, GoldfinchError
from common.run_config import flat
from server.results.board.record import (
    IN_DOMAIN,
    LEFT_OUT,
    STUDY_SEED,
    BoardRecord,
    Case,
    FinalRun,
    Row,
    Study,
    differing_settings,
    shared_settings,
)
from server.results.run import Run

TOLERANCE = 0.011
"""Points by which a stated score may differ from the one in the files, which is rounded in places."""

RESCORED = 1.0
"""Points by which the score of the model on this machine may differ: another processor rounds in another order."""


class SubmissionError(ConfigError):
    """A submission is not accepted; the message has what was wrong and where."""


def check_row(board: BoardRecord, submitted: BoardRecord, name: str, folder: Path, *, rescore: bool = True) -> Row:
    """Return the row ``name`` of ``submitted`` if all checks pass.

    Args:
        board: the board that the row is for.
        submitted: the record of the submission.
        name: the row's name there.
        folder: the folder of the final runs, as ``goldfinch compare --output`` was given it.
        rescore: whether to score each model again; needs the data on this machine.

    Raises:
        SubmissionError: a check failed.
    """
    differ = submitted.same_board(board)
    if differ:
        raise SubmissionError(
            f"the submission is of other rules or settings than {board.name}: {', '.join(differ[:5])} differ; run it "
            f"again with the board's command: {board.command}"
        )
    row = submitted.rows[name]
    if row.weighting not in ("none", board.weighting):
        raise SubmissionError(f"{name} weighs clients by {row.weighting}; the board is of weighting={board.weighting}")
    if not row.cases:
        raise SubmissionError(f"{name} has no runs")
    for case_name, case in row.cases.items():
        where = f"{name}, {case_name}"
        if case.refused:
            raise SubmissionError(f"{where}: the submission has no result: {case.refused}")
        _check_studies(board, case, where)
        _check_seeds(board, case, where)
        for run in case.runs:
            place = folder / submitted.name / name / case_name.replace(":", "-") / f"seed-{run.seed}"
            _check_run(board, row, case_name, run, place)
            if rescore:
                _check_model(run, place)
    return row


def _check_studies(board: BoardRecord, case: Case, where: str) -> None:
    """Check number, seeds and budgets of the studies."""
    rules = board.rules
    if len(case.studies) != rules.studies:
        raise SubmissionError(f"{where}: {len(case.studies)} studies; the rules ask for {rules.studies}")
    for number, study in enumerate(case.studies):
        place = f"{where}, study {number}"
        if study.seed != STUDY_SEED + number:
            raise SubmissionError(f"{place}: seed {study.seed}; the rules ask for {STUDY_SEED + number}")
        if not study.done:
            raise SubmissionError(f"{place} is not finished")
        if study.rounds > rules.budget:
            raise SubmissionError(f"{place}: its trials have {study.rounds} rounds; the budget is {rules.budget}")
        _check_trials(board, study, place)


def _check_trials(board: BoardRecord, study: Study, place: str) -> None:
    """Check each trial's rounds, state and score, and that none was ended too early."""
    rules = board.rules
    complete = 0
    for number, trial in enumerate(study.trials):
        if trial.rounds > rules.rounds:
            raise SubmissionError(f"{place}, trial {number}: {trial.rounds} rounds; a trial has {rules.rounds}")
        if trial.state == "complete" and trial.rounds < rules.rounds:
            raise SubmissionError(
                f"{place}, trial {number} is called complete after {trial.rounds} of {rules.rounds} rounds"
            )
        if trial.state == "pruned" and complete < rules.unpruned:
            raise SubmissionError(
                f"{place}, trial {number} was ended early before {rules.unpruned} trials were complete"
            )
        if trial.state != "failed" and abs(trial.score - trial.curve.get(max(trial.curve, default=0), -1)) > 1e-6:
            raise SubmissionError(f"{place}, trial {number}: its score is not that of the last round of its curve")
        complete += trial.state == "complete"
    if study.best is None:
        raise SubmissionError(f"{place}: no trial is complete, so no setting was chosen")


def _check_seeds(board: BoardRecord, case: Case, where: str) -> None:
    """Check that there is one final run of each seed, and that each has the setting of its study."""
    seeds = sorted(run.seed for run in case.runs)
    if seeds != list(range(board.rules.runs)):
        raise SubmissionError(
            f"{where}: final runs have seeds {seeds}; the rules ask for 0 to {board.rules.runs - 1}, each once"
        )
    for run in case.runs:
        if run.study != board.rules.study_of(run.seed):
            raise SubmissionError(
                f"{where}, seed {run.seed}: it has the setting of study {run.study}; the rules give it that of study "
                f"{board.rules.study_of(run.seed)}"
            )


def _check_run(board: BoardRecord, row: Row, case: str, stated: FinalRun, folder: Path) -> None:
    """Compare what the record states of a final run with the run's files.

    Raises:
        SubmissionError: the folder lacks a file, a file is damaged, or something differs.
    """
    try:
        run = Run.open(folder)
        found = _facts(run)
    except GoldfinchError as error:
        raise SubmissionError(f"{folder}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SubmissionError(f"{folder}: its records are damaged ({type(error).__name__}: {error})") from error
    expected = {
        "the seed": stated.seed,
        "the hash of the state in summary.json": stated.state_sha256,
        "the hash of the state in the checkpoint": stated.state_sha256,
        "the hash of the settings in summary.json": stated.identity,
        "the hash of the settings in config.yaml": stated.identity,
        "the rounds": board.rules.rounds,
        "the bytes in activity.csv": dict(stated.bytes),
        "the hash of the code": stated.code,
    }
    for what, value in expected.items():
        if found[what] != value:
            raise SubmissionError(f"{folder}: {what}: {found[what]}; the record states {value}")
    _check_scores(run, case, stated)
    _check_settings(board, row, case, stated, run)


def _facts(run: Run) -> dict[str, Any]:
    """Return what a run's files say, by the name that messages use."""
    sums = {"down": 0, "up": 0}
    for line in run.activity:
        for direction in sums:
            sums[direction] += int(line.get(f"bytes_{direction}") or 0)
    return {
        "the seed": run.seed,
        "the hash of the state in summary.json": run.state_sha256,
        "the hash of the state in the checkpoint": run.checkpoint.state.sha256(),
        "the hash of the settings in summary.json": run.summary.get("identity"),
        "the hash of the settings in config.yaml": run.settings.identity,
        "the rounds": run.rounds_done,
        "the bytes in activity.csv": sums,
        "the hash of the code": run.code,
    }


def _check_scores(run: Run, case: str, stated: FinalRun) -> None:
    """Compare the scores in record, summary, history and confusion counts with each other."""
    scores = run.round_scores
    if not scores or scores[-1].missing:
        raise SubmissionError(f"{run.folder}: history.csv has no whole score of the last round")
    last = scores[-1]
    if last.round != run.rounds_done:
        raise SubmissionError(
            f"{run.folder}: the last score in history.csv is of round {last.round}, not {run.rounds_done}"
        )
    if not run.has_counts:
        raise SubmissionError(f"{run.folder}: confusion.jsonl lacks counts of a score in history.csv")
    for domain, accuracy in last.accuracy.items():
        counts = run.class_totals[last.round, domain].metric("accuracy")
        places = {"history.csv": accuracy, "summary.json": run.summary["accuracy"].get(domain)}
        if not run.personal:
            places["confusion.jsonl"] = counts
        places["the record"] = stated.accuracy.get(domain)
        _check_equal(f"{run.folder}: the accuracy on {domain}", places)
    average = statistics.fmean(last.accuracy.values())
    if case != IN_DOMAIN:
        average = last.accuracy[case.removeprefix(LEFT_OUT)]
    places = {"history.csv": average, "the record": stated.average, "its curve": stated.curve.get(last.round)}
    _check_equal(f"{run.folder}: the score", places)


def _check_equal(what: str, places: Mapping[str, float | None]) -> None:
    """Raise a refusal if the values differ by more than rounding."""
    first = next(iter(places.values()))
    for value in places.values():
        if value is None or first is None or abs(value - first) > TOLERANCE:
            listed = ", ".join(f"{value} in {place}" for place, value in places.items())
            raise SubmissionError(f"{what} differs: {listed}")


def _check_settings(board: BoardRecord, row: Row, case: str, stated: FinalRun, run: Run) -> None:
    """Check that a final run has the board's settings and the values that its study chose."""
    settings, folder = flat(run.config), run.folder
    chosen = row.cases[case].studies[stated.study].best
    assert chosen is not None  # _check_trials
    for key, value in chosen.values.items():
        if settings.get(key) != value:
            raise SubmissionError(f"{folder}: {key}={settings.get(key)}; study {stated.study} chose {value}")
    if settings.get("protocol.partition_seed", None) is not None:
        raise SubmissionError(f"{folder}: its partition is fixed; the rules draw it by the run's seed")
    if settings.get("method.weighting", row.weighting) != row.weighting:
        raise SubmissionError(
            f"{folder}: method.weighting={settings.get('method.weighting')}; the record states {row.weighting}"
        )
    found = shared_settings(run.config)
    differ = differing_settings(found, board.shared)
    if case != IN_DOMAIN:
        differ = [key for key in differ if not key.startswith("protocol.")]
        domain = case.removeprefix(LEFT_OUT)
        if list(settings.get("protocol.leave_out") or []) != [domain]:
            raise SubmissionError(
                f"{folder}: protocol.leave_out={settings.get('protocol.leave_out')}; the case is {case}"
            )
    if differ:
        raise SubmissionError(f"{folder}: {', '.join(differ[:5])} differ from the board's settings")


@torch.no_grad()
def _check_model(stated: FinalRun, folder: Path) -> None:
    """Score the model in the checkpoint again, where it is one shared model.

    Raises:
        SubmissionError: a domain's accuracy is another than stated, or the data are not on this machine.
    """
    run = Run.open(folder)
    if run.personal:
        return
    try:
        for domain, accuracy in stated.accuracy.items():
            split = run.test_split(domain)
            module = run.inference()
            images = run.settings.data.augmentation.test(split.images)
            predicted = module(images)[1].argmax(1)
            found = 100.0 * float((predicted == split.labels).float().mean())
            if abs(found - accuracy) > RESCORED:
                raise SubmissionError(
                    f"{folder}: its model has {found:.2f} % on {domain} here; the record states {accuracy:.2f} %"
                )
    except DataError as error:
        raise SubmissionError(
            f"{folder}: its model cannot be scored again: {error}; --no-rescore skips this"
        ) from error
