"""A graph is simplified as ``mx.compile`` does it."""

from __future__ import annotations

from oomguard.trace.graph import Graph
from oomguard.trace.simplify import run, simplify, tape


def primitives(graph: Graph) -> list[str]:
    return [node.primitive for node in graph.nodes]


def finished(graph: Graph, *outputs: int) -> Graph:
    graph.evaluate(outputs)
    graph.function_outputs = list(outputs)
    simplify(graph)
    graph.check()
    return graph


def test_tape_is_depth_first_with_one_entry_a_primitive() -> None:
    graph = Graph()
    x = graph.input((4,))
    a, b = graph.multi_op("Split", [x], [((2,), "float32"), ((2,), "float32")])
    c = graph.op("Add", [b, a])
    graph.evaluate([c])
    graph.function_outputs = [c]
    held = tape(graph)
    assert held.order == [x, b, c]
    assert held.readers[x] == [(b, 0), (a, 0)]


def test_equal_scalars_become_one_and_so_do_what_reads_them() -> None:
    graph = Graph()
    x = graph.input((4,))
    first = graph.op("Broadcast", [graph.constant(2.0)], (4,), arguments=((4,),))
    second = graph.op("Broadcast", [graph.constant(2.0)], (4,), arguments=((4,),))
    a = graph.op("Multiply", [x, first])
    b = graph.op("Add", [a, second])
    finished(graph, b)
    assert primitives(graph) == ["Broadcast", "Multiply", "Add"]
    assert graph.nodes[1].inputs[1] == graph.nodes[2].inputs[1]


def test_scalars_of_other_value_or_dtype_stay() -> None:
    graph = Graph()
    x = graph.op("Add", [graph.constant(2.0), graph.constant(3.0)])
    y = graph.op("Add", [x, graph.constant(2.0, dtype="float16")])
    z = graph.op("Add", [y, graph.constant(-0.0)])
    w = graph.op("Add", [z, graph.constant(0.0)])
    finished(graph, w)
    assert len({i for node in graph.nodes for i in node.inputs if graph.arrays[i].kind == "constant"}) == 5


def test_copies_and_stopped_gradients_are_dropped() -> None:
    graph = Graph()
    x = graph.input((4,))
    a = graph.op("Copy", [x])
    b = graph.op("StopGradient", [graph.op("Exp", [a])])
    finished(graph, b)
    assert primitives(graph) == ["Exp"]
    assert graph.outputs == graph.nodes[0].outputs
    assert graph.function_outputs == graph.outputs


def test_equal_siblings_become_one_and_their_readers_too() -> None:
    graph = Graph()
    x = graph.input((4,))
    exps = [graph.op("Exp", [x]) for _ in range(3)]
    squares = [graph.op("Square", [e]) for e in exps]
    total = graph.op("Add", [graph.op("Add", squares[:2]), squares[2]])
    finished(graph, total)
    assert primitives(graph) == ["Exp", "Square", "Add", "Add"]


def test_output_is_not_merged_away_but_takes_over_its_double() -> None:
    graph = Graph()
    x = graph.input((4,))
    inner = graph.op("Exp", [x])
    outer = graph.op("Exp", [x])
    read = graph.op("Sin", [inner])
    finished(graph, read, outer)
    assert primitives(graph).count("Exp") == 2
    other = Graph()
    x = other.input((4,))
    outer = other.op("Exp", [x])
    inner = other.op("Exp", [x])
    read = other.op("Sin", [inner])
    finished(other, outer, read)
    assert primitives(other).count("Exp") == 1


def test_other_arguments_are_not_equal() -> None:
    graph = Graph()
    x = graph.input((4, 4))
    a = graph.op("Reduce", [x], (1, 4), arguments=(2, (0,)))
    b = graph.op("Reduce", [x], (4, 1), arguments=(2, (1,)))
    finished(graph, graph.op("Add", [a, b], (4, 4)))
    assert primitives(graph).count("Reduce") == 2


def test_primitives_mlx_cannot_compare_stay_double() -> None:
    graph = Graph()
    x = graph.input((4,))
    total = graph.op("Add", [graph.op("Log1p", [x]), graph.op("Log1p", [x])])
    finished(graph, total)
    assert primitives(graph).count("Log1p") == 2


def test_primitives_without_inputs_have_no_reader_to_be_found_by() -> None:
    graph = Graph()
    a = graph.op("Arange", [], (4,), "int32", (0.0, 4.0, 1.0))
    b = graph.op("Arange", [], (4,), "int32", (0.0, 4.0, 1.0))
    finished(graph, graph.op("Add", [a, b]))
    assert primitives(graph).count("Arange") == 2


def test_regions_follow_what_is_merged() -> None:
    from oomguard.trace.graph import Region

    graph = Graph()
    x = graph.input((4,))
    copy = graph.op("Copy", [x])
    y = graph.op("Exp", [copy])
    graph.regions.append(Region("block", "blocks.0", [copy], [y]))
    finished(graph, y)
    assert graph.regions[0].inputs == [x]


def test_equal_primitives_of_several_outputs_are_merged_forth_and_back() -> None:
    graph = Graph()
    x = graph.input((4,))
    halves = [((2,), "float32"), ((2,), "float32")]
    a, b = graph.multi_op("Split", [x], halves)
    c, d = graph.multi_op("Split", [x], halves)
    total = graph.op("Add", [graph.op("Add", [a, b]), graph.op("Multiply", [c, d])])
    # By its first output the second split is merged into the first; its second output, which has no place on the
    # tape, takes the first one back; then the two second outputs are merged the first way again.
    finished(graph, total)
    assert primitives(graph).count("Split") == 1
    assert sorted(graph.nodes[-2].inputs) == sorted(graph.nodes[-3].inputs) == [a, b]


def test_tape_never_moves_an_array_to_itself() -> None:
    graph = Graph()
    x = graph.input((4,))
    splits = [graph.multi_op("Split", [x], [((2,), "float32")] * 3) for _ in range(4)]
    outputs = [graph.op("Add", [s[0], s[n % 3]]) for n, s in enumerate(splits)]
    graph.function_outputs = outputs
    graph.evaluate(outputs)
    held = tape(graph)
    run(held)
    for start in held.moved:
        passed = [start]
        while passed[-1] in held.moved:
            passed.append(held.moved[passed[-1]])
            assert len(set(passed)) == len(passed)


def test_output_whose_sibling_was_merged_is_made_all_the_same() -> None:
    graph = Graph()
    x = graph.input((4,))
    halves = [((2,), "float32"), ((2,), "float32")]
    a, b = graph.multi_op("Split", [x], halves)
    _, d = graph.multi_op("Split", [x], halves)
    read = graph.op("Add", [graph.op("Add", [a, b]), graph.op("Sin", [d])])
    finished(graph, read, d)
    assert graph.outputs == [read, d]
    assert primitives(graph).count("Split") == 2
