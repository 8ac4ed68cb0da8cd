"""How far a process's queue has counted when its first step begins.

The CPU closes a task at every tenth dispatch, and goes on counting from evaluation to evaluation. So where the
tasks of a step end, and with that what is in flight at its peak, depends on all that was evaluated before.
What a process evaluates first are the parameters, the optimizer's state and the batch; their graphs still hang
on the arrays as long as nobody evaluated them.
"""

from __future__ import annotations

import io
from typing import Any

import mlx.core as mx

from oomguard.trace.containers import leaves
from oomguard.trace.ledger import VIEWS
from oomguard.trace.rawgraph import read_dot

SYNCHRONIZER_DISPATCHES = 1
"""What ``mx.eval`` queues at the end of an evaluation."""


def dispatches_to_evaluate(tree: Any) -> int:
    """Entries the CPU's queue gets when the arrays of a tree are evaluated in one ``mx.eval``.

    Each primitive is one kernel and one entry that holds its inputs, a view only the latter, and a concatenation a
    kernel for each part: what initializers and optimizers are made of. 0 for arrays that are evaluated already.
    """
    arrays = list(leaves(tree))
    if not arrays:
        return 0
    drawing = io.StringIO()
    mx.export_to_dot(drawing, *arrays)
    drawn = read_dot(drawing.getvalue())
    count = 0
    for label, inputs in zip(drawn.primitives, drawn.inputs, strict=True):
        name = label.partition(" ")[0]
        kernels = 0 if name in VIEWS else len(inputs) if name == "Concatenate" else 1
        count += kernels + 1
    return count + SYNCHRONIZER_DISPATCHES if count else 0
