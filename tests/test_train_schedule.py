"""The schedule rises, falls as half a cosine, and compiles into the step."""

from __future__ import annotations

import mlx.core as mx
import pytest

from oomguard.config.step import OPTIMIZERS
from oomguard.model.schedule import default_rate, default_warmup, warmup_cosine


def rates(peak: float, warmup: int, steps: int, upto: int) -> list[float]:
    schedule = warmup_cosine(peak, warmup, steps)
    return [schedule(mx.array(done, mx.uint64)).item() for done in range(upto)]


def test_schedule_rises_to_the_peak_and_falls_to_a_tenth() -> None:
    found = rates(1.0, 4, 20, 30)
    assert found[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert found[4:21] == sorted(found[4:21], reverse=True)
    assert found[12] == pytest.approx(0.55)  # half way down
    assert found[20:] == pytest.approx([0.1] * 10)


def test_schedule_without_warmup_begins_at_the_peak() -> None:
    assert rates(3e-4, 0, 10, 1) == pytest.approx([3e-4])


def test_schedule_of_one_step_is_defined() -> None:
    assert rates(1.0, 0, 1, 2) == pytest.approx([1.0, 0.1])


@pytest.mark.parametrize(
    ("steps", "warmup"), [(1, 0), (2, 1), (3, 1), (20, 5), (100, 10), (1000, 100), (9000, 200)]
)
def test_schedule_default_warmup_is_a_tenth_within_bounds(steps: int, warmup: int) -> None:
    assert default_warmup(steps) == warmup
    assert default_warmup(steps) < steps


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_schedule_default_rate_never_rises_with_the_width(optimizer: str) -> None:
    found = [default_rate(optimizer, width) for width in (64, 128, 256, 1024, 4096)]
    assert found == sorted(found, reverse=True)
    assert default_rate("adamw", 128) == 1e-3
