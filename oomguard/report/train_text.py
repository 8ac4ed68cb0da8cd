"""A training run as text and JSON: how it begins, a line an update, and the one line it ends with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from oomguard.plan.planner import Plan
from oomguard.report.plan_text import say_budget
from oomguard.report.words import say_batch, say_model, say_policy, say_step
from oomguard.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from oomguard.guard import Guard
    from oomguard.model.trainer import TrainResult, Update

TRAIN_SCHEMA = "oomguard.train/1"


def opening_lines(plan: Plan) -> list[str]:
    """What will run, and what it is predicted to hold of which budget."""
    choice = plan.choice
    assert choice is not None
    policy = say_policy(choice.policy, plan.request.model.n_layers)
    return [
        say_model(plan.request.model),
        f"{say_step(choice.step)}; {say_batch(choice.step)}, {policy}",
        f"predicted peak {format_bytes(choice.peak_bytes)} (at most {format_bytes(choice.high_bytes)}), "
        f"cache limit {format_bytes(choice.cache_limit_bytes)}",
        f"budget {say_budget(plan.budget)}",
    ]


def update_line(update: Update, steps: int, tokens: int, seconds_left: float) -> str:
    """``step 5/20  loss 3.214  val 3.301  lr 1.0e-03  812 tokens/s  peak 1.8 GiB  2 min left``."""
    width = len(str(steps))
    parts = [f"step {update.step:{width}}/{steps}", f"loss {update.loss:.3f}"]
    if update.val_loss is not None:
        parts.append(f"val {update.val_loss:.3f}")
    parts += [
        f"lr {update.learning_rate:.1e}",
        f"{tokens / update.seconds:,.0f} tokens/s",
        f"peak {format_bytes(update.peak_bytes)}",
    ]
    if update.step < steps:
        parts.append(f"{format_seconds(seconds_left)} left")
    return "  ".join(parts)


def final_line(guard: Guard, result: TrainResult) -> str:
    """Predicted, peak, active, cache, whether within the budget, tokens/s: the line a run ends with."""
    return f"{guard.summary()}, {result.tokens_per_second:,.0f} tokens/s"


def train_json(
    plan: Plan,
    guard: Guard,
    result: TrainResult,
    *,
    saved: str | None,
    learned: str | None,
    notes: Sequence[str],
) -> dict[str, Any]:
    """The object ``oomguard train --json`` prints when a run ends."""
    choice = plan.choice
    assert choice is not None
    last = guard.last
    return {
        "schema": TRAIN_SCHEMA,
        "settings": result.settings.model_dump(mode="json"),
        "budget_bytes": plan.budget.budget_bytes,
        "bound_by": plan.budget.bound_by,
        "predicted_bytes": choice.peak_bytes,
        "low_bytes": choice.estimate.low_bytes,
        "high_bytes": choice.high_bytes,
        "cache_limit_bytes": choice.cache_limit_bytes,
        "peak_bytes": last.peak_bytes if last else 0,
        "active_bytes": last.active_bytes if last else 0,
        "cache_bytes": last.cache_bytes if last else 0,
        "within_budget": guard.within_budget,
        "tokens_per_second": round(result.tokens_per_second, 3),
        "first_step": result.first_step,
        "last_step": result.step,
        "stopped": result.stopped,
        "losses": [round(update.loss, 6) for update in result.updates],
        "val_losses": [[step, round(loss, 6)] for step, loss in result.val_losses],
        "saved": saved,
        "learned": learned,
        "warnings": list(notes),
    }
