"""``oomguard estimate``: what one configuration holds, phase by phase."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import click

from oomguard.cli.options import (
    COUNT,
    POLICY,
    POLICY_HELP,
    chosen_model,
    device_option,
    model_options,
    step_options,
    wants_colour,
    warn_of_calibration,
)
from oomguard.config.model import ModelConfig
from oomguard.config.policy import CheckpointPolicy
from oomguard.config.step import Dtype, Optimizer, StepConfig, check_seq_len


@click.command("estimate", short_help="What one configuration holds, phase by phase.")
@model_options
@click.option("--batch", type=COUNT, default="1", show_default=True, help="Sequences of a micro-batch.")
@click.option(
    "--grad-checkpoint",
    type=POLICY,
    default="none",
    show_default=True,
    help=POLICY_HELP,
)
@click.option("--accumulate", type=COUNT, default="1", show_default=True, help="Micro-batches of an update.")
@step_options
@device_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object, schema oomguard.estimate/1.")
def command(
    preset: ModelConfig | None,
    config: Path | None,
    batch: int,
    grad_checkpoint: CheckpointPolicy,
    accumulate: int,
    ctx_tokens: int | None,
    optimizer: Optimizer,
    dtype: Dtype,
    clip: bool,
    compiled: bool,
    device: str | None,
    as_json: bool,
) -> None:
    """Show what one configuration of a training step holds: its peak and band,
    the peak of each phase, and what the largest of them is made of.

    \b
    oomguard estimate --preset huge --batch 8 --grad-checkpoint every
    """
    from oomguard.estimate.coefficients import load, release_warning
    from oomguard.estimate.peak import estimate
    from oomguard.machine.device import find_device

    model = chosen_model(preset, config)
    step = StepConfig(
        batch=batch,
        seq_len=ctx_tokens or model.context,
        accumulate=accumulate,
        checkpoint=grad_checkpoint,
        dtype=dtype,
        optimizer=optimizer,
        clip_norm=clip,
        compiled=compiled,
    )
    check_seq_len(model, step)
    machine = find_device(device)
    named = machine.machine or machine.name
    coefficients = load(machine.backend, mlx_version=machine.mlx, device=named)
    found = estimate(model, step, coefficients, backend=machine.backend)
    if said := release_warning(coefficients, machine.backend, machine.mlx):
        found = replace(found, warnings=(*found.warnings, said))
    if as_json:
        from oomguard.report.as_json import estimate_json

        warn_of_calibration(coefficients)
        click.echo(json.dumps(estimate_json(model, step, found, coefficients), indent=2))
    else:
        from oomguard.report.estimate_text import estimate_text

        click.echo(estimate_text(model, step, found, coefficients, wants_colour()))
