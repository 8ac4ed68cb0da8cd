"""What is remembered of a graph while it is built: which call an array went into and came out of.

While ``Tags.installed`` is active, every module's ``__call__``, the functions of ``mx.fast``,
``mx.checkpoint``, ``mx.custom_function`` and the optimizers' ``apply_gradients`` are watched: the arrays that go
in and come out are kept, and found again in the drawing of the graph. Watching changes nothing.

A region whose backward must be found as well is marked: its arrays are multiplied by a constant of their own,
and the gradient of the product is the same constant times the cotangent, so the mark shows where a cotangent
enters and a gradient leaves. ``rawgraph`` takes the marks out again, but one thing they change: what the call
contributes to the gradient of an input is summed before it is added to what others contribute. A checkpointed
call and a primitive of ``mx.fast`` with a VJP of its own do just that; plain code does not. So only what is
rewritten later is marked.

``mx.checkpoint`` and ``mx.custom_function`` cannot be exported. They run the function plainly, as a marked
region; then the step is drawn once more with what they are (``recomputing``).
"""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten

from oomguard.trace.collector import collector_paused
from oomguard.trace.containers import leaves, map_leaves
from oomguard.trace.experts import SORTED_GATHER
from oomguard.trace.lower import CROSS_ENTROPY
from oomguard.trace.places import class_attribute, is_a, methods_of
from oomguard.trace.rawgraph import dtype_name
from oomguard.trace.reach import TRANSFORMED, compiled_parts

_FAST = ("cross_entropy", "layer_norm", "rms_norm", "rope", "scaled_dot_product_attention")
FAST = tuple(name for name in _FAST if hasattr(mx.fast, name))
"""The functions of ``mx.fast`` with a derivative; which there are depends on MLX's release."""


EVERY_REGION = frozenset({"block", *(f"fast.{name}" for name in FAST)})
_REDUCTIONS: dict[str, Callable[[mx.array], mx.array]] = {"none": lambda a: a, "mean": mx.mean, "sum": mx.sum}

RECOMPUTING = ("checkpoint", "custom_function")
"""Kinds of regions that a step recomputes by itself."""

OWN_VJP = "own_vjp"
"""Kind of the calls of VJPs that a user gives a custom function."""

ALWAYS_MARKED = frozenset({*RECOMPUTING, SORTED_GATHER})

TRANSFORMS = ("compile", "grad", "value_and_grad", "vmap")
"""Functions of ``mlx.core`` that make another function of one."""

Recompute = Literal["plain", "marked", "by rule", "real"]
"""How recomputing calls are run: as plain code; as plain code that is marked, for the real step to be led along it
or for a rewriting by rule; or as they are, to be drawn only."""


@dataclass(slots=True)
class Site:
    """One array on its way into or out of a call: its number among those watched, and that of its mark."""

    watched: int
    mark: int | None
    shape: tuple[int, ...]
    dtype: str


@dataclass(eq=False)
class Call:
    """One watched call, with the arrays that went in and that came out, in order.

    ``again`` says that it is part of a recompute. Calls that are recomputed are counted in the order of the forward;
    ``number`` is that of the call, or of the one that it repeats.
    """

    kind: str
    name: str
    block: int = -1
    arguments: dict[str, Any] = field(default_factory=dict)
    entering: list[Site] = field(default_factory=list)
    leaving: list[Site] = field(default_factory=list)
    again: bool = False
    number: int | None = None

    @property
    def sites(self) -> list[Site]:
        return self.entering + self.leaving


class Tags:
    """Watches and marks arrays, and keeps the calls they belong to in the order the calls began."""

    def __init__(
        self,
        modules: dict[int, str],
        blocks: dict[int, int],
        marked: frozenset[str],
        *,
        recompute: Recompute = "marked",
    ):
        """Args:
        modules: path of a module by ``id``.
        blocks: block index of a module by ``id``, for the layers of the model's layer list.
        marked: kinds of calls to mark, besides those that always are.
        recompute: what calls of ``mx.checkpoint`` and ``mx.custom_function`` are taken for.
        """
        self.modules = modules
        self.blocks = blocks
        self.recompute = recompute
        self.marked = marked | ALWAYS_MARKED
        if recompute == "real":
            self.marked -= {"block", *RECOMPUTING}
        self.calls: list[Call] = []
        self.watched: list[mx.array] = []
        self.constants: list[mx.array] = []
        self.n_marks = 0
        self.stand_ins: list[tuple[str, tuple[Any, ...]]] = []
        self.places: list[mx.array] = []
        self.own_vjps: list[str] = []
        self.made: list[Any] = []
        self._real = (mx.checkpoint, mx.custom_function)  # in a tuple, where ``_everywhere`` does not look
        self._stack: list[int] = []
        self._block = -1
        self._again = False
        self._transforming: list[Call] = []
        self._begun: list[Call] = []
        self._repeated: Iterator[Call] | None = None
        self._n_recomputed = 0

    def run(self, function: Callable[..., Any], call: Call, args: Any, kwargs: Any) -> Any:
        """Calls the function with what goes in and what comes out watched."""
        call.again = self._again
        self.calls.append(call)
        args, kwargs = self.watch((args, kwargs), call, call.entering)
        return self.watch(function(*args, **kwargs), call, call.leaving)

    @property
    def in_recompute(self) -> bool:
        return self._again

    def watch(
        self, tree: Any, call: Call, sites: list[Site], instead: Callable[[mx.array], mx.array] | None = None
    ) -> Any:
        """The tree, its arrays marked if the call's kind is; adds a site for each array.

        ``instead`` gives what the step goes on with in place of a watched array.
        """

        def one(array: mx.array) -> mx.array:
            site = Site(len(self.watched), None, tuple(array.shape), dtype_name(array.dtype))
            sites.append(site)
            # Another Python object for the same array: the step may change this one in place.
            self.watched.append(copy.copy(array))
            array = array if instead is None else instead(array)
            if call.kind not in self.marked or not array.ndim or not mx.issubdtype(array.dtype, mx.inexact):
                return array
            site.mark = self.n_marks
            self.n_marks += 1
            # Never zero-dimensional: equal scalars are merged, and two marks would become one.
            constant = mx.array([site.mark], mx.int32)
            self.constants.append(constant)
            return array * constant.astype(array.dtype)

        return map_leaves(tree, one)

    def release(self) -> None:
        """Lets go of every array, once they have been drawn."""
        for arrays in (self.watched, self.constants, self.places, self.made):
            arrays.clear()

    @property
    def recomputed(self) -> list[Call]:
        """The recomputing calls, those that repeat one of the forward among them."""
        return [call for call in self.calls if call.kind in RECOMPUTING and call.number is not None]

    @property
    def vjps(self) -> list[Call]:
        """The calls of VJPs of the user's, each with the number of the call it belongs to."""
        return [call for call in self.calls if call.kind == OWN_VJP]

    def recomputing_call(self, kind: str, name: str) -> Call:
        """A call that MLX recomputes: the next one of the forward, or what repeats one."""
        call = Call(kind, name, self._block)
        if self._repeated is None:
            call.number = self._n_recomputed
            self._n_recomputed += 1
        elif (repeated := next(self._repeated, None)) is not None:
            call.number = repeated.number
        self._begun.append(call)
        return call

    # -- what is replaced while a step is captured ------------------------------------------------------

    @contextmanager
    def installed(
        self, module_classes: set[type], wrapped: list[Any], transformed: list[Any] | None = None
    ) -> Iterator[None]:
        """Replaces calls by marked ones, everywhere they are referred to, and undoes it on leaving.

        Args:
            module_classes: those whose ``__call__`` is marked.
            wrapped: functions that ``mx.checkpoint`` made before, from ``checkpointed_functions``.
            transformed: functions that ``mx.compile`` or a gradient made before, from ``transformed_functions``; None
                where the step is compiled itself, as then those inside it are plain code.
        """
        with ExitStack() as stack:
            stack.enter_context(_nothing_compiles())
            if transformed is not None:
                stack.enter_context(self._compiled_calls(transformed))
            for cls in module_classes:
                stack.enter_context(_attribute(cls, "__call__", self._module_call(cls.__dict__["__call__"])))
            for name in FAST:
                stack.enter_context(_attribute(mx.fast, name, self._fast(name, getattr(mx.fast, name))))
            original = nn.losses.cross_entropy
            if CROSS_ENTROPY in self.marked and original.__module__.startswith("mlx."):
                stack.enter_context(_everywhere(original, self._cross_entropy(original)))
            for cls in {optim.Optimizer, optim.MultiOptimizer}:
                stack.enter_context(
                    _attribute(cls, "apply_gradients", self._apply_gradients(cls.__dict__["apply_gradients"]))
                )
            stack.enter_context(_everywhere(mx.contiguous, self._contiguous))
            stack.enter_context(_attribute(mx, "gather_mm", self._gather_mm(mx.gather_mm)))
            stack.enter_context(_everywhere(mx.checkpoint, self._checkpoint))
            made_before = {id(f): (f, self._checkpoint(gc.get_referents(f)[1])) for f in wrapped}
            stack.enter_context(_replaced(made_before))
            called = self._real[1].__call__
            stack.enter_context(_attribute(self._real[1], "__call__", self._made_before(called)))
            stack.enter_context(_everywhere(mx.custom_function, self._custom_function))
            yield

    def _module_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        tags = self

        @functools.wraps(original)
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = tags.modules.get(id(module))
            if path is None or (tags._stack and tags._stack[-1] == id(module)):
                return original(module, *args, **kwargs)
            outer, tags._block = tags._block, tags.blocks.get(id(module), tags._block)
            tags._stack.append(id(module))
            try:
                if id(module) in tags.blocks:
                    return tags._block_call(module, path, original, args, kwargs)
                call = Call("module", path, tags._block)
                return tags.run(functools.partial(original, module), call, args, kwargs)
            finally:
                tags._stack.pop()
                tags._block = outer

        return __call__

    def _block_call(
        self, module: nn.Module, path: str, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """A block's trainable parameters go in as well, and first: so ``mx.checkpoint`` is handed them."""
        parameters = module.trainable_parameters()

        def inner(given: Any, *args: Any, **kwargs: Any) -> Any:
            if "block" not in self.marked:
                return original(module, *args, **kwargs)
            module.update(given)
            try:
                return original(module, *args, **kwargs)
            finally:
                module.update(parameters)

        return self.run(inner, Call("block", path, self._block), (parameters, *args), kwargs)

    def _fast(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def marked(*args: Any, **kwargs: Any) -> Any:
            plain = {k: v for k, v in kwargs.items() if not isinstance(v, mx.array)}
            given = {"arguments": [None if isinstance(a, mx.array) else a for a in args], **plain}
            return self.run(original, Call(f"fast.{name}", name, self._block, given), args, kwargs)

        return marked

    def _cross_entropy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Marks what MLX makes one primitive of on a GPU: class indices over the last axis, nothing smoothed."""

        held = (original,)  # in a tuple, where ``_everywhere`` does not look

        def cross_entropy(
            logits: mx.array,
            targets: mx.array,
            weights: mx.array | None = None,
            axis: int = -1,
            label_smoothing: float = 0.0,
            reduction: str = "none",
        ) -> mx.array:
            plain = axis in (-1, logits.ndim - 1) and targets.ndim == logits.ndim - 1 and not label_smoothing
            known = mx.issubdtype(logits.dtype, mx.floating) and mx.issubdtype(targets.dtype, mx.integer)
            fits = weights is None or weights.shape == targets.shape
            if not (plain and known and fits and reduction in _REDUCTIONS):
                given: mx.array = held[0](logits, targets, weights, axis, label_smoothing, reduction)
                return given
            call = Call(CROSS_ENTROPY, "cross_entropy", self._block)
            loss = self.run(held[0], call, (logits, targets), {})
            return _REDUCTIONS[reduction](loss if weights is None else loss * weights)

        return cross_entropy

    def _contiguous(self, a: mx.array, allow_col_major: bool = False, **stream: Any) -> mx.array:
        """``mx.contiguous`` cannot be exported; a ``Depends`` on a constant of its own holds its place."""
        constant = mx.array([len(self.stand_ins)], mx.int32)
        self.stand_ins.append(("Contiguous", (allow_col_major,)))
        self.places.append(constant)
        placed: mx.array = mx.depends([a], [constant])[0]
        return placed

    def _gather_mm(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Sorted gathers are captured as unsorted ones; ``experts`` makes them sorted again."""

        @functools.wraps(original)
        def gather_mm(*args: Any, sorted_indices: bool = False, **kwargs: Any) -> Any:
            if not sorted_indices:
                return original(*args, **kwargs)
            return self.run(original, Call(SORTED_GATHER, "gather_mm", self._block), args, kwargs)

        return gather_mm

    def run_vjp(
        self, vjp: Callable[..., Any], of: Call, primals: Any, cotangents: Any, outputs: Any, kwargs: Any
    ) -> Any:
        """Calls a VJP of the user's, what goes in and what comes out watched."""
        call = Call(OWN_VJP, of.name, of.block, again=self._again, number=of.number)
        self.calls.append(call)
        self.watch(cotangents, call, call.entering)
        return self.watch(vjp(primals, cotangents, outputs, **kwargs), call, call.leaving)

    @contextmanager
    def forward(self, begun: list[Call]) -> Iterator[None]:
        """Recomputing calls made inside are added to ``begun``."""
        outer, self._begun = self._begun, begun
        try:
            yield
        finally:
            self._begun = outer

    @contextmanager
    def again(self, begun: list[Call]) -> Iterator[None]:
        """Calls made inside are part of a recompute, and recomputing ones repeat ``begun`` in order."""
        outer = self._again, self._repeated, self._begun
        self._again, self._repeated, self._begun = True, iter(begun), []
        try:
            yield
        finally:
            self._again, self._repeated, self._begun = outer

    def _checkpoint(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``mx.checkpoint`` while a step is captured."""
        name = getattr(function, "__qualname__", type(function).__name__)
        return functools.wraps(function)(self._recomputing("checkpoint", name, function, self._real[0]))

    def _custom_function(self, function: Callable[..., Any]) -> Any:
        """``mx.custom_function`` while a step is captured."""
        name = getattr(function, "__qualname__", "custom_function")
        return self._recomputing("custom_function", name, function, self._real[1])

    def _made_before(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The call of a custom function that was made before the capture began, as ``@mx.custom_function`` makes it."""

        def __call__(custom: Any, *args: Any, **kwargs: Any) -> Any:
            if any(custom is made for made in self.made):
                return original(custom, *args, **kwargs)
            # What the garbage collector sees of it: its type, the function, and what was given beside that.
            function, *transforms = gc.get_referents(custom)[1:]
            again = self._custom_function(function)
            for transform in transforms:
                again.transforms["vjp" if _is_vjp(transform) else "jvp"] = transform
            return again(*args, **kwargs)

        return __call__

    def _recomputing(
        self, kind: str, name: str, function: Callable[..., Any], real: Callable[..., Any]
    ) -> _Recomputing:
        if self.recompute == "real":
            return _Recomputed(self, kind, name, function, real)
        return _RunPlainly(self, kind, name, function)

    def _compiled_calls(self, transformed: list[Any]) -> AbstractContextManager[None]:
        """Watches the calls of compiled functions, and those of gradients, in which they are plain code."""
        made_before = {id(f): (f, _Transformed(self, f)) for f in transformed}
        makers: dict[int, tuple[Any, Any]] = {}
        for name in TRANSFORMS:
            maker = getattr(mx, name)
            makers[id(maker)] = (maker, functools.wraps(maker)(_Maker(self, maker)))
        for name in ("vjp", "jvp"):
            call = getattr(mx, name)
            makers[id(call)] = (call, functools.wraps(call)(_Transformed(self, call)))
        return _replaced({**made_before, **makers})

    @contextmanager
    def transforming(self, call: Call) -> Iterator[None]:
        """Inside, a function is differentiated or compiled with respect to the call's arrays."""
        self._transforming.append(call)
        try:
            yield
        finally:
            self._transforming.pop()

    def transformed_call(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Calls what ``mx.compile`` or a gradient made of a function."""
        compiled = compiled_parts(function)
        if compiled is None:
            call = Call("transform", type(function).__name__, self._block)
            call.again = self._again
            self.calls.append(call)
            self.watch((args, kwargs), call, call.entering)
            with self.transforming(call):
                return function(*args, **kwargs)
        inner, captured, left = compiled
        if any(call.kind == "compile" for call in self._transforming):
            return function(*args, **kwargs)
        call = Call("compile", getattr(inner, "__qualname__", "compiled"), self._block)
        call.again = self._again
        call.arguments = {"within": tuple(self._transforming)}
        self.calls.append(call)
        self.watch((args, kwargs, _plain_tree(captured)), call, call.entering)
        with self.transforming(call):
            returned = function(*args, **kwargs)
        self.watch((returned, _plain_tree(left)), call, call.leaving)
        return returned

    def _apply_gradients(self, original: Callable[..., Any]) -> Callable[..., Any]:
        depth = 0

        @functools.wraps(original)
        def apply_gradients(optimizer: Any, gradients: Any, parameters: Any) -> Any:
            nonlocal depth
            if depth == 0:
                call = Call("gradients", type(optimizer).__name__)
                self.calls.append(call)
                gradients = self.watch(gradients, call, call.entering)
                call.arguments["names"] = [pair[0] for pair in tree_flatten(gradients)]
            depth += 1
            try:
                return original(optimizer, gradients, parameters)
            finally:
                depth -= 1

        return apply_gradients


class _Transformed:
    """What ``mx.compile`` or a gradient made of a function, its calls watched."""

    def __init__(self, tags: Tags, function: Any):
        self._tags, self._function = tags, (function,)  # in a tuple, where nothing is replaced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tags.transformed_call(self._function[0], args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function[0], name)


class _Maker:
    """``mx.compile``, ``mx.grad``, ...: what it makes while a step is captured is watched too."""

    def __init__(self, tags: Tags, maker: Any):
        self._tags, self._maker = tags, (maker,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _Transformed(self._tags, self._maker[0](*args, **kwargs))


def _plain_tree(tree: Any) -> Any:
    """Modules as dictionaries, so that their arrays are found."""
    return [*leaves(tree)]


def _made_of(arguments: list[mx.array], like: mx.array) -> mx.array:
    """An array like another one, made of the arguments by moving them alone."""
    if not arguments or not mx.issubdtype(like.dtype, mx.inexact) or not like.size:
        return like
    flat = mx.concatenate([a.reshape(-1).astype(like.dtype) for a in arguments])
    return mx.concatenate([flat] * -(-like.size // flat.size))[: like.size].reshape(like.shape)


def _is_vjp(transform: Callable[..., Any]) -> bool:
    """A VJP takes primals, cotangents and outputs; a JVP or a vmap rule takes two."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(transform).parameters.values()
    return sum(p.kind in kinds for p in parameters) >= 3 or any(
        p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters
    )


class _Recomputing:
    """What ``mx.checkpoint`` or ``mx.custom_function`` made of a function."""

    def __init__(self, tags: Tags, kind: str, name: str, function: Callable[..., Any]):
        self.tags, self.kind, self.name, self.function = tags, kind, name, function
        self.transforms: dict[str, Callable[..., Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    @property
    def own_vjp(self) -> Callable[..., Any] | None:
        """A VJP that is the user's, and does not only run the function again."""
        vjp = self.transforms.get("vjp")
        return None if vjp is None or vjp.__module__.startswith("oomguard.") else vjp

    def vjp(self, function: Callable[..., Any]) -> Callable[..., Any]:
        self.transforms["vjp"] = function
        return function

    def jvp(self, function: Callable[..., Any]) -> Callable[..., Any]:
        self.transforms["jvp"] = function
        return function

    def vmap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        self.transforms["vmap"] = function
        return function


class _Recomputed(_Recomputing):
    """MLX recomputes it: every call but that of the forward is watched as one of a recompute."""

    def __init__(
        self, tags: Tags, kind: str, name: str, function: Callable[..., Any], real: Callable[..., Any]
    ):
        super().__init__(tags, kind, name, function)
        self._real = (real,)  # in a tuple, where ``_everywhere`` does not look

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # One transformed function for each call, so that a recompute is known to be of that call.
        tags, function = self.tags, self.function
        begun: list[Call] = []
        runs = iter((tags.forward,))

        def called(*args: Any, **kwargs: Any) -> Any:
            with next(runs, tags.again)(begun):
                return function(*args, **kwargs)

        call = tags.recomputing_call(self.kind, self.name)
        real = self._real[0](called)
        tags.made.append(real)
        for name, transform in self.transforms.items():
            getattr(real, name)(self._watched(name, transform, call, begun))
        return tags.run(real, call, args, kwargs)

    def _watched(
        self, name: str, transform: Callable[..., Any], call: Call, begun: list[Call]
    ) -> Callable[..., Any]:
        def watched(primals: Any, *others: Any, **kwargs: Any) -> Any:
            with self.tags.again(begun):
                if name != "vjp" or self.own_vjp is None:
                    return transform(primals, *others, **kwargs)
                cotangents, outputs = others
                return self.tags.run_vjp(transform, call, primals, cotangents, outputs, kwargs)

        return watched


class _RunPlainly(_Recomputing):
    """It runs as plain code."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tags, vjp = self.tags, self.own_vjp
        if vjp is not None:
            tags.own_vjps.append(self.name)
        if tags.recompute == "plain":
            return self.function(*args, **kwargs)
        call = tags.recomputing_call(self.kind, self.name)
        if vjp is None or tags.recompute == "by rule":
            return tags.run(self._joined, call, args, kwargs)
        return self._with_vjp(vjp, call, args, kwargs)

    def _with_vjp(self, vjp: Callable[..., Any], call: Call, args: Any, kwargs: Any) -> Any:
        """Results whose gradients have the shapes that the VJP gives, and read what it reads.

        The function and the VJP are run for the shapes and arguments of what the real step runs; the step goes on
        with arrays made of the arguments alone, since nothing is known of the function's own derivative.
        """
        tags = self.tags
        call.again = tags.in_recompute
        tags.calls.append(call)
        args, kwargs = tags.watch((args, kwargs), call, call.entering)
        returned = self.function(*args, **kwargs)
        arguments = [a for a in leaves((args, kwargs)) if mx.issubdtype(a.dtype, mx.inexact)]
        marked = tags.watch(returned, call, call.leaving, lambda array: _made_of(arguments, array))
        primals, cotangents = args[0] if len(args) == 1 else args, map_leaves(returned, mx.zeros_like)
        tags.run_vjp(vjp, call, primals, cotangents, returned, kwargs)
        return marked

    def _joined(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns; of several arrays each is differentiated where one is, from zeros if need be."""
        returned = self.function(*args, **kwargs)
        arrays = list(leaves(returned))
        if len(arrays) < 2:
            return returned
        joined = iter(mx.depends(arrays, [mx.array(0)]))
        return map_leaves(returned, lambda _: next(joined))


@contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def checkpointed_functions() -> list[Any]:
    """Functions that ``mx.checkpoint`` wrapped before the capture began.

    MLX's transformed functions are all of one type. Those that keep nothing but the function they wrap come from
    ``mx.checkpoint``, ``mx.grad`` or ``mx.value_and_grad``; called with nothing, a gradient complains of its own,
    and the others hand the call on.
    """
    with collector_paused():
        return [o for o in gc.get_objects() if type(o) is TRANSFORMED and _is_checkpoint(o)]


class _HandedOn(Exception):
    """The call of a transformed function got as far as the function it wraps."""


def _is_checkpoint(function: Any) -> bool:
    """Called with nothing, under a profiler that ends the call before a line of the user's function runs."""
    parts = gc.get_referents(function)
    code = _code_of(parts[1]) if len(parts) == 2 else None
    if code is None:
        return False

    def end(frame: types.FrameType, event: str, _: Any) -> None:
        # Of this code alone: a collection of garbage may begin here too, and call what others have hung on it.
        if event == "call" and frame.f_code is code:
            raise _HandedOn

    before = sys.getprofile()
    sys.setprofile(end)
    try:
        function()
    except (_HandedOn, TypeError):  # a TypeError is that the function misses its arguments
        return True
    except Exception:
        return False
    finally:
        sys.setprofile(before)
    return False


def _code_of(wrapped: Any) -> types.CodeType | None:
    """What a profiler sees begin where an object is called; None where that is no Python."""
    while is_a(wrapped, types.MethodType, functools.partial):
        wrapped = wrapped.__func__ if is_a(wrapped, types.MethodType) else wrapped.func
    if not is_a(wrapped, types.FunctionType):
        wrapped = class_attribute(wrapped, "__call__")
    return wrapped.__code__ if is_a(wrapped, types.FunctionType) else None


@contextmanager
def _nothing_compiles() -> Iterator[None]:
    """Compiled functions run as plain code, also on arrays that are not traced: a fused kernel cannot be exported."""
    calls = 0

    @mx.compile
    def probe(array: mx.array) -> mx.array:
        nonlocal calls
        calls += 1
        return array

    for _ in range(2):
        probe(mx.array(0))
    if calls > 1:  # so they do already
        yield
        return
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()


def transformed_functions(besides: list[Any]) -> list[Any]:
    """Functions that MLX made of others before the capture began: compiled, differentiated, mapped."""
    others = {id(o) for o in besides}
    return [o for o in gc.get_objects() if type(o) is TRANSFORMED and id(o) not in others]


def _everywhere(original: Any, replacement: Any) -> AbstractContextManager[None]:
    """Replaces an object in every dictionary and closure that refers to it."""
    return _replaced({id(original): (original, replacement)})


@contextmanager
def _replaced(objects: dict[int, tuple[Any, Any]]) -> Iterator[None]:
    """Replaces objects, by their ``id``, in every dictionary and closure that refers to them."""
    undo: list[Callable[[], None]] = []
    for referrer in gc.get_referrers(*(pair[0] for pair in objects.values())):
        if is_a(referrer, dict):
            # A loop, not a comprehension: that would put an original itself in a closure to be replaced.
            for key, value in list(dict.items(referrer)):
                if id(value) in objects:
                    put = functools.partial(methods_of(referrer).__setitem__, referrer, key)
                    put(objects[id(value)][1])
                    undo.append(functools.partial(put, value))
        elif is_a(referrer, types.CellType) and id(referrer.cell_contents) in objects:
            undo.append(functools.partial(setattr, referrer, "cell_contents", referrer.cell_contents))
            referrer.cell_contents = objects[id(referrer.cell_contents)][1]
    try:
        yield
    finally:
        for action in undo:
            action()
