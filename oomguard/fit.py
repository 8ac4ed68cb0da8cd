"""Measured rows to coefficients: bounded, robust, with leave-one-out errors. The only place that needs scipy.

The peak of a row is the largest of its moments, each linear in the coefficients:
``held + sum(alive[k] * work[k])``. The fit minimises the soft-L1 of log(predicted / measured), so a row of 50 MB
counts as one of 5 GB, and one odd row bends little. First ``alive`` on the sequenced peaks, then, with those
fixed, ``in_flight`` on the default peaks. Source: soft-L1 and the bounded trust region are those of
``scipy.optimize.least_squares`` (Branch, Coleman & Li 1999).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from oomguard.coefficients import Coefficients, Mode, Speed
from oomguard.config import OPTIMIZERS
from oomguard.errors import InputError
from oomguard.inventory import Backend, Inventory
from oomguard.rows import Header, Row
from oomguard.traffic import step_flops, step_traffic_bytes

Vector = NDArray[np.float64]

SOFT_ERROR = 0.03  # beyond 3% a row's pull grows linearly, not quadratically
RIDGE = 1e-3  # a coefficient no row reaches stays at its start instead of wandering
MIN_ROWS = 8
LOW_MARGIN, HIGH_MARGIN = 0.98, 1.02
MIN_SPEED_ROWS = 4

# Name: (most that is plausible alive, alive at the start, most in flight, in flight at the start). The window
# holds about 50 kernels' outputs on the CPU (10 tasks of 10 dispatches, 2 a kernel), so no more in flight.
BOUNDS: dict[str, tuple[float, float, float, float]] = {
    "logits": (6, 3, 12, 1),
    "head_stream": (16, 4, 50, 5),
    "mlp_stream": (16, 4, 50, 5),
    "mlp_wide": (8, 2, 20, 2),
    "head_logits": (4, 1, 6, 1),
    "attention_stream": (16, 3, 50, 5),
    "attention_scores": (6, 2, 12, 1),
    "block_weights": (3, 1, 6, 1),
    "recomputed_stream": (16, 2, 30, 2),
    "recomputed_wide": (8, 1, 12, 1),
    "window": (1e-9, 0, 1.5, 0.6),
    **{f"update_{optimizer}": (8.0, 1.0, 12.0, 1.0) for optimizer in OPTIMIZERS},
}
NAMES = tuple(BOUNDS)


@dataclass(frozen=True)
class Table:
    """Rows as arrays: (rows, moments) bytes held, (rows, moments, coefficients) bytes of work, measured peaks."""

    held: Vector
    work: Vector

    def predict(self, counts: Vector) -> Vector:
        """The peak of each row, in bytes."""
        return np.asarray((self.held + self.work @ counts).max(axis=1))

    def slope(self, counts: Vector) -> tuple[Vector, Vector]:
        """Peaks, and their derivative by each coefficient at the largest moment."""
        sizes = self.held + self.work @ counts
        top = sizes.argmax(axis=1)
        rows = np.arange(len(top))
        return sizes[rows, top], self.work[rows, top]

    def without(self, row: int) -> Table:
        return Table(np.delete(self.held, row, axis=0), np.delete(self.work, row, axis=0))


def tabulate(rows: Sequence[Row], backend: Backend) -> Table:
    """The moments of every row; rows with fewer moments are filled with moments that hold nothing."""
    moments = []
    for row in rows:
        assert row.model is not None
        assert row.step is not None
        moments.append(list(Inventory(row.model, row.step, backend).moments()))
    most = max(len(found) for found in moments)
    held = np.zeros((len(rows), most))
    work = np.zeros((len(rows), most, len(NAMES)))
    for i, found in enumerate(moments):
        for j, moment in enumerate(found):
            held[i, j] = moment.held_bytes
            for name, size in moment.work.items():
                work[i, j, NAMES.index(name)] = size
    return Table(held, work)


def solve(
    table: Table, measured: Vector, base: Vector, top: Vector, starts: Sequence[Vector], ridge: float
) -> Vector:
    """Coefficients between 0 and ``top`` that, added to ``base``, explain the measured peaks best.

    The largest moment changes with the coefficients, so the problem has several local minima: each start is
    tried, the best is kept. ``ridge`` holds the coefficients to the first start where rows say little.
    """
    weight = ridge * np.sqrt(len(measured))

    def residuals(found: Vector) -> Vector:
        misses = np.log(table.predict(base + found) / measured)
        return np.concatenate([misses, weight * (found - starts[0]) / top])

    def jacobian(found: Vector) -> Vector:
        peaks, slopes = table.slope(base + found)
        return np.concatenate([slopes / peaks[:, None], np.diag(weight / top)])

    best: tuple[float, Vector] | None = None
    for start in starts:
        solution = least_squares(
            residuals,
            np.clip(start, 1e-6 * top, top * (1 - 1e-6)),
            jac=jacobian,
            bounds=(np.zeros_like(top), top),
            loss="soft_l1",
            f_scale=SOFT_ERROR,
            x_scale=top,
            max_nfev=60,
        )
        if best is None or solution.cost < best[0]:
            best = (float(solution.cost), solution.x)
    assert best is not None
    return best[1]


def _column(column: int) -> Vector:
    return np.array([BOUNDS[name][column] for name in NAMES], dtype=float)


@dataclass(frozen=True)
class Fitted:
    """Two vectors over ``NAMES``."""

    alive: Vector
    in_flight: Vector

    @property
    def total(self) -> Vector:
        return self.alive + self.in_flight

    @classmethod
    def of(cls, mode: Mode) -> Fitted:
        """The counts of a fitted mode, as a prior for another fit."""
        return cls(
            np.array([mode.alive.get(name, 0.0) for name in NAMES]),
            np.array([mode.in_flight.get(name, 0.0) for name in NAMES]),
        )

    @classmethod
    def plausible(cls) -> Fitted:
        """What reading the graph suggests, before any row."""
        return cls(_column(1), _column(3))


@dataclass(frozen=True)
class Peaks:
    """What was measured of each row; NaN where a column was not."""

    default: Vector
    sequenced: Vector

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Peaks:
        def column(read: Callable[[Row], int | None]) -> Vector:
            return np.array([float(read(row) or np.nan) for row in rows])

        return cls(column(lambda row: row.peak_bytes), column(lambda row: row.sequenced_peak_bytes))


def fit_counts(table: Table, peaks: Peaks, prior: Fitted, ridge: float, warm: Fitted | None = None) -> Fitted:
    """``alive`` from sequenced peaks, then ``in_flight`` from default peaks.

    Without sequenced rows nothing tells the two apart: all is fitted to the default peaks as ``alive``.
    """
    known = np.isfinite(peaks.sequenced)
    if not known.any():
        return _fit_unsequenced(table, peaks, prior, ridge)
    chosen = Table(table.held[known], table.work[known])
    starts = [prior.alive, warm.alive] if warm else _around(prior.alive)
    alive = solve(chosen, peaks.sequenced[known], 0 * prior.alive, _column(0), starts, ridge)
    starts = [prior.in_flight, warm.in_flight] if warm else _around(prior.in_flight)
    return Fitted(alive, solve(table, peaks.default, alive, _column(2), starts, ridge))


def _fit_unsequenced(table: Table, peaks: Peaks, prior: Fitted, ridge: float) -> Fitted:
    """Both at once, held to the prior: without sequenced peaks only the prior tells graph from window."""
    twice = Table(table.held, np.concatenate([table.work, table.work], axis=2))
    top = np.concatenate([_column(0), _column(2)])
    start = np.concatenate([prior.alive, prior.in_flight])
    found = solve(twice, peaks.default, 0 * top, top, [start], ridge)
    return Fitted(*np.split(found, 2))


def _around(start: Vector) -> list[Vector]:
    return [start, start / 2, start * 2]


def leave_one_out(table: Table, peaks: Peaks, prior: Fitted, ridge: float, fitted: Fitted) -> Vector:
    """log(predicted / measured) of each default peak, predicted by a fit that never saw the row."""
    misses = np.empty(len(peaks.default))
    for i in range(len(misses)):
        rest = Peaks(np.delete(peaks.default, i), np.delete(peaks.sequenced, i))
        found = fit_counts(table.without(i), rest, prior, ridge, warm=fitted)
        one = Table(table.held[i : i + 1], table.work[i : i + 1])
        misses[i] = np.log(one.predict(found.total)[0] / peaks.default[i])
    return misses


def fit_mode(
    rows: Sequence[Row], backend: Backend, prior: Fitted | None = None, ridge: float = RIDGE
) -> tuple[Mode, Vector]:
    """Coefficients of rows that all ran compiled, or all eagerly.

    Args:
        rows: measured rows.
        backend: whose graph they ran.
        prior: what to stay near where the rows say little; another profile's counts, for a table of few rows.
        ridge: how near: a coefficient off by its whole bound costs as much as every row off by ``ridge``.

    Returns:
        The mode, and the leave-one-out error of each row as a share of its measured peak (positive: predicted
        too large).
    """
    if len(rows) < MIN_ROWS:
        raise InputError(f"{len(rows)} rows are too few to fit; {MIN_ROWS} is the least")
    table, peaks = tabulate(rows, backend), Peaks.of(rows)
    prior = prior or Fitted.plausible()
    fitted = fit_counts(table, peaks, prior, ridge)
    misses = leave_one_out(table, peaks, prior, ridge, fitted)
    errors = np.expm1(misses)
    mode = Mode(
        alive=_named(fitted.alive),
        in_flight=_named(fitted.in_flight),
        rows=len(rows),
        median_error=_rounded(float(np.median(np.abs(errors)))),
        worst_error=_rounded(float(np.abs(errors).max())),
        low=_rounded(min(1.0, float(np.exp(-misses.max()))) * LOW_MARGIN),
        high=_rounded(max(1.0, float(np.exp(-misses.min()))) * HIGH_MARGIN),
    )
    return mode, errors


@dataclass(frozen=True)
class Refit:
    """A profile and how it does on its own rows.

    ``rows`` and ``errors`` go together: the leave-one-out error of each row's default peak, as a share of what
    was measured, positive where the prediction was too large.
    """

    coefficients: Coefficients
    rows: tuple[Row, ...]
    errors: tuple[float, ...]


def fit_profile(
    profile: str, header: Header, rows: Sequence[Row], prior: Coefficients | None = None, ridge: float = RIDGE
) -> Refit:
    """Fits everything a profile holds to measured rows of one backend and MLX version.

    Compiled and eager rows are fitted apart; a way of running with fewer than 8 rows takes the other's counts.

    Args:
        profile: its name.
        header: what made the rows; gives backend, MLX version and machine.
        rows: measured rows of the preset GPT; failed rows and named cases are left out.
        prior: a profile whose counts hold where these rows say little.
        ridge: how strongly.

    Raises:
        InputError: fewer than 8 usable rows either way.
    """
    usable = [row for row in rows if row.status == "ok" and row.peak_bytes and row.model and row.step]
    modes: dict[bool, Mode] = {}
    used: list[Row] = []
    errors: list[float] = []
    for compiled in (True, False):
        own = [row for row in usable if row.step is not None and row.step.compiled == compiled]
        if len(own) < MIN_ROWS:
            continue
        start = _prior_counts(prior, compiled, header.backend)
        modes[compiled], misses = fit_mode(own, header.backend, start, ridge)
        used += own
        errors += misses.tolist()
    if not modes:
        raise InputError(
            f"{len(usable)} usable rows are too few to fit {profile}; measure at least {MIN_ROWS} that run alike"
        )
    coefficients = Coefficients(
        schema="oomguard.coefficients/1",
        profile=profile,
        backend=header.backend,
        mlx=header.mlx,
        device=header.machine,
        rows=len(used),
        median_error=_rounded(statistics.median(map(abs, errors))),
        worst_error=_rounded(max(map(abs, errors))),
        compiled=modes.get(True) or modes[False],
        eager=modes.get(False) or modes[True],
        speed=fit_speed(usable, header.backend),
        cache_bytes=round(statistics.median([row.cache_bytes or 0 for row in used])),
        ranges=_ranges(used),
    )
    return Refit(coefficients, tuple(used), tuple(errors))


def _prior_counts(prior: Coefficients | None, compiled: bool, backend: Backend) -> Fitted | None:
    """Another profile's counts; from another backend only those of the graph, since each has its own window."""
    if prior is None:
        return None
    counts = Fitted.of(prior.mode(compiled))
    if prior.backend == backend:
        return counts
    window = np.array([BOUNDS[name][3] if name == "window" else 0.0 for name in NAMES])
    return Fitted(counts.alive, window)


def fit_speed(rows: Sequence[Row], backend: Backend) -> Speed:
    """Two rates that explain measured step times: FLOPs a second (of each dtype) and bytes a second.

    Raises:
        InputError: fewer than 4 rows have a step time.
    """
    timed = [(row, row.step_seconds) for row in rows if row.step_seconds]
    if len(timed) < MIN_SPEED_ROWS:
        raise InputError(f"{len(timed)} rows with a step time are too few to fit a speed")
    dtypes = sorted({row.step.dtype for row, _ in timed if row.step})
    work = np.zeros((len(timed), len(dtypes) + 1))
    for i, (row, _) in enumerate(timed):
        assert row.model is not None
        assert row.step is not None
        inventory = Inventory(row.model, row.step, backend)
        work[i, dtypes.index(row.step.dtype)] = step_flops(inventory)
        work[i, -1] = step_traffic_bytes(inventory)
    seconds = np.array([time for _, time in timed])

    def misses(log_rates: Vector) -> Vector:
        return np.asarray(np.log(work @ np.exp(-log_rates) / seconds))

    start = np.log(np.array([2 * work[:, :-1].sum() / seconds.sum()] * len(dtypes) + [1e10]))
    found = least_squares(misses, start, loss="soft_l1", f_scale=0.2).x
    rates = np.exp(np.clip(found, np.log(1e6), np.log(1e16)))
    return Speed(
        flops_per_second={dtype: _significant(rate) for dtype, rate in zip(dtypes, rates, strict=False)},
        bytes_per_second=_significant(rates[-1]),
        rows=len(timed),
        median_error=_rounded(float(np.median(np.abs(np.expm1(misses(found)))))),
    )


def _ranges(rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    features = [Inventory(row.model, row.step).features() for row in rows if row.model and row.step]
    return {name: (min(f[name] for f in features), max(f[name] for f in features)) for name in features[0]}


def _named(counts: Vector) -> dict[str, float]:
    return {name: round(float(count), 4) for name, count in zip(NAMES, counts, strict=True)}


def _rounded(value: float) -> float:
    return round(value, 4)


def _significant(rate: float) -> float:
    return float(f"{rate:.4g}")
