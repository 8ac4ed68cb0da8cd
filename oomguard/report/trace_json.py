"""A trace as a JSON object: whole bytes, plain names, the schema's name first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oomguard.report.trace_holders import HolderGroup, group_holders
from oomguard.report.trace_report import LabelledTrace, TraceReport

if TYPE_CHECKING:
    from oomguard.trace.policies import Price
    from oomguard.trace.result import Moment, OrderPeak

TRACE_SCHEMA = "oomguard.trace/1"


def trace_json(report: TraceReport) -> dict[str, Any]:
    """The object ``oomguard trace --json`` prints.

    ``memory_limit_bytes`` is the one given; ``simulated_memory_limit_bytes`` that one or MLX's own on the machine, null
    where how much memory it has is not known, and none was simulated. ``largest_allowed_bytes`` is the largest buffer
    the machine hands out, null where that is not known: a larger one does not fit, whatever the budget.

    ``fits`` is null without a budget, ``compared`` without ``--compare``, ``policies`` where no other checkpointing
    was looked at, ``cheapest`` (a policy of those) where none fits. ``breakdown`` and the
    ``total_bytes`` of ``holders`` each sum to ``peak_bytes``.
    """
    return {
        "schema": TRACE_SCHEMA,
        "title": report.title,
        "settings": report.settings,
        "mlx": report.mlx,
        "machine": report.machine or None,
        "memory_limit_bytes": report.memory_limit_bytes,
        "budget_bytes": report.budget_bytes,
        "fits": report.fits,
        "policies": [_price(price, report) for price in report.policies.prices] if report.policies else None,
        "cheapest": str(report.least_recompute.policy) if report.least_recompute else None,
        **_run(report.asked),
        "compared": _run(report.compared) if report.compared is not None else None,
    }


def _price(price: Price, report: TraceReport) -> dict[str, Any]:
    return {
        "checkpoint": str(price.policy),
        "peak_bytes": price.peak_bytes,
        "first_peak_bytes": price.first_peak_bytes,
        "recomputed_share": round(price.share, 4),
        "largest_buffer_bytes": price.largest_buffer_bytes,
        "fits": report.price_fits(price),
    }


def _run(run: LabelledTrace) -> dict[str, Any]:
    result = run.result
    return {
        "checkpoint": run.label,
        "backend": result.backend,
        "compiled": result.compiled,
        "compiled_calls": result.compiled_calls,
        "peak_bytes": result.peak_bytes,
        "low_bytes": result.low_bytes,
        "high_bytes": result.high_bytes,
        "first_peak_bytes": result.first_peak_bytes,
        "sequenced_peak_bytes": result.sequenced_peak_bytes,
        "graph_peak_bytes": result.graph_peak_bytes,
        "in_flight_bytes": result.in_flight_bytes,
        "state_bytes": result.state_bytes,
        "largest_buffer_bytes": result.largest_buffer_bytes,
        "largest_allowed_bytes": result.largest_allowed_bytes,
        "buffer_fits": result.buffer_fits,
        "simulated_memory_limit_bytes": result.memory_limit_bytes,
        "waited_at_limit": result.waited_at_limit,
        "better_order": _order(result.order),
        "moment": _moment(result.moment),
        "breakdown": {category_key(name): size for name, size in result.breakdown.items()},
        "holders": [_group(group) for group in group_holders(result.holders)],
        "primitives": result.primitives,
        "unknown": dict(result.unknown),
        "warnings": list(result.warnings),
    }


def _order(order: OrderPeak | None) -> dict[str, Any] | None:
    """Another order of evaluation that holds clearly less; null where none is known."""
    return None if order is None else {"order": order.order, "peak_bytes": order.peak_bytes}


def category_key(name: str) -> str:
    """``in_flight_window`` for ``in-flight window``, as plans and estimates name it."""
    return name.replace(" ", "_").replace("-", "_")


def _moment(moment: Moment) -> dict[str, Any]:
    """Where the peak is; the index counts from 0 and is -1 where nothing rises above the beginning."""
    return {
        "index": moment.index,
        "primitive": moment.primitive,
        "phase": moment.phase,
        "block": moment.block if moment.block >= 0 else None,
        "scope": moment.scope,
    }


def _group(group: HolderGroup) -> dict[str, Any]:
    return {
        "name": group.name,
        "what": group.what,
        "category": category_key(group.category),
        "count": group.count,
        "bytes_each": group.nbytes,
        "total_bytes": group.total_bytes,
        "array": group.form,
    }
