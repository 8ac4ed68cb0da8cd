"""What a step reaches: its closure, the globals it names, what it is bound to. Nothing of it is called."""

from __future__ import annotations

import functools
import gc
import sys
import types
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from oomguard.trace.places import (
    Cell,
    Entry,
    Place,
    attributes,
    class_attribute,
    entries,
    is_a,
    is_container,
)

DEPTH = 4
"""Containers and functions looked into, one inside the other; ``nn.value_and_grad`` alone wraps one in two."""

TRANSFORMED = type(mx.grad(lambda x: x))
"""What ``mx.grad``, ``mx.value_and_grad``, ``mx.compile``, ``mx.vmap`` and ``mx.checkpoint`` give: one type for all."""

WIDTH = 4096
"""Entries of a container looked at: more than any state has, and not all of a data set."""

_NAMESPACES_OF_OTHERS = frozenset({*sys.stdlib_module_names, "mlx", "numpy"}) - {"__main__"}


@dataclass(frozen=True)
class Reached:
    """An array a step reaches otherwise than through a module or an optimizer; ``place`` is None if it is fixed."""

    name: str
    place: Place | None
    array: mx.array


@dataclass
class Reach:
    """What was found, in the order met.

    Attributes:
        objects: modules, optimizers and compiled functions.
        arrays: arrays that hang elsewhere.
        containers: dictionaries, lists and plain objects that were looked into.
        variables: the variables of closures and modules that were looked at.
    """

    objects: list[Any] = field(default_factory=list)
    arrays: list[Reached] = field(default_factory=list)
    containers: list[Any] = field(default_factory=list)
    variables: list[Place] = field(default_factory=list)


def reach(function: Any) -> Reach:
    """Everything a step reaches."""
    walk = _Walk()
    walk.visit(function, DEPTH, "", None)
    return walk.reach


class _Walk:
    def __init__(self) -> None:
        self.reach = Reach()
        self.seen: dict[
            int, Any
        ] = {}  # keeps what it has seen: an id is good only as long as its object lives
        self.places: set[tuple[Any, ...]] = set()
        self.names: frozenset[str] = frozenset()

    def visit(self, value: Any, depth: int, path: str, place: Place | None) -> None:
        if is_a(value, mx.array):
            self._array(value, path, place)
        elif is_a(value, types.ModuleType):
            if depth >= 0 and not _is_of_others(attributes(value)):
                self._variables(attributes(value), depth - 1)
        elif id(value) not in self.seen and depth >= 0:
            self.seen[id(value)] = value
            self._look_into(value, depth, path, place)

    def _array(self, array: mx.array, path: str, place: Place | None) -> None:
        """An array counts once for each place it hangs in, and once if it hangs in none."""
        key = place.key if place is not None else (id(array), "fixed")
        if key not in self.places:
            self.places.add(key)
            self.reach.arrays.append(Reached(path, place, array))

    def _look_into(self, value: Any, depth: int, path: str, place: Place | None) -> None:
        if is_a(value, nn.Module, optim.Optimizer):
            self.reach.objects.append(value)
        elif is_a(value, functools.partial):
            for inner in (value.func, *value.args, *value.keywords.values()):
                self.visit(inner, depth, path, None)
        elif is_a(value, types.MethodType):
            self.visit(value.__self__, depth - 1, path, None)
            self.visit(value.__func__, depth, path, None)
        elif is_a(value, types.FunctionType):
            self._function(value, depth)
        elif type(value) is TRANSFORMED:
            self._transformed(value, depth)
        elif is_container(value):
            self._container(value, depth, path, place)

    def _container(self, value: Any, depth: int, path: str, place: Place | None) -> None:
        self.reach.containers.append(value)
        for name, inner_place, inner in entries(value, place)[:WIDTH]:
            self.visit(inner, depth - 1, f"{path}.{name}" if path else name, inner_place)
        if depth == DEPTH and is_a(call := class_attribute(value, "__call__"), types.FunctionType):
            self.visit(call, depth, path, None)  # the step itself is an object that can be called

    def _transformed(self, function: Any, depth: int) -> None:
        parts = compiled_parts(function)
        if parts is not None:
            self.reach.objects.append(function)
            self.visit(parts[0], depth, "", None)
            return
        for inner in gc.get_referents(function)[1:]:
            self.visit(inner, depth, "", None)

    def _function(self, function: types.FunctionType, depth: int) -> None:
        outer, self.names = self.names, _names(function.__code__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            variable = Cell(cell)
            self.reach.variables.append(variable)
            self.visit(variable.get(), depth - 1, name, variable)
        if not _is_of_others(function.__globals__):
            self._variables(function.__globals__, depth - 1)
        for inner in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.visit(inner, depth - 1, "", None)
        self.names = outer

    def _variables(self, namespace: dict[str, Any], depth: int) -> None:
        """Those variables of a module that the function looked into names."""
        for name in sorted(self.names):
            variable = Entry(namespace, name)
            self.reach.variables.append(variable)
            self.visit(variable.get(), depth, name, variable)


def _names(code: types.CodeType) -> frozenset[str]:
    """The globals and attributes that a function and those written inside it name."""
    inner = [_names(const) for const in code.co_consts if type(const) is types.CodeType]
    return frozenset(code.co_names).union(*inner)


def _is_of_others(namespace: dict[str, Any]) -> bool:
    """Whether the globals are those of a module that keeps no state of a user's."""
    name = dict.get(namespace, "__name__")
    return type(name) is str and name.partition(".")[0] in _NAMESPACES_OF_OTHERS


def compiled_parts(function: Any) -> tuple[Any, Any, Any] | None:
    """(inner function, captured inputs, captured outputs) of an ``mx.compile`` result, else None.

    MLX has no accessor; the garbage collector's view of the object is (type, inputs, outputs, function).
    """
    if type(function) is not TRANSFORMED:
        return None
    parts = gc.get_referents(function)
    if len(parts) != 4 or _holds_numbers(parts[1]) or _holds_numbers(parts[2]):
        return None
    return parts[3], parts[1], parts[2]


def _holds_numbers(value: Any) -> bool:
    """Whether it is the axes of an ``mx.vmap``, which looks like an ``mx.compile`` from here."""
    if is_a(value, list, tuple):
        return any(_holds_numbers(inner) for inner in value)
    return is_a(value, int)
