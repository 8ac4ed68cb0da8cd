"""What ``mx.compile`` does to a graph before it fuses: merge equal scalars, drop copies, merge equal siblings.

The order of MLX's tape decides which of two equal primitives stays and, in ``fuse``, which one a kernel grows
from. So the tape is kept as MLX keeps it: depth-first from the function's outputs, one entry a primitive, and
for each array the list of its readers in the order the walk met them (``compile.cpp``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from oomguard.trace.graph import Graph, Node
from oomguard.trace.rawgraph import NO_OPS

PASSES = 3

# Primitives that MLX never takes for equal to another of their kind.
_NEVER_EQUAL = (
    "Cholesky CustomKernel CustomTransforms Depends Expm1 Inverse LUF Load Log1p QRF SVD SegmentedMM"
)
NEVER_EQUAL = frozenset(_NEVER_EQUAL.split())

Reader = tuple[int, int]
"""(an output of the reading node, position among the node's inputs)."""


@dataclass(slots=True)
class Tape:
    """A graph as ``mx.compile`` holds it.

    Attributes:
        graph: nodes are changed in place; ``write_back`` makes it consistent again.
        order: one array for each node, and each source, in depth-first order.
        readers: who reads an array. An array whose readers were all merged away has an empty list; one that
            was itself merged away has none.
        outputs: the function's outputs.
        moved: what stands for an array that was merged or dropped. It never leads back: what takes the place of
            another is there again, whatever was merged before.
    """

    graph: Graph
    order: list[int]
    readers: dict[int, list[Reader]]
    outputs: list[int]
    moved: dict[int, int] = field(default_factory=dict)

    def siblings(self, i: int) -> list[int]:
        """The other outputs of an array's producer."""
        node = self.graph.arrays[i].producer
        return [] if node is None else [o for o in node.outputs if o != i]

    def merge_one(self, into: int, gone: int) -> None:
        """Makes the readers of one array read another."""
        readers = self.readers.get(gone)
        if readers is None:
            return
        pairs = self.readers.setdefault(into, [])
        arrays = self.graph.arrays
        for reader, position in readers:
            producer = arrays[reader].producer
            assert producer is not None
            producer.inputs[position] = into
        pairs += readers
        reading = arrays[gone].producer
        if reading is not None and into in reading.inputs:
            self.readers[into] = [pair for pair in pairs if pair[0] != gone]
        self.readers.pop(gone, None)
        # Equal primitives with several outputs are merged one way by one output and back by another.
        self.moved.pop(into, None)
        self.moved[gone] = into

    def merge(self, into: int, gone: int) -> None:
        """Merges equal primitives, output by output."""
        arrays = self.graph.arrays
        kept, dropped = arrays[into].producer, arrays[gone].producer
        if kept is None or dropped is None:
            self.merge_one(into, gone)
            return
        for a, b in zip(kept.outputs, dropped.outputs, strict=True):
            self.merge_one(a, b)

    def write_back(self, rewrite: str) -> dict[int, int]:
        """Makes the graph's nodes those of the tape, and points evaluations and regions at what is left.

        Args:
            rewrite: what was done to the tape, for the message of an error.

        Returns:
            What stands for arrays that were merged or dropped.
        """
        graph = self.graph
        arrays = graph.arrays
        nodes = [node for i in self.order if (node := arrays[i].producer) is not None]
        kept = {id(node) for node in nodes}
        for node in graph.nodes:
            if id(node) not in kept:
                for o in node.outputs:
                    if arrays[o].producer is node:
                        arrays[o].producer = None
        graph.nodes = nodes
        # What the function returns is made all the same, though its readers may read its double.
        returned = set(self.outputs)
        gone = {old: new for old, new in self.moved.items() if old not in returned}
        final = graph.redirect(gone, rewrite)
        graph.sort(rewrite)
        return final


def tape(graph: Graph) -> Tape:
    """The tape of a graph, from its function's outputs; walks it as MLX does, but without recursion."""
    arrays = graph.arrays
    order: list[int] = []
    readers: dict[int, list[Reader]] = {}
    seen: set[int] = set()
    for output in graph.function_outputs:
        stack = [(output, 0)]
        while stack:
            i, position = stack.pop()
            if position == 0 and i in seen:
                continue
            node = arrays[i].producer
            inputs = node.inputs if node is not None else []
            if position < len(inputs):
                assert node is not None
                read = inputs[position]
                pairs = readers.setdefault(read, [])
                pairs.append((i, position))
                pairs += [(o, position) for o in node.outputs if o != i]
                stack.append((i, position + 1))
                if read not in seen:
                    stack.append((read, 0))
                continue
            if i not in seen:
                seen.add(i)
                if node is not None:
                    seen.update(node.outputs)
                order.append(i)
    return Tape(graph, order, readers, list(graph.function_outputs))


def simplify(graph: Graph) -> None:
    """Simplifies a graph in place, as ``mx.compile`` does.

    ``graph.function_outputs`` are the function's outputs, in its order; where one was a copy that is dropped, it
    becomes what it copied.
    """
    held = tape(graph)
    run(held)
    held.write_back("merging equal primitives")


def run(held: Tape) -> None:
    """The passes of ``simplify`` on a tape, for ``fuse`` to go on with."""
    _merge_scalars(held)
    _drop_no_ops(held)
    _merge_equal(held)


def _merge_scalars(held: Tape) -> None:
    arrays = held.graph.arrays
    first: dict[tuple[str, str], int] = {}
    kept = []
    for i in held.order:
        array = arrays[i]
        if array.kind == "constant" and array.shape == () and array.value is not None:
            into = first.setdefault((repr(array.value), array.dtype), i)
            if into != i:
                held.merge_one(into, i)
                continue
        kept.append(i)
    held.order = kept


def _drop_no_ops(held: Tape) -> None:
    arrays = held.graph.arrays
    stands_for = {o: o for o in held.outputs}
    kept = []
    for i in held.order:
        node = arrays[i].producer
        if node is None or node.primitive not in NO_OPS:
            kept.append(i)
            continue
        source = node.inputs[0]
        held.merge_one(source, i)
        held.moved[i] = source
        if i in stands_for:
            stands_for[i] = source
    held.order = kept
    held.outputs = [stands_for[o] for o in held.outputs]


def _merge_equal(held: Tape) -> None:
    position = {i: k for k, i in enumerate(held.order)}
    outputs = set(held.outputs)
    for _ in range(PASSES):
        before = len(held.moved)
        kept = []
        for i in held.order:
            orphan = _merge_readers(held, i, position, outputs)
            for sibling in held.siblings(i):
                orphan = _merge_readers(held, sibling, position, outputs) and orphan
            if not orphan:
                kept.append(i)
        unchanged = len(kept) == len(held.order) and len(held.moved) == before
        held.order = kept
        if unchanged:
            break


def _merge_readers(held: Tape, i: int, position: dict[int, int], outputs: set[int]) -> bool:
    """Merges equal readers of an array; returns whether the array has no reader and nobody wants it."""
    readers = held.readers.get(i)
    if readers is None:
        return i not in outputs
    n = len(readers)
    if n < 2:
        return False
    gone = [False] * n
    alike = _alike(held, readers)
    for a in range(n):
        if gone[a] or a not in alike:
            continue
        for b in alike[a]:
            if b <= a or gone[b]:
                continue
            into, merged = a, b
            if position.get(readers[merged][0], 0) < position.get(readers[into][0], 0):
                into, merged = merged, into
            kept, dropped = readers[into][0], readers[merged][0]
            if kept != dropped and dropped not in outputs and _equal(held.graph, kept, dropped):
                held.merge(kept, dropped)
                gone[merged] = True
    if any(gone):
        # Orphans go, so that nothing is merged with them again.
        readers[:] = [reader for k, reader in enumerate(readers) if not gone[k]]
    return False


def _alike(held: Tape, readers: list[Reader]) -> dict[int, list[int]]:
    """For each reader that another one equals, the readers equal to it, itself among them.

    By a hash, so that a scalar that thousands read costs thousands, and not their square.
    """
    arrays = held.graph.arrays
    kinds: dict[tuple[str, tuple[int, ...], tuple[Any, ...]], list[int]] = {}
    for k, (reader, _) in enumerate(readers):
        node = arrays[reader].producer
        if node is not None and node.primitive not in NEVER_EQUAL:
            kinds.setdefault((node.primitive, tuple(node.inputs), node.arguments), []).append(k)
    return {k: ks for ks in kinds.values() if len(ks) > 1 for k in ks}


def _equal(graph: Graph, a: int, b: int) -> bool:
    one, other = graph.arrays[a].producer, graph.arrays[b].producer
    return one is not None and other is not None and one is not other and same_primitive(one, other)


def same_primitive(one: Node, other: Node) -> bool:
    """Whether two nodes compute the same: MLX's ``is_equivalent``, and the same inputs."""
    return (
        one.primitive == other.primitive
        and one.primitive not in NEVER_EQUAL
        and one.inputs == other.inputs
        and one.arguments == other.arguments
    )
