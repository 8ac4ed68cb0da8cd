"""How much memory a child may take, so that a bad configuration cannot freeze the machine."""

from __future__ import annotations

from oomguard.config.model import ModelConfig
from oomguard.config.step import StepConfig
from oomguard.errors import OomguardError
from oomguard.estimate.peak import estimate
from oomguard.machine.system import Backend, container_bytes, memory
from oomguard.units import MIB

KEEP_FREE_FRACTION = 0.05
KEEP_FREE_BYTES = 256 * MIB
CRITICAL_FRACTION = 0.02
CRITICAL_BYTES = 256 * MIB


def available_bytes() -> int:
    """Memory that can be had without swapping: what the system has, or what the container leaves."""
    container = container_bytes()
    system = memory().free_bytes
    return system if container is None else min(system, container)


def is_critical(left_bytes: int) -> bool:
    """Whether the machine has so little left that a child must end for it."""
    return left_bytes < max(CRITICAL_BYTES, int(memory().total_bytes * CRITICAL_FRACTION))


def default_limit_bytes() -> int:
    """What a child may hold: all that is available, less a reserve for the rest of the machine."""
    available = available_bytes()
    return max(0, available - max(KEEP_FREE_BYTES, int(available * KEEP_FREE_FRACTION)))


def least_bytes(model: ModelConfig, step: StepConfig, backend: Backend) -> int:
    """The low end of the step's estimate; where nothing is there to estimate with, weights and gradients."""
    try:
        return estimate(model, step, backend=backend).low_bytes
    except (OomguardError, OSError):
        return 2 * model.params * step.item_bytes
