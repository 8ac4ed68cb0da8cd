"""An estimate as text: the peak, its phases, and what holds it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from oomguard.config.model import ModelConfig
from oomguard.config.step import StepConfig
from oomguard.report.style import Ink, bar, paragraph, table
from oomguard.report.words import say_batch, say_category, say_model, say_policy, say_step
from oomguard.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from oomguard.estimate.coefficients import Coefficients
    from oomguard.estimate.peak import Estimate

SLIVER = 0.005  # of the peak


def estimate_text(
    model: ModelConfig, step: StepConfig, estimate: Estimate, calibration: Coefficients, colour: bool = False
) -> str:
    """The report ``oomguard estimate`` prints."""
    ink = Ink(colour)
    head = [
        ink.strong(say_model(model)),
        paragraph(f"{say_batch(step)}, {say_policy(step.checkpoint, model.n_layers)}, {say_step(step)}"),
    ]
    band = f"{format_bytes(estimate.low_bytes)} to {format_bytes(estimate.high_bytes)}"
    rows = [
        ("peak", format_bytes(estimate.peak_bytes), f"{band}, {say_category(estimate.phase)}"),
        ("footprint", format_bytes(estimate.footprint_bytes), "with what the allocator keeps for reuse"),
        ("largest tensor", format_bytes(estimate.largest_tensor_bytes), ""),
        ("step", format_seconds(estimate.step_seconds), _speed(step, estimate)),
    ]
    phases = [ink.faint("Phases (they never add up: the peak is the largest)"), *_phase_lines(estimate)]
    holds = [ink.faint("What holds the peak"), *breakdown_lines(estimate.breakdown)]
    foot = [ink.faint(paragraph(calibration_line(calibration)))]
    foot += [ink.warn(paragraph(f"warning: {warning}", rest="  ")) for warning in estimate.warnings]
    parts = (head, table(rows, "<><"), phases, holds, foot)
    return "\n\n".join("\n".join(part) for part in parts)


def _speed(step: StepConfig, estimate: Estimate) -> str:
    if estimate.step_seconds <= 0:
        return ""
    return f"{step.tokens / estimate.step_seconds:,.0f} tokens/s"


def _phase_lines(estimate: Estimate) -> Iterator[str]:
    top = max(estimate.phases.values(), default=0) or 1
    rows = [
        (say_category(name), format_bytes(size), bar(size / top, 30))
        for name, size in estimate.phases.items()
    ]
    yield from table(rows, "<><") if rows else []


def breakdown_lines(breakdown: Mapping[str, int]) -> list[str]:
    """One line a category, the largest first, with its share of the peak; slivers are summed up last."""
    total = sum(breakdown.values()) or 1
    held = sorted(((size, name) for name, size in breakdown.items() if size >= SLIVER * total), reverse=True)
    rest = total - sum(size for size, _ in held)
    held += [(rest, "the_rest")] if rest and held else []
    rows = [
        (say_category(name), format_bytes(size), f"{size / total:.0%}", bar(size / total, 30))
        for size, name in held
    ]
    return table(rows, "<>><") if rows else []


def calibration_line(calibration: Coefficients) -> str:
    """Where the numbers come from and how far off they were where they could be checked."""
    mlx = f", MLX {calibration.mlx}" if calibration.mlx else ""
    return (
        f"Estimated with the {calibration.profile} coefficients ({calibration.backend}{mlx}), fitted to "
        f"{calibration.rows} measured rows: median error {calibration.median_error:.1%}, "
        f"worst {calibration.worst_error:.1%}."
    )
