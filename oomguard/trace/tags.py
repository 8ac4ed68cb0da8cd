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
region, and a later pass gives them back their meaning.
"""

from __future__ import annotations

import copy
import functools
import gc
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten

from oomguard.trace.containers import map_leaves
from oomguard.trace.experts import SORTED_GATHER
from oomguard.trace.lower import CROSS_ENTROPY
from oomguard.trace.places import class_attribute, is_a, methods_of
from oomguard.trace.reach import TRANSFORMED

_FAST = ("cross_entropy", "layer_norm", "rms_norm", "rope", "scaled_dot_product_attention")
FAST = tuple(name for name in _FAST if hasattr(mx.fast, name))
"""The functions of ``mx.fast`` with a derivative; which there are depends on MLX's release."""


EVERY_REGION = frozenset({"block", *(f"fast.{name}" for name in FAST)})
_REDUCTIONS: dict[str, Callable[[mx.array], mx.array]] = {"none": lambda a: a, "mean": mx.mean, "sum": mx.sum}

RECOMPUTING = ("checkpoint", "custom_function")
"""Kinds of regions that a step recomputes by itself."""

ALWAYS_MARKED = frozenset({*RECOMPUTING, SORTED_GATHER})


@dataclass(slots=True)
class Site:
    """One array on its way into or out of a call: its number among those watched, and that of its mark."""

    watched: int
    mark: int | None


@dataclass(eq=False)
class Call:
    """One watched call, with the arrays that went in and that came out, in order."""

    kind: str
    name: str
    block: int = -1
    arguments: dict[str, Any] = field(default_factory=dict)
    entering: list[Site] = field(default_factory=list)
    leaving: list[Site] = field(default_factory=list)


class Tags:
    """Watches and marks arrays, and keeps the calls they belong to in the order the calls began."""

    def __init__(self, modules: dict[int, str], blocks: dict[int, int], marked: frozenset[str]):
        """Args:
        modules: path of a module by ``id``.
        blocks: block index of a module by ``id``, for the layers of the model's layer list.
        marked: kinds of calls to mark, besides those that always are.
        """
        self.modules = modules
        self.blocks = blocks
        self.marked = marked | ALWAYS_MARKED
        self.calls: list[Call] = []
        self.watched: list[mx.array] = []
        self.constants: list[mx.array] = []
        self.stand_ins: list[tuple[str, tuple[Any, ...], mx.array]] = []
        self.warnings: list[str] = []
        self._stack: list[int] = []
        self._block = -1

    def run(self, function: Callable[..., Any], call: Call, args: Any, kwargs: Any) -> Any:
        """Calls the function with what goes in and what comes out watched."""
        self.calls.append(call)
        args, kwargs = self.watch((args, kwargs), call, call.entering)
        return self.watch(function(*args, **kwargs), call, call.leaving)

    def watch(self, tree: Any, call: Call, sites: list[Site]) -> Any:
        """The tree, its arrays marked if the call's kind is; adds a site for each array."""

        def one(array: mx.array) -> mx.array:
            site = Site(len(self.watched), None)
            sites.append(site)
            # Another Python object for the same array: the step may change this one in place.
            self.watched.append(copy.copy(array))
            if call.kind not in self.marked or not array.ndim or not mx.issubdtype(array.dtype, mx.inexact):
                return array
            site.mark = len(self.constants)
            # Never zero-dimensional: equal scalars are merged, and two marks would become one.
            constant = mx.array([site.mark], mx.int32)
            self.constants.append(constant)
            return array * constant.astype(array.dtype)

        return map_leaves(tree, one)

    # -- what is replaced while a step is captured ------------------------------------------------------

    @contextmanager
    def installed(self, module_classes: set[type], wrapped: list[Any]) -> Iterator[None]:
        """Replaces calls by marked ones, everywhere they are referred to, and undoes it on leaving.

        Args:
            module_classes: those whose ``__call__`` is marked.
            wrapped: functions that ``mx.checkpoint`` made before, from ``checkpointed_functions``.
        """
        with ExitStack() as stack:
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
            for function in wrapped:
                stack.enter_context(_everywhere(function, self._checkpoint(gc.get_referents(function)[1])))
            stack.enter_context(_everywhere(mx.custom_function, self._custom_function_class()))
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
        self.stand_ins.append(("Contiguous", (allow_col_major,), constant))
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

    def _checkpoint(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            name = getattr(function, "__qualname__", type(function).__name__)
            return self.run(function, Call("checkpoint", name, self._block), args, kwargs)

        return checkpointed

    def _custom_function_class(self) -> Callable[..., Any]:
        tags = self

        class CustomFunction:
            """Runs plainly; remembers that a VJP of its own was given."""

            def __init__(self, function: Callable[..., Any]):
                self.function = function

            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                name = getattr(self.function, "__qualname__", "custom_function")
                return tags.run(self.function, Call("custom_function", name, tags._block), args, kwargs)

            def vjp(self, function: Callable[..., Any]) -> Callable[..., Any]:
                if not function.__module__.startswith("oomguard."):
                    tags.warnings.append(
                        f"the VJP that {getattr(self.function, '__qualname__', 'a custom function')} defines is not "
                        "traced; its backward is counted as automatic differentiation builds it"
                    )
                return function

            def jvp(self, function: Callable[..., Any]) -> Callable[..., Any]:
                return function

            def vmap(self, function: Callable[..., Any]) -> Callable[..., Any]:
                return function

        return CustomFunction

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
    return [o for o in gc.get_objects() if type(o) is TRANSFORMED and _is_checkpoint(o)]


class _HandedOn(Exception):
    """The call of a transformed function got as far as the function it wraps."""


def _is_checkpoint(function: Any) -> bool:
    """Called with nothing, under a profiler that ends the call before a line of the user's function runs."""
    parts = gc.get_referents(function)
    if len(parts) != 2 or _runs_no_python(parts[1]):
        return False
    here = sys._getframe()

    def end(frame: types.FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_back is here:
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


def _runs_no_python(wrapped: Any) -> bool:
    """Whether a profiler would not see it begin: it is neither a function nor an object with a ``__call__``."""
    while is_a(wrapped, types.MethodType, functools.partial):
        wrapped = wrapped.__func__ if is_a(wrapped, types.MethodType) else wrapped.func
    return not is_a(wrapped, types.FunctionType) and not is_a(
        class_attribute(wrapped, "__call__"), types.FunctionType
    )


@contextmanager
def _everywhere(original: Any, replacement: Any) -> Iterator[None]:
    """Replaces an object in every dictionary and closure that refers to it."""
    undo: list[Callable[[], None]] = []
    for referrer in gc.get_referrers(original):
        if is_a(referrer, dict):
            # A loop, not a comprehension: that would put ``original`` itself in a closure to be replaced.
            for key, value in list(dict.items(referrer)):
                if value is original:
                    put = functools.partial(methods_of(referrer).__setitem__, referrer, key)
                    put(replacement)
                    undo.append(functools.partial(put, original))
        elif is_a(referrer, types.CellType) and referrer.cell_contents is original:
            referrer.cell_contents = replacement
            undo.append(functools.partial(setattr, referrer, "cell_contents", original))
    try:
        yield
    finally:
        for action in undo:
            action()
