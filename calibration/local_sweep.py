"""The configurations ``oomguard calibrate`` measures: chosen for the machine's memory and speed, and the time."""

from __future__ import annotations

from collections.abc import Iterator

from oomguard.config.model import ModelConfig
from oomguard.config.policy import CheckpointPolicy
from oomguard.config.presets import presets
from oomguard.config.step import StepConfig
from oomguard.estimate.coefficients import Coefficients
from oomguard.estimate.learn import MIN_LOCAL_ROWS
from oomguard.estimate.peak import estimate
from oomguard.machine.budget import find_budget
from oomguard.machine.device import Device
from oomguard.measure import Task

POLICIES = ("none", "every", "blocks=half", "attention", "stride=sqrt")
BATCHES = (1, 2, 4, 8, 16, 32)
LARGEST_SHARE = 0.4  # of the budget: a row must never press the machine it is measured on
LEAST_PEAK_BYTES = 32 << 20
STEPS_A_ROW = 8  # warm-up, default and sequenced steps, each about a step long
START_SECONDS = 4.0  # a child's start, compilation included
ROWS_WANTED = 24
SHORT_ROW_SECONDS = 12.0  # a short sweep is fewer rows, not only the smallest


def local_tasks(device: Device, coefficients: Coefficients, seconds: float) -> list[Task]:
    """What to measure, most telling first, so that a sweep stopped early still spans sizes and policies.

    Args:
        device: the machine; its budget bounds the largest row.
        coefficients: what is known so far; sizes and times are estimated with it.
        seconds: the time given; no row may take more than its share.
    """
    budget_bytes = find_budget(device).budget_bytes
    row_seconds = max(seconds / (ROWS_WANTED / 3), min(seconds / MIN_LOCAL_ROWS, SHORT_ROW_SECONDS))
    groups: dict[tuple[str, str], list[Task]] = {}
    for name, policy, task in _candidates():
        assert task.model is not None
        assert task.step is not None
        found = estimate(task.model, task.step, coefficients, backend=coefficients.backend)
        fits = found.peak_bytes >= LEAST_PEAK_BYTES and found.high_bytes <= LARGEST_SHARE * budget_bytes
        if fits and START_SECONDS + STEPS_A_ROW * found.step_seconds <= row_seconds:
            groups.setdefault((policy, name), []).append(task)
    return _in_turn(groups)[: 4 * ROWS_WANTED]


def _candidates() -> Iterator[tuple[str, str, Task]]:
    for name, model in presets().items():
        for policy in POLICIES:
            for batch in BATCHES:
                yield name, policy, Task(model=model, step=_step(model, batch, policy))


def _step(model: ModelConfig, batch: int, policy: str) -> StepConfig:
    text = policy.replace("half", str(model.n_layers // 2))
    return StepConfig(batch=batch, seq_len=model.context, checkpoint=CheckpointPolicy.parse(text))


def _in_turn(groups: dict[tuple[str, str], list[Task]]) -> list[Task]:
    """One task of each policy and shape in turn, the largest batch first."""
    left = [list(tasks) for tasks in groups.values()]
    order = []
    while any(left):
        order += [tasks.pop() for tasks in left if tasks]
    return order
