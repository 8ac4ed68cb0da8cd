"""An estimator of a few honest formulas, so that the planner is tested apart from the fitted estimate."""

from __future__ import annotations

from dataclasses import dataclass, field

from oomguard.config.model import ModelConfig
from oomguard.config.step import StepConfig
from oomguard.machine.budget import Budget
from oomguard.machine.device import Device
from oomguard.plan.planner import Request
from oomguard.units import GIB, MIB


@dataclass(frozen=True)
class FakeEstimate:
    """The fields of ``oomguard.estimate.peak.Estimate``."""

    peak_bytes: int
    low_bytes: int
    high_bytes: int
    footprint_bytes: int
    sequenced_peak_bytes: int
    phase: str
    phases: dict[str, int]
    breakdown: dict[str, int]
    largest_tensor_bytes: int
    step_seconds: float
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class FakeCoefficients:
    """The fields of ``oomguard.estimate.coefficients.Coefficients`` a plan shows."""

    profile: str = "fake"
    backend: str = "cpu"
    mlx: str = "0.32.4"
    rows: int = 12
    median_error: float = 0.02
    worst_error: float = 0.08
    device: str = "a machine"
    passed_over: str = ""


@dataclass
class FakeEstimator:
    """Weights, gradients and moments; per block 34 boundaries and the scores, unless recomputed.

    ``band`` widens the peak both ways. Counts its calls.
    """

    band: float = 0.0
    flops_per_second: float = 1e12
    bytes_per_second: float = 5e10
    warnings: tuple[str, ...] = ()
    cache_bytes: int = 32 * MIB
    calls: list[StepConfig] = field(default_factory=list)

    def __call__(self, model: ModelConfig, step: StepConfig) -> FakeEstimate:
        self.calls.append(step)
        tokens, item = step.batch * step.seq_len, step.item_bytes
        boundary = tokens * model.d_model * item
        scores = 3 * step.batch * model.n_heads * step.seq_len**2 * item
        segments = step.checkpoint.segments(model.n_layers)
        whole = [len(s) for s in segments if s.region == "block"]
        cores = sum(len(s) for s in segments if s.region == "attention")
        saved_blocks = model.n_layers - sum(whole)
        weights = model.params * item
        breakdown = {
            "weights": weights,
            "gradients": weights * (2 if step.accumulate > 1 else 1),
            "optimizer_state": 2 * weights,
            "saved_tensors": saved_blocks * 34 * boundary + (saved_blocks - cores) * scores,
            "segment_inputs": len(whole) * boundary,
            "recompute": max(whole, default=0) * (34 * boundary + scores) or (scores if cores else 0),
        }
        peak = sum(breakdown.values())
        block_flops = 24 * tokens * model.d_model**2 + 4 * step.batch * step.seq_len**2 * model.d_model
        core_flops = 4 * step.batch * step.seq_len**2 * model.d_model
        forwards = 3 * model.n_layers * block_flops + sum(whole) * block_flops + cores * core_flops
        seconds = (
            step.accumulate * forwards / self.flops_per_second + 28 * model.params / self.bytes_per_second
        )
        return FakeEstimate(
            peak_bytes=peak,
            low_bytes=int(peak * (1 - self.band)),
            high_bytes=int(peak * (1 + self.band)),
            footprint_bytes=peak + self.cache_bytes,
            sequenced_peak_bytes=peak,
            phase="backward",
            phases={"backward": peak, "update": peak // 2},
            breakdown=breakdown,
            largest_tensor_bytes=max(scores // 3, boundary),
            step_seconds=seconds,
            warnings=self.warnings,
        )


SHAPE = ModelConfig(name="shape", n_layers=6, d_model=64, n_heads=4, d_mlp=256, context=128)
HERE = Device(
    name="a machine", backend="cpu", mlx="0.32.4", here=True, memory_bytes=16 * GIB, free_bytes=16 * GIB
)


def budget(size_bytes: int, largest_buffer_bytes: int | None = None) -> Budget:
    return Budget(size_bytes, "the memory given", 0, {"the memory given": size_bytes}, largest_buffer_bytes)


def request(model: ModelConfig = SHAPE, **changes: object) -> Request:
    step = StepConfig(batch=1, seq_len=model.context)
    return Request(model=model, step=step, **changes)  # type: ignore[arg-type]
