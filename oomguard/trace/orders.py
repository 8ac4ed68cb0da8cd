"""Whether evaluating in another order would lower the peak.

``mx.eval`` takes arrays in an order, and begins with what the *last* of them needs (``schedule``). With new
parameters listed first block first, the update of the last block, whose gradients are there first, runs first, and
everything it held is free when the backward reaches the block before. Listed the other way round, the first block
comes first: all gradients are made before any is used up. Under a checkpoint policy it is worse still: the recompute
of all the blocks may stand before the backward of any.

What ``mx.compile`` makes of a function does not depend on the order in which its results are evaluated, so one
compiled graph is scheduled anew for each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from oomguard.trace.collector import collector_paused
from oomguard.trace.graph import Graph
from oomguard.trace.memory import Program
from oomguard.trace.result import OrderPeak
from oomguard.trace.steps import ALONE, Surroundings, graph_peak, step_peaks

STEPS = 2
WORTH_TRYING = 0.01  # of the peak: what the graph alone must save before the device is simulated

Order = Callable[[Graph, list[int]], list[int]]


def reversed_order(graph: Graph, outputs: list[int]) -> list[int]:
    """The same arrays from last to first."""
    return outputs[::-1]


def last_block_first(graph: Graph, outputs: list[int]) -> list[int]:
    """Sorted by block, so that the last block's are evaluated first: they are listed last.

    By the first number in the path of what an array replaces; what has none stays in front. Arrays of one block
    keep their order.
    """
    before = {after: before for before, after in graph.carries.items()}

    def block(i: int) -> int:
        name = graph.arrays[before[i]].name if i in before else None
        number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name or "")
        return int(number[1]) if number else -1

    return sorted(outputs, key=block)


ORDERS: dict[str, Order] = {"last block first": last_block_first, "reversed": reversed_order}


@collector_paused()
def best_order(
    program: Program,
    graph_peak_bytes: int,
    *,
    memory_limit: int | None = None,
    surroundings: Surroundings = ALONE,
) -> OrderPeak | None:
    """The order of evaluation with the lowest peak, and what it saves over the one given.

    Args:
        program: a step, prepared for a device. It is not changed.
        graph_peak_bytes: its peak with nothing in flight (``steps.graph_peak``).
        memory_limit, surroundings: as for ``engine.simulate``.

    Returns:
        The order, its steady peak in bytes and that of the order given; None where none of ``ORDERS`` is better.
        Only an order whose graph alone, with nothing in flight, holds ``WORTH_TRYING`` less is simulated with the
        device's queue.
    """
    least = (1 - WORTH_TRYING) * graph_peak_bytes

    def steady_peak(ordered: Program) -> int:
        return step_peaks(ordered, STEPS, memory_limit=memory_limit, surroundings=surroundings)[-1]

    peaks = {name: steady_peak(other) for name, other in _reordered(program) if graph_peak(other) < least}
    if not peaks:
        return None
    given = steady_peak(program)
    best = min(peaks, key=lambda name: peaks[name])
    return OrderPeak(best, peaks[best], given) if peaks[best] < given else None


def _reordered(program: Program) -> Iterator[tuple[str, Program]]:
    """The program under every order that differs from its own, one at a time: each is as large as the step."""
    for name, order in ORDERS.items():
        given = program.graph.evaluations
        evaluations = [replace(e, outputs=order(program.graph, e.outputs)) for e in given]
        if any(ours.outputs != theirs.outputs for ours, theirs in zip(evaluations, given, strict=True)):
            yield name, program.evaluated_as(evaluations)
