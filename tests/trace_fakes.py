"""Traces made by hand: buffers with a place in time, from which every number of a result follows."""

from __future__ import annotations

from collections.abc import Sequence

from oomguard.report.trace_report import LabelledTrace, TraceReport
from oomguard.trace.result import CATEGORIES, Holder, Moment, Span, Timeline, TraceResult
from oomguard.units import MIB


def holder(name: str, nbytes: int, category: str, primitive: str = "", block: int = -1) -> Holder:
    """A one-dimensional float32 array."""
    phase = "" if not primitive else "forward" if category in ("saved tensors", "forward") else "backward"
    return Holder(name, nbytes, category, phase, block, primitive, (nbytes // 4,), "float32")


def result_of(moments: Sequence[Moment], spans: Sequence[Span], **changes: object) -> TraceResult:
    """The result whose timeline these buffers make."""
    totals = []
    active = []
    for index in range(len(moments)):
        alive = [span.holder for span in spans if span.start <= index < span.end]
        totals.append(tuple(sum(h.nbytes for h in alive if h.category == name) for name in CATEGORIES))
        active.append(sum(totals[-1]))
    return result_from(list(moments), active, totals, list(spans), **changes)


def result_from(
    moments: list[Moment],
    active: list[int],
    totals: list[tuple[int, ...]],
    spans: list[Span],
    **changes: object,
) -> TraceResult:
    """A result with this timeline; what else it says follows from the highest primitive."""
    peak = max(active)
    at = active.index(peak)
    breakdown = {name: size for name, size in zip(CATEGORIES, totals[at], strict=True) if size}
    values: dict[str, object] = {
        "peak_bytes": peak,
        "low_bytes": peak,
        "high_bytes": peak,
        "first_peak_bytes": peak,
        "sequenced_peak_bytes": peak - breakdown.get("in-flight window", 0),
        "graph_peak_bytes": peak - breakdown.get("in-flight window", 0),
        "state_bytes": active[0],
        "largest_buffer_bytes": max((span.holder.nbytes for span in spans), default=0),
        "moment": moments[at],
        "holders": sorted(
            (span.holder for span in spans if span.start <= at < span.end), key=lambda h: -h.nbytes
        ),
        "breakdown": breakdown,
        "timeline": Timeline(active, totals, moments, spans),
        "primitives": len(moments),
        "backend": "cpu",
        "compiled": True,
        **changes,
    }
    return TraceResult(**values)  # type: ignore[arg-type]


def small_result(**changes: object) -> TraceResult:
    """Six primitives, two blocks; 46 MiB at the fourth, of which 16 MiB are two saved outputs of 8 MiB."""
    moments = [
        Moment(0, "AddMM", "forward", 0, "blocks.0.mlp.up"),
        Moment(1, "AddMM", "forward", 1, "blocks.1.mlp.up"),
        Moment(2, "Softmax", "forward", -1, ""),
        Moment(3, "Matmul", "backward", 1, "blocks.1.mlp.up"),
        Moment(4, "Matmul", "backward", 0, "blocks.0.mlp.up"),
        Moment(5, "Multiply", "update", -1, ""),
    ]
    spans = [
        Span(holder("blocks.0.mlp.up.weight", 3 * MIB, "parameters"), 0, 6),
        Span(holder("blocks.1.mlp.up.weight", 3 * MIB, "parameters"), 0, 6),
        Span(holder("tokens", 1024, "batch"), 0, 6),
        Span(holder("blocks.0.mlp.up", 8 * MIB, "saved tensors", "AddMM", 0), 0, 5),
        Span(holder("blocks.1.mlp.up", 8 * MIB, "saved tensors", "AddMM", 1), 1, 4),
        Span(holder("", 4 * MIB, "forward", "Softmax"), 2, 3),
        Span(holder("", 4 * MIB, "in-flight window", "Softmax"), 3, 5),
        Span(holder("blocks.1.mlp.up", 20 * MIB - 1024, "backward", "Matmul", 1), 3, 4),
        Span(holder("blocks.0.mlp.up", 10 * MIB, "backward", "Matmul", 0), 4, 6),
    ]
    return result_of(moments, spans, **changes)


def small_report(**changes: object) -> TraceReport:
    """The small result as a report; ``compared`` and other fields can be given."""
    values: dict[str, object] = {
        "title": "small: two blocks",
        "settings": "batch 1",
        "asked": LabelledTrace("none", "no recompute", small_result()),
        "mlx": "0.0",
        **changes,
    }
    return TraceReport(**values)  # type: ignore[arg-type]


def lower_result() -> TraceResult:
    """The small step with less saved: 30 MiB at its peak."""
    whole = small_result()
    spans = [span for span in whole.timeline.spans if span.holder.category != "saved tensors"]
    return result_of(whole.timeline.moments, spans)


def long_result(primitives: int, spike_at: int) -> TraceResult:
    """Many primitives at 64 MiB, and one that needs 448 MiB more."""
    number = CATEGORIES.index("backward")
    base, spike = CATEGORIES.index("parameters"), 448 * MIB
    moments, active, totals = [], [], []
    spans = [Span(holder("weight", 64 * MIB, "parameters"), 0, primitives)]
    for index in range(primitives):
        sizes = [0] * len(CATEGORIES)
        sizes[base] = 64 * MIB
        sizes[number] = spike if index == spike_at else MIB
        made = holder(f"layers.{index % 40}.mlp", sizes[number], "backward", "Matmul", index % 40)
        spans.append(Span(made, index, index + 1))
        moments.append(Moment(index, "Matmul", "backward", index % 40, f"layers.{index % 40}.mlp"))
        totals.append(tuple(sizes))
        active.append(sum(sizes))
    return result_from(moments, active, totals, spans)
