"""The optimizers of ``mlx.optimizers`` by name, with the rates their authors propose."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.optimizers as optim


def _is_matrix(_path: str, parameter: mx.array) -> bool:
    return bool(parameter.ndim == 2)


def _warmed_up() -> Callable[[mx.array], mx.array]:
    """Linear warm-up, then a cosine: the schedule becomes part of the step's graph."""
    warm = optim.linear_schedule(0.0, 1e-3, 10)
    schedule: Callable[[mx.array], mx.array] = optim.join_schedules(
        [warm, optim.cosine_decay(1e-3, 1000)], [10]
    )
    return schedule


OPTIMIZERS: dict[str, Callable[[], optim.Optimizer]] = {
    "sgd": lambda: optim.SGD(1e-2),
    "sgd-momentum": lambda: optim.SGD(1e-2, momentum=0.9),
    "sgd-nesterov": lambda: optim.SGD(1e-2, momentum=0.9, weight_decay=1e-4, nesterov=True),
    "rmsprop": lambda: optim.RMSprop(1e-3),
    "adagrad": lambda: optim.Adagrad(1e-2),
    "adadelta": lambda: optim.AdaDelta(1.0),
    "adam": lambda: optim.Adam(3e-4),
    "adam-corrected": lambda: optim.Adam(3e-4, bias_correction=True),
    "adamw": lambda: optim.AdamW(3e-4),
    "adamw-schedule": lambda: optim.AdamW(_warmed_up()),
    "adamax": lambda: optim.Adamax(2e-3),
    "lion": lambda: optim.Lion(1e-4, weight_decay=0.1),
    "adafactor": lambda: optim.Adafactor(),
    "adafactor-momentum": lambda: optim.Adafactor(1e-3, relative_step=False, beta_1=0.9),
    "muon": lambda: optim.MultiOptimizer([optim.Muon(2e-2), optim.AdamW(3e-4)], [_is_matrix]),
}


def make_optimizer(name: str) -> optim.Optimizer:
    """A new optimizer of that name."""
    return OPTIMIZERS[name]()
