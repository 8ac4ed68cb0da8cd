"""This machine's own calibration: rows measured here, and the coefficients fitted to them.

A calibration directory holds ``rows.jsonl`` (from ``oomguard calibrate`` and from training runs) and
``coefficients-BACKEND.json``, fitted beside the shipped profile, which holds where the local rows say little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from oomguard.errors import InputError
from oomguard.estimate.coefficients import Coefficients, Mode, local_path, local_rows_path, shipped
from oomguard.files.writing import Output, kept_in_own_folder
from oomguard.rows import ROW_FILE, Header, Row, append_row, read_begun

if TYPE_CHECKING:
    from oomguard.estimate.fit import Part

LOCAL_RIDGE = 0.01
MIN_LOCAL_ROWS = 4  # the shipped profile is held to where so few say little
LEAST_BAND = 0.04  # no band of so few rows is narrower than this either way
COEFFICIENTS_FILE = kept_in_own_folder("coefficients")


@dataclass(frozen=True)
class Learnt:
    """What became of a row: where it was kept, how many there are, the new fit if they made one that is used."""

    rows_path: Path
    rows: int
    coefficients: Coefficients | None


@dataclass(frozen=True)
class LocalFit:
    """What became of a fit: the coefficients that plans use from now on, and part by part why.

    ``used`` is false where no part of the fit is better than what is shipped, which is then used.
    """

    coefficients: Coefficients
    parts: tuple[Part, ...]
    used: bool


def learn(header: Header, row: Row) -> Learnt:
    """Adds a row to the local calibration, and fits again once there are enough.

    Raises:
        InputError: the local row file is damaged; nothing is added to it.
        OSError: the row cannot be written.
    """
    path = local_rows_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    Output(path, ROW_FILE).check_place()
    begun = read_begun(path)
    kept = begun[1] if begun else []
    append_row(path, header, row)
    rows = comparable([*kept, row], header)
    if not enough(rows):
        return Learnt(path, len(rows), None)
    found = fit_local(header, rows)
    return Learnt(path, len(rows), found.coefficients if found.used else None)


def comparable(rows: Sequence[Row], header: Header) -> list[Row]:
    """The latest row of each configuration that ran on the same backend, MLX version and machine."""
    same = {
        row.key: row
        for row in rows
        if row.status == "ok"
        and (row.backend, row.mlx, row.machine) == (header.backend, header.mlx, header.machine)
    }
    return [row for row in same.values() if row.model and row.step and row.peak_bytes]


def enough(rows: Sequence[Row]) -> bool:
    """Whether as many rows as a fit takes ran alike: all compiled, or all eager."""
    compiled = sum(1 for row in rows if row.step is not None and row.step.compiled)
    return max(compiled, len(rows) - compiled) >= MIN_LOCAL_ROWS


def fit_local(header: Header, rows: Sequence[Row]) -> LocalFit:
    """Fits rows of this machine beside the shipped profile, and keeps for every later plan what predicts better.

    Where nothing does, the shipped profile is used, and an earlier fit is deleted: it was made of fewer rows.

    Raises:
        InputError: too few rows, or the file cannot be written.
    """
    from oomguard.estimate.fit import fit_beside

    prior, path = shipped(header.backend), local_path(header.backend)
    found, parts = fit_beside(header, rows, prior, LOCAL_RIDGE, MIN_LOCAL_ROWS)
    used = found is not prior
    if used:
        widened = {
            way: _no_narrower(getattr(found, way), getattr(prior, way)) for way in ("compiled", "eager")
        }
        found = found.model_copy(update=widened)
        write_coefficients(found, path)
    else:
        path.unlink(missing_ok=True)
    return LocalFit(found, tuple(parts), used)


def _no_narrower(mode: Mode, prior: Mode) -> Mode:
    """Few rows agree by luck: a band of theirs is at least a little wide, and kinds without one keep the shipped."""
    if mode == prior:
        return prior
    bands = {
        kind: (min(low, 1 - LEAST_BAND), max(high, 1 + LEAST_BAND))
        for kind, (low, high) in mode.bands.items()
    }
    kinds = {**prior.bands, **bands}
    return mode.model_copy(
        update={"bands": kinds, "low": min(mode.low, prior.low), "high": max(mode.high, prior.high)}
    )


def write_coefficients(coefficients: Coefficients, path: Path) -> None:
    """Writes a coefficients file whole, or leaves what was there.

    Raises:
        InputError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write coefficients {path}: {error.strerror}") from error
    output = Output(path, COEFFICIENTS_FILE)
    output.check()
    output.write_text(coefficients.model_dump_json(by_alias=True, indent=1) + "\n")
