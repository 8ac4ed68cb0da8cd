"""Your own training loop with oomguard beside it: ask for the batch, train under the guard, compare.

    python examples/own_loop.py

The model here is oomguard's GPT, because its peak can be asked for before it is built; the loop is anybody's.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

import oomguard
from oomguard.model.checkpoint import checkpoint_layers
from oomguard.model.gpt import GPT
from oomguard.units import format_bytes

MEMORY = "100MB"
POLICY = "every"
MODEL = "tiny"  # a preset; or the path of a JSON config, or a dictionary with the same fields
STEPS = 5


def main() -> None:
    # 1. Before anything is built: the largest batch that fits, and the plan with its prediction.
    batch = oomguard.largest_batch(MODEL, memory=MEMORY, grad_checkpoint=POLICY)
    if batch == 0:
        raise SystemExit(f"not even one sequence fits {MEMORY}")
    plan = oomguard.plan(MODEL, memory=MEMORY, grad_checkpoint=POLICY, batch=batch)
    assert plan.choice is not None
    peak = format_bytes(plan.choice.peak_bytes)
    print(f"batch {batch}, checkpoint policy {POLICY}: the predicted peak is {peak}")

    # 2. A loop of your own.
    model = GPT(plan.request.model)
    checkpoint_layers(model.blocks, POLICY)
    optimizer = optim.AdamW(learning_rate=3e-4)
    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state]
    mx.eval(state)

    def loss(inputs: mx.array, targets: mx.array) -> mx.array:
        losses: mx.array = nn.losses.cross_entropy(model(inputs), targets)
        return losses.mean()

    def step(inputs: mx.array, targets: mx.array) -> mx.array:
        value: mx.array
        value, gradients = nn.value_and_grad(model, loss)(inputs, targets)
        optimizer.update(model, gradients)
        return value

    compiled = mx.compile(step, inputs=state, outputs=state)

    # 3. Under the guard: the plan's cache limit and memory limit are set, and put back at the end.
    with oomguard.Guard.of(plan, on_notice=lambda notice: print(f"guard: {notice.text}")) as guard:
        for _ in range(STEPS):
            tokens = mx.random.randint(0, 256, (batch, plan.request.step.seq_len + 1))
            value = compiled(tokens[:, :-1], tokens[:, 1:])
            mx.eval(state, value)
            guard.check()
    print(guard.summary())


if __name__ == "__main__":
    main()
