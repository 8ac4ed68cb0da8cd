"""What a step keeps between calls: found, filled with placeholders, and given back exactly as it was.

MLX keeps a training run's arrays in modules (dictionaries), optimizer states, lists and the global random
state. A capture replaces every array in them, runs the step, reads what the step left, and restores.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from oomguard.trace.graph import Kind


@dataclass(frozen=True)
class Leaf:
    """An array in a container: where it hangs, what it is and what to call it."""

    container: Any
    key: Any
    kind: Kind
    name: str
    array: mx.array


def leaves(tree: Any) -> Iterator[mx.array]:
    """The arrays of a tree of lists, tuples and dictionaries, in the order ``mx.eval`` flattens it."""
    if isinstance(tree, mx.array):
        yield tree
    elif tree is mx.random.state:
        yield mx.random.state[0]
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from leaves(value)


def random_keys() -> list[mx.array]:
    """The list of one key that ``mx.random`` draws from; ``mx.random.state`` is only a view of it by now."""
    view: Any = mx.random.state
    keys: list[mx.array] = view if isinstance(view, list) else iter(view).__reduce__()[1][0]
    return keys


def map_leaves(tree: Any, function: Callable[[mx.array], Any]) -> Any:
    """The tree with every array replaced; what is no container is kept as it is."""
    if isinstance(tree, mx.array):
        return function(tree)
    if isinstance(tree, nn.Module):
        return tree
    if isinstance(tree, dict):
        return {key: map_leaves(value, function) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_leaves(value, function) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(map_leaves(value, function) for value in tree)
    return tree


def state_tree(item: Any) -> Any:
    """What ``mx.eval`` would be given for an item of ``state``: an optimizer stands for its state."""
    return item.state if isinstance(item, optim.Optimizer) else item


def state_leaves(state: list[Any]) -> list[Leaf]:
    """Every array of the state with its name, once for each place it hangs in."""
    found: list[Leaf] = []
    seen: set[int] = set()
    for item in state:
        _collect(state_tree(item), _kind_of(item), "", None, None, found, seen)
    return found


def _kind_of(item: Any) -> Kind:
    if isinstance(item, nn.Module):
        return "parameter"
    if isinstance(item, optim.Optimizer) or (isinstance(item, dict) and ("states" in item or "step" in item)):
        return "optimizer"
    return "state"


def _collect(
    tree: Any, kind: Kind, path: str, container: Any, key: Any, found: list[Leaf], seen: set[int]
) -> None:
    if isinstance(tree, mx.array):
        found.append(Leaf(container, key, kind, path or "state", tree))
    elif tree is mx.random.state:
        keys = random_keys()
        found.append(Leaf(keys, 0, "state", "random state", keys[0]))
    elif isinstance(tree, dict | list | tuple):
        if id(tree) in seen:
            return
        seen.add(id(tree))
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for k, value in list(items):
            inner: Kind = "parameter" if isinstance(tree, nn.Module) else kind
            _collect(value, inner, f"{path}.{k}" if path else str(k), tree, k, found, seen)


def fill(found: list[Leaf], arrays: list[mx.array]) -> None:
    """Hangs ``arrays`` where the leaves hang. Tuples are rebuilt in place of their parents by ``Snapshot``."""
    for leaf, array in zip(found, arrays, strict=True):
        if isinstance(leaf.container, dict):
            dict.__setitem__(leaf.container, leaf.key, array)
        elif isinstance(leaf.container, list):
            leaf.container[leaf.key] = array


class Snapshot:
    """Remembers every container reachable from some objects, and gives each its contents back."""

    def __init__(self, *roots: Any):
        self._saved: list[tuple[Any, Any, dict[str, Any] | None]] = []
        self._seen: set[int] = set()
        for root in roots:
            self._visit(root)
        self._random_key = random_keys()[0]

    def _visit(self, value: Any) -> None:
        if not isinstance(value, dict | list | tuple | optim.Optimizer) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        attributes = dict(vars(value)) if isinstance(value, nn.Module | optim.Optimizer) else None
        if isinstance(value, dict):
            self._saved.append((value, dict(value), attributes))
            children = list(value.values())
        elif isinstance(value, list | tuple):
            children = list(value)
            if isinstance(value, list):
                self._saved.append((value, children, attributes))
        else:
            self._saved.append((value, None, attributes))
            children = []
        for child in children + list((attributes or {}).values()):
            self._visit(child)

    def restore(self) -> None:
        """Puts back the contents of every container, in their order, and the attributes of every object."""
        random_keys()[0] = self._random_key
        for value, contents, attributes in self._saved:
            if attributes is not None:
                vars(value).clear()
                vars(value).update(attributes)
            if isinstance(value, dict):
                dict.clear(value)
                dict.update(value, contents)
            elif isinstance(value, list):
                value[:] = contents


def discover(function: Any) -> list[Any]:
    """Modules, optimizers, arrays and compiled functions a step reaches: closure, globals, what it is bound to.

    Returns them in the order met; looks two functions deep, because ``nn.value_and_grad`` wraps one.
    """
    found: list[Any] = []
    _discover(function, found, set(), depth=4)
    return found


def _discover(value: Any, found: list[Any], seen: set[int], depth: int) -> None:
    if id(value) in seen or depth < 0:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module | optim.Optimizer | mx.array):
        found.append(value)
    elif isinstance(value, functools.partial):
        for inner in (value.func, *value.args, *value.keywords.values()):
            _discover(inner, found, seen, depth)
    elif isinstance(value, list | tuple):
        for inner in value[:64]:
            _discover(inner, found, seen, depth - 1)
    elif isinstance(value, dict):
        for inner in list(value.values())[:64]:
            _discover(inner, found, seen, depth - 1)
    elif hasattr(value, "__self__") and not isinstance(value.__self__, type) and hasattr(value, "__func__"):
        _discover(value.__self__, found, seen, depth - 1)
        _discover(value.__func__, found, seen, depth)
    elif (parts := compiled_parts(value)) is not None:
        found.append(value)
        _discover(parts[0], found, seen, depth)
    elif type(value).__name__ == "_gc_func":
        for inner in gc.get_referents(value)[1:]:
            _discover(inner, found, seen, depth)
    elif hasattr(value, "__code__"):
        _discover_function(value, found, seen, depth)
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        for inner in list(vars(value).values()):
            _discover(inner, found, seen, depth - 1)


def _discover_function(function: Any, found: list[Any], seen: set[int], depth: int) -> None:
    for cell in function.__closure__ or ():
        try:
            inner = cell.cell_contents
        except ValueError:
            continue
        _discover(inner, found, seen, depth - 1)
    for name in function.__code__.co_names:
        if name in function.__globals__:
            _discover(function.__globals__[name], found, seen, depth - 1)
    for inner in (function.__defaults__ or ()) + tuple((function.__kwdefaults__ or {}).values()):
        _discover(inner, found, seen, depth - 1)


def compiled_parts(function: Any) -> tuple[Any, Any, Any] | None:
    """(inner function, captured inputs, captured outputs) of an ``mx.compile`` result, else None.

    MLX has no accessor; the garbage collector's view of the object is (type, inputs, outputs, function).
    """
    if type(function).__name__ != "_gc_func":
        return None
    parts = gc.get_referents(function)
    if len(parts) != 4 or _holds_numbers(parts[1]) or _holds_numbers(parts[2]):
        return None
    return parts[3], parts[1], parts[2]


def _holds_numbers(value: Any) -> bool:
    """Whether it is the axes of an ``mx.vmap``, which looks like an ``mx.compile`` from here."""
    if isinstance(value, list | tuple):
        return any(_holds_numbers(inner) for inner in value)
    return isinstance(value, int)
