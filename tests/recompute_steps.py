"""Steps that recompute by themselves, and steps that call compiled functions without being one.

Each builder returns a ``Built``. ``python recompute_steps.py BUILDER`` prints what MLX measures, step by step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from state_steps import Built, main

Function = Callable[..., Any]


def training(
    model: nn.Module,
    loss: Function,
    arguments: tuple[mx.array, ...],
    optimizer: optim.Optimizer | None = None,
    *,
    compiled: bool = False,
) -> Built:
    """A step of ``loss(model, *arguments)``, as most loops have it."""
    optimizer = optimizer or optim.Adam(1e-3)
    optimizer.init(model.trainable_parameters())
    mx.eval(model.parameters(), optimizer.state, arguments)
    state = [model.state, optimizer.state, mx.random.state]

    def plain(*arguments: mx.array) -> mx.array:
        value, gradients = nn.value_and_grad(model, loss)(model, *arguments)
        optimizer.update(model, gradients)
        return value

    step = mx.compile(plain, inputs=state, outputs=state) if compiled else plain
    return Built(step, arguments, state, lambda loss: (loss, model, optimizer.state, mx.random.state))


# -- two passes through layers checkpointed on their class, as preference trainers run them ----------------------


class Layer(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def __call__(self, x: mx.array) -> mx.array:
        return x + self.down(nn.gelu(self.up(self.norm(x))))


class CheckpointedLayer(Layer):
    def __call__(self, x: mx.array) -> mx.array:
        def inner(parameters: Any, x: mx.array) -> mx.array:
            self.update(parameters)
            return Layer.__call__(self, x)

        return mx.checkpoint(inner)(self.trainable_parameters(), x)


class Model(nn.Module):
    def __init__(self, layer: type[nn.Module], layers: int = 6, width: int = 128):
        super().__init__()
        self.embedding, self.head = nn.Embedding(2000, width), nn.Linear(width, 2000)
        self.layers = [layer(width) for _ in range(layers)]

    def __call__(self, tokens: mx.array) -> mx.array:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def tokens(count: int) -> tuple[mx.array, ...]:
    return tuple(mx.random.randint(1, 2000, (4, 256)) for _ in range(count))


def preference(
    passes: int = 2, *, reference: bool = False, compiled: bool = False, frozen: int = 0, layer: Any = None
) -> Built:
    """One pass, or two whose scores meet before the backward; beside a frozen reference or not."""
    model, other = Model(layer or CheckpointedLayer), Model(layer or CheckpointedLayer)
    for each in model.layers[:frozen]:
        each.freeze()
    other.freeze()
    mx.eval(other.parameters())

    def score(model: nn.Module, tokens: mx.array) -> mx.array:
        return -nn.losses.cross_entropy(model(tokens), tokens).sum(-1)

    def loss(model: nn.Module, chosen: mx.array, *rejected: mx.array) -> mx.array:
        difference = score(model, chosen)
        for each in rejected:
            difference = difference - score(model, each)
        if reference:
            difference = difference - mx.stop_gradient(score(other, chosen))
        return -nn.log_sigmoid(0.1 * difference).mean()

    return training(model, loss, tokens(passes), compiled=compiled)


one_pass = partial(preference, 1)
two_passes = preference
two_passes_compiled = partial(preference, compiled=True)
two_passes_with_reference = partial(preference, reference=True)
two_passes_with_reference_compiled = partial(preference, reference=True, compiled=True)
two_passes_first_layers_frozen = partial(preference, frozen=2)
two_passes_first_layers_frozen_compiled = partial(preference, frozen=2, compiled=True)
three_passes = partial(preference, 3)
three_passes_compiled = partial(preference, 3, compiled=True)


# -- passes multiplied, compared, added; layers that are wrapped before the step ----------------------------------


def coupled(*, multiplied: bool, compiled: bool = False) -> Built:
    """Two passes through transformer layers of which one matrix is trained, wrapped when the model is made."""
    model = nn.Module()
    model.layers = [nn.TransformerEncoderLayer(64, 4) for _ in range(4)]
    model.freeze()
    for layer in model.layers:
        layer.linear1.unfreeze()
    wrapped = [nn.utils.checkpoint(layer) for layer in model.layers]

    def run(x: mx.array) -> mx.array:
        for layer in wrapped:
            x = layer(x, None)
        return x.square().mean()

    def loss(model: nn.Module, a: mx.array, b: mx.array) -> mx.array:
        return run(a) * run(b) if multiplied else run(a) + run(b)

    arguments = tuple(mx.random.normal((4, 64, 64)) for _ in range(2))
    return training(model, loss, arguments, optim.SGD(1e-3), compiled=compiled)


coupled_by_product = partial(coupled, multiplied=True)
coupled_by_product_compiled = partial(coupled, multiplied=True, compiled=True)
coupled_by_sum = partial(coupled, multiplied=False)


def triplet(*, masked: bool = True, normalized: bool = True, compiled: bool = False) -> Built:
    """Anchor, positive and negative, normalized and compared; a mask goes through every checkpointed call."""

    class Masked(nn.Module):
        def __init__(self, width: int):
            super().__init__()
            self.norm = nn.RMSNorm(width)
            self.up = nn.Linear(width, 2 * width, bias=False)
            self.down = nn.Linear(2 * width, width, bias=False)

        def __call__(self, x: mx.array, mask: mx.array | None = None) -> mx.array:
            h = x if mask is None else x * mask
            return x + self.down(nn.silu(self.up(self.norm(h))))

    model = nn.Module()
    model.embedding = nn.Embedding(512, 64)
    model.layers = [Masked(64) for _ in range(3)]

    def encode(tokens: mx.array) -> mx.array:
        x = model.embedding(tokens)
        given = ((tokens != 0)[..., None].astype(x.dtype),) if masked else ()
        for layer in model.layers:

            def inner(parameters: Any, *arrays: mx.array, layer: nn.Module = layer) -> mx.array:
                layer.update(parameters)
                return layer(*arrays)

            x = mx.checkpoint(inner)(layer.trainable_parameters(), x, *given)
        x = x.mean(axis=1)
        return x / mx.linalg.norm(x, axis=-1, keepdims=True) if normalized else x

    def loss(model: nn.Module, *batches: mx.array) -> mx.array:
        anchor, *others = [encode(tokens) for tokens in batches]
        scores = mx.stack([(anchor * other).sum(-1) for other in others], axis=-1)
        return (mx.logsumexp(scores, axis=-1) - scores[..., 0]).mean()

    batches = tuple(mx.random.randint(1, 512, (8, 64)) for _ in range(3))
    return training(model, loss, batches, compiled=compiled)


triplet_compiled = partial(triplet, compiled=True)
triplet_without_mask = partial(triplet, masked=False)
triplet_not_normalized = partial(triplet, normalized=False)


# -- parts of a sequence, segments, calls inside calls, what nothing reads, random numbers ------------------------


def parts_of_a_sequence(*, frozen: bool = False, compiled: bool = False) -> Built:
    """One module called on every quarter of the sequence, its parameters lent to it with ``update``."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

        def __call__(self, x: mx.array) -> mx.array:
            def inner(parameters: Any, x: mx.array) -> mx.array:
                self.update(parameters)
                return self.down(mx.tanh(self.up(x)))

            run, n = mx.checkpoint(inner), x.shape[1] // 4
            parts = [run(self.trainable_parameters(), x[:, k : k + n]) for k in range(0, x.shape[1], n)]
            return mx.concatenate(parts, axis=1)

    model = nn.Module()
    model.layers = [Part() for _ in range(3)]
    if frozen:
        model.layers[0].freeze()

    def loss(model: nn.Module, x: mx.array) -> mx.array:
        for layer in model.layers:
            x = x + layer(x)
        return x.square().sum()

    x = mx.random.normal((4, 256, 64))
    return training(model, loss, (x,), optim.SGD(1e-3), compiled=compiled)


parts_of_a_sequence_compiled = partial(parts_of_a_sequence, compiled=True)
parts_of_a_sequence_frozen = partial(parts_of_a_sequence, frozen=True)
parts_of_a_sequence_frozen_compiled = partial(parts_of_a_sequence, frozen=True, compiled=True)


def layers_alone(run: Function, *, compiled: bool = False, dropout: float = 0.0) -> Built:
    """A stack of transformer layers, run as ``run(model, x)`` says."""
    model = nn.Module()
    model.layers = [nn.TransformerEncoderLayer(64, 4, dropout=dropout) for _ in range(4)]
    x = mx.random.normal((4, 64, 64))
    return training(model, lambda model, x: run(model, x).square().mean(), (x,), compiled=compiled)


def _each(model: nn.Module, x: mx.array) -> mx.array:
    for layer in model.layers:
        x = nn.utils.checkpoint(layer)(x, None)
    return x


def _pairs(model: nn.Module, x: mx.array) -> mx.array:
    for k in range(0, 4, 2):

        def both(parameters: Any, x: mx.array, k: int = k) -> mx.array:
            for layer, given in zip(model.layers[k : k + 2], parameters, strict=True):
                layer.update(given)
                x = layer(x, None)
            return x

        x = mx.checkpoint(both)([each.trainable_parameters() for each in model.layers[k : k + 2]], x)
    return x


def _nested(model: nn.Module, x: mx.array) -> mx.array:
    def both(parameters: Any, x: mx.array) -> mx.array:
        for layer, given in zip(model.layers[:2], parameters, strict=True):
            layer.update(given)
            x = nn.utils.checkpoint(layer)(x, None)
        return x

    x = mx.checkpoint(both)([layer.trainable_parameters() for layer in model.layers[:2]], x)
    for layer in model.layers[2:]:
        x = layer(x, None)
    return x


def _result_that_nothing_reads(model: nn.Module, x: mx.array) -> mx.array:
    for layer in model.layers:

        def two(parameters: Any, x: mx.array, layer: nn.Module = layer) -> tuple[mx.array, mx.array]:
            layer.update(parameters)
            y = layer(x, None)
            return y, y.mean()

        x, _ = mx.checkpoint(two)(layer.trainable_parameters(), x)
    return x


random_numbers_drawn_again = partial(layers_alone, _each, dropout=0.1)
random_numbers_drawn_again_compiled = partial(layers_alone, _each, dropout=0.1, compiled=True)
segments = partial(layers_alone, _pairs)
segments_compiled = partial(layers_alone, _pairs, compiled=True)
calls_inside_calls = partial(layers_alone, _nested)
calls_inside_calls_compiled = partial(layers_alone, _nested, compiled=True)
result_that_nothing_reads = partial(layers_alone, _result_that_nothing_reads)
result_that_nothing_reads_compiled = partial(layers_alone, _result_that_nothing_reads, compiled=True)


def gradient_alone() -> Built:
    """``mx.grad`` of a checkpointed function, whose own result nothing reads."""

    def function(x: mx.array, w: mx.array, u: mx.array) -> mx.array:
        return mx.tanh(mx.tanh(x @ w) @ u)

    def loss(x: mx.array, w: mx.array, u: mx.array) -> mx.array:
        return mx.checkpoint(function)(x, w, u).sum()

    shapes = ((512, 128), (128, 1024), (1024, 128))
    arguments = tuple(mx.random.normal(shape) for shape in shapes)
    gradient = mx.grad(loss, argnums=(1, 2))
    return Built(gradient, arguments, [], lambda gradients: gradients)


# -- custom functions with a VJP of their own -------------------------------------------------------------------------


@mx.custom_function
def straight_through(x: mx.array) -> mx.array:
    """Rounds; its gradient is that of the identity, where ``x`` is in range."""
    return mx.round(x * 8) / 8


@straight_through.vjp
def straight_through_vjp(x: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
    return cotangent * (mx.abs(x) < 1)


@mx.custom_function
def scaled_exp(x: mx.array, y: mx.array) -> mx.array:
    return mx.exp(x) * y


@scaled_exp.vjp
def scaled_exp_vjp(
    primals: tuple[mx.array, mx.array], cotangent: mx.array, output: mx.array
) -> tuple[mx.array, mx.array]:
    return cotangent * output, cotangent * mx.exp(primals[0])


def _identity_gradient(x: mx.array) -> mx.array:
    function: Any = mx.custom_function(lambda x: mx.round(x * 8) / 8)
    function.vjp(lambda x, cotangent, output: cotangent)
    rounded: mx.array = function(x)
    return rounded


def _rounded_inside(layer: nn.Module, x: mx.array) -> mx.array:
    def inner(parameters: Any, x: mx.array) -> mx.array:
        layer.update(parameters)
        return straight_through(layer(x))

    recomputed: mx.array = mx.checkpoint(inner)(layer.trainable_parameters(), x)
    return recomputed


def custom(run: Function, *, compiled: bool = False) -> Built:
    """A stack of linear layers, each followed by a custom function as ``run(layer, x)`` says."""
    model = nn.Module()
    model.layers = [nn.Linear(256, 256) for _ in range(4)]

    def loss(model: nn.Module, x: mx.array) -> mx.array:
        for layer in model.layers:
            x = run(layer, x)
        return x.square().mean()

    return training(model, loss, (mx.random.normal((512, 256)),), compiled=compiled)


own_vjp = partial(custom, lambda layer, x: straight_through(layer(x)))
own_vjp_compiled = partial(custom, lambda layer, x: straight_through(layer(x)), compiled=True)
own_vjp_of_two_arrays = partial(custom, lambda layer, x: scaled_exp(0.1 * layer(x), x))
own_vjp_of_two_arrays_compiled = partial(
    custom, lambda layer, x: scaled_exp(0.1 * layer(x), x), compiled=True
)
own_vjp_hands_on = partial(custom, lambda layer, x: _identity_gradient(layer(x)))
own_vjp_in_a_checkpoint = partial(custom, _rounded_inside)
own_vjp_in_a_checkpoint_compiled = partial(custom, _rounded_inside, compiled=True)


# -- nn.utils.checkpoint around an MLP block, step not compiled ---------------------------------------------------


def mlp(
    activation: Function = nn.gelu,
    *,
    residual: bool = True,
    norm: bool = False,
    bias: bool = True,
    compiled: bool = False,
    optimizer: type[optim.Optimizer] = optim.SGD,
) -> Built:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(128, 512, bias=bias), nn.Linear(512, 128, bias=bias)
            if norm:
                self.norm = nn.LayerNorm(128)

        def __call__(self, x: mx.array) -> mx.array:
            y = self.down(activation(self.up(self.norm(x) if norm else x)))
            return x + y if residual else y

    model = nn.Module()
    model.layers = [Block() for _ in range(4)]
    wrapped = [nn.utils.checkpoint(layer) for layer in model.layers]

    def loss(model: nn.Module, x: mx.array) -> mx.array:
        for layer in wrapped:
            x = layer(x)
        return x.square().mean()

    return training(model, loss, (mx.random.normal((1024, 128)),), optimizer(1e-3), compiled=compiled)


mlp_relu = partial(mlp, nn.relu)
mlp_tanh = partial(mlp, nn.tanh)
mlp_without_residual = partial(mlp, residual=False)
mlp_without_bias = partial(mlp, bias=False)
mlp_with_norm = partial(mlp, norm=True)
mlp_adam = partial(mlp, optimizer=optim.Adam)
mlp_compiled = partial(mlp, compiled=True)


# -- compiled functions in a step that is not compiled ------------------------------------------------------------


def gelu_model(width: int = 256) -> nn.Module:
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.GELU())]
    model = nn.Sequential(*layers)
    mx.eval(model.parameters())
    return model


def activation_alone() -> Built:
    """Outside a gradient ``nn.silu`` is one kernel."""
    x = mx.random.normal((1024, 1024))
    return Built(lambda x: nn.silu(x * 1.5) * 2.0, (x,), [], lambda y: y)


def evaluation() -> Built:
    """A loss without a gradient: every activation is one kernel."""
    model, x = gelu_model(), mx.random.normal((512, 256))
    return Built(lambda x: (model(x) - x).square().mean(), (x,), [model.state], lambda loss: loss)


def gradient_compiled_update_plain() -> Built:
    """Only ``value_and_grad`` is compiled, as many loops have it."""
    model, x, optimizer = gelu_model(), mx.random.normal((512, 256)), optim.Adam(1e-3)
    optimizer.init(model.trainable_parameters())
    mx.eval(optimizer.state)
    gradient = nn.value_and_grad(model, lambda x: (model(x) - x).square().mean())
    compiled = mx.compile(gradient, inputs=model.state, outputs=model.state)

    def step(x: mx.array) -> mx.array:
        value, gradients = compiled(x)
        optimizer.update(model, gradients)
        return value

    state = [model.state, optimizer.state]
    return Built(step, (x,), state, lambda loss: (loss, model.state, optimizer.state))


def activations_in_and_beside_a_gradient() -> Built:
    """On what the gradient is of, an activation is plain code; on an array of the closure it is one kernel."""
    model, x, w = gelu_model(), mx.random.normal((512, 256)), mx.random.normal((512, 256))
    mx.eval(w)

    def loss(model: nn.Module, x: mx.array) -> mx.array:
        return (model(x) - nn.silu(w * 1.5) * nn.gelu(w)).square().mean()

    return training(model, loss, (x,))


def compiled_step_in_a_plain_one() -> Built:
    """The step proper is compiled; the loop's function does a little more."""
    model, x, optimizer = gelu_model(), mx.random.normal((512, 256)), optim.Adam(1e-3)
    inner = training(model, lambda model, x: (model(x) - x).square().mean(), (x,), optimizer, compiled=True)

    def step(x: mx.array) -> mx.array:
        return inner.step(mx.tanh(x) * 0.5 + x) / 2

    return Built(step, (x,), inner.state, inner.evaluated)


def checkpoints_in_a_compiled_gradient() -> Built:
    """Checkpointed layers inside a compiled gradient inside a plain step."""
    model, optimizer = Model(CheckpointedLayer, layers=3), optim.Adam(1e-3)
    optimizer.init(model.trainable_parameters())
    (batch,) = tokens(1)
    mx.eval(model.parameters(), optimizer.state, batch)

    def loss(tokens: mx.array) -> mx.array:
        return nn.losses.cross_entropy(model(tokens), tokens).mean()

    compiled = mx.compile(nn.value_and_grad(model, loss), inputs=model.state, outputs=model.state)

    def step(tokens: mx.array) -> mx.array:
        value, gradients = compiled(tokens)
        optimizer.update(model, gradients)
        return value

    state = [model.state, optimizer.state]
    return Built(step, (batch,), state, lambda loss: (loss, model.state, optimizer.state))


RECOMPUTING = [
    "one_pass",
    "two_passes",
    "two_passes_compiled",
    "two_passes_with_reference",
    "two_passes_with_reference_compiled",
    "two_passes_first_layers_frozen",
    "two_passes_first_layers_frozen_compiled",
    "three_passes",
    "three_passes_compiled",
    "coupled_by_product",
    "coupled_by_product_compiled",
    "coupled_by_sum",
    "triplet",
    "triplet_compiled",
    "triplet_without_mask",
    "triplet_not_normalized",
    "parts_of_a_sequence",
    "parts_of_a_sequence_compiled",
    "parts_of_a_sequence_frozen",
    "parts_of_a_sequence_frozen_compiled",
    "random_numbers_drawn_again",
    "random_numbers_drawn_again_compiled",
    "segments",
    "segments_compiled",
    "calls_inside_calls",
    "calls_inside_calls_compiled",
    "result_that_nothing_reads",
    "result_that_nothing_reads_compiled",
    "gradient_alone",
    "mlp",
    "mlp_relu",
    "mlp_tanh",
    "mlp_without_residual",
    "mlp_without_bias",
    "mlp_with_norm",
    "mlp_adam",
    "mlp_compiled",
    "own_vjp",
    "own_vjp_compiled",
    "own_vjp_of_two_arrays",
    "own_vjp_of_two_arrays_compiled",
    "own_vjp_hands_on",
    "own_vjp_in_a_checkpoint",
    "own_vjp_in_a_checkpoint_compiled",
]
COMPILED_IN_PART = [
    "activation_alone",
    "evaluation",
    "gradient_compiled_update_plain",
    "activations_in_and_beside_a_gradient",
    "compiled_step_in_a_plain_one",
    "checkpoints_in_a_compiled_gradient",
]

if __name__ == "__main__":
    main(globals())
