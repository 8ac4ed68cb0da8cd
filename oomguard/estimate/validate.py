"""Predictions beside measurements, row by row, and whether they stay within the stated bounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from oomguard.errors import InputError
from oomguard.estimate.coefficients import Coefficients
from oomguard.estimate.peak import Estimate, estimate
from oomguard.rows import Row

MEDIAN_BOUND = 0.03
WORST_BOUND = {"cpu": 0.12, "metal": 0.08, "cuda": 0.12}
METAL_LEAST_PEAK_BYTES = 10**9  # what the Metal bounds speak of


@dataclass(frozen=True)
class Comparison:
    """One measured row and what was predicted for it; ``counted`` rows enter median and worst."""

    row: Row
    measured_bytes: int
    predicted_bytes: int
    low_bytes: int
    high_bytes: int
    counted: bool = True

    @property
    def error(self) -> float:
        """Share of the measured peak; positive where the prediction is too large."""
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def under_band(self) -> bool:
        """Whether the measured peak is above the band: the mistake that ends a run."""
        return self.measured_bytes > self.high_bytes


@dataclass(frozen=True)
class Validation:
    """A profile held against rows."""

    profile: str
    backend: str
    mlx: str
    comparisons: tuple[Comparison, ...]
    left_out: tuple[float, float]
    bounds: tuple[float, float]

    @property
    def median(self) -> float:
        return statistics.median(abs(c.error) for c in self.comparisons if c.counted)

    @property
    def worst(self) -> float:
        return max(abs(c.error) for c in self.comparisons if c.counted)

    @property
    def problems(self) -> list[str]:
        """Every bound that is missed, as a line for a person; empty when all hold."""
        found = []
        for name, value, bound in zip(("median", "worst"), self.left_out, self.bounds, strict=True):
            if value > bound:
                found.append(
                    f"{self.profile}: leave-one-out {name} {value:.1%} is above the bound {bound:.0%}"
                )
        for name, value, bound in zip(
            ("median", "worst"), (self.median, self.worst), self.bounds, strict=True
        ):
            if value > bound:
                found.append(f"{self.profile}: {name} {value:.1%} is above the bound {bound:.0%}")
        under = sum(1 for c in self.comparisons if c.counted and c.under_band)
        if under:
            found.append(f"{self.profile}: {under} rows were measured above their band")
        return found


def validate(
    coefficients: Coefficients,
    rows: Sequence[Row],
    predict: Callable[[Row], Estimate] | None = None,
) -> Validation:
    """Holds a profile against measured rows of the preset GPT.

    Args:
        coefficients: the profile.
        rows: measured rows; failed ones and named cases are left out.
        predict: another way to an estimate; the closed forms if not given.

    Raises:
        InputError: no row that counts: none was measured, or none of 1 GB or more on Metal.
    """
    comparisons = []
    for row in rows:
        if row.status != "ok" or row.model is None or row.step is None or not row.peak_bytes:
            continue
        found = (
            predict(row)
            if predict
            else estimate(row.model, row.step, coefficients, backend=coefficients.backend)
        )
        counted = coefficients.backend != "metal" or row.peak_bytes >= METAL_LEAST_PEAK_BYTES
        comparisons.append(
            Comparison(row, row.peak_bytes, found.peak_bytes, found.low_bytes, found.high_bytes, counted)
        )
    if not any(comparison.counted for comparison in comparisons):
        least = " of 1 GB or more" if comparisons else ""
        raise InputError(f"no measured row{least} to hold the {coefficients.profile} coefficients against")
    return Validation(
        profile=coefficients.profile,
        backend=coefficients.backend,
        mlx=coefficients.mlx,
        comparisons=tuple(comparisons),
        left_out=(coefficients.median_error, coefficients.worst_error),
        bounds=(MEDIAN_BOUND, WORST_BOUND[coefficients.backend]),
    )
