"""Whose the bytes are: a memory that keeps, at every moment, how much of it belongs to which category.

A buffer belongs to the array written into it last. Once no array lives in it, but a queued kernel still holds
it, it belongs to the in-flight window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oomguard.trace.graph import Graph
from oomguard.trace.label import GRADIENT
from oomguard.trace.memory import Device, Memory, Queue, Simulation, Step

CATEGORIES = (
    "parameters",
    "optimizer state",
    "batch",
    "other state",
    "constants",
    "saved tensors",
    "forward",
    "recompute",
    "gradients",
    "backward",
    "update",
    "copies",
    "in-flight window",
)
NUMBER = {name: number for number, name in enumerate(CATEGORIES)}
COPIES = NUMBER["copies"]
IN_FLIGHT = NUMBER["in-flight window"]

_BY_KIND = {
    "parameter": "parameters",
    "optimizer": "optimizer state",
    "batch": "batch",
    "state": "other state",
    "constant": "constants",
}
_VIEWS = (
    "AsStrided Broadcast BroadcastAxes Copy CustomTransforms Depends ExpandDims Flatten Reshape Slice Split "
    "Squeeze StopGradient Transpose Unflatten View"
)
VIEWS = frozenset(_VIEWS.split())


def categories(graph: Graph) -> list[int]:
    """The category of each array of a graph, as a number. New state is state of the kind it replaces."""
    readers = _read_by_backward(graph)
    result = []
    for array in graph.arrays:
        node = array.producer
        if node is None:
            result.append(NUMBER[_BY_KIND.get(array.kind, "constants")])
        elif array.name is not None and array.name.endswith(GRADIENT):
            result.append(NUMBER["gradients"])
        elif node.phase == "forward":
            result.append(NUMBER["saved tensors" if array.id in readers else "forward"])
        else:
            result.append(NUMBER[node.phase])
    for before, after in graph.carries.items():
        if graph.arrays[after].producer is not None:
            result[after] = result[before]
    return result


def _read_by_backward(graph: Graph) -> set[int]:
    """Arrays that something other than the forward reads, directly or through a view."""
    found: set[int] = set()
    for node in reversed(graph.nodes):
        forward = node.phase == "forward"
        if not forward or (node.primitive in VIEWS and any(o in found for o in node.outputs)):
            found.update(node.inputs)
    return found


class Ledger(Memory):
    """A memory that knows the category of every buffer.

    ``changed``: buffers made, freed or given another owner or category since somebody emptied it.
    """

    def __init__(self, device: Device, limit: int | None, queue: Queue | None):
        super().__init__(device, limit, queue)

    def forget(self) -> None:
        super().forget()
        self.category: list[int] = []
        self.totals = [0] * len(CATEGORIES)
        self.changed: set[int] = set()

    def adopt(self, size: int, count: int = 1) -> int:
        self.changed.add(len(self.size))
        self.category.append(COPIES)
        self.totals[COPIES] += size * count
        return super().adopt(size, count)

    def assign(self, b: int, category: int) -> None:
        """Says what the buffer holds from now on."""
        self.totals[self.category[b]] -= self.size[b]
        self.totals[category] += self.size[b]
        self.category[b] = category
        self.changed.add(b)

    def drop_array(self, b: int) -> None:
        if self.arrays[b] == 1 and self.pending[b]:
            self.assign(b, IN_FLIGHT)
        super().drop_array(b)

    def _free(self, b: int) -> None:
        self.totals[self.category[b]] -= self.size[b]
        self.changed.add(b)
        super()._free(b)


@dataclass(slots=True)
class Owner:
    """Who wrote a buffer: an array, or a primitive that needs a copy or scratch space (``array`` is -1)."""

    array: int
    primitive: str
    phase: str
    block: int
    scope: str


@dataclass(slots=True)
class Stay:
    """What a buffer held from one primitive on until another (exclusive)."""

    owner: Owner
    nbytes: int
    category: int
    start: int
    end: int = -1


class Recorder:
    """Watches a simulation: the totals at every primitive, what each buffer held from when to when, and the
    owners of all buffers at one primitive."""

    def __init__(self, graph: Graph, steps: Sequence[Step], at: int):
        """Args:
        graph: in which the simulated step stands.
        steps: the primitives it runs.
        at: position of the primitive at which the owners are wanted; -1 for the beginning.
        """
        self.graph = graph
        self.steps = steps
        self.by_array = categories(graph)
        self.at = at
        self.totals: list[tuple[int, ...]] = []
        self.live: list[tuple[Owner, int, int]] = []
        self._owners: dict[int, Owner] = {}
        self._ended: list[Stay] = []
        self._staying: dict[int, Stay] = {}

    def begin(self, simulation: Simulation) -> None:
        """Takes note of what exists before the first primitive."""
        memory = self._ledger(simulation)
        for array in self.graph.arrays[: len(simulation.buffer)]:
            b = simulation.buffer[array.id]
            if b >= 0 and memory.arrays[b] and b not in self._owners:
                memory.assign(b, self.by_array[array.id])
                self._owners[b] = Owner(array.id, "", "", array.block, "")
        self._note(0, memory)
        if self.at < 0:
            self._take(memory)

    def __call__(self, index: int, simulation: Simulation) -> None:
        memory = self._ledger(simulation)
        step = self.steps[index]
        node = step.node
        for o in step.outputs:
            b = simulation.buffer[o]
            known = self._owners.get(b)
            if known is None or (known.array != o and node.primitive not in VIEWS):
                memory.assign(b, self.by_array[o])
                self._owners[b] = Owner(o, node.primitive, node.phase, node.block, node.scope)
        for b in range(len(memory.size) - 1, -1, -1):
            if b in self._owners:
                break
            self._owners[b] = Owner(-1, node.primitive, node.phase, node.block, node.scope)
        self.totals.append(tuple(memory.totals))
        self._note(index, memory)
        if index == self.at:
            self._take(memory)

    @property
    def stays(self) -> list[Stay]:
        """What every buffer held, and when; at each primitive those that stay sum to what is active."""
        end = len(self.totals)
        last = [Stay(s.owner, s.nbytes, s.category, s.start, end) for s in self._staying.values()]
        return [stay for stay in (*self._ended, *last) if stay.start < stay.end]

    def _note(self, index: int, memory: Ledger) -> None:
        """Ends and begins the stays of the buffers that changed before this primitive was watched."""
        for b in memory.changed:
            stay = self._staying.pop(b, None)
            if stay is not None:
                stay.end = index
                self._ended.append(stay)
            if memory.size[b] and (memory.arrays[b] or memory.pending[b]):
                self._staying[b] = Stay(self._owners[b], memory.size[b], memory.category[b], index)
        memory.changed.clear()

    def _take(self, memory: Ledger) -> None:
        """Every buffer there is, with its owner, its bytes and its category."""
        self.live = [
            (owner, memory.size[b], memory.category[b])
            for b, owner in self._owners.items()
            if memory.size[b] and (memory.arrays[b] or memory.pending[b])
        ]

    @staticmethod
    def _ledger(simulation: Simulation) -> Ledger:
        assert isinstance(simulation.memory, Ledger)
        return simulation.memory
