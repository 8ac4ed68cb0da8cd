"""What a step keeps between calls: found, filled with placeholders, and given back exactly as it was.

MLX keeps a training run's arrays in modules (dictionaries), optimizer states, lists and the global random
state; people keep theirs in dictionaries and objects of their own as well. A capture replaces every array in
them, runs the step, reads what the step left, and restores.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from oomguard.errors import TraceError
from oomguard.trace.graph import Kind
from oomguard.trace.places import (
    MISSING,
    Place,
    Position,
    attributes,
    class_attribute,
    entries,
    is_a,
    is_container,
    is_plain_object,
    methods_of,
    namespaces,
    slots,
)

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes)


RANDOM_STATE = "random state"
"""The name of the key that ``mx.random`` draws from."""

StateKey = tuple[str, int]
"""An array of the state from call to call: its name, and how many of that name came before it."""


class _HasName(Protocol):
    @property
    def name(self) -> str: ...


Named = TypeVar("Named", bound=_HasName)


@dataclass(frozen=True)
class Leaf:
    """An array of the state: where it hangs, what it is and what to call it.

    ``place`` is None for an array that hangs in nothing that could be given another one in its stead.
    """

    place: Place | None
    kind: Kind
    name: str
    array: mx.array


def leaves(tree: Any) -> Iterator[mx.array]:
    """The arrays of a tree of lists, tuples and dictionaries, in the order ``mx.eval`` flattens it."""
    if is_a(tree, mx.array):
        yield tree
    elif tree is mx.random.state:
        yield mx.random.state[0]
    elif is_a(tree, dict, list, tuple):
        for _, _, value in entries(tree):
            yield from leaves(value)


def random_keys() -> list[mx.array]:
    """The list of one key that ``mx.random`` draws from; ``mx.random.state`` is only a view of it by now."""
    view: Any = mx.random.state
    keys: list[mx.array] = view if isinstance(view, list) else iter(view).__reduce__()[1][0]
    return keys


def map_leaves(tree: Any, function: Callable[[mx.array], Any]) -> Any:
    """The tree with every array replaced; what is no container is kept as it is."""
    if is_a(tree, mx.array):
        return function(tree)
    if is_a(tree, nn.Module):
        return tree
    if is_a(tree, dict):
        return {key: map_leaves(value, function) for key, value in dict.items(tree)}
    if is_a(tree, tuple) and class_attribute(tree, "_fields") is not MISSING:
        return type(tree)(*(map_leaves(value, function) for value in tree))
    if is_a(tree, list, tuple):
        return type(tree)(map_leaves(value, function) for value in tree)
    return tree


# -- what is given as state --------------------------------------------------------------------------------


def state_tree(item: Any) -> Any:
    """What ``mx.eval`` would be given for an item of ``state``.

    An optimizer stands for its state, and an object of one's own for the arrays in its attributes, in the order
    in which it was given them.
    """
    return _tree(item, {})


def _tree(value: Any, seen: dict[int, Any]) -> Any:
    if value is mx.random.state or is_a(value, nn.Module) or not is_container(value):
        return value
    if is_a(value, optim.Optimizer):
        return value.state
    if id(value) in seen:
        return {}
    seen[id(value)] = value
    inside = [(name, _tree(inner, seen)) for name, _, inner in entries(value)]
    return [tree for _, tree in inside] if is_a(value, list, tuple, deque) else dict(inside)


def check_state(state: Iterable[Any]) -> list[str]:
    """Warnings for what is given as state and is none.

    Raises:
        TraceError: an item in which arrays cannot be found, with what to pass instead.
    """
    warnings = []
    for number, item in enumerate(state):
        if is_a(item, mx.array, optim.Optimizer) or item is mx.random.state or is_container(item):
            if _holds_itself(item, set()):
                raise TraceError(
                    f"state[{number}] is a {type(item).__name__} that holds itself; pass what is in it"
                )
            continue
        if is_a(item, *_CONSTANTS):
            warnings.append(f"state[{number}] is {item!r}, which is no array: nothing is counted for it")
            continue
        raise TraceError(
            f"state[{number}] is a {type(item).__name__}, in which no array can be found; pass the arrays themselves, "
            "or the module, optimizer, dictionary, list or object that holds them"
        )
    return warnings


def _holds_itself(tree: Any, around: set[int]) -> bool:
    """Whether a list, tuple or dictionary is somewhere inside itself, so that nobody could walk it to an end."""
    if not is_a(tree, dict, list, tuple) or tree is mx.random.state:
        return False
    if id(tree) in around:
        return True
    inside = {*around, id(tree)}
    return any(_holds_itself(value, inside) for _, _, value in entries(tree))


def state_leaves(state: list[Any]) -> list[Leaf]:
    """Every array of the state with its name, once for each place it hangs in."""
    found: list[Leaf] = []
    collecting = _Collecting(found)
    for item in state:
        collecting.add(state_root(item), _kind_of(item), "", None)
    return found


def state_root(item: Any) -> Any:
    """The container in which the arrays of an item of ``state`` hang."""
    return item.state if is_a(item, optim.Optimizer) else item


def _kind_of(item: Any) -> Kind:
    if is_a(item, nn.Module):
        return "parameter"
    if is_a(item, optim.Optimizer) or (
        is_a(item, dict) and any(dict.__contains__(item, name) for name in ("states", "step"))
    ):
        return "optimizer"
    if is_plain_object(item) and any(
        class_attribute(item, name) is not MISSING for name in ("update", "apply_gradients", "step")
    ):
        return "optimizer"
    return "state"


class _Collecting:
    def __init__(self, found: list[Leaf]):
        self.found = found
        self.seen: dict[
            int, Any
        ] = {}  # keeps what it has seen: an id is good only as long as its object lives

    def add(self, tree: Any, kind: Kind, path: str, place: Place | None) -> None:
        if is_a(tree, mx.array):
            self.found.append(Leaf(place, kind, path or "state", tree))
        elif tree is mx.random.state:
            keys = random_keys()
            self.found.append(Leaf(Position(keys, 0), "state", RANDOM_STATE, keys[0]))
        elif is_a(tree, optim.Optimizer):
            self.add(tree.state, "optimizer", path, None)
        elif is_container(tree) and id(tree) not in self.seen:
            self.seen[id(tree)] = tree
            inner: Kind = "parameter" if is_a(tree, nn.Module) else kind
            for name, inside, value in entries(tree, place):
                self.add(value, inner, f"{path}.{name}" if path else name, inside)


def keys_of(found: Iterable[Named]) -> dict[StateKey, Named]:
    """Arrays by what tells them from call to call, though the objects they hang in may be new ones."""
    counts: dict[str, int] = {}
    keys: dict[StateKey, Named] = {}
    for each in found:
        number = counts[each.name] = counts.get(each.name, -1) + 1
        keys[each.name, number] = each
    return keys


def container_ids(items: Iterable[Any]) -> set[int]:
    """The ``id`` of every container that the arrays of some objects hang in."""
    collecting = _Collecting([])
    for item in items:
        collecting.add(state_root(item), "state", "", None)
    return set(collecting.seen)


def fill(found: list[Leaf], arrays: list[mx.array]) -> None:
    """Hangs ``arrays`` where the leaves hang."""
    for leaf, array in zip(found, arrays, strict=True):
        if leaf.place is not None:
            leaf.place.set(array)


# -- giving back -------------------------------------------------------------------------------------------


class Snapshot:
    """Remembers containers and objects, and gives each that has changed its contents back."""

    def __init__(self, *roots: Any, shallow: Iterable[Any] = (), variables: Iterable[Place] = ()):
        """Args:
        roots: containers, objects, modules, optimizers: they and all that hangs in them.
        shallow: containers and objects, without what hangs in them.
        variables: single places to be given back what hangs in them now.
        """
        self._contents: list[tuple[Any, list[Any]]] = []
        self._places = [(variable, variable.get()) for variable in variables]
        self._random_key = random_keys()[0]
        # Dictionaries of modules are never emptied, not for a moment: others look things up in them.
        self._seen: dict[int, Any] = {id(namespace): namespace for namespace in namespaces()}
        for root in roots:
            stack = [root]
            while stack:
                stack += self._keep(stack.pop())
        for root in shallow:
            self._keep(root)

    def _keep(self, value: Any) -> list[Any]:
        """Remembers one container or object; returns what hangs in it."""
        if not (is_container(value) or is_a(value, optim.Optimizer)) or id(value) in self._seen:
            return []
        self._seen[id(value)] = value
        children: list[Any] = []
        if is_a(value, dict, list, tuple, deque):
            contents = _contents(value)
            children += [inner for _, inner in contents] if is_a(value, dict) else contents
            if not is_a(value, tuple):
                self._contents.append((value, contents))
        if is_plain_object(value) or is_a(value, nn.Module, optim.Optimizer):
            children += self._keep(attributes(value))
            self._places += [(slot, slot.get()) for _, slot in slots(value)]
            children += [slot.get() for _, slot in slots(value)]
        return children

    def restore(self) -> None:
        """Puts back the contents of every container, in their order, and the attributes of every object."""
        random_keys()[0] = self._random_key
        for container, contents in self._contents:
            if not _same(_contents(container), contents):
                methods = methods_of(container)
                methods.clear(container)
                (methods.update if is_a(container, dict) else methods.extend)(container, contents)
        for place, value in self._places:
            if value is MISSING:
                place.remove()
            elif place.get() is not value:
                place.set(value)


def _contents(container: Any) -> list[Any]:
    methods = methods_of(container)
    return [*(methods.items(container) if is_a(container, dict) else methods.__iter__(container))]


def _same(now: list[Any], before: list[Any]) -> bool:
    """Whether two lists hold the same objects; pairs of them are looked into. Nothing is asked if it is equal."""
    return len(now) == len(before) and all(
        a is b or (type(a) is type(b) is tuple and len(a) == len(b) == 2 and a[0] is b[0] and a[1] is b[1])
        for a, b in zip(now, before, strict=True)
    )
