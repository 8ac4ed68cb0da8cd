"""The peak of any MLX step, simulated without running it: capture, rewrite, schedule, memory.

``oomguard.trace(step, *arguments, state=[model, optimizer])`` traces a step; see ``engine.trace``. The package
itself is what is called, so that its parts can be imported beside it.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Traceable(ModuleType):
    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        from oomguard.trace.engine import trace

        return trace(*arguments, **settings)


sys.modules[__name__].__class__ = _Traceable
