"""Turns a captured step without checkpointing into the step a checkpoint policy would have built.

What ``mx.checkpoint(f)`` adds to a graph (``checkpoint``, ``custom_function`` in MLX's ``transforms.cpp``):

- in the forward, a ``CustomTransforms`` that takes f's arguments and results (each through a
  ``StopGradient``) and hands the results on. It allocates nothing, stops fusion, and is what everything
  after f reads;
- in the backward, one ``Depends`` over (arguments, results of the CustomTransforms). It hands the arguments
  on, each through the ``Copy`` that ``mx.vjp`` puts on what it differentiates; as it also waits for the
  results, nothing that reads it can run before the forward of f has;
- f once more, from what ``Depends`` hands on, and f's backward, which reads that second forward and those
  arguments only. So no array made inside f is read by the backward, and all are free when f is done.

A bare ``mx.custom_function`` whose gradient runs f again has no ``Depends``: the second forward reads f's
arguments themselves, and is therefore equal, primitive by primitive, to the first. ``mx.compile`` merges
equal primitives, and with them goes the saving, down to the first primitive that cannot be merged (one
without inputs, as ``Arange``, has no common reader to be found by). ``simplify`` does the same to the graph
made here.

Arguments are the parameters that are differentiated, in the module's order, and the inputs; what f reads
otherwise (frozen weights, constants) the second forward reads again where it is. Parts of f that depend on
no argument, a causal mask for one, are built a second time, as MLX does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from oomguard.config.policy import CheckpointPolicy, Segment
from oomguard.errors import TraceError
from oomguard.trace.graph import Graph, Node, Phase, Region


def apply_policy(graph: Graph, policy: CheckpointPolicy, *, block_to_boundary: float | None = None) -> Graph:
    """The graph of the same step under ``policy``.

    Args:
        graph: a captured step in which no block is recomputed, with its ``block`` regions; unchanged.
        policy: which blocks, and how.
        block_to_boundary: bytes a block saves over bytes between two blocks, for ``stride=auto``; taken
            from the graph where not given.

    Returns:
        A new graph, in topological order, with the captured regions.

    Raises:
        TraceError: the policy recomputes blocks or attention and the graph has none.
    """
    ratio = saved_ratio(graph) if block_to_boundary is None else block_to_boundary
    n_blocks = len(block_calls(graph))
    segments = policy.segments(n_blocks, ratio)
    if not n_blocks and policy.policy != "none":
        raise TraceError(f"{policy} recomputes blocks, and the captured step has none; {_HOW_TO_NAME_BLOCKS}")
    return recompute(graph, segments, bare=policy.policy == "custom_function")


def recompute(graph: Graph, segments: Sequence[Segment], *, bare: bool = False) -> Graph:
    """The graph of the same step with these segments recomputed in the backward.

    Args:
        graph: as in ``apply_policy``.
        segments: not overlapping; where ``region`` is ``attention``, only the attention cores of the blocks.
        bare: as a custom function without the ``Depends`` of ``mx.checkpoint``.

    Raises:
        TraceError: there is no such block, no attention core in the blocks, or the backward of the blocks was
            not marked when the step was captured.
    """
    result = graph.copy()
    blocks = block_calls(result)
    if segments and not _backward_is_known(graph):
        raise TraceError(
            "the step was captured without marks around its blocks: capture with marked={'block'}"
        )
    calls: list[_Call] = []
    for segment in segments:
        if segment.stop > len(blocks):
            raise TraceError(
                f"blocks {segment.start} to {segment.stop}: the step has {len(blocks)}; {_HOW_TO_NAME_BLOCKS}"
            )
        for members in zip(*blocks[segment.start : segment.stop], strict=True):
            if segment.region == "block":
                calls.append(_joined(result, members))
            else:
                cores = [core for block in members for core in attention_cores(result, block)]
                calls.extend(_joined(result, [core]) for core in cores)
    if segments and not calls and not any(r.kind in ATTENTION_KINDS for r in graph.regions):
        raise TraceError(
            "no block calls mx.fast.scaled_dot_product_attention; recompute whole blocks instead"
        )
    if calls:
        _rewrite(result, calls, bare=bare)
    return result


def recompute_regions(graph: Graph, regions: Iterable[Region], *, bare: bool = False) -> Graph:
    """The graph of the same step with ``mx.checkpoint`` around each of these regions, inner ones first.

    Args:
        graph: unchanged.
        regions: of ``graph.regions``; one inside another is recomputed by both, as nested calls are.
        bare: as in ``recompute``.
    """
    wanted = {id(region) for region in regions}
    positions = [i for i, region in enumerate(graph.regions) if id(region) in wanted]
    result = graph.copy()
    for level in _by_depth(result, positions):
        _rewrite(result, [_joined(result, [result.regions[i]]) for i in level], bare=bare)
    return result


def block_calls(graph: Graph) -> list[list[Region]]:
    """For each block, its calls in order: one, or one for each micro-batch that the step accumulates."""
    found: dict[int, list[Region]] = {}
    for region in graph.regions:
        if region.kind == "block":
            found.setdefault(region.block, []).append(region)
    return [found[block] for block in sorted(found)]


def attention_cores(graph: Graph, block: Region) -> list[Region]:
    """The attention regions inside one call of a block, the outermost where they nest."""
    inside = _made_in(graph, block)
    cores = [r for r in graph.regions if r.kind in ATTENTION_KINDS and r.outputs[0] in inside]
    named = [r for r in cores if r.kind == "attention"]
    return named or cores


def saved_ratio(graph: Graph) -> float:
    """Bytes the middle block saves for its backward over the bytes that pass from one block to the next.

    Saved are the arrays made inside the block and read by its backward; views of one buffer count once.
    1.0 where there is no block.
    """
    blocks = block_calls(graph)
    if not blocks:
        return 1.0
    call = _joined(graph, [blocks[len(blocks) // 2][0]])
    inside, backward = _Sides(graph).of(call)
    made = {i for node in inside for i in node.outputs}
    read = {_viewed(graph, i) for node in backward for i in node.inputs if i in made}
    saved = sum(graph.arrays[i].nbytes for i in read)
    boundary = sum(graph.arrays[i].nbytes for i in call.outputs)
    return max(1.0, saved / boundary) if boundary else 1.0


def _made_in(graph: Graph, region: Region) -> set[int]:
    """What is made between a region's inputs and its outputs; ``region_nodes`` without its pass over the graph."""
    stop, found = set(region.inputs), set()
    stack = [i for i in region.outputs if i not in stop]
    while stack:
        node = graph.arrays[stack.pop()].producer
        if node is not None and node.outputs[0] not in found:
            found.update(node.outputs)
            stack.extend(i for i in node.inputs if i not in stop)
    return found


def _backward_is_known(graph: Graph) -> bool:
    """False where there is a backward and no block has a part in it."""
    blocks = [region for region in graph.regions if region.kind == "block"]
    found = any(i is not None for region in blocks for i in region.gradients)
    return found or not blocks or all(node.phase != "backward" for node in graph.nodes)


ATTENTION_KINDS = ("attention", "fast.scaled_dot_product_attention")
VIEWS = frozenset(
    (
        "Broadcast",
        "Copy",
        "Depends",
        "ExpandDims",
        "Flatten",
        "Reshape",
        "Slice",
        "Squeeze",
        "StopGradient",
        "Transpose",
        "Unflatten",
    )
)
_HOW_TO_NAME_BLOCKS = "name the module's list of layers, or use mx.checkpoint in the step"


def _source(graph: Graph, i: int) -> int:
    """What ``i`` is a copy of: a transformation copies what it is given, and a parameter is often given."""
    producer = graph.arrays[i].producer
    while producer is not None and producer.primitive == "Copy":
        i = producer.inputs[0]
        producer = graph.arrays[i].producer
    return i


def _viewed(graph: Graph, i: int) -> int:
    """The array whose buffer ``i`` shows, taking every view for one."""
    producer = graph.arrays[i].producer
    while producer is not None and producer.primitive in VIEWS:
        i = producer.inputs[graph.arrays[i].position]
        producer = graph.arrays[i].producer
    return i


@dataclass(slots=True)
class _Call:
    """What one ``mx.checkpoint`` is around: blocks called one after the other, or one attention core."""

    arguments: list[int]
    outputs: list[int]
    cotangents: list[int]
    gradients: list[int]
    block: int


def _joined(graph: Graph, regions: Sequence[Region]) -> _Call:
    """Regions that feed each other as one call: all parameters first, then what comes in from outside.

    Raises:
        TraceError: a region is not handed what the one before it made, so something of the step stands between; or
            one of several gives more than one array.
    """
    parameters: list[int] = []
    inputs: list[int] = []
    gradients: list[int] = []
    made: set[int] = set()
    for region in regions:
        if made and made.isdisjoint(region.inputs):
            raise TraceError(
                f"block {region.block} is not handed what the block before it returned, so they cannot be recomputed "
                "as one; use every or blocks=N"
            )
        if len(regions) > 1 and len(region.outputs) > 1:
            raise TraceError(
                f"block {region.block} returns {len(region.outputs)} arrays, and a segment of several blocks hands on "
                "only one; use every or blocks=N"
            )
        for i, gradient in zip(region.inputs, region.gradients, strict=True):
            if i in made:
                continue
            of_module = graph.arrays[_source(graph, i)].kind == "parameter"
            (parameters if of_module else inputs).append(i)
            if gradient is not None:
                gradients.append(gradient)
        made.update(region.outputs)
    last = regions[-1]
    arguments = list(dict.fromkeys(parameters + inputs))
    # What a block hands on as it was given (keys and values of another block) is not its own.
    own = [k for k, i in enumerate(last.outputs) if i not in arguments]
    cotangents = [i for k, i in enumerate(last.cotangents) if k in own and i is not None]
    return _Call(arguments, [last.outputs[k] for k in own], cotangents, gradients, last.block)


def _by_depth(graph: Graph, positions: Sequence[int]) -> list[list[int]]:
    """Positions in ``graph.regions``, grouped: a region stands in an earlier group than what holds it."""
    made = {p: {i for n in graph.region_nodes(graph.regions[p]) for i in n.outputs} for p in positions}
    inner: dict[int, int] = {}
    for p in reversed(positions):
        held = [q for q in positions if q > p and graph.regions[q].outputs[0] in made[p]]
        inner[p] = 1 + max((inner[q] for q in held), default=-1)
    return [
        [p for p in positions if inner[p] == level] for level in range(max(inner.values(), default=-1) + 1)
    ]


class _Sides:
    """Finds the forward and the backward nodes of calls; holds what is the same for all calls of a graph."""

    def __init__(self, graph: Graph):
        self.arrays = graph.arrays
        self.order = {id(node): number for number, node in enumerate(graph.nodes)}
        trained = {
            i for r in graph.regions for i, g in zip(r.inputs, r.gradients, strict=True) if g is not None
        }
        self.outside = bytearray(len(graph.arrays))
        for array in graph.arrays:
            if array.kind in ("batch", "optimizer") or (array.kind == "parameter" and array.id in trained):
                self.outside[array.id] = 1
        for node in graph.nodes:
            if any(self.outside[i] for i in node.inputs):
                for i in node.outputs:
                    self.outside[i] = 1

    def of(self, call: _Call) -> tuple[list[Node], list[Node]]:
        """The nodes of the call's forward, and those of its backward.

        An array that the forward reads from outside without being given it (a mask kept in a closure) is not
        made in it; what depends on nothing but constants and frozen weights is.
        """
        inside: list[Node] = []
        depends = set(call.arguments)
        for node in self._between(depends, call.outputs):
            if any(i in depends for i in node.inputs):
                depends.update(node.outputs)
                inside.append(node)
            elif not any(self.outside[i] for i in node.outputs):
                inside.append(node)
        stop = {i for node in inside for i in (*node.inputs, *node.outputs)}
        stop.update(call.arguments, call.cotangents)
        return inside, self._between(stop, call.gradients)

    def _between(self, stop: set[int], outputs: Iterable[int]) -> list[Node]:
        """``Graph.between`` without its pass over the whole graph."""
        arrays, found = self.arrays, {}
        stack = [i for i in outputs if i not in stop]
        while stack:
            node = arrays[stack.pop()].producer
            if node is None or id(node) in found:
                continue
            found[id(node)] = node
            stack.extend(i for i in node.inputs if i not in stop)
        return sorted(found.values(), key=lambda node: self.order[id(node)])


def _rewrite(graph: Graph, calls: Sequence[_Call], *, bare: bool) -> None:
    """Recomputes calls that do not overlap, given in the order of the forward."""
    sides = _Sides(graph)
    found = [sides.of(call) for call in calls]
    readers = graph.consumers()
    handed_on: dict[int, int] = {}
    for call, (inside, backward) in zip(calls, found, strict=True):
        arguments = [handed_on.get(i, i) for i in call.arguments]
        stopped = [_hand_on(graph, "StopGradient", [i], [i], call, "forward")[0] for i in call.outputs]
        results = _hand_on(graph, "CustomTransforms", stopped, [*arguments, *stopped], call, "forward")
        own = {id(node) for node in (*inside, *backward)}
        for old, new in zip(call.outputs, results, strict=True):
            for node, position in readers[old]:
                if id(node) not in own:
                    node.inputs[position] = new
        handed_on.update(zip(call.outputs, results, strict=True))
        if backward:
            given = arguments
            if not bare:
                given = _hand_on(graph, "Depends", arguments, [*arguments, *results], call, "recompute")
            again = _made_again(graph, inside, readers, own)
            _recompute_call(graph, call, arguments, given, inside, backward, again)
    _follow(graph, handed_on, calls, [inside for inside, _ in found])
    graph.remove_dead()
    blocks = sorted({call.block for call in calls if call.block >= 0})
    graph.sort(f"recomputing {f'blocks {blocks}' if blocks else 'checkpointed calls'} in the backward")


def _recompute_call(
    graph: Graph,
    call: _Call,
    arguments: list[int],
    given: list[int],
    inside: list[Node],
    backward: list[Node],
    again: dict[int, int],
) -> None:
    """Gives a call's backward a second forward to read, and the arguments as that second forward has them.

    Args:
        again: constants that the second forward makes again, and what it has in their place.
    """
    for argument, i in zip(arguments, given, strict=True):
        again[argument] = _hand_on(graph, "Copy", [i], [i], call, "recompute")[0]
    needed = {i for node in backward for i in node.inputs}
    cloned: list[Node] = []
    for node in reversed(inside):
        if not needed.isdisjoint(node.outputs):
            needed.update(node.inputs)
            cloned.append(node)
    copies, mapping = graph.clone(reversed(cloned), again, "recompute")
    graph.nodes.extend(copies)
    for node in backward:
        node.inputs = [mapping.get(i, i) for i in node.inputs]


def _made_again(
    graph: Graph, inside: list[Node], readers: list[list[tuple[Node, int]]], own: set[int]
) -> dict[int, int]:
    """The scalars of a call that nothing but it and its backward reads, each with another one like it."""
    found = {}
    for i in dict.fromkeys(i for node in inside for i in node.inputs):
        array = graph.arrays[i]
        if (array.kind, array.shape) == ("constant", ()) and all(id(node) in own for node, _ in readers[i]):
            found[i] = graph.constant(array.value, array.shape, array.dtype)
    return found


def _hand_on(
    graph: Graph, primitive: str, like: Sequence[int], inputs: list[int], call: _Call, phase: Phase
) -> list[int]:
    """A node that hands some of its inputs on and allocates nothing; returns the arrays it hands on."""
    arrays = [graph.arrays[i] for i in like]
    outputs = [graph.array(a.shape, a.dtype, name=a.name, block=a.block) for a in arrays]
    graph.append(Node(primitive, inputs, outputs, (), phase, call.block))
    return outputs


def _follow(
    graph: Graph, handed_on: dict[int, int], calls: Sequence[_Call], forwards: Sequence[list[Node]]
) -> None:
    """What is evaluated, and what regions around and after the calls see, is now what the calls hand on."""
    for evaluation in graph.evaluations:
        evaluation.outputs = [handed_on.get(i, i) for i in evaluation.outputs]
        evaluation.held = {handed_on.get(i, i) for i in evaluation.held}
    call_of = {i: n for n, inside in enumerate(forwards) for node in inside for i in node.outputs}
    within = [set(call.arguments) for call in calls]
    for i, n in call_of.items():
        within[n].add(i)
    for region in graph.regions:
        number = call_of.get(region.outputs[0])
        if number is None or not within[number].issuperset(region.inputs):
            region.inputs = [handed_on.get(i, i) for i in region.inputs]
            region.outputs = [handed_on.get(i, i) for i in region.outputs]
