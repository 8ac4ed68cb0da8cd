"""The graph of one step: arrays, the primitives that make them, and what the caller evaluates and keeps.

Everything in ``trace`` reads and writes this. A captured step, a hand-made test graph, a graph rewritten by
``remat`` or ``lower`` are all the same thing:

- an ``Array`` has an id, which is its index in ``graph.arrays``, a shape and a dtype. What the step is given
  (parameters, optimizer state, batch, constants) has no producer;
- a ``Node`` is one primitive applied once. Its inputs and outputs are array ids, its arguments what
  MLX's export says of the primitive (axes, shapes, ...);
- an ``Evaluation`` is one ``mx.eval``: which arrays, in which order, and which arrays somebody outside still
  holds while it runs.

Invariants, all of them tested by ``Graph.check``:

1. ``graph.arrays[i].id == i``. Arrays are never removed, only left without a producer or a reader.
2. ``graph.nodes`` is in topological order: a node stands after the producers of all its inputs.
3. ``array.producer`` is the node that lists the array in its outputs, at index ``array.position``, or None.
   An array has at most one producer, and a node without outputs does not exist.
4. Kind ``intermediate`` is exactly what has a producer.
5. Node order carries no meaning beyond 2: MLX evaluates from the outputs (``schedule``). Only ``simplify``
   and ``fuse`` read it, as ``mx.compile`` reads its tape, which is in depth-first order from the outputs.

Dtypes are MLX's names as strings. Blocks are counted from 0; -1 is "in no block". Primitive names are those
of ``mx.export_function``: a reduction is ``Reduce`` with its kind as an argument, rsqrt is ``Sqrt`` with
True.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from oomguard.errors import TraceError

Kind = Literal["parameter", "optimizer", "batch", "state", "constant", "intermediate"]
Phase = Literal["forward", "recompute", "backward", "update"]
Shape = tuple[int, ...]

KINDS: tuple[Kind, ...] = ("parameter", "optimizer", "batch", "state", "constant", "intermediate")
PHASES: tuple[Phase, ...] = ("forward", "recompute", "backward", "update")

ITEM_BYTES: dict[str, int] = {
    "bool": 1,
    "bool_": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
}


@dataclass(slots=True, eq=False)
class Array:
    """One array of the graph.

    ``kind`` says where its bytes belong: a model's ``parameter``, ``optimizer`` state, the ``batch``, other
    ``state`` of the caller (random keys, running sums), a ``constant`` made inside the step, or an
    ``intermediate``. ``name`` is the module path of a parameter, or for an intermediate the module whose
    output it is. ``value`` is what a scalar constant holds, where known: equal scalars are merged by it.
    ``count`` is how many alike arrays it stands for; more than one only where nothing reads it.
    """

    id: int
    shape: Shape
    dtype: str
    kind: Kind
    name: str | None = None
    block: int = -1
    producer: Node | None = None
    position: int = 0
    value: float | int | bool | None = None
    count: int = 1

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, whatever holds them."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(slots=True, eq=False)
class Node:
    """One primitive applied once. ``scope`` is the module path it was built in, "" outside every module."""

    primitive: str
    inputs: list[int]
    outputs: list[int]
    arguments: tuple[Any, ...] = ()
    phase: Phase = "forward"
    block: int = -1
    scope: str = ""


@dataclass(slots=True)
class Region:
    """A part of the forward that a tag delimits: everything between its inputs and its outputs.

    ``kind`` is ``block`` (a layer of the model's layer list), ``checkpoint`` (a call of ``mx.checkpoint``),
    ``custom_function``, ``attention`` (the attention core), ``compile`` (a function compiled by itself) or
    ``fast.<name>`` (a call of ``mx.fast.<name>``, its keyword arguments in ``arguments``). Regions nest, and
    ``Graph.between`` gives the nodes of one. ``inputs`` holds every array argument of the call in order, the
    parameters of a module among them where the call receives them; ``outputs`` what it returned.

    Its backward is what stands between ``cotangents`` (of each output, as they enter) and ``gradients`` (of
    each input, as they leave, before they are added to what other readers of that input contribute); None
    where nothing is differentiated.
    """

    kind: str
    name: str
    inputs: list[int]
    outputs: list[int]
    block: int = -1
    arguments: dict[str, Any] = field(default_factory=dict)
    cotangents: list[int | None] = field(default_factory=list)
    gradients: list[int | None] = field(default_factory=list)


@dataclass(slots=True)
class Evaluation:
    """One ``mx.eval``: ``outputs`` in the order given, ``held`` what else a caller keeps alive meanwhile.

    The outputs themselves are always held. An input of the graph that is in no ``held`` is released, or
    donated, at its last use: so old parameters are, once the module holds the new ones.
    """

    outputs: list[int]
    held: set[int] = field(default_factory=set)


SHOWN_IN_A_CYCLE = 6
"""Members of a cycle that its message names; the rest are counted."""


class CycleError(TraceError, ValueError):
    """A rewrite left something that needs itself; the text says which rewrite, and what needs what."""

    @classmethod
    def of(cls, rewrite: str, members: Sequence[str]) -> CycleError:
        """``members`` in order, each needing the next, and the last one the first."""
        named = [*members[:SHOWN_IN_A_CYCLE]]
        if len(members) > SHOWN_IN_A_CYCLE:
            named.append(f"{len(members) - SHOWN_IN_A_CYCLE} more")
        chain = " -> ".join([*named, members[0]])
        return cls(f"{rewrite} made a cycle in the graph ({chain}); please report it with the step")


class Graph:
    """Arrays, nodes in topological order, evaluations, and the regions that tags delimited.

    ``function_outputs`` is what the step returns and the state it leaves, in the order ``mx.compile`` takes
    them: ``simplify`` and ``fuse`` walk from there. ``carries`` gives for an array of the state what is in its
    place after the step, so that the next step can be simulated with what this one leaves. ``recomputes`` says that
    the step calls ``mx.checkpoint`` or ``mx.custom_function``: what it recomputes is in the graph, or in regions of
    those kinds.
    """

    __slots__ = ("arrays", "carries", "evaluations", "function_outputs", "nodes", "recomputes", "regions")

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self.nodes: list[Node] = []
        self.evaluations: list[Evaluation] = []
        self.regions: list[Region] = []
        self.function_outputs: list[int] = []
        self.carries: dict[int, int] = {}
        self.recomputes = False

    # -- building ---------------------------------------------------------------------------------------

    def array(
        self,
        shape: Sequence[int],
        dtype: str = "float32",
        kind: Kind = "intermediate",
        *,
        name: str | None = None,
        block: int = -1,
        value: float | int | bool | None = None,
    ) -> int:
        """Adds an array without a producer and returns its id."""
        number = len(self.arrays)
        self.arrays.append(Array(number, tuple(shape), dtype, kind, name, block, value=value))
        return number

    def input(
        self,
        shape: Sequence[int],
        dtype: str = "float32",
        *,
        kind: Kind = "batch",
        name: str | None = None,
        count: int = 1,
    ) -> int:
        """Adds what the step is given: a batch unless ``kind`` says otherwise; ``count`` of them, if more."""
        number = self.array(shape, dtype, kind, name=name)
        self.arrays[number].count = count
        return number

    def parameter(self, shape: Sequence[int], dtype: str = "float32", *, name: str | None = None) -> int:
        """Adds a parameter of the model."""
        return self.array(shape, dtype, "parameter", name=name)

    def constant(
        self, value: float | int | bool | None = None, shape: Sequence[int] = (), dtype: str = "float32"
    ) -> int:
        """Adds a constant: a scalar unless ``shape`` says otherwise."""
        return self.array(shape, dtype, "constant", value=value)

    def op(
        self,
        primitive: str,
        inputs: Sequence[int],
        shape: Sequence[int] | None = None,
        dtype: str | None = None,
        arguments: tuple[Any, ...] = (),
        *,
        phase: Phase = "forward",
        block: int = -1,
        scope: str = "",
        name: str | None = None,
    ) -> int:
        """Appends a primitive with one output and returns the output's id.

        Shape and dtype are those of the first input unless given.
        """
        first = self.arrays[inputs[0]] if inputs else None
        if shape is None or dtype is None:
            assert first is not None, f"{primitive} without inputs needs a shape and a dtype"
            shape = first.shape if shape is None else shape
            dtype = first.dtype if dtype is None else dtype
        output = self.array(shape, dtype, name=name, block=block)
        self.append(Node(primitive, list(inputs), [output], arguments, phase, block, scope))
        return output

    def multi_op(
        self,
        primitive: str,
        inputs: Sequence[int],
        outputs: Sequence[tuple[Sequence[int], str]],
        arguments: tuple[Any, ...] = (),
        *,
        phase: Phase = "forward",
        block: int = -1,
        scope: str = "",
    ) -> list[int]:
        """Appends a primitive with several outputs, each a (shape, dtype), and returns their ids."""
        ids = [self.array(shape, dtype, block=block) for shape, dtype in outputs]
        self.append(Node(primitive, list(inputs), ids, arguments, phase, block, scope))
        return ids

    def append(self, node: Node) -> Node:
        """Appends a node whose arrays exist already, and makes it their producer."""
        for position, output in enumerate(node.outputs):
            array = self.arrays[output]
            array.producer, array.position, array.kind = node, position, "intermediate"
        self.nodes.append(node)
        return node

    def evaluate(self, outputs: Iterable[int], held: Iterable[int] = ()) -> Evaluation:
        """Adds an ``mx.eval`` of ``outputs``, in this order, while the caller also holds ``held``."""
        evaluation = Evaluation(list(outputs), set(held))
        self.evaluations.append(evaluation)
        return evaluation

    # -- reading ----------------------------------------------------------------------------------------

    @property
    def outputs(self) -> list[int]:
        """All that is evaluated, in order, each once."""
        return list(dict.fromkeys(i for evaluation in self.evaluations for i in evaluation.outputs))

    @property
    def wanted(self) -> list[int]:
        """All that somebody outside may look at: evaluated, held, or an output of the function."""
        held = (i for evaluation in self.evaluations for i in evaluation.held)
        return list(dict.fromkeys([*self.outputs, *held, *self.function_outputs]))

    @property
    def inputs(self) -> list[int]:
        """Arrays without a producer that a node reads or that is evaluated, constants included."""
        used = {i for node in self.nodes for i in node.inputs}
        used.update(self.outputs)
        return [a.id for a in self.arrays if a.producer is None and a.id in used]

    def consumers(self) -> list[list[tuple[Node, int]]]:
        """For each array id, the nodes that read it with the position they read it at, in node order."""
        readers: list[list[tuple[Node, int]]] = [[] for _ in self.arrays]
        for node in self.nodes:
            for position, i in enumerate(node.inputs):
                readers[i].append((node, position))
        return readers

    def between(self, inputs: Iterable[int], outputs: Iterable[int]) -> list[Node]:
        """The nodes the ``outputs`` need when the ``inputs`` are given, in node order."""
        arrays, stop = self.arrays, set(inputs)
        found: set[int] = set()
        stack = [i for i in outputs if i not in stop]
        while stack:
            node = arrays[stack.pop()].producer
            if node is None or id(node) in found:
                continue
            found.add(id(node))
            stack.extend(i for i in node.inputs if i not in stop)
        return [node for node in self.nodes if id(node) in found]

    def region_nodes(self, region: Region) -> list[Node]:
        """The nodes between a region's inputs and outputs."""
        return self.between(region.inputs, region.outputs)

    def evaluated_as(self, evaluations: list[Evaluation]) -> Graph:
        """The same arrays and nodes, not copied, under other evaluations."""
        graph = Graph()
        for name in self.__slots__:
            setattr(graph, name, getattr(self, name))
        graph.evaluations = evaluations
        return graph

    # -- rewriting --------------------------------------------------------------------------------------

    def replace(self, old: int, new: int, readers: Iterable[tuple[Node, int]] | None = None) -> None:
        """Makes the readers of ``old`` read ``new`` instead: all of them and the evaluations, or those given.

        Costs a pass over all nodes when ``readers`` is not given; use ``replace_all`` for many arrays.
        """
        if readers is None:
            self.replace_all({old: new})
            return
        for node, position in readers:
            assert node.inputs[position] == old
            node.inputs[position] = new

    def replace_all(self, mapping: dict[int, int], rewrite: str = "replacing arrays") -> None:
        """Replaces many arrays everywhere, following chains (a to b, b to c). The old producers stay.

        Args:
            mapping: what stands for an array from now on.
            rewrite: what is being done, for the message of an error.

        Raises:
            CycleError: a chain ends where it began, so nothing is left to stand for its arrays.
        """
        if not mapping:
            return
        final = self._followed(mapping, rewrite)
        get = final.get
        for node in self.nodes:
            node.inputs = [get(i, i) for i in node.inputs]
        self._redirect(final)

    def redirect(self, mapping: dict[int, int], rewrite: str = "replacing arrays") -> dict[int, int]:
        """``replace_all`` for all but the nodes, which read the new arrays already; returns what stands for what."""
        final = self._followed(mapping, rewrite)
        self._redirect(final)
        return final

    def _redirect(self, final: dict[int, int]) -> None:
        get = final.get
        self.function_outputs = [get(i, i) for i in self.function_outputs]
        self.carries = {before: get(after, after) for before, after in self.carries.items()}
        for evaluation in self.evaluations:
            evaluation.outputs = [get(i, i) for i in evaluation.outputs]
            evaluation.held = {get(i, i) for i in evaluation.held}
        for region in self.regions:
            region.inputs = [get(i, i) for i in region.inputs]
            region.outputs = [get(i, i) for i in region.outputs]
            region.cotangents = [i if i is None else get(i, i) for i in region.cotangents]
            region.gradients = [i if i is None else get(i, i) for i in region.gradients]

    def _followed(self, mapping: dict[int, int], rewrite: str) -> dict[int, int]:
        """The mapping with chains (a to b, b to c) followed to their ends, each looked at once."""
        final: dict[int, int] = {}
        for start in mapping:
            path: dict[int, None] = {}  # in order
            end = start
            while end in mapping and end not in final:
                if end in path:
                    members = list(path)
                    raise CycleError.of(rewrite, [self._say(i) for i in members[members.index(end) :]])
                path[end] = None
                end = mapping[end]
            end = final.get(end, end)
            final.update(dict.fromkeys(path, end))
        return final

    def _say(self, i: int) -> str:
        """An array in words, by what makes it and where."""
        array = self.arrays[i]
        node = array.producer
        if node is None:
            return f"{array.kind} {array.name or f'array {i}'}"
        block = f", block {node.block}" if node.block >= 0 else ""
        return f"{node.primitive} ({node.phase}{block}{f', {node.scope}' if node.scope else ''})"

    def clone(
        self, nodes: Iterable[Node], substitute: dict[int, int], phase: Phase | None = None
    ) -> tuple[list[Node], dict[int, int]]:
        """Copies nodes with new outputs; they read ``substitute[i]`` for ``i``, and each other's copies.

        Args:
            nodes: in topological order.
            substitute: array ids to read instead; not changed.
            phase: the copies' phase; the originals' where not given.

        Returns:
            The copies, not yet in ``graph.nodes``: insert them, or append them and call ``sort``. And the map
            from each copied output, and each substituted array, to what stands for it.
        """
        mapping = dict(substitute)
        copies = []
        for node in nodes:
            outputs = []
            for i in node.outputs:
                old = self.arrays[i]
                new = self.array(old.shape, old.dtype, name=old.name, block=old.block)
                mapping[i] = new
                outputs.append(new)
            copy = Node(
                node.primitive,
                [mapping.get(i, i) for i in node.inputs],
                outputs,
                node.arguments,
                phase or node.phase,
                node.block,
                node.scope,
            )
            for position, i in enumerate(outputs):
                self.arrays[i].producer, self.arrays[i].position = copy, position
            copies.append(copy)
        return copies, mapping

    def remove_dead(self) -> int:
        """Drops the nodes that nothing ``wanted`` needs; returns how many."""
        arrays = self.arrays
        needed: set[int] = set()
        stack = self.wanted
        while stack:
            node = arrays[stack.pop()].producer
            if node is not None and id(node) not in needed:
                needed.add(id(node))
                stack.extend(node.inputs)
        kept = [node for node in self.nodes if id(node) in needed]
        removed = len(self.nodes) - len(kept)
        for node in self.nodes:
            if id(node) not in needed:
                for i in node.outputs:
                    arrays[i].producer = None
        self.nodes = kept
        return removed

    def sort(self, rewrite: str = "a rewrite") -> None:
        """Restores topological order, moving a node only after what it reads (stable, linear).

        Args:
            rewrite: what was done to the graph, for the message of an error.

        Raises:
            CycleError: the graph has a cycle.
        """
        arrays = self.arrays
        state: dict[int, int] = {}
        ordered: list[Node] = []
        for start in self.nodes:
            if id(start) in state:
                continue
            state[id(start)] = 1
            stack = [(start, 0)]
            while stack:
                node, position = stack.pop()
                inputs = node.inputs
                while position < len(inputs):
                    producer = arrays[inputs[position]].producer
                    position += 1
                    if producer is None or state.get(id(producer)) == 2:
                        continue
                    if state.get(id(producer)) == 1:
                        above = [node.outputs[0] for node, _ in stack] + [node.outputs[0]]
                        members = above[above.index(producer.outputs[0]) :]
                        raise CycleError.of(rewrite, [self._say(i) for i in members])
                    stack.append((node, position))
                    state[id(producer)] = 1
                    stack.append((producer, 0))
                    break
                else:
                    state[id(node)] = 2
                    ordered.append(node)
        self.nodes = ordered

    def copy(self) -> Graph:
        """A graph that shares nothing with this one that can be changed."""
        other = Graph()
        other.arrays = [
            Array(a.id, a.shape, a.dtype, a.kind, a.name, a.block, None, a.position, a.value, a.count)
            for a in self.arrays
        ]
        for n in self.nodes:
            node = Node(n.primitive, n.inputs[:], n.outputs[:], n.arguments, n.phase, n.block, n.scope)
            for i in node.outputs:
                other.arrays[i].producer = node
            other.nodes.append(node)
        other.evaluations = [Evaluation(e.outputs[:], set(e.held)) for e in self.evaluations]
        other.function_outputs = self.function_outputs[:]
        other.carries = dict(self.carries)
        other.recomputes = self.recomputes
        other.regions = [
            Region(
                r.kind,
                r.name,
                r.inputs[:],
                r.outputs[:],
                r.block,
                dict(r.arguments),
                r.cotangents[:],
                r.gradients[:],
            )
            for r in self.regions
        ]
        return other

    def check(self) -> None:
        """Raises ValueError for the first broken invariant."""
        for number, array in enumerate(self.arrays):
            if array.id != number:
                raise ValueError(f"array at {number} has id {array.id}")
            if array.producer is not None and array.producer.outputs[array.position] != number:
                raise ValueError(f"array {number} is not output {array.position} of its producer")
            if array.producer is not None and array.kind != "intermediate":
                raise ValueError(f"array {number} has a producer and kind {array.kind}")
        made: set[int] = set()
        for node in self.nodes:
            if not node.outputs:
                raise ValueError(f"{node.primitive} has no outputs")
            for i in node.inputs:
                if self.arrays[i].producer is not None and i not in made:
                    raise ValueError(f"{node.primitive} reads array {i} before it is made")
                if self.arrays[i].producer is None and self.arrays[i].kind == "intermediate":
                    raise ValueError(f"{node.primitive} reads array {i}, which nothing makes")
            for i in node.outputs:
                if self.arrays[i].producer is not node:
                    raise ValueError(f"array {i} is made by {node.primitive} but does not know it")
                if i in made:
                    raise ValueError(f"array {i} is made twice")
                made.add(i)
        for i in self.outputs:
            if self.arrays[i].producer is not None and i not in made:
                raise ValueError(f"array {i} is evaluated but its producer is not in the graph")

    def describe(self, limit: int = 200) -> str:
        """The nodes as text, one a line, for looking at."""
        lines = []
        for node in self.nodes[:limit]:
            outs = ", ".join(f"%{i} {self.arrays[i].dtype}{list(self.arrays[i].shape)}" for i in node.outputs)
            ins = ", ".join(f"%{i}" for i in node.inputs)
            lines.append(
                f"{outs} = {node.primitive}({ins}) {node.arguments or ''} {node.phase} {node.scope}".rstrip()
            )
        if len(self.nodes) > limit:
            lines.append(f"... {len(self.nodes) - limit} more")
        return "\n".join(lines)
