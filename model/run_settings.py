"""The settings of a training run: what a saved run carries and a resumed one keeps. No MLX in here."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from oomguard.config.base import Frozen, MemoryBytes, Positive
from oomguard.config.model import ModelConfig
from oomguard.config.step import StepConfig
from oomguard.errors import InputError
from oomguard.units import format_bytes

BYTE_VALUES = 256

NotNegative = Annotated[int, Field(ge=0)]


class RunSettings(Frozen):
    """A training run: model, step, data and schedule.

    ``steps`` are updates from the very first one; a run resumed at step 20 of 50 makes 30 more. ``val_every``
    0 validates at the end only. ``memory_bytes`` is what the user allowed, None for what the machine has.
    """

    model: ModelConfig
    step: StepConfig
    corpus: str
    steps: Positive
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    warmup: NotNegative
    max_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.01
    seed: NotNegative = 0
    val_every: NotNegative = 0
    val_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.05
    val_batches: Positive = 4
    memory_bytes: MemoryBytes | None = None


def check_trainable(settings: RunSettings) -> None:
    """Raises InputError for a run that cannot learn from bytes, or is known to become NaN."""
    model, step = settings.model, settings.step
    if model.vocab_size < BYTE_VALUES:
        raise InputError(
            f"{model.name} has a vocabulary of {model.vocab_size}, and text has {BYTE_VALUES} byte values; "
            f"set vocab_size to {BYTE_VALUES} or more"
        )
    if (step.optimizer, step.dtype) == ("muon", "float16"):
        raise InputError(
            "muon divides by the norm of a gradient, which is 0 for small ones in float16; use --dtype bf16"
        )
    if settings.warmup >= settings.steps:
        raise InputError(
            f"a warm-up of {settings.warmup} steps leaves nothing of a run of {settings.steps}; "
            f"--warmup {settings.steps // 10} would"
        )


def changes(before: RunSettings, after: RunSettings) -> list[str]:
    """What differs, in the words of the command line: ``grad-checkpoint every -> none``."""
    shown = []
    for name, old, new in [*_pairs(before.step, after.step), *_pairs(before, after)]:
        if old != new and name not in ("model", "step"):
            shown.append(f"{WORDS.get(name, name.replace('_', '-'))} {_say(name, old)} -> {_say(name, new)}")
    return shown


def _say(name: str, value: object) -> str:
    if name == "memory_bytes":
        return format_bytes(value) if isinstance(value, int) else "not limited"
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


WORDS = {
    "checkpoint": "grad-checkpoint",
    "seq_len": "ctx",
    "learning_rate": "lr",
    "clip_norm": "clip",
    "compiled": "compile",
    "max_norm": "clip-norm",
    "memory_bytes": "memory",
}


def _pairs(before: Frozen, after: Frozen) -> list[tuple[str, object, object]]:
    return [(name, getattr(before, name), getattr(after, name)) for name in type(before).model_fields]
