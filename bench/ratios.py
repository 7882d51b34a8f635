"""Rows of the benchmarks that measure the whole: a quantity, its opponent in the same run, and the machine's class."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench.rows import append_rows, circumstances, cpu_name, read_all

RESULTS = Path(__file__).parent / "results" / "system.csv"
CLASS = ("cpu", "cores", "threads", "torch")
QUIET = 1.5
"""Largest load average of the last minute at which wall-clock times are measured."""

_load_before: list[float] = []


@dataclass
class Ratio:
    """One measured variant of one subject, as it stands in bench/results/system.csv.

    ``low``, ``middle`` and ``high`` are the quartiles of the quantity over the repeats. ``ratio`` is the opponent's
    value over this one's, so that more is better: the median over the repeats, in each of which all variants ran in
    turn; ``ratio_low`` and ``ratio_high`` are its quartiles. A row without an opponent is a quantity of its own.

    Args:
        subject, variant, shape: what was measured, and at which sizes.
        unit: unit of the quantity: ``s``, ``ms``, ``us``, ``MiB`` ...
        against: the variant that is the opponent; empty if there is none.
        goal: smallest ratio, or (without opponent) largest value, that was aimed for; ``None`` if nothing was.
        cores: cores that the process could use; ``load``: the machine's load average before the measurement if the
            script waited for a quiet machine, else when the row was written, with the benchmark's own part.
    """

    subject: str
    variant: str
    shape: str
    unit: str
    low: float
    middle: float
    high: float
    against: str
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    repeats: int
    goal: float | None
    cpu: str
    cores: int
    threads: int
    load: float
    torch: str
    python: str
    commit: str
    when: str

    @property
    def met(self) -> bool | None:
        """Whether the goal was met; ``None`` without a goal."""
        if self.goal is None:
            return None
        return self.middle <= self.goal if self.ratio is None else self.ratio >= self.goal


def environment() -> dict[str, object]:
    """Return the columns of a row that describe the machine."""
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(_load_before[-1] if _load_before else os.getloadavg()[0], 2),
        **circumstances(),
    }


def wait_until_quiet(seconds: float = 900.0) -> None:
    """Wait until the load average of the last minute is at most :data:`QUIET`; later rows have it as their load.

    Called by scripts that measure by the wall clock, which other processes stretch.

    Raises:
        SystemExit: the machine was still busy after ``seconds``; nothing was measured.
    """
    end = time.monotonic() + seconds
    while (load := os.getloadavg()[0]) > QUIET:
        if time.monotonic() > end:
            raise SystemExit(
                f"load {load:.1f} after {seconds:.0f} s, at most {QUIET} wanted: stop what else runs, try again"
            )
        print(f"load {load:.1f}: waiting until it is at most {QUIET}", flush=True)
        time.sleep(min(5.0, seconds))
    _load_before.append(load)


def machine_class() -> tuple[str, ...]:
    """The class of this machine and process, as :func:`class_of` a row."""
    here = environment()
    return tuple(str(here[name]) for name in CLASS)


def class_of(row: Mapping[str, str]) -> tuple[str, ...]:
    """Rows are compared within one class: processor, cores that may be used, PyTorch's threads and version."""
    return tuple(row[name] for name in CLASS)


def in_turn(variants: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each variant, all in turn in every repeat, after one call of each that does not count.

    With one thread it is the thread's own processor time, which other processes cannot stretch; else the wall clock.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(repeats + 1):
        for name, function in variants.items():
            start = clock()
            function()
            if repeat:
                seconds[name].append(clock() - start)
    return seconds


def compare(
    subject: str,
    shape: str,
    unit: str,
    values: Mapping[str, Sequence[float]],
    against: str,
    goals: Mapping[str, float] | None = None,
) -> list[Ratio]:
    """Rows of variants that were measured in turn; the ``i``-th values of all belong to one repeat."""
    rows = []
    for variant, own in values.items():
        ratios = [other / value for other, value in zip(values[against], own, strict=True)]
        goal = (goals or {}).get(variant)
        rows.append(_row(subject, variant, shape, unit, own, against, ratios, goal))
    return rows


def quantity(
    subject: str, variant: str, shape: str, unit: str, values: Sequence[float], goal: float | None = None
) -> Ratio:
    """A row of something that has no opponent; ``goal`` is the most it should be."""
    return _row(subject, variant, shape, unit, values, "", None, goal)


def _row(
    subject: str,
    variant: str,
    shape: str,
    unit: str,
    values: Sequence[float],
    against: str,
    ratios: Sequence[float] | None,
    goal: float | None,
) -> Ratio:
    low, middle, high = (round(value, 6) for value in quartiles(values))
    share = [round(value, 4) for value in quartiles(ratios)] if ratios is not None else [None] * 3
    row = Ratio(
        subject, variant, shape, unit, low, middle, high, against, share[1], share[0], share[2], len(values), goal,
        **environment(),  # type: ignore[arg-type]  # typed by Ratio's fields
    )  # fmt: skip
    print_row(row)
    return row


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def print_row(row: Ratio) -> None:
    """One line of the table."""
    text = f"{row.subject:18} {row.variant:22} {row.shape:40} {row.middle:12.4f} {row.unit:4}"
    text += f" ({row.low:.4f} .. {row.high:.4f}, {row.repeats} repeats)"
    if row.ratio is not None:
        text += f"  {row.against}/this {row.ratio:7.3f} ({row.ratio_low:.3f} .. {row.ratio_high:.3f})"
    if row.goal is not None:
        sign = "<=" if row.ratio is None else ">="
        text += f"  goal {sign} {row.goal:g} {'met' if row.met else 'MISSED'}"
    print(text, flush=True)


def append(rows: Sequence[Ratio], path: Path = RESULTS) -> None:
    """Add ``rows`` to the CSV at ``path``, made with a header when it does not exist."""
    append_rows(path, [asdict(row) for row in rows])


def read(path: Path = RESULTS) -> list[dict[str, str]]:
    """The rows of the CSV, as text; none if there is no file."""
    return read_all(path)
