"""Laws of the estimate, for every shape: what a person would be astonished to see broken."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oomguard.config.model import ModelConfig
from oomguard.config.policy import CheckpointPolicy
from oomguard.config.presets import presets
from oomguard.config.step import OPTIMIZERS, StepConfig
from oomguard.errors import InputError
from oomguard.estimate.coefficients import shipped
from oomguard.estimate.peak import Estimate, estimate

BACKENDS = st.sampled_from(["cpu", "metal"])
POLICIES = st.sampled_from(
    ["none", "every", "stride=2", "stride=sqrt", "blocks=2", "attention", "custom_function"]
).map(CheckpointPolicy.parse)
MODELS = st.sampled_from(list(presets().values()))
DTYPES = st.sampled_from(["float32", "bfloat16"])


def peak(model: ModelConfig, step: StepConfig, backend: str) -> Estimate:
    return estimate(model, step, shipped(backend))


@given(MODELS, POLICIES, BACKENDS, st.integers(1, 64), DTYPES, st.booleans())
def test_peak_never_falls_when_batch_grows(
    model: ModelConfig, policy: CheckpointPolicy, backend: str, batch: int, dtype: str, compiled: bool
) -> None:
    step = StepConfig(batch=batch, seq_len=model.context, checkpoint=policy, dtype=dtype, compiled=compiled)
    assert peak(model, step, backend).peak_bytes <= peak(model, step.but(batch=batch + 1), backend).peak_bytes


@given(MODELS, POLICIES, BACKENDS, st.integers(2, 128))
def test_peak_never_falls_when_sequences_grow(
    model: ModelConfig, policy: CheckpointPolicy, backend: str, seq_len: int
) -> None:
    step = StepConfig(batch=4, seq_len=seq_len, checkpoint=policy)
    assert (
        peak(model, step.but(seq_len=seq_len - 1), backend).peak_bytes
        <= peak(model, step, backend).peak_bytes
    )


@given(MODELS, POLICIES, BACKENDS, st.integers(1, 32), DTYPES)
def test_breakdown_sums_to_peak(
    model: ModelConfig, policy: CheckpointPolicy, backend: str, batch: int, dtype: str
) -> None:
    found = peak(
        model, StepConfig(batch=batch, seq_len=model.context, checkpoint=policy, dtype=dtype), backend
    )
    assert sum(found.breakdown.values()) == found.peak_bytes
    assert all(size > 0 for size in found.breakdown.values())
    assert found.peak_bytes == max(found.phases.values())
    assert found.low_bytes <= found.peak_bytes <= found.high_bytes
    assert found.sequenced_peak_bytes <= found.peak_bytes <= found.footprint_bytes


@pytest.mark.parametrize(
    ("backend", "names"), [("cpu", ("tiny", "huge", "titan")), ("metal", ("mega", "titan"))]
)
@given(st.integers(2, 32))
def test_recomputing_more_blocks_never_raises_the_peak_of_a_large_batch(
    backend: str, names: tuple[str, ...], batch: int
) -> None:
    """On Metal only from mega up: tiny's peak is mostly window, and a recompute fills it (161 and 189 MiB)."""
    for name in names:
        model = presets()[name]
        step = StepConfig(batch=8 * batch, seq_len=model.context)
        blocks = CheckpointPolicy(policy="blocks", blocks=model.n_layers // 2)
        every = CheckpointPolicy(policy="every")
        none, half, whole = (
            peak(model, changed, backend).peak_bytes
            for changed in (step, step.but(checkpoint=blocks), step.but(checkpoint=every))
        )
        assert whole <= half <= none


@given(MODELS, st.sampled_from(["every", "attention", "stride=2"]), st.integers(1, 16))
def test_recompute_costs_time(model: ModelConfig, policy: str, batch: int) -> None:
    step = StepConfig(batch=batch, seq_len=model.context)
    slower = step.but(checkpoint=CheckpointPolicy.parse(policy))
    assert peak(model, slower, "cpu").step_seconds > peak(model, step, "cpu").step_seconds


def test_accumulation_costs_the_sum_of_the_gradients_and_time() -> None:
    model = presets()["huge"]
    one, four = (peak(model, StepConfig(batch=2, seq_len=256, accumulate=n), "cpu") for n in (1, 4))
    assert four.peak_bytes - one.peak_bytes == pytest.approx(model.params * 4, rel=0.05)
    assert four.step_seconds > 3 * one.step_seconds


def test_a_sequence_longer_than_the_context_is_refused() -> None:
    with pytest.raises(InputError, match="sequence length 4096 is longer than tiny's context 128"):
        estimate(presets()["tiny"], StepConfig(batch=1, seq_len=4096))


def test_an_estimate_outside_the_fitted_range_says_so() -> None:
    found = peak(presets()["titan"], StepConfig(batch=64, seq_len=1024), "metal")
    assert any("parameters 1.36G is above what was measured" in warning for warning in found.warnings)
    inside = peak(presets()["behemoth"], StepConfig(batch=2, seq_len=1024), "metal")
    assert inside.warnings == ()


def test_an_estimate_imports_neither_mlx_nor_numpy_nor_scipy() -> None:
    code = (
        "import sys; from oomguard.estimate.peak import estimate; from oomguard.config.presets import preset;"
        "from oomguard.config.step import StepConfig; estimate(preset('behemoth'), StepConfig(batch=1, seq_len=1024));"
        "print([name for name in ('mlx', 'numpy', 'scipy') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


TINY_MODELS = st.builds(
    lambda layers, shape, mlp, context, vocab: ModelConfig(
        n_layers=layers, d_model=shape[0], n_heads=shape[1], d_mlp=mlp, context=context, vocab_size=vocab
    ),
    layers=st.integers(1, 8),
    shape=st.sampled_from([(2, 1), (8, 2), (64, 4)]),
    mlp=st.sampled_from([1, 8, 256]),
    context=st.sampled_from([1, 16, 128]),
    vocab=st.sampled_from([1, 256]),
)
ODD_STEPS = st.builds(
    lambda **settings: StepConfig.model_validate(settings),
    batch=st.sampled_from([1, 2, 8, 64]),
    seq_len=st.just(1),
    accumulate=st.sampled_from([1, 2, 7]),
    checkpoint=POLICIES,
    dtype=DTYPES,
    optimizer=st.sampled_from(OPTIMIZERS),
    clip_norm=st.booleans(),
    compiled=st.booleans(),
    evaluate_micro_steps=st.booleans(),
)
ODD_MODEL = ModelConfig(n_layers=3, d_model=8, n_heads=2, d_mlp=8, context=128, vocab_size=1)
# Once an in-flight window of -2325 B, and of -1301 B in the update.
BELOW_ZERO = StepConfig(
    batch=1,
    seq_len=128,
    accumulate=7,
    evaluate_micro_steps=False,
    checkpoint=CheckpointPolicy.parse("sqrt"),
    optimizer="sgd",
)
BELOW_ZERO_IN_THE_UPDATE = BELOW_ZERO.but(
    batch=8, seq_len=1, accumulate=1, dtype="bfloat16", optimizer="lion", clip_norm=True, compiled=False
)


@settings(max_examples=300, deadline=None)
@given(TINY_MODELS, ODD_STEPS, BACKENDS, st.integers(1, 128))
@example(ODD_MODEL, BELOW_ZERO, "cpu", 128)
@example(ODD_MODEL.model_copy(update={"d_model": 64, "n_layers": 8}), BELOW_ZERO_IN_THE_UPDATE, "cpu", 1)
def test_no_item_of_a_breakdown_is_below_zero_and_all_sum_to_the_peak(
    model: ModelConfig, step: StepConfig, backend: str, seq_len: int
) -> None:
    found = peak(model, step.but(seq_len=min(seq_len, model.context)), backend)
    assert min(found.breakdown.values()) > 0
    assert sum(found.breakdown.values()) == found.peak_bytes
    assert 0 <= min(found.phases.values()) <= max(found.phases.values()) <= found.peak_bytes
    assert found.footprint_bytes >= found.peak_bytes >= found.sequenced_peak_bytes >= 0
