"""The numbers of a comparison: the one place of their defaults, their ranges and their words.

The options of ``goldfinch compare``, the keywords of :func:`goldfinch.compare`, their errors and the table of
docs/fair-comparison.md are those of :class:`Rules`. This module imports nothing heavy: the program's help needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from common.errors import ConfigError, nearest

STUDY_SEED = 1000
"""Seed of the first study; the others count up from it. Final runs have seeds from 0."""

IN_DOMAIN = "in_domain"
"""The case in which every domain has a client, and all domains are scored."""

LEAVE_ONE_OUT = "leave_one_out"
SCORES = (IN_DOMAIN, LEAVE_ONE_OUT)
WEIGHTINGS = ("uniform", "samples")


def _count(default: int, meaning: str) -> Any:
    """Return a field that holds a whole number, 1 or more."""
    return field(default=default, metadata={"meaning": meaning, "default": str(default)})


def _choice(default: Any, shown: str, choices: tuple[str, ...], meaning: str) -> Any:
    """Return a field that holds one or several of ``choices``; ``shown`` is its default in words."""
    return field(default=default, metadata={"meaning": meaning, "default": shown, "choices": choices})


@dataclass(frozen=True)
class Rules:
    """The numbers of a comparison.

    Args:
        studies: independent tuning studies of each method, >= 1. An interval needs two, a test three.
        trials: trials of a study for each searched setting, >= 1. A method with three searched settings has three
            times as many trials as one with a single setting, so that every setting is tuned alike.
        runs: final runs of each study, >= 1, with seeds that nothing else has.
        scores: ``in_domain``, ``leave_one_out`` or both.
        weighting: how the server weighs clients in averages of models: ``uniform`` or ``samples`` for all methods that
            have the setting; empty leaves each method's own.
        batch: trials of a study that are drawn without each other's scores, >= 1. As many processes can do them at the
            same time.

    Raises:
        ConfigError: a number or a choice is out of range.
    """

    studies: int = _count(3, "independent tuning studies of each method; an interval needs two, a test three")
    trials: int = _count(8, "trials of a study for each searched setting")
    runs: int = _count(2, "final runs of each study")
    scores: Sequence[str] = _choice(
        (IN_DOMAIN,), IN_DOMAIN, SCORES, f"kinds of score, with a comma between them: {', '.join(SCORES)}"
    )
    weighting: str = _choice(
        "", "each method's own", WEIGHTINGS, "weights of clients in averages of models, for all: uniform or samples"
    )
    batch: int = _count(1, "trials of a study that are drawn without each other's scores, and can be done together")

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if "choices" in each.metadata:
                _check_choices(each.name, value, each.metadata["choices"])
            elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{each.name} {value}: a comparison needs a whole number, 1 or more")
        if not self.scores:
            raise ConfigError(f"scores: choose among {', '.join(SCORES)}")
        if self.studies * self.runs > STUDY_SEED:
            raise ConfigError(f"studies {self.studies}, runs {self.runs}: at most {STUDY_SEED} final runs a method")

    def seeds_of(self, study: int) -> range:
        """Return the seeds of a study's final runs. No other study has them."""
        return range(study * self.runs, (study + 1) * self.runs)

    @property
    def options(self) -> list[str]:
        """The options of ``goldfinch compare`` that state these numbers; what is empty is left out."""
        words: list[str] = []
        for each in fields(self):
            value = getattr(self, each.name)
            if not isinstance(value, int | str):
                value = ",".join(value)
            if value != "":
                words.append(f"--{each.name}={value}")
        return words


def _check_choices(name: str, value: str | Sequence[str], choices: tuple[str, ...]) -> None:
    """Check one choice, which may be empty, or several.

    Raises:
        ConfigError: one is unknown; the message names the nearest.
    """
    chosen = value
    if isinstance(value, str):
        chosen = [value] if value else []
    for one in chosen:
        if one not in choices:
            raise ConfigError(f"{name} {one}: {nearest(one, choices)}")


NAMES = tuple(each.name for each in fields(Rules))
"""The names of the numbers."""


def help_text(name: str) -> str:
    """Return what a number means and its default, as a sentence for the program's help."""
    for each in fields(Rules):
        if each.name == name:
            meaning = each.metadata["meaning"]
            return f"{meaning[0].upper()}{meaning[1:]}; {each.metadata['default']} by default."
    raise KeyError(name)
