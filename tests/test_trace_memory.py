"""Buffers live as long as MLX keeps them: until no array and no queued kernel holds them."""

from __future__ import annotations

from oomguard.trace.graph import Graph
from oomguard.trace.memory import (
    CPU,
    BufferCache,
    DispatchQueue,
    ImmediateQueue,
    Memory,
    Program,
    Run,
    Simulation,
)

KIB = 1024
FLOATS = 256
"""A KiB of them."""


def peak(graph: Graph, memory: Memory | None = None) -> int:
    return simulate(graph, memory).peak_bytes


def simulate(graph: Graph, memory: Memory | None = None) -> Run:
    graph.check()
    return Simulation(Program(graph), memory or Memory(queue=ImmediateQueue())).run()


def scans(count: int) -> Graph:
    """A chain of primitives that always write a new array; the input is held."""
    graph = Graph()
    x = i = graph.input((FLOATS,))
    for _ in range(count):
        i = graph.op("Scan", [i], arguments=(2, 0, False, True))
    graph.evaluate([i], held=[x])
    return graph


def test_elementwise_chain_reuses_one_buffer() -> None:
    graph = Graph()
    x = i = graph.input((FLOATS,))
    for _ in range(5):
        i = graph.op("Exp", [i])
    graph.evaluate([i], held=[x])
    run = simulate(graph)
    assert (run.before_bytes, run.peak_bytes, run.after_bytes) == (KIB, 2 * KIB, 2 * KIB)


def test_input_nobody_holds_is_written_into() -> None:
    graph = Graph()
    graph.evaluate([graph.op("Exp", [graph.input((FLOATS,))])])
    assert peak(graph) == KIB


def test_array_with_another_reader_is_not_written_into() -> None:
    graph = Graph()
    x = graph.input((FLOATS,))
    a = graph.op("Exp", [x])
    # Square runs before Sin: both read a, so only the last may take its buffer.
    graph.evaluate([graph.op("Sin", [a]), graph.op("Square", [a])], held=[x])
    assert peak(graph) == 3 * KIB


def test_array_read_twice_by_one_primitive_is_not_written_into() -> None:
    graph = Graph()
    x = graph.input((FLOATS,))
    a = graph.op("Exp", [x])
    graph.evaluate([graph.op("Multiply", [a, a])], held=[x])
    assert peak(graph) == 3 * KIB


def test_buffer_of_a_view_is_kept_by_the_view() -> None:
    graph = Graph()
    x = graph.input((2, FLOATS))
    whole = graph.op("Exp", [x])
    row = graph.op("Slice", [whole], (1, FLOATS), arguments=((0, 0), (1, FLOATS), (1, 1)))
    graph.evaluate([row], held=[x])
    assert simulate(graph).after_bytes == 4 * KIB


def test_inputs_of_a_primitive_with_two_outputs_are_never_written_into() -> None:
    graph = Graph()
    x = graph.input((FLOATS,))
    a, b = graph.multi_op(
        "Compiled", [x], [((FLOATS,), "float32"), ((FLOATS,), "float32")], (("Exp", "Sin"), ())
    )
    graph.evaluate([a, b])
    assert peak(graph) == 3 * KIB


def test_output_nobody_reads_is_freed_at_once() -> None:
    graph = Graph()
    x = graph.input((FLOATS,))
    a, _ = graph.multi_op("DivMod", [x, x], [((FLOATS,), "float32"), ((FLOATS,), "float32")])
    graph.evaluate([a], held=[x])
    run = simulate(graph)
    assert (run.peak_bytes, run.after_bytes) == (3 * KIB, 2 * KIB)


def test_array_somebody_holds_but_nobody_evaluated_keeps_its_inputs() -> None:
    graph = Graph()
    x = graph.input((FLOATS,))
    lazy = graph.op("Sin", [x])
    done = graph.op("Exp", [x])
    graph.evaluate([done], held=[lazy])
    assert simulate(graph).after_bytes == 2 * KIB


def test_temporary_copies_live_until_the_kernel_ran() -> None:
    graph = Graph()
    x = graph.input((FLOATS // 2, 2))
    turned = graph.op("Transpose", [x], (2, FLOATS // 2), arguments=((1, 0),))
    graph.evaluate([graph.op("Scan", [turned], arguments=(2, 0, False, True))], held=[x])
    run = simulate(graph)
    assert (run.peak_bytes, run.after_bytes) == (3 * KIB, 2 * KIB)


def test_without_waiting_everything_in_flight_is_alive() -> None:
    # A scan is two dispatches, so 40 of them are 8 tasks: the evaluator never waits.
    assert peak(scans(40), Memory()) == 41 * KIB


def test_evaluator_waits_when_more_than_ten_tasks_are_open() -> None:
    # 55 scans are 110 dispatches: the 11th task closes and the first five scans run. From then on there are never
    # more than 55 outstanding, and what the oldest reads. MLX, measured with mx.cumsum: 56 beside the first.
    assert peak(scans(200), Memory()) == (1 + 56) * KIB


def test_memory_limit_of_zero_waits_for_every_task() -> None:
    # Measured with a chain of mx.cumsum: six arrays beside the first, at every place a task can end.
    assert [peak(scans(40), Memory(limit=0, queue=DispatchQueue(n))) for n in range(10)] == [7 * KIB] * 10


def test_memory_limit_waits_no_longer_than_it_must() -> None:
    free = peak(scans(200), Memory())
    limited = peak(scans(200), Memory(limit=20 * KIB))
    assert limited < free
    # Never more than a task above the limit: five scans.
    assert limited <= 25 * KIB


def test_queued_kernel_prevents_writing_into_what_it_reads() -> None:
    graph = Graph()
    x = graph.input((FLOATS,))
    a = graph.op("Exp", [x])
    first = graph.op("Reduce", [a], (1,), arguments=(2, (0,)))
    last = graph.op("Sin", [a])
    graph.evaluate([last, first], held=[x])
    assert simulate(graph).after_bytes == 2 * KIB + 4
    assert peak(graph, Memory()) == 3 * KIB + 4


def test_entry_without_kernels_runs_at_once_when_the_queue_is_empty() -> None:
    queue = DispatchQueue()
    queue.submit(0, [7], [])
    assert queue.idle() == [7]
    queue.submit(1, [8], [])
    queue.submit(0, [9], [])
    assert queue.idle() is None
    assert (queue.finish_entry(), queue.finish_entry()) == ([8], [9])


def test_task_ends_at_every_tenth_dispatch() -> None:
    queue = DispatchQueue(submitted=8)
    queue.submit(1, [1], [])
    assert queue.tasks == 1
    queue.submit(8, [2], [])
    assert queue.tasks == 1
    queue.submit(0, [3], [])
    assert queue.tasks == 2


def test_cache_hands_out_the_smallest_buffer_that_is_not_much_too_large() -> None:
    cache = BufferCache(limit=1 << 20, page=4096)
    for size in (100_000, 10_000, 12_000):
        cache.give(size)
    assert cache.take(9_000) == 10_000
    assert cache.take(9_000) == 12_000
    assert cache.take(9_000) == 9_000
    assert cache.take(95_000) == 100_000


def test_cache_keeps_no_more_than_its_limit() -> None:
    cache = BufferCache(limit=1000, page=4096)
    cache.give(800)
    cache.give(300)
    assert cache.sizes == [800]


def test_cached_buffer_counts_with_its_own_size() -> None:
    memory = Memory(queue=ImmediateQueue())
    memory.cache.give(5000)
    memory.allocate(4000)
    assert memory.active == 5000


def test_next_step_finds_what_the_last_one_left() -> None:
    graph = Graph()
    w = graph.parameter((4, 8))
    turned = graph.op("Transpose", [graph.op("Exp", [w])], (8, 4), arguments=((1, 0),))
    back = graph.op("Sin", [turned])
    graph.evaluate([back])
    graph.carries = {w: back}
    simulation = Simulation(Program(graph), Memory(queue=ImmediateQueue()))
    simulation.run()
    layout, size = simulation.found(graph.carries)[w]
    assert (layout.strides, size) == ((1, 8), 128)


def test_unknown_primitives_are_named_and_counted() -> None:
    graph = Graph()
    x = graph.input((FLOATS,))
    graph.evaluate([graph.op("Mystery", [graph.op("Mystery", [x])])], held=[x])
    assert Program(graph, CPU).unknown == {"Mystery": 2}
    # Each makes an output and a copy of its input.
    assert peak(graph) == 4 * KIB


def test_active_bytes_return_to_what_is_held() -> None:
    graph = scans(12)
    run = simulate(graph, Memory())
    assert run.after_bytes == 2 * KIB
    assert len(run.high) == len(run.low) == 12
    assert max(run.high) == run.peak_bytes
    assert run.high[run.peak_index] == run.peak_bytes
