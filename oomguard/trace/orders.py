"""Whether evaluating in another order would lower the peak.

``mx.eval`` takes arrays in an order, and begins with what the *last* of them needs (``schedule``). With new
parameters listed first block first, the update of the last block, whose gradients are there first, runs first, and
everything it held is free when the backward reaches the block before. Listed the other way round, the first block
comes first: all gradients are made before any is used up. Under a checkpoint policy it is worse still: the recompute
of all the blocks may stand before the backward of any.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from oomguard.trace.capture import Capture
from oomguard.trace.collector import collector_paused
from oomguard.trace.engine import ALONE, Rewrite, Surroundings, built_for, prepare, step_peaks
from oomguard.trace.graph import Graph
from oomguard.trace.memory import CPU, Device

STEPS = 2
WORTH_SAYING = 0.01  # of the peak

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


@dataclass(frozen=True, slots=True)
class OrderPeak:
    """The steady peak of a step whose ``mx.eval`` is given its arrays in some order.

    Attributes:
        order: ``as given``, or one of ``ORDERS``.
        peak_bytes: of active memory.
        given_bytes: the same in the order given.
    """

    order: str
    peak_bytes: int
    given_bytes: int

    @property
    def saved_bytes(self) -> int:
        """What the order saves over the one given."""
        return self.given_bytes - self.peak_bytes

    @property
    def worth_saying(self) -> bool:
        """Whether it is more than what is in flight makes of it."""
        return self.saved_bytes > WORTH_SAYING * self.given_bytes


@collector_paused()
def best_order(
    captures: Sequence[Capture],
    *,
    compiled: bool | None = None,
    device: Device = CPU,
    memory_limit: int | None = None,
    rewrite: Rewrite | None = None,
    surroundings: Surroundings = ALONE,
) -> OrderPeak:
    """The order of evaluation with the lowest peak, and what it saves over the one given.

    Args:
        captures: the different calls of one update; the largest of their peaks counts.
        compiled, device, memory_limit, rewrite, surroundings: as for ``engine.simulate``.
    """
    compiled = captures[0].compiled if compiled is None else compiled
    peaks = dict.fromkeys(["as given", *ORDERS], 0)
    for captured in captures:
        graph = built_for(device, captured)
        graph = graph if rewrite is None else rewrite(graph)
        for name in peaks:
            ordered = graph.copy()
            if name in ORDERS:
                for evaluation in ordered.evaluations:
                    evaluation.outputs = ORDERS[name](ordered, evaluation.outputs)
            program = prepare(ordered, compiled=compiled, device=device)
            found = step_peaks(program, STEPS, memory_limit=memory_limit, surroundings=surroundings)
            peaks[name] = max(peaks[name], found[-1])
    best = min(peaks, key=lambda name: peaks[name])  # the one given, where none is better
    return OrderPeak(best, peaks[best], peaks["as given"])
