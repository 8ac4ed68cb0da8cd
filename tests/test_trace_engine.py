"""A trace answers with the peak that MLX reaches, when, and with what adds up to it."""

from __future__ import annotations

import io
import json
import statistics
import subprocess
import sys
from collections import Counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest

from oomguard.config.model import ModelConfig
from oomguard.config.policy import CheckpointPolicy
from oomguard.config.step import StepConfig
from oomguard.model.step import build_step
from oomguard.trace.containers import leaves
from oomguard.trace.engine import built_for, capture_built, prepare, simulate, trace, trace_built
from oomguard.trace.memory import CPU
from oomguard.trace.rawgraph import RENAMED, read_dot
from oomguard.trace.result import TraceResult

MODEL = ModelConfig(name="test", n_layers=4, d_model=32, n_heads=4, d_mlp=64, context=16)


def step_of(policy: str = "none", **settings: Any) -> StepConfig:
    settings = {"batch": 2, "seq_len": 16, "checkpoint": CheckpointPolicy.parse(policy), **settings}
    return StepConfig(**settings)


def traced(policy: str = "none", **settings: Any) -> TraceResult:
    return trace_built(build_step(MODEL, step_of(policy, **settings), evaluated=False))


# -- the graph a compiled step becomes ---------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["none", "every", "stride=2", "blocks=2", "attention", "custom_function"])
def test_compiled_graph_is_mlx_s_own_under_every_policy(policy: str) -> None:
    built = build_step(MODEL, step_of(policy))
    program = prepare(built_for(CPU, capture_built(built)[0]), compiled=True, device=CPU)
    built.run()
    loss, _ = built.function(built.batch, None, True)
    drawing = io.StringIO()
    mx.export_to_dot(drawing, *leaves([built.state[0], built.state[1], loss]))
    drawn = read_dot(drawing.getvalue())
    real = Counter(
        (_plain(label), len(inputs), len(outputs))
        for label, inputs, outputs in zip(drawn.primitives, drawn.inputs, drawn.outputs, strict=True)
    )
    ours = Counter(
        (_plain(_label(node)), len(node.inputs), len(node.outputs))
        for node in (step.node for step in program.evaluations[0])
    )
    assert ours == real


def _label(node: Any) -> str:
    return "Compiled" + "".join(node.arguments[0]) if node.primitive == "Compiled" else node.primitive


def _plain(label: str) -> str:
    name = label.partition(" ")[0]
    return RENAMED.get(name, name).replace("Rsqrt", "Sqrt")


# -- what the answer consists of ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result() -> TraceResult:
    return traced(batch=16)


def test_breakdown_and_holders_sum_to_the_peak(result: TraceResult) -> None:
    assert sum(result.breakdown.values()) == result.peak_bytes
    assert sum(holder.nbytes for holder in result.holders) == result.peak_bytes
    assert result.breakdown["saved tensors"] > 0


def test_holders_come_largest_first_and_are_named(result: TraceResult) -> None:
    sizes = [holder.nbytes for holder in result.holders]
    assert sizes == sorted(sizes, reverse=True)
    saved = {holder.name for holder in result.holders if holder.category == "saved tensors"}
    assert "blocks.0.mlp.up" in saved
    assert any(h.name == "blocks.0.mlp.up.weight" and h.category == "parameters" for h in result.holders)


def test_timeline_adds_up_at_every_primitive(result: TraceResult) -> None:
    timeline = result.timeline
    assert [sum(totals) for totals in timeline.totals] == timeline.active
    assert max(timeline.active) == result.peak_bytes
    assert timeline.active[result.moment.index] == result.peak_bytes
    assert len(timeline.moments) == result.primitives


def test_state_bytes_are_parameters_moments_and_batch(result: TraceResult) -> None:
    parameters = 4 * MODEL.params
    batch = 2 * 16 * 16 * 4
    # Besides: the optimizer's step and rate, the random key, constants, and buffers a little too large.
    assert 0 <= result.state_bytes - (3 * parameters + batch) < 0.02 * parameters


def test_peaks_are_ordered_by_what_is_in_flight(result: TraceResult) -> None:
    assert result.graph_peak_bytes <= result.sequenced_peak_bytes <= result.peak_bytes
    assert result.low_bytes <= result.peak_bytes <= result.high_bytes
    assert result.in_flight_bytes == result.peak_bytes - result.graph_peak_bytes


def test_moment_of_the_peak_is_in_the_backward(result: TraceResult) -> None:
    assert result.moment.phase == "backward"
    assert str(result.moment).startswith("backward, ")


def test_memory_limit_lowers_the_peak_to_no_less_than_the_graph_s() -> None:
    built = build_step(MODEL, step_of(batch=8), evaluated=False)
    captured = capture_built(built)[0]
    free = simulate(captured, compiled=True)
    limited = simulate(captured, compiled=True, memory_limit=free.graph_peak_bytes)
    assert free.graph_peak_bytes <= limited.peak_bytes < free.peak_bytes


def test_same_capture_can_be_simulated_again() -> None:
    captured = capture_built(build_step(MODEL, step_of(), evaluated=False))[0]
    first = simulate(captured, compiled=True)
    other = simulate(captured, compiled=False)
    assert simulate(captured, compiled=True).peak_bytes == first.peak_bytes
    assert other.primitives > 2 * first.primitives


def test_recompute_lowers_the_graph_s_peak() -> None:
    peaks = [traced(policy, batch=8).graph_peak_bytes for policy in ("none", "attention", "every")]
    assert peaks[0] > peaks[1] > peaks[2]


def test_peak_never_falls_when_the_batch_grows() -> None:
    peaks = [traced(batch=batch).peak_bytes for batch in (1, 2, 4, 8)]
    assert peaks == sorted(peaks)


def test_accumulation_holds_gradients_between_micro_batches() -> None:
    one, three = traced(batch=4), traced(batch=4, accumulate=3)
    assert three.peak_bytes - one.peak_bytes > 3 * MODEL.params


def test_trace_of_a_closure_finds_its_state() -> None:
    model, optimizer = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), optim.SGD(0.1)

    def loss(x: mx.array) -> mx.array:
        return mx.mean(model(x) ** 2)

    loss_and_gradients = nn.value_and_grad(model, loss)

    def step(x: mx.array) -> Any:
        value, gradients = loss_and_gradients(x)
        optimizer.update(model, gradients)
        return value

    result = trace(step, mx.zeros((32, 64)))
    weights = sum(h.nbytes for h in result.holders if h.category == "parameters")
    assert weights >= 2 * (64 * 64 + 64) * 4
    assert not result.compiled
    assert result.unknown == {}


# -- measured ----------------------------------------------------------------------------------------------

_MEASURE = """
import json, sys
import mlx.core as mx
from oomguard.model.cases import build_case
from oomguard.config.model import ModelConfig
from oomguard.config.step import StepConfig
from oomguard.model.step import build_step
order = json.loads(sys.argv[1])
if "case" in order:
    built = build_case(order["case"])
else:
    built = build_step(ModelConfig(**order["model"]), StepConfig(**order["step"]))
peaks = []
for number in range(7):
    if number == 4:
        mx.set_memory_limit(0)
    mx.synchronize()
    mx.reset_peak_memory()
    built.run()
    mx.synchronize()
    peaks.append(mx.get_peak_memory())
print(json.dumps(peaks))
"""


def measured_peaks(order: dict[str, Any]) -> tuple[int, int]:
    """Medians of three steps: as they run by default, and with the memory limit at 0."""
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, json.dumps(order)], capture_output=True, text=True, check=True
    )
    peaks = json.loads(done.stdout)
    return statistics.median_low(peaks[1:4]), statistics.median_low(peaks[4:])


TINY: dict[str, Any] = {
    "name": "tiny",
    "n_layers": 4,
    "d_model": 128,
    "n_heads": 4,
    "d_mlp": 512,
    "context": 128,
}


@pytest.mark.measured
@pytest.mark.slow
@pytest.mark.parametrize(
    "step",
    [
        {"compiled": False, "optimizer": "lion"},
        {"compiled": True, "checkpoint": {"policy": "attention"}},
    ],
)
def test_tiny_peaks_as_measured(step: dict[str, Any]) -> None:
    step = {"batch": 8, "seq_len": 128, **step}
    result = trace_built(build_step(ModelConfig(**TINY), StepConfig(**step), evaluated=False))
    default, sequenced = measured_peaks({"model": TINY, "step": step})
    assert result.peak_bytes == pytest.approx(default, rel=0.03)
    assert result.sequenced_peak_bytes == pytest.approx(sequenced, rel=0.03)


@pytest.mark.measured
@pytest.mark.slow
@pytest.mark.parametrize("case", ["resnet-batchnorm", "lstm", "lm-llama-qlora-eager"])
def test_cases_peak_as_measured(case: str) -> None:
    from oomguard.model.cases import build_case

    result = trace_built(build_case(case, evaluated=False))
    default, sequenced = measured_peaks({"case": case})
    assert result.peak_bytes == pytest.approx(default, rel=0.03)
    assert result.sequenced_peak_bytes == pytest.approx(sequenced, rel=0.03)
    assert result.unknown == {}
