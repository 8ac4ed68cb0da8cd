"""Steps whose state is not evaluated where it is made: one graph of several calls, each reading what the last left.

MLX runs what ``mx.eval`` is given and what that needs. New parameters that it is not given stay a graph, which holds
the saved tensors of its step, until a later step needs them; what no step ever needs is never run, and its graph grows
by every call. So the graph of one call is instantiated once a step, its state read from the instance before, and each
evaluation runs what is needed of all of them and has not run before.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from oomguard.trace.graph import Array, Graph, Node
from oomguard.trace.layout import Layout
from oomguard.trace.memory import Memory, Program, Run, Simulation, Step, Watcher
from oomguard.trace.schedule import schedule

MOST_LATE = 16
"""Calls after which nothing that is ever evaluated is taken to come later still."""


@dataclass
class Instance:
    """One call in the graph of many.

    Attributes:
        program: what it is an instance of.
        arrays: for each array of that program's graph the one here.
        nodes: its primitives.
        inputs: arrays that are there from this call on: the state of the first, batch, constants.
        held: what is held while it is evaluated, and until the next call has been made.
    """

    program: Program
    arrays: dict[int, int] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)


class Unrolled(Program):
    """A program's calls, those before it included, in one graph that grows by ``extend``."""

    def __init__(self, program: Program):
        self.graph = Graph()
        self.device = program.device
        self.width = program.width
        self.last = program
        self.calls = [*program.chain]
        self.evaluations: list[list[Step]] = []
        self.instances: list[Instance] = []
        self.evaluated_at: dict[int, int] = {}
        self._origin: dict[int, tuple[int, int]] = {}
        self._patterns: list[set[tuple[int, int]]] = []

    @functools.cached_property
    def settling(self) -> int:
        """Calls before the first that evaluates the same as the next, of itself and of the calls before it."""
        number = len(self.calls) - 1
        while number < len(self.calls) + MOST_LATE:
            while len(self.instances) < number + 2:
                self.extend()
            if self._patterns[number] == self._patterns[number + 1]:
                break
            number += 1
        return number

    def extend(self) -> None:
        """Adds the next call and its evaluation."""
        number = len(self.instances)
        program = self.calls[number] if number < len(self.calls) else self.last
        instance = Instance(program)
        self._add_inputs(instance)
        self._add_nodes(instance)
        arrays = instance.arrays
        instance.held = [arrays[i] for i in program.held if i in arrays]
        self.graph.carries.update(
            {arrays[i]: arrays[o] for i, o in program.graph.carries.items() if i in arrays}
        )
        (evaluation,) = program.graph.evaluations
        ours = self.graph.evaluate([arrays[i] for i in evaluation.outputs])
        order = schedule(self.graph, ours, self.evaluated_at.keys(), self.width)
        rules = self.device.rules
        self.evaluations.append(
            [Step(self.graph, n, reached, rules.get(n.primitive)) for n, reached in order]
        )
        for node, _ in order:
            self.evaluated_at.update(dict.fromkeys(node.outputs, number))
        origins = (self._origin[id(node)] for node, _ in order)
        self._patterns.append({(number - call, position) for call, position in origins})
        self.instances.append(instance)

    def unevaluated(self) -> tuple[list[Array], list[Array]]:
        """The state that the first call of many leaves unevaluated: what a later one evaluates, and what none does."""
        number = len(self.calls) - 1
        arrays, graph = self.instances[number].arrays, self.last.graph
        later: list[Array] = []
        never: list[Array] = []
        for before, after in graph.carries.items():
            if graph.arrays[after].producer is not None and self.evaluated_at.get(arrays[after]) != number:
                (later if arrays[after] in self.evaluated_at else never).append(graph.arrays[before])
        return later, never

    def _add_inputs(self, instance: Instance) -> None:
        """The state is what the call before left, what is held all the time is there already, the rest is new."""
        program, before = instance.program, self.instances[-1] if self.instances else None
        left = _left_by(program, before) if before is not None else {}
        kept = _kept_from(program, before) if before is not None else {}
        read = program.read
        for array in program.graph.arrays:
            i = array.id
            if array.producer is not None or not (read[i] or i in program.held or i in program.graph.carries):
                continue
            if i in left:
                instance.arrays[i] = left[i]
            elif i in kept:
                instance.arrays[i] = kept[i]
            else:
                instance.arrays[i] = self._copy(array)
                instance.inputs.append(instance.arrays[i])

    def _add_nodes(self, instance: Instance) -> None:
        arrays, graph = instance.arrays, instance.program.graph
        for node in graph.nodes:
            outputs = []
            for o in node.outputs:
                arrays[o] = self._copy(graph.arrays[o])
                outputs.append(arrays[o])
            inputs = [arrays[i] for i in node.inputs]
            copied = Node(node.primitive, inputs, outputs, node.arguments, node.phase, node.block, node.scope)
            self._origin[id(copied)] = (len(self.instances), len(instance.nodes))
            instance.nodes.append(self.graph.append(copied))

    def _copy(self, array: Array) -> int:
        return self.graph.array(
            array.shape, array.dtype, array.kind, name=array.name, block=array.block, value=array.value
        )


def _left_by(program: Program, before: Instance) -> dict[int, int]:
    """For an input of the program, what the call before left in its place."""
    if before.program is program:
        return {i: before.arrays[o] for i, o in program.graph.carries.items() if o in before.arrays}
    carries = before.program.graph.carries
    return {i: before.arrays[carries[o]] for i, o in program.links.items() if carries.get(o) in before.arrays}


def _kept_from(program: Program, before: Instance) -> dict[int, int]:
    """For an input that somebody holds from call to call, the array it is: the batch, what ``mx.compile`` keeps."""
    if before.program is program:
        return {i: before.arrays[i] for i in program.held if i in before.arrays}
    batches = [
        [
            a.id
            for a in each.graph.arrays
            if a.producer is None and a.id in each.held and a.kind in ("batch", "state")
        ]
        for each in (program, before.program)
    ]
    same = len(batches[0]) == len(batches[1])
    return {i: before.arrays[o] for i, o in zip(*batches, strict=same) if o in before.arrays} if same else {}


class UnrolledSimulation(Simulation):
    """Calls simulated one after the other in one memory, in which what is not evaluated yet holds what it reads."""

    def __init__(self, program: Unrolled, memory: Memory):
        self.program: Unrolled = program
        self.memory = memory
        memory.forget()
        self.references: list[int] = []
        self.layout: list[Layout] = []
        self.buffer: list[int] = []
        self.begun = 0

    def run(self, number: int = 0, watch: Watcher | None = None) -> Run:
        """Makes the call of this number, where it is not made yet, and evaluates it; one after the other."""
        self.begin(number)
        return super().run(number, watch)

    def begin(self, number: int) -> None:
        """Makes the call: its graph holds what it reads, its state takes the place of the one before."""
        if number < self.begun:
            return
        self.begun = number + 1
        while len(self.program.instances) <= number:
            self.program.extend()
        instance = self.program.instances[number]
        more = len(self.program.graph.arrays) - len(self.references)
        self.references += [0] * more
        self.layout += [None] * more  # type: ignore[list-item]
        self.buffer += [-1] * more
        for node in instance.nodes:
            for i in node.inputs:
                self.references[i] += len(node.outputs)
        for i in instance.held:
            self.references[i] += 1
        for i in instance.inputs:
            if self.references[i]:
                self._adopt(self.program.graph.arrays[i])
        if number:
            for i in self.program.instances[number - 1].held:
                self._let_go(i)

    def _let_go(self, i: int) -> None:
        """One who held the array does so no more; a primitive that nobody will run lets go of what it reads."""
        stack = [i]
        while stack:
            i = stack.pop()
            self.references[i] -= 1
            if self.references[i]:
                continue
            if self.buffer[i] >= 0:
                self.memory.drop_array(self.buffer[i])
                continue
            node = self.program.graph.arrays[i].producer
            if node is not None and not any(self.references[o] for o in node.outputs):
                stack += [read for read in node.inputs for _ in node.outputs]

    def waiting_bytes(self) -> int:
        """Bytes that only graphs hold: what is there and neither the caller nor the state has."""
        held = {self.buffer[i] for i in self.program.instances[self.begun - 1].held if self.buffer[i] >= 0}
        return self.memory.active - sum(self.memory.size[b] for b in held)
