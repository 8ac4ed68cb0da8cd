"""``oomguard trace``: the peak of any step, simulated."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from oomguard.cli.options import (
    COUNT,
    MEMORY,
    POLICY,
    Reader,
    chosen_model,
    model_options,
    step_options,
    wants_colour,
)
from oomguard.config import CheckpointPolicy, ModelConfig, StepConfig, check_seq_len
from oomguard.errors import InputError
from oomguard.units import parse_bytes

if TYPE_CHECKING:
    from oomguard.report.trace_report import LabelledTrace, TraceReport
    from oomguard.trace.capture import Capture
    from oomguard.trace.engine import Rewrite
    from oomguard.trace.result import TraceResult

WITHIN, OVER = 0, 1
AS_WRITTEN = "as written"
CHECKPOINT_KINDS = ("checkpoint", "custom_function")
COMPARED_REGIONS = frozenset({"block", "fast.scaled_dot_product_attention"})
SIZE = Reader("size", parse_bytes, "SIZE")
OUTPUT = click.Path(dir_okay=False, path_type=Path)

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
    help="none, every, stride=K|sqrt|auto, blocks=N, attention, attention,blocks=N or custom_function.",
)
@click.option("--accumulate", type=COUNT, default="1", show_default=True, help="Micro-batches of an update.")
@step_options
@click.option("--memory-limit", type=SIZE, help="As given to mx.set_memory_limit.")
@click.option("--sequenced", is_flag=True, help="--memory-limit 0: hardly anything runs ahead.")
@click.option(
    "--budget", type=MEMORY, help="Hold the peak against this: 16GB, 900MiB. Over it, exit status 1."
)
@click.option(
    "--compare", type=POLICY, metavar="POLICY", help="The same step with this checkpointing beside it."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, schema oomguard.trace/1.")
@click.option(
    "--timeline", type=OUTPUT, metavar="FILE.json", help="Write a timeline that ui.perfetto.dev opens."
)
@click.option("--html", type=OUTPUT, metavar="FILE.html", help="Write a page with the step to explore.")
def command(as_json: bool, timeline: Path | None, html: Path | None, **options: Any) -> int:
    """Simulate a training step without running it: its peak, when it is reached,
    and what holds the memory then. Nothing is allocated; a model whose parameters
    were never evaluated can be of any size.

    \b
    oomguard trace --preset huge --batch 8 --compare every --html huge.html
    oomguard trace train.py:build --budget 16GB
    oomguard trace --case lm-llama-qlora --timeline qlora.json

    FUNCTION is called without arguments and returns (step, arguments), or
    (step, arguments, state). step is what your training loop calls, plain or
    compiled; arguments is a tuple of what it is called with; state lists what
    the step updates, [model, optimizer], where it is not found by itself:

    \b
    def build():
        model, optimizer = ...
        def step(inputs, targets): ...
        return step, (inputs, targets), [model, optimizer]

    Exit status: 0, 1 the peak is over --budget, 2 wrong usage or a step that
    cannot be traced.
    """
    for path in (timeline, html):
        if path is not None and not path.parent.is_dir():
            raise InputError(f"no folder {path.parent} to write {path.name} to")
    if options["sequenced"] and options["memory_limit"] is not None:
        raise InputError("--sequenced is --memory-limit 0; give one of them")
    with _waiting("simulating the step"):
        report = _report(_subject(click.get_current_context(), options), options)
    if timeline is not None:
        from oomguard.report.trace_timeline import timeline_json

        timeline.write_text(json.dumps(timeline_json(report)), encoding="utf-8")
        click.echo(f"timeline: {timeline}, to be opened in https://ui.perfetto.dev", err=True)
    if html is not None:
        from oomguard.report.trace_html import trace_html

        html.write_text(trace_html(report), encoding="utf-8")
        click.echo(f"page: {html}", err=True)
    click.echo(_said(report, as_json))
    return OVER if report.fits is False else WITHIN


def _said(report: TraceReport, as_json: bool) -> str:
    if as_json:
        from oomguard.report.trace_json import trace_json

        return json.dumps(trace_json(report), indent=2)
    from oomguard.report.trace_text import trace_text

    return trace_text(report, wants_colour())


@dataclass(frozen=True)
class Subject:
    """What is traced.

    Attributes:
        title, settings: what it is and how, in words.
        capture: captures each call that an update makes; given kinds of regions, marks them.
        compiled: simulate with or without ``mx.compile``; None as the step is.
        label, about: the checkpoint policy it is under.
        under: captures the same step built under another policy; None where the graph has to be rewritten.
        blocks: how many the model has, where that is known.
    """

    title: str
    settings: str
    capture: Callable[[frozenset[str]], list[Capture]]
    compiled: bool | None = None
    label: str = AS_WRITTEN
    about: str = AS_WRITTEN
    under: Callable[[CheckpointPolicy], list[Capture]] | None = None
    blocks: int = 0


def _subject(ctx: click.Context, options: dict[str, Any]) -> Subject:
    target, case, preset, config = (options[key] for key in ("target", "case", "preset", "config"))
    given = {target: target is not None, f"--case {case}": case is not None}
    given |= {"--preset": preset is not None, "--config": config is not None}
    named = [name for name, is_given in given.items() if is_given]
    if len(named) > 1:
        raise InputError(f"{named[0]} and {named[1]} both say what to trace; give one of them")
    if not named:
        raise InputError("nothing to trace: give FILE.py:FUNCTION, --preset, --config or --case")
    if target is None and case is None:
        return _gpt(chosen_model(preset, config), options)
    _refuse_description(ctx, named[0])
    asked = ctx.get_parameter_source("compiled") is not ParameterSource.DEFAULT
    compiled = options["compiled"] if asked else None
    return _case(case, compiled) if case is not None else _function(target, compiled)


def _refuse_description(ctx: click.Context, name: str) -> None:
    for option in ctx.command.params:
        described = option.name in DESCRIBES and option.name is not None
        if described and ctx.get_parameter_source(str(option.name)) is not ParameterSource.DEFAULT:
            raise InputError(f"{name} is a step already; {option.opts[0]} cannot stand beside it")


def _gpt(model: ModelConfig, options: dict[str, Any]) -> Subject:
    from oomguard.report.words import say_batch, say_model, say_policy, say_step

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
    check_seq_len(model, step)

    def under(policy: CheckpointPolicy) -> list[Capture]:
        from oomguard.model.step import build_step
        from oomguard.trace.engine import capture_built

        return capture_built(build_step(model, step.but(checkpoint=policy), evaluated=False))

    about = say_policy(step.checkpoint, model.n_layers)
    return Subject(
        title=say_model(model),
        settings=f"{say_batch(step)}, {about}, {say_step(step)}",
        capture=lambda marked: under(step.checkpoint),
        label=str(step.checkpoint),
        about=about,
        under=under,
        blocks=model.n_layers,
    )


def _case(name: str, compiled: bool | None) -> Subject:
    from oomguard.calibration.cases import CASES, check_case

    check_case(name)

    def captured(marked: frozenset[str]) -> list[Capture]:
        from oomguard.calibration.cases import build_case
        from oomguard.trace.engine import capture_built

        return capture_built(build_case(name, evaluated=False), marked=marked)

    return Subject(f"case {name}: {CASES[name].about}", "", captured, compiled)


def _function(target: str, compiled: bool | None) -> Subject:
    from oomguard.cli.trace_step import load_step

    user = load_step(target)

    def captured(marked: frozenset[str]) -> list[Capture]:
        from oomguard.trace.capture import capture
        from oomguard.trace.engine import capture_built

        if user.step is None:
            return capture_built(user.built, marked=marked)
        return [capture(user.step, user.arguments, user.keywords, state=user.state, marked=marked)]

    return Subject(target, "", captured, compiled)


def _report(subject: Subject, options: dict[str, Any]) -> TraceReport:
    from oomguard.report.trace_report import LabelledTrace, TraceReport

    limit = 0 if options["sequenced"] else options["memory_limit"]
    captures = subject.capture(frozenset())
    asked = LabelledTrace(subject.label, subject.about, _simulated(captures, subject.compiled, limit))
    policy = options["compare"]
    return TraceReport(
        title=subject.title,
        settings=subject.settings,
        asked=asked,
        compared=None if policy is None else _compared(subject, policy, limit),
        budget_bytes=options["budget"],
        memory_limit_bytes=limit,
        mlx=version("mlx"),
    )


def _compared(subject: Subject, policy: CheckpointPolicy, limit: int | None) -> LabelledTrace:
    """The same step under another policy: built again where it can be, else its graph rewritten.

    Calls of ``mx.checkpoint`` that a user's step makes are taken out first, so that the policy stands alone.
    """
    from oomguard.report.trace_report import LabelledTrace
    from oomguard.report.words import say_policy
    from oomguard.trace.remat import apply_policy, block_calls

    if subject.under is not None:
        result = _simulated(subject.under(policy), subject.compiled, limit)
        return LabelledTrace(str(policy), say_policy(policy, subject.blocks), result)
    captures = subject.capture(COMPARED_REGIONS)
    for captured in captures:
        graph = captured.graph
        graph.regions = [region for region in graph.regions if region.kind not in CHECKPOINT_KINDS]
    result = _simulated(captures, subject.compiled, limit, lambda graph: apply_policy(graph, policy))
    blocks = max(len(block_calls(captured.graph)) for captured in captures)
    return LabelledTrace(str(policy), say_policy(policy, blocks), result)


def _simulated(
    captures: list[Capture], compiled: bool | None, limit: int | None, rewrite: Rewrite | None = None
) -> TraceResult:
    """The call with the largest peak."""
    from oomguard.trace.engine import simulate

    results = [
        simulate(
            captured,
            compiled=captured.compiled if compiled is None else compiled,
            memory_limit=limit,
            rewrite=rewrite,
        )
        for captured in captures
    ]
    return max(results, key=lambda result: result.peak_bytes)


@contextlib.contextmanager
def _waiting(what: str) -> Iterator[None]:
    """A line on a terminal while a trace runs; what a user's step prints is no part of the report."""
    with contextlib.redirect_stdout(sys.stderr):
        if not sys.stderr.isatty():
            yield
            return
        from rich.console import Console

        with Console(stderr=True).status(what):
            yield
