"""The graph exactly as the step built it, put together from two exports of it.

``mx.export_function`` gives shapes, dtypes and arguments, but of a graph that is simplified already: equal
siblings merged, copies dropped. Without ``mx.compile`` nothing of that happens, and the copies and doubles
take their place in the evaluator's queue. ``mx.export_to_dot`` gives the true graph, but only names and
edges. Both are walks from the same outputs, so the second is led along the first: a copy stands for its
input, and every other primitive for the one the simplified graph has in its place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Protocol

import mlx.core as mx

from oomguard.errors import TraceError
from oomguard.trace.graph import Graph, Node

NO_OPS = frozenset({"Copy", "StopGradient"})
HAND_ON = NO_OPS | {"Depends", "CustomTransforms"}
"""Primitives that hand arrays on as they are, and have no arguments of interest."""

# Names in the drawing that export_function gives as an argument of a common primitive.
RENAMED = {
    **dict.fromkeys(("BitwiseAnd", "BitwiseOr", "BitwiseXor", "LeftShift", "RightShift"), "BitwiseBinary"),
    **dict.fromkeys(("Log2", "Log10"), "Log"),
    **dict.fromkeys(("And", "Or", "Sum", "Prod", "Min", "Max"), "Reduce"),
    **dict.fromkeys(("CumSum", "CumProd", "CumMin", "CumMax", "CumLogaddexp"), "Scan"),
    "NaNEqual": "Equal",
    "Rsqrt": "Sqrt",
}


@dataclass(slots=True)
class Drawn:
    """What ``export_to_dot`` wrote: primitives in depth-first order with the names of their arrays.

    ``sources`` are the arrays nothing makes, in the order met. ``ends`` are what the ``StopGradient`` primitives
    that nothing reads stand on: such an end is put on every array that must be found again.
    """

    sources: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    primitives: list[str] = field(default_factory=list)
    inputs: list[list[str]] = field(default_factory=list)
    outputs: list[list[str]] = field(default_factory=list)


@dataclass(slots=True)
class Exported:
    """What ``export_function`` said: arrays by name, and the primitive that makes each."""

    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    constants: dict[str, mx.array] = field(default_factory=dict)
    shapes: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    makers: dict[str, tuple[str, list[str], list[str], list[Any]]] = field(default_factory=dict)
    dtypes: dict[Any, str] = field(default_factory=dict)

    def __call__(self, event: dict[str, Any]) -> None:
        """The callback of ``mx.export_function``."""
        kind = event["type"]
        if kind == "primitive":
            inputs = self._arrays(event["inputs"])
            outputs = self._arrays(event["outputs"])
            maker = (event["name"], inputs, outputs, event["arguments"])
            for name in outputs:
                self.makers[name] = maker
        elif kind == "inputs":
            self.inputs = self._arrays(event["inputs"])
        elif kind == "outputs":
            self.outputs = self._arrays(event["outputs"])
        elif kind == "constants":
            for name, array in event["constants"]:
                self.constants[name] = array
                self.shapes[name] = (tuple(array.shape), dtype_name(array.dtype))

    def _arrays(self, described: list[tuple[str, tuple[int, ...], Any]]) -> list[str]:
        shapes, dtypes = self.shapes, self.dtypes
        names = []
        for name, shape, dtype in described:
            if name not in shapes:
                known = dtypes.get(dtype)
                if known is None:
                    known = dtypes[dtype] = dtype_name(dtype)
                shapes[name] = (tuple(shape), known)
            names.append(name)
        return names


def dtype_name(dtype: Any) -> str:
    """``float32`` for ``mx.float32``."""
    return str(dtype).rpartition(".")[2]


def read_dot(text: str) -> Drawn:
    """Parses the output of ``mx.export_to_dot``; linear in its lines."""
    drawn = Drawn()
    inputs: list[str] = []
    outputs: list[str] = []
    for line in text.split("\n"):
        first = line[:1]
        if first == '"':
            inputs.append(line[1 : line.index('"', 1)])
        elif first.isdigit():
            outputs.append(line[line.index('"') + 1 : -1])
        elif first == "{" and (start := line.find('[label ="')) >= 0:
            inputs, outputs = [], []
            drawn.primitives.append(line[start + 9 : line.index('"', start + 9)])
            drawn.inputs.append(inputs)
            drawn.outputs.append(outputs)
        elif line.startswith("{ rank=source"):
            drawn.sources.append(line[16:-4])
        elif line.startswith("{ rank=sink") and drawn.primitives[-1] == "StopGradient":
            drawn.ends.append(inputs[0])
            for column in (drawn.primitives, drawn.inputs, drawn.outputs):
                column.pop()
            outputs = []
    return drawn


def lead(drawn: Drawn, exported: Exported, roots: dict[str, str]) -> dict[str, str]:
    """For each drawn array the exported one that has its shape, dtype and maker.

    Args:
        roots: drawn outputs and what they are in the export.

    Raises:
        TraceError: the two are not the same graph.
    """
    match = dict(roots)
    makers = exported.makers
    for number in range(len(drawn.primitives) - 1, -1, -1):
        known = next((match[o] for o in drawn.outputs[number] if o in match), None)
        if known is None:
            continue
        primitive, inputs = drawn.primitives[number], drawn.inputs[number]
        if primitive in NO_OPS:
            match[inputs[0]] = known
            continue
        maker = makers.get(known)
        name = primitive_name(primitive)
        if maker is None or maker[0] != name or len(maker[1]) != len(inputs):
            raise TraceError(
                f"MLX {version('mlx')} exports this step as two different graphs (at {name}); "
                "please report it with the step"
            )
        for drawn_name, exported_name in zip(inputs, maker[1], strict=True):
            match[drawn_name] = exported_name
        for drawn_name, exported_name in zip(drawn.outputs[number], maker[2], strict=True):
            match[drawn_name] = exported_name
    return match


@dataclass(slots=True)
class Built:
    """A graph as it was drawn.

    Attributes:
        ids: the array of each drawn name: of the inputs, and of those described.
        needed: the names that were described; an input among them is read.
        cotangents: the cotangent that arrives at each mark, by number.
    """

    graph: Graph
    ids: dict[str, int]
    needed: Described
    cotangents: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Given:
    """What is known of the drawn sources.

    Attributes:
        inputs: ids of the arrays that are graph inputs already, whatever makes them.
        marks: number of the mark that a constant belongs to, also once it has another dtype or shape.
        stand_ins: the primitive and its arguments that a ``Depends`` on a constant stands for.
    """

    inputs: dict[str, int]
    marks: dict[str, int]
    stand_ins: dict[str, tuple[str, tuple[Any, ...]]]


def marks_from(drawn: Drawn, constants: dict[str, int]) -> dict[str, int]:
    """The marks' constants by name, with the number of their mark, and what is made of nothing else."""
    found = dict(constants)
    for inputs, outputs in zip(drawn.inputs, drawn.outputs, strict=True):
        if len(inputs) == 1 and inputs[0] in found:
            found.update(dict.fromkeys(outputs, found[inputs[0]]))
    return found


class Described(Protocol):
    """What is known of the drawn arrays: those that are wanted, by their name in the drawing."""

    def __contains__(self, name: str) -> bool: ...

    def form(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and dtype."""

    def arguments(self, name: str) -> tuple[Any, ...]:
        """Those of the primitive that makes the array."""

    def constant(self, graph: Graph, name: str) -> int:
        """A constant like this one, added to the graph."""


class ExportedArrays:
    """Drawn arrays as ``export_function`` describes what they were matched with."""

    def __init__(self, exported: Exported, match: dict[str, str]):
        self._exported, self._match = exported, match
        self._arguments: dict[int, tuple[Any, ...]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._match

    def form(self, name: str) -> tuple[tuple[int, ...], str]:
        return self._exported.shapes[self._match[name]]

    def arguments(self, name: str) -> tuple[Any, ...]:
        maker = self._exported.makers[self._match[name]]
        known = self._arguments.get(id(maker))
        if known is None:
            known = self._arguments[id(maker)] = tuple(_plain(value) for value in maker[3])
        return known

    def constant(self, graph: Graph, name: str) -> int:
        shape, dtype = self.form(name)
        array = self._exported.constants.get(self._match[name])
        value = array.item() if array is not None and not shape else None
        if isinstance(value, complex):
            value = None
        return graph.constant(value, shape, dtype)


def build(drawn: Drawn, described: Described, given: Given, graph: Graph) -> Built:
    """Builds the true graph, the marks of ``tags`` taken out.

    Args:
        described: what the drawn arrays are; those it does not know are left out.
        given: what is known of the sources.
        graph: has the arrays of ``given.inputs``; the rest is added to it.
    """
    return _Building(drawn, described, given, graph).run()


class _Building:
    def __init__(self, drawn: Drawn, described: Described, given: Given, graph: Graph):
        self.drawn, self.described, self.graph = drawn, described, graph
        self.inputs, self.stand_ins = given.inputs, given.stand_ins
        self.marks = given.marks
        self.built = Built(graph, dict(given.inputs), described)

    def run(self) -> Built:
        drawn, described = self.drawn, self.described
        for label, read, outputs in zip(drawn.primitives, drawn.inputs, drawn.outputs, strict=True):
            known = outputs[0] in self.inputs or outputs[0] in self.marks
            if known or not any(o in described for o in outputs):
                continue
            if read and (read[0] in self.marks or read[-1] in self.marks):
                self._take_out_mark(label, read, outputs[0])
            else:
                self._add(label, read, outputs)
        for name in drawn.ends:
            if name in described:
                self._array(name)
        return self.built

    def _array(self, name: str) -> int:
        ids = self.built.ids
        number = ids.get(name)
        if number is None:
            number = ids[name] = self.described.constant(self.graph, name)
        return number

    def _take_out_mark(self, label: str, read: list[str], output: str) -> None:
        """``array * constant`` in the forward, ``constant * cotangent`` in the backward."""
        marks, ids = self.marks, self.built.ids
        if label != "Multiply":
            raise TraceError(f"a mark of the trace was read by {label}; please report it with the step")
        if read[0] in marks:
            ids[output] = self.built.cotangents[marks[read[0]]] = self._array(read[1])
        else:
            ids[output] = self._array(read[0])

    def _add(self, label: str, read: list[str], outputs: list[str]) -> None:
        name = primitive_name(label)
        if name == "Depends" and read[-1] in self.stand_ins:
            name, arguments = self.stand_ins[read[-1]]
            read = read[:-1]
        else:
            arguments = () if name in HAND_ON else self.described.arguments(outputs[0])
        inputs = [self._array(i) for i in read]
        made = []
        for output in outputs:
            made.append(self.graph.array(*self.described.form(output)))
            self.built.ids[output] = made[-1]
        self.graph.append(Node(name, inputs, made, arguments))


def primitive_name(label: str) -> str:
    """The name ``export_function`` has for a primitive, by its label in the drawing."""
    name = label.partition(" ")[0]
    return RENAMED.get(name, name)


def _plain(value: Any) -> Any:
    """Arguments as tuples, numbers and dtype names, so that two primitives' can be compared."""
    if isinstance(value, list | tuple):
        return tuple(_plain(v) for v in value)
    if isinstance(value, mx.Dtype):
        return dtype_name(value)
    return value
