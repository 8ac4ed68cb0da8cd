"""Steps that keep their state in every way people keep it, and hand ``mx.eval`` more or less of it.

Each builder returns a ``Built``. Run as ``python state_steps.py BUILDER`` it prints what MLX measures, step by step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from oomguard.measure.blas import child_environment, find_openblas

STEPS = 8
WIDTH = 512


@dataclass
class Built:
    """A step, what it is called with, its state, and what the loop hands to ``mx.eval``, given the loss."""

    step: Callable[..., Any]
    arguments: tuple[Any, ...]
    state: list[Any] | None
    evaluated: Callable[[Any], Any]
    evaluate: Callable[[Any, list[Any]], Any] = lambda returned, state: (returned, state)


def linear_layers(count: int = 6) -> nn.Module:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)])
    mx.eval(model.parameters())
    return model


def gelu_layers() -> nn.Module:
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())])
    mx.eval(model.parameters())
    return model


def inputs(rows: int = 64) -> tuple[mx.array]:
    return (mx.random.normal((rows, WIDTH)),)


def gradients(model: nn.Module, x: mx.array) -> Any:
    return nn.value_and_grad(model, lambda m, x: m(x).square().mean())(model, x)


def squares(weight: mx.array, x: mx.array) -> tuple[mx.array, mx.array]:
    loss, gradient = mx.value_and_grad(lambda w: (x @ w).square().mean())(weight)
    return loss, gradient


def descend(model: nn.Module, directions: dict[str, mx.array]) -> None:
    parameters = dict(tree_flatten(model.parameters()))
    model.update(tree_unflatten([(k, parameters[k] - 0.01 * d) for k, d in directions.items()]))


def zeros_like(model: nn.Module) -> dict[str, mx.array]:
    return {name: mx.zeros_like(value) for name, value in tree_flatten(model.parameters())}


# -- moments in a dictionary of one's own ------------------------------------------------------------------


def moments_from_first_gradient(zeros: bool = False) -> Built:
    """As PyTorch's SGD begins: the moments keep the layout of a product, transposed, for good."""
    model = linear_layers()
    moments = zeros_like(model) if zeros else {}
    holder = [moments]  # not an array in the closure itself

    def step(x: mx.array) -> mx.array:
        loss, grads = gradients(model, x)
        for k, g in tree_flatten(grads):
            moments[k] = 0.9 * moments[k] + g if k in moments else g
        descend(model, holder[0])
        return loss

    return Built(step, inputs(), [model, moments], lambda loss: (loss, model, moments))


def state_in_closure() -> Built:
    return moments_from_first_gradient(zeros=True)


def state_found_in_closure() -> Built:
    built = moments_from_first_gradient(zeros=True)
    built.state = None
    return built


def moments_from_first_gradient_found() -> Built:
    built = moments_from_first_gradient()
    built.state = None
    return built


def moments_in_a_variable() -> Built:
    """A closure's variable, given another tree at every step."""
    model = linear_layers()
    moments: Any = None

    def step(x: mx.array) -> mx.array:
        nonlocal moments
        loss, grads = gradients(model, x)
        moments = grads if moments is None else tree_map(lambda m, g: 0.9 * m + g, moments, grads)
        descend(model, dict(tree_flatten(moments)))
        return loss

    return Built(step, inputs(), None, lambda loss: (loss, model, moments))


def array_in_a_variable() -> Built:
    """No module at all: one array, rebound; ``state`` names it by value."""
    weight = mx.random.normal((4 * WIDTH, 4 * WIDTH))
    mx.eval(weight)

    def step(x: mx.array) -> mx.array:
        nonlocal weight
        loss, gradient = squares(weight, x)
        weight = weight - 0.01 * gradient
        return loss

    return Built(step, (mx.random.normal((64, 4 * WIDTH)),), [weight], lambda loss: (loss, weight))


def array_changed_in_place() -> Built:
    """The same with ``-=``, which changes the Python object."""
    weight = mx.random.normal((4 * WIDTH, 4 * WIDTH))
    mx.eval(weight)
    holder = {"weight": weight}

    def step(x: mx.array) -> mx.array:
        loss, gradient = squares(holder["weight"], x)
        holder["weight"] -= 0.01 * gradient
        return loss

    return Built(step, (mx.random.normal((64, 4 * WIDTH)),), [holder], lambda loss: (loss, holder))


# -- objects of one's own ----------------------------------------------------------------------------------


class Momentum:
    """A plain object with a ``state`` property."""

    def __init__(self, model: nn.Module | None = None):
        self.moments = zeros_like(model) if model else {}

    @property
    def state(self) -> list[mx.array]:
        return list(self.moments.values())

    def update(self, model: nn.Module, grads: Any) -> None:
        for k, g in tree_flatten(grads):
            self.moments[k] = 0.9 * self.moments[k] + g if k in self.moments else g
        descend(model, self.moments)


class SlottedMomentum:
    __slots__ = ("__moments", "rate")

    def __init__(self) -> None:
        self.rate = 0.01
        self.__moments: dict[str, mx.array] = {}

    def update(self, model: nn.Module, grads: Any) -> None:
        self.__moments = {k: 0.9 * self.__moments.get(k, mx.array(0.0)) + g for k, g in tree_flatten(grads)}
        descend(model, self.__moments)

    @property
    def arrays(self) -> list[mx.array]:
        return list(self.__moments.values())


class Pair(NamedTuple):
    first: mx.array
    count: mx.array


@dataclass
class Inner:
    pairs: dict[str, Pair] = field(default_factory=dict)


@dataclass
class NestedMomentum:
    """Moments as named tuples in a dictionary in a dataclass in a dataclass."""

    inner: Inner = field(default_factory=Inner)
    name: str = "nested"

    def update(self, model: nn.Module, grads: Any) -> None:
        pairs = self.inner.pairs
        for k, g in tree_flatten(grads):
            old = pairs.get(k)
            pairs[k] = Pair(g, mx.array(1)) if old is None else Pair(0.9 * old.first + g, old.count + 1)
        descend(model, {k: pair.first for k, pair in pairs.items()})

    @property
    def arrays(self) -> list[mx.array]:
        return [array for pair in self.inner.pairs.values() for array in pair]


def _own_optimizer(optimizer: Any, model: nn.Module, arrays: Callable[[], Any], state: Any) -> Built:
    def step(x: mx.array) -> mx.array:
        loss, grads = gradients(model, x)
        optimizer.update(model, grads)
        return loss

    return Built(step, inputs(), [model, state], lambda loss: (loss, model.state, arrays()))


def own_optimizer(made: bool = False) -> Built:
    model = linear_layers()
    optimizer = Momentum(model if made else None)
    return _own_optimizer(optimizer, model, lambda: optimizer.state, optimizer)


def own_optimizer_made() -> Built:
    return own_optimizer(made=True)


def own_optimizer_by_its_dictionary() -> Built:
    model, optimizer = linear_layers(), Momentum()
    return _own_optimizer(optimizer, model, lambda: optimizer.state, optimizer.moments)


def own_optimizer_by_its_property() -> Built:
    model = linear_layers()
    optimizer = Momentum(model)
    return _own_optimizer(optimizer, model, lambda: optimizer.state, optimizer.state)


def own_optimizer_with_slots() -> Built:
    model, optimizer = linear_layers(), SlottedMomentum()
    return _own_optimizer(optimizer, model, lambda: optimizer.arrays, optimizer)


def own_optimizer_of_dataclasses() -> Built:
    model, optimizer = linear_layers(), NestedMomentum()
    return _own_optimizer(optimizer, model, lambda: optimizer.arrays, optimizer)


def array_listed_again() -> Built:
    """``m.state`` and one of its arrays: the same array, named twice."""
    model, optimizer = linear_layers(), optim.SGD(0.01, momentum=0.9)
    optimizer.init(model.trainable_parameters())
    mx.eval(optimizer.state)
    built = _own_optimizer(optimizer, model, lambda: optimizer.state, model.layers[0].weight)
    built.state = [model.state, optimizer, model.layers[0].weight, [model.layers[1].weight]]
    return built


def frozen_weight_in_closure() -> Built:
    """A weight the step never replaces, reached through the model and through a variable."""
    frozen, model, optimizer = linear_layers(2), linear_layers(2), optim.SGD(0.01)
    frozen.freeze()
    weight = frozen.layers[0].weight

    def step(x: mx.array) -> mx.array:
        loss, grads = nn.value_and_grad(model, lambda m, x: (m(frozen(x)) @ weight.T).square().mean())(
            model, x
        )
        optimizer.update(model, grads)
        return loss

    return Built(step, inputs(), [frozen, model, optimizer], lambda loss: (loss, model, optimizer.state))


def optimizer_never_initialized() -> Built:
    model, optimizer = linear_layers(), optim.Adam(1e-3)
    return _own_optimizer(optimizer, model, lambda: optimizer.state, optimizer)


# -- state that is not evaluated ---------------------------------------------------------------------------


def _training(
    optimizer: Any, given: str, *, compiled: bool = False, initialized: bool = True, dropout: bool = False
) -> Built:
    model = gelu_layers()
    if dropout:
        model.layers.insert(2, nn.Dropout(0.1))
    if initialized:
        optimizer.init(model.trainable_parameters())
        mx.eval(optimizer.state)
    state = [model.state, optimizer.state]
    loss_and_gradients = nn.value_and_grad(model, lambda x: (model(x) - x).square().mean())

    def plain(x: mx.array) -> mx.array:
        loss, grads = loss_and_gradients(x)
        optimizer.update(model, grads)
        return loss

    step = mx.compile(plain, inputs=state, outputs=state) if compiled else plain
    wanted: dict[str, tuple[Any, Any]] = {
        "loss": (lambda loss: loss, lambda returned, state: returned),
        "model": (lambda loss: model.state, lambda returned, state: state[0]),
        "moments": (lambda loss: optimizer.state, lambda returned, state: state[1]),
        "loss and model": (lambda loss: (loss, model.state), lambda returned, state: (returned, state[0])),
    }
    evaluated, evaluate = wanted[given]
    return Built(step, inputs(512), state, evaluated, evaluate)


def adam_loss_alone() -> Built:
    return _training(optim.Adam(1e-3), "loss")


def adam_loss_alone_compiled() -> Built:
    return _training(optim.Adam(1e-3), "loss", compiled=True)


def adam_loss_alone_never_initialized() -> Built:
    return _training(optim.Adam(1e-3), "loss", initialized=False)


def adam_loss_alone_with_dropout() -> Built:
    return _training(optim.Adam(1e-3), "loss", dropout=True)


def sgd_loss_alone() -> Built:
    return _training(optim.SGD(1e-3), "loss")


def momentum_loss_alone_compiled() -> Built:
    return _training(optim.SGD(1e-3, momentum=0.9), "loss", compiled=True)


def adam_model_alone() -> Built:
    return _training(optim.Adam(1e-3), "model")


def adam_moments_alone() -> Built:
    return _training(optim.Adam(1e-3), "moments")


def adam_moments_alone_compiled() -> Built:
    return _training(optim.Adam(1e-3), "moments", compiled=True)


def sgd_loss_and_model() -> Built:
    return _training(optim.SGD(1e-3, momentum=0.9), "loss and model")


def metric_never_evaluated() -> Built:
    """A running sum of outputs that nobody looks at: every step leaves the output that it adds."""
    model, optimizer = linear_layers(), optim.SGD(1e-3)
    totals = {"seen": mx.zeros((WIDTH, WIDTH))}
    mx.eval(totals)

    def step(x: mx.array) -> Any:
        loss, grads = gradients(model, x)
        optimizer.update(model, grads)
        output = model(x)
        totals["seen"] = totals["seen"] + output
        return loss, output

    return Built(
        step,
        inputs(WIDTH),
        [model, optimizer, totals],
        lambda returned: (returned, model, optimizer.state),
        lambda returned, state: (returned, state[0], state[1]),
    )


def two_steps_late() -> Built:
    """What one step makes of its gradients the next hands on, and the one after applies."""
    model = linear_layers()
    late: list[Any] = [zeros_like(model), zeros_like(model)]
    mx.eval(late)

    def step(x: mx.array) -> mx.array:
        loss, grads = gradients(model, x)
        descend(model, late[0])
        late[0] = {k: 2.0 * v for k, v in late[1].items()}
        late[1] = {k: v * v for k, v in tree_flatten(grads)}
        return loss

    return Built(step, inputs(), [model, late], lambda loss: loss, lambda returned, state: returned)


def measure(built: Built) -> list[int]:
    """The peaks of the first steps, as MLX measures them."""
    built.state = None  # a list of arrays would hold those it was made with
    mx.eval(built.arguments)
    peaks = []
    for _ in range(STEPS):
        mx.synchronize()
        mx.reset_peak_memory()
        loss = built.step(*built.arguments)
        mx.eval(built.evaluated(loss))
        mx.synchronize()
        peaks.append(mx.get_peak_memory())
    return peaks


def measured_by(module: types.ModuleType, *names: str) -> dict[str, list[int]]:
    """``measure`` of builders of a module such as this one, each in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(module.__file__), *names],
        capture_output=True,
        text=True,
        check=True,
        env=child_environment(os.environ, find_openblas()),
    )
    return dict(json.loads(line) for line in done.stdout.splitlines())


def main(builders: dict[str, Any]) -> None:
    """Each builder that is named in a process of its own, all from one start of the interpreter."""
    for name in sys.argv[1:]:
        if not os.fork():
            sys.stdout.write(json.dumps([name, measure(builders[name]())]) + "\n")
            sys.stdout.flush()
            os._exit(0)
        if os.wait()[1]:
            sys.exit(f"{name} failed")


if __name__ == "__main__":
    main(globals())
