"""From a step to its peak: capture, rewrite as the device would run it, simulate.

``trace`` does it for any step function, ``simulate`` for a graph that is ready.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

from oomguard.trace.capture import Capture, Evaluate, capture, returned_then_state
from oomguard.trace.collector import collector_paused
from oomguard.trace.containers import leaves, state_tree
from oomguard.trace.fuse import compile_graph
from oomguard.trace.graph import Graph
from oomguard.trace.layout import Layout
from oomguard.trace.ledger import CATEGORIES, Ledger, Owner, Recorder
from oomguard.trace.memory import CPU, Device, ImmediateQueue, Memory, Program, Queue, Run, Simulation
from oomguard.trace.rawgraph import dtype_name
from oomguard.trace.remat import recompute_regions
from oomguard.trace.result import Holder, Moment, Span, Timeline, TraceResult
from oomguard.trace.startup import SYNCHRONIZER_DISPATCHES, dispatches_to_evaluate

STEADY_STEPS = 3
"""Steps simulated after the first. Where the device's tasks end differs from one to the next."""


@dataclass(frozen=True)
class Surroundings:
    """What a process does besides the step: ``before`` dispatches before its first one, ``between`` after each.

    They shift where the CPU's tasks end; nothing else depends on them.
    """

    before: int = 0
    between: int = 0


ALONE = Surroundings()

Rewrite = Callable[[Graph], Graph]


@collector_paused()
def trace(
    step: Callable[..., Any],
    *arguments: Any,
    state: Sequence[Any] | None = None,
    keywords: dict[str, Any] | None = None,
    evaluate: Evaluate = returned_then_state,
    consumed: Sequence[int] = (),
    compiled: bool | None = None,
    device: Device = CPU,
    memory_limit: int | None = None,
    rewrite: Rewrite | None = None,
    marked: frozenset[str] = frozenset(),
) -> TraceResult:
    """The peak of a training step, without running it.

    Counts: parameters, optimizer state, batch, constants, every intermediate array, copies and scratch space of
    primitives, and what is in flight between the evaluator and the kernels.
    Not counted: the buffer cache, memory outside MLX, what else the process holds.

    Args:
        step: a function that updates modules and optimizers in place and returns arrays, as MLX's examples and
            mlx-lm's trainer write it; plain or the result of ``mx.compile``. It is called once, on placeholders.
        arguments: what it is called with, arrays in any nesting. Only shapes and dtypes are read.
        state: what the step changes: modules, optimizers, ``mx.random.state``. Where not given, what ``mx.compile``
            captured, else what the step's closure refers to. All of it is given back as it was.
        keywords: keyword arguments for the step.
        evaluate: what is handed to ``mx.eval`` after the step, given what it returned and the state, in order.
        consumed: positions of arguments nobody holds any more while the step is evaluated.
        compiled: simulate with or without ``mx.compile``; by default as the step is.
        device: what runs it.
        memory_limit: as given to ``mx.set_memory_limit``, in bytes; None for MLX's default.
        rewrite: changes the captured graph before it is simulated: a checkpoint policy, another backend.
        marked: kinds of regions that ``rewrite`` needs the backward of.

    Returns:
        Peaks in bytes, when the peak is reached, and what is alive then.

    Raises:
        TraceError: the step cannot be captured; the text says why, where, and what to do.

    Accuracy: see ``calibration/LOG.md`` and ``oomguard validate --engine trace``.
    """
    captured = capture(
        step,
        arguments,
        keywords,
        state=state,
        evaluate=evaluate,
        consumed=consumed,
        marked=marked | device.marked,
    )
    return simulate(
        captured,
        compiled=captured.compiled if compiled is None else compiled,
        device=device,
        memory_limit=memory_limit,
        rewrite=rewrite,
        surroundings=Surroundings(before=_dispatches_before(state, arguments)),
    )


def _dispatches_before(state: Sequence[Any] | None, arguments: Sequence[Any]) -> int:
    """What evaluating the state and the batch queues before the first step, where nobody did so yet."""
    return dispatches_to_evaluate([*map(state_tree, state or ()), arguments])


@collector_paused()
def simulate(
    captured: Capture,
    *,
    compiled: bool,
    device: Device = CPU,
    memory_limit: int | None = None,
    rewrite: Rewrite | None = None,
    steady_steps: int = STEADY_STEPS,
    surroundings: Surroundings = ALONE,
) -> TraceResult:
    """The peak of a captured step. The capture is not changed, and can be simulated again in another way.

    Args:
        captured: from ``capture``.
        compiled: whether the step runs under ``mx.compile``.
        device, memory_limit, rewrite: as for ``trace``.
        steady_steps: how many steps to simulate after the first, and again with the memory limit at 0.
        surroundings: what else the process evaluates.
    """
    graph = built_for(device, captured)
    if rewrite is not None:
        graph = rewrite(graph)
    program = prepare(graph, compiled=compiled, device=device)
    steps = _Steps(program, memory_limit, None, surroundings)
    runs = [steps.step() for _ in range(1 + steady_steps)]
    steady = runs[1:] or runs
    peaks = [run.peak_bytes for run in steady]
    peak = median_low(peaks)
    chosen = next(k for k, run in enumerate(runs) if run.peak_bytes == peak and (k or not steady_steps))
    recorder = steps.record(chosen, runs[chosen].peak_index)
    largest_buffer = steps.largest_buffer
    steps.memory.limit = 0
    sequenced = median_low([steps.step().peak_bytes for _ in steady])
    graph_alone = _Steps(program, None, ImmediateQueue(), surroundings).step()
    moments = [_moment(program, index) for index in range(len(program.evaluations[0]))]
    at = runs[chosen].peak_index
    holders = _holders(graph, recorder)
    return TraceResult(
        peak_bytes=peak,
        low_bytes=min(peaks),
        high_bytes=max(peaks),
        first_peak_bytes=runs[0].peak_bytes,
        sequenced_peak_bytes=sequenced,
        graph_peak_bytes=graph_alone.peak_bytes,
        state_bytes=runs[chosen].before_bytes,
        largest_buffer_bytes=largest_buffer,
        moment=moments[at] if at >= 0 else Moment(-1, "", "", -1, ""),
        holders=holders,
        breakdown=_breakdown(holders),
        timeline=Timeline(runs[chosen].high, recorder.totals, moments, _spans(graph, recorder)),
        primitives=len(moments),
        backend=device.name,
        compiled=compiled,
        unknown=program.unknown,
        warnings=captured.warnings + _unknown_warnings(program),
    )


def built_for(device: Device, captured: Capture) -> Graph:
    """The graph a device builds of a captured step, what the step recomputes in it."""
    return _with_checkpoints(device.build(captured.graph))


def prepare(graph: Graph, *, compiled: bool, device: Device) -> Program:
    """A graph that ``device`` builds, compiled in place where the step is, as a program to simulate."""
    if compiled:
        compile_graph(graph, device.fusion)
        # The compiled function keeps its constants from call to call.
        graph.evaluations[0].held.update(a.id for a in graph.arrays if a.kind == "constant")
    _name_new_state(graph)
    return Program(graph, device)


def step_peaks(
    program: Program,
    count: int,
    *,
    memory_limit: int | None = None,
    surroundings: Surroundings = ALONE,
) -> list[int]:
    """The peaks of the first steps of a process, in bytes: what ``simulate`` finds, and nothing else of it."""
    steps = _Steps(program, memory_limit, None, surroundings)
    return [steps.step().peak_bytes for _ in range(count)]


def _with_checkpoints(graph: Graph) -> Graph:
    """The graph with the calls of ``mx.checkpoint`` and ``mx.custom_function`` found in the step recomputed."""
    for kind, bare in (("checkpoint", False), ("custom_function", True)):
        regions = [region for region in graph.regions if region.kind == kind]
        graph = recompute_regions(graph, regions, bare=bare) if regions else graph
    return graph


def _name_new_state(graph: Graph) -> None:
    """What replaces an array of the state is called like it."""
    for before, after in graph.carries.items():
        if graph.arrays[after].name is None:
            graph.arrays[after].name = graph.arrays[before].name


def counted_timelines(captured: Capture) -> tuple[list[int], list[int], list[Moment]]:
    """Active bytes at every primitive on the CPU: of the graph alone, and of the steady state; and what they are.

    The steady state is the median, primitive by primitive, of the steps after the first.
    """
    program = prepare(built_for(CPU, captured), compiled=captured.compiled, device=CPU)
    alone = _Steps(program, None, ImmediateQueue(), ALONE).step()
    default = _Steps(program, None, None, ALONE)
    runs = [default.step().high for _ in range(1 + STEADY_STEPS)][1:]
    steady = [median_low(values) for values in zip(*runs, strict=True)]
    return alone.high, steady, [_moment(program, index) for index in range(len(program.evaluations[0]))]


class _Steps:
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
        self.largest_buffer = max(self.largest_buffer, max(memory.size, default=0))
        return run

    def _count(self, dispatches: int) -> None:
        """Lets the queue have counted further, as it does in evaluations that are not simulated."""
        for _ in range(dispatches):
            self.memory.queue.submit(0, [], [])
        self.memory.synchronize()

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


def _moment(program: Program, index: int) -> Moment:
    node = program.evaluations[0][index].node
    return Moment(index, node.primitive, node.phase, node.block, node.scope)


def _holders(graph: Graph, recorder: Recorder) -> list[Holder]:
    holders = [
        _holder(graph, owner, nbytes, CATEGORIES[category]) for owner, nbytes, category in recorder.live
    ]
    return sorted(holders, key=lambda holder: -holder.nbytes)


def _spans(graph: Graph, recorder: Recorder) -> list[Span]:
    return [
        Span(_holder(graph, stay.owner, stay.nbytes, CATEGORIES[stay.category]), stay.start, stay.end)
        for stay in recorder.stays
    ]


def _holder(graph: Graph, owner: Owner, nbytes: int, category: str) -> Holder:
    if owner.array < 0:
        return Holder(owner.scope, nbytes, category, owner.phase, owner.block, owner.primitive, (), "")
    array = graph.arrays[owner.array]
    name = array.name or owner.scope
    block = array.block if array.block >= 0 else owner.block
    return Holder(name, nbytes, category, owner.phase, block, owner.primitive, array.shape, array.dtype)


def _breakdown(holders: list[Holder]) -> dict[str, int]:
    totals = dict.fromkeys(CATEGORIES, 0)
    for holder in holders:
        totals[holder.category] += holder.nbytes
    return {category: nbytes for category, nbytes in totals.items() if nbytes}


def _unknown_warnings(program: Program) -> list[str]:
    return [
        f"{name} ({count} times) is not known to the simulator; its outputs and a copy of its inputs are counted"
        for name, count in program.unknown.items()
    ]


@collector_paused()
def trace_built(
    built: Any,
    *,
    compiled: bool | None = None,
    device: Device = CPU,
    memory_limit: int | None = None,
    rewrite: Rewrite | None = None,
    marked: frozenset[str] = frozenset(),
) -> TraceResult:
    """The peak of a step made by ``oomguard.model.step.build_step`` or ``calibration.cases.build_case``.

    Each call that one update makes is traced as its ``run`` makes it; the call with the largest peak is the answer.

    Args:
        built: built with ``evaluated=False`` it takes no memory.
        compiled, device, memory_limit, rewrite, marked: as for ``trace``.
    """
    surroundings = surroundings_of(built)
    results = []
    for captured in capture_built(built, marked=marked | device.marked):
        results.append(
            simulate(
                captured,
                compiled=captured.compiled if compiled is None else compiled,
                device=device,
                memory_limit=memory_limit,
                rewrite=rewrite,
                surroundings=surroundings,
            )
        )
    return max(results, key=lambda result: result.peak_bytes)


def surroundings_of(built: Any) -> Surroundings:
    """What the ``run`` of a built step evaluates besides its calls."""
    # The GPT's run also divides the loss, in an evaluation of its own: one kernel.
    return Surroundings(
        before=dispatches_to_evaluate([*map(state_tree, built.state), built.batch]),
        between=2 + SYNCHRONIZER_DISPATCHES if hasattr(built, "config") else 0,
    )


def capture_built(built: Any, *, marked: frozenset[str] = frozenset()) -> list[Capture]:
    """The different calls one update of a built step makes: the first, one between, the last."""
    calls = built.graphs()
    wanted = sorted({0, min(1, len(calls) - 1), len(calls) - 1})
    gradients = built.model.trainable_parameters()
    found = []
    for number in wanted:
        micro_batches, update = calls[number]
        captured = capture(
            built.function,
            (micro_batches, gradients if number else None, update),
            state=built.state,
            evaluate=lambda returned, state: (state, returned),
            consumed=(1,),
            marked=marked,
        )
        _hold(captured.graph, [batch for k, (batch, _) in enumerate(calls) if k != number])
        found.append(captured)
    return found


def _hold(graph: Graph, tree: Any) -> None:
    """Arrays that exist besides what the graph reads."""
    for array in leaves(tree):
        number = graph.input(tuple(array.shape), dtype_name(array.dtype))
        graph.evaluations[0].held.add(number)
