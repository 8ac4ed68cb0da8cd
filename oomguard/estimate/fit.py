"""Measured rows to coefficients: bounded, robust, with leave-one-out errors. The only place that needs scipy.

The peak of a row is the largest of its moments, each linear in the coefficients: what is held, plus scaled what
is alive and what is in flight there (``inventory.py``). The fit minimises the soft-L1 of log(predicted /
measured), so a row of 50 MB counts as one of 5 GB, and one odd row bends little. First ``alive`` on the
sequenced peaks, then, with those fixed, ``in_flight`` on the default peaks. Source: soft-L1 and the bounded trust
region are those of ``scipy.optimize.least_squares`` (Branch, Coleman & Li 1999).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from oomguard.errors import InputError
from oomguard.estimate.coefficients import Coefficients, Mode, Speed, step_kind
from oomguard.estimate.inventory import Backend, Inventory
from oomguard.estimate.traffic import step_flops, step_traffic_bytes
from oomguard.rows import Header, Row

Vector = NDArray[np.float64]

SOFT_ERROR = 0.03  # beyond 3% a row's pull grows linearly, not quadratically
RIDGE = 0.003  # a coefficient few rows reach stays near its start instead of wandering
MIN_ROWS = 8
LOW_MARGIN, HIGH_MARGIN = 0.99, 1.01
MIN_SPEED_ROWS = 4
# A fit of a few rows may miss by less than what is shipped by luck. It is used where it misses by a tenth less and by
# 0.1%, and where that is twice as much as it could be by chance (the standard error of the mean).
WORTH_REPLACING, WORTH_REPLACING_AT_ALL, SURE = 0.1, 0.001, 2.0
MIN_ROWS_FOR_RATES = (
    12  # with fewer, rates of one's own predict worse than the shipped ones scaled: see LOG.md
)

# A count is what the simulated evaluator holds; a device may hold somewhat less or more. Nothing can be in
# flight twice over, and the window only has what Metal's command buffers can touch.
ALIVE: dict[str, tuple[float, float]] = dict.fromkeys(("loss", "last", "inner", "end"), (2.0, 1.0))
IN_FLIGHT: dict[str, tuple[float, float]] = {**ALIVE, "window": (1.5, 0.6)}
"""Names, each with the most that is plausible and the start."""
MOST_SEQUENCED, SEQUENCED = 0.5, 0.1


@dataclass(frozen=True)
class Table:
    """Rows as arrays over (rows, moments): bytes held, and by coefficient bytes alive and in flight."""

    held: Vector
    alive: Vector
    in_flight: Vector

    def part(self, rows: Vector) -> Table:
        """Some of the rows, by number or mask."""
        return Table(self.held[rows], self.alive[rows], self.in_flight[rows])

    def predict(self, fitted: Fitted) -> Vector:
        """The peak of each row, in bytes."""
        sizes = self.held + self.alive @ fitted.alive + self.in_flight @ fitted.in_flight
        return np.asarray(sizes.max(axis=1))


@dataclass(frozen=True)
class Fitted:
    """Scales over ``ALIVE`` and over ``IN_FLIGHT``."""

    alive: Vector
    in_flight: Vector
    sequenced: float = SEQUENCED

    @classmethod
    def of(cls, mode: Mode) -> Fitted:
        """The scales of a fitted mode, as a prior for another fit."""
        return cls(
            np.array([mode.alive.get(name, 1.0) for name in ALIVE]),
            np.array([mode.in_flight.get(name, 0.0) for name in IN_FLIGHT]),
            mode.sequenced,
        )

    @classmethod
    def plausible(cls) -> Fitted:
        """What the simulated evaluator says, before any row."""
        return cls(_starts(ALIVE), _starts(IN_FLIGHT))


def _starts(bounds: dict[str, tuple[float, float]]) -> Vector:
    return np.array([start for _, start in bounds.values()])


def _tops(bounds: dict[str, tuple[float, float]]) -> Vector:
    return np.array([top for top, _ in bounds.values()])


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


def tabulate(rows: Sequence[Row], backend: Backend) -> Table:
    """The moments of every row; rows with fewer moments are filled with moments that hold nothing."""
    moments = []
    for row in rows:
        assert row.model is not None
        assert row.step is not None
        moments.append(list(Inventory(row.model, row.step, backend).moments()))
    shape = (len(rows), max(len(found) for found in moments))
    held = np.zeros(shape)
    alive, in_flight = np.zeros((*shape, len(ALIVE))), np.zeros((*shape, len(IN_FLIGHT)))
    kinds = list(IN_FLIGHT)
    for i, found in enumerate(moments):
        for j, moment in enumerate(found):
            held[i, j] = moment.held_bytes
            alive[i, j, kinds.index(moment.kind)] = moment.alive_bytes
            in_flight[i, j, kinds.index(moment.kind)] = moment.in_flight_bytes
            in_flight[i, j, kinds.index("window")] = moment.window_bytes
    return Table(held, alive, in_flight)


def solve(base: Vector, work: Vector, measured: Vector, top: Vector, start: Vector, ridge: float) -> Vector:
    """Scales between 0 and ``top`` with which ``base + work @ scales`` explains the measured peaks best.

    Args:
        base: (rows, moments) bytes.
        work: (rows, moments, scales) bytes.
        measured: (rows,) bytes.
        start: where to begin, and what ``ridge`` holds the scales to where rows say little.
    """
    weight = ridge * np.sqrt(len(measured))
    rows = np.arange(len(measured))

    def residuals(scales: Vector) -> Vector:
        misses = np.log((base + work @ scales).max(axis=1) / measured)
        return np.concatenate([misses, weight * (scales - start) / top])

    def jacobian(scales: Vector) -> Vector:
        sizes = base + work @ scales
        largest = sizes.argmax(axis=1)
        slopes = work[rows, largest] / sizes[rows, largest][:, None]
        return np.concatenate([slopes, np.diag(weight / top)])

    return np.asarray(
        least_squares(
            residuals,
            np.clip(start, 1e-6 * top, top * (1 - 1e-6)),
            jac=jacobian,
            bounds=(np.zeros_like(top), top),
            loss="soft_l1",
            f_scale=SOFT_ERROR,
            x_scale=top,
            max_nfev=60,
        ).x
    )


def fit_scales(table: Table, peaks: Peaks, prior: Fitted, ridge: float) -> Fitted:
    """``alive`` and the share in flight from sequenced peaks, then ``in_flight`` from default peaks.

    Without sequenced rows only the prior tells the two apart: both are fitted at once, held to it.
    """
    known = np.isfinite(peaks.sequenced)
    if not known.any():
        work = np.concatenate([table.alive, table.in_flight], axis=2)
        top = np.concatenate([_tops(ALIVE), _tops(IN_FLIGHT)])
        start = np.concatenate([prior.alive, prior.in_flight])
        both = solve(table.held, work, peaks.default, top, start, ridge)
        return Fitted(both[: len(ALIVE)], both[len(ALIVE) :], prior.sequenced)
    part = table.part(known)
    in_flight = (part.in_flight @ prior.in_flight)[:, :, None]
    found = solve(
        part.held,
        np.concatenate([part.alive, in_flight], axis=2),
        peaks.sequenced[known],
        np.append(_tops(ALIVE), MOST_SEQUENCED),
        np.append(prior.alive, prior.sequenced),
        ridge,
    )
    base = table.held + table.alive @ found[:-1]
    scales = solve(base, table.in_flight, peaks.default, _tops(IN_FLIGHT), prior.in_flight, ridge)
    return Fitted(found[:-1], scales, float(found[-1]))


def leave_one_out(table: Table, peaks: Peaks, prior: Fitted, ridge: float) -> Vector:
    """log(predicted / measured) of each default peak, predicted by a fit that never saw the row."""
    misses = np.empty(len(peaks.default))
    for i in range(len(misses)):
        rest = np.arange(len(misses)) != i
        found = fit_scales(table.part(rest), Peaks(peaks.default[rest], peaks.sequenced[rest]), prior, ridge)
        misses[i] = np.log(table.part(~rest).predict(found)[0] / peaks.default[i])
    return misses


def fit_mode(
    rows: Sequence[Row],
    backend: Backend,
    prior: Fitted | None = None,
    ridge: float = RIDGE,
    least: int = MIN_ROWS,
) -> tuple[Mode, Vector]:
    """Coefficients of rows that all ran compiled, or all eagerly.

    Args:
        rows: measured rows.
        backend: whose graph they ran.
        prior: what to stay near where the rows say little; another profile's scales, for a table of few rows.
        ridge: how near: a coefficient off by its whole bound costs as much as every row off by ``ridge``.
        least: rows without which nothing is fitted.

    Returns:
        The mode, and the leave-one-out error of each row as a share of its measured peak (positive: predicted
        too large).
    """
    if len(rows) < least:
        raise InputError(f"{len(rows)} rows are too few to fit; {least} is the least")
    table, peaks = tabulate(rows, backend), Peaks.of(rows)
    prior = prior or Fitted.plausible()
    fitted = fit_scales(table, peaks, prior, ridge)
    misses = leave_one_out(table, peaks, prior, ridge)
    errors = np.expm1(misses)
    low, high = _band(misses)
    mode = Mode(
        alive=_named(ALIVE, fitted.alive),
        in_flight=_named(IN_FLIGHT, fitted.in_flight),
        sequenced=_rounded(fitted.sequenced),
        rows=len(rows),
        median_error=_rounded(float(np.median(np.abs(errors)))),
        worst_error=_rounded(float(np.abs(errors).max())),
        low=low,
        high=high,
        bands=_bands(rows, misses),
    )
    return mode, errors


def _band(misses: Vector) -> tuple[float, float]:
    """What multiplies each of these predictions to below and to above what was measured."""
    low, high = float(np.exp(-misses.max())), float(np.exp(-misses.min()))
    return _rounded(min(1.0, low) * LOW_MARGIN), _rounded(max(1.0, high) * HIGH_MARGIN)


def _bands(rows: Sequence[Row], misses: Vector) -> dict[str, tuple[float, float]]:
    kinds = np.array([step_kind(row.step) if row.step else "" for row in rows])
    enough = [kind for kind in sorted(set(kinds)) if (kinds == kind).sum() >= MIN_ROWS]
    return {kind: _band(misses[kinds == kind]) for kind in enough}


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
    profile: str,
    header: Header,
    rows: Sequence[Row],
    prior: Coefficients | None = None,
    ridge: float = RIDGE,
    least: int = MIN_ROWS,
) -> Refit:
    """Fits everything a profile holds to measured rows of one backend and MLX version.

    Compiled and eager rows are fitted apart; a way of running with fewer than ``least``
    rows takes the prior's scales, or the other way's.

    Args:
        profile: its name.
        header: what made the rows; gives backend, MLX version and machine.
        rows: measured rows of the preset GPT; failed rows and named cases are left out.
        prior: a profile whose scales hold where these rows say little.
        ridge: how strongly.
        least: rows without which nothing is fitted.

    Raises:
        InputError: fewer usable rows than that either way.
    """
    usable = [row for row in rows if row.status == "ok" and row.peak_bytes and row.model and row.step]
    modes: dict[bool, Mode] = {}
    used: list[Row] = []
    errors: list[float] = []
    for compiled in (True, False):
        own = [row for row in usable if row.step is not None and row.step.compiled == compiled]
        if len(own) < least:
            continue
        start = _prior_scales(prior, compiled, header.backend)
        modes[compiled], misses = fit_mode(own, header.backend, start, ridge, least)
        used += own
        errors += misses.tolist()
    if not modes:
        raise InputError(
            f"{len(usable)} usable rows are too few to fit {profile}; measure at least {least} that run alike"
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
        compiled=modes.get(True) or _instead(prior, True, header.backend) or modes[False],
        eager=modes.get(False) or _instead(prior, False, header.backend) or modes[True],
        speed=fit_speed(usable, header.backend),
        cache_bytes=round(statistics.median([row.cache_bytes or 0 for row in used])),
        ranges=_ranges(used),
    )
    return Refit(coefficients, tuple(used), tuple(errors))


def _instead(prior: Coefficients | None, compiled: bool, backend: Backend) -> Mode | None:
    """What the prior knows of a way of running that has too few rows."""
    return prior.mode(compiled) if prior is not None and prior.backend == backend else None


def _prior_scales(prior: Coefficients | None, compiled: bool, backend: Backend) -> Fitted | None:
    """Another profile's scales; of another backend only those of the graph, since each has its own window."""
    if prior is None:
        return None
    scales = Fitted.of(prior.mode(compiled))
    if prior.backend == backend:
        return scales
    window = np.array([start if name == "window" else 0.0 for name, (_, start) in IN_FLIGHT.items()])
    return Fitted(scales.alive, window, scales.sequenced)


def fit_speed(rows: Sequence[Row], backend: Backend) -> Speed:
    """Two rates that explain measured step times: FLOPs a second (of each dtype) and bytes a second.

    Raises:
        InputError: fewer than 4 rows have a step time.
    """
    times = Times.of(rows, backend)
    found = times.rates()
    return Speed(
        flops_per_second={
            dtype: _significant(rate) for dtype, rate in zip(times.dtypes, found, strict=False)
        },
        bytes_per_second=_significant(found[-1]),
        rows=len(times.seconds),
        median_error=_median_error(times.misses(found)),
    )


@dataclass(frozen=True)
class Times:
    """Measured step times beside what the steps compute and move: FLOPs by dtype, then bytes."""

    dtypes: Sequence[str]
    work: Vector
    seconds: Vector

    @classmethod
    def of(cls, rows: Sequence[Row], backend: Backend) -> Times:
        """The rows that have a step time.

        Raises:
            InputError: fewer than 4 have.
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
        return cls(dtypes, work, np.array([time for _, time in timed]))

    def misses(self, rates: Vector) -> Vector:
        """log(predicted / measured) of each row."""
        return np.asarray(np.log(self.work @ (1 / rates) / self.seconds))

    def rates(self) -> Vector:
        """FLOPs a second of each dtype and bytes a second that explain the times best."""
        start = np.full(len(self.dtypes), 2 * self.work[:, :-1].sum() / self.seconds.sum())
        found = least_squares(
            lambda log_rates: self.misses(np.exp(log_rates)),
            np.log(np.append(start, 1e10)),
            loss="soft_l1",
            f_scale=0.2,
        ).x
        return np.asarray(np.exp(np.clip(found, np.log(1e6), np.log(1e16))))

    def rates_of(self, speed: Speed) -> Vector:
        """The rates of a fitted speed, in the order of ``work``."""
        flops = [speed.flops_per_second.get(d) or min(speed.flops_per_second.values()) for d in self.dtypes]
        return np.array([*flops, speed.bytes_per_second])

    def slower(self, speed: Speed) -> float:
        """How many times as long these steps take as a speed says."""
        return float(np.exp(-np.median(self.misses(self.rates_of(speed)))))

    def left_out(self, fit: Callable[[Times], Vector]) -> Vector:
        """The miss of each row, predicted with rates that were fitted to the others."""
        found = np.empty(len(self.seconds))
        for i in range(len(found)):
            rest = np.arange(len(found)) != i
            others = Times(self.dtypes, self.work[rest], self.seconds[rest])
            found[i] = Times(self.dtypes, self.work[~rest], self.seconds[~rest]).misses(fit(others))[0]
        return found


@dataclass(frozen=True)
class Part:
    """One part of a profile fitted beside the shipped one: how far off either is on rows neither has seen.

    Errors are medians of the rows' shares, leave-one-out for the fit. ``better``: the fit is used.
    """

    name: str
    error: float
    shipped_error: float
    better: bool


def _better(misses: Vector, others: Vector) -> bool:
    """Whether these misses are surely smaller than the other ones of the same rows."""
    gains = np.abs(others) - np.abs(misses)
    chance = SURE * gains.std(ddof=1) / np.sqrt(len(gains))
    least = WORTH_REPLACING * np.abs(others).mean() + WORTH_REPLACING_AT_ALL
    return bool(gains.mean() > max(chance, least))


def _compared(name: str, misses: Vector, shipped_misses: Vector) -> Part:
    return Part(name, _median_error(misses), _median_error(shipped_misses), _better(misses, shipped_misses))


def fit_beside(
    header: Header, rows: Sequence[Row], shipped: Coefficients, ridge: float, least: int
) -> tuple[Coefficients, list[Part]]:
    """A profile of one machine's rows that takes of a fit only what predicts better than what is shipped.

    Compiled steps, eager steps and speed are judged apart, each by leave-one-out: of a few rows that ran on a busy
    machine a fit can be worse than no fit at all.

    Args:
        header, rows, ridge, least: as for ``fit_profile``.
        shipped: the profile that is used otherwise.

    Returns:
        The profile, and what was compared; ``shipped`` itself where nothing is better.

    Raises:
        InputError: too few rows.
    """
    found = fit_profile("local", header, rows, prior=shipped, ridge=ridge, least=least)
    own = found.coefficients
    parts, taken = [], {}
    for way, compiled in (("compiled", True), ("eager", False)):
        alike = [
            i for i, row in enumerate(found.rows) if row.step is not None and row.step.compiled == compiled
        ]
        if alike:
            table = tabulate([found.rows[i] for i in alike], header.backend)
            measured = np.array([found.rows[i].peak_bytes for i in alike], dtype=float)
            shipped_misses = np.log(table.predict(Fitted.of(shipped.mode(compiled))) / measured)
            misses = np.log1p(np.array([found.errors[i] for i in alike]))
            parts.append(_compared(f"peaks of {way} steps", misses, shipped_misses))
        taken[way] = own.mode(compiled) if alike and parts[-1].better else shipped.mode(compiled)
    speed, part = fit_speed_beside(rows, header.backend, shipped.speed)
    parts.append(part)
    if not any(part.better for part in parts):
        return shipped, parts
    if any(part.better for part in parts[:-1]):
        ranges = _joined(own.ranges, shipped.ranges)
        cache = own.cache_bytes or shipped.cache_bytes
        return own.model_copy(update={**taken, "speed": speed, "ranges": ranges, "cache_bytes": cache}), parts
    same = {"profile": f"{shipped.profile}, speeds local", "mlx": header.mlx, "device": header.machine}
    return shipped.model_copy(update={**same, "backend": header.backend, "speed": speed}), parts


def fit_speed_beside(rows: Sequence[Row], backend: Backend, shipped: Speed) -> tuple[Speed, Part]:
    """The speed that predicts rows best that it has not seen: as shipped, so many times as fast, or two new rates."""
    times = Times.of([row for row in rows if row.model and row.step], backend)
    prior = times.rates_of(shipped)
    misses = times.left_out(lambda others: prior / others.slower(shipped))
    rates = prior / times.slower(shipped)
    if len(times.seconds) >= MIN_ROWS_FOR_RATES and _better(fitted := times.left_out(Times.rates), misses):
        misses, rates = fitted, times.rates()
    part = _compared("step times", misses, times.misses(prior))
    if not part.better:
        return shipped, part
    # A dtype without a row is taken to be faster or slower by as much as those that have one.
    ratio = float(np.exp(np.mean(np.log(rates[:-1] / prior[:-1]))))
    flops = {dtype: _significant(rate * ratio) for dtype, rate in shipped.flops_per_second.items()}
    flops |= {dtype: _significant(rate) for dtype, rate in zip(times.dtypes, rates, strict=False)}
    return Speed(
        flops_per_second=flops,
        bytes_per_second=_significant(rates[-1]),
        rows=len(times.seconds),
        median_error=part.error,
    ), part


def _median_error(misses: Vector) -> float:
    return _rounded(float(np.median(np.abs(np.expm1(misses)))))


def _joined(
    one: dict[str, tuple[float, float]], other: dict[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    """Ranges that hold both."""
    return {name: (min(one[name][0], low), max(one[name][1], high)) for name, (low, high) in other.items()}


def _ranges(rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    features = [Inventory(row.model, row.step).features() for row in rows if row.model and row.step]
    return {name: (min(f[name] for f in features), max(f[name] for f in features)) for name in features[0]}


def _named(names: Iterable[str], scales: Vector) -> dict[str, float]:
    return {name: round(float(scale), 4) for name, scale in zip(names, scales, strict=True)}


def _rounded(value: float) -> float:
    return round(value, 4)


def _significant(rate: float) -> float:
    return float(f"{rate:.4g}")
