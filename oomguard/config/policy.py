"""Checkpoint policies: which regions of which blocks are recomputed in the backward instead of saved."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from oomguard.config.base import Frozen, Positive, first_problem
from oomguard.errors import InputError

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
