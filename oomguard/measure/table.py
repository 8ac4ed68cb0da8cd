"""Rows as a table for a person. Returns what ``rich`` draws; prints nothing."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group
from rich.table import Table
from rich.text import Text

from oomguard.measure.task import describe
from oomguard.rows import Row
from oomguard.units import format_bytes, format_seconds

COLUMNS = ("what", "peak", "spread", "sequenced", "step 1", "active", "cache", "a step")
ONLY_WIDE = ("spread", "step 1", "cache")
WIDE = 100


def rows_table(rows: Iterable[Row], width: int = 120) -> Group:
    """One line a row, then the reasons of the failed ones; fewer columns on less than ``WIDE`` characters."""
    shown = [name for name in COLUMNS if width >= WIDE or name not in ONLY_WIDE]
    table = Table(box=None, pad_edge=False)
    for name in shown:
        right = name != "what"
        table.add_column(name, justify="right" if right else "left", overflow="fold", no_wrap=right)
    reasons = []
    for row in rows:
        cells = dict(zip(COLUMNS, [row_label(row), *_cells(row)], strict=True))
        table.add_row(*(Text(cells[name]) for name in shown))
        if row.status == "failed":
            reasons.append(Text.assemble(("failed", "red"), f" {row_label(row)}: {row.reason}"))
    return Group(table, *reasons)


def row_label(row: Row) -> str:
    """What ran, in a few words."""
    if row.model is None or row.step is None:
        return row.case or ""
    return describe(row.model, row.step)


def _cells(row: Row) -> list[str]:
    spread = None
    if row.peak_low_bytes is not None and row.peak_high_bytes is not None:
        spread = row.peak_high_bytes - row.peak_low_bytes
    sizes = (
        row.peak_bytes,
        spread,
        row.sequenced_peak_bytes,
        row.first_peak_bytes,
        row.active_bytes,
        row.cache_bytes,
    )
    seconds = "" if row.step_seconds is None else format_seconds(row.step_seconds)
    return ["" if size is None else format_bytes(size) for size in sizes] + [seconds]
