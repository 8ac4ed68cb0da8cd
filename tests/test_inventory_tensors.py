"""The inventory counts what the graph holds: numbers derived by hand, laws that hold for every shape."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomguard.config.model import ModelConfig
from oomguard.config.policy import CheckpointPolicy
from oomguard.config.presets import presets
from oomguard.config.step import StepConfig
from oomguard.estimate.inventory import CATEGORIES, Inventory

TINY = presets()["tiny"]
STEP = StepConfig(batch=8, seq_len=128)

shapes = st.builds(
    lambda layers, heads, head_dim, ratio, context: ModelConfig(
        n_layers=layers,
        d_model=heads * head_dim,
        n_heads=heads,
        d_mlp=heads * head_dim * ratio,
        context=context,
    ),
    st.integers(1, 48),
    st.integers(1, 16),
    st.sampled_from([8, 16, 64, 128]),
    st.integers(1, 4),
    st.sampled_from([16, 128, 1024]),
)
policies = st.sampled_from(
    ["none", "every", "stride=2", "stride=sqrt", "stride=auto", "blocks=3", "attention", "attention,blocks=2"]
).map(CheckpointPolicy.parse)


def test_a_block_saves_what_the_captured_graph_saves() -> None:
    """tiny, 8 x 128, fp32: N = 1024 tokens; stream N x 128, wide N x 512, scores 8 x 4 x 128^2, 4 bytes each.

    Saved: 6 streams of two norms, 3 of queries, keys, values, 1 of the mixed heads; 4 wide; the softmax; 2 + 2
    statistics a token; the causal mask, one byte an element.
    """
    stream, wide, scores = 1024 * 128 * 4, 1024 * 512 * 4, 8 * 4 * 128 * 128 * 4
    saved = Inventory(TINY, STEP).block_saved
    assert saved.scores == scores
    assert saved.total == 10 * stream + 4 * wide + scores + 4 * 1024 * 4 + 128 * 128


def test_half_precision_keeps_the_centred_norm_in_float32() -> None:
    full = Inventory(TINY, STEP)
    half = Inventory(TINY, STEP.but(dtype="bfloat16"))
    elements = 1024 * 128
    assert half.norm_saved_bytes - 2 * 1024 * 4 == 4 * elements + 2 * 2 * elements
    assert full.norm_saved_bytes - 2 * 1024 * 4 == 3 * 4 * elements


@pytest.mark.parametrize(("optimizer", "copies"), [("sgd", 1), ("adam", 2), ("adamw", 2), ("lion", 1)])
def test_optimizer_state_is_whole_copies_of_the_weights(optimizer: str, copies: int) -> None:
    inventory = Inventory(TINY, STEP.but(optimizer=optimizer))
    assert inventory.optimizer_state_bytes == copies * TINY.params * 4


def test_weights_and_moments_are_in_the_parameters_dtype() -> None:
    inventory = Inventory(TINY, STEP.but(dtype="bfloat16"))
    assert inventory.weights_bytes == 2 * TINY.params
    assert inventory.optimizer_state_bytes == 2 * 2 * TINY.params


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "lion", "adafactor", "muon"])
def test_optimizer_state_is_what_mlx_allocates(optimizer: str) -> None:
    from mlx.utils import tree_flatten

    from oomguard.model.step import build_step

    built = build_step(TINY, STEP.but(optimizer=optimizer), evaluated=False)
    arrays = [array for _, array in tree_flatten(built.optimizer.state) if array.ndim > 0]
    assert Inventory(TINY, built.step).optimizer_state_bytes == sum(array.nbytes for array in arrays)


@given(shapes, policies, st.integers(1, 8))
def test_no_moment_holds_less_than_weights_state_and_batch(
    model: ModelConfig, policy: CheckpointPolicy, batch: int
) -> None:
    inventory = Inventory(model, StepConfig(batch=batch, seq_len=model.context, checkpoint=policy))
    least = inventory.weights_bytes + inventory.optimizer_state_bytes + inventory.batch_bytes
    for moment in inventory.moments():
        assert moment.held_bytes >= least
        assert set(moment.held) <= set(CATEGORIES)
        assert all(size >= 0 for size in moment.held.values())


@given(shapes, st.integers(1, 8))
def test_recomputing_a_block_keeps_only_its_input(model: ModelConfig, batch: int) -> None:
    every = Inventory(
        model, StepConfig(batch=batch, seq_len=model.context, checkpoint=CheckpointPolicy(policy="every"))
    )
    held = every.held_in_forward()
    assert held["saved_tensors"] == held["attention_scores"] == 0
    assert held["segment_inputs"] == model.n_layers * every.stream_bytes


@given(shapes, st.integers(1, 6))
def test_blocks_n_keeps_what_the_other_blocks_save(model: ModelConfig, n: int) -> None:
    step = StepConfig(batch=1, seq_len=model.context, checkpoint=CheckpointPolicy(policy="blocks", blocks=n))
    inventory = Inventory(model, step)
    held = inventory.held_in_forward()
    saved = held["saved_tensors"] + held["attention_scores"]
    assert saved == max(0, model.n_layers - n) * inventory.block_saved.total


def test_attention_policy_drops_exactly_the_scores() -> None:
    none = Inventory(TINY, STEP).held_in_forward()
    attention = Inventory(TINY, STEP.but(checkpoint=CheckpointPolicy(policy="attention"))).held_in_forward()
    assert attention["attention_scores"] == 0
    assert none["saved_tensors"] == attention["saved_tensors"]


def test_sums_of_micro_batches_are_held_when_each_is_evaluated() -> None:
    inventory = Inventory(TINY, STEP.but(accumulate=4))
    assert inventory.held_in_forward()["gradients"] == TINY.params * 4


def test_one_graph_of_micro_batches_holds_the_saved_tensors_of_all() -> None:
    one = Inventory(TINY, STEP)
    four = Inventory(TINY, STEP.but(accumulate=4, evaluate_micro_steps=False))
    assert four.held_in_forward()["saved_tensors"] == 4 * one.held_in_forward()["saved_tensors"]


def test_largest_tensor_is_the_scores_of_a_long_sequence() -> None:
    model = TINY.model_copy(update={"context": 4096})
    inventory = Inventory(model, StepConfig(batch=2, seq_len=4096))
    assert inventory.largest_tensor_bytes == 2 * 4 * 4096 * 4096 * 4


def test_pages_are_rounded_up_on_metal_only() -> None:
    """tiny's matrices, moments and saved tensors are whole pages; a width of 100 makes none of them so."""
    assert Inventory(TINY, STEP, "metal").page_rounding_bytes == 0
    odd = TINY.model_copy(update={"d_model": 100, "d_mlp": 400})
    assert Inventory(odd, STEP, "cpu").page_rounding_bytes == 0
    rounding = Inventory(odd, STEP, "metal").page_rounding_bytes
    buffers = 3 * (4 * 13 + 2) + 4 * 15
    assert 0 < rounding < buffers * 16384
    assert Inventory(odd, STEP, "metal").held_in_forward()["page_rounding"] == rounding
