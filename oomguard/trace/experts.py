"""Sorted expert gathers, which MLX cannot export: captured as unsorted ones, and put back here.

The gradient of ``mx.gather_mm(..., sorted_indices=True)`` with respect to its matrices is a ``SegmentedMM``, and
``mx.export_function`` has no name for that. So while a step is captured its indices are not said to be sorted;
then MLX multiplies a matrix for every token and scatters the sums. This pass turns that into what a sorted
gather builds (``GatherMM::vjp`` and ``gather_mm_grad`` in MLX's ``primitives.cpp``): the segments' ends from the
indices, and one segmented product.
"""

from __future__ import annotations

from collections.abc import Iterable

from oomguard.trace.graph import Graph, Node, Region

SORTED_GATHER = "sorted_gather"
"""The kind of the region that a sorted ``mx.gather_mm`` is captured as."""


def restore_sorted_gathers(graph: Graph) -> None:
    """Rewrites the backward of every region of kind ``sorted_gather``, in place, and drops those regions."""
    regions = [region for region in graph.regions if region.kind == SORTED_GATHER]
    if not regions:
        return
    mapping: dict[int, int] = {}
    for region in regions:
        rows, matrices = region.gradients[:2]
        if rows is not None:
            mapping.update(_row_gradient(graph, region, rows))
        if matrices is not None:
            mapping.update(_matrix_gradient(graph, region, matrices))
    graph.regions = [region for region in graph.regions if region.kind != SORTED_GATHER]
    rewrite = "restoring the backward of sorted mx.gather_mm calls"
    graph.replace_all(mapping, rewrite)
    graph.remove_dead()
    graph.sort(rewrite)


def _row_gradient(graph: Graph, region: Region, gradient: int) -> Iterable[tuple[int, int]]:
    """Where every row is read once, its gradient is the gathered product itself, and nothing is scattered."""
    scatter = _behind(graph, gradient, "Scatter", ("Reshape",))
    if scatter is None:
        return ()
    product = graph.arrays[scatter.inputs[-1]].producer
    if product is None or product.primitive != "ExpandDims":
        return ()
    gathered = product.inputs[0]
    if graph.arrays[gathered].size != graph.arrays[region.inputs[0]].size:
        return ()
    return ((gradient, gathered),)


def _matrix_gradient(graph: Graph, region: Region, gradient: int) -> Iterable[tuple[int, int]]:
    """The scattered sum becomes a product over segments of rows."""
    scatter = _behind(graph, gradient, "Scatter", ("Transpose", "Reshape"))
    cotangent = region.cotangents[0]
    if scatter is None or cotangent is None:
        return ()
    total = graph.arrays[scatter.outputs[0]]
    segments = _segments(graph, scatter.inputs[1], total.shape[0])
    columns = _flat(graph, cotangent)
    turned = graph.op(
        "Transpose",
        [columns],
        graph.arrays[columns].shape[::-1],
        arguments=((1, 0),),
        phase="backward",
    )
    product = graph.op(
        "SegmentedMM",
        [turned, _flat(graph, region.inputs[0]), segments],
        total.shape,
        total.dtype,
        phase="backward",
        block=scatter.block,
        scope=scatter.scope,
    )
    return ((total.id, product),)


def _segments(graph: Graph, indices: int, count: int) -> int:
    """(first, last) row of each matrix, from the sorted numbers of the matrices."""
    index = graph.arrays[indices]
    zero = graph.op("Broadcast", [graph.constant(0, dtype="uint32")], (count,), phase="backward")
    zeros = graph.op("Full", [zero], phase="backward")
    rows = graph.op("Broadcast", [graph.constant(1, dtype="uint32")], index.shape, phase="backward")
    counts = graph.op("ScatterAxis", [zeros, indices, rows], phase="backward")
    ends = graph.op("Scan", [counts], arguments=(2, 0, False, True), phase="backward")
    first = graph.constant(shape=(1,), dtype="uint32")
    bounds = graph.op("Concatenate", [first, ends], (count + 1,), arguments=(0,), phase="backward")
    strided = ((count, 2), (1, 1), 0)
    return graph.op("AsStrided", [bounds], (count, 2), arguments=strided, phase="backward")


def _flat(graph: Graph, i: int) -> int:
    """All axes but the last made one."""
    array = graph.arrays[i]
    if len(array.shape) == 2:
        return i
    shape = (array.size // array.shape[-1], array.shape[-1])
    return graph.op("Flatten", [i], shape, arguments=(0, len(array.shape) - 2), phase="backward")


def _behind(graph: Graph, i: int, wanted: str, through: tuple[str, ...]) -> Node | None:
    """The primitive that makes an array, past views of the kinds given."""
    node = graph.arrays[i].producer
    while node is not None and node.primitive in through:
        node = graph.arrays[node.inputs[0]].producer
    return node if node is not None and node.primitive == wanted else None
