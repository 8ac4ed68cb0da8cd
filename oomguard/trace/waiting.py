"""What is said of state that a step makes and does not evaluate."""

from __future__ import annotations

from collections.abc import Sequence

from oomguard.trace.graph import Array
from oomguard.trace.steps import Steps
from oomguard.units import KIB, format_bytes

NAMES = 2
WORTH_SAYING = 0.01  # of the peak


def unevaluated_warnings(steps: Steps, peak_bytes: int) -> list[str]:
    """Warnings for a process whose steps leave state to those after them; more than two must have been simulated.

    A counter of steps, or the random key, that waits for the next step and holds nothing is not worth a word.
    """
    if steps.unrolled is None:
        return []
    later, never = steps.unrolled.unevaluated()
    waiting, growth = steps.waiting[-1], steps.waiting[-1] - steps.waiting[-2]
    warnings = []
    if later and (waiting > WORTH_SAYING * peak_bytes or not all(map(_counts, later))):
        warnings.append(
            f"mx.eval is not given {_named(later)}, so the next step does the work, and until then "
            f"{format_bytes(waiting)} of what it needs are held; hand mx.eval the parameters and the optimizer's state "
            "with the loss"
        )
    if never and (growth >= KIB or not all(map(_counts, never))):
        grows = (
            f"the graph grows by {format_bytes(growth)} a step, without end"
            if growth > 0
            else "it stays a graph"
        )
        warnings.append(f"nothing ever evaluates {_named(never)}: {grows}; hand it to mx.eval with the loss")
    return warnings


def _counts(array: Array) -> bool:
    """Whether it is a number that MLX itself keeps, of steps or of random draws."""
    return array.name == "random state" or (array.kind == "optimizer" and array.size == 1)


def _named(arrays: Sequence[Array]) -> str:
    names = listed([array.name or "an array" for array in arrays])
    return f"{names} of the state" if len(arrays) == 1 else f"{len(arrays)} arrays of the state ({names})"


def listed(names: Sequence[str]) -> str:
    """The first few of some names, and how many more there are."""
    more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
    return ", ".join(names[:NAMES]) + more
