"""How text reports look: 80 columns, sparing colour, tables whose columns line up."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 80


@dataclass(frozen=True)
class Ink:
    """Terminal colours, or none: ``Ink(False)`` returns its text as it is."""

    colour: bool = False

    def _paint(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour and text else text

    def strong(self, text: str) -> str:
        return self._paint("1", text)

    def faint(self, text: str) -> str:
        return self._paint("2", text)

    def good(self, text: str) -> str:
        return self._paint("1;32", text)

    def bad(self, text: str) -> str:
        return self._paint("1;31", text)

    def warn(self, text: str) -> str:
        return self._paint("33", text)


def paragraph(text: str, first: str = "", rest: str | None = None) -> str:
    """``text`` filled to the width, its first line after ``first``, the others after ``rest``."""
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first) if rest is None else rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def table(rows: Sequence[Sequence[str]], align: str, indent: str = "  ") -> list[str]:
    """Rows with their columns lined up.

    Args:
        rows: cells; all rows have the same number of them, plain text without colour.
        align: one ``<`` or ``>`` a column.
        indent: before every row.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(align))]
    return [
        (indent + "  ".join(f"{cell:{a}{w}}" for cell, a, w in zip(row, align, widths, strict=True))).rstrip()
        for row in rows
    ]


def bar(share: float, width: int = 20) -> str:
    """A bar of ``share`` of the width, at least a sliver when there is anything."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    if share > 0:
        eighths = max(1, eighths)
    full, part = divmod(eighths, 8)
    return "█" * full + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[part]
