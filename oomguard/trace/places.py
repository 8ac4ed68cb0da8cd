"""Where an array hangs: an entry of a container, an attribute of an object, a variable of a closure.

Objects are told apart by their type alone, and read and written as Python itself stores them: no ``__getattr__``,
``__eq__``, ``__iter__``, property or ``__class__`` of a user's runs.
"""

from __future__ import annotations

import argparse
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

MISSING: Any = object()
"""What hangs in a place that is not there any more."""

_CLASS_DICT = type.__dict__["__dict__"]
_CLASS_FLAGS = type.__dict__["__flags__"]
_CLASS_MRO = type.__dict__["__mro__"]
_HEAP_TYPE = 1 << 9  # CPython's Py_TPFLAGS_HEAPTYPE: a class made by a class statement
_HASHED_BY_PYTHON: tuple[type, ...] = (str, int, float, bytes, type(None))
_RECORDS = (types.SimpleNamespace, argparse.Namespace)
"""Classes of the standard library that are there to be filled by others."""


def is_a(value: Any, *kinds: type) -> bool:
    """``isinstance`` by the true type: a ``__class__`` of the object's own is not asked."""
    return issubclass(type(value), kinds)


class Place:
    """What an array can be taken from and hung into. ``key`` is the same for the same place."""

    __slots__ = ()

    @property
    def key(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def get(self) -> Any:
        """What hangs there, ``MISSING`` if nothing does."""
        raise NotImplementedError

    def set(self, value: Any) -> None:
        raise NotImplementedError

    def remove(self) -> None:
        """Makes it ``MISSING``, where it is not already."""


@dataclass(frozen=True, slots=True, eq=False)
class Entry(Place):
    """An entry of a dictionary, also that of a module or of an object's attributes."""

    container: Any
    name: Any

    @property
    def key(self) -> tuple[Any, ...]:
        return id(self.container), self.name

    def get(self) -> Any:
        return dict.get(self.container, self.name, MISSING)

    def set(self, value: Any) -> None:
        methods_of(self.container).__setitem__(self.container, self.name, value)

    def remove(self) -> None:
        methods_of(self.container).pop(self.container, self.name, None)


@dataclass(frozen=True, slots=True, eq=False)
class Position(Place):
    """A position in a list or deque."""

    container: Any
    index: int

    @property
    def key(self) -> tuple[Any, ...]:
        return id(self.container), self.index

    def get(self) -> Any:
        methods = methods_of(self.container)
        if self.index >= methods.__len__(self.container):
            return MISSING
        return methods.__getitem__(self.container, self.index)

    def set(self, value: Any) -> None:
        methods_of(self.container).__setitem__(self.container, self.index, value)


@dataclass(frozen=True, slots=True, eq=False)
class Slot(Place):
    """An attribute that a class keeps in ``__slots__``."""

    owner: Any
    member: Any

    @property
    def key(self) -> tuple[Any, ...]:
        return id(self.owner), id(self.member)

    def get(self) -> Any:
        try:
            return self.member.__get__(self.owner)
        except AttributeError:
            return MISSING

    def set(self, value: Any) -> None:
        self.member.__set__(self.owner, value)

    def remove(self) -> None:
        if self.get() is not MISSING:
            self.member.__delete__(self.owner)


@dataclass(frozen=True, slots=True, eq=False)
class Cell(Place):
    """A variable of a closure."""

    cell: types.CellType

    @property
    def key(self) -> tuple[Any, ...]:
        return (id(self.cell),)

    def get(self) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:
            return MISSING

    def set(self, value: Any) -> None:
        self.cell.cell_contents = value

    def remove(self) -> None:
        if self.get() is not MISSING:
            del self.cell.cell_contents


@dataclass(frozen=True, slots=True, eq=False)
class Element(Place):
    """A position in a tuple: set by putting another tuple in its place."""

    parent: Place
    index: int

    @property
    def key(self) -> tuple[Any, ...]:
        return *self.parent.key, self.index

    def get(self) -> Any:
        whole = self.parent.get()
        if not is_a(whole, tuple) or self.index >= tuple.__len__(whole):
            return MISSING
        return tuple.__getitem__(whole, self.index)

    def set(self, value: Any) -> None:
        whole = self.parent.get()
        items = [*tuple.__iter__(whole)]
        items[self.index] = value
        self.parent.set(tuple.__new__(type(whole), items))


def methods_of(container: Any) -> Any:
    """The built-in class whose methods keep a container consistent, whatever its own class overrides."""
    return next(kind for kind in (OrderedDict, dict, list, deque, tuple) if is_a(container, kind))


def entries(value: Any, place: Place | None = None) -> list[tuple[str, Place | None, Any]]:
    """What a container or plain object holds: name, place and value of each. Nothing for anything else.

    Args:
        place: where the value itself hangs; a tuple's elements can only be set through it.
    """
    if is_a(value, dict):
        return [
            (_label(key, n), Entry(value, key) if _is_builtin(key) else None, inner)
            for n, (key, inner) in enumerate([*dict.items(value)])
        ]
    if is_a(value, list, deque):
        items = [*methods_of(value).__iter__(value)]
        return [(str(n), Position(value, n), inner) for n, inner in enumerate(items)]
    if is_a(value, tuple):
        return [
            (str(n), None if place is None else Element(place, n), inner)
            for n, inner in enumerate(tuple.__iter__(value))
        ]
    if is_plain_object(value):
        named: list[tuple[str, Place | None, Any]] = [*entries(attributes(value))]
        for name, slot in slots(value):
            if (inner := slot.get()) is not MISSING:
                named.append((name, slot, inner))
        return named
    return []


def _label(key: Any, number: int) -> str:
    return str(key) if _is_builtin(key) else f"[{number}]"


def _is_builtin(key: Any) -> bool:
    """Whether looking the key up runs nobody's ``__hash__`` or ``__eq__``."""
    return any(type(key) is kind for kind in _HASHED_BY_PYTHON)


def is_container(value: Any) -> bool:
    """Whether arrays are looked for in it: a dictionary, list, tuple, deque, or plain object."""
    return is_a(value, dict, list, tuple, deque) or is_plain_object(value)


def is_plain_object(value: Any) -> bool:
    """Whether it is an instance of a class somebody wrote to keep things in: not the standard library's, not MLX's."""
    kind = type(value)
    if any(kind is record for record in _RECORDS):
        return True
    if not _CLASS_FLAGS.__get__(kind) & _HEAP_TYPE or issubclass(
        kind, (type, types.ModuleType, dict, list, tuple, deque)
    ):
        return False
    module = _CLASS_DICT.__get__(kind).get("__module__")
    package = module.partition(".")[0] if type(module) is str else ""
    return module != "mlx.core" and package not in sys.stdlib_module_names


def attributes(value: Any) -> dict[str, Any]:
    """The dictionary in which an object keeps its attributes, itself and not a copy; a new one if it has none."""
    for cls in _CLASS_MRO.__get__(type(value)):
        descriptor = _CLASS_DICT.__get__(cls).get("__dict__")
        if type(descriptor) is types.GetSetDescriptorType:
            found: dict[str, Any] = descriptor.__get__(value)
            return found
    return {}


def slots(value: Any) -> Iterator[tuple[str, Slot]]:
    """The attributes that an object's classes keep in ``__slots__``."""
    for cls in _CLASS_MRO.__get__(type(value)):
        inside = _CLASS_DICT.__get__(cls)
        if "__slots__" in inside:
            for name, member in inside.items():
                if type(member) is types.MemberDescriptorType:
                    yield name, Slot(value, member)


def namespaces() -> list[dict[str, Any]]:
    """The dictionaries of all modules, and that of the modules themselves: no containers of anybody's state."""
    modules = [module for module in list(sys.modules.values()) if is_a(module, types.ModuleType)]
    return [sys.modules, *(attributes(module) for module in modules)]


def class_attribute(value: Any, name: str) -> Any:
    """What the object's classes call ``name``, not bound to the object; ``MISSING`` if they have none."""
    for cls in _CLASS_MRO.__get__(type(value)):
        inside = _CLASS_DICT.__get__(cls)
        if name in inside:
            return inside[name]
    return MISSING


def is_array(value: Any) -> bool:
    """Whether it is an MLX array."""
    return is_a(value, mx.array)
