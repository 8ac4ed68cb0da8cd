"""``oomguard.trace`` is a function to its users and a package to its parts."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten

import oomguard


def test_trace_is_called_from_the_top_of_the_package() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    optimizer = optim.SGD(0.1)
    mx.eval(model.parameters())
    before = [(name, array.tolist()) for name, array in tree_flatten(model.parameters())]
    loss_and_gradients = nn.value_and_grad(model, lambda x, y: nn.losses.mse_loss(model(x), y))

    def step(x: mx.array, y: mx.array) -> mx.array:
        loss, gradients = loss_and_gradients(x, y)
        optimizer.update(model, gradients)
        return loss

    found = oomguard.trace(step, mx.zeros((32, 64)), mx.zeros((32, 8)), state=[model, optimizer])
    weights = (64 * 256 + 256 + 256 * 8 + 8) * 4
    assert found.peak_bytes > weights + 32 * 256 * 4
    assert [(name, array.tolist()) for name, array in tree_flatten(model.parameters())] == before


def test_trace_package_keeps_its_parts() -> None:
    import oomguard.trace.engine

    assert oomguard.trace.engine.trace.__module__ == "oomguard.trace.engine"


def test_public_names_can_all_be_had() -> None:
    for name in oomguard.__all__:
        assert callable(getattr(oomguard, name))
