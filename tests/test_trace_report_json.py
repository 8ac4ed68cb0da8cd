"""The JSON object of a trace, and the result it is made of: bytes that add up."""

from __future__ import annotations

import json
from itertools import accumulate

import pytest
from trace_fakes import lower_result, small_report, small_result

from oomguard.config.policy import CheckpointPolicy
from oomguard.config.presets import preset
from oomguard.config.step import StepConfig
from oomguard.report.trace_json import trace_json
from oomguard.report.trace_report import LabelledTrace
from oomguard.trace.result import TraceResult
from oomguard.units import MIB

FIELDS = {
    "schema", "title", "settings", "mlx", "memory_limit_bytes", "budget_bytes", "fits", "checkpoint",
    "backend", "compiled", "compiled_calls", "peak_bytes", "low_bytes", "high_bytes", "first_peak_bytes",
    "sequenced_peak_bytes", "graph_peak_bytes", "in_flight_bytes", "state_bytes", "largest_buffer_bytes",
    "moment", "breakdown", "holders", "primitives", "unknown", "warnings", "compared", "machine",
    "policies", "cheapest", "better_order", "largest_allowed_bytes", "buffer_fits",
    "simulated_memory_limit_bytes", "waited_at_limit",
}  # fmt: skip


@pytest.fixture(scope="module", params=["none", "every"])
def traced(request: pytest.FixtureRequest) -> TraceResult:
    """A real step of the smallest preset."""
    from oomguard.model.step import build_step
    from oomguard.trace.engine import trace_built

    step = StepConfig(batch=2, seq_len=32, checkpoint=CheckpointPolicy.parse(request.param))
    return trace_built(build_step(preset("tiny"), step, evaluated=False))


def test_json_has_a_schema_and_these_fields() -> None:
    found = trace_json(small_report())
    assert found["schema"] == "oomguard.trace/1"
    assert set(found) == FIELDS
    assert json.loads(json.dumps(found)) == found
    assert all(
        isinstance(found[key], int) for key in FIELDS if key.endswith("_bytes") and found[key] is not None
    )


def test_json_numbers_are_those_of_the_result() -> None:
    result = small_result()
    found = trace_json(small_report(budget_bytes=40 * MIB))
    for key in FIELDS:
        if key.endswith("_bytes") and key not in ("budget_bytes", "memory_limit_bytes"):
            assert found[key] == getattr(result, key.removeprefix("simulated_")), key
    assert found["moment"] == {
        "index": 3, "primitive": "Matmul", "phase": "backward", "block": 1, "scope": "blocks.1.mlp.up",
    }  # fmt: skip
    assert found["breakdown"]["in_flight_window"] == 4 * MIB
    assert (found["budget_bytes"], found["fits"]) == (40 * MIB, False)
    assert found["compared"] is None


def test_json_compares_with_the_same_fields() -> None:
    found = trace_json(
        small_report(compared=LabelledTrace("every", "every block recomputed", lower_result()))
    )
    assert found["compared"]["peak_bytes"] == 30 * MIB
    assert set(found["compared"]) == FIELDS - {
        "schema", "title", "settings", "mlx", "memory_limit_bytes", "budget_bytes", "fits", "compared",
        "machine", "policies", "cheapest",
    }  # fmt: skip


def test_breakdown_and_holders_sum_to_a_real_peak(traced: TraceResult) -> None:
    found = trace_json(small_report(asked=LabelledTrace("none", "no recompute", traced)))
    assert sum(found["breakdown"].values()) == found["peak_bytes"]
    assert sum(group["total_bytes"] for group in found["holders"]) == found["peak_bytes"]
    assert all(group["total_bytes"] == group["count"] * group["bytes_each"] for group in found["holders"])


def test_buffers_around_every_primitive_sum_to_what_is_active(traced: TraceResult) -> None:
    timeline = traced.timeline
    changes = [0] * (traced.primitives + 1)
    for span in timeline.spans:
        assert 0 <= span.start < span.end <= traced.primitives
        changes[span.start] += span.holder.nbytes
        changes[span.end] -= span.holder.nbytes
    assert list(accumulate(changes))[:-1] == timeline.active
    assert [sum(totals) for totals in timeline.totals] == timeline.active


def test_buffers_around_the_peak_are_its_holders(traced: TraceResult) -> None:
    at = traced.moment.index
    alive = [span.holder for span in traced.timeline.spans if span.start <= at < span.end]
    assert sorted(map(repr, alive)) == sorted(map(repr, traced.holders))
    assert max(traced.timeline.active) == traced.peak_bytes == traced.timeline.active[at]
