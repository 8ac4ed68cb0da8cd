"""The trace beside everything that was measured: nothing in it is fitted to any of these rows.

Sections: the CPU rows of the preset GPT and of the named cases (default and sequenced peaks), the M5 Pro table, and
published peaks of Macs: of LoRA runs whose sequence length is stated, of single operations, and of small GPTs from
scratch.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from oomguard.errors import OomguardError
from oomguard.measure.table import row_label
from oomguard.rows import Row, read_rows, shipped_row_files

if TYPE_CHECKING:
    from oomguard.calibration.public_rows import Published

METAL_LEAST_PEAK_BYTES = 10**9


@dataclass(frozen=True)
class Check:
    """One measured peak and the traced one.

    Attributes:
        not_counted: why it does not enter the section's bounds; empty where it does.
        problem: why it could not be traced; empty where it was.
    """

    label: str
    measured_bytes: int
    traced_bytes: int
    not_counted: str = ""
    problem: str = ""

    @property
    def counted(self) -> bool:
        return not self.not_counted

    @property
    def error(self) -> float:
        """Share of the measured peak; positive where the trace is too large."""
        return self.traced_bytes / self.measured_bytes - 1


@dataclass(frozen=True)
class Bound:
    """What a section must keep: a statistic of the absolute errors, or ``under`` for the furthest below."""

    name: str
    most: float
    of: Callable[[list[float]], float]


def _share_within(limit: float) -> Callable[[list[float]], float]:
    return lambda errors: sum(1 for error in errors if abs(error) > limit) / len(errors)


def _median(errors: list[float]) -> float:
    return median(map(abs, errors))


def _worst(errors: list[float]) -> float:
    return max(map(abs, errors))


def _under(errors: list[float]) -> float:
    return max(0.0, -min(errors))


BOUNDS = {
    "sequenced, eager": (
        Bound("rows off by more than 0.5%", 0.05, _share_within(0.005)),
        Bound("worst", 0.02, _worst),
    ),
    "sequenced, compiled": (Bound("median", 0.01, _median), Bound("worst", 0.03, _worst)),
    "default": (
        Bound("median", 0.02, _median),
        Bound("worst", 0.06, _worst),
        Bound("furthest under", 0.03, _under),
    ),
    "M5 Pro, without recompute": (Bound("median", 0.015, _median), Bound("worst", 0.04, _worst)),
    "M5 Pro, custom_function": (Bound("worst", 0.08, _worst),),
    "published LoRA peaks": (
        Bound("median", 0.04, _median),
        Bound("worst", 0.10, _worst),
        Bound("furthest under", 0.05, _under),
    ),
    "published operations": (Bound("worst", 0.01, _worst),),
    "published runs from scratch": (Bound("worst", 0.01, _worst),),
}

LONG = {"N34"}
"""Published rows that take minutes to trace: ``python -m oomguard.calibration.public N34`` does."""


@dataclass(frozen=True)
class Section:
    """Checks of one kind, and how they keep their bounds."""

    name: str
    checks: tuple[Check, ...]

    @property
    def errors(self) -> list[float]:
        return [check.error for check in self.checks if check.counted and not check.problem]

    @property
    def results(self) -> list[tuple[Bound, float]]:
        """Each bound with what was found."""
        return [(bound, bound.of(self.errors)) for bound in BOUNDS[self.name]] if self.errors else []

    @property
    def problems(self) -> list[str]:
        """Bounds that are missed and rows that could not be traced, a line each."""
        missed = [
            f"{self.name}: {bound.name} {found:.1%} is above the bound {bound.most:.1%}"
            for bound, found in self.results
            if found > bound.most
        ]
        return missed + [f"{check.label}: {check.problem}" for check in self.checks if check.problem]


def check_all(backends: Iterable[str] = ("cpu", "metal"), rows: list[Row] | None = None) -> Iterator[Section]:
    """Traces every shipped row, and yields each section as it is done; minutes on two cores.

    Args:
        backends: whose rows.
        rows: CPU rows of one's own instead of the shipped ones.
    """
    if "cpu" in backends:
        if rows is None:
            files = [read_rows(path) for path in shipped_row_files()]
            rows = [row for header, found in files for row in found if header.backend == "cpu"]
        yield from _cpu_sections([row for row in rows if row.status == "ok"])
    if "metal" in backends:
        yield from _m5_sections()
        yield from _published_sections()


def _cpu_sections(rows: list[Row]) -> Iterator[Section]:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        traced = pool.map(trace_row, rows, chunksize=4)
    found: dict[str, list[Check]] = {
        name: [] for name in ("sequenced, eager", "sequenced, compiled", "default")
    }
    for row, (peak, sequenced, compiled, problem) in zip(rows, traced, strict=True):
        label = row_label(row)
        columns = [("default", row.peak_bytes, peak)]
        way = "compiled" if compiled else "eager"
        columns.append((f"sequenced, {way}", row.sequenced_peak_bytes, sequenced))
        for name, measured, predicted in columns:
            if measured:
                found[name].append(Check(label, measured, predicted, problem=problem))
    for name, checks in found.items():
        yield Section(name, tuple(checks))


def trace_row(row: Row) -> tuple[int, int, bool, str]:
    """Default and sequenced peak of a row's step, whether it is compiled, and why it could not be traced."""
    from oomguard.model.cases import build_case
    from oomguard.model.step import build_step
    from oomguard.trace.engine import STEADY_STEPS, trace_built
    from oomguard.trace.memory import CPU

    built: Any
    try:
        if row.model is not None and row.step is not None:
            built = build_step(row.model, row.step, evaluated=False)
        else:
            built = build_case(row.case or "", evaluated=False)
        # As many steps as were measured: where tasks end, and with it the peak, differs from one to the next.
        found = trace_built(built, device=CPU, steady_steps=row.steps or STEADY_STEPS)
    except OomguardError as error:
        return 0, 0, False, str(error)
    return found.peak_bytes, found.sequenced_peak_bytes, found.compiled, ""


def _m5_sections() -> Iterator[Section]:
    from oomguard.calibration.swift import ROWS, predictions

    plain: list[Check] = []
    merged: list[Check] = []
    for row, result in predictions(read_rows(ROWS)[1]):
        measured = row.peak_bytes or 0
        small = "" if measured >= METAL_LEAST_PEAK_BYTES else "below 1 GB"
        check = Check(row_label(row), measured, result.peak_bytes, small)
        bare = row.step is not None and row.step.checkpoint.policy == "custom_function"
        (merged if bare else plain).append(check)
    yield Section("M5 Pro, without recompute", tuple(plain))
    yield Section("M5 Pro, custom_function", tuple(merged))


def _published_sections() -> Iterator[Section]:
    from oomguard.calibration.public_rows import OpRow, ScratchRow, all_public_rows, understood_all

    kinds = {OpRow: "published operations", ScratchRow: "published runs from scratch"}
    found: dict[str, list[Check]] = {name: [] for name in ("published LoRA peaks", *kinds.values())}
    for row in understood_all(all_public_rows()):
        if row.id not in LONG:
            found[kinds.get(type(row), "published LoRA peaks")].append(_published(row))
    for name, checks in found.items():
        yield Section(name, tuple(checks))


def _published(row: Published) -> Check:
    """A published peak beside its prediction; where the report only bounds the tokens, it must not be above that."""
    from oomguard.calibration.public import predict, predicted_bytes

    predicted = predicted_bytes(row, predict(row))
    problem = ""
    if row.at_most and row.peak_bytes > predicted:
        problem = f"at most {row.tokens} tokens, and reported above what those take"
    label = f"{row.id} {row.name}, {row.batch} x {row.tokens}"
    not_counted = "at most" if row.at_most else ""
    return Check(label, row.peak_bytes, predicted, not_counted, problem)
