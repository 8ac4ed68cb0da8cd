"""What each policy saves, measured with the memory limit at 0: the peak is then that of the graph alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from oomguard.measure.blas import child_environment, find_openblas

MEASURE = """
import gc, json, sys
import mlx.core as mx
from oomguard.config.model import ModelConfig
from oomguard.config.policy import CheckpointPolicy
from oomguard.config.step import StepConfig
from oomguard.model.step import build_step

mx.set_memory_limit(0)
model = ModelConfig(n_layers=6, d_model=64, n_heads=4, d_mlp=256, context=128)
peaks = {}
for mode in ("eager", "compiled"):
    for policy in sys.argv[1:]:
        gc.collect()
        step = StepConfig(
            batch=2, seq_len=128, compiled=mode == "compiled", checkpoint=CheckpointPolicy.parse(policy)
        )
        built = build_step(model, step)
        built.run()
        mx.reset_peak_memory()
        built.run()
        peaks[f"{mode} {policy}"] = mx.get_peak_memory()
        del built
print(json.dumps(peaks))
"""
POLICIES = [
    "none",
    "every",
    "stride=3",
    "blocks=3",
    "blocks=6",
    "attention",
    "attention,blocks=3",
    "custom_function",
]


@pytest.fixture(scope="module")
def peaks() -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *POLICIES],
        capture_output=True,
        env=child_environment(os.environ, find_openblas()),
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


pytestmark = [pytest.mark.measured, pytest.mark.slow]


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_peak_of_every_block_recomputed_is_far_below_none(mode: str, peaks: dict[str, int]) -> None:
    assert peaks[f"{mode} every"] < 0.5 * peaks[f"{mode} none"]


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_peak_falls_with_the_blocks_recomputed(mode: str, peaks: dict[str, int]) -> None:
    ladder = [peaks[f"{mode} {policy}"] for policy in ("blocks=6", "blocks=3", "none")]
    assert ladder == sorted(ladder)
    assert ladder[0] == pytest.approx(peaks[f"{mode} every"], rel=0.08)
    assert ladder[1] < 0.8 * ladder[2]


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_peak_of_a_longer_stride_is_higher_for_a_transformer(mode: str, peaks: dict[str, int]) -> None:
    assert peaks[f"{mode} every"] < peaks[f"{mode} stride=3"] < peaks[f"{mode} none"]


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_peak_with_attention_recomputed_stands_between(mode: str, peaks: dict[str, int]) -> None:
    every, all_cores, half, none = (
        peaks[f"{mode} {policy}"] for policy in ("every", "attention", "attention,blocks=3", "none")
    )
    assert every < all_cores < half < none


def test_peak_of_the_bare_custom_function_is_spoiled_by_compile(peaks: dict[str, int]) -> None:
    assert peaks["eager custom_function"] == pytest.approx(peaks["eager every"], rel=0.05)
    saved = peaks["compiled none"] - peaks["compiled every"]
    assert peaks["compiled none"] - peaks["compiled custom_function"] < 0.8 * saved
    assert peaks["compiled custom_function"] < peaks["compiled none"]
