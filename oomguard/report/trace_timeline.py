"""A trace as Chrome trace event JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Source: "Trace Event Format", Google, 2016: complete (X), counter (C), instant (i) and metadata (M) events.
Time is the order of evaluation: one microsecond a primitive.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from itertools import groupby
from typing import Any

from oomguard.files.writing import Format, marked
from oomguard.report.trace_report import LabelledTrace, TraceReport
from oomguard.trace.result import CATEGORIES, Moment, TraceResult
from oomguard.units import format_bytes

Event = dict[str, Any]

SCHEMA = "oomguard.timeline/1"
TIMELINE_FILE = Format("cannot write timeline", marked(f'"schema": "{SCHEMA}"', "timeline"))
THREADS = {1: "phase", 2: "block", 3: "primitive"}


def timeline_json(report: TraceReport) -> dict[str, Any]:
    """The object of the file ``oomguard trace --timeline`` writes.

    Each simulated step is a process. Its counters are ``active``, one a category that is ever held, and
    ``budget``; its threads show the phases, the blocks and the primitives. An instant marks the peak.
    """
    metadata: list[Event] = []
    events: list[Event] = []
    for pid, run in enumerate(report.runs, start=1):
        metadata += _names(pid, report, run)
        events += _run_events(pid, run, report.budget_bytes)
    return {
        "otherData": {  # first, so that the file is known by its beginning
            "schema": SCHEMA,
            "title": report.title,
            "settings": report.settings,
            "time": "the order of evaluation, one microsecond a primitive",
        },
        "displayTimeUnit": "ns",
        "traceEvents": [*metadata, *sorted(events, key=lambda event: event["ts"])],
    }


def _names(pid: int, report: TraceReport, run: LabelledTrace) -> Iterator[Event]:
    def meta(name: str, tid: int, arguments: dict[str, Any]) -> Event:
        return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": arguments}

    yield meta("process_name", 0, {"name": f"{report.title}: {run.about}"})
    yield meta("process_sort_index", 0, {"sort_index": pid})
    for tid, name in THREADS.items():
        yield meta("thread_name", tid, {"name": name})
        yield meta("thread_sort_index", tid, {"sort_index": tid})


def _run_events(pid: int, run: LabelledTrace, budget_bytes: int | None) -> Iterator[Event]:
    result = run.result
    timeline = result.timeline
    if budget_bytes is not None:
        yield from _counter(pid, "budget", [budget_bytes] * len(timeline.active))
    yield from _counter(pid, "active", timeline.active)
    for number, category in enumerate(CATEGORIES):
        values = [totals[number] for totals in timeline.totals]
        if any(values):
            yield from _counter(pid, category, values)
    yield from _slices(pid, 1, timeline.moments, lambda moment: moment.phase or "other")
    yield from _slices(pid, 2, timeline.moments, _say_block)
    yield from _primitives(pid, result)
    yield _peak(pid, result)


def _counter(pid: int, name: str, values: list[int]) -> Iterator[Event]:
    """An event where the value changes, and one at the end, so that the last value has a length."""
    before = None
    for index, value in enumerate(values):
        if value != before:
            yield {"ph": "C", "name": name, "pid": pid, "ts": index, "args": {"bytes": value}}
            before = value
    if values:
        yield {"ph": "C", "name": name, "pid": pid, "ts": len(values), "args": {"bytes": values[-1]}}


def _slices(pid: int, tid: int, moments: list[Moment], name_of: Callable[[Moment], str]) -> Iterator[Event]:
    """One slice for each run of primitives of the same name; an empty name is a gap."""

    def key(moment: Moment) -> Hashable:
        return name_of(moment)

    for name, run in groupby(moments, key):
        members = list(run)
        if name:
            start = members[0].index
            yield _slice(pid, tid, str(name), start, len(members), {"primitives": len(members)})


def _slice(pid: int, tid: int, name: str, start: int, length: int, arguments: dict[str, Any]) -> Event:
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": start, "dur": length, "args": arguments}


def _say_block(moment: Moment) -> str:
    return f"block {moment.block}" if moment.block >= 0 else ""


def _primitives(pid: int, result: TraceResult) -> Iterator[Event]:
    for moment, active in zip(result.timeline.moments, result.timeline.active, strict=True):
        where = {"phase": moment.phase, "module": moment.scope, "active": format_bytes(active)}
        yield _slice(pid, 3, moment.primitive, moment.index, 1, where)


def _peak(pid: int, result: TraceResult) -> Event:
    """The instant of the peak, over all tracks of the process."""
    name = f"peak {format_bytes(result.peak_bytes)}"
    at = max(0, result.moment.index)
    arguments = {"bytes": result.peak_bytes, "moment": str(result.moment)}
    return {"ph": "i", "name": name, "pid": pid, "tid": 3, "ts": at, "s": "p", "args": arguments}
