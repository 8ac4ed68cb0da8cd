"""Functions that ``mx.compile`` made, in a step that is not one itself: an activation, a gradient, a whole update.

Called on plain arrays such a function is what ``mx.compile`` makes of it, fused kernels and all. Called inside a
gradient or another compiled function on arrays of theirs, it is plain code: then ``mx.compile`` hands the call on.
"""

from __future__ import annotations

from collections.abc import Iterable

from oomguard.trace.fuse import Fusion, compile_graph
from oomguard.trace.graph import Graph, Node, Region


def runs_compiled(graph: Graph, region: Region, arguments: Iterable[int]) -> bool:
    """Whether a call inside a gradient is compiled all the same: nothing it is given comes from the gradient's arrays.

    Args:
        graph: has the call as plain code.
        region: the call.
        arguments: the arrays that the gradient's function was called with.
    """
    arrays, stop = graph.arrays, set(arguments)
    seen: set[int] = set()
    stack = list(region.inputs)
    while stack:
        i = stack.pop()
        if i in stop:
            return False
        node = arrays[i].producer
        if node is not None and i not in seen:
            seen.add(i)
            stack.extend(node.inputs)
    return True


def compile_regions(graph: Graph, fusion: Fusion) -> None:
    """Compiles the calls of compiled functions, in place: the regions of kind ``compile``."""
    for region in [region for region in graph.regions if region.kind == "compile"]:
        _compile_region(graph, region, fusion)


def kept_constants(graph: Graph) -> set[int]:
    """The constants that a compiled function keeps from call to call: those it reads once equal ones are merged."""
    arrays = graph.arrays
    read = (i for node in graph.nodes for i in node.inputs)
    return {i for i in (*read, *graph.function_outputs) if arrays[i].kind == "constant"}


def _compile_region(graph: Graph, region: Region, fusion: Fusion) -> None:
    """Compiles one region as a graph of its own, whose inputs nothing makes."""
    arrays = graph.arrays
    inputs, inside = _inside(graph, region)
    if not inside:
        return
    part = Graph()
    part.arrays, part.nodes, part.function_outputs = arrays, inside, list(region.outputs)
    makers = {i: (arrays[i].producer, arrays[i].kind) for i in inputs}
    for i in inputs:
        arrays[i].producer = None
    own = {id(node) for node in inside}
    moved = compile_graph(part, fusion)
    for i, (producer, kind) in makers.items():
        arrays[i].producer, arrays[i].kind = producer, kind
    graph.nodes = [node for node in graph.nodes if id(node) not in own] + part.nodes
    graph.replace_all({i: moved[i] for i in region.outputs if i in moved})
    graph.sort()
    for evaluation in graph.evaluations:
        evaluation.held.update(kept_constants(part))


def _inside(graph: Graph, region: Region) -> tuple[set[int], list[Node]]:
    """What a region is given, and its nodes: none that is read from outside but for what the region gives."""
    inputs, outputs = set(region.inputs), set(region.outputs)
    readers = graph.consumers()
    wanted = set(graph.wanted)
    while True:
        inside = graph.between(inputs, region.outputs)
        own = {id(node) for node in inside}
        shared = {
            i
            for node in inside
            for i in node.outputs
            if i not in outputs and (i in wanted or any(id(reader) not in own for reader, _ in readers[i]))
        }
        if not shared:
            return inputs, inside
        inputs |= shared
