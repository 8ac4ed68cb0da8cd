"""Recompute instead of save: a checkpoint policy applied to any list of MLX layers.

``checkpoint_layers(model.layers, "every")`` changes those layer objects and no class of theirs: each gets a
subclass of its own, so parameter names, ``isinstance`` and saved weights stay as they were, and ``undo()``
gives the class back. The GPT of this package uses the same function.

What ``mx.checkpoint`` recomputes must come in as an argument, or its gradient is lost (parameters) or
drawn anew (random numbers). So a segment is a function of its parameters, the random state and the inputs,
and returns the random state it leaves, which makes the stream of random numbers that of the model without
checkpointing.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from oomguard.config.policy import CheckpointPolicy, Segment
from oomguard.config.problems import check_type
from oomguard.errors import InputError

Call = tuple[tuple[Any, ...], dict[str, Any]]
Forward = Callable[..., Any]


class CheckpointHandle:
    """Undoes a ``checkpoint_layers``; as a context manager it undoes on leaving.

    Attributes:
        policy: what was applied.
        segments: which layers are recomputed together.
    """

    def __init__(self, policy: CheckpointPolicy, segments: tuple[Segment, ...]):
        self.policy = policy
        self.segments = segments
        self._swapped: list[tuple[nn.Module, type, type]] = []

    def undo(self) -> None:
        """Gives every layer its own class back. A second call does nothing.

        Raises:
            InputError: a layer was wrapped again in between; undo the later wrap first.
        """
        for layer, _, checkpointed in self._swapped:
            if type(layer) is not checkpointed:
                raise InputError(
                    f"a {type(layer).__name__} layer was wrapped again; undo the later wrap first"
                )
        for layer, original, _ in self._swapped:
            _set_class(layer, original)
        self._swapped.clear()

    def __enter__(self) -> CheckpointHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def _swap(self, layer: nn.Module, call: Forward) -> None:
        original = type(layer)
        checkpointed = type(
            original.__name__, (original,), {"__call__": call, "__module__": original.__module__, _MARK: True}
        )
        _set_class(layer, checkpointed)
        self._swapped.append((layer, original, checkpointed))


_MARK = "_oomguard_checkpointed"


def checkpoint_layers(
    layers: Sequence[nn.Module], policy: CheckpointPolicy | str, *, block_to_boundary: float = 32.0
) -> CheckpointHandle:
    """Applies a checkpoint policy to layers that a model calls one after the other.

    Works on any ``mlx.nn.Module`` layers (``model.layers`` of an mlx-lm model), with further arguments
    (masks, keyword arguments, ``cache=None``). Apply it before the first call of a compiled step: later, the
    step is already traced.

    Limits:
        - A layer that keeps state between calls (batch norm statistics) cannot be recomputed.
        - A call with an object that is no array, number or text (a key-value cache) runs without recompute.
        - A stride of 2 and more runs a segment when its *last* layer is called: the layers before return a
          placeholder of their input's shape. So the model must hand each layer's output, one array, straight
          to the next. A layer called out of turn raises; a placeholder used for anything else is NaN.
        - ``attention`` recomputes the calls of ``mx.fast.scaled_dot_product_attention`` inside the layers; a
          layer that makes none raises when it is called.

    Args:
        layers: the layers in the order they are called; the list itself is not changed.
        policy: a ``CheckpointPolicy`` or its text: ``"every"``, ``"stride=4"``, ``"blocks=8"``...
        block_to_boundary: bytes one layer saves over bytes of the tensor between layers, for ``stride=auto``.

    Returns:
        A handle whose ``undo()`` restores the layers.

    Raises:
        InputError: something in ``layers`` is not a module, appears twice, or is already checkpointed.
    """
    policy = policy if isinstance(policy, CheckpointPolicy) else CheckpointPolicy.parse(policy)
    check_type("layers", layers, Iterable, "the list of a model's layers, such as model.layers")
    check_type("block_to_boundary", block_to_boundary, (int, float), "a ratio such as 32.0")
    if not 0 < block_to_boundary < math.inf:
        raise InputError(f"block_to_boundary {block_to_boundary} is no ratio; give one such as 32.0")
    layers = list(layers)
    _check_layers(layers)
    handle = CheckpointHandle(policy, policy.segments(len(layers), block_to_boundary) if layers else ())
    recompute = _bare_recompute if policy.policy == "custom_function" else mx.checkpoint
    for segment in handle.segments:
        members = layers[segment.start : segment.stop]
        if segment.region == "attention":
            handle._swap(members[0], _attention_call(type(members[0]).__call__, segment.start))
        elif len(members) == 1:
            handle._swap(members[0], _single_call(_Region(members, segment.start), recompute))
        else:
            _swap_segment(handle, _Region(members, segment.start), recompute)
    return handle


def _check_layers(layers: list[nn.Module]) -> None:
    seen: dict[int, int] = {}
    for i, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise InputError(f"layer {i} is a {type(layer).__name__}, not an mlx.nn.Module")
        if getattr(type(layer), _MARK, False):
            raise InputError(f"layer {i} ({type(layer).__name__}) is already checkpointed; undo that first")
        if id(layer) in seen:
            raise InputError(
                f"layers {seen[id(layer)]} and {i} are the same object; a shared layer cannot be wrapped"
            )
        seen[id(layer)] = i


def _set_class(layer: nn.Module, cls: type) -> None:
    object.__setattr__(layer, "__class__", cls)


@dataclass
class _Region:
    """Layers that are recomputed together, and their calls from before they were wrapped."""

    layers: list[nn.Module]
    start: int
    forwards: list[Forward] = field(init=False)

    def __post_init__(self) -> None:
        self.forwards = [type(layer).__call__ for layer in self.layers]

    def run(self, calls: list[Call]) -> Any:
        """The layers' own forward; every layer after the first gets the output of the one before."""
        output: Any = None
        for i, (layer, forward, (args, kwargs)) in enumerate(
            zip(self.layers, self.forwards, calls, strict=True)
        ):
            if i > 0:
                if not isinstance(output, mx.array):
                    raise InputError(
                        f"layer {self.start + i - 1} returns a {type(output).__name__}, and a segment of "
                        "several layers needs one array between them; use every or blocks=N"
                    )
                args = (output, *args[1:])
            output = forward(layer, *args, **kwargs)
        return output

    def recompute(self, transform: Callable[[Forward], Forward], calls: list[Call]) -> Any:
        """``run`` under ``transform``, a function of all that gradients and random numbers depend on."""

        def segment(parameters: list[Any], random_key: mx.array, calls: list[Call]) -> tuple[Any, ...]:
            random_key = mx.stop_gradient(random_key)
            with _lent_parameters(self.layers, parameters), _lent_random_state(random_key):
                output = self.run(tree_map(_constant_if_whole, calls))
                left = random_state()[0]
                return (output, left) if left is not random_key else (output,)

        parameters = [layer.trainable_parameters() for layer in self.layers]
        output, *random_key = transform(segment)(parameters, random_state()[0], calls)
        if random_key:
            random_state()[0] = mx.stop_gradient(random_key[0])
        return output


def _constant_if_whole(leaf: Any) -> Any:
    """Integers (tokens, random keys, masks) have no gradient, and drawing from a key has no VJP at all."""
    if isinstance(leaf, mx.array) and not mx.issubdtype(leaf.dtype, mx.inexact):
        return mx.stop_gradient(leaf)
    return leaf


def _single_call(region: _Region, transform: Callable[[Forward], Forward]) -> Forward:
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls = [(args, kwargs)]
        return region.recompute(transform, calls) if _is_transparent(calls) else region.run(calls)

    return __call__


@dataclass
class _Pending:
    """Calls a segment has received, and the placeholder its next layer must be handed."""

    calls: list[Call] = field(default_factory=list)
    placeholder: mx.array | None = None


def _swap_segment(handle: CheckpointHandle, region: _Region, transform: Callable[[Forward], Forward]) -> None:
    pending = _Pending()
    for i, layer in enumerate(region.layers):
        handle._swap(layer, _member_call(region, transform, pending, i))


def _member_call(
    region: _Region, transform: Callable[[Forward], Forward], pending: _Pending, position: int
) -> Forward:
    last = position == len(region.layers) - 1
    layer_number = region.start + position

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if position == 0:
            pending.calls.clear()
        elif len(pending.calls) != position or not args or args[0] is not pending.placeholder:
            pending.calls.clear()
            raise InputError(
                f"layer {layer_number} was not handed what layer {layer_number - 1} returned, so the segment "
                f"from layer {region.start} on cannot be recomputed as one; use every or blocks=N"
            )
        pending.calls.append((args, kwargs))
        if not last:
            pending.placeholder = _placeholder(args, layer_number)
            return pending.placeholder
        calls = list(pending.calls)
        pending.calls.clear()
        pending.placeholder = None
        calls[1:] = [((None, *args[1:]), kwargs) for args, kwargs in calls[1:]]
        return region.recompute(transform, calls) if _is_transparent(calls) else region.run(calls)

    return __call__


def _placeholder(args: tuple[Any, ...], layer_number: int) -> mx.array:
    """Stands for an output that does not exist yet; never evaluated unless the model reads it."""
    x = args[0] if args else None
    if not isinstance(x, mx.array) or not mx.issubdtype(x.dtype, mx.floating):
        raise InputError(
            f"layer {layer_number} needs an array of floats as its first argument to be in a segment of "
            "several layers; use every or blocks=N"
        )
    return mx.full(x.shape, float("nan"), dtype=x.dtype)


def _attention_call(forward: Forward, layer_number: int) -> Forward:
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not _is_transparent([(args, kwargs)]):
            return forward(self, *args, **kwargs)
        with _recomputed_attention() as cores:
            output = forward(self, *args, **kwargs)
        if not cores:
            raise InputError(
                f"layer {layer_number} ({type(self).__name__}) makes no call of "
                "mx.fast.scaled_dot_product_attention to recompute; use every or blocks=N"
            )
        return output

    return __call__


_attention_lock = threading.RLock()


@contextmanager
def _recomputed_attention() -> Iterator[list[None]]:
    """While a layer's graph is built, its attention core is built checkpointed; yields one item per core."""
    cores: list[None] = []
    with _attention_lock:
        original = mx.fast.scaled_dot_product_attention

        def checkpointed(*args: Any, **kwargs: Any) -> mx.array:
            cores.append(None)
            return mx.checkpoint(original)(*args, **kwargs)

        mx.fast.scaled_dot_product_attention = checkpointed
        try:
            yield cores
        finally:
            mx.fast.scaled_dot_product_attention = original


def _bare_recompute(function: Forward) -> Forward:
    """A custom function whose VJP runs ``function`` again, with nothing that orders it after the forward.

    ``mx.compile`` is free to merge the second run with the first where they are equal, which takes back part
    of the saving; ``mx.checkpoint`` has a dependency on the outputs besides. Kept to explain and compare.
    """

    def recomputed(*args: Any) -> Any:
        leaves: list[mx.array] = []
        slots = tree_map(lambda leaf: _slot(leaf, leaves), args)

        def flat(*arrays: mx.array) -> list[mx.array]:
            outputs = function(*tree_map(lambda s: arrays[s.index] if isinstance(s, _Slot) else s, slots))
            if not all(isinstance(output, mx.array) for output in outputs):
                raise InputError("custom_function needs layers that return one array; use every or blocks=N")
            return list(outputs)

        bare = mx.custom_function(flat)

        @bare.vjp
        def vjp(primals: Any, cotangents: list[mx.array], outputs: list[mx.array]) -> list[mx.array]:
            return mx.vjp(flat, list(primals), list(cotangents))[1]

        return bare(*leaves)

    return recomputed


@dataclass(frozen=True)
class _Slot:
    index: int


def _slot(leaf: Any, leaves: list[mx.array]) -> Any:
    if not isinstance(leaf, mx.array):
        return leaf
    leaves.append(leaf)
    return _Slot(len(leaves) - 1)


def _is_transparent(calls: list[Call]) -> bool:
    """Whether every argument is an array or a plain constant, so that a second run sees the same values."""
    plain = (mx.array, str, int, float, bool, type(None))
    leaves: list[Any] = []
    tree_map(leaves.append, calls)
    return all(isinstance(leaf, plain) for leaf in leaves)


@contextmanager
def _lent_parameters(layers: list[nn.Module], parameters: list[Any]) -> Iterator[None]:
    """The layers hold ``parameters`` inside, and their own again after: no tracer stays behind."""
    own = [layer.trainable_parameters() for layer in layers]
    for layer, lent in zip(layers, parameters, strict=True):
        layer.update(lent)
    try:
        yield
    finally:
        for layer, before in zip(layers, own, strict=True):
            layer.update(before)


@contextmanager
def _lent_random_state(random_key: mx.array) -> Iterator[None]:
    """``mx.random`` draws from ``random_key`` inside, and goes on where it was after."""
    state = random_state()
    own = state[0]
    state[0] = random_key
    try:
        yield
    finally:
        state[0] = own


def random_state() -> list[mx.array]:
    """The list of one key that ``mx.random`` draws from.

    MLX once exposed the list itself as ``mx.random.state``; now that is a view that cannot be assigned to,
    and the list is what its iterator walks over.
    """
    view: Any = mx.random.state
    state: list[mx.array] = view if isinstance(view, list) else iter(view).__reduce__()[1][0]
    return state
