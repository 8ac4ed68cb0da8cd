"""Option types the commands share: each reads what a person writes, or says what would work."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from oomguard.config import OPTIMIZERS, CheckpointPolicy, ModelConfig
from oomguard.errors import InputError

if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType  # not generic before click 8.4

AUTO: Literal["auto"] = "auto"

MAX_COUNT = 2**31 - 1  # MLX holds a dimension in 32 bits

DTYPE_NAMES = {
    "float32": "float32",
    "fp32": "float32",
    "f32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "f16": "float16",
}

Command = TypeVar("Command", bound=Callable[..., Any])


def near_names(value: str, known: Iterable[str]) -> str:
    """``did you mean adam or adamw?``, or all the known names when none is near."""
    import difflib

    names = list(known)
    near = difflib.get_close_matches(value.lower(), names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"choose {', '.join(names)}"


class Reader(_ParamType):
    """A value read by ``read``; its InputError is told with the option's name in front."""

    def __init__(self, name: str, read: Callable[[str], Any], metavar: str | None = None) -> None:
        self.name = name
        self._read = read
        self._metavar = metavar

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str | None:
        return self._metavar or self.name.upper()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._read(value)
        except InputError as error:
            option = param.opts[0] if param is not None and param.opts else self.name
            raise InputError(f"{option}: {error}") from error


def read_count(text: str) -> int:
    """A whole number of at least 1."""
    text = text.strip()
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        raise InputError(f"{text!r} is not a whole number; write one such as 8")
    count = int(text)
    if count < 1:
        raise InputError(f"{count} is too few; the least is 1")
    if count > MAX_COUNT:
        raise InputError(f"{count} is more than an MLX array can have in one dimension, {MAX_COUNT}")
    return count


def read_batch_or_auto(text: str) -> int | Literal["auto"]:
    """``auto`` or a number of sequences."""
    if text.strip().lower() == AUTO:
        return AUTO
    if text.strip().removeprefix("-").isdigit():
        return read_count(text)
    raise InputError(f"{text!r} is not a batch size; write a number of sequences such as 8, or auto")


def read_policy_or_auto(text: str) -> CheckpointPolicy | Literal["auto"]:
    """``auto`` or a checkpoint policy."""
    if text.strip().lower() == AUTO:
        return AUTO
    try:
        return CheckpointPolicy.parse(text)
    except InputError as error:
        raise InputError(f"{error}; or auto") from error


def read_optimizer(text: str) -> str:
    """One of ``config.OPTIMIZERS``."""
    if text.lower() in OPTIMIZERS:
        return text.lower()
    raise InputError(f"unknown optimizer {text!r}; {near_names(text, OPTIMIZERS)}")


def read_dtype(text: str) -> str:
    """A dtype by its full or its short name, as its full name."""
    if text.lower() in DTYPE_NAMES:
        return DTYPE_NAMES[text.lower()]
    raise InputError(f"unknown dtype {text!r}; choose fp32, bf16 or fp16")


def _read_memory(text: str) -> int:
    from oomguard.budget import parse_memory

    return parse_memory(text)


def _read_headroom(text: str) -> Any:
    from oomguard.budget import parse_headroom

    return parse_headroom(text)


def _read_preset(text: str) -> ModelConfig:
    from oomguard.presets import preset

    return preset(text)


COUNT = Reader("count", read_count, "N")
BATCH_OR_AUTO = Reader("batch", read_batch_or_auto, "N|auto")
POLICY = Reader("policy", CheckpointPolicy.parse)
POLICY_OR_AUTO = Reader("policy", read_policy_or_auto, "POLICY|auto")
OPTIMIZER = Reader("optimizer", read_optimizer, "NAME")
DTYPE = Reader("dtype", read_dtype)
MEMORY = Reader("memory", _read_memory, "SIZE")
HEADROOM = Reader("headroom", _read_headroom, "SIZE|PERCENT")
PRESET = Reader("preset", _read_preset, "NAME")


def model_options(command: Command) -> Command:
    """``--preset NAME`` and ``--config FILE``; pass both to ``chosen_model``."""
    command = click.option(
        "--config",
        type=click.Path(path_type=Path),
        help="A shape of your own: a JSON file with n_layers, d_model, n_heads, d_mlp, context.",
    )(command)
    return click.option("--preset", type=PRESET, help="A shape that ships: tiny, small, huge, mega, ...")(
        command
    )


def chosen_model(preset: ModelConfig | None, config: Path | None) -> ModelConfig:
    """The model that ``--preset`` or ``--config`` names.

    Raises:
        InputError: neither or both were given, or the config cannot be read.
    """
    if preset is not None and config is not None:
        raise InputError(f"--preset {preset.name} and --config {config} both name a model; give one of them")
    if preset is not None:
        return preset
    if config is not None:
        return ModelConfig.from_file(config)
    from oomguard.presets import presets

    raise InputError(f"which model? Give --preset ({', '.join(presets())}) or --config FILE")


def step_options(command: Command) -> Command:
    """``--ctx --optimizer --dtype --clip --compile``: what a step is, besides its batch and policy."""
    options = (
        click.option("--ctx", type=COUNT, help="Tokens a sequence; the model's context if not given."),
        click.option(
            "--optimizer",
            type=OPTIMIZER,
            default="adamw",
            show_default=True,
            help="sgd, adam, adamw, lion, adafactor or muon.",
        ),
        click.option("--dtype", type=DTYPE, default="fp32", show_default=True, help="fp32, bf16 or fp16."),
        click.option(
            "--clip/--no-clip", default=False, show_default=True, help="Clip gradients by their global norm."
        ),
        click.option(
            "--compile/--no-compile",
            "compiled",
            default=True,
            show_default=True,
            help="The step as one mx.compile function.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def budget_options(command: Command) -> Command:
    """``--memory --device --headroom``: what the run may use, and where."""
    options = (
        click.option("--memory", type=MEMORY, help="Use no more than this: 16GB, 16GiB, 900MiB."),
        click.option(
            "--device",
            metavar="NAME",
            help="Plan for metal, cpu or cuda here, or for another machine: m5-pro-48gb, cpu-64gb, ...",
        ),
        click.option(
            "--headroom",
            type=HEADROOM,
            help="Leave this much of the budget unused: 10% or 1GiB. "
            "Not given: 5% of what the machine has, 4 GiB at most, nothing of --memory.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command
