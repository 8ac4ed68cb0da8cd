"""The guard: limits set and put back, each warning once and before the budget is passed."""

from __future__ import annotations

import time
from collections.abc import Iterator

import mlx.core as mx
import pytest
from plan_fakes import HERE, FakeCoefficients, FakeEstimator, request

from oomguard.errors import InputError, OomguardError
from oomguard.guard import GROWTH_STEPS, Guard, GuardWarning, Notice
from oomguard.plan.planner import answer
from oomguard.units import GIB, MIB


@pytest.fixture(autouse=True)
def _empty_cache() -> Iterator[None]:
    mx.clear_cache()
    yield
    mx.clear_cache()


def hold(size_bytes: int) -> mx.array:
    array = mx.zeros((size_bytes // 4,), dtype=mx.float32)
    mx.eval(array)
    return array


def limits() -> tuple[int, int]:
    """The memory and the cache limit as they are now."""
    memory = mx.set_memory_limit(GIB)
    mx.set_memory_limit(memory)
    cache = mx.set_cache_limit(MIB)
    mx.set_cache_limit(cache)
    return memory, cache


def test_guard_sets_the_limits_and_puts_them_back() -> None:
    before = limits()
    with Guard(3 * GIB, cache_limit_bytes=5 * MIB):
        assert limits() == (3 * GIB, 5 * MIB)
    assert limits() == before


def test_guard_puts_the_limits_back_after_an_error() -> None:
    before = limits()
    with pytest.raises(ZeroDivisionError), Guard(3 * GIB, cache_limit_bytes=5 * MIB):
        raise ZeroDivisionError
    assert limits() == before


def test_guard_without_a_cache_limit_leaves_the_cache_alone() -> None:
    before = limits()[1]
    with Guard(3 * GIB):
        assert limits()[1] == before


def test_reading_has_peak_active_and_cache() -> None:
    start = mx.get_active_memory()
    with Guard(8 * GIB) as guard:
        array = hold(16 * MIB)
        first = guard.check()
        del array
        second = guard.check()
    assert first.step == 1
    assert first.active_bytes - start == pytest.approx(16 * MIB, abs=64 * 1024)
    assert second.step == 2
    assert second.active_bytes - start < MIB
    assert second.cache_bytes >= 16 * MIB
    assert second.peak_bytes == first.peak_bytes >= 16 * MIB


def test_peak_outlives_a_reset_by_the_user() -> None:
    with Guard(8 * GIB) as guard:
        array = hold(16 * MIB)
        peak = guard.check().peak_bytes
        del array
        mx.reset_peak_memory()
        assert guard.check().peak_bytes == peak


def test_guard_warns_once_before_the_budget_is_passed() -> None:
    start = mx.get_active_memory()
    heard: list[Notice] = []
    with Guard(start + 20 * MIB, warn_at=0.9, on_notice=heard.append) as guard:
        kept = [hold(10 * MIB)]
        guard.check()
        assert heard == []
        kept.append(hold(9 * MIB))
        guard.check()
        guard.check()
        assert guard.within_budget
    assert [notice.kind for notice in heard] == ["near"]
    assert "of the budget" in heard[0].text


def test_guard_is_silent_near_the_budget_when_that_was_predicted() -> None:
    heard: list[Notice] = []
    start = mx.get_active_memory()
    limit = start + 20 * MIB
    with Guard(limit, high_bytes=limit, on_notice=heard.append) as guard:
        kept = hold(20 * MIB - 64 * 1024)
        guard.check()
    assert kept.size
    assert guard.last is not None
    assert guard.last.peak_bytes > 0.95 * limit
    assert heard == []


def test_guard_says_that_the_budget_was_passed() -> None:
    start = mx.get_active_memory()
    with Guard(start + 4 * MIB) as guard:
        kept = hold(8 * MIB)
        with pytest.warns(GuardWarning, match="over the budget"):
            guard.check()
    assert kept.size
    assert not guard.within_budget
    assert "OVER the budget" in guard.summary()


def test_guard_says_that_the_prediction_was_too_low() -> None:
    heard: list[Notice] = []
    start = mx.get_active_memory()
    with Guard(8 * GIB, high_bytes=start + 4 * MIB, on_notice=heard.append) as guard:
        kept = hold(8 * MIB)
        guard.check()
    assert kept.size
    assert [notice.kind for notice in heard] == ["prediction"]


def test_guard_notices_memory_that_grows_each_step_and_when_it_runs_out() -> None:
    heard: list[Notice] = []
    start = mx.get_active_memory()
    kept = []
    with Guard(start + 64 * MIB, on_notice=heard.append) as guard:
        for _ in range(GROWTH_STEPS + 1):
            kept.append(hold(2 * MIB))
            guard.check()
    assert [notice.kind for notice in heard] == ["growth"]
    assert "2.0 MiB a step" in heard[0].text
    assert "in 25 steps" in heard[0].text


def test_guard_is_silent_over_steps_that_hold_steady() -> None:
    heard: list[Notice] = []
    with Guard(8 * GIB, on_notice=heard.append) as guard:
        for _ in range(20):
            mx.eval(mx.ones((1000, 100)) * 2)
            guard.check()
    assert heard == []


def test_guard_costs_microseconds_a_step() -> None:
    with Guard(64 * GIB) as guard:
        guard.check()
        began = time.perf_counter()
        for _ in range(1000):
            guard.check()
        took = (time.perf_counter() - began) / 1000
    assert took < 200e-6


def test_guard_of_a_plan_takes_its_budget_and_prediction() -> None:
    plan = answer(
        request(memory_bytes=100 * MIB),
        HERE,
        estimator=FakeEstimator(band=0.05),
        calibration=FakeCoefficients(),
    )
    assert plan.choice is not None
    guard = Guard.of(plan)
    assert guard.budget_bytes == 100 * MIB
    assert guard.predicted_bytes == plan.choice.peak_bytes
    assert guard.high_bytes == plan.choice.high_bytes
    assert guard.cache_limit_bytes == plan.choice.cache_limit_bytes


def test_guard_of_a_plan_without_a_choice_is_refused() -> None:
    plan = answer(request(memory_bytes=MIB), HERE, estimator=FakeEstimator(), calibration=FakeCoefficients())
    with pytest.raises(InputError, match="nothing fits"):
        Guard.of(plan)


def test_check_outside_the_with_statement_is_refused() -> None:
    guard = Guard(GIB)
    with pytest.raises(OomguardError, match="not on"):
        guard.check()
    assert guard.summary() == "no step was checked"


@pytest.mark.parametrize("settings", [{"budget_bytes": 0}, {"budget_bytes": GIB, "warn_at": 0.0}])
def test_impossible_guard_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(InputError):
        Guard(**settings)  # type: ignore[arg-type]
