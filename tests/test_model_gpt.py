"""The GPT is the one the presets describe."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from oomguard.config.model import ModelConfig
from oomguard.config.presets import presets
from oomguard.model.gpt import GPT

SHAPE = ModelConfig(n_layers=3, d_model=24, n_heads=4, d_mlp=40, context=16, vocab_size=50)


@pytest.mark.parametrize("name", list(presets()))
def test_gpt_has_the_parameters_the_config_counts(name: str) -> None:
    model = GPT(presets()[name])
    assert sum(p.size for _, p in tree_flatten(model.parameters())) == presets()[name].params


def test_gpt_of_any_size_takes_no_memory_until_evaluated() -> None:
    before = mx.get_active_memory()
    model = GPT(presets()["titan"])
    assert mx.get_active_memory() - before < 100_000
    assert len(model.blocks) == 48


def test_gpt_logits_have_the_shape_and_dtype_of_the_parameters() -> None:
    model = GPT(SHAPE)
    model.set_dtype(mx.bfloat16)
    logits = model(mx.zeros((2, 7), mx.int32))
    assert logits.shape == (2, 7, 50)
    assert logits.dtype == mx.bfloat16


def test_gpt_does_not_see_what_comes_after_a_token() -> None:
    mx.random.seed(0)
    model = GPT(SHAPE)
    model.eval()
    tokens = mx.random.randint(0, 50, (1, 12))
    changed = mx.concatenate([tokens[:, :8], (tokens[:, 8:] + 1) % 50], axis=1)
    a, b = model(tokens), model(changed)
    assert mx.allclose(a[:, :8], b[:, :8], atol=1e-6)
    assert not mx.allclose(a[:, 8:], b[:, 8:], atol=1e-3)


def test_gpt_head_is_the_token_embedding() -> None:
    model = GPT(SHAPE)
    model.eval()
    tokens = mx.zeros((1, 4), mx.int32)
    before = model(tokens)
    model.tokens.weight = mx.zeros_like(model.tokens.weight)
    assert mx.abs(before).max().item() > 0
    assert mx.abs(model(tokens)).max().item() == 0


def test_gpt_starts_near_the_loss_of_a_guess() -> None:
    mx.random.seed(0)
    model = GPT(presets()["tiny"])
    tokens = mx.random.randint(0, 256, (2, 65))
    log_probability = mx.log(mx.softmax(model(tokens[:, :-1]), axis=-1))
    picked = mx.take_along_axis(log_probability, tokens[:, 1:, None], axis=-1)
    assert -picked.mean().item() == pytest.approx(5.545, abs=0.1)  # ln 256


def test_gpt_without_training_or_rate_draws_no_dropout() -> None:
    model = GPT(SHAPE.model_copy(update={"dropout": 0.5}))
    tokens = mx.zeros((1, 8), mx.int32)
    model.train()
    assert not mx.array_equal(model(tokens), model(tokens))
    model.eval()
    assert mx.array_equal(model(tokens), model(tokens))


def test_gpt_dropout_drops_the_rate_it_names_and_keeps_the_mean() -> None:
    from oomguard.model.gpt import dropout

    dropped = dropout(mx.ones((200, 200)), 0.25, mx.random.key(3))
    assert (dropped == 0).mean().item() == pytest.approx(0.25, abs=0.01)
    assert dropped.mean().item() == pytest.approx(1, abs=0.02)
