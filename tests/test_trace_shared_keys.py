"""Blocks that hand on the keys and values of another block (Gemma 4): real peaks, and those of the rewritten graph."""

from __future__ import annotations

import statistics
import subprocess
import sys
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest

from oomguard.config.policy import EVERY_BLOCK, NO_CHECKPOINT, CheckpointPolicy
from oomguard.errors import TraceError
from oomguard.trace.engine import trace
from oomguard.trace.policies import Policies

gemma4 = pytest.importorskip("mlx_lm.models.gemma4_text")

SHAPE = {
    "model_type": "gemma4_text", "hidden_size": 128, "num_hidden_layers": 6, "intermediate_size": 256,
    "num_attention_heads": 4, "head_dim": 32, "global_head_dim": 32, "vocab_size": 512,
    "vocab_size_per_layer_input": 512, "num_key_value_heads": 1, "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 32, "sliding_window": 64, "sliding_window_pattern": 3, "use_double_wide_mlp": False,
}  # fmt: skip


def build(recompute: bool) -> tuple[Any, tuple[mx.array, mx.array], list[Any]]:
    """A compiled step of a small Gemma 4; ``recompute`` is mlx-lm's own checkpointing."""
    from mlx_lm.tuner.trainer import grad_checkpoint

    mx.random.seed(0)
    model = gemma4.Model(gemma4.ModelArgs.from_dict(SHAPE))
    optimizer = optim.Adam(1e-4)
    optimizer.init(model.trainable_parameters())
    if recompute:
        grad_checkpoint(model.layers[0])
    gradients_of = nn.value_and_grad(
        model, lambda x, y: nn.losses.cross_entropy(model(x), y, reduction="mean")
    )
    state = [model.state, optimizer.state, mx.random.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def step(x: mx.array, y: mx.array) -> mx.array:
        loss, gradients = gradients_of(x, y)
        optimizer.update(model, gradients)
        return loss

    tokens = mx.zeros((4, 128), mx.int32)
    return step, (tokens, tokens), state


def measured_peak(recompute: bool) -> int:
    """The median of five steps after the first, run in a process of its own: mlx-lm's checkpointing is for good."""
    done = subprocess.run(
        [sys.executable, __file__, *(["recompute"] if recompute else [])],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return int(done.stdout)


def policies() -> Policies:
    step, arguments, state = build(recompute=False)
    return Policies.of_step(step, arguments, state=state, device="cpu")


@pytest.mark.slow
@pytest.mark.measured
def test_plain_and_recomputed_steps_peak_as_measured() -> None:
    step, arguments, state = build(recompute=False)
    plain = trace(step, *arguments, state=state, device="cpu").peak_bytes
    assert plain == pytest.approx(measured_peak(recompute=False), rel=0.02)
    every = policies().price(EVERY_BLOCK).peak_bytes
    assert every == pytest.approx(measured_peak(recompute=True), rel=0.02)
    assert every < 0.9 * plain


def test_blocks_that_return_several_arrays_make_no_segments() -> None:
    found = policies()
    assert {str(price.policy) for price in found.table()} == {"none", "attention", "every", "custom_function"}
    with pytest.raises(TraceError, match="use every or blocks=N"):
        found.price(CheckpointPolicy.parse("stride=2"))


def test_the_cheapest_that_fits_is_found_without_segments() -> None:
    found = policies()
    plain, every = found.price(NO_CHECKPOINT), found.price(EVERY_BLOCK)
    price = found.cheapest((plain.peak_bytes + every.peak_bytes) // 2)
    assert 0 < price.cost < every.cost
    assert not found.cheapest(1).fits(1)


if __name__ == "__main__":
    run, given, held = build(recompute=len(sys.argv) > 1)
    mx.eval(held, given)
    peaks = []
    for _ in range(6):
        mx.synchronize()
        mx.reset_peak_memory()
        mx.eval(run(*given), held)
        mx.synchronize()
        peaks.append(mx.get_peak_memory())
    sys.stdout.write(str(statistics.median_low(peaks[1:])))
