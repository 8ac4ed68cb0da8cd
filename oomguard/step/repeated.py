"""A sequence of which most items are alike: what only repeats is counted, not walked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, overload

Item = TypeVar("Item")


@dataclass(frozen=True)
class Repeated(Sequence[Item], Generic[Item]):
    """``total`` items, three at least: the first, alike ones ``between``, and the last."""

    first: Item
    between: Item
    last: Item
    total: int

    def __len__(self) -> int:
        return self.total

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | Sequence[Item]:
        if isinstance(index, slice):
            return [self[i] for i in range(self.total)[index]]
        position = range(self.total)[index]
        if position == 0:
            return self.first
        return self.last if position == self.total - 1 else self.between

    def kinds(self) -> Iterator[tuple[int, Item, int]]:
        """Each kind once: the position of its first item, the item, and how many there are."""
        yield 0, self.first, 1
        yield 1, self.between, self.total - 2
        yield self.total - 1, self.last, 1
