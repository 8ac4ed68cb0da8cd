"""Memory over one evaluation: which buffers exist after every primitive, and the most there ever is.

Follows MLX's evaluator step by step. A primitive allocates its outputs (or takes over the buffer of an input
that nobody else holds) and queues its kernels; behind them it queues a last entry that holds its inputs'
buffers until the kernels have run. Then the evaluator may wait (too many tasks open, or more memory active
than the limit), and then the primitive lets go of its inputs. A buffer is freed when neither an array nor a
queued entry holds it.

The kernels are taken to be slow: nothing in the queue runs before the evaluator waits for it. That is what
large arrays do, and small ones weigh nothing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from oomguard.trace.graph import ITEM_BYTES, Graph, Node
from oomguard.trace.layout import Layout, row_major
from oomguard.trace.ops import CPU_RULES, NEW, Operands, Rule, unknown
from oomguard.trace.schedule import BFS_MAX_WIDTH, schedule

MAX_ACTIVE_TASKS = 10
DISPATCHES_PER_TASK = 10
CPU_CACHE_LIMIT = 32 << 20
CPU_PAGE = 4096


class DispatchQueue:
    """The CPU's queue: every tenth entry closes a task; a primitive's last entry holds its buffers.

    That last entry does nothing, so it runs as soon as the kernels before it have. ``submitted`` goes on from
    evaluation to evaluation, as MLX's count does.
    """

    __slots__ = ("executed", "pending", "submitted")

    def __init__(self, submitted: int = 0):
        self.submitted = submitted
        self.executed = submitted
        self.pending: deque[tuple[int, list[int]]] = deque()

    @property
    def tasks(self) -> int:
        """Closed tasks that have not finished."""
        return self.submitted // DISPATCHES_PER_TASK - self.executed // DISPATCHES_PER_TASK

    def submit(self, kernels: int, held: list[int], elements: int) -> list[int] | None:
        """Queues a primitive; returns what is released at once, where nothing is left to run before it."""
        self.submitted += kernels + 1
        self.pending.append((self.submitted, held))
        return self.idle()

    def idle(self) -> list[int] | None:
        """The entry at the head, where its kernels have run; None where a kernel is at the head."""
        if self.pending and self.executed >= self.pending[0][0] - 1:
            self.executed, held = self.pending.popleft()
            return held
        return None

    def finish_entry(self) -> list[int]:
        """Runs the oldest entry, or as much of it as belongs to the oldest task; returns what it released."""
        end = (self.executed // DISPATCHES_PER_TASK + 1) * DISPATCHES_PER_TASK
        if self.pending and self.pending[0][0] <= end:
            self.executed, held = self.pending.popleft()
            return held
        self.executed = end
        return []

    def drain(self) -> list[int]:
        """Runs everything."""
        held = [b for _, entry in self.pending for b in entry]
        self.pending.clear()
        self.executed = self.submitted
        return held


Queue = DispatchQueue


@dataclass(frozen=True)
class Device:
    """How a backend allocates and queues.

    ``rounding`` gives the bytes that a request for some bytes takes. ``cache_limit`` and ``cache_page`` are those
    of the buffer cache, which may hand out a larger buffer than asked for.
    """

    name: str
    rules: dict[str, Rule]
    queue: Callable[[], Queue] = DispatchQueue
    rounding: Callable[[int], int] = int
    cache_limit: int = CPU_CACHE_LIMIT
    cache_page: int = CPU_PAGE


CPU = Device("cpu", CPU_RULES)


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


@dataclass
class Run:
    """What one simulated evaluation did.

    Attributes:
        peak_bytes: the most that was ever active.
        peak_index: position in ``order`` of the primitive that made the peak.
        before_bytes: active when the evaluation began: state, batch, constants.
        after_bytes: active when it ended.
        order: the primitives in the order they ran.
        high: for each of them the active bytes once it had allocated.
        low: and after it had let go of its inputs.
        unknown: names of primitives no rule is known for, with how many ran.
    """

    peak_bytes: int
    peak_index: int
    before_bytes: int
    after_bytes: int
    order: list[Node]
    high: list[int]
    low: list[int]
    unknown: dict[str, int] = field(default_factory=dict)


class Memory:
    """A device's memory and queue, kept from evaluation to evaluation."""

    def __init__(self, device: Device = CPU, limit: int | None = None, width: int = BFS_MAX_WIDTH):
        """``limit``: what ``mx.set_memory_limit`` was given; None for none that is ever reached."""
        self.device = device
        self.limit = limit
        self.width = width
        self.queue = device.queue()
        self.cache = BufferCache(device.cache_limit, device.cache_page)
        self.active = 0
        self.peak = 0
        # By buffer.
        self.size: list[int] = []
        self.arrays: list[int] = []
        self.pending: list[int] = []

    def allocate(self, nbytes: int) -> int:
        """A new buffer that one array holds."""
        taken = self.cache.take(self.device.rounding(nbytes)) if nbytes else 0
        self.size.append(taken)
        self.arrays.append(1)
        self.pending.append(0)
        self.active += taken
        if self.active > self.peak:
            self.peak = self.active
        return len(self.size) - 1

    def drop_array(self, b: int) -> None:
        self.arrays[b] -= 1
        if not self.arrays[b] and not self.pending[b]:
            self._free(b)

    def release(self, held: list[int]) -> None:
        """What a queue entry held, now that it has run."""
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
        over = limit is not None and self.active > limit
        if queue.tasks <= MAX_ACTIVE_TASKS and not (over and queue.tasks > 0):
            return
        if queue.tasks > 1:
            self._finish_task()
        while limit is not None and self.active > limit and queue.tasks > 0:
            # With one task open it spins, and sees memory fall while the task runs.
            if queue.tasks > 1:
                self._finish_task()
            else:
                self.release(queue.finish_entry())
        self._run_idle()

    def _finish_task(self) -> None:
        open_tasks = self.queue.tasks
        while self.queue.tasks >= open_tasks:
            self.release(self.queue.finish_entry())

    def _run_idle(self) -> None:
        while (held := self.queue.idle()) is not None:
            self.release(held)

    def synchronize(self) -> None:
        self.release(self.queue.drain())


class Simulation:
    """Evaluations of one graph in a device's memory."""

    def __init__(self, graph: Graph, memory: Memory, layouts: dict[int, tuple[Layout, int]] | None = None):
        """Args:
        layouts: for inputs of the graph, how they lie and the size of their buffer, where that is not the plain
            row-major one: what an earlier step left.
        """
        self.graph = graph
        self.memory = memory
        n = len(graph.arrays)
        self.layout: list[Layout | None] = [None] * n
        self.buffer = [-1] * n
        self.refs = [0] * n
        self.evaluated: set[int] = set()
        self.unknown: dict[str, int] = {}
        self._op = Operands()
        for node in graph.nodes:
            for i in node.inputs:
                self.refs[i] += 1
        self.held: set[int] = set()
        self._start(layouts or {})

    def _start(self, layouts: dict[int, tuple[Layout, int]]) -> None:
        graph = self.graph
        for evaluation in graph.evaluations:
            self.held.update(evaluation.held, evaluation.outputs)
        for i in self.held:
            self.refs[i] += 1
        for array in graph.arrays:
            if array.producer is None and self.refs[array.id]:
                layout, size = layouts.get(array.id, (None, 0))
                self.layout[array.id] = layout or row_major(array.shape)
                self.buffer[array.id] = self.memory.allocate(size or array.nbytes)

    def run(self, number: int = 0) -> Run:
        """Runs one of the graph's evaluations."""
        memory = self.memory
        evaluation = self.graph.evaluations[number]
        memory.peak = memory.active
        before = memory.active
        steps = schedule(self.graph, evaluation, self.evaluated, memory.width)
        high: list[int] = []
        low: list[int] = []
        peak_index = -1
        peak = before
        for index, (node, reached) in enumerate(steps):
            self._allocate(node)
            high.append(memory.active)
            if memory.active > peak:
                peak, peak_index = memory.active, index
            self._submit(node, reached, self._kernels)
            memory.wait()
            self._detach(node)
            low.append(memory.active)
        memory.synchronize()
        return Run(
            max(peak, memory.peak),
            peak_index,
            before,
            memory.active,
            [n for n, _ in steps],
            high,
            low,
            self.unknown,
        )

    def _allocate(self, node: Node) -> None:
        """Runs the primitive's rule and makes the buffers it asks for."""
        op, arrays, layout, buffer = self._op, self.graph.arrays, self.layout, self.buffer
        memory = self.memory
        refs, holders, pending, sizes = self.refs, memory.arrays, memory.pending, memory.size
        inputs = node.inputs
        op.inputs = [layout[i] for i in inputs]  # type: ignore[misc]
        op.dtypes = [arrays[i].dtype for i in inputs]
        op.items = [ITEM_BYTES[d] for d in op.dtypes]
        buffers = [buffer[i] for i in inputs]
        op.donatable = [
            refs[i] == 1 and holders[b] == 1 and not pending[b] for i, b in zip(inputs, buffers, strict=True)
        ]
        op.buffer_bytes = [sizes[b] for b in buffers]
        op.out_shapes = [arrays[o].shape for o in node.outputs]
        op.out_items = [ITEM_BYTES[arrays[o].dtype] for o in node.outputs]
        op.arguments = node.arguments
        rule = memory.device.rules.get(node.primitive)
        if rule is None:
            self.unknown[node.primitive] = self.unknown.get(node.primitive, 0) + 1
            rule = unknown
        outs, self._kernels, temporaries = rule(op)
        for o, out in zip(node.outputs, outs, strict=True):
            layout[o] = out.layout
            if out.source == NEW:
                buffer[o] = memory.allocate(out.nbytes)
            else:
                b = buffers[out.source]
                buffer[o] = b
                holders[b] += 1
        self._temporaries = [memory.allocate(nbytes) for nbytes in temporaries]

    def _submit(self, node: Node, reached: int, kernels: int) -> None:
        buffer, memory = self.buffer, self.memory
        held = {buffer[i] for i in node.inputs}
        if len(node.outputs) > 1:
            held.update(buffer[o] for o in node.outputs if o != reached)
        held.discard(buffer[reached])
        elements = 0
        for b in held:
            memory.pending[b] += 1
        entry = [*held, *self._temporaries]
        for b in self._temporaries:
            memory.arrays[b] = 0
            memory.pending[b] = 1
        released = memory.queue.submit(kernels, entry, elements)
        if released is not None:
            memory.release(released)

    def _detach(self, node: Node) -> None:
        refs, buffer, memory = self.refs, self.buffer, self.memory
        self.evaluated.update(node.outputs)
        for i in node.inputs:
            refs[i] -= 1
            if not refs[i]:
                memory.drop_array(buffer[i])
        for o in node.outputs:
            if not refs[o]:
                memory.drop_array(buffer[o])
