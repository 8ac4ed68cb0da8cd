"""The rewritten graph of a step is what MLX builds with real ``mx.checkpoint`` calls, node for node."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from drawn_lines import Line, lines_of, real_lines

from oomguard.config.model import ModelConfig
from oomguard.config.policy import CheckpointPolicy
from oomguard.config.step import StepConfig
from oomguard.model.step import build_step
from oomguard.trace.capture import capture
from oomguard.trace.containers import state_tree
from oomguard.trace.lower import Target, lower, parse_version
from oomguard.trace.remat import apply_policy

MODEL = ModelConfig(name="test", n_layers=4, d_model=32, n_heads=4, d_mlp=64, context=16)
STEP = StepConfig(batch=2, seq_len=16, compiled=False)


def rewritten_lines(policy: CheckpointPolicy) -> list[Line]:
    built = build_step(MODEL, STEP, evaluated=False)
    captured = capture(
        built.plain,
        (built.batch, None, True),
        state=built.state,
        evaluate=lambda loss, state: (state, loss[0]),
    )
    return lines_of(apply_policy(lower(captured.graph, Target("cpu", parse_version(mx.__version__))), policy))


@pytest.mark.parametrize(
    "text",
    [
        "none",
        "every",
        "stride=2",
        "stride=3",
        "blocks=1",
        "attention",
        "attention,blocks=2",
        "custom_function",
    ],
)
def test_rewritten_step_is_what_mlx_builds(text: str) -> None:
    policy = CheckpointPolicy.parse(text)
    built = build_step(MODEL, STEP.but(checkpoint=policy))

    def evaluated() -> list[Any]:
        loss, _ = built.plain(built.batch, None, True)
        return [[state_tree(item) for item in built.state], loss]

    real = real_lines(built.state, built.batch, evaluated, key_first=True)
    rewritten = rewritten_lines(policy)
    difference = next((n for n, (a, b) in enumerate(zip(real, rewritten, strict=False)) if a != b), None)
    assert difference is None, (difference, real[difference], rewritten[difference])
    assert len(real) == len(rewritten)
