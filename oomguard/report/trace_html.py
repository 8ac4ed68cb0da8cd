"""A trace as one HTML page that needs nothing else: no network, no server, no library.

``trace_page.html``, ``.css`` and ``.js`` beside this file are the page; here the numbers are put into it.
They are written as changes, since a primitive changes one or two of a dozen categories.
"""

from __future__ import annotations

import html
import json
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oomguard.files.writing import Format, marked
from oomguard.report.trace_holders import NO_MODULE, pattern, say_form, say_what
from oomguard.report.trace_report import LabelledTrace, TraceReport
from oomguard.report.trace_text import say_fit, say_machine, say_order, trace_text, ways_out
from oomguard.trace.result import CATEGORIES
from oomguard.units import format_bytes

if TYPE_CHECKING:
    from oomguard.trace.result import Holder, TraceResult

THE_REST = "the rest"
SLIVER = 0.003  # of the peak: a category that never holds more is part of the rest

PAGE_FILE = Format("cannot write page", marked('<meta name="generator" content="oomguard trace">', "page"))

_FOLDER = Path(__file__).parent


def trace_html(report: TraceReport) -> str:
    """The page ``oomguard trace --html`` writes."""
    parts = {
        "title": html.escape(report.title),
        "style": _part("css"),
        "text": html.escape(trace_text(report)),
        "data": _inside_script(json.dumps(page_data(report), separators=(",", ":"))),
        "script": _part("js"),
    }
    page = _part("html")
    for name, text in parts.items():
        before, _, after = page.partition(f"<!--{name}-->")
        page = before + text + after
    return page


def page_data(report: TraceReport) -> dict[str, Any]:
    """What the page's script reads.

    For each run: ``series``, each a flat list of (primitive, bytes) where the bytes change, whose sum is what
    is active; ``moments``, for each primitive four numbers: what it is, its phase and its module (numbers of
    ``strings``), its block; ``owners``, what buffers hold; ``spans``, four numbers each: an owner, bytes, and
    the primitives from which and until which (exclusive) it stays.
    """
    names = _series_names(report)
    return {
        "title": report.title,
        "settings": report.settings,
        "machine": say_machine(report),
        "verdict": _verdict(report),
        "fits": report.fits,
        "advice": list(_advice(report)),
        "budget": report.budget_bytes,
        "limit": report.memory_limit_bytes,
        "mlx": report.mlx,
        "series": names,
        "runs": [_run(run, names) for run in report.runs],
    }


def _verdict(report: TraceReport) -> str:
    """Whether the step fits the machine, or why that cannot be said."""
    if report.fits is None:
        return "Held against no budget: how much memory the machine has is not known. --budget SIZE says it."
    most = report.asked.result.most_bytes
    bound = f" (bound by: {report.bound_by})" if report.bound_by else ""
    answer = "Fits" if report.fits else "Does not fit"
    return f"{answer}: {format_bytes(most)} at most, {say_fit(report, most)}{bound}"


def _advice(report: TraceReport) -> Iterator[str]:
    """What to change: where the step does not fit, what would; a better order of evaluation in any case."""
    if report.fits is False:
        yield from (" ".join(text.split()) for text in ways_out(report))
    if (order := report.asked.result.order) is not None:
        said = say_order(order)
        yield f"{said[:1].upper()}{said[1:]}."


def _part(suffix: str) -> str:
    return (_FOLDER / f"trace_page.{suffix}").read_text(encoding="utf-8")


def _inside_script(text: str) -> str:
    """JSON that no text in it can break out of the script element with."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _series_names(report: TraceReport) -> list[str]:
    """The rest, then every category that ever holds more than a sliver, as they are stacked."""
    most = [0] * len(CATEGORIES)
    for run in report.runs:
        for number, values in enumerate(zip(*run.result.timeline.totals, strict=True)):
            most[number] = max(most[number], *values)
    least = SLIVER * max(run.result.peak_bytes for run in report.runs)
    shown = [name for number, name in enumerate(CATEGORIES) if most[number] > least]
    return [THE_REST, *shown] if len(shown) < sum(size > 0 for size in most) else shown


def _run(run: LabelledTrace, names: list[str]) -> dict[str, Any]:
    result = run.result
    table = _Table()
    moments = [
        number
        for moment in result.timeline.moments
        for number in (
            table.add(moment.primitive),
            table.add(moment.phase),
            table.add(moment.scope),
            moment.block,
        )
    ]
    owners = _Table()
    spans = [
        number
        for span in result.timeline.spans
        for number in (owners.add(_owner(span.holder, names)), span.holder.nbytes, span.start, span.end)
    ]
    return {
        "label": run.label,
        "about": run.about,
        "backend": result.backend,
        "mode": result.mode,
        "peak": result.peak_bytes,
        "at": result.moment.index,
        "first": result.first_peak_bytes,
        "sequenced": result.sequenced_peak_bytes,
        "graph": result.graph_peak_bytes,
        "inFlight": result.in_flight_bytes,
        "state": result.state_bytes,
        "largest": result.largest_buffer_bytes,
        "allowed": result.largest_allowed_bytes,
        "tooLarge": result.buffer_fits is False,
        "heldAt": result.memory_limit_bytes if result.waited_at_limit else None,
        "primitives": result.primitives,
        "warnings": list(dict.fromkeys(result.warnings)),
        "series": _series(result, names),
        "strings": table.values,
        "moments": moments,
        "owners": owners.values,
        "spans": spans,
    }


class _Table:
    """Values, each once, and the number of each."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Hashable, int] = {}

    def add(self, value: Hashable) -> int:
        number = self._numbers.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


def _owner(holder: Holder, names: list[str]) -> tuple[str, str, str, str, int, str]:
    """Name, name without its numbers, what it is, shape and dtype, number of the series, what wrote it."""
    series = names.index(holder.category) if holder.category in names else 0
    return (
        holder.name or NO_MODULE,
        pattern(holder.name) or NO_MODULE,
        say_what(holder),
        say_form(holder),
        series,
        holder.primitive,
    )


def _series(result: TraceResult, names: list[str]) -> list[list[int]]:
    columns = dict(zip(CATEGORIES, zip(*result.timeline.totals, strict=True), strict=True))
    shown = {name: columns.get(name, ()) for name in names if name != THE_REST}
    if THE_REST not in names:
        return [_changes(values) for values in shown.values()]
    hidden = [values for name, values in columns.items() if name not in shown]
    rest = [sum(values) for values in zip(*hidden, strict=True)]
    return [_changes(rest), *map(_changes, shown.values())]


def _changes(values: Iterable[int]) -> list[int]:
    """(position, value) wherever the value is another than before, flat."""
    found: list[int] = []
    before: int | None = None
    for position, value in enumerate(values):
        if value != before:
            found += (position, value)
            before = value
    return found
