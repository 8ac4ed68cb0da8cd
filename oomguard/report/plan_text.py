"""A plan as text: what fits, why it and not another, what holds the memory, and the command to run."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator

from oomguard.budget import Budget
from oomguard.planner import Plan
from oomguard.report.estimate_text import breakdown_lines, calibration_line
from oomguard.report.style import Ink, paragraph, table
from oomguard.report.words import (
    PRICE_OF_WAITING,
    SHORT_DTYPES,
    exact_bytes,
    say_batch,
    say_model,
    say_policy,
    say_step,
)
from oomguard.search import Candidate
from oomguard.units import format_bytes, format_seconds


def plan_text(plan: Plan, colour: bool = False, model_option: str = "") -> str:
    """The report ``oomguard plan`` prints.

    Args:
        plan: the answer.
        colour: with terminal colours.
        model_option: how the command line named the model (``--preset huge``); for the command to run.
    """
    ink = Ink(colour)
    parts = [_header(plan, ink), _answer(plan, ink)]
    if plan.candidates:
        parts.append("\n".join(_candidate_lines(plan, ink)))
    shown = plan.choice or plan.smallest
    if shown is not None:
        holds = [
            ink.faint(f"What holds {format_bytes(shown.peak_bytes)} at the peak ({shown.estimate.phase})")
        ]
        parts.append("\n".join(holds + breakdown_lines(shown.estimate.breakdown)))
    parts.append("\n".join(_foot(plan, ink, model_option)))
    return "\n\n".join(part for part in parts if part)


def say_budget(budget: Budget) -> str:
    """``21.4 GiB (bound by: memory free now, 22.5 GiB less 1.1 GiB headroom)``."""
    return f"{format_bytes(budget.budget_bytes)} (bound by: {say_bound(budget)})"


def say_bound(budget: Budget) -> str:
    """``memory free now, 22.5 GiB less 1.1 GiB headroom``."""
    if not budget.headroom_bytes:
        return budget.bound_by
    bound = format_bytes(budget.candidates[budget.bound_by])
    return f"{budget.bound_by}, {bound} less {format_bytes(budget.headroom_bytes)} headroom"


def _header(plan: Plan, ink: Ink) -> str:
    device = plan.device
    backend = f"{device.backend}, MLX {device.mlx}" if device.mlx else device.backend
    lines = [
        ink.strong(say_model(plan.request.model)),
        say_step(plan.request.step),
        paragraph(f"{device.name} ({backend}); budget {say_budget(plan.budget)}"),
    ]
    return "\n".join(lines)


def _answer(plan: Plan, ink: Ink) -> str:
    choice, n_layers = plan.choice, plan.request.model.n_layers
    if choice is None:
        return "\n".join(_nothing_fits(plan, ink))
    estimate, cache = choice.estimate, format_bytes(choice.cache_limit_bytes)
    band = f"{format_bytes(estimate.low_bytes)} to {format_bytes(estimate.high_bytes)}"
    rows = [
        ("peak", format_bytes(choice.peak_bytes), f"{band}; the high end must fit"),
        ("left", format_bytes(choice.headroom_bytes), "of the budget above the high end"),
        ("footprint", format_bytes(choice.footprint_bytes), f"with the cache limited to {cache}"),
        ("speed", format_seconds(estimate.step_seconds), f"a step, {choice.tokens_per_second:,.0f} tokens/s"),
    ]
    engine = "" if choice.engine == "estimate" else ", confirmed by a trace"
    said = f"{say_batch(choice.step)}, {say_policy(choice.policy, n_layers)}"
    lines = [f"{ink.good('Fits')}: {ink.strong(said)}{engine}", *table(rows, "<><")]
    lines += [paragraph(sentence, "  ") for sentence in _why(plan, choice)]
    return "\n".join(lines)


def _why(plan: Plan, choice: Candidate) -> Iterator[str]:
    """Sentences that explain the choice: the two ends, the next step up, where speed levels off."""
    n_layers = plan.request.model.n_layers
    if plan.tradeoff is not None:
        yield from _tradeoff(plan)
    if plan.next_up is not None:
        above = plan.next_up
        yield f"Next up: {say_batch(above.step)} with {say_policy(above.policy, n_layers)} {_excess(above)}."
        if _window_alone_breaks_it(above):
            yield (
                "Only its in-flight window does not fit: with mx.set_memory_limit at the budget MLX waits for "
                f"running kernels instead, which costs time ({PRICE_OF_WAITING})."
            )
    top = plan.ceiling
    if top is not None and top.batch > choice.batch:
        share = choice.tokens_per_second / top.tokens_per_second
        yield (
            f"A larger batch buys nothing here: up to {say_batch(top.step)} fits, and {say_batch(choice.step)} "
            f"already has {share:.0%} of its tokens/s."
        )


def _window_alone_breaks_it(candidate: Candidate) -> bool:
    """Whether the graph alone, at the high end of its band, would fit."""
    found = candidate.estimate
    high = found.sequenced_peak_bytes * found.high_bytes / max(1, found.peak_bytes)
    return candidate.tensor_fits and high <= candidate.budget.budget_bytes


def _tradeoff(plan: Plan) -> Iterator[str]:
    ends = plan.tradeoff
    assert ends is not None
    faster = f"{ends.slowdown:.0%} faster a step"
    if ends.plain.fits and ends.every.fits:
        yield (
            f"{say_batch(ends.every.step).capitalize()} with every block recomputed; "
            f"{ends.plain.batch} without recompute, {faster}."
        )
    elif ends.every.fits:
        yield (
            f"{say_batch(ends.every.step).capitalize()} with every block recomputed; without recompute, "
            f"{faster}, {say_batch(ends.plain.step)} {_excess(ends.plain)}."
        )


def _excess(candidate: Candidate) -> str:
    """``needs 23.1 GiB, 1.6 GiB more than the budget``; the high end of the band counts."""
    if candidate.headroom_bytes < 0:
        over = format_bytes(-candidate.headroom_bytes)
        return f"needs up to {format_bytes(candidate.high_bytes)}, {over} more than the budget"
    largest = candidate.budget.largest_buffer_bytes
    if not candidate.tensor_fits and largest is not None:
        tensor = format_bytes(candidate.estimate.largest_tensor_bytes)
        return f"has a tensor of {tensor}, and the largest buffer is {format_bytes(largest)}"
    return "fits"


def _nothing_fits(plan: Plan, ink: Ink) -> Iterator[str]:
    n_layers = plan.request.model.n_layers
    yield f"{ink.bad('Does not fit')}: {ink.strong(_what_was_asked(plan))}"
    smallest = plan.smallest
    if smallest is not None:
        said = f"{say_batch(smallest.step)} with {say_policy(smallest.policy, n_layers)}"
        yield paragraph(f"The least that can be asked for, {said}, {_excess(smallest)}.", "  ")
    if plan.reliefs:
        yield "  What would fit:"
        rows = [
            (options, f"{say_batch(c.step)}, {say_policy(c.policy, n_layers)}", format_bytes(c.peak_bytes))
            for options, c in plan.reliefs
        ]
        yield from table(rows, "<<>", indent="    ")


def _what_was_asked(plan: Plan) -> str:
    request = plan.request
    batch = f"batch {request.batch}" if request.batch else f"one sequence of {request.step.seq_len} tokens"
    if request.checkpoint is not None:
        return f"not even {batch} with {say_policy(request.checkpoint, request.model.n_layers)}"
    return f"not even {batch}, with any checkpointing"


def _candidate_lines(plan: Plan, ink: Ink) -> Iterator[str]:
    header = ("", "batch", "checkpoint", "peak", "at most", "tokens/s", "")
    rows = [header]
    for candidate in plan.candidates:
        micro = f" x {candidate.step.accumulate}" if candidate.step.accumulate > 1 else ""
        rows.append(
            (
                ">" if candidate is plan.choice else "",
                f"{candidate.batch}{micro}",
                str(candidate.policy),
                format_bytes(candidate.peak_bytes),
                format_bytes(candidate.high_bytes),
                _round_speed(candidate.tokens_per_second),
                "" if candidate.fits else "does not fit",
            )
        )
    lines = table(rows, "<><>>><", indent="")
    yield ink.faint(lines[0])
    for line, candidate in zip(lines[1:], plan.candidates, strict=True):
        if candidate is plan.choice:
            yield ink.good(line)
        else:
            yield line if candidate.fits else ink.faint(line)


def _round_speed(tokens_per_second: float) -> str:
    """Three significant digits: two fitted speeds know no more."""
    if tokens_per_second <= 0:
        return "?"
    digits = max(0, 2 - math.floor(math.log10(tokens_per_second)))
    step = 10 ** max(0, math.floor(math.log10(tokens_per_second)) - 2)
    return (
        f"{round(tokens_per_second / step) * step:,.0f}" if digits == 0 else f"{tokens_per_second:.{digits}f}"
    )


def _foot(plan: Plan, ink: Ink, model_option: str) -> Iterator[str]:
    yield ink.faint(paragraph(calibration_line(plan.calibration)))
    for warning in plan.warnings:
        yield ink.warn(paragraph(f"warning: {warning}", rest="  "))
    if plan.choice is not None:
        where = "Run" if plan.device.here else f"Run on {plan.device.name}"
        yield f"{where}:\n  {ink.strong(train_command(plan, model_option))}"


def train_command(plan: Plan, model_option: str = "") -> str:
    """The ``oomguard train`` command that runs the choice; only what differs from its defaults is named."""
    choice, request = plan.choice, plan.request
    assert choice is not None
    step = choice.step
    words = ["oomguard train", model_option or f"--preset {shlex.quote(request.model.name)}", "--corpus FILE"]
    words += [f"--batch {step.batch}", f"--grad-checkpoint {choice.policy}"]
    if step.accumulate > 1:
        words.append(f"--accumulate {step.accumulate}")
    if step.seq_len != request.model.context:
        words.append(f"--ctx {step.seq_len}")
    if step.optimizer != "adamw":
        words.append(f"--optimizer {step.optimizer}")
    if step.dtype != "float32":
        words.append(f"--dtype {SHORT_DTYPES[step.dtype]}")
    words += ["--clip"] if step.clip_norm else []
    words += [] if step.compiled else ["--no-compile"]
    if request.memory_bytes is not None:
        words.append(f"--memory {exact_bytes(request.memory_bytes)}")
    if request.headroom is not None:
        share, size = request.headroom.share, request.headroom.size_bytes
        words.append(f"--headroom {f'{100 * share:g}%' if share else exact_bytes(size)}")
    return " ".join(words)
