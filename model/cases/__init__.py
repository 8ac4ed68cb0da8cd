"""Named small training steps of many kinds of networks, to check what a trace says of each.

``build_case(name)`` gives an object with ``model``, ``optimizer``, ``state``, ``plain``, ``compiled``,
``batch`` and ``run()``, as ``oomguard.model.step.build_step`` does. Listing names imports no MLX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oomguard.model.cases.registry import Case, Training, find_case
from oomguard.model.cases.table import CASES

if TYPE_CHECKING:
    from oomguard.model.cases.step import CaseStep

__all__ = ["CASES", "Case", "Training", "build_case", "case_names", "check_case"]


def case_names() -> list[str]:
    """Every case, in the order of the table."""
    return list(CASES)


def check_case(name: str) -> None:
    """Raises InputError, with near names, unless there is a case of that name."""
    find_case(CASES, name)


def build_case(name: str, *, evaluated: bool = True, seed: int = 0) -> CaseStep:
    """The step of a case.

    Args:
        evaluated: whether parameters, optimizer state and batch are evaluated; without, nothing takes memory.

    Raises:
        InputError: no such case, or a package that it needs is not installed.
    """
    return find_case(CASES, name).build(evaluated=evaluated, seed=seed)
