"""Published peaks of runs on Macs beside the peaks the trace predicts for them. Nothing is fitted to them.

    python -m oomguard.calibration.public [FILE.jsonl] [ID ...]

What a row says is read by ``public_rows``. A LoRA run is built from the model's shape alone
(``data/architectures.json``), with mlx-lm's model, LoRA layers, loss and compiled step; a run from scratch by
``scratch_gpt``, an operation by ``published_ops``. Nothing of it is ever evaluated.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_map

from oomguard.calibration.public_rows import (
    QUERY_VALUE,
    OpRow,
    PublicRow,
    Published,
    ScratchRow,
    all_public_rows,
    read_public_rows,
    read_published,
    understood,
)
from oomguard.calibration.scratch_gpt import evaluation_call, training_call
from oomguard.config.step import Optimizer
from oomguard.config.words import read_optimizer
from oomguard.errors import InputError
from oomguard.step.opening import returned_then_state
from oomguard.trace.capture import Capture, Evaluate, capture
from oomguard.trace.engine import simulate
from oomguard.trace.lower import LOWERED, Version
from oomguard.trace.remat import apply_policy
from oomguard.trace.result import TraceResult

__all__ = [
    "ARCHITECTURES",
    "QUERY_VALUE",
    "PublicRow",
    "build_lora_step",
    "build_model",
    "main",
    "predict",
    "read_public_rows",
    "understood",
]

ARCHITECTURES = Path(__file__).parent.parent / "data" / "architectures.json"

ENTROPY_SHIFTED: Version = (0, 32, 1)

OPTIMIZERS: dict[Optimizer, Callable[..., optim.Optimizer]] = {
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "sgd": optim.SGD,
    "adafactor": optim.Adafactor,
    "lion": optim.Lion,
    "muon": optim.Muon,
}


# -- the step ----------------------------------------------------------------------------------------------


@dataclass
class LoraStep:
    """mlx-lm's training step for a row: call ``step(*arguments)``, then ``mx.eval`` what ``evaluated`` gives.

    Nobody holds the accumulated gradients it is called with, the last argument, any more while it is evaluated.
    """

    step: Callable[..., Any]
    arguments: tuple[Any, ...]
    state: list[Any]
    model: nn.Module

    @staticmethod
    def evaluated(returned: Any, state: list[Any]) -> Any:
        """mlx-lm evaluates the state, the losses and tokens so far, and the accumulated gradients."""
        loss, tokens, gradients = returned
        return state, loss, tokens, gradients


def build_lora_step(row: PublicRow, *, accumulated: bool = False, update: bool = True) -> LoraStep:
    """Builds the step of a row; takes no memory to speak of, whatever the model's size.

    Args:
        accumulated: it adds to the gradients of micro-batches before.
        update: it is the last micro-batch of an update.

    Raises:
        InputError: the architecture is not in the table, no such optimizer, or mlx-lm is not installed.
    """
    model = build_model(row)
    optimizer = OPTIMIZERS[read_optimizer(row.optimizer)](learning_rate=1e-5)
    optimizer.init(model.trainable_parameters())
    loss_and_gradients = nn.value_and_grad(model, partial(_loss, entropy=_entropy(row)))
    state = [model.state, optimizer.state, mx.random.state]

    def step(batch: mx.array, lengths: mx.array, accumulated: Any) -> Any:
        (loss, tokens), gradients = loss_and_gradients(model, batch, lengths)
        if accumulated is not None:
            gradients = tree_map(lambda one, other: one + other, gradients, accumulated)
        if not update:
            return loss, tokens, gradients
        if row.accumulate > 1:
            gradients = tree_map(lambda gradient: gradient / row.accumulate, gradients)
        optimizer.update(model, gradients)
        return loss, tokens, None

    whole = mx.compile(step, inputs=state, outputs=state) if row.compiled else step
    before = tree_map(mx.zeros_like, model.trainable_parameters()) if accumulated else None
    return LoraStep(whole, (*_batch(row.batch, row.tokens), before), state, model)


def _batch(batch: int, tokens: int) -> tuple[mx.array, mx.array]:
    """Sequences, and the positions between which their tokens count."""
    return mx.zeros((batch, tokens + 1), mx.int32), mx.zeros((batch, 2), mx.int32)


def build_model(row: PublicRow) -> nn.Module:
    """The model with what is trained in it, in bfloat16, quantized where the row is; nothing of it evaluated."""
    shape = _shape(row.architecture)
    try:
        renamed = importlib.import_module("mlx_lm.utils").MODEL_REMAPPING
        name = renamed.get(shape["model_type"], shape["model_type"])
        module = importlib.import_module(f"mlx_lm.models.{name}")
        tuner = importlib.import_module("mlx_lm.tuner.utils")
    except ModuleNotFoundError as error:
        raise InputError(
            f"mlx-lm has no model for {row.architecture} ({error.name}); pip install mlx-lm"
        ) from error
    model: nn.Module = module.Model(module.ModelArgs.from_dict(shape))
    model.set_dtype(mx.bfloat16)
    if row.bits is not None:
        nn.quantize(model, group_size=row.group_size, bits=row.bits)
    model.freeze()
    layers = len(model.layers) if row.layers < 0 else row.layers
    if row.method == "full":
        for layer in model.layers[-layers:]:
            layer.unfreeze()
    else:
        config: dict[str, Any] = {"rank": row.rank, "scale": 20.0, "dropout": 0.0}
        if row.keys is not None:
            config["keys"] = set(row.keys)
        tuner.linear_to_lora_layers(model, layers, config, use_dora=row.method == "dora")
    model.train()
    return model


def _shape(architecture: str) -> dict[str, Any]:
    known = json.loads(ARCHITECTURES.read_text())
    if architecture not in known:
        raise InputError(f"no shape is known for {architecture!r}; known are {', '.join(sorted(known))}")
    shape: dict[str, Any] = known[architecture]
    extra = shape.get("extra", {})
    defaults = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960}
    if "pattern" in extra:
        defaults["sliding_window_pattern"] = extra["pattern"]
    return {**defaults, **extra, **shape}


def _loss(
    model: nn.Module, batch: mx.array, lengths: mx.array, *, entropy: Callable[..., mx.array]
) -> tuple[mx.array, mx.array]:
    """mlx-lm's loss: the mean cross-entropy over the tokens between two positions."""
    logits = model(batch[:, :-1])
    targets = batch[:, 1:]
    steps = mx.arange(1, targets.shape[1] + 1)
    mask = mx.logical_and(steps >= lengths[:, 0:1], steps <= lengths[:, 1:])
    losses = entropy(logits, targets) * mask
    tokens = mask.sum()
    return losses.astype(mx.float32).sum() / tokens, tokens


def _entropy(row: PublicRow) -> Callable[..., mx.array]:
    """The cross entropy of a row's release, or the one that becomes a primitive where it is said to be fused."""
    fused = bool(row.fused_cross_entropy)
    return cross_entropy if row.mlx < ENTROPY_SHIFTED and not fused else nn.losses.cross_entropy


def cross_entropy(logits: mx.array, targets: mx.array) -> mx.array:
    """As ``mlx.nn`` had it until 0.32.0, which is what the reports so far were run with.

    From then on it subtracts the largest logit first, which makes another tensor of logits; since 0.32.4 it is one
    primitive on a GPU.
    """
    score = mx.take_along_axis(logits, targets[..., None], axis=-1).squeeze(-1)
    return mx.logsumexp(logits, axis=-1) - score


# -- prediction ---------------------------------------------------------------------------------------------


def predict(row: Published, *, steady_steps: int = 1) -> TraceResult:
    """What a row's run holds on its machine, from graphs captured here: that of the evaluation that holds most.

    Raises:
        InputError: the row cannot be built, as it says.
    """
    return max(_results(row, steady_steps), key=lambda result: result.peak_bytes)


def predicted_bytes(row: Published, result: TraceResult) -> int:
    """What stands beside the reported peak: the arguments of an operation do not count where they did not."""
    if not row.above_inputs:
        return result.peak_bytes
    assert isinstance(row, OpRow)
    return result.peak_bytes - sum(argument.nbytes for argument in row.build()[1])


def _results(row: Published, steady_steps: int) -> Iterator[TraceResult]:
    """One for every different evaluation of a run."""
    for captured, compiled in _captures(row):
        yield simulate(
            captured,
            compiled=compiled,
            device=row.device,
            rewrite=(lambda graph: apply_policy(graph, row.policy)) if isinstance(row, PublicRow) else None,
            steady_steps=steady_steps,
        )


def _captures(row: Published) -> Iterator[tuple[Capture, bool]]:
    """Every different evaluation of a run, and whether it is compiled."""
    if isinstance(row, OpRow):
        operation, arguments = row.build()
        yield _captured(lambda *given: operation(*given), arguments, []), False
    elif isinstance(row, ScratchRow):
        calls = [training_call(row.config, row.batch, row.accumulate)]
        if row.evaluation_batch is not None:
            calls.append(evaluation_call(row.config, row.evaluation_batch, row.accumulate))
        for call in calls:
            yield _captured(call.step, call.arguments, [call.model, call.held], call.evaluated), False
    elif isinstance(row, PublicRow):
        for accumulated, update in _micro_batches(row.accumulate):
            lora = build_lora_step(row, accumulated=accumulated, update=update)
            yield (
                _captured(lora.step, lora.arguments, lora.state, lora.evaluated, consumed=(2,)),
                row.compiled,
            )
        if row.evaluation_batch is not None:
            yield _lora_evaluation(row), False


def _micro_batches(count: int) -> list[tuple[bool, bool]]:
    """Whether one adds to those before, and whether it updates: the first, one between, the last."""
    if count == 1:
        return [(False, True)]
    return [(False, False), *([(True, False)] if count > 2 else []), (True, True)]


def _lora_evaluation(row: PublicRow) -> Capture:
    """The loss of a batch without gradient, while the optimizer's state is there."""
    lora = build_lora_step(row)
    assert row.evaluation_batch is not None
    arguments = _batch(row.evaluation_batch, row.tokens)
    lora.model.eval()
    loss = partial(_loss, entropy=_entropy(row))

    def losses(batch: mx.array, lengths: mx.array) -> Any:
        return loss(lora.model, batch, lengths)

    return _captured(losses, arguments, lora.state, lambda returned, state: returned)


def _captured(
    step: Callable[..., Any],
    arguments: tuple[Any, ...],
    state: list[Any],
    evaluate: Evaluate = returned_then_state,
    consumed: tuple[int, ...] = (),
) -> Capture:
    return capture(
        step,
        arguments,
        state=state,
        evaluate=evaluate,
        consumed=consumed,
        marked=LOWERED | {"block"},
    )


def main(arguments: list[str]) -> None:
    """Prints predicted beside reported, for the rows named or for all whose sequence length is stated."""
    files = [Path(argument) for argument in arguments if argument.endswith(".jsonl")]
    ids = [argument for argument in arguments if not argument.endswith(".jsonl")]
    errors, assumed = [], []
    for published in read_public_rows(*files[:1]) if files else all_public_rows():
        row = read_published(published) if not ids or published["id"] in ids else None
        if row is None:
            continue
        predicted = predicted_bytes(row, predict(row))
        error = predicted / row.peak_bytes - 1
        if not row.at_most:
            errors.append(error)
        assumed += [f"{row.id}: {row.assumed}"] if row.assumed else []
        print(
            f"{row.id:6} {row.name:41} {row.batch} x {row.tokens:5} {row.how:6} "
            f"reported {row.peak_bytes / 1e9:6.3f} GB  predicted {predicted / 1e9:6.3f}  {error:+.2%}"
            f"{' at most' if row.at_most else ''}",
            flush=True,
        )
    if errors:
        sizes = [abs(error) for error in errors]
        print(f"median {median(sizes):.2%}, worst {max(sizes):.2%}, furthest under {min(errors):+.2%}")
    for line in assumed:
        print(f"assumed, {line}")


if __name__ == "__main__":
    main(sys.argv[1:])
