"""Option types the commands share: each reads what a person writes, or says what would work."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from oomguard.config.model import ModelConfig
from oomguard.config.policy import CheckpointPolicy, say_policies
from oomguard.config.words import (
    AUTO,
    MAX_COUNT,
    read_batch,
    read_count,
    read_dtype,
    read_engine,
    read_number,
    read_optimizer,
    read_policy,
)
from oomguard.errors import InputError

if TYPE_CHECKING:
    from oomguard.estimate.coefficients import Coefficients

    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType  # not generic before click 8.4

Command = TypeVar("Command", bound=Callable[..., Any])


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


def _read_memory(text: str) -> int:
    from oomguard.machine.budget import parse_memory

    return parse_memory(text)


def _read_memory_or_auto(text: str) -> int | str:
    return AUTO if text.strip().lower() == AUTO else _read_memory(text)


def _read_headroom(text: str) -> Any:
    from oomguard.machine.budget import parse_headroom

    return parse_headroom(text)


def _read_preset(text: str) -> ModelConfig:
    from oomguard.config.presets import preset

    return preset(text)


def whole(least: int, most: int = MAX_COUNT) -> Reader:
    """A whole number between two others, both allowed."""
    return Reader("whole number", lambda text: read_count(text, least, most), "N")


def number(least: float, most: float = math.inf) -> Reader:
    """A finite number between two others, both allowed."""
    return Reader("number", lambda text: read_number(text, least, most), "X")


POLICY_HELP = f"{say_policies()}."

COUNT = Reader("count", read_count, "N")
BATCH_OR_AUTO = Reader("batch", read_batch, "N|auto")
POLICY = Reader("policy", CheckpointPolicy.parse)
POLICY_OR_AUTO = Reader("policy", read_policy, "POLICY|auto")
OPTIMIZER = Reader("optimizer", read_optimizer, "NAME")
DTYPE = Reader("dtype", read_dtype)
ENGINE = Reader("engine", read_engine, "NAME")
MEMORY = Reader("memory", _read_memory, "SIZE")
MEMORY_OR_AUTO = Reader("memory", _read_memory_or_auto, "SIZE|auto")
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
    from oomguard.config.presets import presets

    raise InputError(f"which model? Give --preset ({', '.join(presets())}) or --config FILE")


def step_options(command: Command) -> Command:
    """``--ctx --optimizer --dtype --clip --compile``: what a step is, besides its batch and policy."""
    options = (
        click.option(
            "--ctx", "ctx_tokens", type=COUNT, help="Tokens a sequence; the model's context if not given."
        ),
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


def device_option(command: Command) -> Command:
    """``--device``: this machine, or another one by name."""
    return click.option(
        "--device",
        metavar="NAME",
        help="metal, cpu or cuda here, or another machine: m5-pro-48gb, metal-36gb, cpu-64gb, ...",
    )(command)


def budget_options(command: Command) -> Command:
    """``--memory --device --headroom``: what the run may use, and where."""
    command = click.option(
        "--headroom",
        type=HEADROOM,
        help="Leave this much unused: 10% or 1GiB. Not given: 5% of what the machine has, 4 GiB at most, "
        "and nothing of --memory.",
    )(command)
    command = device_option(command)
    return click.option("--memory", type=MEMORY, help="Use no more than this: 16GB, 16GiB, 900MiB.")(command)


def refuse_beside(names: Collection[str], said: str) -> None:
    """An option that was given and would mean nothing is a mistake: it is refused, not passed over.

    Args:
        names: the parameters that mean nothing here.
        said: what of the command line leaves them nothing to say, ``--case mlp says what to run``.

    Raises:
        InputError: one of them was given.
    """
    ctx = click.get_current_context()
    for option in ctx.command.params:
        name = str(option.name)
        if name in names and ctx.get_parameter_source(name) is not ParameterSource.DEFAULT:
            given = "/".join([option.opts[0], *option.secondary_opts])
            raise InputError(f"{said}; {given} cannot stand beside it")


def every_parameter_but(*names: str) -> frozenset[str]:
    """The parameters of the command that runs, without the named ones."""
    return frozenset(str(option.name) for option in click.get_current_context().command.params) - set(names)


def model_option_text(preset: ModelConfig | None, config: Path | None) -> str:
    """How the command line named the model, to be said again in a command to run."""
    return f"--preset {preset.name}" if preset is not None else f"--config {shlex.quote(str(config))}"


def warn_of_calibration(calibration: Coefficients) -> None:
    """On stderr, where stdout is for a program: that this machine's own calibration cannot be used."""
    if calibration.passed_over:
        click.echo(f"warning: {calibration.passed_over}", err=True)


def wants_colour() -> bool:
    """Colour only on a terminal that shows it, and not where NO_COLOR or the caller says no."""
    ctx = click.get_current_context(silent=True)
    if ctx is not None and ctx.color is not None:
        return ctx.color
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
