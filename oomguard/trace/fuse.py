"""Kernel fusion as ``mx.compile`` does it: chains of elementwise primitives become one ``Compiled`` node.

From the end of the tape backwards, each elementwise primitive gathers what it reads, at most 11 deep and 24
arrays wide, as long as every reader of a gathered primitive is gathered too. A broadcast that others read as
well is doubled instead of stopping the chain. A gathered array that the function returns becomes a second
output of the kernel, if it has the shape of the first (``compile_fuse`` in ``compile.cpp``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from oomguard.trace.graph import Array, Graph, Node, Shape
from oomguard.trace.simplify import Tape, run, tape

MAX_DEPTH = 11
MAX_ARRAYS = 24

_FUSABLE = (
    "Abs Add ArcCos ArcCosh ArcSin ArcSinh ArcTan ArcTan2 ArcTanh AsType BitwiseBinary BitwiseInvert Broadcast "
    "Ceil Conjugate Cos Cosh Divide Equal Erf ErfInv Exp Expm1 Floor FloorDivide Greater GreaterEqual Imag Less "
    "LessEqual Log Log1p LogAddExp LogicalAnd LogicalNot LogicalOr Maximum Minimum Multiply Negative NotEqual "
    "Power Real Remainder Round Select Sigmoid Sign Sin Sinh Sqrt Square Subtract Tan Tanh"
)
FUSABLE = frozenset(_FUSABLE.split())


@dataclass(frozen=True, slots=True)
class Fusion:
    """What of fusion depends on MLX's release.

    Attributes:
        doubles_broadcasts: since 0.26.2; before, a broadcast with other readers stops a kernel.
        ends_in_broadcasts: until 0.29.1; a kernel may end in a broadcast, which is then written out.
    """

    doubles_broadcasts: bool = True
    ends_in_broadcasts: bool = False

    @classmethod
    def of(cls, mlx: tuple[int, int, int]) -> Fusion:
        """Fusion in a release."""
        return cls(doubles_broadcasts=mlx >= (0, 26, 2), ends_in_broadcasts=mlx < (0, 29, 2))


NEWEST = Fusion()


def compile_graph(graph: Graph, fusion: Fusion = NEWEST) -> dict[int, int]:
    """Simplifies and fuses a graph in place: what ``mx.compile`` makes of a function.

    ``graph.function_outputs`` are the function's outputs, in its order. Returns what stands for arrays that were
    merged or dropped.
    """
    held = tape(graph)
    run(held)
    _Kernels(held, fusion).run()
    return held.write_back("merging equal primitives and fusing kernels")


def fuse(graph: Graph, fusion: Fusion = NEWEST) -> None:
    """Fuses a graph in place, without simplifying it first."""
    held = tape(graph)
    _Kernels(held, fusion).run()
    held.write_back("fusing kernels")


@dataclass(slots=True)
class _Gathered:
    """What one kernel would fuse: the arrays gathered, and those it would read."""

    shape: Shape
    inside: set[int] = field(default_factory=set)
    read: set[int] = field(default_factory=set)


class _Kernels:
    def __init__(self, held: Tape, fusion: Fusion):
        self.held = held
        self.fusion = fusion
        self.arrays: list[Array] = held.graph.arrays
        self.outputs = set(held.outputs)
        # Not lists: a scalar that the update of every parameter reads has thousands of readers.
        self.readers = {i: dict.fromkeys(pairs) for i, pairs in held.readers.items()}

    def run(self) -> None:
        held = self.held
        fused: set[int] = set()
        kept: list[int] = []
        for i in reversed(held.order):
            if i in fused:
                continue
            kept.append(i)
            node = self.arrays[i].producer
            if node is None or node.primitive not in FUSABLE:
                continue
            if node.primitive == "Broadcast" and not self.fusion.ends_in_broadcasts:
                continue
            gathered = _Gathered(self.arrays[i].shape)
            self._gather(i, 0, gathered)
            if len(gathered.inside) > 1:
                fused |= self._fuse(i, node, gathered.inside)
        kept.reverse()
        held.order = kept

    def _gather(self, i: int, depth: int, into: _Gathered) -> None:
        if i in into.inside:
            return
        array = self.arrays[i]
        node = array.producer
        if (
            depth >= MAX_DEPTH
            or node is None
            or node.primitive not in FUSABLE
            or (i in self.outputs and array.shape != into.shape)
        ):
            into.read.add(i)
            return
        if depth > 0 and any(reader not in into.inside for reader, _ in self.readers.get(i, ())):
            double = node.primitive == "Broadcast" and self.fusion.doubles_broadcasts
            if double and len(into.read) < MAX_ARRAYS:
                self._gather(self._double(i, node, into.inside), depth, into)
            else:
                into.read.add(i)
            return
        if i in self.outputs:
            into.read.add(i)
        else:
            into.read.discard(i)
        if len(into.read) >= MAX_ARRAYS:
            return
        into.inside.add(i)
        for read in node.inputs:
            self._gather(read, depth + 1, into)

    def _double(self, i: int, node: Node, inside: set[int]) -> int:
        """A second broadcast for the readers inside the kernel; those outside keep the first."""
        graph, readers = self.held.graph, self.readers
        double = graph.op(node.primitive, node.inputs, self.arrays[i].shape, self.arrays[i].dtype)
        copy = graph.nodes.pop()
        copy.phase, copy.block, copy.scope = node.phase, node.block, node.scope
        copy.arguments = node.arguments
        readers[double] = {}
        for reader in inside:
            producer = self.arrays[reader].producer
            assert producer is not None
            for position, read in enumerate(producer.inputs):
                if read == i:
                    producer.inputs[position] = double
                    del readers[i][reader, position]
                    readers[double][reader, position] = None
        return double

    def _fuse(self, root: int, node: Node, inside: set[int]) -> set[int]:
        """Makes one node of what is inside; returns the arrays that have no place on the tape any more."""
        readers = self.readers
        chain, read = self._in_order(root, inside)
        outputs = [i for i in chain if i in self.outputs and i != root] + [root]
        for i in chain:
            producer = self.arrays[i].producer
            assert producer is not None
            for position, j in enumerate(producer.inputs):
                readers[j].pop((i, position), None)  # a doubled broadcast is nobody's reader
        names = tuple(self._name(i) for i in chain)
        constants = tuple(k for k, i in enumerate(read) if self._is_constant(i))
        kernel = Node("Compiled", read, outputs, (names, constants), node.phase, node.block, node.scope)
        for position, i in enumerate(outputs):
            self.arrays[i].producer, self.arrays[i].position = kernel, position
        for position, i in enumerate(read):
            readers[i].update(((o, position), None) for o in outputs)
        for i in chain:
            if i not in outputs:
                self.arrays[i].producer = None
        return set(chain[:-1])

    def _in_order(self, root: int, inside: set[int]) -> tuple[list[int], list[int]]:
        """The arrays inside, each after what it reads, and the arrays they read from outside."""
        chain: list[int] = []
        read: list[int] = []
        seen: set[int] = set()

        def walk(i: int) -> None:
            if i in seen:
                return
            seen.add(i)
            if i not in inside:
                read.append(i)
                return
            producer = self.arrays[i].producer
            assert producer is not None
            for j in producer.inputs:
                walk(j)
            chain.append(i)

        walk(root)
        return chain, read

    def _name(self, i: int) -> str:
        producer = self.arrays[i].producer
        assert producer is not None
        return producer.primitive

    def _is_constant(self, i: int) -> bool:
        array = self.arrays[i]
        return array.producer is None and array.kind == "constant" and array.size == 1
