"""Steps of a process simulated one after the other, each finding what the one before left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oomguard.trace.layout import Layout
from oomguard.trace.ledger import Ledger, Recorder
from oomguard.trace.memory import DispatchQueue, ImmediateQueue, Memory, Program, Queue, Run, Simulation


@dataclass(frozen=True)
class Surroundings:
    """What a process does besides the step: ``before`` dispatches before its first one, ``between`` after each.

    They shift where the CPU's tasks end; nothing else depends on them.
    """

    before: int = 0
    between: int = 0


ALONE = Surroundings()


class Steps:
    """Steps simulated one after the other, each finding what the one before left."""

    def __init__(self, program: Program, limit: int | None, queue: Queue | None, around: Surroundings):
        self.program = program
        self.between = around.between
        self.memory = Memory(program.device, limit, queue)
        self._count(around.before)
        self.largest_buffer = 0
        self._found: dict[int, tuple[Layout, int]] = {}
        self._before: list[_Before] = []

    def step(self) -> Run:
        memory = self.memory
        count = getattr(memory.queue, "submitted", 0)
        self._before.append(_Before(dict(self._found), list(memory.cache.sizes), memory.cache.total, count))
        simulation = Simulation(self.program, memory, self._found)
        run = simulation.run()
        self._found = simulation.found(self.program.graph.carries)
        self._count(self.between)
        self.largest_buffer = max(self.largest_buffer, simulation.largest_buffer)
        return run

    def _count(self, dispatches: int) -> None:
        """Lets the queue have counted further, as it does in evaluations that are not simulated."""
        self.memory.synchronize()
        queue = self.memory.queue
        if isinstance(queue, DispatchQueue):  # the others begin anew with every evaluation
            queue.submitted = queue.executed = queue.submitted + dispatches

    def record(self, number: int, at: int) -> Recorder:
        """Simulates one of the steps again, and keeps whose the bytes are."""
        before = self._before[number]
        memory = Ledger(self.program.device, self.memory.limit, None)
        memory.cache.sizes, memory.cache.total = before.cached, before.cached_bytes
        if hasattr(memory.queue, "submitted"):
            memory.queue.submitted = memory.queue.executed = before.submitted  # type: ignore[attr-defined]
        simulation = Simulation(self.program, memory, before.found)
        recorder = Recorder(self.program, at)
        recorder.begin(simulation)
        simulation.run(watch=recorder)
        return recorder


@dataclass(slots=True)
class _Before:
    """What a step found: its inputs, the cache, and the queue's count."""

    found: dict[int, tuple[Layout, int]]
    cached: list[int]
    cached_bytes: int
    submitted: int


def step_peaks(
    program: Program,
    count: int,
    *,
    memory_limit: int | None = None,
    surroundings: Surroundings = ALONE,
) -> list[int]:
    """The peaks of the first steps of a process, in bytes: what ``simulate`` finds, and nothing else of it."""
    steps = Steps(program, memory_limit, None, surroundings)
    return [steps.step().peak_bytes for _ in range(count)]


def graph_peak(program: Program) -> int:
    """The peak of a step with nothing in flight, in bytes: what the order of evaluation alone needs."""
    return Steps(program, None, ImmediateQueue(), ALONE).step().peak_bytes


def within_update(programs: Sequence[Program], calls: int, around: Surroundings) -> list[Surroundings]:
    """What is queued around each of the different calls of one update: the other calls, and what else there is.

    Args:
        programs: the first call, one of those between, the last; as many of them as differ.
        calls: how many calls an update makes.
        around: what the process does besides the calls, once an update.
    """
    if len(programs) == 1 or not hasattr(programs[0].device.queue(), "submitted"):
        return [around] * len(programs)  # only the CPU's queue counts on from call to call
    counts = [_dispatches(program) for program in programs]
    between = (calls - 2) * counts[1] if len(programs) > 2 else 0
    update = counts[0] + between + counts[-1] + around.between
    starts = [0, counts[0], counts[0] + between][: len(counts)]
    return [
        Surroundings(around.before + start, update - count)
        for start, count in zip(starts, counts, strict=True)
    ]


def _dispatches(program: Program) -> int:
    """How many dispatches a step adds to the CPU's count."""
    steps = Steps(program, None, None, ALONE)
    steps.step()
    submitted: int = steps.memory.queue.submitted  # type: ignore[attr-defined]
    return submitted
