"""From a step to its peak: capture, rewrite as the device would run it, simulate.

``trace`` does it for any step function, ``simulate`` for a graph that is ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median_low
from typing import Any

from oomguard.config.problems import check_callable, check_type
from oomguard.errors import InputError
from oomguard.step.opening import returned_then_state
from oomguard.step.repeated import Repeated
from oomguard.trace.backends import Machine, capturing, simulated
from oomguard.trace.capture import Capture, Evaluate, capture
from oomguard.trace.collector import collector_paused
from oomguard.trace.compiled import compile_regions, kept_constants
from oomguard.trace.containers import leaves, state_tree
from oomguard.trace.fuse import compile_graph
from oomguard.trace.graph import Graph, Node
from oomguard.trace.ledger import CATEGORIES, Owner, Recorder
from oomguard.trace.memory import CPU, Device, ImmediateQueue, Program
from oomguard.trace.orders import best_order
from oomguard.trace.rawgraph import dtype_name
from oomguard.trace.remat import recompute_regions
from oomguard.trace.result import BUFFER_REFUSED, Holder, Moment, Span, Timeline, TraceResult
from oomguard.trace.startup import SYNCHRONIZER_DISPATCHES, dispatches_to_evaluate
from oomguard.trace.steps import ALONE, Steps, Surroundings, graph_peak, within_update
from oomguard.trace.waiting import unevaluated_warnings
from oomguard.units import format_bytes

STEADY_STEPS = 3
"""Steps simulated after the first. Where the device's tasks end differs from one to the next."""

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
    device: Machine = None,
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
            captured, else what the step's closure refers to. All of it is given back as it was. Dictionaries, lists and
            objects of one's own are understood as well.
        keywords: keyword arguments for the step.
        evaluate: what is handed to ``mx.eval`` after the step, given what it returned and the state, in order. State
            that it does not need is evaluated by a later step, as MLX does it, and warned of.
        consumed: positions of arguments nobody holds any more while the step is evaluated.
        compiled: simulate with or without ``mx.compile``; by default as the step is.
        device: what runs it: what MLX computes on here if None; ``"cpu"``, ``"metal"``; or another machine by its
            name, ``"m5-pro-48gb"``, ``"metal-36gb"``.
        memory_limit: as given to ``mx.set_memory_limit``, in bytes; None for MLX's own on the device.
        rewrite: changes the captured graph before it is simulated: a checkpoint policy, another backend.
        marked: kinds of regions that ``rewrite`` needs the backward of.

    Returns:
        Peaks in bytes, when the peak is reached, and what is alive then.

    Raises:
        InputError: no device of that name.
        TraceError: the step cannot be captured; the text says why, where, and what to do.

    Accuracy: see ``calibration/LOG.md`` and ``oomguard validate --engine trace``.
    """
    check_callable("step", step, "the function that makes one training step")
    check_callable("evaluate", evaluate, "a function of what the step returned and the state")
    check_type("state", () if state is None else state, (list, tuple), "a list, state=[...]")
    check_type("consumed", consumed, (list, tuple), "a list of positions, consumed=[...]")
    for position in consumed:
        check_type("consumed", position, int, "positions of arguments, consumed=[0]")
    check_type(
        "keywords", {} if keywords is None else keywords, dict, "a dictionary of the step's keyword arguments"
    )
    if memory_limit is not None:
        check_type("memory_limit", memory_limit, int, "a whole number of bytes, or None")
        if memory_limit < 0:
            raise InputError(
                f"memory_limit of {memory_limit} bytes is less than nothing; give 0 or more, or None"
            )
    if compiled is not None:
        check_type("compiled", compiled, bool, "True, False or None")
    captured, target, surroundings = capture_for(
        step,
        arguments,
        keywords,
        state=state,
        evaluate=evaluate,
        consumed=consumed,
        device=device,
        marked=marked,
    )
    return simulate(
        captured,
        compiled=captured.compiled if compiled is None else compiled,
        device=target,
        memory_limit=memory_limit,
        rewrite=rewrite,
        surroundings=surroundings,
    )


def capture_for(
    step: Callable[..., Any],
    arguments: Sequence[Any],
    keywords: dict[str, Any] | None = None,
    *,
    state: Sequence[Any] | None = None,
    evaluate: Evaluate = returned_then_state,
    consumed: Sequence[int] = (),
    device: Machine = None,
    marked: frozenset[str] = frozenset(),
    plain: bool = False,
) -> tuple[Capture, Device, Surroundings]:
    """A step captured for a machine, to be simulated in more than one way.

    Args:
        step, arguments, keywords, state, evaluate, consumed, device, marked: as for ``trace``.
        plain: what the step itself recomputes is taken as plain code.

    Returns:
        The capture, the device that is simulated for the machine, and what the process does besides the step:
        evaluates the state and the batch before the first one, where nobody did so yet.

    Raises:
        InputError, TraceError: as ``trace``.
    """
    target = simulated(device)
    with capturing(target):
        captured = capture(
            step,
            arguments,
            keywords,
            state=state,
            evaluate=evaluate,
            consumed=consumed,
            marked=marked | target.marked,
            plain=plain,
        )
    before = dispatches_to_evaluate([*map(state_tree, state or ()), arguments])
    return captured, target, Surroundings(before=before)


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
    program = _program_of(captured, compiled, device, rewrite)
    return _simulated([program], [surroundings], captured.warnings, compiled, memory_limit, steady_steps)


def _program_of(captured: Capture, compiled: bool, device: Device, rewrite: Rewrite | None) -> Program:
    graphs = [built_for(device, call) for call in captured.calls]
    if rewrite is not None:
        graphs = [rewrite(graph) for graph in graphs]
    return chained(graphs, captured.links, compiled=compiled, device=device)


def chained(
    graphs: Sequence[Graph], links: Sequence[dict[int, int]], *, compiled: bool, device: Device
) -> Program:
    """The last graph as a program, behind those of the calls that create its state (``Capture.calls``, ``links``)."""
    program: Program | None = None
    for graph, link in zip(graphs, links, strict=True):
        program = prepare(graph, compiled=compiled, device=device, earlier=program, links=link)
    assert program is not None
    return program


def _simulated(
    programs: Sequence[Program],
    around: Sequence[Surroundings],
    warnings: Sequence[str],
    compiled: bool,
    memory_limit: int | None,
    steady_steps: int,
) -> TraceResult:
    """The result of an update that makes these calls: its peak is that of the highest of them."""
    calls = [
        Steps(program, memory_limit, None, surroundings)
        for program, surroundings in zip(programs, around, strict=True)
    ]
    settling = max(1, *(call.settling for call in calls)) if steady_steps else 0
    updates = [[call.step() for call in calls] for _ in range(settling + steady_steps or 1)]
    highest = [max(runs, key=lambda run: run.peak_bytes) for runs in updates]
    steady = highest[settling:]
    peaks = [run.peak_bytes for run in steady]
    peak = median_low(peaks)
    number = next(k for k, run in enumerate(highest) if run.peak_bytes == peak and k >= settling)
    run = highest[number]
    which = updates[number].index(run)
    program = programs[which]
    graph, primitives = calls[which].evaluated(number)
    simulated_program = calls[which].unrolled or program
    recorder = calls[which].record(number, run.peak_index)
    largest_buffer = max(call.largest_buffer for call in calls)
    limit, waited = calls[0].memory.limit, any(call.memory.waited_at_limit for call in calls)
    waiting = [warning for call in calls for warning in unevaluated_warnings(call, peak)]
    for call in calls:
        call.memory.limit = 0
    sequenced = median_low([max(call.step().peak_bytes for call in calls) for _ in steady])
    graph_peaks = [graph_peak(each) for each in programs]
    order = best_order(program, graph_peaks[which], memory_limit=memory_limit, surroundings=around[which])
    moments = [_moment(step.node, index) for index, step in enumerate(primitives)]
    holders = _holders(graph, recorder)
    spans = _spans(graph, recorder)
    allowed = program.device.largest_buffer
    return TraceResult(
        peak_bytes=peak,
        low_bytes=min(peaks),
        high_bytes=max(peaks),
        first_peak_bytes=highest[0].peak_bytes,
        sequenced_peak_bytes=sequenced,
        graph_peak_bytes=max(graph_peaks),
        state_bytes=run.before_bytes,
        largest_buffer_bytes=largest_buffer,
        moment=moments[run.peak_index] if run.peak_index >= 0 else Moment(-1, "", "", -1, ""),
        holders=holders,
        breakdown=_breakdown(holders),
        timeline=Timeline(run.high, recorder.totals, moments, spans),
        primitives=len(moments),
        backend=program.device.name,
        compiled=compiled,
        compiled_calls=0 if compiled else sum(r.kind == "compile" for r in program.graph.regions),
        memory_limit_bytes=limit,
        waited_at_limit=waited,
        largest_allowed_bytes=allowed,
        order=order if order is not None and order.worth_saying else None,
        unknown=simulated_program.unknown,
        warnings=list(
            dict.fromkeys(
                [
                    *warnings,
                    *waiting,
                    *_unknown_warnings(simulated_program),
                    *_buffer_warnings(largest_buffer, allowed, spans),
                ]
            )
        ),
    )


def built_for(device: Device, captured: Capture) -> Graph:
    """The graph a device builds of a captured step, what the step recomputes in it."""
    return _with_checkpoints(device.build(captured.graph))


def prepare(
    graph: Graph,
    *,
    compiled: bool,
    device: Device,
    earlier: Program | None = None,
    links: dict[int, int] | None = None,
) -> Program:
    """A graph that ``device`` builds, compiled in place where the step is, as a program to simulate.

    ``earlier`` and ``links`` are as for ``Program``.
    """
    if compiled:
        compile_graph(graph, device.fusion)
        graph.evaluations[0].held.update(kept_constants(graph))
    else:
        compile_regions(graph, device.fusion)
    _name_new_state(graph)
    return Program(graph, device, earlier=earlier, links=links)


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
    alone = Steps(program, None, ImmediateQueue(), ALONE).step()
    default = Steps(program, None, None, ALONE)
    runs = [default.step().high for _ in range(1 + STEADY_STEPS)][1:]
    steady = [median_low(values) for values in zip(*runs, strict=True)]
    return (
        alone.high,
        steady,
        [_moment(step.node, index) for index, step in enumerate(program.evaluations[0])],
    )


def _moment(node: Node, index: int) -> Moment:
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
    shape, dtype = array.shape, array.dtype
    return Holder(name, nbytes, category, owner.phase, block, owner.primitive, shape, dtype, array.count)


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


def _buffer_warnings(largest_bytes: int, allowed_bytes: int | None, spans: Sequence[Span]) -> list[str]:
    """A buffer that the device refuses, with what it would hold where the step that was recorded made it."""
    if allowed_bytes is None or largest_bytes <= allowed_bytes:
        return []
    holder = max((span.holder for span in spans), key=lambda holder: holder.nbytes, default=None)
    what = ""
    if holder is not None and holder.nbytes > allowed_bytes:
        made = f"the {holder.primitive} output" if holder.primitive else "an array"
        named = f" of {holder.name}" if holder.name else ""
        shape = " x ".join(map(str, holder.shape))
        what = f" ({made}{named}, {shape} {holder.dtype})" if holder.dtype else f" (scratch space{named})"
    return [
        f"{BUFFER_REFUSED} {format_bytes(largest_bytes)}{what}, and the device hands out {format_bytes(allowed_bytes)} "
        "at most, whatever is free: make that array in parts, or a smaller one"
    ]


@collector_paused()
def trace_built(
    built: Any,
    *,
    compiled: bool | None = None,
    device: Machine = None,
    memory_limit: int | None = None,
    rewrite: Rewrite | None = None,
    marked: frozenset[str] = frozenset(),
    steady_steps: int = STEADY_STEPS,
) -> TraceResult:
    """The peak of a step made by ``oomguard.model.step.build_step`` or ``oomguard.model.cases.build_case``.

    Each call that one update makes is traced as its ``run`` makes it. The peak of an update is that of its highest
    call, and the result describes that one.

    Args:
        built: built with ``evaluated=False`` it takes no memory.
        compiled, device, memory_limit, rewrite, marked: as for ``trace``.
        steady_steps: as for ``simulate``.
    """
    target = simulated(device)
    captures = capture_built(built, device=target, marked=marked)
    compiled = captures[0].compiled if compiled is None else compiled
    programs = [_program_of(captured, compiled, target, rewrite) for captured in captures]
    around = within_update(programs, len(built.graphs()), surroundings_of(built))
    warnings = [warning for captured in captures for warning in captured.warnings]
    return _simulated(programs, around, warnings, compiled, memory_limit, steady_steps)


def surroundings_of(built: Any) -> Surroundings:
    """What the ``run`` of a built step evaluates besides its calls."""
    # The GPT's run also adds up the losses of its calls, and divides the sum in an evaluation of its own.
    losses = 2 * len(built.graphs()) + SYNCHRONIZER_DISPATCHES
    return Surroundings(
        before=_dispatches_before(built),
        between=losses if hasattr(built, "config") else 0,
    )


def _dispatches_before(built: Any) -> int:
    """What the evaluation of the state and the batch queues; each micro-batch that is like another, what that does."""
    state = [*map(state_tree, built.state)]
    batch = built.batch
    if not isinstance(batch, Repeated):
        return dispatches_to_evaluate([*state, batch])
    one = dispatches_to_evaluate([*state, batch.first])
    two = dispatches_to_evaluate([*state, batch.first, batch.last])
    return one + (len(batch) - 1) * (two - one)


def capture_built(built: Any, *, device: Device = CPU, marked: frozenset[str] = frozenset()) -> list[Capture]:
    """The different calls one update of a built step makes: the first, one between, the last.

    Args:
        device: what they are captured for.
        marked: as for ``capture``; what the device needs is marked in any case.
    """
    calls = built.graphs()
    wanted = sorted({0, min(1, len(calls) - 1), len(calls) - 1})
    gradients = built.model.trainable_parameters()
    found = []
    for number in wanted:
        micro_batches, update = calls[number]
        with capturing(device):
            captured = capture(
                built.function,
                (micro_batches, gradients if number else None, update),
                state=built.state,
                evaluate=lambda returned, state: (state, returned),
                consumed=(1,),
                marked=marked | device.marked,
            )
        for batch, count in _others(calls, number):
            _hold(captured.graph, batch, count)
        found.append(captured)
    return found


def _others(calls: Sequence[Any], number: int) -> Iterator[tuple[Any, int]]:
    """The micro-batches of the calls but one, and how many calls have such."""
    if isinstance(calls, Repeated):
        for first, (batch, _), count in calls.kinds():
            if left := count - (first == number):
                yield batch, left
    else:
        yield from ((batch, 1) for k, (batch, _) in enumerate(calls) if k != number)


def _hold(graph: Graph, tree: Any, count: int) -> None:
    """Arrays that exist besides what the graph reads, each ``count`` times."""
    for array in leaves(tree):
        number = graph.input(tuple(array.shape), dtype_name(array.dtype), count=count)
        graph.evaluations[0].held.add(number)
