"""What a training run teaches the local calibration: one measured row."""

from __future__ import annotations

import shlex
import statistics
from pathlib import Path

from oomguard.estimate.learn import learn as add_to_calibration
from oomguard.guard import Guard
from oomguard.measure.blas import loaded_blas
from oomguard.measure.provenance import commit, machine, mlx_version, now, system
from oomguard.model.step import mlx_backend
from oomguard.model.trainer import TrainResult
from oomguard.rows import Header, Row

NEAR_LIMIT = 0.98


def why_not(result: TrainResult, guard: Guard) -> str:
    """Why a run is no measurement of its setting; empty when it is one."""
    if not result.settled:
        return "one step is too few to measure"
    peak = max(update.peak_bytes for update in result.settled)
    if peak >= NEAR_LIMIT * guard.memory_limit_bytes:
        return "the memory limit held its peak down"
    return ""


def learned_row(result: TrainResult) -> Row:
    """The run as a measured row: medians from its second step on."""
    settled = result.settled
    peaks = [update.peak_bytes for update in settled]
    seconds = [update.seconds for update in settled]
    backend = mlx_backend()
    return Row(
        model=result.settings.model,
        step=result.settings.step,
        peak_bytes=statistics.median_low(peaks),
        peak_low_bytes=min(peaks),
        peak_high_bytes=max(peaks),
        first_peak_bytes=result.updates[0].peak_bytes,
        active_bytes=statistics.median_low([update.active_bytes for update in settled]),
        cache_bytes=statistics.median_low([update.cache_bytes for update in settled]),
        step_seconds=statistics.median(seconds),
        step_seconds_spread=max(seconds) - min(seconds),
        steps=len(settled),
        mlx=mlx_version(),
        backend=backend,
        machine=machine(),
        blas=loaded_blas(backend),
        commit=commit(),
        date=now(),
    )


def learn(result: TrainResult, command: list[str]) -> Path:
    """Adds the run to this machine's calibration, which fits again once it has rows enough.

    Returns:
        The file of this user's rows.

    Raises:
        InputError: that file is damaged.
        OSError: the row cannot be written.
    """
    row = learned_row(result)
    header = Header(
        machine=row.machine,
        system=system(),
        mlx=row.mlx,
        backend=row.backend,
        commit=row.commit,
        date=row.date,
        command=shlex.join(command),
        note="training runs and calibrations of this user",
    )
    return add_to_calibration(header, row).rows_path
