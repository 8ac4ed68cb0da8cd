"""Names for a captured graph: which phase, block and module each node belongs to.

Forward is what the loss needs. Where an optimizer's gradients were marked, backward is what they need
besides, and update is the rest; where they were not, everything after the forward counts as backward. The
marks of module calls give the module a forward node was built in; a backward node belongs to the block whose
saved values it reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oomguard.trace.graph import Graph, Node

if TYPE_CHECKING:
    from oomguard.trace.tags import Call, Site


GRADIENT = " gradient"
"""What the name of a parameter's gradient ends in."""


def label(graph: Graph, calls: list[Call], watched: dict[int, int], returned: list[int]) -> None:
    """Fills in phase, block, scope and names, in place.

    Args:
        graph: a captured graph, unlabelled.
        calls: the watched calls, in the order they began.
        watched: the array of each watched number; without those the step's results do not need.
        returned: what the step returned, in order; the first scalar is taken for the loss.
    """
    modules = [call for call in calls if call.kind in ("module", "block")]
    gradients = _name_gradients(graph, calls, watched)
    results = [i for call in modules for i in _arrays(call.leaving, watched)]
    loss = next((i for i in returned if graph.arrays[i].size == 1), None)
    forward = needed(graph, results if loss is None else [*results, loss], set(gradients))
    backward = needed(graph, gradients, set())
    for node in graph.nodes:
        if id(node) in forward:
            node.phase = "forward"
        elif not gradients or id(node) in backward:
            node.phase = "backward"
        else:
            node.phase = "update"
    _scope_forward(graph, modules, watched)
    _scope_backward(graph)
    for node in graph.nodes:
        for i in node.outputs:
            graph.arrays[i].block = node.block


def needed(graph: Graph, ends: list[int], stop: set[int]) -> set[int]:
    """``id`` of the nodes the ends need; nothing before a stop is followed."""
    arrays = graph.arrays
    found: set[int] = set()
    stack = list(ends)
    while stack:
        node = arrays[stack.pop()].producer
        if node is not None and id(node) not in found:
            found.add(id(node))
            stack.extend(i for i in node.inputs if i not in stop)
    return found


def _arrays(sites: list[Site], watched: dict[int, int]) -> list[int]:
    return [watched[site.watched] for site in sites if site.watched in watched]


def _name_gradients(graph: Graph, calls: list[Call], watched: dict[int, int]) -> list[int]:
    """The arrays handed to an optimizer, named after their parameters."""
    found = []
    for call in calls:
        if call.kind == "gradients":
            for site, name in zip(call.entering, call.arguments["names"], strict=True):
                if site.watched in watched:
                    found.append(watched[site.watched])
                    graph.arrays[found[-1]].name = name + GRADIENT
    return found


def _scope_forward(graph: Graph, modules: list[Call], watched: dict[int, int]) -> None:
    """Gives each node to the innermost module that was called around it.

    A call's results are numbered when it returns, so inner calls come first; each takes the nodes, not taken
    yet, between what went in and what came out.
    """
    arrays = graph.arrays
    taken: dict[int, Call] = {}
    for call in sorted((c for c in modules if c.leaving), key=lambda c: c.leaving[0].watched):
        seen = set(_arrays(call.entering, watched))
        stack = _arrays(call.leaving, watched)
        for end in stack:
            if arrays[end].name is None:
                arrays[end].name = call.name
        while stack:
            i = stack.pop()
            node = arrays[i].producer
            if node is None or i in seen:
                continue
            seen.add(i)
            inner = taken.get(id(node))
            if inner is not None:
                stack.extend(_arrays(inner.entering, watched))
                continue
            taken[id(node)] = call
            node.scope, node.block = call.name, call.block
            stack.extend(node.inputs)


def _scope_backward(graph: Graph) -> None:
    """A backward node is where the latest forward value it reads comes from, else where its cotangent is."""
    order = {id(node): k for k, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.phase != "backward" or node.scope:
            continue
        source = _latest_forward(graph, node, order) or _first_scoped(graph, node)
        if source is not None:
            node.scope, node.block = source.scope, source.block


def _latest_forward(graph: Graph, node: Node, order: dict[int, int]) -> Node | None:
    best: Node | None = None
    for i in node.inputs:
        producer = graph.arrays[i].producer
        if (
            producer is not None
            and producer.phase == "forward"
            and producer.scope
            and (best is None or order[id(producer)] > order[id(best)])
        ):
            best = producer
    return best


def _first_scoped(graph: Graph, node: Node) -> Node | None:
    for i in node.inputs:
        producer = graph.arrays[i].producer
        if producer is not None and producer.scope:
            return producer
    return None
