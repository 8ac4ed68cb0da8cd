"""Steps that recompute by themselves, and that call compiled functions, are traced as MLX builds and runs them."""

from __future__ import annotations

import gc
import statistics
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
import recompute_steps
from drawn_lines import lines_of, real_lines
from recompute_steps import COMPILED_IN_PART, RECOMPUTING
from state_steps import Built, measured_by

from oomguard.trace.capture import Capture, capture
from oomguard.trace.engine import capture_for, prepare, trace
from oomguard.trace.lower import for_cpu
from oomguard.trace.memory import CPU, DISPATCHES_PER_TASK, Program
from oomguard.trace.steps import Steps, Surroundings

MEASURED = {
    "one_pass": 67_900_036,
    "two_passes": 98_125_200,
    "two_passes_compiled": 98_725_264,
    "two_passes_with_reference": 110_186_972,
    "two_passes_with_reference_compiled": 113_016_224,
    "two_passes_first_layers_frozen": 94_971_256,
    "two_passes_first_layers_frozen_compiled": 110_229_900,
    "three_passes": 133_587_892,
    "three_passes_compiled": 125_859_196,
    "coupled_by_product": 8_283_260,
    "coupled_by_product_compiled": 8_479_820,
    "coupled_by_sum": 8_348_796,
    "triplet": 15_106_644,
    "triplet_compiled": 10_982_588,
    "triplet_without_mask": 15_100_500,
    "triplet_not_normalized": 15_237_716,
    "parts_of_a_sequence": 11_534_372,
    "parts_of_a_sequence_compiled": 11_010_096,
    "parts_of_a_sequence_frozen": 9_633_828,
    "parts_of_a_sequence_frozen_compiled": 10_879_024,
    "random_numbers_drawn_again": 6_853_112,
    "random_numbers_drawn_again_compiled": 8_298_644,
    "segments": 7_692_984,
    "segments_compiled": 9_349_208,
    "calls_inside_calls": 7_384_220,
    "calls_inside_calls_compiled": 7_970_904,
    "result_that_nothing_reads": 6_525_424,
    "result_that_nothing_reads_compiled": 8_036_448,
    "gradient_alone": 13_369_364,
    "mlp": 57_171_028,
    "mlp_relu": 41_973_816,
    "mlp_tanh": 40_400_936,
    "mlp_without_residual": 59_268_184,
    "mlp_without_bias": 61_341_788,
    "mlp_with_norm": 45_918_276,
    "mlp_adam": 59_276_660,
    "mlp_compiled": 53_760_572,
    "activation_alone": 8_388_632,
    "evaluation": 3_674_152,
    "gradient_compiled_update_plain": 16_011_484,
    "activations_in_and_beside_a_gradient": 18_888_976,
    "compiled_step_in_a_plain_one": 19_427_432,
    "checkpoints_in_a_compiled_gradient": 63_105_908,
}
"""The median of steps 4 to 8 on MLX 0.32.4's CPU, each builder in a process of its own.

Measured again some medians of the smallest are one buffer higher or lower: kernels that catch up with the evaluator.
"""

MEASURED_AGAIN = [
    "coupled_by_product",
    "triplet_compiled",
    "parts_of_a_sequence",
    "calls_inside_calls",
    "segments_compiled",
    "mlp_tanh",
    "gradient_compiled_update_plain",
]
"""Those that take a second or two."""

STEPS = 4


def built(name: str) -> Built:
    made: Built = getattr(recompute_steps, name)()
    return made


def captured(step: Built, **settings: Any) -> Capture:
    return capture(step.step, step.arguments, state=step.state, evaluate=step.evaluate, **settings)


def peaks_from_every_place(program: Program) -> set[int]:
    """The steady peaks of processes whose queue has counted differently far when the step begins.

    A task of the CPU is ten dispatches, and the count goes on from all that a process evaluated before.
    """
    found: set[int] = set()
    for before in range(DISPATCHES_PER_TASK):
        steps = Steps(program, None, None, Surroundings(before=before))
        found.update([steps.step().peak_bytes for _ in range(STEPS)][1:])
    return found


def distance(name: str, measured: float) -> float:
    """How far the nearest peak is that the trace gives, as a share."""
    step = built(name)
    found, _, _ = capture_for(
        step.step, step.arguments, state=step.state, evaluate=step.evaluate, device="cpu"
    )
    program = prepare(for_cpu(found.graph), compiled=found.compiled, device=CPU)
    return min(abs(peak / measured - 1) for peak in peaks_from_every_place(program))


def measured(*names: str) -> dict[str, list[int]]:
    return measured_by(recompute_steps, *names)


# -- as MLX builds it ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in [*RECOMPUTING, *COMPILED_IN_PART] if not n.startswith("random")])
def test_graph_is_what_mlx_draws_of_the_real_step(name: str) -> None:
    step = built(name)
    # The key is a graph itself until it is first evaluated, and nothing here draws from it.
    state = [item for item in step.state or [] if item is not mx.random.state]
    mx.eval(step.arguments, state)
    step = Built(step.step, step.arguments, state, step.evaluated)
    found = captured(step, marked=frozenset())
    program = prepare(for_cpu(found.graph), compiled=found.compiled, device=CPU)

    def evaluated() -> Any:
        return step.evaluate(step.step(*step.arguments), state)

    real, traced = real_lines(state, step.arguments, evaluated), lines_of(program.graph)
    difference = next((n for n, (a, b) in enumerate(zip(real, traced, strict=False)) if a != b), None)
    assert difference is None, (difference, real[difference], traced[difference])
    assert len(real) == len(traced)


@pytest.mark.parametrize("name", RECOMPUTING)
def test_recomputes_are_drawn_and_not_counted_by_rule(name: str) -> None:
    found = captured(built(name))
    assert found.warnings == []
    assert found.graph.recomputes
    kinds = {region.kind for region in found.graph.regions}
    assert kinds.isdisjoint({"checkpoint", "custom_function"})
    phases = {node.phase for node in found.graph.nodes}
    assert "recompute" in phases
    found.graph.check()


@pytest.mark.parametrize("device", ["metal-64gb", "m1-max-32gb"])
@pytest.mark.parametrize("name", RECOMPUTING)
def test_step_that_recomputes_is_traced_for_a_gpu(name: str, device: str) -> None:
    step = built(name)
    result = trace(step.step, *step.arguments, state=step.state, evaluate=step.evaluate, device=device)
    assert sum(result.breakdown.values()) == result.peak_bytes
    assert not result.unknown


# -- as MLX measures it --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MEASURED)
def test_peak_is_one_that_mlx_holds(name: str) -> None:
    assert distance(name, MEASURED[name]) < 0.01


@pytest.mark.measured
@pytest.mark.slow
def test_peaks_are_as_measured_here() -> None:
    for name, peaks in measured(*MEASURED_AGAIN).items():
        assert distance(name, statistics.median_low(peaks[3:])) < 0.02, name


def test_recompute_of_two_passes_takes_what_one_takes_besides_the_second() -> None:
    """Where two passes meet before the backward, one call's recompute ends before the next one's begins."""
    checkpointed, plain = (
        trace(step.step, *step.arguments, state=step.state, device="cpu").peak_bytes
        for step in (built("two_passes"), recompute_steps.preference(layer=recompute_steps.Layer))
    )
    assert checkpointed < 0.5 * plain


# -- what a capture leaves ----------------------------------------------------------------------------------


def test_capturing_steps_that_recompute_leaves_no_array_behind() -> None:
    step = built("mlp")
    trace(step.step, *step.arguments, state=step.state, device="cpu")
    gc.collect()
    before = mx.get_active_memory()
    for _ in range(3):
        trace(step.step, *step.arguments, state=step.state, device="cpu")
        mx.eval(step.step(*step.arguments), step.state)
    gc.collect()
    assert mx.get_active_memory() - before < 1 << 20


def test_what_the_step_recomputes_can_be_taken_as_plain_code() -> None:
    step = built("mlp")
    plain = captured(step, plain=True).graph
    assert not plain.recomputes
    assert all(node.primitive != "CustomTransforms" for node in plain.nodes)
    assert {node.phase for node in plain.nodes} == {"forward", "backward", "update"}


def test_array_that_the_step_is_called_with_and_reaches_is_counted_once() -> None:
    x = mx.zeros((256, 256))
    alone = trace(lambda x: (x * 2).sum(), x, state=[], device="cpu")
    reached = trace(lambda y: (y * 2).sum() + x.sum(), x, state=[], device="cpu")
    assert reached.state_bytes == alone.state_bytes


# -- compiled functions -------------------------------------------------------------------------------------


def test_activation_outside_a_gradient_is_one_kernel() -> None:
    x = mx.zeros((1024, 1024))
    assert trace(lambda x: nn.silu(x * 1.5) * 2.0, x, state=[], device="cpu").peak_bytes >> 20 == 8


def test_activation_inside_a_gradient_is_plain_code() -> None:
    x = mx.zeros((1024, 1024))
    graph = capture(lambda x: mx.grad(lambda y: nn.silu(y * 1.5).sum())(x), (x,), state=[]).graph
    assert not [region for region in graph.regions if region.kind == "compile"]


def test_functions_are_compiled_again_after_a_capture() -> None:
    x, calls = mx.zeros((4,)), []

    @mx.compile
    def counted(x: mx.array) -> mx.array:
        calls.append(1)
        return x + 1

    capture(lambda x: counted(x), (x,), state=[])
    calls.clear()
    counted(x)
    counted(x)
    assert len(calls) == 1


def test_step_that_calls_a_compiled_step_is_compiled_where_that_is() -> None:
    model, optimizer = nn.Linear(8, 8), optim.SGD(0.1)
    whole = recompute_steps.training(
        model, lambda model, x: nn.silu(model(x)).sum(), (mx.zeros((4, 8)),), optimizer, compiled=True
    )
    calling = Built(lambda x: whole.step(x), whole.arguments, whole.state, whole.evaluated)
    inner = captured(whole)
    outer = captured(calling)
    assert (inner.compiled, outer.compiled) == (True, False)
    assert outer.warnings == []
    programs = [prepare(for_cpu(c.graph), compiled=c.compiled, device=CPU) for c in (inner, outer)]
    assert lines_of(programs[0].graph) == lines_of(programs[1].graph)
