"""``oomguard plan``: the fastest setting of a training step that fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from oomguard.cli.options import (
    BATCH_OR_AUTO,
    COUNT,
    ENGINE,
    POLICY_HELP,
    POLICY_OR_AUTO,
    budget_options,
    chosen_model,
    model_option_text,
    model_options,
    step_options,
    wants_colour,
    warn_of_calibration,
)
from oomguard.cli.waiting import waiting
from oomguard.config.model import ModelConfig

FITS, NOTHING_FITS = 0, 1


@click.command("plan", short_help="The fastest setting of a training step that fits this machine.")
@model_options
@click.option(
    "--batch", type=BATCH_OR_AUTO, default="auto", show_default=True, help="Sequences of a micro-batch."
)
@click.option(
    "--grad-checkpoint",
    type=POLICY_OR_AUTO,
    default="auto",
    show_default=True,
    help=POLICY_HELP,
)
@click.option("--accumulate", type=COUNT, help="Micro-batches of an update.")
@click.option(
    "--target-batch",
    type=COUNT,
    help="Sequences of an update: the largest micro-batch that divides it is accumulated up to it.",
)
@step_options
@budget_options
@click.option(
    "--engine",
    type=ENGINE,
    default="estimate",
    show_default=True,
    help="estimate; trace simulates the choice and its neighbours (imports MLX); auto where it can.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, schema oomguard.plan/1.")
def command(
    preset: ModelConfig | None,
    config: Path | None,
    ctx_tokens: int | None,
    clip: bool,
    as_json: bool,
    **settings: Any,
) -> int:
    """Find the fastest setting of a training step that fits: batch, accumulation
    and gradient checkpointing within the memory this process may use. The rule:
    the most tokens/s of what fits; of equals, the least recompute. A batch grows
    no further once no larger one could add more than 0.75%.

    \b
    oomguard plan --preset behemoth
    oomguard plan --preset huge --memory 2GB --grad-checkpoint every
    oomguard plan --preset mega --device m5-pro-48gb --target-batch 64

    Exit status: 0 it fits, 1 nothing fits, 2 wrong usage.
    """
    from oomguard.plan.planner import plan

    model = chosen_model(preset, config)
    simulates = settings["engine"] != "estimate"
    with waiting("simulating steps" if simulates else "planning", at_once=simulates):
        found = plan(model, seq_len=ctx_tokens, clip_norm=clip, **settings)
    if as_json:
        from oomguard.report.as_json import plan_json

        warn_of_calibration(found.calibration)
        click.echo(json.dumps(plan_json(found), indent=2))
    else:
        from oomguard.report.plan_text import plan_text

        click.echo(plan_text(found, wants_colour(), model_option_text(preset, config)))
    return FITS if found.fits else NOTHING_FITS
