"""A plan as text: what fits, why it and not another, what holds the memory, and the command to run."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator

from oomguard.machine.budget import Budget
from oomguard.plan.planner import Plan, Request
from oomguard.plan.search import NO_GAIN, SPEED_DIGITS, Candidate
from oomguard.report.estimate_text import breakdown_lines, calibration_line
from oomguard.report.style import WIDTH, Ink, paragraph, table
from oomguard.report.words import (
    PRICE_OF_WAITING,
    SHORT_DTYPES,
    exact_bytes,
    say_batch,
    say_model,
    say_policy,
    say_step,
)
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
    shown = plan.choice or plan.least
    if shown is not None:
        peak = format_bytes(shown.peak_bytes)
        holds = [ink.faint(paragraph(f"What holds {peak} at the peak ({shown.estimate.phase})"))]
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
        ("speed", format_seconds(estimate.step_seconds), f"a step, {say_speed(choice)} tokens/s"),
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
        if _window_alone_breaks_it(above, plan):
            yield (
                f"Of {say_batch(above.step)} only the in-flight window is too much: without it the step needs up to "
                f"{format_bytes(above.sequenced_high_bytes)}. With mx.set_memory_limit at the budget MLX waits for "
                f"running kernels instead, which costs time ({PRICE_OF_WAITING})."
            )
    top = plan.ceiling
    if top is not None and top.batch > choice.batch:
        share = choice.tokens_per_second / top.tokens_per_second
        yield (
            f"A larger batch buys nothing here: up to {say_batch(top.step)} fits, and {say_batch(choice.step)} "
            f"already has {share:.1%} of its tokens/s."
        )
    elif any(c.batch == plan.grows_to and c is not choice for c in plan.candidates):
        gain = f"{NO_GAIN:.2%} to the tokens/s"
        yield f"No batch in the table is above {plan.grows_to}: a larger one adds less than {gain}."


def _window_alone_breaks_it(above: Candidate, plan: Plan) -> bool:
    """Whether the graph alone would fit, at the high end of its band.

    On a GPU no peak without the window was measured, so there only a trace knows.
    """
    known = above.engine == "trace" or plan.device.backend == "cpu"
    return known and above.tensor_fits and above.sequenced_high_bytes <= above.budget.budget_bytes


def _tradeoff(plan: Plan) -> Iterator[str]:
    """What every block recomputed would give beside no recompute, where it gives a larger batch or any at all."""
    ends = plan.tradeoff
    assert ends is not None
    if not ends.every.fits or (ends.plain.fits and ends.every.batch <= ends.plain.batch):
        return
    faster = f"{ends.slowdown:.0%} faster a step"
    every = (
        f"{say_batch(ends.every.step).capitalize()} with every block recomputed{_marked(ends.every, plan)};"
    )
    if ends.plain.fits:
        yield f"{every} {ends.plain.batch} without recompute{_marked(ends.plain, plan)}, {faster}."
    else:
        plain = f"{say_batch(ends.plain.step)}{_marked(ends.plain, plan)} {_excess(ends.plain)}"
        yield f"{every} without recompute, {faster}, {plain}."


def _marked(candidate: Candidate, plan: Plan) -> str:
    """`` (estimated)`` for what is only estimated beside a choice that is traced."""
    traced = plan.choice is not None and plan.choice.engine == "trace"
    return " (estimated)" if traced and candidate.engine != "trace" else ""


def _excess(candidate: Candidate) -> str:
    """``needs up to 23.1 GiB, 1.6 GiB more than the budget``, of one that does not fit; the high end counts."""
    reasons = []
    if candidate.headroom_bytes < 0:
        over = format_bytes(-candidate.headroom_bytes)
        reasons.append(f"needs up to {format_bytes(candidate.high_bytes)}, {over} more than the budget")
    largest = candidate.budget.largest_buffer_bytes
    if not candidate.tensor_fits and largest is not None:
        tensor = format_bytes(candidate.estimate.largest_tensor_bytes)
        reasons.append(f"has a tensor of {tensor}, and the largest buffer is {format_bytes(largest)}")
    return ", and ".join(reasons)


def _nothing_fits(plan: Plan, ink: Ink) -> Iterator[str]:
    n_layers, least, smallest = plan.request.model.n_layers, plan.least, plan.smallest
    assert least is not None
    assert smallest is not None
    yield paragraph(f"{ink.bad('Does not fit')}: {ink.strong(_what_was_asked(plan.request))}", rest="  ")
    if plan.request.batch is not None and plan.request.checkpoint is not None:
        yield paragraph(f"It {_excess(least)}.", "  ")
    else:
        said = f"{say_batch(least.step)} with {say_policy(least.policy, n_layers)}"
        which = "can be asked for" if least.step == smallest.step else "does what was asked"
        yield paragraph(f"The least that {which}, {said}, {_excess(least)}.", "  ")
    if least.step != smallest.step and not smallest.fits:
        said = f"{say_batch(smallest.step)} with {say_policy(smallest.policy, n_layers)}"
        yield paragraph(f"The least that can be asked for, {said}, {_excess(smallest)}.", "  ")
    if plan.reliefs:
        yield "  What would fit, added to the command:"
        yield from _relief_lines(plan)


def _relief_lines(plan: Plan) -> list[str]:
    """A line a relief; two where one of them would be too long: the options, and under them what they give."""
    n_layers = plan.request.model.n_layers
    rows = [
        (options, f"{say_batch(c.step)}, {say_policy(c.policy, n_layers)}", format_bytes(c.peak_bytes))
        for options, c in plan.reliefs
    ]
    lines = table(rows, "<<>", indent="    ")
    if max(map(len, lines)) <= WIDTH:
        return lines
    return [
        line
        for options, gives, peak in rows
        for line in (paragraph(options, "    "), paragraph(f"{gives}: peak {peak}", "      "))
    ]


def _what_was_asked(request: Request) -> str:
    """``not even one sequence of 1024 tokens, with any checkpointing``, or what was asked instead of that."""
    target = request.target_batch
    accumulate = request.accumulate or (target // request.batch if target and request.batch else 1)
    times = f" x {accumulate} accumulated" if accumulate > 1 else ""
    if request.batch is not None:
        asked = f"batch {request.batch}{times}"
    elif target is not None:
        split = f"batch {target // accumulate}{times}" if request.accumulate else "however it is accumulated"
        asked = f"the target batch of {target}, {split}"
    else:
        asked = f"not even one sequence of {request.step.seq_len} tokens{times}"
    if request.checkpoint is None:
        return f"{asked}, with any checkpointing"
    return f"{asked}, with {say_policy(request.checkpoint, request.model.n_layers)}"


def _candidate_lines(plan: Plan, ink: Ink) -> Iterator[str]:
    mixed = any(candidate.engine == "trace" for candidate in plan.candidates)
    rows: list[tuple[str, ...]] = [
        ("", "batch", "checkpoint", "peak", "at most", "by" if mixed else "", "tokens/s", "")
    ]
    for candidate in plan.candidates:
        micro = f" x {candidate.step.accumulate}" if candidate.step.accumulate > 1 else ""
        rows.append(
            (
                ">" if candidate is plan.choice else "",
                f"{candidate.batch}{micro}",
                str(candidate.policy),
                format_bytes(candidate.peak_bytes),
                format_bytes(candidate.high_bytes),
                candidate.engine if mixed else "",
                say_speed(candidate),
                "" if candidate.fits else "does not fit",
            )
        )
    if not mixed:
        rows = [(*row[:5], *row[6:]) for row in rows]
    lines = table(rows, "<><>><><" if mixed else "<><>>><", indent="")
    yield ink.faint(lines[0])
    for line, candidate in zip(lines[1:], plan.candidates, strict=True):
        if candidate is plan.choice:
            yield ink.good(line)
        else:
            yield line if candidate.fits else ink.faint(line)


def say_speed(candidate: Candidate) -> str:
    """Tokens a second as they are compared: ``1,710``, ``17.1``; ``?`` where no time is known."""
    speed = candidate.tokens_per_second
    if speed <= 0:
        return "?"
    digits = max(0, SPEED_DIGITS - 1 - math.floor(math.log10(speed)))
    return f"{speed:,.{digits}f}"


def _foot(plan: Plan, ink: Ink, model_option: str) -> Iterator[str]:
    traced = any(candidate.engine == "trace" for candidate in plan.candidates)
    said = calibration_line(plan.calibration)
    if traced:
        said = f"Peaks by trace are simulated; the others, and all speeds, are e{said.removeprefix('E')}"
    yield ink.faint(paragraph(said))
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
