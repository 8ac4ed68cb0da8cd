"""Which engine confirms a plan's choice: the trace, where it can run, or nothing beyond the estimate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from oomguard.config.model import ModelConfig
from oomguard.config.policy import NO_CHECKPOINT, CheckpointPolicy
from oomguard.config.step import StepConfig
from oomguard.config.words import Engine
from oomguard.errors import TraceError
from oomguard.estimate.inventory import Inventory
from oomguard.plan.search import Traced, Tracer

if TYPE_CHECKING:
    from oomguard.machine.device import Device
    from oomguard.trace.policies import Policies
    from oomguard.trace.result import TraceResult

TRACE_MARGIN = 0.03  # a default run may peak this much above its trace (the trace's own stated bound)


def find_tracer(engine: Engine, device: Device) -> tuple[Tracer | None, str | None]:
    """What simulates a step of the preset GPT on that device.

    Args:
        engine: ``trace`` must have it, ``auto`` takes it where there is one, ``estimate`` does without.
        device: the machine and backend to simulate.

    Returns:
        A tracer, or None; and a warning where ``auto`` does without.

    Raises:
        TraceError: the engine is ``trace`` and cannot be had; the text says why.
    """
    if engine == "estimate":
        return None, None
    reason = _why_not(device)
    if reason is None:
        return PresetTracer(device), None
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


@dataclass(frozen=True)
class PresetTracer:
    """Simulates steps of the preset GPT on a machine."""

    device: Device

    def __call__(self, model: ModelConfig, step: StepConfig) -> Traced:
        """What a step holds; see ``trace_step``."""
        return trace_step(model, step, self.device)

    def least_recompute(
        self, model: ModelConfig, step: StepConfig, budget_bytes: int
    ) -> CheckpointPolicy | None:
        """The policy that recomputes least and fits: one capture, and the policies in between simulated."""
        within = int(budget_bytes / (1 + TRACE_MARGIN))
        price = preset_policies(model, step, self.device).cheapest(within)
        return price.policy if price.fits(within) else None


def trace_step(model: ModelConfig, step: StepConfig, device: Device | None = None) -> Traced:
    """One step of the preset GPT, captured without running it and simulated.

    Args:
        model, step: what runs.
        device: the machine; what MLX computes on here if None. For a GPU the step is captured once without recompute,
            and the graph is rewritten as the policy and the GPU would have it.

    Raises:
        TraceError: the step cannot be captured.
    """
    found = trace_preset(model, step, device)
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


def trace_preset(
    model: ModelConfig, step: StepConfig, device: Device | None = None, memory_limit: int | None = None
) -> TraceResult:
    """What ``trace_step`` is taken from.

    Args:
        memory_limit: as given to ``mx.set_memory_limit``, in bytes; None for MLX's default.
    """
    from oomguard.model.step import build_step
    from oomguard.trace.backends import simulated
    from oomguard.trace.engine import trace_built
    from oomguard.trace.policies import MARKED
    from oomguard.trace.remat import apply_policy

    target = simulated(device)
    if target.name == "cpu":
        return trace_built(build_step(model, step, evaluated=False), device=target, memory_limit=memory_limit)
    ratio = Inventory(model, step, "metal").block_to_boundary
    return trace_built(
        build_step(model, step.but(checkpoint=NO_CHECKPOINT), evaluated=False),
        device=target,
        memory_limit=memory_limit,
        rewrite=lambda graph: apply_policy(graph, step.checkpoint, block_to_boundary=ratio),
        marked=MARKED,
    )


def preset_policies(
    model: ModelConfig, step: StepConfig, device: Device | None = None, memory_limit: int | None = None
) -> Policies:
    """The prices of all checkpoint policies of a step of the preset GPT, from one capture.

    Args:
        model, step: what runs; the step's own policy counts for nothing.
        device, memory_limit: as for ``trace_preset``.
    """
    from oomguard.model.step import build_step
    from oomguard.trace.policies import Policies

    plain = build_step(model, step.but(checkpoint=NO_CHECKPOINT), evaluated=False)
    return Policies.of_built(plain, device=device, memory_limit=memory_limit)
