"""oomguard: will this training step fit this machine, and if not, what is the cheapest change that does?

    import oomguard

    plan = oomguard.plan("huge", memory="2GB")
    plan.choice.batch, str(plan.choice.policy), plan.choice.peak_bytes
    oomguard.largest_batch("huge", memory="2GB", grad_checkpoint="every")
    with oomguard.Guard.of(plan) as guard:  # beside your own training loop
        ...
    oomguard.trace(step, batch, state=[model, optimizer]).peak_bytes  # any MLX step, not run
    oomguard.checkpoint_layers(model.layers, "every")  # recompute in any list of MLX layers

The names are found when they are first used, so that ``import oomguard`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oomguard.guard import Guard as Guard
    from oomguard.model.checkpoint import checkpoint_layers as checkpoint_layers
    from oomguard.plan.planner import Plan as Plan
    from oomguard.plan.planner import largest_batch as largest_batch
    from oomguard.plan.planner import plan as plan
    from oomguard.trace.engine import trace as trace

_HOME = {
    "Guard": "oomguard.guard",
    "Plan": "oomguard.plan.planner",
    "largest_batch": "oomguard.plan.planner",
    "checkpoint_layers": "oomguard.model.checkpoint",
}

_CALLABLE = ("plan", "trace")  # packages that can be called

__all__ = ["Guard", "Plan", "checkpoint_layers", "largest_batch", "plan", "trace"]


def __getattr__(name: str) -> Any:
    if name in _CALLABLE:
        return importlib.import_module(f"oomguard.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_CALLABLE})
