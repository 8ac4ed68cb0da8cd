"""Settings in words, the same in every report."""

from __future__ import annotations

from oomguard.config.model import ModelConfig
from oomguard.config.policy import CheckpointPolicy
from oomguard.config.step import StepConfig
from oomguard.units import GIB, MIB

SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

PRICE_OF_WAITING = "6% to 16% a step on a CPU with the limit at 0"
"""Measured: ``calibration/LOG.md``, the memory limit's price."""


def say_policy(policy: CheckpointPolicy, n_layers: int) -> str:
    """``every block recomputed``, ``attention recomputed in 3 of 12 blocks``, ``no recompute``."""
    if policy.policy == "none":
        return "no recompute"
    if policy.policy == "custom_function":
        return "every block recomputed by a bare custom function"
    if policy.policy == "stride":
        if isinstance(policy.stride, int):
            return f"recompute in segments of {policy.stride} blocks"
        return f"recompute in segments (stride={policy.stride})"
    segments = policy.segments(n_layers)
    if not segments:
        return "no recompute"
    whole = len(segments) == n_layers
    if policy.policy == "attention":
        where = "every block" if whole else f"{len(segments)} of {n_layers} blocks"
        return f"attention recomputed in {where}"
    return "every block recomputed" if whole else f"{len(segments)} of {n_layers} blocks recomputed"


def say_batch(step: StepConfig) -> str:
    """``batch 8``, or ``batch 8 x 4 accumulated``."""
    return f"batch {step.batch}" + (f" x {step.accumulate} accumulated" if step.accumulate > 1 else "")


def say_count(number: int) -> str:
    """``403.2M``, ``3.2M``, ``812K``."""
    for size, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.1f}{name}"
    return str(number)


def say_model(model: ModelConfig) -> str:
    """``behemoth: 404.2M parameters, 32 blocks of width 1024, 16 heads``."""
    heads = f"{model.n_heads} head{'s' if model.n_heads > 1 else ''}"
    blocks = f"{model.n_layers} block{'s' if model.n_layers > 1 else ''}"
    return f"{model.name}: {say_count(model.params)} parameters, {blocks} of width {model.d_model}, {heads}"


def say_step(step: StepConfig) -> str:
    """``1024 tokens a sequence, fp32, adamw, compiled``."""
    parts = [f"{step.seq_len} tokens a sequence", SHORT_DTYPES[step.dtype], step.optimizer]
    parts += ["clipped"] if step.clip_norm else []
    parts.append("compiled" if step.compiled else "eager")
    return ", ".join(parts)


def exact_bytes(size_bytes: int) -> str:
    """A size as ``--memory`` reads it, in the largest unit that keeps every byte: ``2GB``, ``600MiB``, ``7B``."""
    for unit, name in ((GIB, "GiB"), (10**9, "GB"), (MIB, "MiB"), (10**6, "MB")):
        if size_bytes and size_bytes % unit == 0:
            return f"{size_bytes // unit}{name}"
    return f"{size_bytes}B"


def say_category(name: str) -> str:
    """``saved tensors`` for ``saved_tensors``."""
    return name.replace("_", " ").replace("in flight", "in-flight")
