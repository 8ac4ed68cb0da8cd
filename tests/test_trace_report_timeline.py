"""The Chrome trace event file, read by the rules of its format."""

from __future__ import annotations

import json
from typing import Any

import pytest
from trace_fakes import lower_result, small_report, small_result

from oomguard.report.trace_report import LabelledTrace, TraceReport
from oomguard.report.trace_timeline import timeline_json
from oomguard.trace.result import CATEGORIES
from oomguard.units import MIB

REQUIRED = {"X": {"dur", "tid", "args"}, "C": {"args"}, "i": {"s", "tid"}, "M": {"args"}}


@pytest.fixture(scope="module")
def report() -> TraceReport:
    compared = LabelledTrace("every", "every block recomputed", lower_result())
    return small_report(compared=compared, budget_bytes=40 * MIB)


@pytest.fixture(scope="module")
def events(report: TraceReport) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(json.dumps(timeline_json(report)))["traceEvents"]
    return found


def value_at(events: list[dict[str, Any]], pid: int, name: str, ts: int) -> int:
    """A counter holds its value until the next event of its name."""
    sizes = [
        event["args"]["bytes"]
        for event in events
        if event["ph"] == "C" and event["pid"] == pid and event["name"] == name and event["ts"] <= ts
    ]
    return sizes[-1] if sizes else 0


def test_every_event_has_what_its_phase_requires(events: list[dict[str, Any]]) -> None:
    assert {event["ph"] for event in events} == set(REQUIRED)
    for event in events:
        assert {"ph", "name", "pid", "ts"} | REQUIRED[event["ph"]] <= set(event)
        assert isinstance(event["ts"], int)
        assert event["ts"] >= 0
        assert isinstance(event["name"], str)
        assert event["name"]


def test_timestamps_never_fall(events: list[dict[str, Any]]) -> None:
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)


def test_counters_are_numbers_never_negative(events: list[dict[str, Any]]) -> None:
    counters = [event for event in events if event["ph"] == "C"]
    assert counters
    assert all(isinstance(v, int) and v >= 0 for event in counters for v in event["args"].values())


def test_counters_of_the_categories_sum_to_active(report: TraceReport, events: list[dict[str, Any]]) -> None:
    for pid, run in enumerate(report.runs, start=1):
        for index, active in enumerate(run.result.timeline.active):
            assert value_at(events, pid, "active", index) == active
            assert sum(value_at(events, pid, name, index) for name in CATEGORIES) == active
            assert value_at(events, pid, "budget", index) == 40 * MIB


def test_an_instant_marks_the_peak(report: TraceReport, events: list[dict[str, Any]]) -> None:
    instants = [event for event in events if event["ph"] == "i"]
    assert [event["ts"] for event in instants] == [run.result.moment.index for run in report.runs]
    assert [event["name"] for event in instants] == ["peak 46.0 MiB", "peak 30.0 MiB"]
    assert [event["args"]["bytes"] for event in instants] == [run.result.peak_bytes for run in report.runs]


def test_slices_show_phases_blocks_and_primitives(events: list[dict[str, Any]]) -> None:
    def slices(tid: int) -> list[tuple[str, int, int]]:
        mine = [e for e in events if e["ph"] == "X" and e["pid"] == 1 and e["tid"] == tid]
        return [(event["name"], event["ts"], event["dur"]) for event in mine]

    assert slices(1) == [("forward", 0, 3), ("backward", 3, 2), ("update", 5, 1)]
    assert slices(2) == [("block 0", 0, 1), ("block 1", 1, 1), ("block 1", 3, 1), ("block 0", 4, 1)]
    assert [name for name, _, _ in slices(3)] == [m.primitive for m in small_result().timeline.moments]


def test_processes_are_named_after_the_policies(events: list[dict[str, Any]]) -> None:
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["small: two blocks: no recompute", "small: two blocks: every block recomputed"]
