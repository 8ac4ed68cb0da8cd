"""Steps of a process simulated one after the other, each finding what the one before left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oomguard.trace.graph import Graph
from oomguard.trace.layout import Layout
from oomguard.trace.ledger import Ledger, Recorder
from oomguard.trace.memory import (
    DispatchQueue,
    ImmediateQueue,
    Memory,
    Program,
    Queue,
    Run,
    Simulation,
    Step,
)
from oomguard.trace.unroll import Unrolled, UnrolledSimulation


@dataclass(frozen=True)
class Surroundings:
    """What a process does besides the step: ``before`` dispatches before its first one, ``between`` after each.

    They shift where the CPU's tasks end; nothing else depends on them.
    """

    before: int = 0
    between: int = 0


ALONE = Surroundings()


class Steps:
    """Steps simulated one after the other, each finding what the one before left.

    The first are those that create the state, where the program has such (``Program.earlier``).
    """

    def __init__(self, program: Program, limit: int | None, queue: Queue | None, around: Surroundings):
        self.program = program
        self.between = around.between
        self.memory = Memory(program.device, limit, queue)
        self._count(around.before)
        self.largest_buffer = 0
        self._found: dict[int, tuple[Layout, int]] = {}
        self._before: list[_Before] = []
        self._chain = program.chain
        self.unrolled = Unrolled(program) if any(call.waits for call in self._chain) else None
        self._simulation = UnrolledSimulation(self.unrolled, self.memory) if self.unrolled else None
        self.waiting: list[int] = []

    @property
    def settling(self) -> int:
        """Steps that are not like those after them: they create state, or find nothing left to evaluate yet."""
        return self.unrolled.settling if self.unrolled is not None else len(self._chain) - 1

    def step(self) -> Run:
        memory = self.memory
        number = len(self._before)
        count = getattr(memory.queue, "submitted", 0)
        self._before.append(_Before(dict(self._found), list(memory.cache.sizes), memory.cache.total, count))
        if self._simulation is not None:
            run = self._simulation.run(number)
            self.waiting.append(self._simulation.waiting_bytes())
        else:
            run = self._run_alone(number)
        self._count(self.between)
        self.largest_buffer = max(self.largest_buffer, memory.largest_buffer)
        return run

    def _run_alone(self, number: int) -> Run:
        """A step that evaluates all of its state: nothing of it goes on into the next but the state."""
        program = self._call(number)
        simulation = Simulation(program, self.memory, self._found)
        run = simulation.run()
        self._found = simulation.found(program.graph.carries)
        following = self._call(number + 1)
        if following is not program:
            self._found = {i: self._found[o] for i, o in following.links.items() if o in self._found}
        return run

    def _call(self, number: int) -> Program:
        return self._chain[min(number, len(self._chain) - 1)]

    def evaluated(self, number: int) -> tuple[Graph, list[Step]]:
        """The graph in which one of the steps stands, and the primitives it runs."""
        if self.unrolled is not None:
            return self.unrolled.graph, self.unrolled.evaluations[number]
        program = self._call(number)
        return program.graph, program.evaluations[0]

    def _count(self, dispatches: int) -> None:
        """Lets the queue have counted further, as it does in evaluations that are not simulated."""
        _submit_nothing(self.memory, dispatches)

    def record(self, number: int, at: int) -> Recorder:
        """Simulates one of the steps again, and keeps whose the bytes are."""
        before = self._before[0 if self.unrolled else number]
        memory = Ledger(self.program.device, self.memory.limit, None)
        memory.cache.sizes, memory.cache.total = list(before.cached), before.cached_bytes
        if hasattr(memory.queue, "submitted"):
            memory.queue.submitted = memory.queue.executed = before.submitted  # type: ignore[attr-defined]
        graph, steps = self.evaluated(number)
        recorder = Recorder(graph, steps, at)
        if self.unrolled is None:
            simulation = Simulation(self._call(number), memory, before.found)
            recorder.begin(simulation)
            simulation.run(watch=recorder)
            return recorder
        unrolled = UnrolledSimulation(self.unrolled, memory)
        for earlier in range(number):
            unrolled.run(earlier)
            _submit_nothing(memory, self.between)
        unrolled.begin(number)
        recorder.begin(unrolled)
        unrolled.run(number, recorder)
        return recorder


def _submit_nothing(memory: Memory, dispatches: int) -> None:
    memory.synchronize()
    queue = memory.queue
    if isinstance(queue, DispatchQueue):  # the others begin anew with every evaluation
        queue.submitted = queue.executed = queue.submitted + dispatches


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
    """The peaks of the first steps of a process, in bytes: what ``simulate`` finds, and nothing else of it.

    At least ``count``, and as many as it takes for the last to be like all that follow.
    """
    return peaks_and_buffer(program, count, memory_limit=memory_limit, surroundings=surroundings)[0]


def peaks_and_buffer(
    program: Program,
    count: int,
    *,
    memory_limit: int | None = None,
    surroundings: Surroundings = ALONE,
) -> tuple[list[int], int]:
    """``step_peaks``, and the bytes of the largest buffer any of those steps holds."""
    steps = Steps(program, memory_limit, None, surroundings)
    peaks = [steps.step().peak_bytes for _ in range(max(count, 1 + steps.settling))]
    return peaks, steps.largest_buffer


def graph_peak(program: Program) -> int:
    """The peak of a step with nothing in flight, in bytes: what the order of evaluation alone needs."""
    steps = Steps(program, None, ImmediateQueue(), ALONE)
    return [steps.step() for _ in range(1 + steps.settling)][-1].peak_bytes


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
