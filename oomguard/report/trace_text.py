"""A trace as text: the peak, when it is reached, what holds it, and what would be another way."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from oomguard.report.estimate_text import breakdown_lines
from oomguard.report.style import Ink, paragraph, table
from oomguard.report.trace_holders import group_holders
from oomguard.report.trace_report import TraceReport
from oomguard.report.words import PRICE_OF_WAITING, say_policy
from oomguard.trace.result import BUFFER_REFUSED
from oomguard.units import format_bytes

if TYPE_CHECKING:
    from oomguard.trace.result import Moment, OrderPeak, TraceResult

SHOWN_HOLDERS = 10
SLIVER = 0.005  # of the larger peak: categories below it are not compared

_UNBROKEN = "\u00a0"
_SIZE = re.compile(r"[\d.]+ [KMGT]?i?B( each)?\b")


def trace_text(report: TraceReport, colour: bool = False) -> str:
    """The report ``oomguard trace`` prints, 80 columns wide."""
    ink = Ink(colour)
    result = report.asked.result
    peak = format_bytes(result.peak_bytes)
    parts = [
        _head(report, ink),
        [_answer(report, ink), *_facts(result, report)],
        [ink.faint(f"What holds {peak} at the peak"), *breakdown_lines(result.breakdown)],
        [ink.faint("The largest holders at the peak"), *_holder_lines(result)],
        _compared(report, ink),
        _priced(report, ink),
        _foot(report, ink),
    ]
    return "\n\n".join(text for text in map("\n".join, parts) if text)


def say_moment(moment: Moment, primitives: int) -> str:
    """``backward of block 11: Matmul in blocks.11.attention, primitive 1,012 of 2,269``."""
    if moment.index < 0:
        return "before the step begins"
    block = f" of block {moment.block}" if moment.block >= 0 else ""
    scope = f" in {moment.scope}" if moment.scope else ""
    number = f"primitive {moment.index + 1:,} of {primitives:,}"
    return f"{moment.phase}{block}: {moment.primitive}{scope}, {number}"


def say_fit(report: TraceReport, size_bytes: int) -> str:
    """``1.2 GiB below the budget of 2.0 GiB``; empty without a budget."""
    if report.budget_bytes is None:
        return ""
    gap = report.budget_bytes - size_bytes
    side = "below" if gap >= 0 else "over"
    return f"{format_bytes(abs(gap))} {side} the budget of {format_bytes(report.budget_bytes)}"


def say_machine(report: TraceReport) -> str:
    """``Apple M5 Pro, 48 GiB (metal)``; the backend alone where no machine was asked about."""
    backend = report.asked.result.backend
    return f"{report.machine} ({backend})" if report.machine else backend


def _head(report: TraceReport, ink: Ink) -> Iterator[str]:
    result = report.asked.result
    facts = [f"{result.primitives:,} primitives", result.mode]
    where = say_machine(report)
    facts.append(f"{where}, MLX {report.mlx}" if report.mlx else where)
    if report.memory_limit_bytes is not None:
        facts.append(f"memory limit {format_bytes(report.memory_limit_bytes)}")
    elif result.memory_limit_bytes is None and report.machine:
        facts.append("its memory not known, MLX's memory limit taken to be out of reach")
    yield ink.strong(paragraph(report.title))
    if report.settings:
        yield paragraph(report.settings)
    yield ink.faint(_filled(f"Simulated, not run: {', '.join(facts)}"))


def _answer(report: TraceReport, ink: Ink) -> str:
    result = report.asked.result
    said = f"Peak {format_bytes(result.peak_bytes)}"
    if report.fits is None:
        return ink.strong(said)
    highest = ""
    if format_bytes(result.most_bytes) != format_bytes(result.peak_bytes):
        highest = f", {format_bytes(result.most_bytes)} in the highest step"
    answer = _filled(f"{said}{highest}, {say_fit(report, result.most_bytes)}")
    shown = ink.good(said) if report.fits else ink.bad(said)
    lines = [answer.replace(said, shown, 1)]
    if report.bound_by:
        lines.append(_filled(f"bound by: {report.bound_by}", "  "))
    if result.buffer_fits is False:
        lines += [ink.bad(_filled(f"does not fit: {said}")) for said in _buffer_warnings(result)]
    return "\n".join(lines)


def _buffer_warnings(result: TraceResult) -> list[str]:
    """What is said of a buffer that the device refuses."""
    return [warning for warning in result.warnings if warning.startswith(BUFFER_REFUSED)]


def _facts(result: TraceResult, report: TraceReport) -> Iterator[str]:
    window = f"the in-flight window adds {format_bytes(result.in_flight_bytes)}"
    share = f"{result.in_flight_bytes / (result.peak_bytes or 1):.0%} of the peak"
    facts = {
        "when": say_moment(result.moment, result.primitives),
        "steps": _say_steps(result),
        "sequenced": f"{format_bytes(result.sequenced_peak_bytes)}, with mx.set_memory_limit(0)",
        "graph alone": f"{format_bytes(result.graph_peak_bytes)}; {window}, {share}",
        "before the step": f"{format_bytes(result.state_bytes)} of state and batch",
        "largest buffer": format_bytes(result.largest_buffer_bytes),
    }
    if result.waited_at_limit and result.memory_limit_bytes:
        facts["memory limit"] = _say_limit(
            result.memory_limit_bytes, given=report.memory_limit_bytes is not None
        )
    if report.memory_limit_bytes == 0:
        del facts["sequenced"]
    if result.order is not None:
        facts["order"] = say_order(result.order)
    for name, text in facts.items():
        yield _filled(text, f"  {name:<15}  ")


def _say_limit(limit_bytes: int, *, given: bool) -> str:
    """Which limit held the peak down, and at what cost."""
    whose = "as given" if given else "MLX's own on this machine"
    return (
        f"{format_bytes(limit_bytes)}, {whose}: MLX reaches it, and waits for running kernels there, which costs time; "
        "without it the peak would be higher"
    )


def say_order(order: OrderPeak) -> str:
    """What another order of evaluation saves, and how to have it."""
    how = "with its arrays the other way round"
    if order.order == "last block first":
        how = "with the arrays of the last block last, as MLX begins with what the last one needs"
    return (
        f"{order.order} would peak at {format_bytes(order.peak_bytes)}, {format_bytes(order.saved_bytes)} less: "
        f"call mx.eval {how}"
    )


def _say_steps(result: TraceResult) -> str:
    low, high = format_bytes(result.low_bytes), format_bytes(result.high_bytes)
    first = format_bytes(result.first_peak_bytes)
    if low == high == first:
        return f"{low} in the first and in those after it"
    later = low if low == high else f"{low} to {high}"
    return f"{first} in the first, {later} in those after it"


def _holder_lines(result: TraceResult) -> Iterator[str]:
    groups = group_holders(result.holders)
    for group in groups[:SHOWN_HOLDERS]:
        yield _holder_line(group.total_bytes, result.peak_bytes, str(group))
    rest = groups[SHOWN_HOLDERS:]
    if rest:
        count = sum(group.count for group in rest)
        others = f"{count:,} other buffer{'s' if count > 1 else ''}"
        yield _holder_line(sum(group.total_bytes for group in rest), result.peak_bytes, others)


def _holder_line(size_bytes: int, peak_bytes: int, text: str) -> str:
    return _filled(text, f"  {format_bytes(size_bytes):>10} {size_bytes / (peak_bytes or 1):>4.0%}  ")


def _filled(text: str, first: str = "") -> str:
    """A paragraph that breaks no size in two."""
    kept = _SIZE.sub(lambda size: size[0].replace(" ", _UNBROKEN), text)
    return paragraph(kept, first).replace(_UNBROKEN, " ")


def _compared(report: TraceReport, ink: Ink) -> Iterator[str]:
    if report.compared is None:
        return
    one, other = report.asked.result, report.compared.result
    rows = [("", report.asked.label, report.compared.label, "")]
    rows += [_row(name, a, b) for name, a, b in _pairs(one, other)]
    rows.append(("primitives", f"{one.primitives:,}", f"{other.primitives:,}", ""))
    if report.budget_bytes is not None:
        left = [format_bytes(report.budget_bytes - run.result.peak_bytes) for run in report.runs]
        rows.append(("left of the budget", left[0], left[1], ""))
    lines = table(rows, "<>>>")
    yield ink.faint("Checkpointing compared")
    yield ink.faint(lines[0])
    yield from lines[1:]
    when = say_moment(other.moment, other.primitives)
    yield paragraph(f"With {report.compared.label} the peak is in the {when}.", "  ")


def _pairs(one: TraceResult, other: TraceResult) -> Iterator[tuple[str, int, int]]:
    yield "peak", one.peak_bytes, other.peak_bytes
    least = SLIVER * max(one.peak_bytes, other.peak_bytes)
    for name in dict.fromkeys([*one.breakdown, *other.breakdown]):
        sizes = one.breakdown.get(name, 0), other.breakdown.get(name, 0)
        if max(sizes) >= least:
            yield f"  {name}", *sizes
    yield "sequenced", one.sequenced_peak_bytes, other.sequenced_peak_bytes


def _row(name: str, one: int, other: int) -> tuple[str, str, str, str]:
    share = (other - one) / one if one else 0.0
    change = f"{share:+.0%}" if abs(share) >= 0.005 else ""
    return name, format_bytes(one), format_bytes(other), change


def _priced(report: TraceReport, ink: Ink) -> Iterator[str]:
    """Every policy with its peak and what it computes again; the cheapest alone is one sentence of the foot."""
    priced = report.policies
    if priced is None or len(priced.prices) < 2:
        return
    rows = [("", "checkpoint", "peak", "recomputed", "")]
    for price in priced.prices:
        mark, note = "", "does not fit" if report.price_fits(price) is False else ""
        if not price.buffer_fits:
            note = "one buffer is too large"
        if price is report.least_recompute:
            mark, note = ">", "the least recompute that fits"
        rows.append((mark, str(price.policy), format_bytes(price.peak_bytes), f"{price.share:.0%}", note))
    lines = table(rows, "<<>><", indent="")
    yield ink.faint("Checkpoint policies, from one capture; recomputed is a share of the forward")
    yield ink.faint(lines[0])
    yield from lines[1:]


def _foot(report: TraceReport, ink: Ink) -> Iterator[str]:
    result = report.asked.result
    if report.fits is False:
        yield from ways_out(report)
    for name, count in result.unknown.items():
        times = f"{count:,} times" if count > 1 else "once"
        yield ink.warn(paragraph(f"unknown primitive: {name}, {times}; counted from above", rest="  "))
    for run in report.runs:
        about = "" if run is report.asked else f", {run.label}"
        said = _buffer_warnings(run.result) if run is report.asked and report.fits is False else []
        for warning in other_warnings(run.result):
            if warning in said:
                continue
            yield ink.warn(paragraph(f"warning{about}: {warning}", rest="  "))


def ways_out(report: TraceReport) -> Iterator[str]:
    """What would fit, when the step asked for does not."""
    sequenced = report.asked.result.sequenced_peak_bytes
    if report.compared is not None and report.holds(report.compared.result):
        fit = say_fit(report, report.compared.result.peak_bytes)
        yield _filled(f"Fits with {report.compared.about}: {fit}.")
    yield from _cheapest(report)
    if (
        report.memory_limit_bytes is None
        and report.asked.result.buffer_fits is not False
        and report.within(sequenced)
    ):
        yield _filled(
            f"Only the in-flight window breaks the budget. With mx.set_memory_limit(0) the peak is "
            f"{format_bytes(sequenced)}, {say_fit(report, sequenced)}; then nothing runs ahead, which costs time "
            f"({PRICE_OF_WAITING})."
        )


def _cheapest(report: TraceReport) -> Iterator[str]:
    """The least recompute that fits, or the policy that holds least."""
    priced = report.policies
    if priced is None or priced.cheapest is None:
        return
    price = priced.cheapest
    about = say_policy(price.policy, priced.n_blocks)
    if report.least_recompute is None:
        least = format_bytes(price.most_bytes)
        too_large = (
            "" if price.buffer_fits else f", with a buffer of {format_bytes(price.largest_buffer_bytes)}"
        )
        yield _filled(f"No checkpointing fits; the least is {least}, with {about}{too_large}.")
        return
    yield _filled(
        f"The least recompute that fits: {about} ({price.policy}), peak {format_bytes(price.peak_bytes)}, "
        f"{price.share:.0%} of the forward computed again. For any list of MLX layers: "
        f'oomguard.checkpoint_layers(layers, "{price.policy}").'
    )


def other_warnings(result: TraceResult) -> list[str]:
    """The warnings of a result, once each, without those about unknown primitives."""
    return [
        warning
        for warning in dict.fromkeys(result.warnings)
        if not any(warning.startswith(f"{name} ") for name in result.unknown)
    ]
