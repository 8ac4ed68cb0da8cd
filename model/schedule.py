"""The learning rate over a run: a linear warm-up, then half a cosine down to a floor."""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx

from oomguard.config.step import Optimizer

FLOOR = 0.1
MIN_WARMUP, MAX_WARMUP = 5, 200

# Rates at a width of 128; Muon's is that of its matrices, see ``step.MUON_ADAMW_SHARE``. What moves each
# weight by about the rate itself has to move less the more weights are summed; the others scale their steps.
RATES: dict[Optimizer, float] = {
    "sgd": 0.1,
    "adam": 1e-3,
    "adamw": 1e-3,
    "lion": 2e-4,
    "adafactor": 1e-2,
    "muon": 2e-2,
}
NARROWED_BY_WIDTH = ("adam", "adamw", "lion")
RATE_WIDTH = 128


def default_rate(optimizer: Optimizer, d_model: int) -> float:
    """A learning rate to begin with; Adam's and Lion's fall with the square root of the width."""
    share = math.sqrt(RATE_WIDTH / d_model) if optimizer in NARROWED_BY_WIDTH else 1.0
    return float(f"{RATES[optimizer] * share:.2g}")


def default_warmup(steps: int) -> int:
    """Updates of warm-up: a tenth of the run, at least 5 (or half of a shorter run), at most 200.

    MLX's Adam does not correct the bias of its young moments, so its first steps are too long by themselves.
    """
    return min(MAX_WARMUP, max(steps // 10, min(MIN_WARMUP, steps // 2)))


def warmup_cosine(peak: float, warmup: int, steps: int) -> Callable[[mx.array], mx.array]:
    """A schedule for ``mlx.optimizers``, as arithmetic on the step count, so that it compiles into the step.

    Args:
        peak: the rate when the warm-up ends.
        warmup: updates that take the rate from ``peak / warmup`` to ``peak``.
        steps: updates of the whole run; from there on the rate stays at a tenth of ``peak``.

    Returns:
        A function of the number of updates done (a scalar array) to the rate of the next (float32 scalar).
    """

    def rate(done: mx.array) -> mx.array:
        step = done.astype(mx.float32)
        progress = mx.clip((step - warmup) / max(1, steps - warmup), 0, 1)
        cosine = peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + mx.cos(math.pi * progress)))
        rising = peak * (step + 1) / max(1, warmup)
        return mx.where(step < warmup, rising, cosine)

    return rate
