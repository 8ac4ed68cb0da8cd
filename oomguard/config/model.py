"""The shape of the preset GPT, as a value: two equal shapes are the same model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError, model_validator

from oomguard.config.base import Frozen, Positive, first_problem
from oomguard.errors import InputError
from oomguard.files.reading import parse_json, read_text


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


def divisors(n: int) -> Iterator[int]:
    """The whole numbers that divide ``n``, ascending."""
    low = [k for k in range(1, math.isqrt(n) + 1) if n % k == 0]
    yield from low
    yield from (n // k for k in reversed(low) if k * k != n)
