"""Settings as a person writes them, on the command line or in Python, and what would work instead."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from oomguard.config.policy import CheckpointPolicy
from oomguard.config.step import OPTIMIZERS, Dtype, Optimizer
from oomguard.errors import InputError

AUTO: Literal["auto"] = "auto"
Auto = Literal["auto"]
Engine = Literal["estimate", "trace", "auto"]

ENGINES: tuple[Engine, ...] = ("estimate", "trace", "auto")
MAX_COUNT = 2**31 - 1  # MLX holds a dimension in 32 bits

DTYPES: dict[str, Dtype] = {
    "float32": "float32",
    "fp32": "float32",
    "f32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "f16": "float16",
}


def near_names(value: str, known: Iterable[str]) -> str:
    """``did you mean adam or adamw?``, or all the known names when none is near."""
    import difflib

    names = list(known)
    near = difflib.get_close_matches(value.lower(), names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"choose {', '.join(names)}"


def read_count(value: str | int, least: int = 1, most: int = MAX_COUNT) -> int:
    """A whole number of at least 1, or of ``least`` to ``most``.

    Raises:
        InputError: anything else.
    """
    text = str(value).strip()
    digits = text.removeprefix("-")
    if isinstance(value, bool) or not (digits.isascii() and digits.isdigit()):
        raise InputError(f"{value!r} is not a whole number; write one such as 8")
    if len(digits) > 10 or abs(int(text)) > MAX_COUNT:
        raise InputError(f"{text} does not fit into a dimension of an MLX array, {MAX_COUNT} at most")
    if int(text) < least:
        raise InputError(f"{text} is too few; the least is {least}")
    if int(text) > most:
        raise InputError(f"{text} is too many; the most is {most}")
    return int(text)


def read_number(value: str | float, least: float, most: float = math.inf) -> float:
    """A finite number of ``least`` to ``most``.

    Raises:
        InputError: anything else.
    """
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"{value!r} is not a number; write one such as {max(least, min(0.5, most)):g}")
    if number < least:
        raise InputError(f"{number:g} is too small; the least is {least:g}")
    if number > most:
        raise InputError(f"{number:g} is too large; the most is {most:g}")
    return number


def read_batch(value: str | int) -> int | Auto:
    """``auto`` or a number of sequences.

    Raises:
        InputError: anything else.
    """
    text = str(value).strip().lower()
    if text == AUTO:
        return AUTO
    if not text.removeprefix("-").isdigit():
        raise InputError(f"{value!r} is not a batch size; write a number of sequences such as 8, or auto")
    return read_count(value)


def read_policy(value: str | CheckpointPolicy) -> CheckpointPolicy | Auto:
    """``auto`` or a checkpoint policy.

    Raises:
        InputError: anything else.
    """
    if isinstance(value, CheckpointPolicy):
        return value
    if str(value).strip().lower() == AUTO:
        return AUTO
    try:
        return CheckpointPolicy.parse(value)
    except InputError as error:
        raise InputError(str(error).replace("choose none", "choose auto, none")) from error


def read_optimizer(value: str) -> Optimizer:
    """One of ``config.OPTIMIZERS``.

    Raises:
        InputError: another name; the text gives the near ones.
    """
    name = str(value).strip().lower()
    if name in OPTIMIZERS:
        return name
    raise InputError(f"unknown optimizer {value!r}; {near_names(name, OPTIMIZERS)}")


def read_dtype(value: str) -> Dtype:
    """A dtype by its full or its short name.

    Raises:
        InputError: another name.
    """
    dtype = DTYPES.get(str(value).strip().lower())
    if dtype is None:
        raise InputError(f"unknown dtype {value!r}; choose fp32, bf16 or fp16")
    return dtype


def read_engine(value: str) -> Engine:
    """``estimate``, ``trace`` or ``auto``.

    Raises:
        InputError: another name.
    """
    name = str(value).strip().lower()
    if name in ENGINES:
        return name
    raise InputError(f"unknown engine {value!r}; {near_names(name, ENGINES)}")
