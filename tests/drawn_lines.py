"""A step as lines, one for each primitive: as MLX draws it, and as a graph has it."""

from __future__ import annotations

import io
from typing import Any

import mlx.core as mx

from oomguard.trace.containers import leaves, state_tree
from oomguard.trace.graph import Graph
from oomguard.trace.rawgraph import RENAMED, read_dot

Line = tuple[str, tuple[object, ...]]


def real_lines(state: list[Any], batch: Any, evaluated: Any, *, key_first: bool = False) -> list[Line]:
    """What MLX draws from what is evaluated, in depth-first order; each array named by where it is made.

    Args:
        state: modules and optimizers as they were before the step.
        batch: what the step was called with.
        evaluated: called without arguments, makes the step and gives what is handed to ``mx.eval``.
        key_first: the first array that goes into a recompute is the random key; left out where nothing has made it.
    """
    given = {f"in{k}": a for k, a in enumerate(leaves([*map(state_tree, state), batch]))}
    drawing = io.StringIO()
    mx.export_to_dot(drawing, *leaves(evaluated()), **given)
    drawn = read_dot(drawing.getvalue())
    makers: dict[str, tuple[int, int]] = {}
    lines: list[Line] = []
    for label, inputs, outputs in zip(drawn.primitives, drawn.inputs, drawn.outputs, strict=True):
        name = label.partition(" ")[0]
        makers |= {output: (len(lines), position) for position, output in enumerate(outputs)}
        read = [makers.get(i, "leaf") for i in inputs]
        if key_first and name in ("CustomTransforms", "Depends") and "leaf" in read:
            first = read.index("leaf")
            read.remove("leaf")
            makers |= {o: (len(lines), n - (n >= first)) for n, o in enumerate(outputs)}
        name = "Compiled" if name.startswith("Compiled") else RENAMED.get(name, name)
        lines.append((name, tuple(read)))
    return lines


def lines_of(graph: Graph) -> list[Line]:
    """The graph in the depth-first order of its outputs, each array named by where it is made."""
    makers: dict[int, tuple[int, int]] = {}
    lines: list[Line] = []
    for output in graph.outputs:
        stack = [(output, False)]
        while stack:
            array, done = stack.pop()
            node = graph.arrays[array].producer
            if node is None or array in makers:
                continue
            if not done:
                stack.append((array, True))
                stack.extend((i, False) for i in reversed(node.inputs))
                continue
            makers |= {i: (len(lines), position) for position, i in enumerate(node.outputs)}
            lines.append((node.primitive, tuple(makers.get(i, "leaf") for i in node.inputs)))
    return lines
