"""The graph of a step that recomputes by itself, as MLX draws it.

``mx.checkpoint`` and ``mx.custom_function`` cannot be exported, but they can be drawn. So such a step is captured
twice: once with those calls run as plain code (``rawgraph``), for shapes and arguments, and once as it is, for its
drawing, in which every recompute stands where MLX puts it. Two passes through one layer, what a recompute leaves in
a module (``update`` with the parameters it was lent), calls inside calls, random numbers drawn again: all of it is in
the drawing, and none of it is in a rule here.

What the drawing lacks is taken from the plain graph, led along it from the results. A second forward of a function
is led along its first one, since the plain backward reads that; what hands arrays on (``CustomTransforms``,
``Depends``, copies) is looked through on both sides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from oomguard.trace.containers import StateKey
from oomguard.trace.graph import Graph, Node
from oomguard.trace.label import needed
from oomguard.trace.rawgraph import HAND_ON, Built, Drawn, Given, primitive_name


class Unlike(Exception):
    """A drawing that cannot be led along a plain graph; the text says where they part."""


class PlainArrays:
    """Drawn arrays of a step that recomputes, as the arrays of the same step run plainly: see ``lead_along``."""

    def __init__(self, graph: Graph, match: dict[str, int]):
        self.graph, self.match = graph, match

    def __contains__(self, name: str) -> bool:
        return name in self.match

    def form(self, name: str) -> tuple[tuple[int, ...], str]:
        array = self.graph.arrays[self.match[name]]
        return array.shape, array.dtype

    def arguments(self, name: str) -> tuple[Any, ...]:
        node = self.graph.arrays[self.match[name]].producer
        return () if node is None else node.arguments

    def constant(self, graph: Graph, name: str) -> int:
        array = self.graph.arrays[self.match[name]]
        return graph.constant(array.value, array.shape, array.dtype)


def lead_along(
    drawn: Drawn, plain: Graph, given: Given, roots: Iterable[tuple[str, int]], keys: dict[int, int]
) -> dict[str, int]:
    """For each drawn array the array of the plain graph that has its shape, dtype and maker.

    Args:
        drawn: the step as it is.
        plain: the same step with its recomputing calls run as plain code, no node removed yet.
        given: what is known of the drawn sources; marks are not followed.
        roots: drawn arrays and what they are in the plain graph: what the step gives, and what goes into and comes
            out of its recomputing calls.
        keys: for the random key that the plain step begins with, the key it goes on with. A recompute draws its
            random numbers again, so the drawn step has gone on further.

    Raises:
        Unlike: the two are not the same computation.
    """
    return _Leading(drawn, plain, given, keys).run(roots)


class _Leading:
    def __init__(self, drawn: Drawn, plain: Graph, given: Given, keys: dict[int, int]):
        self.drawn, self.plain, self.given, self.keys = drawn, plain, given, keys
        self.match: dict[str, int] = {}
        self.marks = given.marks.keys()

    def run(self, roots: Iterable[tuple[str, int]]) -> dict[str, int]:
        drawn, match = self.drawn, self.match
        for name, array in roots:
            self._meet(name, array)
        for number in range(len(drawn.primitives) - 1, -1, -1):
            outputs = drawn.outputs[number]
            position = next((k for k, name in enumerate(outputs) if name in match), None)
            if position is not None and outputs[0] not in self.given.inputs:
                self._lead(primitive_name(drawn.primitives[number]), drawn.inputs[number], outputs, position)
        for label, inputs, outputs in zip(drawn.primitives, drawn.inputs, drawn.outputs, strict=True):
            if label in HAND_ON and any(name in match for name in outputs):
                self._complete(label, inputs, outputs)
        return match

    def _meet(self, name: str, array: int) -> None:
        array = _behind(self.plain, array)
        known = self.match.setdefault(name, array)
        if known != array and self._form(known) != self._form(array):
            raise Unlike(f"one array is {self._form(known)} and {self._form(array)}")

    def _form(self, array: int) -> tuple[tuple[int, ...], str]:
        found = self.plain.arrays[array]
        return found.shape, found.dtype

    def _lead(self, name: str, inputs: list[str], outputs: list[str], position: int) -> None:
        if outputs[0] in self.marks or (inputs and not self.marks.isdisjoint((inputs[0], inputs[-1]))):
            self._lead_mark(inputs, outputs)
            return
        if name == "Depends" and inputs[-1] in self.given.stand_ins:
            name, inputs = self.given.stand_ins[inputs[-1]][0], inputs[:-1]
        elif name in HAND_ON:
            for output, read in zip(outputs, _handed(name, inputs, outputs), strict=True):
                if output in self.match:
                    self._meet(read, self.match[output])
            return
        node = self._maker(outputs[position])
        if (
            node is None
            or node.primitive != name
            or (len(node.inputs), len(node.outputs)) != (len(inputs), len(outputs))
        ):
            raise Unlike(f"{name} where the plain step has {node.primitive if node else 'an input'}")
        for read, array in zip(inputs, node.inputs, strict=True):
            self._meet(read, array)
        for output, array in zip(outputs, node.outputs, strict=True):
            self._meet(output, array)

    def _maker(self, name: str) -> Node | None:
        array = self.match[name]
        if array in self.keys:
            array = self.match[name] = self.keys[array]
        return self.plain.arrays[array].producer

    def _lead_mark(self, inputs: list[str], outputs: list[str]) -> None:
        """``array * constant`` in the forward, ``constant * cotangent`` in the backward: the array stands for it."""
        if len(inputs) == 2:
            self._meet(inputs[1 if inputs[0] in self.marks else 0], self.match[outputs[0]])

    def _complete(self, label: str, inputs: list[str], outputs: list[str]) -> None:
        """Every array of a primitive that hands on is known, also those that nothing reads behind it."""
        match = self.match
        for output, read in zip(outputs, _handed(label, inputs, outputs), strict=True):
            if output not in match and read in match:
                match[output] = match[read]
        read_alone = [name for name in inputs if name not in match and name not in self.given.inputs]
        if read_alone and not (label == "Depends" and inputs[-1] in self.given.stand_ins):
            raise Unlike(f"{label} reads an array that the plain step does not have")


def _handed(label: str, inputs: list[str], outputs: list[str]) -> list[str]:
    """What each output of a primitive that hands on is: of a ``CustomTransforms`` the last inputs, else the first."""
    return inputs[-len(outputs) :] if label == "CustomTransforms" else inputs[: len(outputs)]


def _behind(graph: Graph, array: int) -> int:
    """What an array is handed on from."""
    found = graph.arrays[array]
    while found.producer is not None and found.producer.primitive in HAND_ON:
        found = graph.arrays[found.producer.inputs[found.position]]
    return found.id


@dataclass
class Recomputing:
    """A step that recomputes, and the same step run plainly.

    Attributes:
        built: the step as drawn.
        plain: the graph of the plain step.
        match: from ``lead_along``.
        forward: arrays that calls of the forward gave.
        state: for each array of the state its input of the graph.
    """

    built: Built
    plain: Graph
    match: dict[str, int]
    forward: list[int] = field(default_factory=list)
    state: dict[StateKey, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Before either loses its nodes that nothing needs.
        self._partners: dict[int, Node] = {}
        for name, array in self.match.items():
            node = self.graph.arrays[self.built.ids[name]].producer if name in self.built.ids else None
            partner = self.plain.arrays[array].producer
            if node is not None and partner is not None and node.primitive == partner.primitive:
                self._partners[id(node)] = partner

    @property
    def graph(self) -> Graph:
        """The step as it is."""
        return self.built.graph

    def label(self) -> None:
        """Gives every node the phase, block and scope of the plain step's, which are known by now.

        What the plain step has in its forward, and this one does not need for it, is recompute.
        """
        graph = self.graph
        arrays = graph.arrays
        forward = needed(graph, self.forward, set())
        for name, array in self.match.items():
            if name in self.built.ids and arrays[self.built.ids[name]].name is None:
                arrays[self.built.ids[name]].name = self.plain.arrays[array].name
        for node in graph.nodes:
            partner = self._partners.get(id(node))
            if partner is not None:
                node.phase, node.block, node.scope = partner.phase, partner.block, partner.scope
                if partner.phase == "forward" and id(node) not in forward:
                    node.phase = "recompute"
            elif id(node) not in forward:
                node.phase = "recompute" if node.primitive == "Depends" else "backward"
            for i in node.outputs:
                arrays[i].block = node.block
