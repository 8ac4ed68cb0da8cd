"""Published peaks of LoRA runs on Macs beside the peaks the trace predicts for them. Nothing is fitted to them.

    python -m oomguard.calibration.public [FILE.jsonl] [ID ...]

A row of ``public_peaks.jsonl`` names a model, a quantization, the LoRA layers and the batch; the step is built
from the model's shape alone (``data/architectures.json``), with mlx-lm's model, LoRA layers, loss and compiled
step, its parameters never evaluated. What a report leaves open is filled with mlx-lm's default of its date.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from oomguard.config import EVERY_BLOCK, NO_CHECKPOINT, CheckpointPolicy, Optimizer
from oomguard.errors import InputError
from oomguard.settings import read_optimizer
from oomguard.trace.capture import capture
from oomguard.trace.engine import simulate
from oomguard.trace.lower import LOWERED, Version, parse_version
from oomguard.trace.metal import Chip, device
from oomguard.trace.remat import apply_policy
from oomguard.trace.result import TraceResult

ROWS = Path(__file__).parent / "public_peaks.jsonl"
ARCHITECTURES = Path(__file__).parent.parent / "data" / "architectures.json"

CHIP_SIZES = {"Pro": "s", "Max": "s", "Ultra": "d", "": "g"}
GENERATIONS = {"M1": 13, "M2": 14, "M3": 15, "M4": 16, "M5": 17}
DEFAULT_RANK = 8
DEFAULT_MLX: Version = (0, 31, 2)
ENTROPY_SHIFTED: Version = (0, 32, 1)

RELEASES: dict[str, Version] = {
    "2024-11": (0, 21, 0),
    "2025-01": (0, 22, 0),
    "2025-03": (0, 23, 2),
    "2025-04": (0, 24, 2),
    "2025-05": (0, 25, 1),
    "2025-06": (0, 26, 0),
    "2025-07": (0, 26, 2),
    "2025-08": (0, 27, 1),
    "2025-09": (0, 29, 0),
    "2025-10": (0, 29, 2),
    "2025-11": (0, 29, 4),
    "2025-12": (0, 30, 0),
    "2026-01": (0, 30, 3),
    "2026-02": (0, 30, 5),
    "2026-03": (0, 31, 1),
    "2026-04": (0, 31, 2),
    "2026-05": (0, 32, 0),
    "2026-08": (0, 32, 1),
    "2026-09": (0, 32, 2),
}
"""What was installed from the beginning of a month on, from the dates on which MLX's version was raised."""

ALL_LINEAR_SINCE = "2025-09-30"
"""Since then mlx-lm adapts every linear layer where no keys are given; before, queries and values."""
QUERY_VALUE = ("self_attn.q_proj", "self_attn.v_proj")


@dataclass(frozen=True)
class PublicRow:
    """One published run, with every blank filled in.

    Attributes:
        bits, group_size: of the quantized weights; bits is None where they are not quantized.
        layers: how many of the last blocks are trained; -1 for all.
        method: ``lora``, ``dora`` or ``full``.
        keys: of the adapted linear layers; None for every one.
        tokens: of a sequence, as the model sees it.
        recompute: every block is recomputed.
    """

    id: str
    architecture: str
    bits: int | None
    group_size: int
    layers: int
    method: str
    rank: int
    keys: tuple[str, ...] | None
    batch: int
    tokens: int
    recompute: bool
    optimizer: str
    chip: Chip
    mlx: Version
    peak_bytes: int

    @property
    def policy(self) -> CheckpointPolicy:
        return EVERY_BLOCK if self.recompute else NO_CHECKPOINT


def read_public_rows(path: Path = ROWS) -> list[dict[str, Any]]:
    """The rows as published."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def understood(row: dict[str, Any]) -> PublicRow | None:
    """A row with mlx-lm's defaults where it is silent; None where the sequence length is not stated exactly.

    Raises:
        InputError: something else it says cannot be read.
    """
    tokens = _stated_tokens(row)
    if tokens is None:
        return None
    quantization = str(row.get("quant", row["model"]))
    bits = re.search(r"(\d)-?bit", quantization)
    group = re.search(r"\bg(?:roup )?(\d+)\b", quantization)
    version = str(row.get("version", ""))
    peak = row.get("peak_bytes") or row["peak_gb"] * 10**9
    return PublicRow(
        id=row["id"],
        architecture=row["arch"],
        bits=int(bits[1]) if bits else None,
        group_size=int(group[1]) if group else 64,
        layers=-1 if str(row["layers"]) in ("-1", "all") else _first_number(row["layers"]),
        method=_method(str(row.get("ft", "lora"))),
        rank=row.get("rank", DEFAULT_RANK),
        keys=_keys(str(row.get("keys", "")), version),
        batch=_first_number(row["batch"]),
        tokens=tokens,
        recompute=bool(row["ckpt"]),
        optimizer=str(row.get("optimizer", "adam")),
        chip=_chip(str(row.get("machine", ""))),
        mlx=_version(version),
        peak_bytes=int(peak),
    )


def _stated_tokens(row: dict[str, Any]) -> int | None:
    """The tokens the model sees of a sequence, where the report says so.

    It gives them, or the length that its batches are cut at and reach. A batch is padded to its longest sequence;
    the model sees one token less, because inputs and targets are the sequence without its last and without its
    first token.
    """
    actual, most = row.get("actual_T"), row.get("max_seq")
    if isinstance(actual, int):
        return actual
    if most is None or not re.match(r"$|<=|truncated at", str(actual or "")):
        return None
    return int(most) - 1


def _method(text: str) -> str:
    found = re.match(r"lora|dora|full", text.lower())
    if found is None:
        raise InputError(f"{text!r} is not a way to fine-tune; write lora, dora or full")
    return found[0]


def _first_number(value: Any) -> int:
    found = re.search(r"\d+", str(value))
    if found is None:
        raise InputError(f"{value!r} names no number")
    return int(found[0])


def _keys(text: str, version: str) -> tuple[str, ...] | None:
    """LoRA keys: those named by letter, or the default of the report's date, where None is every linear layer."""
    letters = re.match(r"^([qkvo](?:,[qkvo])*)\b", text)
    if letters:
        return tuple(f"self_attn.{letter}_proj" for letter in letters[1].split(","))
    date = _date(version)
    before = not text and date is not None and date < ALL_LINEAR_SINCE
    return QUERY_VALUE if before else None


def _date(version: str) -> str | None:
    """The date in a report's words on its release: ``2025-06``, ``2026-04-01``."""
    found = re.search(r"\b20\d\d-\d\d(?:-\d\d)?\b", version)
    return found[0] if found else None


def _chip(machine: str) -> Chip:
    found = re.match(r"(M\d)\s*(Pro|Max|Ultra)?", machine)
    if not found:
        return Chip(16, "s")
    return Chip(GENERATIONS[found[1]], CHIP_SIZES[found[2] or ""])


def _version(text: str) -> Version:
    """The MLX release a report names, or that of its date; without either, that of early 2026."""
    found = re.search(r"mlx (\d+\.\d+\.\d+)", text)
    if found:
        return parse_version(found[1])
    date = _date(text)
    known = [release for month, release in RELEASES.items() if date is not None and month <= date]
    return known[-1] if known else DEFAULT_MLX


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
    """mlx-lm's training step for a row: call ``step(*arguments)``, then ``mx.eval`` what ``evaluated`` gives."""

    step: Callable[..., Any]
    arguments: tuple[Any, ...]
    state: list[Any]
    model: nn.Module

    @staticmethod
    def evaluated(returned: Any, state: list[Any]) -> Any:
        """mlx-lm evaluates the state, the losses and tokens so far, and the accumulated gradients."""
        loss, tokens, gradients = returned
        return state, loss, tokens, gradients


def build_lora_step(row: PublicRow) -> LoraStep:
    """Builds the step of a row; takes no memory to speak of, whatever the model's size.

    Raises:
        InputError: the architecture is not in the table, no such optimizer, or mlx-lm is not installed.
    """
    model = build_model(row)
    optimizer = OPTIMIZERS[read_optimizer(row.optimizer)](learning_rate=1e-5)
    optimizer.init(model.trainable_parameters())
    loss_and_gradients = nn.value_and_grad(model, partial(_loss, release=row.mlx))
    state = [model.state, optimizer.state, mx.random.state]

    def step(batch: mx.array, lengths: mx.array, accumulated: Any) -> Any:
        (loss, tokens), gradients = loss_and_gradients(model, batch, lengths)
        optimizer.update(model, gradients)
        return loss, tokens, accumulated

    batch = mx.zeros((row.batch, row.tokens + 1), mx.int32)
    lengths = mx.zeros((row.batch, 2), mx.int32)
    compiled = mx.compile(step, inputs=state, outputs=state)
    return LoraStep(compiled, (batch, lengths, None), state, model)


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
    model: nn.Module, batch: mx.array, lengths: mx.array, *, release: Version
) -> tuple[mx.array, mx.array]:
    """mlx-lm's loss: the mean cross-entropy over the tokens between two positions."""
    logits = model(batch[:, :-1])
    targets = batch[:, 1:]
    steps = mx.arange(1, targets.shape[1] + 1)
    mask = mx.logical_and(steps >= lengths[:, 0:1], steps <= lengths[:, 1:])
    entropy = cross_entropy if release < ENTROPY_SHIFTED else nn.losses.cross_entropy
    losses = entropy(logits, targets) * mask
    tokens = mask.sum()
    return losses.astype(mx.float32).sum() / tokens, tokens


def cross_entropy(logits: mx.array, targets: mx.array) -> mx.array:
    """As ``mlx.nn`` had it until 0.32.0, which is what the reports so far were run with.

    From then on it subtracts the largest logit first, which makes another tensor of logits; since 0.32.4 it is one
    primitive on a GPU.
    """
    score = mx.take_along_axis(logits, targets[..., None], axis=-1).squeeze(-1)
    return mx.logsumexp(logits, axis=-1) - score


# -- prediction ---------------------------------------------------------------------------------------------


def predict(row: PublicRow, *, steady_steps: int = 1) -> TraceResult:
    """The peak of a row's step on its machine, from a graph captured here."""
    lora = build_lora_step(row)
    captured = capture(
        lora.step,
        lora.arguments,
        state=lora.state,
        evaluate=lora.evaluated,
        marked=LOWERED | {"block"},
    )
    return simulate(
        captured,
        compiled=True,
        device=device(row.chip, row.mlx),
        rewrite=lambda graph: apply_policy(graph, row.policy),
        steady_steps=steady_steps,
    )


def main(arguments: list[str]) -> None:
    """Prints predicted beside reported, for the rows named or for all whose sequence length is stated."""
    files = [Path(argument) for argument in arguments if argument.endswith(".jsonl")]
    ids = [argument for argument in arguments if not argument.endswith(".jsonl")]
    errors = []
    for published in read_public_rows(*files[:1]):
        row = understood(published) if not ids or published["id"] in ids else None
        if row is None:
            continue
        result = predict(row)
        errors.append(result.peak_bytes / row.peak_bytes - 1)
        print(
            f"{row.id:4} {published['model']:34} {row.batch} x {row.tokens:5} {row.policy!s:6} "
            f"reported {row.peak_bytes / 1e9:6.3f} GB  predicted {result.peak_bytes / 1e9:6.3f}  {errors[-1]:+.1%}",
            flush=True,
        )
    if errors:
        sizes = [abs(error) for error in errors]
        print(f"median {median(sizes):.1%}, worst {max(sizes):.1%}, furthest under {min(errors):+.1%}")


if __name__ == "__main__":
    main(sys.argv[1:])
