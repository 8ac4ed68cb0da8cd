"""Writes the configurations the CPU coefficients are fitted on.

Stratified and seeded: every policy, both ways of running, three dtypes, all optimizers, accumulation and
clipping, over shapes drawn between the presets, and the presets themselves where they run in seconds.

    python -m oomguard.calibration.design_sweep calibration/sweeps/cpu.jsonl
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from oomguard.calibration.tool import output_path, run_tool

Entry = dict[str, Any]
USAGE = "python -m oomguard.calibration.design_sweep FILE.jsonl"
SEED = 20
MAX_FLOPS = {"float32": 40e9, "bfloat16": 4e9, "float16": 4e9}
MIN_TOKENS, MAX_TOKENS = 128, 8192
POLICIES = (
    "every",
    "stride=2",
    "stride=sqrt",
    "blocks=half",
    "attention",
    "attention,blocks=half",
    "custom_function",
)
PRESETS: tuple[Entry, ...] = (
    {"preset": "tiny", "batch": [2, 8, 32]},
    {"preset": "tiny", "batch": 8, "checkpoint": ["every", "stride=auto", "attention", "custom_function"]},
    {"preset": "small", "batch": [1, 4], "checkpoint": ["none", "every", "blocks=3"]},
    {
        "preset": "huge",
        "batch": [1, 4],
        "checkpoint": ["none", "every", "stride=sqrt", "attention", "blocks=6"],
    },
    {
        "preset": "huge",
        "batch": 1,
        "context": 1024,
        "checkpoint": ["none", "every", "attention", "custom_function"],
    },
    {"preset": "mega", "batch": 1, "seq_len": [64, 256], "checkpoint": ["none", "every"]},
    {"preset": "behemoth", "batch": 1, "seq_len": 64, "checkpoint": ["none", "every"]},
)


def shape(rng: random.Random, dtype: str = "float32") -> Entry:
    """A random shape and batch whose step takes seconds."""
    while True:
        head_dim, heads = rng.choice([16, 32, 64]), rng.choice([2, 4, 6, 8])
        width = head_dim * heads
        layers = rng.choice([2, 3, 4, 6, 8, 12])
        entry: Entry = {
            "n_layers": layers,
            "d_model": width,
            "n_heads": heads,
            "d_mlp": width * rng.choice([2, 3, 4, 4, 4]),
            "context": rng.choice([64, 128, 256, 512, 1024]),
            "vocab_size": rng.choice([256, 256, 256, 256, 1024, 4096]),
            "batch": rng.choice([1, 2, 4, 8, 16]),
        }
        tokens = entry["batch"] * entry["context"]
        params = layers * (4 * width**2 + 2 * width * entry["d_mlp"]) + entry["vocab_size"] * width
        scores = layers * entry["batch"] * heads * entry["context"] ** 2
        flops = 6 * params * tokens + 12 * scores * head_dim
        saved = 4 * layers * tokens * (10 * width + 4 * entry["d_mlp"]) + 4 * scores
        if MIN_TOKENS <= tokens <= MAX_TOKENS and flops <= MAX_FLOPS[dtype] and saved < 1.2e9:
            return entry


def policy(rng: random.Random, entry: Entry, name: str | None = None) -> str:
    """A policy of that kind, or any; "half" becomes a number of blocks of this model."""
    name = name or rng.choice(("none", *POLICIES))
    return name.replace("half", str(rng.randint(1, max(1, entry["n_layers"] - 1))))


def entries() -> Iterator[Entry]:
    """All configurations, in the order they are measured: a sweep stopped early still spans every kind."""
    rng = random.Random(SEED)
    yield from PRESETS
    for round_ in range(7):
        for name in ("none", "none", "none", *POLICIES):
            entry = shape(rng)
            yield {**entry, "checkpoint": policy(rng, entry, name), "compiled": (round_ + len(name)) % 2 == 0}
        for optimizer in ("sgd", "adam", "lion", "adafactor", "muon"):
            entry = shape(rng)
            yield {**entry, "optimizer": optimizer, "compiled": rng.random() < 0.5}
        for dtype in ("bfloat16", "float16"):
            for kind in ("none", "every", None):
                entry = shape(rng, dtype)
                step: Entry = {
                    "checkpoint": policy(rng, entry, kind),
                    "dtype": dtype,
                    "compiled": rng.random() < 0.5,
                }
                yield {**entry, **step}
        for evaluate in (True, False):
            entry = shape(rng)
            step = {
                "accumulate": rng.choice([2, 4]),
                "evaluate_micro_steps": evaluate,
                "compiled": rng.random() < 0.5,
            }
            yield {**entry, **step, "checkpoint": policy(rng, entry), "clip_norm": rng.random() < 0.5}
        entry = shape(rng)
        yield {**entry, "clip_norm": True, "compiled": rng.random() < 0.5}


def main(arguments: list[str]) -> None:
    output_path(arguments, USAGE).write_text("".join(json.dumps(entry) + "\n" for entry in entries()))


if __name__ == "__main__":
    run_tool(main)
