"""Steps in the surroundings of a process: the calls of one update stand between each other."""

from __future__ import annotations

from typing import Any

import pytest

from oomguard.config.model import ModelConfig
from oomguard.config.step import StepConfig
from oomguard.model.cases import build_case
from oomguard.model.step import build_step
from oomguard.rows import read_rows, shipped_row_files
from oomguard.trace.engine import built_for, capture_built, prepare, surroundings_of, trace_built
from oomguard.trace.memory import CPU, Memory, Program
from oomguard.trace.steps import ALONE, Steps, Surroundings, graph_peak, step_peaks, within_update

MODEL = ModelConfig(name="narrow", n_layers=3, d_model=32, n_heads=2, d_mlp=128, context=32)


def built(accumulate: int) -> Any:
    return build_step(MODEL, StepConfig(batch=2, seq_len=32, accumulate=accumulate), evaluated=False)


def programs_of(step: Any) -> list[Program]:
    return [
        prepare(built_for(CPU, captured), compiled=captured.compiled, device=CPU)
        for captured in capture_built(step)
    ]


@pytest.mark.parametrize("accumulate", [2, 3, 5])
@pytest.mark.parametrize("limit", [None, 0])
def test_calls_simulated_apart_peak_as_they_do_one_after_the_other(
    accumulate: int, limit: int | None
) -> None:
    step = built(accumulate)
    programs, around = programs_of(step), surroundings_of(step)
    memory = Memory(CPU, limit)
    calls = [Steps(program, limit, None, ALONE) for program in programs]
    for call in calls:
        call.memory = memory
    order = [0, *[1] * (accumulate - 2), len(calls) - 1]
    calls[0]._count(around.before)
    together: list[list[int]] = [[] for _ in calls]
    for _ in range(3):
        for position, number in enumerate(order):
            peak = calls[number].step().peak_bytes
            if position in (0, accumulate - 1) or position == 1:
                together[number].append(peak)
        calls[0]._count(around.between)
    apart = [
        step_peaks(program, 3, memory_limit=limit, surroundings=surroundings)
        for program, surroundings in zip(programs, within_update(programs, accumulate, around), strict=True)
    ]
    # What the cache holds differs, so a buffer may be a few KiB larger.
    for ours, theirs in zip(apart, together, strict=True):
        assert ours == pytest.approx(theirs, rel=0.005)


def test_a_single_call_has_the_surroundings_of_its_process() -> None:
    around = Surroundings(before=7, between=3)
    assert within_update(programs_of(built(1)), 1, around) == [around]


def test_every_dispatch_of_an_update_is_counted_once() -> None:
    programs = programs_of(built(4))
    around = Surroundings(before=7, between=3)
    first, middle, last = within_update(programs, 4, around)
    counts = [Steps(program, None, None, ALONE) for program in programs]
    for steps in counts:
        steps.step()
    a, b, c = (steps.memory.queue.submitted for steps in counts)  # type: ignore[attr-defined]
    assert (first.before, middle.before, last.before) == (7, 7 + a, 7 + a + 2 * b)
    assert first.between + a == middle.between + b == last.between + c == a + 2 * b + c + 3


def test_nothing_in_flight_holds_least() -> None:
    program = programs_of(built(1))[0]
    assert graph_peak(program) <= min(step_peaks(program, 3, memory_limit=0)) <= min(step_peaks(program, 3))


@pytest.mark.parametrize("case", ["conv-plain-accumulate", "llama-block-accumulate"])
def test_accumulated_steps_peak_as_measured_with_the_memory_limit_at_nothing(case: str) -> None:
    """With the calls of an update taken apart they are 4.8% and 3.1% off."""
    row = next(row for path in shipped_row_files() for row in read_rows(path)[1] if row.case == case)
    found = trace_built(build_case(case, evaluated=False), device="cpu", steady_steps=row.steps)
    assert found.sequenced_peak_bytes == pytest.approx(row.sequenced_peak_bytes, rel=0.002)
