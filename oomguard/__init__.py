"""oomguard: will this training step fit this machine, and if not, what is the cheapest change that does?

    import oomguard

    plan = oomguard.plan("huge", memory="2GB")
    plan.choice.batch, str(plan.choice.policy), plan.choice.peak_bytes
    oomguard.largest_batch("huge", memory="2GB", grad_checkpoint="every")
    with oomguard.Guard.of(plan) as guard:  # beside your own training loop
        ...

The names are found when they are first used, so that ``import oomguard`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oomguard.guard import Guard as Guard
    from oomguard.planner import Plan as Plan
    from oomguard.planner import largest_batch as largest_batch
    from oomguard.planner import plan as plan

_HOME = {
    "Guard": "oomguard.guard",
    "Plan": "oomguard.planner",
    "largest_batch": "oomguard.planner",
    "plan": "oomguard.planner",
}

__all__ = ["Guard", "Plan", "largest_batch", "plan"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
