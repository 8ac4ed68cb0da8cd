"""What a step of your own would peak at, and what checkpointing would save, before anything runs.

    oomguard trace examples/trace_own_step.py:build --compare every --budget 1GiB
    oomguard trace examples/trace_own_step.py:build --html step.html

The command calls ``build`` and traces what it returns: the step as your training loop calls it, the arguments
of one call, and what the step updates. Nothing here is evaluated, so the model could be of any size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

VOCABULARY, WIDTH, LAYERS = 4096, 256, 6
BATCH, TOKENS = 4, 256


class LanguageModel(nn.Module):
    """Layers of ``mlx.nn``; what hangs in the list ``layers`` is what a checkpoint policy recomputes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = [nn.TransformerEncoderLayer(WIDTH, num_heads=4) for _ in range(LAYERS)]
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def __call__(self, tokens: mx.array) -> mx.array:
        x = self.embedding(tokens)
        mask = nn.MultiHeadAttention.create_additive_causal_mask(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, mask)
        logits: mx.array = self.head(x)
        return logits


def build() -> tuple[Callable[..., mx.array], tuple[mx.array, ...], list[Any]]:
    """The step, its arguments, and what it updates."""
    model = LanguageModel()
    optimizer = optim.AdamW(learning_rate=3e-4)
    optimizer.init(model.trainable_parameters())

    def loss(inputs: mx.array, targets: mx.array) -> mx.array:
        value: mx.array = nn.losses.cross_entropy(model(inputs), targets, reduction="mean")
        return value

    def step(inputs: mx.array, targets: mx.array) -> mx.array:
        value, gradients = nn.value_and_grad(model, loss)(inputs, targets)
        optimizer.update(model, gradients)
        return value

    state = [model.state, optimizer.state]
    tokens = mx.zeros((BATCH, TOKENS), mx.int32)
    return mx.compile(step, inputs=state, outputs=state), (tokens, tokens), state


def main() -> None:
    """The same from Python."""
    from oomguard.trace.engine import trace
    from oomguard.units import format_bytes

    step, arguments, state = build()
    found = trace(step, *arguments, state=state)
    print(f"peak {format_bytes(found.peak_bytes)}: {found.moment}")
    for holder in found.holders[:5]:
        print(f"  {format_bytes(holder.nbytes):>10}  {holder.name} ({holder.category})")


if __name__ == "__main__":
    main()
