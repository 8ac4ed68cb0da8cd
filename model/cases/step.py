"""A network and how it is trained, as a step that can be run, measured and captured.

The step is written as people write it: a function of the batch that updates the module and the optimizer in
place, compiled with their state as inputs and outputs, everything evaluated in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_map

from oomguard.errors import InputError
from oomguard.model.cases.optimizers import make_optimizer
from oomguard.model.cases.registry import Training
from oomguard.model.checkpoint import checkpoint_layers

MicroBatch = tuple[mx.array, ...]
Gradients = Any
StepFunction = Callable[[list[MicroBatch], Gradients, bool], tuple[Any, Gradients]]


@dataclass
class Network:
    """A model and what it is trained on.

    Attributes:
        loss: ``loss(*micro_batch)`` to a scalar, or to a scalar and more arrays; calls ``model``.
        draw_batch: a random key to one micro-batch; floats in it are float32.
        layers: what a checkpoint policy ranges over, in the order they are called.
        cast: whether the parameters follow ``Training.dtype``; False where the builder already did.
    """

    model: nn.Module
    loss: Callable[..., Any]
    draw_batch: Callable[[mx.array], MicroBatch]
    layers: Sequence[nn.Module]
    cast: bool = True


@dataclass
class CaseStep:
    """A case that was built; the same shape of object as ``oomguard.model.step.BuiltStep``.

    Attributes:
        state: inputs and outputs of the compiled step: the module's state, the optimizer's, the random state.
        plain: ``plain(micro_batches, gradients, update) -> (loss, gradients)``; what ``loss`` is, the network
            decides: a scalar, or a tuple of a scalar and more arrays.
        compiled: ``plain`` under ``mx.compile``, or None.
        batch: ``training.accumulate`` micro-batches.
    """

    name: str
    training: Training
    model: nn.Module
    optimizer: optim.Optimizer
    layers: Sequence[nn.Module]
    state: list[Any]
    plain: StepFunction
    compiled: StepFunction | None
    batch: list[MicroBatch]

    @property
    def function(self) -> StepFunction:
        """The function that ``run`` calls."""
        return self.compiled or self.plain

    def graphs(self, batch: list[MicroBatch] | None = None) -> list[tuple[list[MicroBatch], bool]]:
        """The calls one update makes, as (micro-batches, update)."""
        batch = self.batch if batch is None else batch
        if not self.training.evaluate_micro_steps:
            return [(batch, True)]
        return [([micro_batch], i == len(batch) - 1) for i, micro_batch in enumerate(batch)]

    def run(self, batch: list[MicroBatch] | None = None) -> Any:
        """One update, evaluated; the loss of its last graph."""
        loss: Any = None
        gradients: Gradients = None
        for micro_batches, update in self.graphs(batch):
            loss, gradients = self.function(micro_batches, gradients, update)
            mx.eval(self.state, loss, gradients)
        return loss


def build_training(
    name: str,
    make_network: Callable[..., Network],
    training: Training,
    *,
    evaluated: bool = True,
    seed: int = 0,
) -> CaseStep:
    """Builds the network, applies what ``training`` says, and wraps it up as a step.

    Args:
        make_network: called with ``dtype``, an MLX dtype.
        evaluated: whether parameters, optimizer state and batch are evaluated.
        seed: of parameters, batch and dropout; sets the global random state.
    """
    mx.random.seed(seed)
    dtype = getattr(mx, training.dtype)
    network = make_network(dtype=dtype)
    if network.cast:
        network.model.set_dtype(dtype)
    _checkpoint(network, training.checkpoint)
    optimizer = make_optimizer(training.optimizer)
    optimizer.init(network.model.trainable_parameters())
    network.model.train()
    state = [network.model.state, optimizer.state, mx.random.state]
    keys = mx.random.split(mx.random.key(seed), training.accumulate)
    batch = [_cast(network.draw_batch(key), dtype) for key in keys]
    if evaluated:
        mx.eval(state, batch)
    plain = _step_function(network, optimizer, training)
    return CaseStep(
        name=name,
        training=training,
        model=network.model,
        optimizer=optimizer,
        layers=network.layers,
        state=state,
        plain=plain,
        compiled=mx.compile(plain, inputs=state, outputs=state) if training.compiled else None,
        batch=batch,
    )


def _cast(batch: MicroBatch, dtype: mx.Dtype) -> MicroBatch:
    return tuple(x.astype(dtype) if mx.issubdtype(x.dtype, mx.floating) else x for x in batch)


def _checkpoint(network: Network, policy: str) -> None:
    if policy == "none":
        return
    if not network.layers:
        raise InputError("this network has no list of layers to checkpoint")
    if policy != "mlx-lm":
        checkpoint_layers(network.layers, policy)
        return
    from mlx_lm.tuner.trainer import grad_checkpoint

    for kind in {type(layer) for layer in network.layers}:
        # mlx-lm rewrites the class; a class of this case alone keeps other cases of the process as they are.
        own = type(kind.__name__, (kind,), {"__module__": kind.__module__})
        members = [layer for layer in network.layers if type(layer) is kind]
        for layer in members:
            object.__setattr__(layer, "__class__", own)
        grad_checkpoint(members[0])


def _step_function(network: Network, optimizer: optim.Optimizer, training: Training) -> StepFunction:
    loss_and_gradients = nn.value_and_grad(network.model, network.loss)
    parts = training.accumulate

    def train_step(
        micro_batches: list[MicroBatch], gradients: Gradients, update: bool
    ) -> tuple[Any, Gradients]:
        losses = []
        for micro_batch in micro_batches:
            loss, new = loss_and_gradients(*micro_batch)
            losses.append(loss)
            gradients = new if gradients is None else tree_map(mx.add, new, gradients)
        loss = losses[0] if len(losses) == 1 else tree_map(lambda *all_of: sum(all_of), *losses)
        if not update:
            return loss, gradients
        if parts > 1:
            gradients = tree_map(lambda g: g / parts, gradients)
        if training.clip_norm:
            gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        optimizer.update(network.model, gradients)
        return loss, None

    return train_step
