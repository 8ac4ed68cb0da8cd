"""``oomguard trace``: the peak of any step, simulated."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from oomguard.cli.options import (
    COUNT,
    MEMORY_OR_AUTO,
    POLICY,
    POLICY_HELP,
    Reader,
    chosen_model,
    device_option,
    model_options,
    refuse_beside,
    step_options,
    wants_colour,
)
from oomguard.cli.trace_subject import Simulated, Subject, case_subject, function_subject, preset_subject
from oomguard.cli.waiting import waiting
from oomguard.config.policy import CheckpointPolicy
from oomguard.config.step import StepConfig
from oomguard.config.words import AUTO
from oomguard.errors import InputError, TraceError
from oomguard.files.writing import Output, check_outputs
from oomguard.machine.device import Device, find_device
from oomguard.units import parse_bytes

if TYPE_CHECKING:
    from oomguard.report.trace_report import PricedPolicies, TraceReport

WITHIN, OVER = 0, 1
SIZE = Reader("size", parse_bytes, "SIZE")
OUTPUT = click.Path(path_type=Path)

# What describes a step of a preset says nothing beside a target that is a step already.
DESCRIBES = ("batch", "grad_checkpoint", "accumulate", "ctx_tokens", "optimizer", "dtype", "clip")


@click.command("trace", short_help="The peak of any MLX step, simulated without running it.")
@click.argument("target", metavar="[FILE.py:FUNCTION]", required=False)
@model_options
@click.option("--case", metavar="NAME", help="A named step; oomguard measure --list-cases lists them.")
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
@click.option("--memory-limit", type=SIZE, help="As given to mx.set_memory_limit; MLX's own there without.")
@click.option("--sequenced", is_flag=True, help="--memory-limit 0: hardly anything runs ahead.")
@click.option(
    "--budget",
    type=MEMORY_OR_AUTO,
    help="Hold the peak against this: 16GB, 900MiB; auto is what the device has. Over it, or with a buffer larger "
    "than the device hands out, exit status 1, and the checkpointing that fits is named.",
)
@click.option(
    "--compare", type=POLICY, metavar="POLICY", help="The same step with this checkpointing beside it."
)
@click.option(
    "--policies",
    is_flag=True,
    help="What the step holds and recomputes under every checkpoint policy, from one capture.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, schema oomguard.trace/1.")
@click.option(
    "--timeline", type=OUTPUT, metavar="FILE.json", help="Write a timeline that ui.perfetto.dev opens."
)
@click.option(
    "--html",
    type=OUTPUT,
    metavar="FILE.html",
    help="Write a page with the step to explore, held against what the machine has.",
)
def command(as_json: bool, timeline: Path | None, html: Path | None, **options: Any) -> int:
    """Simulate a training step without running it: its peak, when it is reached,
    and what holds the memory then. Nothing is allocated; a model whose parameters
    were never evaluated can be of any size.

    \b
    oomguard trace --preset huge --batch 8 --compare every --html huge.html
    oomguard trace train.py:build --budget auto
    oomguard trace train.py:build --device m5-pro-48gb --policies
    oomguard trace --case lm-llama-qlora --timeline qlora.json

    FUNCTION is called without arguments and returns (step, arguments),
    (step, arguments, state) or (step, arguments, state, evaluate). step is what
    your training loop calls, plain or compiled; arguments is a tuple of what it
    is called with; state lists what the step updates, [model, optimizer], where
    it is not found by itself; evaluate is what your loop hands to mx.eval, if
    that is not the loss and then the state. oomguard measure runs the same.

    \b
    def build():
        model, optimizer = ...
        def step(inputs, targets): ...
        return (step, (inputs, targets), [model, optimizer],
                lambda loss, state: (state, loss))

    FILE.json and FILE.html are new files, or ones that this command wrote
    before; nothing else is overwritten, and no link, pipe or device.

    Exit status: 0, 1 the peak is over --budget or, with one, a buffer larger than
    the device hands out, 2 wrong usage or a step that cannot be traced.
    """
    outputs = _outputs(timeline, html, options)
    check_outputs(list(outputs.values()))
    if options["sequenced"] and options["memory_limit"] is not None:
        raise InputError("--sequenced is --memory-limit 0; give one of them")
    with waiting("simulating the step"):
        device = find_device(options["device"])
        subject = _subject(click.get_current_context(), options, device)
        report = _report(subject, device, options)
        page_report = None if html is None else _for_page(report, subject, device)
    if timeline is not None:
        from oomguard.report.trace_timeline import timeline_json

        outputs["timeline"].write_text(json.dumps(timeline_json(report)))
        click.echo(f"timeline: {timeline}, to be opened in https://ui.perfetto.dev", err=True)
    if html is not None and page_report is not None:
        from oomguard.report.trace_html import trace_html

        outputs["html"].write_text(trace_html(page_report))
        click.echo(f"page: {html}", err=True)
    click.echo(_said(report, as_json))
    return OVER if report.fits is False else WITHIN


def _outputs(timeline: Path | None, html: Path | None, options: dict[str, Any]) -> dict[str, Output]:
    """The files to be written, by the option that names each."""
    from oomguard.report.trace_html import PAGE_FILE
    from oomguard.report.trace_timeline import TIMELINE_FILE

    inputs = {}
    if options["target"] is not None:
        inputs["the script that is traced"] = Path(options["target"].rpartition(":")[0])
    if options["config"] is not None:
        inputs["what --config reads"] = options["config"]
    named = {"timeline": (timeline, TIMELINE_FILE), "html": (html, PAGE_FILE)}
    return {
        name: Output(path, format_, f"--{name}", inputs)
        for name, (path, format_) in named.items()
        if path is not None
    }


def _said(report: TraceReport, as_json: bool) -> str:
    if as_json:
        from oomguard.report.trace_json import trace_json

        return json.dumps(trace_json(report), indent=2)
    from oomguard.report.trace_text import trace_text

    return trace_text(report, wants_colour())


def _subject(ctx: click.Context, options: dict[str, Any], device: Device) -> Subject:
    target, case, preset, config = (options[key] for key in ("target", "case", "preset", "config"))
    given = {target: target is not None, f"--case {case}": case is not None}
    given |= {"--preset": preset is not None, "--config": config is not None}
    named = [name for name, is_given in given.items() if is_given]
    if len(named) > 1:
        raise InputError(f"{named[0]} and {named[1]} both say what to trace; give one of them")
    if not named:
        raise InputError("nothing to trace: give FILE.py:FUNCTION, --preset, --config or --case")
    limit = 0 if options["sequenced"] else options["memory_limit"]
    if target is None and case is None:
        model = chosen_model(preset, config)
        step = StepConfig(
            batch=options["batch"],
            seq_len=options["ctx_tokens"] or model.context,
            accumulate=options["accumulate"],
            checkpoint=options["grad_checkpoint"],
            dtype=options["dtype"],
            optimizer=options["optimizer"],
            clip_norm=options["clip"],
            compiled=options["compiled"],
        )
        return preset_subject(model, step, Simulated(device, limit))
    refuse_beside(DESCRIBES, f"{named[0]} is a step already")
    asked = ctx.get_parameter_source("compiled") is not ParameterSource.DEFAULT
    how = Simulated(device, limit, options["compiled"] if asked else None)
    return case_subject(case, how) if case is not None else function_subject(target, how)


def _report(subject: Subject, device: Device, options: dict[str, Any]) -> TraceReport:
    from oomguard.report.trace_report import LabelledTrace, TraceReport

    budget_bytes, bound_by = _budget(options["budget"], device)
    asked = LabelledTrace(subject.label, subject.about, subject.trace())
    policy: CheckpointPolicy | None = options["compare"]
    report = TraceReport(
        title=subject.title,
        settings=subject.settings,
        asked=asked,
        compared=None if policy is None else LabelledTrace(str(policy), *subject.under(policy)),
        budget_bytes=budget_bytes,
        bound_by=bound_by,
        memory_limit_bytes=0 if options["sequenced"] else options["memory_limit"],
        mlx=version("mlx"),
        machine=device.name if options["device"] is not None else "",
    )
    if report.fits is False or options["policies"]:
        report = replace(report, policies=_policies(subject, budget_bytes, options["policies"]))
    return report


def _for_page(report: TraceReport, subject: Subject, device: Device) -> TraceReport:
    """The report as a page shows it: with the machine named, and held against what it has where nobody said less.

    The answer on stdout and the exit status stay those that were asked for.
    """
    named = replace(report, machine=device.name)
    if report.budget_bytes is not None:
        return named
    try:
        budget_bytes, bound_by = _budget(AUTO, device)
    except InputError:
        return named
    held = replace(named, budget_bytes=budget_bytes, bound_by=bound_by)
    if held.fits:
        return held
    return replace(held, policies=_policies(subject, budget_bytes, report.policies is not None))


def _budget(asked: int | str | None, device: Device) -> tuple[int | None, str]:
    """The bytes the peak is held against, and what bounds them where that was not said."""
    if asked != AUTO:
        return asked, ""  # type: ignore[return-value]
    from oomguard.machine.budget import find_budget
    from oomguard.report.plan_text import say_bound

    try:
        found = find_budget(device)
    except InputError as error:
        raise InputError(
            f"--budget auto: how much memory {device.name} has is not known; write a size, or name a machine, such as "
            "--device m5-pro-48gb"
        ) from error
    return found.budget_bytes, say_bound(found)


def _policies(subject: Subject, budget_bytes: int | None, everything: bool) -> PricedPolicies | None:
    """The prices of all named policies where they are asked for, and the cheapest that fits.

    A step that cannot be put under a policy, because it recomputes already or has no blocks, has none; that is an
    error only where they were asked for.
    """
    from oomguard.report.trace_report import PricedPolicies

    try:
        policies = subject.policies()
    except TraceError:
        if everything:
            raise
        return None
    if not policies.n_blocks and not everything:
        return None
    table = policies.table() if everything else []
    cheapest = None if budget_bytes is None else policies.cheapest(budget_bytes)
    if cheapest is not None and cheapest not in table:
        table = sorted([*table, cheapest], key=lambda price: price.cost) if everything else [cheapest]
    return PricedPolicies(tuple(table), cheapest, policies.n_blocks)
