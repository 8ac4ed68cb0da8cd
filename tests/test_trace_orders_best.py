"""Evaluation order is an input: which order holds least, and that MLX holds what is predicted."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from mlx.utils import tree_flatten

from oomguard.config.model import ModelConfig
from oomguard.config.policy import CheckpointPolicy
from oomguard.config.step import StepConfig
from oomguard.model.step import build_step
from oomguard.trace.capture import Capture, capture
from oomguard.trace.engine import prepare, trace
from oomguard.trace.lower import for_cpu
from oomguard.trace.memory import CPU, Program
from oomguard.trace.orders import ORDERS, best_order, last_block_first, reversed_order
from oomguard.trace.policies import MARKED
from oomguard.trace.remat import apply_policy
from oomguard.trace.result import OrderPeak
from oomguard.trace.steps import graph_peak, step_peaks

MODEL: dict[str, Any] = {
    "name": "narrow",
    "n_layers": 8,
    "d_model": 64,
    "n_heads": 4,
    "d_mlp": 256,
    "context": 128,
}
STEP: dict[str, Any] = {"batch": 8, "seq_len": 128, "optimizer": "sgd"}
EVERY = CheckpointPolicy(policy="every")


def state_first(returned: Any, state: list[Any]) -> Any:
    return state, returned


def state_reversed(returned: Any, state: list[Any]) -> Any:
    return [array for _, array in tree_flatten(state)][::-1], returned


def captured(evaluate: Callable[[Any, list[Any]], Any], marked: frozenset[str] = MARKED) -> Capture:
    built = build_step(ModelConfig(**MODEL), StepConfig(**STEP), evaluated=False)
    return capture(
        built.function, (built.batch, None, True), state=built.state, evaluate=evaluate, marked=marked
    )


def recomputed(found: Capture) -> Program:
    return prepare(apply_policy(for_cpu(found.graph), EVERY), compiled=True, device=CPU)


def test_first_block_listed_first_is_left_alone() -> None:
    program = recomputed(captured(state_first))
    assert best_order(program, graph_peak(program)) is None


def test_first_block_listed_last_undoes_checkpointing_and_is_reported() -> None:
    good = step_peaks(recomputed(captured(state_first)), 2)[-1]
    program = recomputed(captured(state_reversed))
    best = best_order(program, graph_peak(program))
    assert best is not None
    assert best.given_bytes > 2 * good
    assert best.order in ORDERS
    assert best.peak_bytes < 1.2 * good
    assert best.worth_saying


def test_a_trace_names_the_better_order_and_is_silent_without_one() -> None:
    built = build_step(ModelConfig(**MODEL), StepConfig(**STEP, checkpoint=EVERY), evaluated=False)
    found = [
        trace(built.function, built.batch, None, True, state=built.state, evaluate=evaluate)
        for evaluate in (state_first, state_reversed)
    ]
    assert found[0].order is None
    better = found[1].order
    assert better is not None
    assert better.given_bytes == pytest.approx(found[1].peak_bytes, rel=0.01)
    assert better.peak_bytes == pytest.approx(found[0].peak_bytes, rel=0.2)


def test_small_gain_is_not_worth_saying() -> None:
    assert not OrderPeak("reversed", 995, 1000).worth_saying
    assert OrderPeak("reversed", 900, 1000).worth_saying


def test_capture_is_left_as_it_was() -> None:
    found = captured(state_first)
    outputs = list(found.graph.evaluations[0].outputs)
    program = Program(found.graph)
    best_order(program, graph_peak(program))
    assert found.graph.evaluations[0].outputs == outputs


def test_orders_are_the_same_arrays() -> None:
    graph = captured(state_reversed).graph
    outputs = graph.evaluations[0].outputs
    for order in (last_block_first, reversed_order):
        assert sorted(order(graph, outputs)) == sorted(outputs)


def test_last_block_first_lists_blocks_in_ascending_order() -> None:
    graph = captured(state_reversed).graph
    names = {after: graph.arrays[before].name for before, after in graph.carries.items()}
    listed = [names.get(i) for i in last_block_first(graph, graph.evaluations[0].outputs)]
    numbers = [int(name.split(".")[1]) for name in listed if name and name.startswith("blocks.")]
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(8))


_MEASURE = """
import json, statistics, sys
import mlx.core as mx
from mlx.utils import tree_flatten
from oomguard.config.model import ModelConfig
from oomguard.config.step import StepConfig
from oomguard.model.step import build_step
order = json.loads(sys.argv[1])
built = build_step(ModelConfig(**order["model"]), StepConfig(**order["step"]))
mx.set_memory_limit(0)
peaks = []
for _ in range(6):
    mx.synchronize()
    mx.reset_peak_memory()
    loss = built.function(built.batch, None, True)
    arrays = [array for _, array in tree_flatten(built.state)]
    mx.eval(arrays[::-1] if order["reversed"] else arrays, loss)
    mx.synchronize()
    peaks.append(mx.get_peak_memory())
    del arrays, loss
print(statistics.median_low(peaks[1:]))
"""


@pytest.mark.measured
@pytest.mark.slow
@pytest.mark.parametrize("order", [state_first, state_reversed])
def test_peak_of_either_order_is_measured(order: Callable[[Any, list[Any]], Any]) -> None:
    request = {
        "model": MODEL,
        "step": {**STEP, "checkpoint": {"policy": "every"}},
        "reversed": order is state_reversed,
    }
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, json.dumps(request)], capture_output=True, text=True, check=True
    )
    graph = apply_policy(for_cpu(captured(order).graph), EVERY)
    predicted = step_peaks(prepare(graph, compiled=True, device=CPU), 6, memory_limit=0)
    assert statistics.median_low(predicted[1:]) == pytest.approx(int(done.stdout), rel=0.03)
