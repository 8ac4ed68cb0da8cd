"""Memory over one evaluation: which buffers exist after every primitive, and the most there ever is.

Follows MLX's evaluator step by step. A primitive allocates its outputs (or takes over the buffer of an input
that nobody else holds) and queues its kernels; behind them goes an entry that holds its inputs' buffers until
the kernels have run. Then the evaluator may wait (too many tasks open, or more memory active than the limit),
and then the primitive lets go of its inputs. A buffer is freed when neither an array nor an entry holds it.

Kernels are taken to be slow: none runs before the evaluator waits for it. Large arrays make it so, and small
ones weigh nothing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from oomguard.trace.fuse import NEWEST, Fusion
from oomguard.trace.graph import ITEM_BYTES, Array, Evaluation, Graph, Node
from oomguard.trace.layout import Layout, row_major
from oomguard.trace.lower import for_cpu
from oomguard.trace.ops import CPU_RULES, NEW, Effect, Operands, Rule, unknown
from oomguard.trace.schedule import BFS_MAX_WIDTH, schedule

MAX_ACTIVE_TASKS = 10
DISPATCHES_PER_TASK = 10
CPU_CACHE_BYTES = 32 << 20
CPU_PAGE_BYTES = 4096

Touched = list[tuple[int, int]]
"""(buffer, elements seen of it) for each array a primitive reads or writes."""


class Queue(Protocol):
    """Work handed to a backend that has not run yet, in tasks the evaluator can wait for."""

    @property
    def tasks(self) -> int:
        """Tasks handed over that have not finished."""

    def submit(self, kernels: int, held: list[int], touched: Touched) -> None:
        """Queues a primitive's kernels, and behind them the buffers that stay until those have run."""

    def idle(self) -> list[int] | None:
        """What is released without waiting for a kernel; None when a kernel is next."""

    def finish_entry(self) -> list[int]:
        """Runs the oldest entry and returns what it held; or only as much of it as ends the oldest task."""

    def drain(self) -> list[int]:
        """Runs everything and returns what was held."""


class DispatchQueue:
    """The CPU's queue: every tenth dispatch closes a task. Holding buffers is a dispatch of its own.

    That one does nothing, so it runs as soon as the kernels before it have. ``submitted`` goes on from evaluation
    to evaluation, as MLX's count does.
    """

    __slots__ = ("executed", "pending", "submitted")

    def __init__(self, submitted: int = 0):
        self.submitted = submitted
        self.executed = submitted
        self.pending: deque[tuple[int, list[int]]] = deque()

    @property
    def tasks(self) -> int:
        return self.submitted // DISPATCHES_PER_TASK - self.executed // DISPATCHES_PER_TASK

    def submit(self, kernels: int, held: list[int], touched: Touched) -> None:
        self.submitted += kernels + 1
        self.pending.append((self.submitted, held))

    def idle(self) -> list[int] | None:
        if self.pending and self.executed >= self.pending[0][0] - 1:
            self.executed, held = self.pending.popleft()
            return held
        return None

    def finish_entry(self) -> list[int]:
        end = (self.executed // DISPATCHES_PER_TASK + 1) * DISPATCHES_PER_TASK
        if self.pending and self.pending[0][0] <= end:
            self.executed, held = self.pending.popleft()
            return held
        self.executed = end
        return []

    def drain(self) -> list[int]:
        held = [b for _, entry in self.pending for b in entry]
        self.pending.clear()
        self.executed = self.submitted
        return held


class ImmediateQueue:
    """No queue at all: whatever is handed over has run. What memory is when nothing runs ahead."""

    tasks = 0

    def __init__(self) -> None:
        self._held: list[int] | None = None

    def submit(self, kernels: int, held: list[int], touched: Touched) -> None:
        self._held = held

    def idle(self) -> list[int] | None:
        held, self._held = self._held, None
        return held

    def finish_entry(self) -> list[int]:
        return []

    def drain(self) -> list[int]:
        return []


@dataclass(frozen=True)
class Device:
    """How a backend builds, allocates and queues.

    Attributes:
        rules: what each primitive does with buffers.
        queue: makes its queue.
        rounding: the bytes that a request for some bytes takes.
        cache_limit: bytes of freed buffers it keeps.
        cache_page: a kept buffer is handed out again if it is at most twice as large as asked for, and at most
            two pages larger.
        build: from a step captured on the CPU, the graph that this backend builds of it.
        fusion: how its release fuses.
        marked: kinds of regions that ``build`` needs the backward of.
        memory_limit: MLX's own, in bytes: above it the evaluator waits for what is queued; None for out of reach.
        largest_buffer: the most bytes it hands out in one buffer; None for no bound.
    """

    name: str
    rules: dict[str, Rule]
    queue: Callable[[], Queue] = DispatchQueue
    rounding: Callable[[int], int] = int
    cache_limit: int = CPU_CACHE_BYTES
    cache_page: int = CPU_PAGE_BYTES
    build: Callable[[Graph], Graph] = for_cpu
    fusion: Fusion = NEWEST
    marked: frozenset[str] = frozenset()
    memory_limit: int | None = None
    largest_buffer: int | None = None


CPU = Device("cpu", CPU_RULES)
"""The CPU of a machine whose memory is out of reach."""


class BufferCache:
    """Freed buffers, by size; a request takes the smallest that is not much too large."""

    __slots__ = ("limit", "page", "sizes", "total")

    def __init__(self, limit: int, page: int):
        self.sizes: list[int] = []
        self.total = 0
        self.limit = limit
        self.page = page

    def take(self, size: int) -> int:
        """The size of the buffer handed out, ``size`` where none fits."""
        at = bisect_left(self.sizes, size)
        if at == len(self.sizes) or self.sizes[at] >= min(2 * size, size + 2 * self.page):
            return size
        found = self.sizes.pop(at)
        self.total -= found
        return found

    def give(self, size: int) -> None:
        if size and self.total + size <= self.limit:
            insort(self.sizes, size)
            self.total += size


class Memory:
    """A device's memory and queue, kept from evaluation to evaluation.

    By buffer number: ``size`` in bytes, how many ``arrays`` live in it, how many ``pending`` entries hold it.
    """

    def __init__(self, device: Device = CPU, limit: int | None = None, queue: Queue | None = None):
        """Args:
        limit: what ``mx.set_memory_limit`` was given, in bytes; None for the device's own.
        queue: instead of the device's own.
        """
        self.device = device
        self.limit = device.memory_limit if limit is None else limit
        self.waited_at_limit = False
        self.queue = queue or device.queue()
        self.counts_elements = not isinstance(self.queue, DispatchQueue | ImmediateQueue)
        self.cache = BufferCache(device.cache_limit, device.cache_page)
        self.forget()

    def forget(self) -> None:
        """Begins anew, with no buffer; what is in the cache, and the queue's count, stay."""
        self.active = 0
        self.size: list[int] = []
        self.arrays: list[int] = []
        self.pending: list[int] = []
        self.alike: dict[int, int] = {}

    @property
    def largest_buffer(self) -> int:
        """Bytes of the largest buffer there was."""
        alike = self.alike
        return max((size // alike.get(b, 1) for b, size in enumerate(self.size)), default=0)

    def adopt(self, size: int, count: int = 1) -> int:
        """A buffer that is there already, with one array in it; or ``count`` alike, told apart by nobody."""
        if count > 1:
            self.alike[len(self.size)] = count
        size *= count
        self.size.append(size)
        self.arrays.append(1)
        self.pending.append(0)
        self.active += size
        return len(self.size) - 1

    def allocate(self, nbytes: int) -> int:
        """A new buffer, with one array in it."""
        return self.adopt(self.cache.take(self.device.rounding(nbytes)) if nbytes else 0)

    def drop_array(self, b: int) -> None:
        """An array that lived in the buffer is gone."""
        self.arrays[b] -= 1
        if not self.arrays[b] and not self.pending[b]:
            self._free(b)

    def release(self, held: list[int]) -> None:
        """What an entry of the queue held, now that it has run."""
        pending, arrays = self.pending, self.arrays
        for b in held:
            pending[b] -= 1
            if not pending[b] and not arrays[b]:
                self._free(b)

    def _free(self, b: int) -> None:
        self.active -= self.size[b]
        self.cache.give(self.size[b])

    def wait(self) -> None:
        """What the evaluator does after every primitive: waits while too much is open."""
        queue, limit = self.queue, self.limit
        self.run_idle()
        over = limit is not None and self.active > limit
        if queue.tasks <= MAX_ACTIVE_TASKS and not (over and queue.tasks > 0):
            return
        self.waited_at_limit |= over
        if queue.tasks > 1:
            self._finish_task()
        while limit is not None and self.active > limit and queue.tasks > 0:
            # With one task open it spins, and sees memory fall while the task runs.
            if queue.tasks > 1:
                self._finish_task()
            else:
                self.release(queue.finish_entry())
        self.run_idle()

    def _finish_task(self) -> None:
        open_tasks = self.queue.tasks
        while self.queue.tasks >= open_tasks:
            self.release(self.queue.finish_entry())

    def run_idle(self) -> None:
        """Runs what is in front of the next kernel."""
        while (held := self.queue.idle()) is not None:
            self.release(held)

    def synchronize(self) -> None:
        """Runs all that is queued."""
        self.release(self.queue.drain())


class Step:
    """A node as the simulation runs it: what does not change from run to run."""

    __slots__ = ("_effect", "inputs", "known", "node", "op", "outputs", "reached", "rule", "siblings")

    def __init__(self, graph: Graph, node: Node, reached: int, rule: Rule | None):
        arrays = graph.arrays
        self.node = node
        self.inputs = node.inputs
        self.outputs = node.outputs
        self.reached = reached
        self.siblings = [o for o in node.outputs if o != reached]
        self.known = rule is not None
        self.rule = rule or unknown
        op = self.op = Operands()
        op.dtypes = [arrays[i].dtype for i in node.inputs]
        op.items = [ITEM_BYTES[dtype] for dtype in op.dtypes]
        op.out_shapes = [arrays[o].shape for o in node.outputs]
        op.out_items = [ITEM_BYTES[arrays[o].dtype] for o in node.outputs]
        op.arguments = node.arguments
        op.inputs, op.donatable, op.buffer_bytes = [], [], []
        self._effect: Effect | None = None

    def effect(self, inputs: list[Layout], donatable: list[bool], buffer_bytes: list[int]) -> Effect:
        """What the rule says of these operands. Mostly they are those of the run before, and so is the answer."""
        op = self.op
        if (
            self._effect is None
            or inputs != op.inputs
            or donatable != op.donatable
            or buffer_bytes != op.buffer_bytes
        ):
            op.inputs, op.donatable, op.buffer_bytes = inputs, donatable, buffer_bytes
            self._effect = self.rule(op)
        return self._effect


class Program:
    """A graph's evaluations, scheduled for a device, ready to be simulated any number of times."""

    def __init__(
        self,
        graph: Graph,
        device: Device = CPU,
        width: int = BFS_MAX_WIDTH,
        earlier: Program | None = None,
        links: dict[int, int] | None = None,
    ):
        """Args:
        width: as ``schedule`` takes it.
        earlier: the call before the first of these, where it is another: it creates the state.
        links: for an input of this graph, the input of ``earlier`` that is the same array of the state.
        """
        self.graph = graph
        self.device = device
        self.width = width
        self.earlier = earlier
        self.links = links or {}
        self.evaluations: list[list[Step]] = []
        evaluated: set[int] = set()
        for evaluation in graph.evaluations:
            order = schedule(graph, evaluation, evaluated, width)
            self.evaluations.append(
                [Step(graph, node, reached, device.rules.get(node.primitive)) for node, reached in order]
            )
            evaluated.update(o for node, _ in order for o in node.outputs)
        # Every output of a primitive keeps the list of its inputs: none of several outputs' is ever donated.
        self.read = [0] * len(graph.arrays)
        for node in graph.nodes:
            for i in node.inputs:
                self.read[i] += len(node.outputs)
        self.references = self.read[:]
        self.held = {i for e in graph.evaluations for i in (*e.outputs, *e.held)}
        for i in self.held:
            self.references[i] += 1
        made = {o for steps in self.evaluations for step in steps for o in step.outputs}
        self.waits = any(
            graph.arrays[o].producer is not None and o not in made for o in graph.carries.values()
        )
        """Whether a call leaves state that it does not evaluate."""

    @property
    def chain(self) -> list[Program]:
        """The calls before the first of these, and this one."""
        return [*(self.earlier.chain if self.earlier is not None else []), self]

    def evaluated_as(self, evaluations: list[Evaluation]) -> Program:
        """The same calls, this one evaluated in another way."""
        graph = self.graph.evaluated_as(evaluations)
        return Program(graph, self.device, self.width, self.earlier, self.links)

    @property
    def unknown(self) -> dict[str, int]:
        """Primitives no rule is known for, and how many nodes there are of each."""
        found: dict[str, int] = {}
        for steps in self.evaluations:
            for step in steps:
                if not step.known:
                    found[step.node.primitive] = found.get(step.node.primitive, 0) + 1
        return found


@dataclass
class Run:
    """What one simulated evaluation did.

    Attributes:
        peak_bytes: the most that was ever active.
        peak_index: position of the primitive that made the peak; -1 where nothing rose above the beginning.
        before_bytes: active when the evaluation began: state, batch, constants.
        after_bytes: active when it had ended.
        high: for each primitive in order, the active bytes once it had allocated.
        low: and after it had let go of its inputs.
    """

    peak_bytes: int
    peak_index: int
    before_bytes: int
    after_bytes: int
    high: list[int] = field(default_factory=list)
    low: list[int] = field(default_factory=list)


Watcher = Callable[[int, "Simulation"], None]
"""Called after every primitive has allocated, with its position."""


class Simulation:
    """A program's arrays in a device's memory, from what exists before the first evaluation on."""

    def __init__(self, program: Program, memory: Memory, found: dict[int, tuple[Layout, int]] | None = None):
        """Args:
        found: for inputs of the graph, how they lie and the bytes of their buffer, where that is not a row-major
            array in a buffer of its size: what an earlier step left.
        """
        self.program = program
        self.memory = memory
        memory.forget()
        arrays = program.graph.arrays
        self.references = program.references[:]
        self.layout: list[Layout] = [None] * len(arrays)  # type: ignore[list-item]
        self.buffer = [-1] * len(arrays)
        found = found or {}
        for array in arrays:
            if array.producer is None and self.references[array.id]:
                self._adopt(array, found.get(array.id))

    def _adopt(self, array: Array, found: tuple[Layout, int] | None = None) -> None:
        """An array that is there without being made here."""
        layout, size = found or (row_major(array.shape), array.nbytes)
        self.layout[array.id] = layout
        self.buffer[array.id] = self.memory.adopt(self.memory.device.rounding(size), array.count)

    def run(self, number: int = 0, watch: Watcher | None = None) -> Run:
        """Runs one of the program's evaluations."""
        memory = self.memory
        before = peak = memory.active
        peak_index = -1
        high: list[int] = []
        low: list[int] = []
        for index, step in enumerate(self.program.evaluations[number]):
            self._execute(step)
            active = memory.active
            high.append(active)
            if active > peak:
                peak, peak_index = active, index
            if watch is not None:
                watch(index, self)
            memory.wait()
            self._detach(step)
            low.append(memory.active)
        # The end of an evaluation is a primitive of its own, without inputs or outputs of interest here.
        memory.queue.submit(0, [], [])
        memory.synchronize()
        return Run(peak, peak_index, before, memory.active, high, low)

    def _execute(self, step: Step) -> None:
        """Runs the primitive's rule, makes the buffers it asks for, and queues its kernels."""
        memory, layout, buffer, references = self.memory, self.layout, self.buffer, self.references
        holders, pending, sizes = memory.arrays, memory.pending, memory.size
        inputs = step.inputs
        buffers = [buffer[i] for i in inputs]
        donatable = [
            references[i] == 1 and holders[b] == 1 and not pending[b]
            for i, b in zip(inputs, buffers, strict=True)
        ]
        outs, kernels, temporaries = step.effect(
            [layout[i] for i in inputs], donatable, [sizes[b] for b in buffers]
        )
        for o, (source, nbytes, lies) in zip(step.outputs, outs, strict=True):
            layout[o] = lies
            if source == NEW:
                buffer[o] = memory.allocate(nbytes)
            else:
                buffer[o] = b = buffers[source]
                holders[b] += 1
        held = set(buffers)
        for o in step.siblings:
            held.add(buffer[o])
        held.discard(buffer[step.reached])
        for b in held:
            pending[b] += 1
        entry = list(held)
        for nbytes in temporaries:
            b = memory.allocate(nbytes)
            holders[b] = 0
            pending[b] = 1
            entry.append(b)
        touched: Touched = []
        if memory.counts_elements:
            touched = [(buffer[i], layout[i].span) for i in (*inputs, *step.outputs)]
        memory.queue.submit(kernels, entry, touched)

    def _detach(self, step: Step) -> None:
        """Lets go of the inputs, and of outputs that nobody reads."""
        references, buffer, memory = self.references, self.buffer, self.memory
        for i in step.inputs:
            references[i] -= len(step.outputs)
            if not references[i]:
                memory.drop_array(buffer[i])
        for o in step.outputs:
            if not references[o]:
                memory.drop_array(buffer[o])

    def found(self, carries: dict[int, int]) -> dict[int, tuple[Layout, int]]:
        """How the next step finds its inputs.

        Args:
            carries: for an input of the graph, the array that is in its place after this step.
        """
        size, buffer, layout = self.memory.size, self.buffer, self.layout
        return {i: (layout[o], size[buffer[o]]) for i, o in carries.items() if buffer[o] >= 0}
