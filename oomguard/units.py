"""Bytes in and out: integers inside, binary units on screen, both kinds read from a user."""

from __future__ import annotations

import math
import re
from decimal import Decimal

from oomguard.errors import InputError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "pb": 10**15,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
    "pib": 1 << 50,
    "k": KIB,
    "m": MIB,
    "g": GIB,
    "t": TIB,
}
_ROUNDS_UP = 1023.95 / 1024  # what would show as 1024.0 of a unit is 1.0 of the next
_SIZE = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?|\.\d+)\s*(?P<unit>[a-zA-Z]*)\s*")


class NoUnitError(InputError):
    """A size as a text without a unit, and what to write: each unit that gives no more than a machine has."""

    def __init__(self, text: str, number: str) -> None:
        sizes = [
            f"{number}{unit}"
            for unit in ("GB", "GiB", "MiB")
            if Decimal(number) * _UNITS[unit.lower()] <= 64 * TIB
        ]
        self.number = number
        self.suggestion = ", ".join(
            [*sizes, f"or {number}B for bytes"] if sizes else [f"{number}B for bytes"]
        )
        super().__init__(f"{_shortened(text)!r} has no unit; write {self.suggestion}")


def parse_bytes(text: str | int) -> int:
    """A size as a person writes it, in bytes.

    Args:
        text: ``"16GB"`` (10^9), ``"16GiB"`` or ``"16G"`` (2^30), ``"512MiB"``, ``"1000B"``; or, as an integer, bytes.
            A text without a unit is refused but for ``"0"``: who writes 32 seldom means 32 bytes.

    Returns:
        The size in bytes, rounded down to a whole byte.

    Raises:
        InputError: not a number with a known unit, no unit, negative, or more than 64 bits can address.
    """
    match = _SIZE.fullmatch(str(text))
    if match is None or match["unit"].lower() not in _UNITS:
        raise InputError(f"{_shortened(str(text))!r} is not a size; write it as 16GB, 16GiB or 512MiB")
    size = Decimal(match["number"]) * _UNITS[match["unit"].lower()]
    if size >= 1 << 63:
        raise InputError(f"{_shortened(str(text))!r} is more memory than a machine can address")
    if isinstance(text, str) and not match["unit"] and size:
        raise NoUnitError(text, match["number"])
    return int(size)


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."


def format_bytes(size_bytes: int | float) -> str:
    """``12.3 GiB``, ``512.0 MiB``, ``3.0 KiB`` or ``17 B``: one decimal, the largest unit that fits."""
    magnitude = abs(size_bytes)
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if magnitude >= unit * _ROUNDS_UP:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{int(size_bytes)} B"


def format_seconds(seconds: float) -> str:
    """``1.2 s``, ``340 ms``, ``4 min 10 s`` or ``2 h 5 min``."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def round_up(value: int, multiple: int) -> int:
    """``value`` rounded up to a whole number of ``multiple``."""
    return -(-value // multiple) * multiple
