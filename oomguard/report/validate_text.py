"""A validation as text or JSON: every row, then median and worst beside their bounds."""

from __future__ import annotations

from typing import Any

from oomguard.estimate.validate import Comparison, Validation
from oomguard.measure.table import row_label
from oomguard.report.style import Ink, table
from oomguard.units import format_bytes

LABEL_WIDTH = 36


def validation_text(validation: Validation, colour: bool = False) -> str:
    """The report ``oomguard validate`` prints for one profile."""
    ink = Ink(colour)
    head = ink.strong(f"{validation.profile} ({validation.backend}, MLX {validation.mlx})")
    rows = [("", "measured", "predicted", "error", "")]
    rows += [_cells(comparison) for comparison in validation.comparisons]
    (left_median, left_worst), (median_bound, worst_bound) = validation.left_out, validation.bounds
    counted = sum(1 for c in validation.comparisons if c.counted)
    summary = [
        ("", "median", "worst"),
        (f"these {counted} rows", f"{validation.median:.1%}", f"{validation.worst:.1%}"),
        ("leave-one-out", f"{left_median:.1%}", f"{left_worst:.1%}"),
        ("bound", f"{median_bound:.1%}", f"{worst_bound:.1%}"),
    ]
    problems = [ink.bad(problem) for problem in validation.problems] or [ink.good("All bounds hold.")]
    parts = [[head], table(rows, "<>>><"), table(summary, "<>>"), problems]
    return "\n\n".join("\n".join(part) for part in parts)


def _cells(comparison: Comparison) -> tuple[str, str, str, str, str]:
    label = row_label(comparison.row)
    if len(label) > LABEL_WIDTH:
        label = label[: LABEL_WIDTH - 1] + "…"
    note = "" if comparison.counted else "below 1 GB"
    if comparison.counted and comparison.under_band:
        note = "above band"
    measured, predicted = format_bytes(comparison.measured_bytes), format_bytes(comparison.predicted_bytes)
    return label, measured, predicted, f"{comparison.error:+.1%}", note


def validation_json(validations: list[Validation]) -> dict[str, Any]:
    """The same as one object."""
    return {
        "schema": "oomguard.validation/1",
        "profiles": [
            {
                "profile": validation.profile,
                "backend": validation.backend,
                "mlx": validation.mlx,
                "median_error": validation.median,
                "worst_error": validation.worst,
                "leave_one_out": {
                    "median_error": validation.left_out[0],
                    "worst_error": validation.left_out[1],
                },
                "bounds": {"median_error": validation.bounds[0], "worst_error": validation.bounds[1]},
                "problems": validation.problems,
                "rows": [_row_json(comparison) for comparison in validation.comparisons],
            }
            for validation in validations
        ],
    }


def _row_json(comparison: Comparison) -> dict[str, Any]:
    row = comparison.row
    return {
        "label": row_label(row),
        "model": row.model.model_dump() if row.model else None,
        "step": row.step.model_dump() if row.step else None,
        "measured_bytes": comparison.measured_bytes,
        "predicted_bytes": comparison.predicted_bytes,
        "low_bytes": comparison.low_bytes,
        "high_bytes": comparison.high_bytes,
        "error": comparison.error,
        "counted": comparison.counted,
    }
