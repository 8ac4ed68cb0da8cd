"""How much memory a child may take, so that a bad configuration cannot freeze the machine."""

from __future__ import annotations

from pathlib import Path

from oomguard.config import ITEM_BYTES, ModelConfig, StepConfig

KEEP_FREE_FRACTION = 0.05
KEEP_FREE_BYTES = 256 << 20
CRITICAL_BYTES = 128 << 20
MOMENTS = {"sgd": 1, "adam": 2, "adamw": 2, "lion": 1, "adafactor": 0, "muon": 1}


def available_bytes() -> int:
    """Memory that can be had without swapping: what the system has, or what the container leaves."""
    import psutil

    system = int(psutil.virtual_memory().available)
    container = _container_left()
    return system if container is None else min(system, container)


def _container_left(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What a cgroup v2 limit still leaves; None without a limit."""
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)


def default_limit_bytes() -> int:
    """What a child may hold: all that is available, less a reserve for the rest of the machine."""
    available = available_bytes()
    return max(0, available - max(KEEP_FREE_BYTES, int(available * KEEP_FREE_FRACTION)))


def least_bytes(model: ModelConfig, step: StepConfig) -> int:
    """What the step holds at the least: weights, gradients, optimizer state. Activations are not counted."""
    return model.params * ITEM_BYTES[step.dtype] * (2 + MOMENTS[step.optimizer])
