"""Recompute changes memory, never a gradient: every policy, eager and compiled, each dtype, with dropout."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from oomguard.config.model import ModelConfig
from oomguard.config.policy import CheckpointPolicy
from oomguard.config.step import StepConfig
from oomguard.model.step import BuiltStep, build_step

SHAPE = ModelConfig(n_layers=5, d_model=32, n_heads=4, d_mlp=64, context=24, vocab_size=64)
POLICIES = [
    "every",
    "stride=2",
    "stride=5",
    "stride=9",
    "stride=sqrt",
    "stride=auto",
    "blocks=0",
    "blocks=3",
    "attention",
    "attention,blocks=2",
    "custom_function",
]
EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
ROUNDINGS = 16


def gradients(policy: str, dtype: str, compiled: bool, dropout: float) -> tuple[float, dict[str, mx.array]]:
    """Loss and gradients of one micro-step, from the same seed whatever the policy."""
    built = build_step(
        SHAPE.model_copy(update={"dropout": dropout}),
        StepConfig(
            batch=2,
            seq_len=16,
            dtype=dtype,
            compiled=compiled,
            accumulate=2,
            checkpoint=CheckpointPolicy.parse(policy),
        ),
        seed=7,
    )
    loss, grads = built.function(built.batch[:1], None, False)
    mx.eval(built.state, loss, grads)
    return loss.item(), dict(tree_flatten(grads))


_plain: dict[tuple[str, bool, float], tuple[float, dict[str, mx.array]]] = {}


def without_checkpointing(dtype: str, compiled: bool, dropout: float) -> tuple[float, dict[str, mx.array]]:
    key = (dtype, compiled, dropout)
    if key not in _plain:
        _plain[key] = gradients("none", *key)
    return _plain[key]


# Half precision is compiled with dropout only: building the fused kernels takes seconds, once a machine.
RUNS = [
    (dtype, compiled, dropout)
    for dtype in EPSILON
    for compiled in (False, True)
    for dropout in (0.0, 0.3)
    if dropout or not compiled or dtype == "float32"
]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "compiled", "dropout"), RUNS)
@pytest.mark.parametrize("policy", POLICIES)
def test_checkpoint_gradients_equal_those_without(
    policy: str, dtype: str, compiled: bool, dropout: float
) -> None:
    expected_loss, expected = without_checkpointing(dtype, compiled, dropout)
    loss, got = gradients(policy, dtype, compiled, dropout)
    assert loss == pytest.approx(expected_loss, rel=ROUNDINGS * EPSILON["float32"])
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        largest = mx.abs(gradient.astype(mx.float32)).max().item()
        off = mx.abs(got[name].astype(mx.float32) - gradient.astype(mx.float32)).max().item()
        assert largest > 0, f"{name} has no gradient to compare"
        assert off <= ROUNDINGS * EPSILON[dtype] * largest, f"{name}: off by {off}, largest {largest}"


def losses(built: BuiltStep, steps: int) -> list[Any]:
    return [built.run().item() for _ in range(steps)]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("policy", ["every", "stride=2", "attention", "custom_function"])
def test_checkpoint_draws_the_same_dropout_step_after_step(policy: str, compiled: bool) -> None:
    model = SHAPE.model_copy(update={"dropout": 0.3})
    step = StepConfig(batch=2, seq_len=16, compiled=compiled)
    expected = losses(build_step(model, step), 4)
    checkpointed = step.but(checkpoint=CheckpointPolicy.parse(policy))
    assert losses(build_step(model, checkpointed), 4) == pytest.approx(expected, rel=1e-5)
    assert len(set(expected)) == 4


def test_checkpoint_dropout_differs_from_step_to_step() -> None:
    model = SHAPE.model_copy(update={"dropout": 0.3})
    step = StepConfig(batch=2, seq_len=16, accumulate=2, checkpoint=CheckpointPolicy.parse("every"))
    built = build_step(model, step)
    first, _ = built.function(built.batch[:1], None, False)
    second, _ = built.function(built.batch[:1], None, False)
    assert first.item() != second.item()
