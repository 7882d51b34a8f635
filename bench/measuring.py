"""What the benchmarks share: the command line, the end of started processes, timing, memory, launch counts, rows."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.rows import append_rows, circumstances, cpu_name

Step = Callable[[int], object]
"""One forward and backward; the argument rotates its inputs."""


@dataclass
class Row:
    """One measured variant of one subject. Times in milliseconds.

    ``ratio`` is the time of ``against`` over this one's: the median over the rounds, in each of which all variants ran
    in turn, so that a busy spell of the machine touches both sides.
    """

    subject: str
    variant: str
    shape: str
    dtype: str
    p20_ms: float
    p50_ms: float
    p80_ms: float
    against: str
    ratio: float
    peak_kib: float | None
    launches: int | None
    graph_ms: float | None
    samples: int
    clock: str
    device: str
    threads: int
    torch: str
    triton: str
    python: str
    commit: str
    when: str


def environment(device: torch.device) -> dict[str, object]:
    """Return the columns of a row that describe the machine."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    clock = "thread time" if torch.get_num_threads() == 1 else "wall"
    return {
        "clock": "events" if device.type == "cuda" else clock,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "triton": triton_version,
        **circumstances(),
    }


def interleaved(
    variants: dict[str, Step], device: torch.device, repeats: int, seconds: float
) -> dict[str, list[list[float]]]:
    """Milliseconds per call of each variant, round by round: all variants in turn, about ``seconds`` each in all.

    A round's calls of one variant are timed together on CUDA (events), one by one on the CPU: by the thread's own time
    when there is one thread, which other processes cannot stretch, else by the wall clock.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    calls = {}
    for name, step in variants.items():
        for index in range(3):
            step(index)
        synchronise(device)
        start = time.perf_counter()
        step(0)
        synchronise(device)
        once = max(time.perf_counter() - start, 1e-6)
        calls[name] = max(1, min(200, int(seconds / repeats / once)))
    times: dict[str, list[list[float]]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, step in variants.items():
            times[name].append([])
            if device.type == "cuda":
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                for _ in range(3):
                    begin.record()
                    for index in range(calls[name]):
                        step(index)
                    end.record()
                    end.synchronize()
                    times[name][-1].append(begin.elapsed_time(end) / calls[name])
            else:
                for index in range(calls[name]):
                    start = clock()
                    step(index)
                    times[name][-1].append((clock() - start) * 1e3)
    return times


def synchronise(device: torch.device) -> None:
    """Wait for ``device``."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_kib(step: Step, device: torch.device) -> float:
    """Most memory that one call holds beyond what was held before it, in KiB."""
    step(0)
    if device.type == "cuda":
        synchronise(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step(0)
        synchronise(device)
        return (torch.cuda.max_memory_allocated(device) - before) / 1024
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step(0)
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak / 1024


def launches(step: Step, device: torch.device) -> int:
    """Kernels and copies that one call starts on CUDA; calls of ATen operators on the CPU (those inside others too)."""
    step(0)
    synchronise(device)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if device.type == "cuda" else [ProfilerActivity.CPU]
    with profile(activities=activities) as recorded:
        step(0)
        synchronise(device)
    events = recorded.profiler.kineto_results.events()
    if device.type == "cuda":
        return sum(event.device_type() == DeviceType.CUDA for event in events)
    return sum(event.name().startswith("aten::") for event in events)


def graph_ms(step: Step, device: torch.device) -> float | None:
    """Milliseconds per replay of the call as a CUDA graph; ``None`` on the CPU or where it cannot be captured."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for index in range(3):
            step(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step(0)
    except RuntimeError as error:
        print(f"  no graph: {str(error).splitlines()[0]}")
        torch.cuda.synchronize()
        return None
    times = []
    for _ in range(20):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(10):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 10)
    return statistics.median(times)


def measure(
    subject: str,
    shape: str,
    dtype: str,
    variants: dict[str, Step],
    *,
    against: str,
    device: torch.device,
    repeats: int,
    seconds: float,
    details: bool = True,
) -> list[Row]:
    """Rows of all variants of one subject at one shape, timed in turn."""
    times = interleaved(variants, device, repeats, seconds)
    where = environment(device)
    base = [statistics.median(part) for part in times[against]]
    rows = []
    for name, step in variants.items():
        calls = [one for part in times[name] for one in part]
        low, middle, high = percentiles(calls)
        ratios = [other / statistics.median(part) for other, part in zip(base, times[name], strict=True)]
        rows.append(
            Row(
                subject, name, shape, dtype, round(low, 5), round(middle, 5), round(high, 5), against,
                round(statistics.median(ratios), 4),
                round(peak_kib(step, device), 1) if details else None,
                launches(step, device) if details else None,
                graph_ms(step, device) if details else None,
                len(calls), **where,  # type: ignore[arg-type]  # typed by Row's fields
            )
        )  # fmt: skip
        print_row(rows[-1])
    return rows


def percentiles(times: Sequence[float]) -> tuple[float, float, float]:
    """20th, 50th and 80th percentile."""
    if len(times) == 1:
        return times[0], times[0], times[0]
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    return cuts[1], statistics.median(times), cuts[7]


def print_row(row: Row) -> None:
    """One line of the table."""
    extra = "" if row.peak_kib is None else f"  peak {row.peak_kib:10.0f} KiB  launches {row.launches}"
    graph = "" if row.graph_ms is None else f"  graph {row.graph_ms:.4f}"
    print(
        f"{row.subject:22} {row.variant:12} {row.shape:32} {row.dtype:8} p50 {row.p50_ms:10.4f} ms "
        f"(p20 {row.p20_ms:.4f}, p80 {row.p80_ms:.4f})  {row.against}/this {row.ratio:8.2f}{extra}{graph}",
        flush=True,
    )


def append(rows: Sequence[Row], path: Path) -> None:
    """Add ``rows`` to the CSV at ``path``, made with a header when it does not exist."""
    append_rows(path, [asdict(row) for row in rows])


MARK = "GOLDFINCH_MEASURED_BY"
"""Environment variable that names, separated by commas, the scripts that a process descends from."""

SECONDS_TO_STOP = 10.0
"""How long a process that a script started has between SIGTERM and SIGKILL."""


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser for a script's command line, with the option ``--dry-run`` that every script has.

    Args:
        description: the script's docstring.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="run everything once at tiny sizes and write nothing")
    return parser


def start(main: Callable[[], None]) -> None:
    """Run a script's ``main`` and stop what it started, however it ends.

    Args:
        main: the script's function without arguments.
    """
    with stopping():
        main()


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    """Stop every process that the block started, directly or through another process, when the block ends.

    SIGTERM and SIGHUP end the block as an exception does, so that its ``with`` statements clean up; the exit code is
    128 plus the signal's number. Further signals do not interrupt the cleaning up.
    """
    number = uuid.uuid4().hex
    before = os.environ.get(MARK)
    os.environ[MARK] = f"{before},{number}" if before else number
    handled = [each for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT) if _is_heeded(each)]
    handlers = {each: signal.getsignal(each) for each in handled}

    def end(received: int, _: object) -> None:
        for each in handled:
            signal.signal(each, signal.SIG_IGN)
        if received == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + received)

    for each in handled:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each in handled:
            signal.signal(each, signal.SIG_IGN)
        stop_started(number)
        for each, handler in handlers.items():
            signal.signal(each, handler)
        if before is None:
            del os.environ[MARK]
        else:
            os.environ[MARK] = before


def _is_heeded(number: signal.Signals) -> bool:
    """Return whether this process has not been told to ignore the signal, as ``nohup`` does."""
    return signal.getsignal(number) != signal.SIG_IGN


def started(number: str) -> list[psutil.Process]:
    """Return the other living processes with the mark ``number`` in their environment."""
    found = []
    for process in psutil.process_iter(["environ"]):
        marks = (process.info["environ"] or {}).get(MARK, "").split(",")
        if number in marks and process.pid != os.getpid():
            found.append(process)
    return found


def stop_started(number: str) -> None:
    """End the processes with the mark ``number``: SIGTERM first, SIGKILL after ``SECONDS_TO_STOP``."""
    for process in started(number):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    end = time.monotonic() + SECONDS_TO_STOP
    while (left := started(number)) and time.monotonic() < end:
        psutil.wait_procs(left, timeout=0.2)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=SECONDS_TO_STOP)
