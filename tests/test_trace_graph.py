"""The graph that every pass of the trace reads and rewrites."""

from __future__ import annotations

import pytest

from oomguard.errors import TraceError
from oomguard.trace.graph import CycleError, Graph, Node, Region


def chain() -> tuple[Graph, int, int, int]:
    """x -> Exp -> Sin -> Cos, Cos evaluated."""
    graph = Graph()
    x = graph.input((4, 8), "float16", name="x")
    a = graph.op("Exp", [x])
    b = graph.op("Sin", [a])
    c = graph.op("Cos", [b])
    graph.evaluate([c], held=[x])
    return graph, a, b, c


def test_array_bytes_count_elements_times_item_size() -> None:
    graph, a, _, _ = chain()
    assert graph.arrays[a].nbytes == 4 * 8 * 2
    assert graph.arrays[graph.constant(1.0)].nbytes == 4


def test_op_takes_shape_and_dtype_from_its_first_input() -> None:
    graph, a, _, _ = chain()
    assert (graph.arrays[a].shape, graph.arrays[a].dtype) == ((4, 8), "float16")


def test_between_stops_at_the_inputs_given() -> None:
    graph, a, _, c = chain()
    assert [n.primitive for n in graph.between([a], [c])] == ["Sin", "Cos"]
    graph.regions.append(Region("block", "blocks.0", [a], [c]))
    assert [n.primitive for n in graph.region_nodes(graph.regions[0])] == ["Sin", "Cos"]


def test_replace_redirects_readers_and_evaluations_through_chains() -> None:
    graph, a, b, c = chain()
    x = graph.inputs[0]
    graph.replace_all({b: a, a: x})
    assert graph.arrays[c].producer is not None
    assert graph.arrays[c].producer.inputs == [x]
    graph.replace(c, x)
    assert graph.outputs == [x]


def test_replace_of_one_reader_leaves_the_others() -> None:
    graph, a, b, c = chain()
    d = graph.op("Tanh", [b])
    reader = next(r for r in graph.consumers()[b] if r[0].primitive == "Tanh")
    graph.replace(b, a, [reader])
    assert reader[0].inputs == [a]
    assert graph.arrays[c].producer.inputs == [b]  # type: ignore[union-attr]
    assert graph.arrays[d].producer is reader[0]


def test_clone_reads_the_substitutes_and_its_own_copies() -> None:
    graph, a, b, c = chain()
    given = graph.input((4, 8), "float16")
    copies, mapping = graph.clone(graph.between([a], [c]), {a: given}, phase="recompute")
    assert [n.phase for n in copies] == ["recompute", "recompute"]
    assert copies[0].inputs == [given]
    assert copies[1].inputs == [mapping[b]]
    graph.evaluate([mapping[c]])
    graph.nodes += copies
    graph.check()


def test_sort_moves_a_node_only_after_what_it_reads() -> None:
    graph, *_ = chain()
    graph.nodes = [graph.nodes[2], graph.nodes[0], graph.nodes[1]]
    with pytest.raises(ValueError, match="before it is made"):
        graph.check()
    graph.sort()
    graph.check()
    assert [n.primitive for n in graph.nodes] == ["Exp", "Sin", "Cos"]


def test_sort_names_a_cycle() -> None:
    graph, _, _, c = chain()
    graph.nodes[0].inputs[0] = c
    with pytest.raises(ValueError, match="cycle"):
        graph.sort()


def test_sort_says_what_made_a_cycle_and_what_is_in_it() -> None:
    graph, _, b, _ = chain()
    graph.nodes[0].inputs[0] = b
    graph.nodes[1].scope, graph.nodes[1].block = "layers.3.mlp", 3
    with pytest.raises(TraceError) as raised:
        graph.sort("recomputing blocks [3]")
    assert str(raised.value).startswith("recomputing blocks [3] made a cycle in the graph (")
    assert "Exp (forward) -> Sin (forward, block 3, layers.3.mlp) -> Exp (forward)" in str(raised.value)
    assert "Cos" not in str(raised.value)


def test_sort_finds_a_primitive_that_reads_itself() -> None:
    graph, a, *_ = chain()
    graph.nodes[0].inputs[0] = a
    with pytest.raises(CycleError, match=r"\(Exp \(forward\) -> Exp \(forward\)\)"):
        graph.sort()


@pytest.mark.parametrize("closing", ["itself", "another", "a chain"])
def test_replacements_that_lead_back_stop_at_once(closing: str) -> None:
    graph, a, b, c = chain()
    ends = {"itself": {a: a}, "another": {a: b, b: a}, "a chain": {c: a, a: b, b: a}}[closing]
    for replace in (graph.replace_all, graph.redirect):
        with pytest.raises(CycleError, match=r"^merging equal primitives made a cycle in the graph \(Exp"):
            replace(ends, "merging equal primitives")


def test_long_cycle_is_shown_in_part() -> None:
    graph = Graph()
    last = first = graph.op("Exp", [graph.input((4,))])
    for _ in range(99):
        last = graph.op("Sin", [last])
    graph.nodes[0].inputs[0] = last
    with pytest.raises(CycleError, match="94 more") as raised:
        graph.sort()
    assert len(str(raised.value)) < 250
    assert graph.arrays[first].producer is graph.nodes[0]


def test_remove_dead_keeps_only_what_an_evaluation_needs() -> None:
    graph, a, *_ = chain()
    graph.op("Erf", [a])
    assert graph.remove_dead() == 1
    assert [n.primitive for n in graph.nodes] == ["Exp", "Sin", "Cos"]
    graph.check()


def test_copy_shares_nothing_that_can_change() -> None:
    graph, *_ = chain()
    other = graph.copy()
    other.check()
    other.nodes[0].inputs[0] = 99
    other.arrays[0].name = "y"
    other.evaluations[0].held.clear()
    graph.check()
    assert graph.arrays[0].name == "x"
    assert graph.evaluations[0].held == {0}


def test_check_names_an_array_made_twice() -> None:
    graph, a, *_ = chain()
    graph.nodes.append(Node("Erf", [0], [a]))
    with pytest.raises(ValueError, match=r"made by Erf|made twice"):
        graph.check()


def test_multi_op_numbers_its_outputs() -> None:
    graph = Graph()
    x = graph.input((4, 8))
    low, high = graph.multi_op("Split", [x], [((2, 8), "float32"), ((2, 8), "float32")], ((2,), 0))
    assert (graph.arrays[low].position, graph.arrays[high].position) == (0, 1)
    graph.evaluate([high])
    graph.check()
    assert graph.describe() == (
        f"%{low} float32[2, 8], %{high} float32[2, 8] = Split(%{x}) ((2,), 0) forward"
    )
