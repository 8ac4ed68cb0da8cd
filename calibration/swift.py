"""The M5 Pro table beside the peaks the trace predicts for it. Nothing is fitted to it.

    python -m oomguard.calibration.swift [PRESET ...]

The table (``rows/metal-m5pro.jsonl``) was measured with MLX-Swift on Metal. Its model is not published: what
is known of it is the preset's shape. What its memory says of it stands in LOG.md: MLX 0.31.1, and layer norms
written out in elementwise primitives. ``swift_step`` builds that step from this package's GPT.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from oomguard.calibration.public import cross_entropy
from oomguard.config.model import ModelConfig
from oomguard.config.policy import CheckpointPolicy
from oomguard.config.step import StepConfig
from oomguard.model.step import BuiltStep, build_step
from oomguard.rows import Row, read_rows, shipped_rows_path
from oomguard.trace.capture import Capture, capture
from oomguard.trace.engine import simulate
from oomguard.trace.lower import LOWERED, Version
from oomguard.trace.metal import Chip, device
from oomguard.trace.remat import apply_policy
from oomguard.trace.result import TraceResult
from oomguard.units import MIB

ROWS = shipped_rows_path("metal-m5pro.jsonl")
M5_PRO = Chip(17, "s")
SWIFT_MLX: Version = (0, 31, 1)
"""What MLX-Swift 0.31.1 to 0.31.6 hold, the first released with the M5 Pro on sale."""

LARGE_BYTES = 10**9
"""Rows from here on are held to a bound: below, kernels are too short to keep the window full."""


class WrittenOutLayerNorm(nn.Module):
    """A layer norm in elementwise primitives and reductions, as a model without ``mx.fast`` has it."""

    def __init__(self, dims: int):
        super().__init__()
        self.weight = mx.ones((dims,))
        self.bias = mx.zeros((dims,))

    def __call__(self, x: mx.array) -> mx.array:
        """(..., dims) to the same shape."""
        mean = mx.mean(x, axis=-1, keepdims=True)
        variance = mx.var(x, axis=-1, keepdims=True)
        return (x - mean) * mx.rsqrt(variance + 1e-5) * self.weight + self.bias


def swift_step(model: ModelConfig, step: StepConfig) -> BuiltStep:
    """The table's step: this package's GPT, its norms written out, the loss of its release; unevaluated."""
    with _attribute(nn, "LayerNorm", WrittenOutLayerNorm):
        return build_step(model, step, evaluated=False)


def capture_swift_step(model: ModelConfig, step: StepConfig) -> Capture:
    """Captures the table's step without checkpointing; every policy follows from it."""
    built = swift_step(model, step.but(checkpoint=CheckpointPolicy()))
    with _attribute(nn.losses, "cross_entropy", _mean_cross_entropy):
        return capture(
            built.function,
            (built.batch, None, True),
            state=built.state,
            evaluate=lambda returned, state: (state, returned),
            marked=LOWERED | {"block"},
        )


def predict(captured: Capture, policy: CheckpointPolicy, *, steady_steps: int = 1) -> TraceResult:
    """The peak of a captured step of the table on its machine."""
    return simulate(
        captured,
        compiled=True,
        device=device(M5_PRO, SWIFT_MLX),
        rewrite=lambda graph: apply_policy(graph, policy),
        steady_steps=steady_steps,
    )


def _mean_cross_entropy(logits: mx.array, targets: mx.array, reduction: str = "mean") -> mx.array:
    assert reduction == "mean"
    return cross_entropy(logits, targets).mean()


@contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def predictions(rows: Sequence[Row]) -> Iterator[tuple[Row, TraceResult]]:
    """Each row with its prediction, one capture for the rows that differ in the policy only."""
    captures: dict[Any, Capture] = {}
    for row in rows:
        assert row.model is not None
        assert row.step is not None
        plain = (row.model, row.step.but(checkpoint=CheckpointPolicy()))
        if plain not in captures:
            captures = {plain: capture_swift_step(*plain)}
        yield row, predict(captures[plain], row.step.checkpoint)


def main(arguments: list[str]) -> None:
    """Prints predicted beside measured."""
    _, rows = read_rows(ROWS)
    wanted = [row for row in rows if row.model and (not arguments or row.model.name in arguments)]
    errors: dict[str, list[float]] = {}
    for row, result in predictions(wanted):
        assert row.model is not None
        assert row.step is not None
        measured = row.peak_bytes or 0
        error = result.peak_bytes / measured - 1
        if measured >= LARGE_BYTES:
            errors.setdefault(str(row.step.checkpoint), []).append(error)
        print(
            f"{row.model.name:9} {row.step.batch} x {row.step.seq_len:5} {row.step.checkpoint!s:16} "
            f"measured {measured / MIB:6.0f} MiB  predicted {result.peak_bytes / MIB:6.0f}  {error:+6.1%}",
            flush=True,
        )
    for policy, found in errors.items():
        print(f"{policy}, rows of 1 GB and more: {_summary(found)}")


def _summary(errors: list[float]) -> str:
    sizes: Callable[[float], float] = abs
    return f"median {median(map(sizes, errors)):.1%}, worst {max(map(sizes, errors)):.1%}"


if __name__ == "__main__":
    main(sys.argv[1:])
