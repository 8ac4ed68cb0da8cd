"""The values a plan ranges over: a model's shape, a checkpoint policy, the settings of one step.

All are frozen: two equal values are the same run, and a value can be a dictionary key. Nothing here
imports MLX or counts a byte; ``inventory.py`` does the counting, ``model/`` the building.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from oomguard.errors import InputError
from oomguard.problems import say_problem
from oomguard.reading import parse_json, read_text

Dtype = Literal["float32", "bfloat16", "float16"]
Optimizer = Literal["sgd", "adam", "adamw", "lion", "adafactor", "muon"]
PolicyName = Literal["none", "every", "stride", "blocks", "attention", "custom_function"]

POLICY_SPELLINGS = (
    "none",
    "every",
    "stride=K",
    "stride=sqrt",
    "stride=auto",
    "blocks=N",
    "attention",
    "attention,blocks=N",
    "custom_function",
)
"""Every way to write a checkpoint policy, K and N being numbers; ``sqrt`` alone is ``stride=sqrt``."""

ITEM_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
OPTIMIZERS: tuple[Optimizer, ...] = ("sgd", "adam", "adamw", "lion", "adafactor", "muon")

# MLX counts the elements of a dimension in 32 bits.
Positive = Annotated[int, Field(gt=0, lt=1 << 31)]
# A memory is counted in bytes, and those in 64 bits: 2 GiB is one more than ``Positive`` holds.
MemoryBytes = Annotated[int, Field(gt=0, lt=1 << 63)]


class Frozen(BaseModel):
    """Base of every value at the edges: immutable, no unknown field passes unseen."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelConfig(Frozen):
    """Shape of the byte-level GPT: pre-LayerNorm, GELU MLP, learned positions, tied head, all biases."""

    name: str = "custom"
    n_layers: Annotated[int, Field(gt=0, le=10_000)]
    d_model: Positive
    n_heads: Positive
    d_mlp: Positive
    context: Positive
    vocab_size: Positive = 256
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @model_validator(mode="after")
    def _heads_divide_width(self) -> ModelConfig:
        if self.d_model % self.n_heads:
            near = sorted(divisors(self.d_model), key=lambda h: abs(h - self.n_heads))[:2]
            raise ValueError(
                f"n_heads {self.n_heads} does not divide d_model {self.d_model}; "
                f"{' or '.join(str(h) for h in sorted(near))} would"
            )
        return self

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    @property
    def block_params(self) -> int:
        """Parameters of a block: four d x d projections, two MLP matrices, their biases, two layer norms."""
        d, m = self.d_model, self.d_mlp
        return 4 * (d * d + d) + (d * m + m) + (m * d + d) + 2 * (2 * d)

    @property
    def params(self) -> int:
        """All parameters; the head is the token embedding and is counted once."""
        d = self.d_model
        return self.vocab_size * d + self.context * d + self.n_layers * self.block_params + 2 * d

    @classmethod
    def from_file(cls, path: str | Path) -> ModelConfig:
        """Reads a shape from a JSON file with the field names above.

        Raises:
            InputError: the file is missing, not JSON, or not a shape; the text names the field.
        """
        path = Path(path)
        try:
            value = parse_json(read_text(path, "config"))
        except InputError:
            raise
        except ValueError as error:
            raise InputError(f"config {path} is not a JSON object: {error}") from error
        if not isinstance(value, dict):
            raise InputError(f"config {path} is not a JSON object with n_layers, d_model, ...")
        try:
            return cls.model_validate({"name": path.stem, **value})
        except ValidationError as error:
            raise InputError(f"config {path}: {first_problem(error)}") from error


@dataclass(frozen=True)
class Segment:
    """Blocks ``start`` to ``stop`` (exclusive) that are recomputed together in the backward.

    ``region`` is what of them is recomputed: the whole ``block``, or only its ``attention`` core (scores,
    mask, softmax and the product with v).
    """

    start: int
    stop: int
    region: Literal["block", "attention"] = "block"

    def __len__(self) -> int:
        return self.stop - self.start


class CheckpointPolicy(Frozen):
    """Which regions of which blocks are recomputed in the backward instead of saved.

    ``none``; ``every`` (each block by itself); ``stride`` k blocks a segment (a number, ``sqrt`` or
    ``auto``); ``blocks`` n, only the first n blocks; ``attention``, only the attention core, of all blocks
    or of the first n; ``custom_function``, the bare recompute that ``mx.compile`` can merge away again.

    The *first* blocks are the ones to recompute: the backward reaches them last, when the saved tensors of
    the later blocks are gone, so their recompute never stands beside the largest sum of saved tensors.
    """

    policy: PolicyName = "none"
    stride: Positive | Literal["sqrt", "auto"] | None = None
    blocks: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _fields_belong(self) -> CheckpointPolicy:
        if (self.stride is not None) != (self.policy == "stride"):
            raise ValueError("a stride belongs to policy stride, which needs one: stride=4, sqrt or auto")
        if self.policy == "blocks" and self.blocks is None:
            raise ValueError("policy blocks needs a number: blocks=4")
        if self.blocks is not None and self.policy not in ("blocks", "attention"):
            raise ValueError(f"blocks={self.blocks} does not combine with policy {self.policy}")
        return self

    @classmethod
    def parse(cls, text: str) -> CheckpointPolicy:
        """Reads ``none``, ``every``, ``stride=4``, ``stride=sqrt`` (or ``sqrt``), ``stride=auto``, ``blocks=8``,
        ``attention``, ``attention,blocks=8`` or ``custom_function``.

        Raises:
            InputError: anything else.
        """
        match = re.fullmatch(
            r"(?P<plain>none|every|custom_function|attention)"
            r"|stride=(?P<stride>\d{1,9}|sqrt|auto)|(?P<root>sqrt)"
            r"|(?P<core>attention,)?blocks=(?P<blocks>\d{1,9})",
            str(text).strip().lower(),
        )
        if match is None:
            raise InputError(f"{text!r} is not a checkpoint policy; choose {say_policies()}")
        try:
            if match["plain"]:
                return cls.model_validate({"policy": match["plain"]})
            if spelled := match["stride"] or match["root"]:
                stride = int(spelled) if spelled.isdigit() else spelled
                return cls.model_validate({"policy": "stride", "stride": stride})
            policy = "attention" if match["core"] else "blocks"
            return cls.model_validate({"policy": policy, "blocks": int(match["blocks"])})
        except ValidationError as error:
            raise InputError(f"checkpoint policy {text!r}: {first_problem(error)}") from error

    def __str__(self) -> str:
        if self.policy == "stride":
            return f"stride={self.stride}"
        if self.blocks is not None:
            return f"blocks={self.blocks}" if self.policy == "blocks" else f"attention,blocks={self.blocks}"
        return self.policy

    def resolved_stride(self, n_layers: int, block_to_boundary: float) -> int:
        """Blocks a segment holds under ``every`` and ``stride``; see ``segments`` for the arguments."""
        if self.policy != "stride":
            return 1
        if self.stride == "sqrt":
            return max(1, round(math.sqrt(n_layers)))
        if self.stride == "auto":
            return min(n_layers, max(1, round(math.sqrt(n_layers / block_to_boundary))))
        assert isinstance(self.stride, int)
        return min(self.stride, n_layers)

    def segments(self, n_layers: int, block_to_boundary: float = 32.0) -> tuple[Segment, ...]:
        """What is recomputed, in forward order; blocks in no segment are saved.

        Args:
            n_layers: blocks of the model.
            block_to_boundary: bytes one block saves, over the bytes of the tensor between two blocks. Only
                ``stride=auto`` reads it: (L/k) boundary + k block is least at k = sqrt(L boundary/block).
        """
        if self.policy == "none":
            return ()
        if self.policy in ("blocks", "attention"):
            region: Literal["block", "attention"] = "block" if self.policy == "blocks" else "attention"
            n = n_layers if self.blocks is None else min(self.blocks, n_layers)
            return tuple(Segment(i, i + 1, region) for i in range(n))
        k = self.resolved_stride(n_layers, block_to_boundary)
        return tuple(Segment(i, min(i + k, n_layers)) for i in range(0, n_layers, k))


def say_policies() -> str:
    """``none, every, ... or custom_function``: what a checkpoint policy can be, for a help text or a message."""
    return f"{', '.join(POLICY_SPELLINGS[:-1])} or {POLICY_SPELLINGS[-1]}"


NO_CHECKPOINT = CheckpointPolicy()
EVERY_BLOCK = CheckpointPolicy(policy="every")


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


def first_problem(error: ValidationError) -> str:
    """The first failure of a validation, as one line that names the field, the value and what would work."""
    problem = error.errors()[0]
    said = say_problem(problem)
    if problem["type"] == "extra_forbidden":
        said += _near_field(error.title, problem["loc"])
    # A union adds which of its members refused ("constrained-int"): no field of ours, and no word for a user.
    where = ".".join(
        str(part) for part in problem["loc"] if str(part).isidentifier() or isinstance(part, int)
    )
    return f"{where}: {said}" if where else said


def _near_field(model_name: str, loc: tuple[str | int, ...]) -> str:
    """``; did you mean n_heads?`` where a model of ours has a field of nearly that name."""
    import difflib

    model = next((model for model in Frozen.__subclasses__() if model.__name__ == model_name), None)
    if model is None or len(loc) != 1:
        return ""
    names = [field.alias or name for name, field in model.model_fields.items()]
    near = difflib.get_close_matches(str(loc[0]), names, n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else f"; the fields are {', '.join(names)}"


def check_seq_len(model: ModelConfig, step: StepConfig) -> None:
    """Raises InputError when a step is longer than the model's learned positions."""
    if step.seq_len > model.context:
        raise InputError(
            f"sequence length {step.seq_len} is longer than {model.name}'s context {model.context}"
        )


def divisors(n: int) -> Iterator[int]:
    """The whole numbers that divide ``n``, ascending."""
    low = [k for k in range(1, math.isqrt(n) + 1) if n % k == 0]
    yield from low
    yield from (n // k for k in reversed(low) if k * k != n)
