"""Which engine confirms a plan's choice: the trace, where it can run, or nothing beyond the estimate."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from oomguard.config import NO_CHECKPOINT, ModelConfig, StepConfig
from oomguard.errors import TraceError
from oomguard.inventory import Inventory
from oomguard.search import Traced, Tracer
from oomguard.settings import Engine

if TYPE_CHECKING:
    from oomguard.device import Device
    from oomguard.trace.result import TraceResult

OTHER_ARCHITECTURE = "applegpu_g16s"  # of a Pro or Max, where the machine's own is not known
TRACE_MARGIN = 0.03  # a default run may peak this much above its trace (the trace's own stated bound)


def find_tracer(engine: Engine, device: Device) -> tuple[Tracer | None, str | None]:
    """What simulates a step of the preset GPT on that device.

    Args:
        engine: ``trace`` must have it, ``auto`` takes it where there is one, ``estimate`` does without.
        device: the machine and backend to simulate.

    Returns:
        A function from model and step to what it holds, or None; and a warning where ``auto`` does without.

    Raises:
        TraceError: the engine is ``trace`` and cannot be had; the text says why.
    """
    if engine == "estimate":
        return None, None
    reason = _why_not(device)
    if reason is None:
        return partial(trace_step, device=device), None
    if engine == "trace":
        raise TraceError(f"--engine trace: {reason}; --engine estimate does without")
    return None, f"not confirmed by a trace: {reason}"


def _why_not(device: Device) -> str | None:
    if device.backend == "cuda":
        return "the preset GPT is simulated on the cpu and metal backends, and the plan is for cuda"
    try:
        import mlx.core  # noqa: F401, the trace captures a real step
    except ImportError as error:
        return f"MLX cannot be imported here ({error})"
    return None


def trace_step(model: ModelConfig, step: StepConfig, device: Device | None = None) -> Traced:
    """One step of the preset GPT, captured without running it and simulated.

    Args:
        model, step: what runs.
        device: the machine; the CPU backend if None. For Metal the step is captured once without recompute, and
            the graph is rewritten as the policy and the GPU would have it.

    Raises:
        TraceError: the step cannot be captured.
    """
    from oomguard.model.step import build_step
    from oomguard.trace.engine import trace_built

    if device is None or device.backend == "cpu":
        found = trace_built(build_step(model, step, evaluated=False))
    else:
        found = _trace_on_metal(model, step, device)
    return Traced(
        peak_bytes=found.peak_bytes,
        low_bytes=found.low_bytes,
        high_bytes=max(found.high_bytes, int(found.peak_bytes * (1 + TRACE_MARGIN))),
        sequenced_peak_bytes=found.sequenced_peak_bytes,
        phase=str(found.moment),
        breakdown={name.replace(" ", "_"): size for name, size in found.breakdown.items()},
        largest_tensor_bytes=found.largest_buffer_bytes,
        warnings=tuple(found.warnings),
    )


def _trace_on_metal(model: ModelConfig, step: StepConfig, device: Device) -> TraceResult:
    import mlx.core as mx

    from oomguard.measure.provenance import mlx_version
    from oomguard.model.step import build_step
    from oomguard.trace import metal
    from oomguard.trace.engine import trace_built
    from oomguard.trace.lower import parse_version
    from oomguard.trace.policies import MARKED
    from oomguard.trace.remat import apply_policy

    chip = metal.Chip.named(device.architecture or OTHER_ARCHITECTURE)
    version = parse_version(device.mlx or mlx_version())
    inventory = Inventory(model, step, "metal")
    return trace_built(
        build_step(model, step.but(checkpoint=NO_CHECKPOINT), evaluated=False),
        device=metal.device(chip, version, native=mx.metal.is_available()),
        rewrite=lambda graph: apply_policy(
            graph, step.checkpoint, block_to_boundary=inventory.block_to_boundary
        ),
        marked=MARKED,
    )
