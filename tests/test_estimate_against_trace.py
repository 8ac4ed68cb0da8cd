"""The closed forms against the simulated evaluator, on settings that no row was measured with."""

from __future__ import annotations

import pytest

from oomguard.config.model import ModelConfig
from oomguard.config.policy import CheckpointPolicy
from oomguard.config.step import StepConfig
from oomguard.estimate.peak import estimate
from oomguard.plan.engines import trace_step

MODEL = ModelConfig(n_layers=14, d_model=160, n_heads=5, d_mlp=600, context=192, vocab_size=300)
SETTINGS = (
    ("none", {}),
    ("none", {"optimizer": "lion"}),
    ("none", {"accumulate": 3}),
    ("none", {"dtype": "bfloat16"}),
    ("every", {}),
    ("every", {"clip_norm": True}),
    ("every", {"optimizer": "muon"}),
    ("stride=2", {}),
    ("stride=5", {}),
    ("blocks=9", {}),
    ("attention", {"compiled": False}),
    ("attention,blocks=4", {}),
)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "changes"), SETTINGS, ids=lambda value: str(value))
def test_estimate_agrees_with_the_trace_where_nothing_was_fitted(
    policy: str, changes: dict[str, object]
) -> None:
    step = StepConfig(batch=5, seq_len=192, checkpoint=CheckpointPolicy.parse(policy)).but(**changes)
    traced = trace_step(MODEL, step).peak_bytes
    assert estimate(MODEL, step).peak_bytes == pytest.approx(traced, rel=0.08)
