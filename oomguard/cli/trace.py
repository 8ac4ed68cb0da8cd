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
from oomguard.errors import InputError, TraceError
from oomguard.units import parse_bytes

if TYPE_CHECKING:
    from oomguard.report.trace_report import TraceReport
    from oomguard.trace.graph import Graph
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
        trace: simulates it as it is.
        under: simulates it under another checkpoint policy, and says that policy in words.
        label, about: the policy it is under.
    """

    title: str
    settings: str
    trace: Callable[[], TraceResult]
    under: Callable[[CheckpointPolicy], tuple[str, TraceResult]]
    label: str = AS_WRITTEN
    about: str = AS_WRITTEN


def _subject(ctx: click.Context, options: dict[str, Any]) -> Subject:
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
        return _gpt(chosen_model(preset, config), options, limit)
    _refuse_description(ctx, named[0])
    asked = ctx.get_parameter_source("compiled") is not ParameterSource.DEFAULT
    how = {"compiled": options["compiled"] if asked else None, "memory_limit": limit}
    return _case(case, how) if case is not None else _function(target, how)


def _refuse_description(ctx: click.Context, name: str) -> None:
    for option in ctx.command.params:
        described = option.name in DESCRIBES and option.name is not None
        if described and ctx.get_parameter_source(str(option.name)) is not ParameterSource.DEFAULT:
            raise InputError(f"{name} is a step already; {option.opts[0]} cannot stand beside it")


def _gpt(model: ModelConfig, options: dict[str, Any], limit: int | None) -> Subject:
    """A step of the preset GPT; under another policy it is built again."""
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

    def under(policy: CheckpointPolicy) -> tuple[str, TraceResult]:
        from oomguard.model.step import build_step
        from oomguard.trace.engine import trace_built

        built = build_step(model, step.but(checkpoint=policy), evaluated=False)
        return say_policy(policy, model.n_layers), trace_built(built, memory_limit=limit)

    about = say_policy(step.checkpoint, model.n_layers)
    return Subject(
        title=say_model(model),
        settings=f"{say_batch(step)}, {about}, {say_step(step)}",
        trace=lambda: under(step.checkpoint)[1],
        under=under,
        label=str(step.checkpoint),
        about=about,
    )


def _case(name: str, how: dict[str, Any]) -> Subject:
    from oomguard.calibration.cases import CASES, build_case, check_case

    check_case(name)
    return _built(lambda: build_case(name, evaluated=False), f"case {name}: {CASES[name].about}", how)


def _built(build: Callable[[], Any], title: str, how: dict[str, Any]) -> Subject:
    """A step that says which calls an update makes; under another policy its graph is rewritten."""

    def trace_as_is() -> TraceResult:
        from oomguard.trace.engine import trace_built

        return trace_built(build(), **how)

    def under(policy: CheckpointPolicy) -> tuple[str, TraceResult]:
        from oomguard.trace.engine import trace_built

        rewriting = _Rewriting(policy)
        result = trace_built(build(), rewrite=rewriting, marked=COMPARED_REGIONS, **how)
        return rewriting.about, result

    return Subject(title, "", trace_as_is, under)


def _function(target: str, how: dict[str, Any]) -> Subject:
    from oomguard.cli.trace_step import load_step

    user = load_step(target)
    step = user.step
    if step is None:
        return _built(lambda: user.built, target, how)

    def trace_as_is() -> TraceResult:
        from oomguard.trace.engine import trace

        return trace(step, *user.arguments, state=user.state, keywords=user.keywords, **how)

    def under(policy: CheckpointPolicy) -> tuple[str, TraceResult]:
        from oomguard.trace.capture import capture
        from oomguard.trace.engine import simulate

        found = capture(step, user.arguments, user.keywords, state=user.state, marked=COMPARED_REGIONS)
        # The policy stands alone: what the step itself would recompute is taken as plain code.
        found.graph.regions = [r for r in found.graph.regions if r.kind not in CHECKPOINT_KINDS]
        compiled = found.compiled if how["compiled"] is None else how["compiled"]
        rewriting = _Rewriting(policy)
        result = simulate(found, compiled=compiled, memory_limit=how["memory_limit"], rewrite=rewriting)
        return rewriting.about, result

    return Subject(target, "", trace_as_is, under)


class _Rewriting:
    """Puts a captured graph under a policy; ``about`` says it in words once the blocks are known."""

    def __init__(self, policy: CheckpointPolicy):
        self.policy = policy
        self.about = str(policy)

    def __call__(self, graph: Graph) -> Graph:
        from oomguard.report.words import say_policy
        from oomguard.trace.remat import apply_policy, block_calls

        if any(region.kind in CHECKPOINT_KINDS for region in graph.regions):
            raise InputError(
                "--compare: the step recomputes already; name one that does not, and compare it with "
                f"{self.policy}"
            )
        self.about = say_policy(self.policy, len(block_calls(graph)))
        return apply_policy(graph, self.policy)


def _report(subject: Subject, options: dict[str, Any]) -> TraceReport:
    from oomguard.report.trace_report import LabelledTrace, TraceReport

    asked = LabelledTrace(subject.label, subject.about, subject.trace())
    policy: CheckpointPolicy | None = options["compare"]
    return TraceReport(
        title=subject.title,
        settings=subject.settings,
        asked=asked,
        compared=None if policy is None else LabelledTrace(str(policy), *subject.under(policy)),
        budget_bytes=options["budget"],
        memory_limit_bytes=0 if options["sequenced"] else options["memory_limit"],
        mlx=version("mlx"),
    )


@contextlib.contextmanager
def _waiting(what: str) -> Iterator[None]:
    """A line on a terminal while a trace runs; what a user's step prints is no part of the report."""
    from rich.console import Console

    shown = Console(stderr=True).status(what) if sys.stderr.isatty() else contextlib.nullcontext()
    with contextlib.redirect_stdout(sys.stderr), shown:
        try:
            yield
        except TraceError as error:  # what a user's step raised may be several lines
            raise TraceError(" ".join(str(error).split())) from error
