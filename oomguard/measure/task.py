"""What one child process is asked to run, and how."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import model_validator

from oomguard.config.base import Frozen
from oomguard.config.model import ModelConfig
from oomguard.config.step import StepConfig
from oomguard.rows import row_key


class Task(Frozen):
    """One thing to measure: a GPT step (``model`` and ``step``), a named ``case``, or a user's ``function``.

    ``function`` is ``FILE.py:NAME``; what calling ``NAME()`` gives is read by ``oomguard.step.opening``.
    """

    model: ModelConfig | None = None
    step: StepConfig | None = None
    case: str | None = None
    function: str | None = None

    @model_validator(mode="after")
    def _names_one_thing(self) -> Task:
        if (self.model is None) != (self.step is None):
            raise ValueError("a model needs a step and a step needs a model")
        if [self.model is None, self.case is None, self.function is None].count(False) != 1:
            raise ValueError("a task is a model and a step, or a case, or a function")
        return self

    @property
    def case_name(self) -> str | None:
        """What a row calls it when it is not a GPT step."""
        return self.case or self.function

    @property
    def key(self) -> str:
        """The key of the row that this task makes."""
        return row_key(self.case_name or "", self.model, self.step)

    @property
    def label(self) -> str:
        """A few words for a progress line."""
        if self.model is None or self.step is None:
            return self.case_name or ""
        return describe(self.model, self.step)


def describe(model: ModelConfig, step: StepConfig) -> str:
    """``huge 8 x 256, every, bfloat16``: the shape, the batch and every setting that is not the default."""
    words = [f"{model.name} {step.batch} x {step.seq_len}"]
    usual = StepConfig(batch=step.batch, seq_len=step.seq_len)
    if step.accumulate != usual.accumulate:
        words.append(f"accumulate {step.accumulate}" + ("" if step.evaluate_micro_steps else " in one graph"))
    words += [str(step.checkpoint)] if step.checkpoint != usual.checkpoint else []
    words += [step.dtype] if step.dtype != usual.dtype else []
    words += [step.optimizer] if step.optimizer != usual.optimizer else []
    words += ["clipped"] if step.clip_norm else []
    words += ["eager"] if not step.compiled else []
    return ", ".join(words)


@dataclass(frozen=True)
class Settings:
    """How a task is run.

    Args:
        steps: measured steps of each column, after step 1.
        sequenced: also measure with the memory limit at 0.
        timeout_seconds: a child that takes longer is ended.
        max_memory_bytes: a child that holds more is ended; None: what the machine has free when it starts.
        force: run a step even if its estimate passes that limit.
    """

    steps: int = 3
    sequenced: bool = True
    timeout_seconds: float = 900.0
    max_memory_bytes: int | None = None
    force: bool = False
