"""Which engine confirms a plan's choice: the trace, where it can run, or nothing beyond the estimate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oomguard.errors import TraceError
from oomguard.settings import Engine

if TYPE_CHECKING:
    from oomguard.device import Device
    from oomguard.search import Estimator


def find_tracer(engine: Engine, device: Device) -> tuple[Estimator | None, str | None]:
    """What simulates a step of the preset GPT on that device.

    Args:
        engine: ``trace`` must have it, ``auto`` takes it where there is one, ``estimate`` does without.
        device: the machine and backend to simulate.

    Returns:
        A function from model and step to an Estimate, or None; and a warning when ``auto`` has to do without.

    Raises:
        TraceError: the engine is ``trace`` and MLX cannot be imported here.
    """
    if engine == "estimate":
        return None, None
    try:
        import mlx.core  # noqa: F401, the trace captures a real step

        from oomguard.trace.preset import step_tracer
    except ImportError as error:
        if engine == "trace":
            raise TraceError(f"--engine trace needs MLX, which cannot be imported here: {error}") from error
        return None, f"not confirmed by a trace: MLX cannot be imported here ({error})"
    return step_tracer(device), None
