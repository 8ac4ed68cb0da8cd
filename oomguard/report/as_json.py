"""Plans and estimates as JSON objects: whole bytes, plain names, the schema's name first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oomguard.config.model import ModelConfig
from oomguard.config.policy import CheckpointPolicy
from oomguard.config.step import StepConfig
from oomguard.plan.planner import Plan, Request, Tradeoff
from oomguard.plan.search import RULE, Candidate

if TYPE_CHECKING:
    from oomguard.estimate.coefficients import Coefficients
    from oomguard.estimate.peak import Estimate

PLAN_SCHEMA = "oomguard.plan/1"
ESTIMATE_SCHEMA = "oomguard.estimate/1"


def plan_json(plan: Plan) -> dict[str, Any]:
    """The object ``oomguard plan --json`` prints; ``choice`` is null when nothing fits.

    From ``rule`` on to ``reliefs``, what stands beside choice and candidates is that of ``Plan``, null or empty where
    there is none.
    """
    return {
        "schema": PLAN_SCHEMA,
        "device": {
            "name": plan.device.name,
            "backend": plan.device.backend,
            "budget_bytes": plan.budget.budget_bytes,
            "bound_by": plan.budget.bound_by,
        },
        "budget": {
            "budget_bytes": plan.budget.budget_bytes,
            "bound_by": plan.budget.bound_by,
            "headroom_bytes": plan.budget.headroom_bytes,
            "bounds": dict(plan.budget.candidates),
            "largest_buffer_bytes": plan.budget.largest_buffer_bytes,
        },
        "request": _request(plan.request),
        "rule": RULE,
        "choice": _candidate_or_null(plan.choice),
        "candidates": [candidate_json(candidate) for candidate in plan.candidates],
        "next_up": _candidate_or_null(plan.next_up),
        "ceiling": _candidate_or_null(plan.ceiling),
        "grows_to": plan.grows_to,
        "tradeoff": _tradeoff(plan.tradeoff) if plan.tradeoff is not None else None,
        "least": _candidate_or_null(plan.least),
        "smallest": _candidate_or_null(plan.smallest),
        "reliefs": [
            {"options": relief.options, "candidate": candidate_json(relief.candidate)}
            for relief in plan.reliefs
        ],
        "calibration": calibration_json(plan.calibration),
        "warnings": list(plan.warnings),
    }


def candidate_json(candidate: Candidate) -> dict[str, Any]:
    """One candidate of a plan; ``breakdown`` sums to ``peak_bytes``."""
    return {
        "batch": candidate.batch,
        "seq_len": candidate.step.seq_len,
        "accumulate": candidate.step.accumulate,
        "checkpoint": policy_json(candidate.policy),
        "peak_bytes": candidate.peak_bytes,
        "low_bytes": candidate.estimate.low_bytes,
        "high_bytes": candidate.high_bytes,
        "footprint_bytes": candidate.footprint_bytes,
        "headroom_bytes": candidate.headroom_bytes,
        "fits": candidate.fits,
        "cache_limit_bytes": candidate.cache_limit_bytes,
        "sequenced_high_bytes": candidate.sequenced_high_bytes,
        "largest_tensor_bytes": candidate.estimate.largest_tensor_bytes,
        "phase": candidate.estimate.phase,
        "step_seconds": candidate.estimate.step_seconds,
        "tokens_per_second": candidate.tokens_per_second,
        "breakdown": dict(candidate.estimate.breakdown),
        "engine": candidate.engine,
    }


def _tradeoff(ends: Tradeoff) -> dict[str, Any]:
    return {
        "plain": candidate_json(ends.plain),
        "every": candidate_json(ends.every),
        "slowdown": ends.slowdown,
    }


def _candidate_or_null(candidate: Candidate | None) -> dict[str, Any] | None:
    return None if candidate is None else candidate_json(candidate)


def estimate_json(
    model: ModelConfig, step: StepConfig, estimate: Estimate, calibration: Coefficients
) -> dict[str, Any]:
    """The object ``oomguard estimate --json`` prints."""
    return {
        "schema": ESTIMATE_SCHEMA,
        "model": model.model_dump(),
        "step": step.model_dump(),
        "peak_bytes": estimate.peak_bytes,
        "low_bytes": estimate.low_bytes,
        "high_bytes": estimate.high_bytes,
        "footprint_bytes": estimate.footprint_bytes,
        "phase": estimate.phase,
        "phases": dict(estimate.phases),
        "breakdown": dict(estimate.breakdown),
        "largest_tensor_bytes": estimate.largest_tensor_bytes,
        "step_seconds": estimate.step_seconds,
        "calibration": calibration_json(calibration),
        "warnings": list(estimate.warnings),
    }


def calibration_json(calibration: Coefficients) -> dict[str, Any]:
    """Where the coefficients come from and how far off they were on their own rows."""
    return {
        "profile": calibration.profile,
        "mlx": calibration.mlx,
        "backend": calibration.backend,
        "rows": calibration.rows,
        "median_error": calibration.median_error,
        "worst_error": calibration.worst_error,
    }


def policy_json(policy: CheckpointPolicy) -> dict[str, Any]:
    return {"policy": policy.policy, "stride": policy.stride, "blocks": policy.blocks}


def _request(request: Request) -> dict[str, Any]:
    return {
        "model": request.model.model_dump(),
        "batch": request.batch if request.batch is not None else "auto",
        "seq_len": request.step.seq_len,
        "accumulate": request.accumulate,
        "target_batch": request.target_batch,
        "checkpoint": policy_json(request.checkpoint) if request.checkpoint is not None else "auto",
        "optimizer": request.step.optimizer,
        "dtype": request.step.dtype,
        "clip_norm": request.step.clip_norm,
        "compiled": request.step.compiled,
        "memory_bytes": request.memory_bytes,
        "engine": request.engine,
    }
