"""A training step as a graph, without running it and without allocating.

The state's arrays are replaced by placeholders, the step is called once under ``mx.export_function``, the
graph is read from what it returns and leaves behind, and the state is given back as it was. Parameters never
evaluated stay unevaluated.
"""

from __future__ import annotations

import copy
import inspect
import io
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import islice
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from oomguard.errors import TraceError
from oomguard.trace.compiled import runs_compiled
from oomguard.trace.containers import (
    Leaf,
    Snapshot,
    compiled_parts,
    discover,
    fill,
    leaves,
    map_leaves,
    random_keys,
    state_leaves,
    state_tree,
)
from oomguard.trace.experts import restore_sorted_gathers
from oomguard.trace.graph import Graph, Kind, Region
from oomguard.trace.label import label
from oomguard.trace.lower import LOWERED
from oomguard.trace.rawgraph import (
    Built,
    Drawn,
    Exported,
    ExportedArrays,
    Given,
    build,
    dtype_name,
    lead,
    marks_from,
    read_dot,
)
from oomguard.trace.recomputing import PlainArrays, Recomputing, Unlike, lead_along
from oomguard.trace.tags import (
    EVERY_REGION,
    RECOMPUTING,
    Call,
    Recompute,
    Site,
    Tags,
    checkpointed_functions,
    transformed_functions,
)

Evaluate = Callable[[Any, list[Any]], Any]
"""(what the step returned, the state) to a tree: what the caller hands to ``mx.eval``, in that order."""

MAX_PASSES = 3


@dataclass
class Capture:
    """What a step is, as a graph.

    Attributes:
        graph: every primitive the step builds, with nothing merged or fused, and one evaluation of them. What
            the step's marks delimit is in ``graph.regions``.
        compiled: whether the step is one ``mx.compile`` function.
        warnings: what could make a number from this graph wrong.
        recomputing: where the step calls ``mx.checkpoint`` or ``mx.custom_function``, and could be drawn with them,
            the graph with its recomputes in it. ``graph`` has them as plain code, and as regions.
    """

    graph: Graph
    compiled: bool
    warnings: list[str] = field(default_factory=list)
    recomputing: Graph | None = None


def returned_then_state(returned: Any, state: list[Any]) -> Any:
    """``mx.eval(returned, state)``: the default order."""
    return returned, state


def capture(
    step: Callable[..., Any],
    arguments: Sequence[Any] = (),
    keywords: dict[str, Any] | None = None,
    *,
    state: Sequence[Any] | None = None,
    evaluate: Evaluate = returned_then_state,
    consumed: Sequence[int] = (),
    first_step: bool = False,
    marked: frozenset[str] = EVERY_REGION,
    plain: bool = False,
) -> Capture:
    """Captures one call of a step.

    Args:
        step: a function of arrays (and constants) that updates a module and an optimizer in place and returns
            arrays; plain, or the result of ``mx.compile``.
        arguments: what to call it with, arrays in any nesting of lists, tuples and dictionaries. Only shapes and
            dtypes are read.
        keywords: keyword arguments.
        state: modules, optimizers (or their ``.state``), ``mx.random.state``, lists of arrays: what the step
            changes. Where not given, what ``mx.compile`` captured, else what the step's closure refers to.
        evaluate: what the caller hands to ``mx.eval`` afterwards, in which order.
        consumed: positions of arguments the caller does not hold any more when it evaluates (gradients that are
            handed from call to call).
        first_step: capture the call that creates the optimizer's state, not those after it.
        marked: kinds of regions (``Region.kind``) whose backward is to be found: those a later pass rewrites. With
            none the graph is the step's own to the node; see ``tags`` for what marks change. Calls of
            ``mx.checkpoint`` are always marked.
        plain: what the step recomputes by itself is taken as plain code.

    Raises:
        TraceError: the step cannot be captured; the text says why, where, and what to do.
    """
    capturing = _Capturing(step, arguments, keywords or {}, state, evaluate, set(consumed))
    capturing.marked = marked
    capturing.recompute = "plain" if plain else "marked"
    return capturing.run(first_step)


class _Capturing:
    """One capture; an object because the function that MLX traces leaves much behind."""

    def __init__(
        self,
        step: Callable[..., Any],
        arguments: Sequence[Any],
        keywords: dict[str, Any],
        state: Sequence[Any] | None,
        evaluate: Evaluate,
        consumed: set[int],
    ):
        parts = compiled_parts(step)
        self.step = parts[0] if parts else step
        self.compiled = parts is not None
        self.warnings: list[str] = []
        self.arguments = [*arguments, *keywords.values()]
        self.keywords = list(keywords)
        self.evaluate, self.consumed = evaluate, consumed
        self.marked: frozenset[str] = frozenset()
        self.recompute: Recompute = "marked"
        reached = discover(self.step)
        objects = self.objects = [o for o in reached if isinstance(o, nn.Module | optim.Optimizer)]
        self.state = list(state) if state is not None else _captured_state(parts, objects)
        self.function_state = _listed(parts[2]) if parts else self.state
        known = {id(tree) for item in self.state for tree in _containers(item)}
        self.hidden: list[Any] = [o for o in objects if not any(id(t) in known for t in _containers(o))]
        if not any(item is mx.random.state for item in self.state):
            self.hidden.append(mx.random.state)
        self.outside = [o for o in reached if isinstance(o, mx.array)]
        self.modules = _modules([*self.state, *objects])

    def run(self, first_step: bool) -> Capture:
        snapshot = Snapshot(self.state, self.hidden, self.objects, list(self.modules.values()))
        try:
            try:
                return self._passes(first_step, [])
            except TraceError as error:
                wrapped = checkpointed_functions() if "CustomTransforms" in str(error.__cause__) else []
                if not wrapped:
                    raise
                snapshot.restore()
                return self._passes(first_step, wrapped)
        finally:
            snapshot.restore()

    def _passes(self, first_step: bool, wrapped: list[Any]) -> Capture:
        """Captures, and again while the step leaves its state in another form than it found it."""
        optimizers = [o for o in (*self.state, *self.objects) if isinstance(o, optim.Optimizer)]
        if not first_step and any(not getattr(o, "_initialized", True) for o in optimizers):
            self._look()
        for _ in range(MAX_PASSES):
            before = _form(self.leaves())
            captured = self._capture(wrapped)
            if first_step or _form(self.leaves()) == before:
                break
        return captured

    def leaves(self) -> list[Leaf]:
        """Every array of the state, with its name, as it is now."""
        return state_leaves([*self.state, *self.hidden])

    def _look(self) -> None:
        """Runs the step on placeholders only for what it leaves in the state."""

        def traced(*tracers: mx.array) -> list[mx.array]:
            self._call(found, tracers)
            raise _SeenEnough

        found = self.leaves()
        try:
            self._export(lambda _: None, traced, found)
        except _SeenEnough:
            return

    def _capture(self, wrapped: list[Any]) -> Capture:
        """Draws and exports the step; where it recomputes by itself, draws it once more as it is."""
        found = self.leaves()
        exported = Exported()
        plain = self._draw(found, wrapped, self.recompute, exported)
        ends = [*plain.roots, *plain.recomputed()]
        match = lead(plain.drawn, exported, dict(zip(ends, exported.outputs, strict=True)))
        graph, numbers, batch = self._start(found, exported)
        built = build(plain.drawn, ExportedArrays(exported, match), plain.given(numbers), graph)
        _refuse_custom_kernels(graph)
        recomputing = (
            self._recomputing(found, wrapped, exported, plain, built) if plain.tags.recomputed else None
        )
        self._finish(plain, built, numbers, batch)
        watched = plain.numbered(built)
        label(graph, plain.tags.calls, watched, [built.ids[name] for name in plain.role("returned")])
        if recomputing is None:
            return Capture(graph, self.compiled, self.warnings + _own_vjps(plain.tags))
        recomputing.label()
        return Capture(graph, self.compiled, self.warnings, recomputing.graph)

    def _recomputing(
        self, found: list[Leaf], wrapped: list[Any], exported: Exported, plain: _Drawing, built: Built
    ) -> Recomputing | None:
        """The step as it is, described by what it is when run plainly; None where the two part."""
        real = self._draw(found, wrapped, "real")
        graph, numbers, batch = self._start(found, exported)
        given = real.given(numbers)
        try:
            ends = _pairs(real, plain)
            keys = self._keys(found, plain, built)
            match = lead_along(
                real.drawn,
                built.graph,
                given,
                [(a, built.ids[b]) for a, b in ends if b in built.needed],
                keys,
            )
        except Unlike as unlike:
            if not plain.tags.own_vjps:
                self.warnings.append(
                    f"the step's recomputes are counted by rule, not as MLX draws them ({unlike})"
                )
            return None
        again = build(real.drawn, PlainArrays(built.graph, match), given, graph)
        recomputing = Recomputing(again, built.graph, match)
        self._finish(real, again, numbers, batch)
        graph.regions = [region for region in graph.regions if region.kind not in RECOMPUTING]
        watched = real.numbered(again)
        forward = [site for call in real.tags.calls if not call.again for site in call.leaving]
        recomputing.forward = [watched[site.watched] for site in forward if site.watched in watched]
        return recomputing

    def _keys(self, found: list[Leaf], plain: _Drawing, built: Built) -> dict[int, int]:
        """For the random key that the plain step begins with, the one it draws next; see ``lead_along``."""
        place = next((k for k, leaf in enumerate(found) if leaf.container is random_keys()), None)
        carried = plain.role("carried")
        if place is None or not carried:
            return {}
        begins = built.ids[plain.drawn.sources[place]]
        form = built.graph.arrays[begins].shape
        key = built.ids[carried[place]]
        chain = [key]
        while (node := built.graph.arrays[key].producer) is not None:
            key = node.inputs[0]
            if built.graph.arrays[key].shape == form:
                chain.append(key)
        return {begins: chain[-2]} if chain[-1] == begins and len(chain) > 1 else {}

    def _draw(
        self, found: list[Leaf], wrapped: list[Any], recompute: Recompute, exported: Exported | None = None
    ) -> _Drawing:
        """Calls the step on placeholders and draws what it builds.

        Args:
            found: the state's arrays.
            wrapped: functions that ``mx.checkpoint`` made before.
            recompute: what recomputing calls are taken for.
            exported: takes the export of the step; what recomputes can only be drawn.
        """
        tags = Tags(*_paths(self.modules), self.marked, recompute=recompute)
        drawing, left = io.StringIO(), _Left()
        transformed = None if self.compiled else transformed_functions()

        def traced(*tracers: mx.array) -> list[mx.array]:
            with tags.installed(_called_classes(self.modules), wrapped, transformed):
                returned = self._call(found, tracers)
            left.read(self, returned, found)
            ends = [mx.stop_gradient(array) for array in left.roots]
            looked_for = [mx.stop_gradient(array) for array in (*self.outside, *tags.watched)]
            # Drawn in this order, so that each is found again by its place.
            mx.export_to_dot(drawing, *tracers, *tags.constants, *tags.places, *ends, *looked_for)
            if exported is None:
                raise _SeenEnough
            recomputed = [tags.watched[site.watched] for call in tags.recomputed for site in call.sites]
            return [*left.roots, *recomputed]

        with suppress(_SeenEnough):
            self._export(exported or (lambda _: None), traced, found)
        # What is never evaluated hangs together in cycles that run through MLX, where no collector sees them.
        tags.release()
        left.release()
        return _Drawing(
            read_dot(drawing.getvalue()),
            tags,
            left,
            len(found) + len(list(leaves(self.arguments))),
            len(self.outside),
        )

    def _export(self, callback: Any, function: Any, found: list[Leaf]) -> None:
        arrays = [leaf.array for leaf in found if leaf.container is not random_keys()]
        given = list(leaves(self.arguments))
        if not arrays and not given:
            raise TraceError(
                "the step takes no arrays and has no state; call it with its batch, and name what it updates "
                "with state=[model, optimizer]"
            )
        try:
            mx.export_function(callback, function, *[leaf.array for leaf in found], *given)
        except (_SeenEnough, TraceError):
            raise
        except Exception as error:
            raise _explained(error) from error

    def _call(self, found: list[Leaf], tracers: Sequence[mx.array]) -> Any:
        """Hangs the placeholders into the state and calls the step.

        Copies of the Python objects: the step may change one in place (``a += b``), and the placeholder itself
        must still be known by name afterwards.
        """
        placeholders = [copy.copy(tracer) for tracer in tracers]
        fill(found, placeholders[: len(found)])
        rest = iter(placeholders[len(found) :])
        values = [map_leaves(argument, lambda _: next(rest)) for argument in self.arguments]
        split = len(values) - len(self.keywords)
        return self.step(*values[:split], **dict(zip(self.keywords, values[split:], strict=True)))

    def _finish(self, drawing: _Drawing, built: Built, numbers: list[int], batch: list[int]) -> None:
        """Says of a graph what is evaluated, held and carried, and which regions it has."""
        graph, left = built.graph, drawing.left
        roots = [built.ids[name] for name in drawing.roots]
        evaluation = graph.evaluate([roots[r] for r in left.evaluated], held=[roots[r] for r in left.held])
        evaluation.held.update(batch)
        watched = drawing.numbered(built)
        watched |= _seen_by_the_backward(drawing, watched, built)
        regions = _regions(drawing.tags.calls, watched, built.cotangents)
        graph.regions = [r for r in regions if r.kind != "compile" or _runs_compiled(graph, r, watched)]
        graph.function_outputs = [roots[r] for r in left.function]
        graph.carries = {numbers[k]: roots[r] for k, r in enumerate(left.carried)}
        graph.remove_dead()
        restore_sorted_gathers(graph)

    def _start(self, found: list[Leaf], exported: Exported) -> tuple[Graph, list[int], list[int]]:
        """A graph with the step's inputs, in the order they are drawn in, and those the caller holds throughout."""
        graph = Graph()
        described = iter(exported.inputs)
        numbers: list[int] = []
        held: list[int] = []
        for leaf in found:
            shape, dtype = exported.shapes[next(described)]
            numbers.append(graph.array(shape, dtype, leaf.kind, name=leaf.name))
        for position, argument in enumerate(self.arguments):
            kind: Kind = "state" if position in self.consumed else "batch"
            for _ in leaves(argument):
                shape, dtype = exported.shapes[next(described)]
                numbers.append(graph.array(shape, dtype, kind, name=self._argument_name(position)))
                held += [] if position in self.consumed else numbers[-1:]
        for array in self.outside:
            numbers.append(graph.array(tuple(array.shape), dtype_name(array.dtype), "state", name="closure"))
            held.append(numbers[-1])
        return graph, numbers, held

    def _argument_name(self, position: int) -> str:
        split = len(self.arguments) - len(self.keywords)
        if position >= split:
            return self.keywords[position - split]
        try:
            names = list(inspect.signature(self.step).parameters)
        except (TypeError, ValueError):
            names = []
        return names[position] if position < len(names) else f"argument {position}"


class _SeenEnough(Exception):
    """Ends a pass that only looks at what the step does to its state."""


@dataclass
class _Left:
    """What a step returned and left in its state: ``roots``, until they are released, and who wants which of them."""

    roots: list[mx.array] = field(default_factory=list)
    returned: list[int] = field(default_factory=list)
    evaluated: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    function: list[int] = field(default_factory=list)
    carried: list[int] = field(default_factory=list)
    _positions: dict[int, int] = field(default_factory=dict)

    def read(self, capturing: _Capturing, returned: Any, found: list[Leaf]) -> None:
        trees = [state_tree(item) for item in capturing.state]
        self.returned = self._add(returned)
        self.evaluated = self._add(capturing.evaluate(returned, trees))
        if not self.evaluated:
            raise TraceError(
                "the step returns no arrays and changes no state; return the loss, and name what it updates with "
                "state=[model, optimizer]"
            )
        hidden = [state_tree(item) for item in capturing.hidden]
        self.held = self._add([returned, trees, hidden])
        state = [state_tree(item) for item in capturing.function_state]
        self.function = self._add([returned, state])
        after = capturing.leaves()
        if [leaf.name for leaf in after] == [leaf.name for leaf in found]:
            self.carried = self._add([leaf.array for leaf in after])

    def release(self) -> None:
        """Lets go of the arrays; their number is kept."""
        self.roots.clear()

    @property
    def count(self) -> int:
        """How many arrays there were."""
        return len(self._positions)

    def _add(self, tree: Any) -> list[int]:
        positions = []
        for array in leaves(tree):
            if id(array) not in self._positions:
                self._positions[id(array)] = len(self.roots)
                self.roots.append(array)
            positions.append(self._positions[id(array)])
        return positions


@dataclass
class _Drawing:
    """A step as it was drawn: its results, what is looked for in it, and the watched arrays, in this order.

    Attributes:
        tags: what was watched and marked.
        left: what the step returned and left.
        n_inputs: arrays of the state and the arguments, which are drawn first.
        n_outside: arrays that the step's closure holds.
    """

    drawn: Drawn
    tags: Tags
    left: _Left
    n_inputs: int
    n_outside: int

    @property
    def roots(self) -> list[str]:
        """Drawn names of ``left.roots``."""
        return self.drawn.ends[: self.left.count]

    @property
    def watched(self) -> list[str]:
        """Drawn names of the watched arrays, by their number."""
        return self.drawn.ends[self.left.count + self.n_outside :]

    def recomputed(self, as_in: Tags | None = None) -> list[str]:
        """Drawn names of what goes into and comes out of the calls that are recomputed.

        Args:
            as_in: give them for each of these calls, the ones here that have the same number.
        """
        watched, calls = self.watched, self.tags.recomputed
        if as_in is not None:
            numbered = {call.number: call for call in calls if not call.again}
            calls = [numbered[call.number] for call in as_in.recomputed if call.number in numbered]
        return [watched[site.watched] for call in calls for site in call.sites]

    def role(self, name: str) -> list[str]:
        """Drawn names of what was ``returned``, ``evaluated``, ``held``, ``carried`` or is of the ``function``."""
        roots = self.roots
        return [roots[k] for k in getattr(self.left, name)]

    def given(self, numbers: list[int]) -> Given:
        """What is known of the drawn sources, where the graph's inputs have these numbers."""
        sources = iter(self.drawn.sources)
        inputs = [*islice(sources, self.n_inputs)]
        start = self.left.count
        outside = self.drawn.ends[start : start + self.n_outside]
        return Given(
            inputs=dict(zip([*inputs, *outside], numbers, strict=True)),
            marks=marks_from(self.drawn, {next(sources): number for number in range(self.tags.n_marks)}),
            stand_ins={next(sources): stand_in for stand_in in self.tags.stand_ins},
        )

    def numbered(self, built: Built) -> dict[int, int]:
        """The array of each watched number, of those that the results need."""
        return {number: built.ids[name] for number, name in enumerate(self.watched) if name in built.needed}


def _pairs(real: _Drawing, plain: _Drawing) -> list[tuple[str, str]]:
    """Drawn names of the same array in two drawings of a step.

    Raises:
        Unlike: the step gave something else when it was called again.
    """
    found: list[tuple[str, str]] = []
    for role in ("returned", "evaluated", "held", "function", "carried"):
        found += _zipped(real.role(role), plain.role(role))
    return found + _zipped(real.recomputed(), plain.recomputed(as_in=real.tags))


def _zipped(one: list[str], other: list[str]) -> list[tuple[str, str]]:
    if len(one) != len(other):
        raise Unlike(f"{len(one)} arrays where the plain step has {len(other)}")
    return list(zip(one, other, strict=True))


def _own_vjps(tags: Tags) -> list[str]:
    return [
        f"the VJP that {name} defines is not traced; its backward is counted as automatic differentiation builds it"
        for name in tags.own_vjps
    ]


def _seen_by_the_backward(
    drawing: _Drawing, watched: dict[int, int], built: Built
) -> dict[int, int]:
    """What goes into and comes out of a call of which only the backward is needed, as in ``mx.grad``.

    A CPU's backward reads what the call made on its way, and its output may be read by nobody; the primitive that a
    GPU has for the call gives its VJP that output. So it has a place in the graph, which nothing makes yet.
    """
    found, names = {}, drawing.watched
    for call in drawing.tags.calls:
        if call.kind not in LOWERED:
            continue
        for site in (*call.entering, *call.leaving):
            if site.watched not in watched and site.mark in built.cotangents:
                known = built.ids.get(names[site.watched])
                if known is None:
                    known = built.graph.array(site.shape, site.dtype, "state")
                found[site.watched] = known
    return found


def _regions(calls: list[Call], watched: dict[int, int], cotangents: dict[int, int]) -> list[Region]:
    """The watched calls as regions, in the order they began; plain modules are no regions.

    A call whose result the step never uses is left out, and so is an input the call does not use.
    """

    def ends(sites: list[Site]) -> tuple[list[int], list[int | None]]:
        used = [site for site in sites if site.watched in watched]
        return (
            [watched[site.watched] for site in used],
            [None if site.mark is None else cotangents.get(site.mark) for site in used],
        )

    found = []
    for call in calls:
        region = Region(call.kind, call.name, [], [], call.block, call.arguments)
        region.inputs, region.gradients = ends(call.entering)
        region.outputs, region.cotangents = ends(call.leaving)
        if region.outputs and call.kind not in ("module", "gradients", "transform"):
            found.append(region)
    return found


def _runs_compiled(graph: Graph, region: Region, watched: dict[int, int]) -> bool:
    """Whether a watched call of a compiled function is not plain code, as it is inside of gradients."""
    within: tuple[Call, ...] = region.arguments.pop("within", ())
    given = [watched[site.watched] for call in within for site in call.entering if site.watched in watched]
    return runs_compiled(graph, region, given)


def _captured_state(parts: Any, objects: list[Any]) -> list[Any]:
    if parts and parts[1] is not None:
        return _listed(parts[1])
    return objects


def _listed(tree: Any) -> list[Any]:
    """What was given to ``mx.compile`` as ``inputs`` or ``outputs``, as the list it usually is."""
    if tree is None:
        return []
    return list(tree) if isinstance(tree, list | tuple) else [tree]


def _containers(item: Any) -> Iterator[Any]:
    """The objects an item of the state may be known by: itself, and the dictionaries of an optimizer."""
    yield item
    if isinstance(item, optim.MultiOptimizer):
        for inner in item.optimizers:
            yield from _containers(inner)
    elif isinstance(item, optim.Optimizer):
        yield item.state
    elif isinstance(item, dict) and not isinstance(item, nn.Module) and "states" in item:
        yield from item["states"]


def _modules(items: list[Any]) -> dict[str, nn.Module]:
    """Every module of some modules by its path; the first path wins where one hangs in two places."""
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    for item in items:
        if isinstance(item, nn.Module):
            for path, module in sorted(item.named_modules(), key=lambda pair: pair[0].count(".")):
                if id(module) not in seen:
                    seen.add(id(module))
                    found[path if path not in found else f"{path}#{len(found)}"] = module
    return found


def _paths(modules: dict[str, nn.Module]) -> tuple[dict[int, str], dict[int, int]]:
    """Path and block index by ``id``. Blocks are the modules of the longest list in the tree."""
    lists: dict[str, list[tuple[int, nn.Module]]] = {}
    for path, module in modules.items():
        parent, _, last = path.rpartition(".")
        if last.isdigit():
            lists.setdefault(parent, []).append((int(last), module))
    longest = max(lists.values(), key=len, default=[])
    return {id(m): path for path, m in modules.items()}, {id(m): i for i, m in longest}


def _called_classes(modules: dict[str, nn.Module]) -> set[type]:
    """The classes that define a ``__call__`` some module answers to."""
    found = set()
    for module in modules.values():
        for cls in type(module).__mro__:
            if cls is not nn.Module and "__call__" in cls.__dict__:
                found.add(cls)
    return found


def _form(found: list[Leaf]) -> list[tuple[str, tuple[int, ...], str]]:
    return [(leaf.name, tuple(leaf.array.shape), str(leaf.array.dtype)) for leaf in found]


def _refuse_custom_kernels(graph: Graph) -> None:
    if any(node.primitive == "CustomKernel" for node in graph.nodes):
        raise TraceError(
            "the step calls a custom Metal kernel (mx.fast.metal_kernel), and nothing says what it needs; trace the "
            "step with the kernel replaced by the MLX operations it stands for"
        )


def _explained(error: Exception) -> TraceError:
    """What went wrong while MLX traced the step, where in the user's code, and what to do."""
    text = str(error)
    where = _where(error)
    if "[eval] Attempting to eval" in text:
        return TraceError(
            f"the step reads a value while it is built{where}; evaluate, print and decide after the step has "
            "returned, and choose between values with mx.where"
        )
    if "uncaptured inputs" in text:
        return TraceError(
            "the step uses an array of its state in a way that the state does not show; pass every module, "
            "optimizer and array it reads with state=[...]"
        )
    if "CustomTransforms" in text:
        return TraceError(
            "the step uses a function that mx.checkpoint or mx.custom_function wrapped before the trace began; wrap "
            "it inside the step (as mlx_lm's grad_checkpoint and mlx.nn.utils.checkpoint do)"
        )
    if "Unable to get state for primitive" in text:
        name = text.rpartition(" ")[2]
        return TraceError(f"MLX {version('mlx')} cannot export the primitive {name}, which the step uses")
    return TraceError(f"the step raised {type(error).__name__}{where}: {text}")


def _where(error: Exception) -> str:
    """ " at file.py:12 (`loss.item()`)", the innermost line that is not MLX's or oomguard's."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if "/oomguard/trace/" not in frame.filename and "/mlx/" not in frame.filename:
            return f" at {frame.filename.rpartition('/')[2]}:{frame.lineno} (`{frame.line}`)"
    return ""
