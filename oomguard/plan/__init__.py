"""The fastest setting of a training step that fits a budget, and why.

``oomguard.plan("huge", memory="2GB")`` plans; see ``planner.plan``. The package itself is what is called, so that its
parts can be imported beside it.
"""

from oomguard.callable_package import call_as

call_as(__name__, "oomguard.plan.planner", "plan")
