"""Arrays a step reaches that hang in no module or optimizer: in a dictionary, a variable, an object of one's own.

Which of them are state shows only when the step has run: what it puts another array in place of is carried from
call to call, the rest stays as it is. And what ``state`` merely lists, while the step finds it in some other place,
is counted where the step finds it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from oomguard.trace.containers import Leaf, StateKey, container_ids, keys_of, leaves, map_leaves, state_leaves
from oomguard.trace.places import Place, is_a
from oomguard.trace.reach import Reach, Reached, reach


@dataclass
class Fixed:
    """An array that is taken to stay, and the places it hangs in; none where it cannot be replaced.

    ``twin`` is the array of the state that it is at first, and stays while the step does not replace that one.
    """

    array: mx.array
    places: dict[StateKey, Place] = field(default_factory=dict)
    twin: StateKey | None = None

    def hang(self) -> None:
        """Puts a copy of the Python object in its places: the step may change one in place (``a += b``)."""
        hanging = copy.copy(self.array)
        for place in self.places.values():
            place.set(hanging)


class Elsewhere:
    """What a step reaches elsewhere, kept from pass to pass of a capture.

    Attributes:
        lists: items of the state that name arrays without being where the step keeps them.
        changing: keys of those that the step replaces.
    """

    def __init__(self, step: Any, found: Reach, state: list[Any], hidden: list[Any]):
        """Args:
        found: what the step reaches.
        state: what it is said to update.
        hidden: modules and optimizers it reaches besides.
        """
        self._step = step
        self.changing: set[StateKey] = set()
        live = {id(container) for container in found.containers}
        plain = [item for item in state if is_a(item, mx.array) or type(item) in (dict, list, tuple)]
        kept = [item for item in (*state, *hidden) if not any(item is other for other in plain)]
        known = {id(leaf.array) for leaf in state_leaves(kept)} | {
            id(r.array) for r in found.arrays if r.place
        }
        self.lists = [item for item in plain if _only_lists(item, live | container_ids(kept), known)]
        own = [item for item in (*state, *hidden) if not self.lists_only(item)]
        hanging = state_leaves(own)
        self._leaf_of = {id(leaf.array): key for key, leaf in keys_of(hanging).items()}
        reached = _besides(found.arrays, hanging)
        self._reached_as = {id(r.array): key for key, r in reached.items() if r.place is not None}
        self._listed = [array for item in self.lists for array in leaves(item)]
        self._twins = {
            key: self._leaf_of[id(r.array)] for key, r in reached.items() if id(r.array) in self._leaf_of
        }
        self._originals = [leaf.array for leaf in hanging]  # kept: an id is good as long as its object lives

    def lists_only(self, item: Any) -> bool:
        return any(item is other for other in self.lists)

    def leaves(self, hanging: list[Leaf]) -> list[Leaf]:
        """The arrays that change, as they are now, besides those that hang in modules, optimizers and the like."""
        now = _besides(reach(self._step).arrays, hanging)
        return [Leaf(r.place, "state", r.name, r.array) for key, r in now.items() if key in self.changing]

    def fixed(self, found: list[Leaf]) -> list[Fixed]:
        """The arrays that stay, each once, as they are now."""
        by_array: dict[int, Fixed] = {}
        for key, r in _besides(reach(self._step).arrays, found).items():
            fixed = by_array.setdefault(id(r.array), Fixed(r.array, twin=self._twins.get(key)))
            if r.place is not None:
                fixed.places[key] = r.place
        for array in self._listed:
            if id(array) not in self._reached_as and id(array) not in self._leaf_of:
                by_array.setdefault(id(array), Fixed(array))
        return list(by_array.values())

    def left(self, found: list[Leaf], fixed: list[Fixed]) -> list[tuple[int, StateKey, mx.array]]:
        """What hangs in the places of fixed arrays after the step: number among ``fixed``, key and array of each.

        Places in which the step has made an array are taken note of: they change.
        """
        now = {key: r for key, r in _besides(reach(self._step).arrays, found).items() if r.place is not None}
        before = {key: number for number, each in enumerate(fixed) for key in each.places}
        self.changing |= now.keys() - before.keys()
        return [(before[key], key, r.array) for key, r in now.items() if key in before]

    def tree(self, tree: Any, now: dict[StateKey, mx.array], reached: dict[StateKey, mx.array]) -> Any:
        """A list of arrays as somebody would write it now, with those that the step has put in their place."""

        def current(array: mx.array) -> mx.array:
            if (key := self._reached_as.get(id(array))) is not None:
                return reached.get(key, array)
            return now.get(self._leaf_of[id(array)], array) if id(array) in self._leaf_of else array

        return map_leaves(tree, current)


def _only_lists(item: Any, live: set[int], known: set[int]) -> bool:
    """Whether an item of the state is an array, or a container the step does not reach, of arrays it does."""
    if is_a(item, mx.array):
        return True
    return not live & container_ids([item]) and any(id(array) in known for array in leaves(item))


def _besides(reached: Iterable[Reached], hanging: list[Leaf]) -> dict[StateKey, Reached]:
    """What is reached, by key, without what hangs in the state."""
    taken = {leaf.place.key for leaf in hanging if leaf.place is not None}
    return {k: r for k, r in keys_of(reached).items() if r.place is None or r.place.key not in taken}
