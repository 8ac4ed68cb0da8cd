"""One step: what everybody measures, traces and trains with."""

from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from oomguard.config.model import ModelConfig
from oomguard.config.policy import CheckpointPolicy
from oomguard.config.presets import preset
from oomguard.config.step import OPTIMIZERS, StepConfig
from oomguard.errors import InputError
from oomguard.model.step import Recipe, build_step, is_muon_matrix

SHAPE = ModelConfig(n_layers=2, d_model=16, n_heads=2, d_mlp=32, context=16, vocab_size=32)
STEP = StepConfig(batch=2, seq_len=12)


def parameters(built: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(built.model.parameters()))


# MLX's Muon divides a gradient by its norm, and in half precision the squares of small gradients are zero: it
# becomes NaN. The trainer refuses the pair; here it is left out.
RUNS = [
    (optimizer, dtype, compiled)
    for optimizer in OPTIMIZERS
    for dtype, compiled in [("float32", False), ("bfloat16", False), ("float16", False), ("float32", True)]
    if (optimizer, dtype) != ("muon", "float16")
]


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "dtype", "compiled"), RUNS)
def test_step_lowers_the_loss_with_every_optimizer_and_dtype(
    optimizer: str, dtype: str, compiled: bool
) -> None:
    rate = {"sgd": 0.3, "adafactor": 3e-2, "muon": 1e-2}.get(optimizer, 3e-3)
    step = STEP.but(optimizer=optimizer, dtype=dtype, compiled=compiled, clip_norm=True)
    built = build_step(SHAPE, step, recipe=Recipe(learning_rate=rate))
    losses = [built.run().item() for _ in range(12)]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0] - 0.05
    assert {str(p.dtype) for p in parameters(built).values()} == {f"mlx.core.{dtype}"}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_step_keeps_optimizer_state_in_the_parameters_dtype(optimizer: str) -> None:
    built = build_step(SHAPE, STEP.but(optimizer=optimizer, dtype="bfloat16", compiled=False))
    built.run()
    moments = [x for _, x in tree_flatten(built.state[1]) if x.ndim > 0]
    assert moments
    assert {x.dtype for x in moments} == {mx.bfloat16}


def test_step_muon_keeps_one_moment_of_block_matrices_and_two_of_the_rest() -> None:
    built = build_step(SHAPE, STEP.but(optimizer="muon"))
    held = sum(x.size for name, x in tree_flatten(built.state[1]) if x.ndim > 0)
    expected = sum(p.size * (1 if is_muon_matrix(n, p) else 2) for n, p in parameters(built).items())
    assert held == expected


def test_step_is_the_same_from_the_same_seed() -> None:
    runs = [[build_step(SHAPE, STEP, seed=seed).run().item()] for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("evaluate_micro_steps", [True, False])
def test_step_accumulation_equals_the_large_batch(evaluate_micro_steps: bool, compiled: bool) -> None:
    accumulated = build_step(
        SHAPE,
        STEP.but(accumulate=3, evaluate_micro_steps=evaluate_micro_steps, compiled=compiled, optimizer="sgd"),
    )
    large = build_step(SHAPE, STEP.but(batch=6, compiled=compiled, optimizer="sgd"))
    joined = [tuple(mx.concatenate(parts) for parts in zip(*accumulated.batch, strict=True))]
    for _ in range(3):
        assert accumulated.run().item() == pytest.approx(large.run(joined).item(), rel=1e-5)
    for name, parameter in parameters(large).items():
        assert mx.allclose(parameter, parameters(accumulated)[name], rtol=1e-4, atol=1e-6), name


def test_step_accumulation_evaluates_each_micro_batch_or_one_graph() -> None:
    apart = build_step(SHAPE, STEP.but(accumulate=3))
    together = build_step(SHAPE, STEP.but(accumulate=3, evaluate_micro_steps=False))
    assert [(len(batch), update) for batch, update in apart.graphs()] == [(1, False), (1, False), (1, True)]
    assert [(len(batch), update) for batch, update in together.graphs()] == [(3, True)]


def test_step_clipping_bounds_the_update() -> None:
    recipe = Recipe(learning_rate=1.0, max_norm=1e-3)
    built = build_step(SHAPE, STEP.but(optimizer="sgd", clip_norm=True), recipe=recipe)
    before = parameters(built)
    built.run()
    moved = sum(mx.square(p - before[name]).sum().item() for name, p in parameters(built).items())
    assert moved**0.5 == pytest.approx(1e-3, rel=1e-2)


def test_step_schedule_is_part_of_the_compiled_graph() -> None:
    built = build_step(SHAPE, STEP, recipe=Recipe(learning_rate=lambda step: step * 1e-3))
    rates = []
    for _ in range(4):
        built.run()
        rates.append(built.optimizer.learning_rate.item())
    assert rates == pytest.approx([0, 1e-3, 2e-3, 3e-3])


def test_step_unevaluated_takes_no_memory_and_can_be_captured() -> None:
    before = mx.get_active_memory()
    built = build_step(preset("titan"), StepConfig(batch=4, seq_len=1024, compiled=False), evaluated=False)
    nodes = []
    mx.export_function(
        nodes.append, lambda inputs, targets: built.plain([(inputs, targets)], None, True)[0], *built.batch[0]
    )
    assert len(nodes) > 1000
    assert mx.get_active_memory() - before < 1_000_000


@pytest.mark.parametrize("policy", ["none", "every", "stride=2", "attention"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_step_leaves_nothing_behind_but_its_state(compiled: bool, policy: str) -> None:
    wide = SHAPE.model_copy(update={"d_model": 64, "d_mlp": 256})
    gc.collect()
    before = mx.get_active_memory()
    built = build_step(wide, STEP.but(compiled=compiled, checkpoint=CheckpointPolicy.parse(policy)))
    for _ in range(4):
        built.run()
    held = sum(x.nbytes for _, x in tree_flatten([built.model.parameters(), built.state[1], built.batch]))
    assert held > 1_000_000
    assert held <= mx.get_active_memory() - before < held + 50_000  # scalars, and what is still being freed


def test_step_validation_draws_no_dropout_and_changes_nothing() -> None:
    built = build_step(SHAPE.model_copy(update={"dropout": 0.5}), STEP)
    before = parameters(built)
    inputs, targets = built.batch[0]
    first = built.validation_loss(inputs, targets)
    assert built.validation_loss(inputs, targets) == first
    assert built.model.training
    assert all(mx.array_equal(p, before[name]) for name, p in parameters(built).items())
    built.run()
    assert built.validation_loss(inputs, targets) != first


def test_step_longer_than_the_context_is_refused() -> None:
    with pytest.raises(InputError, match="sequence length 17 is longer"):
        build_step(SHAPE, STEP.but(seq_len=17))
