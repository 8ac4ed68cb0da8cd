"""The peak of any MLX step, simulated without running it: capture, rewrite, schedule, memory.

``oomguard.trace(step, *arguments, state=[model, optimizer])`` traces a step; see ``engine.trace``. The package
itself is what is called, so that its parts can be imported beside it.
"""

from oomguard.callable_package import call_as

call_as(__name__, "oomguard.trace.engine", "trace")
