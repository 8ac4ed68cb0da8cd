"""What runs beside training: keeps MLX within a plan's limits, and warns before the budget is passed.

with oomguard.Guard.of(plan) as guard:
    for batch in batches:
        train_step(batch)
        guard.check()
print(guard.summary())
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from oomguard.config.problems import check_callable, check_type
from oomguard.errors import InputError, OomguardError
from oomguard.units import format_bytes

if TYPE_CHECKING:
    from oomguard.plan.planner import Plan

GROWTH_STEPS = 6  # steps in a row that end with more active memory than the one before
GROWTH_SHARE = 0.0005  # of the budget a step; less is noise of the allocator

WarningKind = Literal["prediction", "near", "passed", "growth"]


class GuardWarning(UserWarning):
    """What a guard says when nobody gave it another way to say it."""


@dataclass(frozen=True)
class Reading:
    """MLX's memory after one step; ``peak_bytes`` is the highest since the guard began."""

    step: int
    peak_bytes: int
    active_bytes: int
    cache_bytes: int

    @property
    def footprint_bytes(self) -> int:
        return self.active_bytes + self.cache_bytes


@dataclass(frozen=True)
class Notice:
    """One thing a guard has to say; each kind is said once."""

    kind: WarningKind
    text: str
    reading: Reading


class Guard:
    """A context manager that sets MLX's limits, watches each step, and puts the limits back.

    Args:
        budget_bytes: what the run may use.
        predicted_bytes: the predicted peak, to be shown beside the real one.
        high_bytes: the high end of the prediction; a peak above it is said. Where it is known it is the
            alarm: a plan that uses 97% of the budget as predicted is no reason to warn.
        cache_limit_bytes: the cache the allocator may keep; None leaves the limit as it is.
        memory_limit_bytes: above it MLX waits for running kernels before it starts more, which lowers the
            peak and costs time; None for the budget.
        warn_at: share of the budget at which the guard warns where there is no prediction.
        on_notice: called with each Notice; None raises a ``GuardWarning`` through ``warnings.warn``.

    Raises:
        InputError: a budget or a share that cannot be.
    """

    def __init__(
        self,
        budget_bytes: int,
        *,
        predicted_bytes: int | None = None,
        high_bytes: int | None = None,
        cache_limit_bytes: int | None = None,
        memory_limit_bytes: int | None = None,
        warn_at: float = 0.95,
        on_notice: Callable[[Notice], object] | None = None,
    ) -> None:
        sizes = {
            "predicted_bytes": predicted_bytes,
            "high_bytes": high_bytes,
            "cache_limit_bytes": cache_limit_bytes,
            "memory_limit_bytes": memory_limit_bytes,
        }
        check_type("budget_bytes", budget_bytes, int, "a whole number of bytes")
        for name, size in sizes.items():
            if size is not None:
                check_type(name, size, int, "a whole number of bytes, or None")
                if size < 0:
                    raise InputError(f"{name} of {size} is less than nothing; give bytes, or None")
        check_type("warn_at", warn_at, (int, float), "a share of the budget such as 0.95")
        if on_notice is not None:
            check_callable("on_notice", on_notice, "a function that takes a Notice, or None")
        if budget_bytes <= 0:
            raise InputError(f"a budget of {budget_bytes} bytes holds nothing; give what the run may use")
        if not 0 < warn_at <= 1:
            raise InputError(f"warn_at {warn_at} is not a share of the budget; give one such as 0.95")
        self.budget_bytes = budget_bytes
        self.predicted_bytes = predicted_bytes
        self.high_bytes = high_bytes
        self.cache_limit_bytes = cache_limit_bytes
        self.memory_limit_bytes = budget_bytes if memory_limit_bytes is None else memory_limit_bytes
        self.warn_at = warn_at
        self.notices: list[Notice] = []
        self.last: Reading | None = None
        self._on_notice = on_notice
        self._peak = 0
        self._recent: deque[int] = deque(maxlen=GROWTH_STEPS + 1)
        self._mx: Any = None
        self._old_limits: tuple[int | None, int | None] = (None, None)

    @classmethod
    def of(
        cls, plan: Plan, *, warn_at: float = 0.95, on_notice: Callable[[Notice], object] | None = None
    ) -> Guard:
        """The guard of a plan's choice: its budget, its prediction, the cache limit it assumes.

        Raises:
            InputError: the plan has no choice, because nothing fits.
        """
        from oomguard.plan.planner import Plan

        check_type("plan", plan, Plan, "what oomguard.plan(...) returns")
        if plan.choice is None:
            raise InputError("the plan has no choice to guard: nothing fits its budget")
        return cls(
            plan.budget.budget_bytes,
            predicted_bytes=plan.choice.peak_bytes,
            high_bytes=plan.choice.high_bytes,
            cache_limit_bytes=plan.choice.cache_limit_bytes,
            warn_at=warn_at,
            on_notice=on_notice,
        )

    def __enter__(self) -> Guard:
        import mlx.core as mx

        from oomguard.machine.device import remember_probe

        self._mx = mx
        old_memory = mx.set_memory_limit(self.memory_limit_bytes)
        old_cache = None if self.cache_limit_bytes is None else mx.set_cache_limit(self.cache_limit_bytes)
        self._old_limits = (old_memory, old_cache)
        mx.reset_peak_memory()
        remember_probe()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        old_memory, old_cache = self._old_limits
        if old_memory is not None:
            self._mx.set_memory_limit(old_memory)
        if old_cache is not None:
            self._mx.set_cache_limit(old_cache)
        self._old_limits = (None, None)

    def check(self) -> Reading:
        """Reads the counters after a step was evaluated; a few microseconds.

        Raises:
            OomguardError: outside the ``with`` statement.
        """
        if self._old_limits[0] is None:
            raise OomguardError("the guard is not on; call check() inside `with guard:`")
        self._peak = max(self._peak, int(self._mx.get_peak_memory()))
        reading = Reading(
            step=self.last.step + 1 if self.last else 1,
            peak_bytes=self._peak,
            active_bytes=int(self._mx.get_active_memory()),
            cache_bytes=int(self._mx.get_cache_memory()),
        )
        self.last = reading
        self._recent.append(reading.active_bytes)
        self._notice(reading)
        return reading

    def _notice(self, reading: Reading) -> None:
        peak, budget = format_bytes(reading.peak_bytes), format_bytes(self.budget_bytes)
        after = f"peak {peak} after step {reading.step}"
        if reading.peak_bytes > self.budget_bytes:
            over = format_bytes(reading.peak_bytes - self.budget_bytes)
            self._say("passed", f"{after}: {over} over the budget of {budget}", reading)
        elif self.high_bytes is None and reading.peak_bytes >= self.warn_at * self.budget_bytes:
            share = reading.peak_bytes / self.budget_bytes
            self._say("near", f"{after}: {share:.0%} of the budget of {budget}", reading)
        if self.high_bytes is not None and reading.peak_bytes > self.high_bytes:
            high = format_bytes(self.high_bytes)
            self._say("prediction", f"{after}: above the predicted {high} at most", reading)
        growth = self._growth_bytes()
        if growth > GROWTH_SHARE * self.budget_bytes:
            left = max(0, self.budget_bytes - reading.peak_bytes) // growth + 1
            text = (
                f"active memory grew by {format_bytes(growth)} a step for {GROWTH_STEPS} steps; at that rate "
                f"the budget of {budget} is passed in {left} steps. Does something keep arrays of earlier "
                "steps, such as losses that were never evaluated?"
            )
            self._say("growth", text, reading)

    def _growth_bytes(self) -> int:
        """Growth a step of the active memory if it grew in each of the last steps, else 0."""
        recent = list(self._recent)
        if len(recent) <= GROWTH_STEPS or any(b <= a for a, b in pairwise(recent)):
            return 0
        return (recent[-1] - recent[0]) // GROWTH_STEPS

    def _say(self, kind: WarningKind, text: str, reading: Reading) -> None:
        if any(notice.kind == kind for notice in self.notices):
            return
        notice = Notice(kind, text, reading)
        self.notices.append(notice)
        if self._on_notice is not None:
            self._on_notice(notice)
        else:
            warnings.warn(f"oomguard: {text}", GuardWarning, stacklevel=4)

    @property
    def within_budget(self) -> bool:
        """Whether the peak so far is within the budget."""
        return self._peak <= self.budget_bytes

    def summary(self) -> str:
        """One line: predicted, peak, active, cache, budget."""
        if self.last is None:
            return "no step was checked"
        predicted = self.predicted_bytes
        parts = [] if predicted is None else [f"predicted {format_bytes(predicted)}"]
        parts.append(f"peak {format_bytes(self.last.peak_bytes)}")
        parts.append(f"active {format_bytes(self.last.active_bytes)}")
        parts.append(f"cache {format_bytes(self.last.cache_bytes)}")
        within = "within" if self.within_budget else "OVER"
        return f"{', '.join(parts)}, {within} the budget of {format_bytes(self.budget_bytes)}"
