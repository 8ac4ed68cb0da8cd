"""The settings of one training step that decide its peak, besides the model's shape.

Frozen, so two equal values are the same run, and a value can be a dictionary key. Nothing here imports MLX or counts
a byte; ``estimate/inventory.py`` does the counting, ``model/`` the building.
"""

from __future__ import annotations

from typing import Any, Literal

from oomguard.config.base import Frozen, Positive
from oomguard.config.model import ModelConfig
from oomguard.config.policy import NO_CHECKPOINT, CheckpointPolicy
from oomguard.errors import InputError

Dtype = Literal["float32", "bfloat16", "float16"]


Optimizer = Literal["sgd", "adam", "adamw", "lion", "adafactor", "muon"]


ITEM_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


OPTIMIZERS: tuple[Optimizer, ...] = ("sgd", "adam", "adamw", "lion", "adafactor", "muon")


class StepConfig(Frozen):
    """One training step: the settings that decide its peak, besides the model's shape.

    ``accumulate`` micro-batches of ``batch`` sequences make one update. With ``evaluate_micro_steps`` each is
    evaluated before the next is built; without, one graph holds them all. ``clip_norm``: the gradients are
    clipped by their global norm, so all of them live at once. ``compiled``: the step is one ``mx.compile``
    function.
    """

    batch: Positive
    seq_len: Positive
    accumulate: Positive = 1
    evaluate_micro_steps: bool = True
    checkpoint: CheckpointPolicy = NO_CHECKPOINT
    dtype: Dtype = "float32"
    optimizer: Optimizer = "adamw"
    clip_norm: bool = False
    compiled: bool = True

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def tokens(self) -> int:
        """Tokens of one update."""
        return self.batch * self.seq_len * self.accumulate

    def but(self, **changes: Any) -> StepConfig:
        """A copy with some settings changed, validated again."""
        return type(self).model_validate({**dict(self), **changes})


def check_seq_len(model: ModelConfig, step: StepConfig) -> None:
    """Raises InputError when a step is longer than the model's learned positions."""
    if step.seq_len > model.context:
        raise InputError(
            f"sequence length {step.seq_len} is longer than {model.name}'s context {model.context}"
        )
