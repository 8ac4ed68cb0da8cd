"""The order of evaluation is MLX's: by the outputs' order, depth by last use, no wider than the limit."""

from __future__ import annotations

from oomguard.trace.graph import Graph
from oomguard.trace.schedule import schedule


def names(graph: Graph, width: int = 20) -> list[str]:
    return [node.scope for node, _ in schedule(graph, graph.evaluations[0], width=width)]


def chains(count: int, length: int) -> Graph:
    """Independent chains from one input, all evaluated; nodes are named by chain and depth."""
    graph = Graph()
    x = graph.input((4,))
    ends = []
    for c in range(count):
        i = x
        for depth in range(length):
            i = graph.op("Exp", [i], scope=f"{c}.{depth}")
        ends.append(i)
    graph.evaluate(ends)
    return graph


def test_first_outputs_are_evaluated_first_and_breadth_goes_before_depth() -> None:
    # The tape is built from the outputs backwards, level by level, and run from its end.
    assert names(chains(2, 3)) == ["1.0", "0.0", "1.1", "0.1", "1.2", "0.2"]


def test_past_the_width_the_tape_goes_down_before_it_goes_on() -> None:
    assert names(chains(3, 2), width=2) == ["2.0", "2.1", "1.0", "0.0", "1.1", "0.1"]


def test_node_runs_before_all_its_readers() -> None:
    graph = Graph()
    x = graph.input((4,))
    shared = graph.op("Exp", [x], scope="shared")
    left = graph.op("Sin", [shared], scope="left")
    right = graph.op("Cos", [shared], scope="right")
    graph.evaluate([graph.op("Add", [left, right], scope="sum")])
    assert names(graph) == ["shared", "right", "left", "sum"]


def test_order_of_outputs_decides_the_order() -> None:
    graph = chains(2, 1)
    graph.evaluations[0].outputs.reverse()
    assert names(graph) == ["0.0", "1.0"]


def test_sibling_outputs_are_one_entry() -> None:
    graph = Graph()
    x = graph.input((4, 4))
    low, high = graph.multi_op("Split", [x], [((2, 4), "float32"), ((2, 4), "float32")], scope="split")
    graph.evaluate([graph.op("Exp", [high], scope="high"), graph.op("Exp", [low], scope="low")])
    assert names(graph).count("split") == 1


def test_evaluated_arrays_are_not_run_again() -> None:
    graph = chains(1, 3)
    middle = graph.nodes[1].outputs[0]
    order = schedule(graph, graph.evaluations[0], evaluated={middle})
    assert [node.scope for node, _ in order] == ["0.2"]


def test_what_no_output_needs_is_not_run() -> None:
    graph = chains(1, 2)
    graph.op("Erf", [graph.nodes[0].outputs[0]], scope="lazy")
    assert names(graph) == ["0.0", "0.1"]


def test_default_width_is_twenty() -> None:
    # Of 25 outputs 20 fit beside each other; the tape comes back for the other five, which therefore run first.
    order = names(chains(25, 2))
    assert order[:5] == ["24.0", "23.0", "22.0", "21.0", "20.0"]
    assert order[5:10] == ["24.1", "23.1", "22.1", "21.1", "20.1"]
    assert order[10] == "19.0"
