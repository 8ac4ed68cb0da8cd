"""The order in which ``mx.eval`` runs a graph.

MLX counts how often each unevaluated primitive is used, then builds its tape from the outputs backwards:
breadth-first, a primitive following once its last use is on the tape, but never more than a number of
primitives wide; past that width it goes down before it goes on (``eval_impl`` in ``transforms.cpp``). The tape
is run from its end.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from oomguard.trace.graph import Evaluation, Graph, Node

BFS_MAX_WIDTH = 20
"""``MLX_BFS_MAX_WIDTH``'s default."""


def schedule(
    graph: Graph,
    evaluation: Evaluation,
    evaluated: AbstractSet[int] = frozenset(),
    width: int = BFS_MAX_WIDTH,
) -> list[tuple[Node, int]]:
    """The nodes one evaluation runs, in order, each with the output through which it was reached.

    Args:
        evaluation: its outputs, in the order given to ``mx.eval``, decide the order.
        evaluated: arrays that have a producer but were evaluated before.
        width: how wide the tape may get before it goes down.
    """
    arrays = graph.arrays

    def maker(i: int) -> Node | None:
        return None if i in evaluated else arrays[i].producer

    uses = _uses(graph, evaluation.outputs, evaluated)
    tape: list[tuple[Node, int]] = []
    inputs_of: list[list[int]] = [evaluation.outputs]
    waiting: list[tuple[int, int]] = []
    at = 0
    while at < len(inputs_of) or waiting:
        if at >= len(inputs_of):
            current, start = waiting.pop()
        else:
            current, start = at, 0
            at += 1
        inputs = inputs_of[current]
        for position in range(start, len(inputs)):
            node = maker(inputs[position])
            if node is None:
                continue
            if len(inputs_of) - at >= width:
                waiting.append((current, position))
                break
            left = uses[id(node)] - 1
            uses[id(node)] = left
            if left == 0:
                tape.append((node, inputs[position]))
                inputs_of.append(node.inputs)
    tape.reverse()
    return tape


def _uses(graph: Graph, outputs: list[int], evaluated: AbstractSet[int]) -> dict[int, int]:
    """How often each node's outputs are read, by ``id`` of the node, by what the outputs need."""
    arrays = graph.arrays
    uses: dict[int, int] = {}
    stack = [outputs]
    while stack:
        for i in stack.pop():
            node = None if i in evaluated else arrays[i].producer
            if node is None:
                continue
            count = uses.get(id(node), 0)
            uses[id(node)] = count + 1
            if not count:
                stack.append(node.inputs)
    return uses
