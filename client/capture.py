"""Training steps that a GPU plays back: the step is captured in a CUDA graph, and a replay launches it as a whole.

With small networks the time of a step on a GPU is that of its several hundred launches. A graph has one. What a replay
computes is what the step would compute, or the step is not captured:

- The method's class declares it (:attr:`strategies.core.method.Method.capturable`).
- The first step of an exchange is a plain one. It prepares what the method prepares once an exchange; a captured step
  then finds it at the addresses of the exchange in which it was captured (:mod:`client.structure`).
- The plain values of the exchange that a step reads, such as the round, are compared before each replay.
- After capture two plain steps and two replays start from the same state, and must end in the same bits.

Whatever fails, the run goes on with plain steps, and says so once with the reason.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from client.structure import CaptureError, copy_tensors, structure_of, tensors_in
from strategies.core.context import Optimizer

log = logging.getLogger(__name__)

MOST_GRAPHS = 16
"""Graphs that are kept for one phase of a method; steps beyond are plain."""

Key = tuple[object, ...]
"""What a batch must have in common with the one with which a step was captured."""


class Graph(Protocol):
    """Device work that is recorded once and replayed."""

    def capture(self, work: Callable[[], None]) -> None:
        """Record the device work of ``work``."""

    def replay(self) -> None:
        """Do the recorded work again, with the tensors that it was recorded with."""


class Exchange(Protocol):
    """What this module needs of :class:`client.trainer.LocalExchange`."""

    optimizer: Optimizer

    def plain_step(self, images: Tensor, labels: Tensor) -> StepResult:
        """Take one step of the method."""

    def bound(self) -> dict[str, Any]:
        """Return what a step may read or change besides the model and the batch, by name."""

    def bind(self, name: str, value: Any) -> None:
        """Put ``value`` in the place of what :meth:`bound` has under ``name``."""

    def model_tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors of the model by name."""


class Watched(Exchange, Protocol):
    """An exchange on trial."""

    reads: dict[str, object]
    """The plain values that the step read, by name."""
    touched: set[str]
    """The names in :meth:`bound` that the step looked up."""


Watch = Callable[[Any], Watched]


StepResult = tuple[Mapping[str, Tensor], Tensor | None]
"""What one step leaves: its loss terms by name, and the features ``[B, D]`` of its first pass, all detached."""


CAPTURING = threading.Lock()
"""Held during a capture, since each begins by waiting for the whole GPU, which no other capture survives."""


class CudaGraph:
    """A CUDA graph; see :class:`Graph`."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, work: Callable[[], None]) -> None:
        """Record the kernels that ``work`` launches, while other threads go on; one thread captures at a time."""
        with CAPTURING:
            torch.cuda.synchronize()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                work()

    def replay(self) -> None:
        """Launch the recorded kernels on the current stream."""
        self._graph.replay()


GRAPHS: dict[str, Callable[[], Graph]] = {"cuda": CudaGraph}
"""What makes an empty graph, by type of device."""


@dataclass
class CapturedStep:
    """A step that was captured.

    Args:
        graph: the graph.
        images, labels: the tensors that hold a batch.
        result: the tensors that a replay leaves.
        reads: the plain values that the step read, by name.
        touched: the names of what it read or changed besides the model and the batch.
    """

    graph: Graph
    images: Tensor
    labels: Tensor
    result: StepResult
    reads: Mapping[str, object]
    touched: frozenset[str]

    def play(self, images: Tensor, labels: Tensor) -> StepResult:
        """Take the step with a batch; the result is overwritten by the next replay."""
        self.images.copy_(images)
        self.labels.copy_(labels)
        self.graph.replay()
        return self.result


@dataclass
class PhaseSteps:
    """The captured steps of one phase, and the objects that they read and change, by name."""

    bound: dict[str, Any] = field(default_factory=dict)
    steps: dict[Key, list[CapturedStep]] = field(default_factory=dict)


class CapturedSteps:
    """The captured steps of one model, kept over clients and rounds.

    Args:
        make_graph: makes an empty graph.
        watch: returns an exchange for a trial: it notes what a step reads, and refuses what cannot be captured. What a
            step keeps there is not kept in the exchange itself.
    """

    def __init__(self, make_graph: Callable[[], Graph], watch: Watch) -> None:
        self._make_graph, self._watch = make_graph, watch
        self._phases: dict[int, PhaseSteps] = {}
        self._fresh = True
        self.reason = ""
        self.captured = 0
        self.played = 0

    def begin_phase(self) -> None:
        """Note that the next step is the first of a phase of an exchange."""
        self._fresh = True

    def take(self, exchange: Exchange, phase: int, images: Tensor, labels: Tensor) -> StepResult:
        """Take one step with a batch, by a replay where that is possible."""
        if self.reason:
            return exchange.plain_step(images, labels)
        steps = self._phases.setdefault(phase, PhaseSteps())
        if self._fresh:
            self._fresh = False
            result = exchange.plain_step(images, labels)
            self._attempt(lambda: _bind(steps, exchange))
            return result
        step = self._attempt(lambda: self._step(steps, exchange, images, labels))
        if step is None:
            return exchange.plain_step(images, labels)
        self.played += 1
        return step.play(images, labels)

    def _attempt(self, work: Callable[[], CapturedStep | None]) -> CapturedStep | None:
        try:
            return work()
        except CaptureError as error:
            self.refuse(str(error))
            return None

    def refuse(self, reason: str) -> None:
        """Take plain steps from now on, and say why."""
        self.reason = reason
        self._phases.clear()
        log.warning("train.capture: steps are not captured, and run as without it: %s", reason)

    def _step(self, steps: PhaseSteps, exchange: Exchange, images: Tensor, labels: Tensor) -> CapturedStep | None:
        """Return the captured step of a batch; capture one if there is none yet and there is room."""
        key = (structure_of(images), structure_of(labels))
        known = steps.steps.setdefault(key, [])
        for step in known:
            if all(getattr(exchange, name) == value for name, value in step.reads.items()):
                return step
        if sum(len(others) for others in steps.steps.values()) >= MOST_GRAPHS:
            return None
        step = capture(exchange, self._watch(exchange), images, labels, self._make_graph())
        known.append(step)
        objects = exchange.bound()
        for name in step.touched:
            steps.bound[name] = objects[name]
        self.captured += 1
        return step


def _bind(steps: PhaseSteps, exchange: Exchange) -> None:
    """Give the exchange the objects of the captured steps, with the tensors of its own.

    Where an object has another structure, the captured steps are dropped.
    """
    new = exchange.bound()
    for name, old in steps.bound.items():
        if name not in new or structure_of(old) != structure_of(new[name]):
            steps.steps.clear()
            steps.bound.clear()
            return
    for name, old in steps.bound.items():
        copy_tensors(new[name], old)
        exchange.bind(name, old)


def capture(exchange: Exchange, watched: Watched, images: Tensor, labels: Tensor, graph: Graph) -> CapturedStep:
    """Return a captured step, after comparing two replays of it with two plain steps; the state is left as it was.

    Raises:
        CaptureError: the step cannot be captured, or a replay computes something else.
    """
    state = _state(exchange)
    before = _copies(state)
    random = _random_states()
    structure = structure_of(exchange.bound())
    images, labels = images.clone(), labels.clone()
    results: list[StepResult] = []
    try:
        for _ in range(2):
            result = watched.plain_step(images, labels)
        expected = _copies([*state, *tensors_in(result)])
        _check_kept(watched, state, structure)
        _restore(state, before, random)
        graph.capture(lambda: results.append(watched.plain_step(images, labels)))
        _check_kept(watched, state, structure)
        _restore(state, before, random)
        for _ in range(2):
            graph.replay()
        replayed = [*state, *tensors_in(results[0])]
        if not all(torch.equal(one, other) for one, other in zip(replayed, expected, strict=True)):
            raise CaptureError("a replay differs from the step itself")
    except CaptureError:
        raise
    except Exception as error:  # of PyTorch, most often for a wait; or of a step that cannot be taken out of turn
        reason = str(error).partition("\n")[0]
        raise CaptureError(f"its capture fails: {type(error).__name__}: {reason}") from error
    finally:
        _restore(state, before, random)
    return CapturedStep(graph, images, labels, results[0], dict(watched.reads), frozenset(watched.touched))


def _state(exchange: Exchange) -> list[Tensor]:
    return [*exchange.model_tensors().values(), *tensors_in(exchange.bound())]


def _check_kept(watched: Exchange, state: list[Tensor], structure: object) -> None:
    """Check that a step changed numbers of tensors in place, and nothing else that the next step could read."""
    addresses = [tensor.data_ptr() for tensor in _state(watched)]
    if structure_of(watched.bound()) != structure:
        raise CaptureError("it changes other things than numbers in tensors from step to step")
    if addresses != [tensor.data_ptr() for tensor in state]:
        raise CaptureError("it puts new tensors in the place of those that it keeps, instead of changing these")


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def _restore(state: list[Tensor], before: list[Tensor], random: list[Tensor]) -> None:
    with torch.no_grad():
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)
    torch.set_rng_state(random[0])
    if len(random) > 1:
        torch.cuda.set_rng_state(random[1])


def _random_states() -> list[Tensor]:
    """Return the states of PyTorch's global generators, of the CPU and of the current GPU if one is in use."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states
