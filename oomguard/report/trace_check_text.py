"""The trace beside everything measured, as text or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from oomguard.report.style import Ink, table
from oomguard.units import format_bytes

if TYPE_CHECKING:
    from oomguard.calibration.trace_check import Check, Section

LABEL_WIDTH = 40


def section_text(section: Section, colour: bool = False) -> str:
    """One section: its rows, then each bound with what was found."""
    ink = Ink(colour)
    rows = [("", "measured", "traced", "error", ""), *(_cells(check) for check in section.checks)]
    lines = [ink.strong(section.name), "", *table(rows, "<>>><"), ""]
    bounds = [(bound.name, f"{found:.1%}", f"bound {bound.most:.1%}") for bound, found in section.results]
    lines += table([(f"of {len(section.errors)} rows", "", ""), *bounds], "<><")
    lines += [ink.bad(problem) for problem in section.problems]
    return "\n".join(lines)


def _cells(check: Check) -> tuple[str, str, str, str, str]:
    label = check.label if len(check.label) <= LABEL_WIDTH else check.label[: LABEL_WIDTH - 1] + "…"
    if check.problem:
        return label, format_bytes(check.measured_bytes), "", "", "not traced"
    return (
        label,
        format_bytes(check.measured_bytes),
        format_bytes(check.traced_bytes),
        f"{check.error:+.1%}",
        check.not_counted,
    )


def sections_json(sections: Sequence[Section]) -> dict[str, Any]:
    """All sections as one object."""
    return {
        "schema": "oomguard.trace-validation/1",
        "sections": [
            {
                "name": section.name,
                "bounds": [
                    {"name": bound.name, "found": found, "bound": bound.most}
                    for bound, found in section.results
                ],
                "problems": section.problems,
                "rows": [
                    {
                        "label": check.label,
                        "measured_bytes": check.measured_bytes,
                        "traced_bytes": check.traced_bytes,
                        "error": None if check.problem else check.error,
                        "counted": check.counted,
                    }
                    for check in section.checks
                ],
            }
            for section in sections
        ],
    }
