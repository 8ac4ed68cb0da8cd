"""Elementwise chains become one kernel where, and only where, ``mx.compile`` makes one."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from oomguard.trace.fuse import MAX_ARRAYS, MAX_DEPTH, fuse
from oomguard.trace.graph import Graph, Node
from oomguard.trace.rawgraph import read_dot


def finished(graph: Graph, *outputs: int) -> Graph:
    graph.evaluate(outputs)
    graph.function_outputs = list(outputs)
    fuse(graph)
    graph.check()
    return graph


def kernels(graph: Graph) -> list[tuple[str, ...]]:
    return [node.arguments[0] for node in graph.nodes if node.primitive == "Compiled"]


def test_chain_becomes_one_kernel_in_order() -> None:
    graph = Graph()
    x = graph.input((4,))
    y = graph.op("Sin", [graph.op("Exp", [x])])
    finished(graph, y)
    assert kernels(graph) == [("Exp", "Sin")]
    assert graph.nodes[0].inputs == [x]
    assert graph.nodes[0].outputs == [y]


def test_single_primitive_is_left_alone() -> None:
    graph = Graph()
    finished(graph, graph.op("Exp", [graph.input((4,))]))
    assert [node.primitive for node in graph.nodes] == ["Exp"]


def test_array_read_outside_the_kernel_stays_an_array() -> None:
    graph = Graph()
    x = graph.input((4, 4))
    a = graph.op("Exp", [x])
    b = graph.op("Cos", [graph.op("Sin", [a])])
    c = graph.op("Matmul", [a, a])
    finished(graph, b, c)
    assert kernels(graph) == [("Sin", "Cos")]


def test_depth_ends_a_kernel() -> None:
    graph = Graph()
    i = graph.input((4,))
    for _ in range(MAX_DEPTH + 3):
        i = graph.op("Exp", [i])
    finished(graph, i)
    assert sorted(len(names) for names in kernels(graph)) == [3, MAX_DEPTH]


def test_width_ends_a_kernel_where_mlx_ends_it() -> None:
    def pairwise(level: list[Any], add: Callable[[Any, Any], Any]) -> Any:
        while len(level) > 1:
            level = [
                add(*level[i : i + 2]) if i + 1 < len(level) else level[i] for i in range(0, len(level), 2)
            ]
        return level[0]

    graph = Graph()
    inputs = [graph.input((4,)) for _ in range(2 * MAX_ARRAYS)]
    finished(graph, pairwise(inputs, lambda a, b: graph.op("Add", [a, b])))
    ours = sorted(len(node.inputs) for node in graph.nodes)

    arrays = [mx.array([float(i)] * 4) for i in range(2 * MAX_ARRAYS)]
    drawing = io.StringIO()
    mx.export_to_dot(drawing, mx.compile(lambda *given: pairwise(list(given), mx.add))(*arrays))
    assert ours == sorted(len(inputs) for inputs in read_dot(drawing.getvalue()).inputs)
    assert max(ours) > MAX_ARRAYS


def test_broadcast_that_others_read_is_doubled() -> None:
    graph = Graph()
    x = graph.input((4, 4))
    scalar = graph.constant(2.0)
    wide = graph.op("Broadcast", [scalar], (4, 4), arguments=((4, 4),))
    a = graph.op("Exp", [graph.op("Multiply", [x, wide])])
    b = graph.op("Matmul", [wide, x])
    finished(graph, a, b)
    assert kernels(graph) == [("Broadcast", "Multiply", "Exp")]
    assert [node.primitive for node in graph.nodes].count("Broadcast") == 1


def test_broadcast_alone_is_never_the_result_of_a_kernel() -> None:
    graph = Graph()
    wide = graph.op("Broadcast", [graph.op("Exp", [graph.input((1, 4))])], (4, 4), arguments=((4, 4),))
    finished(graph, wide)
    assert kernels(graph) == []


def test_output_inside_a_chain_is_a_second_result() -> None:
    graph = Graph()
    x = graph.input((4,))
    a = graph.op("Exp", [x])
    b = graph.op("Sin", [a])
    finished(graph, a, b)
    kernel = graph.nodes[0]
    assert kernel.arguments[0] == ("Exp", "Sin")
    assert kernel.outputs == [a, b]


def test_output_of_another_shape_is_not_fused() -> None:
    graph = Graph()
    small = graph.op("Exp", [graph.input((1, 4))])
    wide = graph.op("Broadcast", [small], (4, 4), arguments=((4, 4),))
    large = graph.op("Sin", [wide])
    finished(graph, small, large)
    assert kernels(graph) == [("Broadcast", "Sin")]


def test_scalar_constants_are_told_from_scalar_inputs() -> None:
    graph = Graph()
    x = graph.input(())
    y = graph.op("Exp", [graph.op("Add", [x, graph.constant(1.0)])])
    finished(graph, y)
    kernel: Node = graph.nodes[0]
    assert [kernel.inputs[k] for k in kernel.arguments[1]] == [i for i in kernel.inputs if i != x]


def test_kernel_keeps_phase_block_and_scope_of_its_last_primitive() -> None:
    graph = Graph()
    a = graph.op("Exp", [graph.input((4,))], block=0, scope="blocks.0")
    b = graph.op("Sin", [a], phase="backward", block=1, scope="blocks.1")
    finished(graph, b)
    assert (graph.nodes[0].phase, graph.nodes[0].block, graph.nodes[0].scope) == ("backward", 1, "blocks.1")
