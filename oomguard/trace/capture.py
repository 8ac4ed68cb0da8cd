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
from oomguard.step.opening import returned_then_state
from oomguard.trace.compiled import runs_compiled
from oomguard.trace.containers import (
    RANDOM_STATE,
    Leaf,
    Snapshot,
    StateKey,
    check_state,
    fill,
    keys_of,
    leaves,
    map_leaves,
    random_keys,
    state_leaves,
    state_tree,
)
from oomguard.trace.elsewhere import Elsewhere, Fixed
from oomguard.trace.experts import restore_sorted_gathers
from oomguard.trace.graph import Graph, Kind, Region
from oomguard.trace.label import label
from oomguard.trace.lower import LOWERED
from oomguard.trace.places import is_a, is_plain_object
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
from oomguard.trace.reach import compiled_parts, reach
from oomguard.trace.recomputing import PlainArrays, Recomputing, Unlike, lead_along
from oomguard.trace.tags import (
    EVERY_REGION,
    OWN_VJP,
    RECOMPUTING,
    Call,
    Recompute,
    Site,
    Tags,
    checkpointed_functions,
    transformed_functions,
)
from oomguard.trace.waiting import listed
from oomguard.units import format_bytes

Evaluate = Callable[[Any, list[Any]], Any]
"""(what the step returned, the state) to a tree: what the caller hands to ``mx.eval``, in that order."""

MAX_PASSES = 4


@dataclass
class Capture:
    """What a step is, as a graph.

    Attributes:
        graph: every primitive the step builds, with nothing merged or fused, and one evaluation of them. What
            the step's marks delimit is in ``graph.regions``.
        compiled: whether the step is one ``mx.compile`` function.
        warnings: what could make a number from this graph wrong.
        state: for each array of the state its input of the graph, that of one the step creates included.
        earlier: the first calls, where they create the state or leave it in another form than they found it.
    """

    graph: Graph
    compiled: bool
    warnings: list[str] = field(default_factory=list)
    state: dict[StateKey, int] = field(default_factory=dict)
    earlier: list[Capture] = field(default_factory=list)

    @property
    def calls(self) -> list[Capture]:
        """The first calls of a process, and last the one that all others are like."""
        return [*self.earlier, self]

    @property
    def links(self) -> list[dict[int, int]]:
        """For each of ``calls`` which inputs of its graph and of the one before are the same array of the state."""
        pairs = zip(self.calls, self.calls[1:], strict=False)
        same = [{i: a.state[key] for key, i in b.state.items() if key in a.state} for a, b in pairs]
        return [{}, *same]


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
        state: modules, optimizers (or their ``.state``), ``mx.random.state``, dictionaries, lists and objects that
            hold arrays: what the step changes. Where not given, what ``mx.compile`` captured, else what the step's
            closure refers to.
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
        self.only_first = self.mistaken = False
        found = reach(self.step)
        reached = found.objects
        objects = self.objects = [o for o in reached if is_a(o, nn.Module, optim.Optimizer)]
        self.finds_state = state is None and not parts
        self.state = list(state) if state is not None else _captured_state(parts, objects)
        self.warnings += check_state(self.state) if state is not None else []
        self.function_state = _listed(parts[2]) if parts else self.state
        known = {id(tree) for item in self.state for tree in _containers(item)}
        self.hidden: list[Any] = [o for o in objects if not any(id(t) in known for t in _containers(o))]
        if not any(item is mx.random.state for item in self.state):
            self.hidden.append(mx.random.state)
        self.reached = found
        self.elsewhere = Elsewhere(self.step, found, self.state, self.hidden)
        self.modules = _modules([*self.state, *objects])
        self.snapshot = self._snapshot()

    def _snapshot(self) -> Snapshot:
        roots = [self.state, self.hidden, self.objects, list(self.modules.values())]
        return Snapshot(*roots, shallow=self.reached.containers, variables=self.reached.variables)

    def run(self, first_step: bool) -> Capture:
        self.only_first = first_step
        try:
            try:
                return self._passes([])
            except TraceError as error:
                wrapped = checkpointed_functions() if "CustomTransforms" in str(error.__cause__) else []
                if not wrapped:
                    raise
                self.snapshot.restore()
                return self._passes(wrapped)
        finally:
            self.snapshot.restore()

    def _passes(self, wrapped: list[Any]) -> Capture:
        """Captures, and begins again where an array that was taken to stay turns out to be state."""
        while True:
            known = set(self.elsewhere.changing)
            calls = self._calls(wrapped)
            if not self.mistaken:
                break
            assert self.elsewhere.changing > known
            self.snapshot.restore()
        captured = calls.pop()
        captured.earlier = calls
        captured.warnings += self._empty_state()
        return captured

    def _calls(self, wrapped: list[Any]) -> list[Capture]:
        """The step called again and again, until it leaves its state in the form in which it finds it."""
        calls = []
        self.mistaken = False
        for _ in range(MAX_PASSES):
            before = self.leaves()
            calls.append(self._capture(wrapped))
            after = self.leaves()
            if self.only_first or self.mistaken or _form(after) == _form(before):
                return calls
        calls[-1].warnings.append(_growth(before, after))
        return calls[-1:]

    def leaves(self) -> list[Leaf]:
        """Every array of the state, with its name, as it is now."""
        own = [item for item in (*self.state, *self.hidden) if not self.elsewhere.lists_only(item)]
        hanging = state_leaves(own)
        return hanging + self.elsewhere.leaves(hanging)

    def _empty_state(self) -> list[str]:
        """Warnings for objects of the user's that hold no array, not even after the step."""
        return [
            f"state[{number}], a {type(item).__name__}, holds no array: nothing is counted for it"
            for number, item in enumerate(self.state)
            if is_plain_object(item) and not is_a(item, optim.Optimizer) and not state_leaves([item])
        ]

    def _capture(self, wrapped: list[Any]) -> Capture:
        """Draws and exports the step; where it recomputes by itself, draws it once more as it is."""
        found = self.leaves()
        fixed = self.elsewhere.fixed(found)
        before = self._snapshot()
        exported = Exported()
        plain = self._draw(found, fixed, wrapped, self.recompute, exported)
        if plain.tags.recomputed and "block" in self.marked:
            # Marked blocks are for policies, and those for steps without recompute; here they group gradients.
            self.marked -= {"block"}
            before.restore()
            return self._capture(wrapped)
        replaced = plain.replaced()
        self.elsewhere.changing |= replaced
        self.mistaken = bool(replaced)
        ends = [*plain.roots, *plain.recomputed(), *plain.given_by_vjps()]
        match = lead(plain.drawn, exported, dict(zip(ends, exported.outputs, strict=True)))
        graph, numbers, batch = self._start(plain, exported)
        built = build(plain.drawn, ExportedArrays(exported, match), plain.given(numbers), graph)
        _refuse_custom_kernels(graph)
        recomputing: Recomputing | None = None
        warnings = self.warnings + _own_vjps(plain.tags)
        if plain.tags.recomputed and self.recompute == "marked":
            before.restore()
            real = self._draw(found, fixed, wrapped, "real")
            try:
                recomputing = self._recomputing(real, plain, exported, built)
            except Unlike as unlike:
                self.warnings.append(
                    f"the step's recomputes are counted by rule, not as MLX draws them ({unlike})"
                )
                self.recompute = "by rule"
                before.restore()
                return self._capture(wrapped)
        state = self._finish(plain, built, numbers, batch)
        watched = plain.numbered(built)
        label(graph, plain.tags.calls, watched, [built.ids[name] for name in plain.role("returned")])
        if recomputing is None:
            return Capture(graph, self.compiled, warnings, state)
        recomputing.label()
        return Capture(recomputing.graph, self.compiled, list(self.warnings), recomputing.state)

    def _recomputing(self, real: _Drawing, plain: _Drawing, exported: Exported, built: Built) -> Recomputing:
        """The step as it is, described by what it is when run plainly.

        Raises:
            Unlike: the two part.
        """
        graph, numbers, batch = self._start(real, exported)
        given = real.given(numbers)
        ends = _cotangents(real, plain, built)  # first: a VJP may hand on what arrives at it
        ends += [(a, built.ids[b]) for a, b in _pairs(real, plain) if b in built.needed]
        match = lead_along(real.drawn, built.graph, given, ends, _next_key(plain, built))
        again = build(real.drawn, PlainArrays(built.graph, match), given, graph)
        recomputing = Recomputing(again, built.graph, match)
        recomputing.state = self._finish(real, again, numbers, batch)
        graph.regions = [region for region in graph.regions if region.kind not in RECOMPUTING]
        watched = real.numbered(again)
        forward = [site for call in real.tags.calls if not call.again for site in call.leaving]
        recomputing.forward = [watched[site.watched] for site in forward if site.watched in watched]
        return recomputing

    def _draw(
        self,
        found: list[Leaf],
        fixed: list[Fixed],
        wrapped: list[Any],
        recompute: Recompute,
        exported: Exported | None = None,
    ) -> _Drawing:
        """Calls the step on placeholders and draws what it builds.

        Args:
            found, fixed: the state's arrays, and those that are taken to stay.
            wrapped: functions that ``mx.checkpoint`` made before.
            recompute: what recomputing calls are taken for.
            exported: takes the export of the step; what recomputes can only be drawn.
        """
        tags = Tags(*_paths(self.modules), self.marked, recompute=recompute)
        drawing, left = io.StringIO(), _Left()
        transformed = None if self.compiled else transformed_functions(besides=wrapped)

        def traced(*tracers: mx.array) -> list[mx.array]:
            for each in fixed:
                each.hang()
            with tags.installed(_called_classes(self.modules), wrapped, transformed):
                returned = self._call(found, tracers)
            left.read(self, returned, fixed)
            ends = [mx.stop_gradient(array) for array in left.roots]
            outside = [each.array for each in fixed] + [array for _, _, array in left.elsewhere]
            looked_for = [mx.stop_gradient(array) for array in (*outside, *tags.watched)]
            # Drawn in this order, so that each is found again by its place.
            mx.export_to_dot(drawing, *tracers, *tags.constants, *tags.places, *ends, *looked_for)
            if exported is None:
                raise _SeenEnough
            sites = [site for call in tags.recomputed for site in call.sites]
            sites += [site for call in tags.vjps for site in call.leaving]
            return [*left.roots, *(tags.watched[site.watched] for site in sites)]

        with suppress(_SeenEnough):
            self._export(exported or (lambda _: None), traced, found, fixed)
        # What is never evaluated hangs together in cycles that run through MLX, where no collector sees them.
        tags.release()
        n_inputs = len(found) + len(list(leaves(self.arguments)))
        return _Drawing(read_dot(drawing.getvalue()), tags, left, found, fixed, n_inputs)

    def _export(self, callback: Any, function: Any, found: list[Leaf], fixed: list[Fixed]) -> None:
        arrays = [leaf.array for leaf in found if leaf.array is not random_keys()[0]]
        given = list(leaves(self.arguments))
        if not arrays and not given:
            raise TraceError(
                "the step takes no arrays and has no state; call it with its batch, and name what it updates "
                "with state=[model, optimizer]"
            )
        # An example that the step also reads elsewhere would be an input it captured; another array does as well.
        twins = {each.twin for each in fixed}
        examples = [
            mx.zeros(leaf.array.shape, leaf.array.dtype) if key in twins else leaf.array
            for key, leaf in keys_of(found).items()
        ]
        reached = {id(each.array) for each in fixed}
        given = [mx.zeros(a.shape, a.dtype) if id(a) in reached else a for a in given]
        try:
            mx.export_function(callback, function, *examples, *given)
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

    def _finish(
        self, drawing: _Drawing, built: Built, numbers: list[int], batch: list[int]
    ) -> dict[StateKey, int]:
        """Says of a graph what is evaluated, held and carried, and which regions it has.

        Returns:
            For each array of the state its input of the graph.
        """
        graph, left = built.graph, drawing.left
        graph.recomputes = bool(drawing.tags.recomputed)
        roots = [built.ids[name] for name in drawing.roots]
        evaluation = graph.evaluate([roots[r] for r in left.evaluated], held=[roots[r] for r in left.held])
        evaluation.held.update(batch)
        watched = drawing.numbered(built)
        watched |= _seen_by_the_backward(drawing, watched, built)
        regions = _regions(drawing.tags.calls, watched, built.cotangents)
        graph.regions = [r for r in regions if r.kind != "compile" or _runs_compiled(graph, r, watched)]
        graph.function_outputs = [roots[r] for r in left.function]
        state = dict(zip(keys_of(drawing.found), numbers, strict=False))
        for key, leaf in keys_of(left.leaves).items():
            if key not in state and not self.only_first:  # the step makes it, and the next call reads it
                shape, dtype = tuple(leaf.array.shape), dtype_name(leaf.array.dtype)
                state[key] = graph.array(shape, dtype, leaf.kind, name=leaf.name)
        graph.carries = {state[key]: roots[r] for key, r in left.state.items() if key in state}
        graph.remove_dead()
        restore_sorted_gathers(graph)
        return state

    def _start(self, drawing: _Drawing, exported: Exported) -> tuple[Graph, list[int], list[int]]:
        """A graph with the step's inputs, in the order they are drawn in, and those the caller holds throughout."""
        graph = Graph()
        described = iter(exported.inputs)
        numbers: list[int] = []
        held: list[int] = []
        for leaf in drawing.found:
            shape, dtype = exported.shapes[next(described)]
            numbers.append(graph.array(shape, dtype, leaf.kind, name=leaf.name))
        state = dict(zip(keys_of(drawing.found), numbers, strict=True))
        kept = drawing.kept()
        given: dict[int, int] = {}
        for position, argument in enumerate(self.arguments):
            kind: Kind = "state" if position in self.consumed else "batch"
            for array in leaves(argument):
                shape, dtype = exported.shapes[next(described)]
                numbers.append(graph.array(shape, dtype, kind, name=self._argument_name(position)))
                given[id(array)] = numbers[-1]
                held += [] if position in self.consumed else numbers[-1:]
        for each in drawing.fixed:
            if each.twin in kept:
                numbers.append(state[each.twin])
                continue
            if id(each.array) in given:  # the step reaches what it is called with
                numbers.append(given[id(each.array)])
                continue
            shape, dtype = tuple(each.array.shape), dtype_name(each.array.dtype)
            numbers.append(graph.array(shape, dtype, "state", name="closure"))
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
    """Ends a pass that only draws the step."""


@dataclass
class _Left:
    """What a step returned and left in its state: ``roots``, and who wants which of them."""

    roots: list[mx.array] = field(default_factory=list)
    returned: list[int] = field(default_factory=list)
    evaluated: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    function: list[int] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)
    state: dict[StateKey, int] = field(default_factory=dict)
    elsewhere: list[tuple[int, StateKey, mx.array]] = field(default_factory=list)
    _positions: dict[int, int] = field(default_factory=dict)

    def read(self, capturing: _Capturing, returned: Any, fixed: list[Fixed]) -> None:
        elsewhere = capturing.elsewhere
        self.elsewhere = elsewhere.left(capturing.leaves(), fixed)
        self.leaves = capturing.leaves()
        trees = self._trees(capturing)
        self.returned = self._add(returned)
        self.evaluated = self._add(capturing.evaluate(returned, trees))
        if not self.evaluated:
            raise TraceError(
                "the step returns no arrays and changes no state; return the loss, and name what it updates with "
                "state=[model, optimizer]"
            )
        hidden = [state_tree(item) for item in capturing.hidden]
        self.held = self._add([returned, trees, hidden, [leaf.array for leaf in self.leaves]])
        state = [state_tree(item) for item in capturing.function_state]
        self.function = self._add([returned, trees if capturing.function_state is capturing.state else state])
        self.state = {key: self._add(leaf.array)[0] for key, leaf in keys_of(self.leaves).items()}

    def _trees(self, capturing: _Capturing) -> list[Any]:
        """The state as ``evaluate`` is given it; where the trace has found it by itself, all that was found."""
        now = {key: leaf.array for key, leaf in keys_of(self.leaves).items()}
        reached = {key: array for _, key, array in self.elsewhere} | {
            key: array for key, array in now.items() if key in capturing.elsewhere.changing
        }
        trees = [
            capturing.elsewhere.tree(item, now, reached)
            if capturing.elsewhere.lists_only(item)
            else state_tree(item)
            for item in capturing.state
        ]
        if capturing.finds_state:
            changing = [reached[key] for key in sorted(capturing.elsewhere.changing) if key in reached]
            trees += [changing] if changing else []
        return trees

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
        found, fixed: the state's arrays as the step found them, and those that were taken to stay.
        n_inputs: arrays of the state and the arguments, which are drawn first.
    """

    drawn: Drawn
    tags: Tags
    left: _Left
    found: list[Leaf]
    fixed: list[Fixed]
    n_inputs: int

    @property
    def roots(self) -> list[str]:
        """Drawn names of ``left.roots``."""
        return self.drawn.ends[: len(self.left.roots)]

    @property
    def outside(self) -> list[str]:
        """Drawn names of the arrays that were taken to stay."""
        start = len(self.left.roots)
        return self.drawn.ends[start : start + len(self.fixed)]

    @property
    def watched(self) -> list[str]:
        """Drawn names of the watched arrays, by their number."""
        return self.drawn.ends[len(self.left.roots) + len(self.fixed) + len(self.left.elsewhere) :]

    def replaced(self) -> set[StateKey]:
        """Keys of arrays that were taken to stay, and that the step has put another one in place of."""
        start, outside = len(self.left.roots) + len(self.fixed), self.outside
        now = self.drawn.ends[start : start + len(self.left.elsewhere)]
        pairs = zip(self.left.elsewhere, now, strict=True)
        return {key for (number, key, _), name in pairs if name != outside[number]}

    def kept(self) -> set[StateKey]:
        """Keys of the state that the step leaves as it is."""
        roots, left = self.roots, self.left.state
        pairs = zip(keys_of(self.found), self.drawn.sources, strict=False)
        return {key for key, name in pairs if name == roots[left[key]]}

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

    def given_by_vjps(self, as_in: Tags | None = None) -> list[str]:
        """Drawn names of what VJPs of the user's give; ``as_in`` as for ``recomputed``."""
        watched, calls = self.watched, self.tags.vjps
        if as_in is not None:
            numbered = {call.number: call for call in calls if not call.again}
            calls = [numbered[call.number] for call in as_in.vjps if call.number in numbered]
        return [watched[site.watched] for call in calls for site in call.leaving]

    def role(self, name: str) -> list[str]:
        """Drawn names of what was ``returned``, ``evaluated``, ``held``, or is of the ``function``."""
        roots = self.roots
        return [roots[k] for k in getattr(self.left, name)]

    def given(self, numbers: list[int]) -> Given:
        """What is known of the drawn sources, where the graph's inputs have these numbers."""
        sources = iter(self.drawn.sources)
        inputs = [*islice(sources, self.n_inputs)]
        return Given(
            inputs=dict(zip([*inputs, *self.outside], numbers, strict=True)),
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
    # First what VJPs give: in the plain step a gradient of something else stands in its place.
    found = _zipped(real.given_by_vjps(), plain.given_by_vjps(as_in=real.tags))
    for role in ("returned", "evaluated", "held", "function"):
        found += _zipped(real.role(role), plain.role(role))
    roots = real.roots, plain.roots
    both = real.left.state.keys() & plain.left.state.keys()
    found += [(roots[0][real.left.state[key]], roots[1][plain.left.state[key]]) for key in both]
    return found + _zipped(real.recomputed(), plain.recomputed(as_in=real.tags))


def _cotangents(real: _Drawing, plain: _Drawing, built: Built) -> list[tuple[str, int]]:
    """What arrives at a VJP of the user's, and the cotangent that arrives at the same call in the plain step."""
    watched = real.watched
    marks = {
        call.number: [site.mark for site in call.leaving] for call in plain.tags.recomputed if not call.again
    }
    return [
        (watched[site.watched], built.cotangents[mark])
        for call in real.tags.vjps
        for site, mark in zip(call.entering, marks.get(call.number, ()), strict=False)
        if mark in built.cotangents
    ]


def _zipped(one: list[str], other: list[str]) -> list[tuple[str, str]]:
    if len(one) != len(other):
        raise Unlike(f"{len(one)} arrays where the plain step has {len(other)}")
    return list(zip(one, other, strict=True))


def _next_key(plain: _Drawing, built: Built) -> dict[int, int]:
    """For the random key that a step begins with, the one it draws next; see ``lead_along``."""
    place, key = next((k for k in enumerate(keys_of(plain.found)) if k[1][0] == RANDOM_STATE), (0, None))
    if key is None or key not in plain.left.state:
        return {}
    begins = built.ids[plain.drawn.sources[place]]
    arrays = built.graph.arrays
    drawn_key = built.ids[plain.roots[plain.left.state[key]]]
    chain = [drawn_key]
    while (node := arrays[drawn_key].producer) is not None:
        drawn_key = node.inputs[0]
        if arrays[drawn_key].shape == arrays[begins].shape:
            chain.append(drawn_key)
    return {begins: chain[-2]} if chain[-1] == begins and len(chain) > 1 else {}


def _own_vjps(tags: Tags) -> list[str]:
    return [
        f"the VJP that {name} defines is not traced; its backward is counted as automatic differentiation builds it"
        for name in tags.own_vjps
    ]


def _seen_by_the_backward(drawing: _Drawing, watched: dict[int, int], built: Built) -> dict[int, int]:
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
        if region.outputs and call.kind not in ("module", "gradients", "transform", OWN_VJP):
            found.append(region)
    return found


def _runs_compiled(graph: Graph, region: Region, watched: dict[int, int]) -> bool:
    """Whether a watched call of a compiled function is not plain code, as it is inside of gradients."""
    within: tuple[Call, ...] = region.arguments.pop("within", ())
    given = [watched[site.watched] for call in within for site in call.entering if site.watched in watched]
    return runs_compiled(graph, region, given)


def found_state(step: Callable[..., Any]) -> list[Any]:
    """What a step updates, where nobody says it: what ``mx.compile`` captured, else what the step reaches."""
    parts = compiled_parts(step)
    reached = reach(parts[0] if parts else step).objects
    return _captured_state(parts, [o for o in reached if is_a(o, nn.Module, optim.Optimizer)])


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
    if is_a(item, optim.MultiOptimizer):
        for inner in item.optimizers:
            yield from _containers(inner)
    elif is_a(item, optim.Optimizer):
        yield item.state
    elif is_a(item, dict) and not is_a(item, nn.Module) and dict.__contains__(item, "states"):
        yield from dict.__getitem__(item, "states")


def _modules(items: list[Any]) -> dict[str, nn.Module]:
    """Every module of some modules by its path; the first path wins where one hangs in two places."""
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    for item in items:
        if is_a(item, nn.Module):
            for path, module in sorted(item.named_modules(), key=lambda pair: pair[0].count(".")):
                if id(module) not in seen:
                    seen.add(id(module))
                    found[path if path not in found else f"{path}#{len(found)}"] = module
    return found


def _paths(modules: dict[str, nn.Module]) -> tuple[dict[int, str], dict[int, int]]:
    """Path and block index by ``id``. Blocks are the modules of the longest list of which some are trained.

    Where none is, as in an evaluation, of the longest list of all: a frozen teacher may be deeper than its student.
    """
    lists: dict[str, list[tuple[int, nn.Module]]] = {}
    for path, module in modules.items():
        parent, _, last = path.rpartition(".")
        if last.isdigit():
            lists.setdefault(parent, []).append((int(last), module))

    def rank(listed: list[tuple[int, nn.Module]]) -> tuple[bool, int]:
        trained = any(next(leaves(module.trainable_parameters()), None) is not None for _, module in listed)
        return trained, len(listed)

    longest = max(lists.values(), key=rank, default=[])
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


def _growth(before: list[Leaf], after: list[Leaf]) -> str:
    """What is said of a state that never settles."""
    there = keys_of(before)
    more = [leaf for key, leaf in keys_of(after).items() if key not in there]
    if not more:
        return f"the step leaves its state in another form at every call; traced is call number {MAX_PASSES}"
    nbytes = format_bytes(sum(leaf.array.nbytes for leaf in more))
    return (
        f"the state gains arrays at every call, {nbytes} a step, without end ({listed([leaf.name for leaf in more])}); "
        f"traced is call number {MAX_PASSES}"
    )


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
