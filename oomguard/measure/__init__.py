"""Measured peaks: one training step in a process of its own, from step 2 on.

``measure``, ``measure_case`` and ``measure_callable`` give one row; ``sweep`` measures many into a row file
and goes on where it was stopped. MLX is imported by the children only.
"""

from oomguard.measure.collect import Progress, measure, measure_callable, measure_case, measure_task, sweep
from oomguard.measure.sweep_file import Sweep, expand, read_sweep
from oomguard.measure.task import Settings, Task

__all__ = [
    "Progress",
    "Settings",
    "Sweep",
    "Task",
    "expand",
    "measure",
    "measure_callable",
    "measure_case",
    "measure_task",
    "read_sweep",
    "sweep",
]
