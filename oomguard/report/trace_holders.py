"""What is alive in a step, named and grouped: ``32 x blocks.*.mlp.up saved AddMM output, 16.8 MiB each``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from oomguard.report.words import SHORT_DTYPES
from oomguard.units import format_bytes

if TYPE_CHECKING:
    from oomguard.trace.result import Holder

NO_MODULE = "outside the modules"
_NUMBER = re.compile(r"(?<![^.])\d+(?![^. ])")
_STATES = {
    "parameters": "parameter",
    "optimizer state": "optimizer state",
    "batch": "of the batch",
    "other state": "kept between steps",
    "constants": "constant",
    "saved tensors": "saved",
    "gradients": "gradient",
    "copies": "copy",
    "in-flight window": "in-flight",
    "recompute": "recomputed",
}


@dataclass(frozen=True)
class HolderGroup:
    """Buffers of one size that are the same in every block.

    Attributes:
        name: of the array or module; a number that differs among them is a ``*``.
        what: what they are: ``saved AddMM output``, ``parameter``.
        count, nbytes: how many, and the bytes of each.
        category: one of the trace's categories.
        form: shape and dtype of the first: ``(8, 256, 1024) fp32``; empty for scratch space.
    """

    name: str
    what: str
    count: int
    nbytes: int
    category: str
    form: str

    @property
    def total_bytes(self) -> int:
        return self.count * self.nbytes

    def __str__(self) -> str:
        each = f"{format_bytes(self.nbytes)} each" if self.count > 1 else format_bytes(self.nbytes)
        many = f"{self.count} x " if self.count > 1 else ""
        return f"{many}{self.name} {self.what}, {each}"


def group_holders(holders: Iterable[Holder]) -> list[HolderGroup]:
    """Holders grouped over the blocks, the largest sum first; every byte is in one group."""
    groups: dict[tuple[str, str, int], list[Holder]] = {}
    for holder in holders:
        each = holder.nbytes // holder.count
        groups.setdefault((pattern(holder.name), say_what(holder), each), []).append(holder)
    found = [
        HolderGroup(
            name=_common_name([member.name for member in members]),
            what=what,
            count=sum(member.count for member in members),
            nbytes=nbytes,
            category=members[0].category,
            form=say_form(members[0]),
        )
        for (_, what, nbytes), members in groups.items()
    ]
    return sorted(found, key=lambda group: -group.total_bytes)


@cache
def pattern(name: str) -> str:
    """``blocks.*.mlp.up`` for ``blocks.3.mlp.up``: what is the same in every block has the same pattern."""
    return _NUMBER.sub("*", name)


def say_what(holder: Holder) -> str:
    """``saved AddMM output``, ``parameter``, ``in-flight scratch space of Matmul``."""
    state = _STATES.get(holder.category, holder.category)
    if not holder.primitive:
        return state
    if not holder.dtype:
        made = f"scratch space of {holder.primitive}"
        return made if holder.category == "copies" else f"{state} {made}"
    if holder.category in ("parameters", "optimizer state"):
        return f"new {state}"
    if holder.category == "other state":
        return f"{holder.primitive} output {state}"
    if holder.category == "gradients" and holder.name.endswith(" gradient"):
        return f"{holder.primitive} output"
    return f"{state} {holder.primitive} output"


def say_form(holder: Holder) -> str:
    """``(8, 256, 1024) fp32``, ``scalar int32``; empty for scratch space."""
    if not holder.dtype:
        return ""
    shape = f"({', '.join(map(str, holder.shape))})" if holder.shape else "scalar"
    return f"{shape} {SHORT_DTYPES.get(holder.dtype, holder.dtype)}"


def _common_name(names: list[str]) -> str:
    """The name, with a ``*`` for each number that is not the same in all."""
    numbers = [_NUMBER.findall(name) for name in names]
    same = iter([values[0] if len(set(values)) == 1 else "*" for values in zip(*numbers, strict=True)])
    return _NUMBER.sub(lambda _: next(same), names[0]) or NO_MODULE
