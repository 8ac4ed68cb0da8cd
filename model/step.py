"""The one training step that is measured, traced and trained with.

Written as mlx-lm's trainer writes it: a function of the batch that updates the module and the optimizer in
place, compiled with their state as inputs and outputs, and one ``mx.eval(state, loss, gradients)`` a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_map

from oomguard.config.model import ModelConfig
from oomguard.config.step import StepConfig, check_seq_len
from oomguard.estimate.inventory import Backend, Inventory
from oomguard.model.checkpoint import CheckpointHandle, checkpoint_layers
from oomguard.model.gpt import GPT
from oomguard.step.repeated import Repeated

MicroBatch = tuple[mx.array, mx.array]
"""Inputs and targets, int32, (batch, seq_len) each."""
Gradients = Any
Schedule = Callable[[mx.array], mx.array]
StepFunction = Callable[[list[MicroBatch], Gradients, bool], tuple[mx.array, Gradients]]

SGD_MOMENTUM = 0.9
# Adam's rate over Muon's: a Muon step is of unit size in every direction of a matrix.
MUON_ADAMW_SHARE = 0.05
# Added to what is divided by. What MLX adds by default is zero in half precision, and a parameter that had no
# gradient yet (an unseen byte) would become 0 / 0.
HALF_EPS = 1e-5
HALF_SQUARE_EPS = 1e-6
MANY = 32  # micro-batches; MLX takes the rows of a short array in another way than those of a longer one


@dataclass(frozen=True)
class Recipe:
    """Settings of a step that no byte depends on.

    ``learning_rate`` is a number, or a function of the optimizer's step count (an array) to a scalar array:
    it becomes part of the graph, so a schedule neither recompiles nor leaves the state.
    """

    learning_rate: float | Schedule = 3e-4
    max_norm: float = 1.0
    weight_decay: float = 0.01


@dataclass
class BuiltStep:
    """A model, its optimizer and the step that updates them.

    Attributes:
        state: what ``mx.compile`` takes as inputs and outputs and ``mx.eval`` evaluates, in mlx-lm's order:
            the module's state, the optimizer's, the random state.
        plain: the step as a Python function, ``plain(micro_batches, gradients, update)`` to ``(loss,
            gradients)``: the losses of all micro-batches summed, their gradients added to ``gradients`` (None
            for none yet); with ``update`` the sum is averaged and applied, and None comes back in its place.
        compiled: ``plain`` under ``mx.compile``, or None when the step is not compiled.
        batch: ``step.accumulate`` micro-batches of the step's shape; in a step that was built without being
            evaluated, those after the first are one and the same.
    """

    config: ModelConfig
    step: StepConfig
    model: GPT
    optimizer: optim.Optimizer
    checkpoint: CheckpointHandle
    state: list[Any]
    plain: StepFunction
    compiled: StepFunction | None
    loss: Callable[[mx.array, mx.array], mx.array]
    batch: Sequence[MicroBatch]
    _validation: Callable[[mx.array, mx.array], mx.array] = field(repr=False)

    @property
    def function(self) -> StepFunction:
        """The function that ``run`` calls."""
        return self.compiled or self.plain

    @property
    def learning_rate(self) -> mx.array:
        """The rate of the last update (Muon's, where it is one of two)."""
        rate: mx.array = self.optimizer.learning_rate
        return rate

    def graphs(self, batch: Sequence[MicroBatch] | None = None) -> Sequence[tuple[list[MicroBatch], bool]]:
        """The calls one update makes, as (micro-batches, update): one, or one a micro-batch."""
        batch = self.batch if batch is None else batch
        if not self.step.evaluate_micro_steps:
            return [(list(batch), True)]
        if isinstance(batch, Repeated):
            first, between, last = [batch.first], [batch.between], [batch.last]
            return Repeated((first, False), (between, False), (last, True), len(batch))
        return [([micro_batch], i == len(batch) - 1) for i, micro_batch in enumerate(batch)]

    def run(
        self, batch: Sequence[MicroBatch] | None = None, *, between: Callable[[], object] = lambda: None
    ) -> mx.array:
        """One update, evaluated; the mean loss over its micro-batches, a float32 scalar.

        ``between`` is called before each further call of the step. What it raises ends the update there:
        parameters and optimizer are as before it, and only the random state has moved on.
        """
        total: mx.array | None = None
        gradients: Gradients = None
        for micro_batches, update in self.graphs(batch):
            if total is not None:
                between()
            loss, gradients = self.function(micro_batches, gradients, update)
            total = loss if total is None else total + loss
            mx.eval(self.state, total, gradients)
        assert total is not None
        mean = total / self.step.accumulate
        mx.eval(mean)
        return mean

    def validation_loss(self, inputs: mx.array, targets: mx.array) -> float:
        """The mean loss of one micro-batch without dropout and without gradients, in nats a token."""
        self.model.eval()
        try:
            return cast(float, self._validation(inputs, targets).item())
        finally:
            self.model.train()


def build_step(
    model: ModelConfig,
    step: StepConfig,
    *,
    seed: int = 0,
    evaluated: bool = True,
    recipe: Recipe | None = None,
    with_batch: bool = True,
) -> BuiltStep:
    """Builds the model, the optimizer and the step of a configuration.

    Args:
        model: the shape.
        step: the settings that decide the peak.
        seed: of parameters, batch and dropout; sets the global random state.
        evaluated: whether parameters, optimizer state and batch are evaluated. Without, nothing takes memory
            and a step of any size can be captured; of micro-batches that are evaluated one by one, two exist.
        recipe: learning rate, clipping norm and weight decay.
        with_batch: whether there is a random batch; without, ``batch`` is empty until the caller sets it.

    Raises:
        InputError: the sequence is longer than the model's context.
    """
    check_seq_len(model, step)
    recipe = recipe or Recipe()
    mx.random.seed(seed)
    module = GPT(model)
    module.set_dtype(getattr(mx, step.dtype))
    checkpoint = checkpoint_layers(
        module.blocks, step.checkpoint, block_to_boundary=_block_to_boundary(model, step)
    )
    optimizer = make_optimizer(step, recipe)
    optimizer.init(module.trainable_parameters())
    module.train()
    state = [module.state, optimizer.state, mx.random.state]
    repeated = not evaluated and step.evaluate_micro_steps
    batch = _random_batch(model, step, seed, repeated=repeated) if with_batch else []
    if evaluated:
        mx.eval(state, batch)
    loss = _loss_of(module)
    plain = _step_function(module, optimizer, loss, step, recipe)
    return BuiltStep(
        config=model,
        step=step,
        model=module,
        optimizer=optimizer,
        checkpoint=checkpoint,
        state=state,
        plain=plain,
        compiled=mx.compile(plain, inputs=state, outputs=state) if step.compiled else None,
        loss=loss,
        batch=batch,
        _validation=mx.compile(loss, inputs=[module.state]) if step.compiled else loss,
    )


def make_optimizer(step: StepConfig, recipe: Recipe) -> optim.Optimizer:
    """The optimizer of ``mlx.optimizers``; its state is in the parameters' dtype.

    Muon updates the matrices of the blocks and AdamW the rest (embeddings, norms, biases), as Muon asks for.
    """
    rate, decay = recipe.learning_rate, recipe.weight_decay
    half = step.dtype == "float16"
    eps = HALF_EPS if half else 1e-8
    if step.optimizer == "sgd":
        return optim.SGD(rate, momentum=SGD_MOMENTUM)
    if step.optimizer == "adam":
        return optim.Adam(rate, eps=eps)
    if step.optimizer == "adamw":
        return optim.AdamW(rate, weight_decay=decay, eps=eps)
    if step.optimizer == "lion":
        return optim.Lion(rate, weight_decay=decay)
    if step.optimizer == "adafactor":
        square_eps = HALF_SQUARE_EPS if half else 1e-30
        return optim.Adafactor(rate, eps=(square_eps, 1e-3), relative_step=False, weight_decay=decay)
    matrices = optim.Muon(rate, weight_decay=decay)
    rest = optim.AdamW(_scaled(rate, MUON_ADAMW_SHARE), weight_decay=decay, eps=eps)
    return optim.MultiOptimizer([matrices, rest], [is_muon_matrix])


def _scaled(rate: float | Schedule, share: float) -> float | Schedule:
    return share * rate if isinstance(rate, float | int) else lambda done: share * rate(done)


def is_muon_matrix(path: str, parameter: mx.array) -> bool:
    """Whether Muon, and not AdamW, updates a parameter."""
    return bool(parameter.ndim == 2) and path.startswith("blocks.")


def _loss_of(module: GPT) -> Callable[[mx.array, mx.array], mx.array]:
    def loss(inputs: mx.array, targets: mx.array) -> mx.array:
        logits = module(inputs).astype(mx.float32)
        return nn.losses.cross_entropy(logits, targets, reduction="mean")

    return loss


def _step_function(
    module: GPT,
    optimizer: optim.Optimizer,
    loss: Callable[[mx.array, mx.array], mx.array],
    step: StepConfig,
    recipe: Recipe,
) -> StepFunction:
    loss_and_gradients = nn.value_and_grad(module, loss)

    def train_step(
        micro_batches: list[MicroBatch], gradients: Gradients, update: bool
    ) -> tuple[mx.array, Gradients]:
        losses = []
        for inputs, targets in micro_batches:
            value, new = loss_and_gradients(inputs, targets)
            losses.append(value)
            gradients = new if gradients is None else tree_map(mx.add, new, gradients)
        total = sum(losses[1:], losses[0])
        if not update:
            return total, gradients
        if step.accumulate > 1:
            gradients = tree_map(lambda g: g / step.accumulate, gradients)
        if step.clip_norm:
            gradients, _ = optim.clip_grad_norm(gradients, recipe.max_norm)
        optimizer.update(module, gradients)
        return total, None

    return train_step


def _random_batch(model: ModelConfig, step: StepConfig, seed: int, *, repeated: bool) -> Sequence[MicroBatch]:
    """Random tokens and targets; drawn from a key of their own, so that they disturb no random state.

    Args:
        repeated: nobody will run them; more than two are the first, and the second again and again.
    """
    repeated = repeated and step.accumulate > 2
    count = min(step.accumulate, MANY) if repeated else step.accumulate
    keys = mx.random.split(mx.random.key(seed), 2 * count)
    shape = (step.batch, step.seq_len)
    drawn = islice(keys, 4 if repeated else None)
    draws = [mx.random.randint(0, model.vocab_size, shape, mx.int32, key=key) for key in drawn]
    batch = list(zip(draws[0::2], draws[1::2], strict=True))
    return Repeated(batch[0], batch[1], batch[1], step.accumulate) if repeated else batch


def mlx_backend() -> Backend:
    """What MLX computes on in this process."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def _block_to_boundary(model: ModelConfig, step: StepConfig) -> float:
    """What decides ``stride=auto``; the inventory counts it, so that what is built is what was planned."""
    return Inventory(model, step, mlx_backend()).block_to_boundary
