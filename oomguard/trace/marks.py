"""Marks that a capture weaves into a step to find regions again, in the forward and in the backward.

A mark multiplies an array by a one-element constant nobody else has. The gradient of a product with a
constant is a product with the same constant, so a mark at a region's input and output shows four places in
the captured graph: where the forward enters and leaves the region, where the cotangent of each output enters
the region's backward, and where the gradient of each input leaves it. ``Marks.strip`` turns that into
``Region`` values and takes the marks out, which leaves the graph a step without marks has: a mark sits on an
edge, and neither the order in which MLX differentiates nor the one in which it evaluates looks at anything
but the order of edges. (``mx.depends`` would mark the forward as well, but leaves no trace in the backward.)

Nothing is computed: the step is captured, not run. What exists of a mark is four bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from oomguard.errors import TraceError
from oomguard.trace.graph import Graph, Node, Region

MAGIC = 0x5A000000
MAX_MARKS = 0x00FFFFFF


@dataclass(slots=True)
class _Call:
    """One marked call: mark numbers of its inputs and outputs, in order."""

    kind: str
    name: str
    block: int
    arguments: dict[str, Any]
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)


class Marks:
    """Numbers the marks of one capture and remembers the calls they belong to."""

    def __init__(self) -> None:
        self._count = 0
        self._calls: list[_Call] = []

    def call(
        self,
        kind: str,
        name: str,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        keywords: dict[str, Any] | None = None,
        *,
        block: int = -1,
        facts: dict[str, Any] | None = None,
    ) -> Any:
        """Calls ``function`` with every array among its arguments marked, and marks what it returns.

        Args:
            kind: as in ``Region.kind``.
            name: as in ``Region.name``.
            function: called once, with the marked arguments in the structure given.
            arguments: any nesting of lists, tuples and dictionaries of arrays; other leaves pass unchanged.
            keywords: likewise.
            block: the layer the call belongs to.
            facts: kept as ``Region.arguments``.

        Returns:
            What ``function`` returned, its arrays marked.
        """
        call = _Call(kind, name, block, facts or {})
        self._calls.append(call)
        args, kwargs = tree_map(lambda x: self._mark(x, call.inputs), (tuple(arguments), keywords or {}))
        return tree_map(lambda x: self._mark(x, call.outputs), function(*args, **kwargs))

    def call_module(
        self,
        kind: str,
        name: str,
        module: Any,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        keywords: dict[str, Any] | None = None,
        *,
        block: int = -1,
        facts: dict[str, Any] | None = None,
    ) -> Any:
        """``call`` for a method of a module: its trainable parameters are marked inputs too, and come first.

        That is the order in which ``mlx.nn.utils.checkpoint`` hands them to ``mx.checkpoint``. The module
        holds its own parameters again afterwards.
        """
        parameters = module.trainable_parameters()

        def inner(marked: Any, *args: Any, **kwargs: Any) -> Any:
            module.update(marked)
            try:
                return function(*args, **kwargs)
            finally:
                module.update(parameters)

        return self.call(kind, name, inner, (parameters, *arguments), keywords, block=block, facts=facts)

    def _mark(self, x: Any, into: list[int]) -> Any:
        if not isinstance(x, mx.array):
            return x
        if self._count >= MAX_MARKS:
            raise TraceError(f"a step with more than {MAX_MARKS} marked arrays cannot be captured")
        number, self._count = self._count, self._count + 1
        into.append(number)
        tag = mx.array([MAGIC + number], dtype=mx.int32)
        if x.ndim == 0 or not mx.issubdtype(x.dtype, mx.inexact):
            return mx.depends(x, tag)  # nothing to differentiate, or a scalar, which the product would widen
        return x * tag.astype(x.dtype)

    def strip(self, graph: Graph) -> None:
        """Takes the marks out of a captured graph and appends what they delimited to ``graph.regions``.

        Constants of one element must carry their ``value``. Regions come in the order their calls began, so
        an outer one stands before the ones inside it. A call whose result the step never uses is left out.
        """
        sites = _find(graph, self._count)
        taken_out = {node.outputs[0]: _data(node, tag) for site in sites.values() for node, tag in site.all()}
        graph.replace_all(taken_out)

        def final(i: int | None) -> int | None:
            while i in taken_out:
                i = taken_out[i]
            return i

        for call in self._calls:
            inputs = [sites[number] for number in call.inputs if number in sites]
            outputs = [sites[number] for number in call.outputs if number in sites]
            if outputs:
                region = Region(call.kind, call.name, [], [], call.block, call.arguments)
                region.inputs, region.gradients = _ends(inputs, final)
                region.outputs, region.cotangents = _ends(outputs, final)
                graph.regions.append(region)
        graph.remove_dead()


def _ends(
    sites: list[_Sites], final: Callable[[int | None], int | None]
) -> tuple[list[int], list[int | None]]:
    """The marked arrays of a call's inputs or outputs, and the cotangents of each."""
    arrays = [final(site.entering()) for site in sites]
    return [i for i in arrays if i is not None], [
        final(site.leaving()) for site, i in zip(sites, arrays, strict=True) if i is not None
    ]


@dataclass(slots=True)
class _Sites:
    """Where one mark stands: (node, id of the tag operand) in the forward and in the backward."""

    forward: list[tuple[Node, int]] = field(default_factory=list)
    backward: list[tuple[Node, int]] = field(default_factory=list)

    def all(self) -> list[tuple[Node, int]]:
        return [*self.forward, *self.backward]

    def entering(self) -> int | None:
        """The array the mark was put on."""
        return _data(*self.forward[0]) if self.forward else None

    def leaving(self) -> int | None:
        """The array that is its cotangent, before the mark."""
        return _data(*self.backward[0]) if self.backward else None


def _data(node: Node, tag: int) -> int:
    """The operand of a mark that is not the tag."""
    return node.inputs[0] if node.inputs[1] == tag else node.inputs[1]


def _find(graph: Graph, count: int) -> dict[int, _Sites]:
    """The sites of each mark number. ``x * tag`` is the forward, ``tag * cotangent`` the backward."""
    tags: dict[int, int] = {}
    for array in graph.arrays:
        if array.kind == "constant" and array.dtype == "int32" and array.size == 1:
            value = array.value
            if isinstance(value, int) and MAGIC <= value < MAGIC + count:
                tags[array.id] = value - MAGIC
    sites: dict[int, _Sites] = {}
    for node in graph.nodes:
        if node.primitive in ("AsType", "Broadcast") and node.inputs[0] in tags:
            tags[node.outputs[0]] = tags[node.inputs[0]]
        elif node.primitive == "Multiply" and (node.inputs[0] in tags or node.inputs[1] in tags):
            backward = node.inputs[0] in tags
            tag = node.inputs[0] if backward else node.inputs[1]
            site = sites.setdefault(tags[tag], _Sites())
            (site.backward if backward else site.forward).append((node, tag))
        elif node.primitive == "Depends" and len(node.inputs) == 2 and node.inputs[1] in tags:
            sites.setdefault(tags[node.inputs[1]], _Sites()).forward.append((node, node.inputs[1]))
    return sites
