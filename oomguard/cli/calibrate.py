"""``oomguard calibrate``: measure and fit on this machine."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from oomguard.cli.options import number, refuse_beside
from oomguard.errors import InputError
from oomguard.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


@click.command("calibrate", short_help="Measure and fit on this machine; used from then on.")
@click.option(
    "--minutes",
    type=number(0.5, 24 * 60),
    default="5",
    show_default=True,
    help="How long to measure.",
)
@click.option(
    "--forget", is_flag=True, help="Delete this machine's calibration; the shipped one is used again."
)
def command(minutes: float, forget: bool) -> int:
    """Measure training steps on this machine for a few minutes, fit the estimate to
    them, and use in every later plan what predicts them better than what ships:
    each row is predicted by a fit that never saw it. After an upgrade of MLX run
    it again: rows of another version stay, and count no more.

    Rows of training runs that were learnt from count too. Stop it at any moment:
    finished rows stay, and the next start goes on from there.
    """
    from oomguard.estimate.coefficients import local_rows_path
    from oomguard.estimate.learn import MIN_LOCAL_ROWS, comparable, enough, fit_local

    if forget:
        refuse_beside(("minutes",), "--forget measures nothing")
        return _forget()
    from oomguard.measure import provenance
    from oomguard.rows import read_rows

    path = local_rows_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    _measure(minutes)
    header, rows = read_rows(path)
    here = {"mlx": provenance.mlx_version(), "machine": provenance.machine(), "backend": rows[-1].backend}
    latest = header.model_copy(update=here)
    own = comparable(rows, latest)
    if not enough(own):
        click.echo(f"{len(own)} rows so far; {MIN_LOCAL_ROWS} are needed for a fit. Run it again to go on.")
        return 1
    found = fit_local(latest, own)
    click.echo(
        f"Fitted {len(own)} rows measured here ({latest.backend}, MLX {latest.mlx}), each left out in turn:"
    )
    for part in found.parts:
        errors = f"the fit is {part.error:.1%} off in the median, what ships {part.shipped_error:.1%}"
        click.echo(f"  {part.name}: {errors}; {'replaced' if part.better else 'kept as shipped'}")
    if found.used:
        click.echo(f"Kept in {path.parent}; `oomguard plan` uses it from now on.")
    else:
        click.echo(
            f"No part predicts better, so plans use the shipped coefficients; the rows stay in {path.parent}."
        )
    return 0


def _forget() -> int:
    from oomguard.estimate.coefficients import data_dir

    gone = [
        path for path in (data_dir() / "rows.jsonl", *data_dir().glob("coefficients-*.json")) if path.exists()
    ]
    for path in gone:
        path.unlink()
    click.echo(f"Deleted {len(gone)} files in {data_dir()}." if gone else "There is no local calibration.")
    return 0


def _measure(minutes: float) -> None:
    """Measures until the time is over; every row is on disk before the next starts."""
    from oomguard.calibration.local_sweep import local_tasks
    from oomguard.estimate.coefficients import local_rows_path, shipped
    from oomguard.machine.device import find_device
    from oomguard.measure import Settings, sweep
    from oomguard.measure.blas import missing_blas_hint

    if hint := missing_blas_hint():
        click.echo(f"note: {hint}", err=True)
    device = find_device(None)
    deadline = time.monotonic() + minutes * 60
    tasks = local_tasks(device, shipped(device.backend), minutes * 60)
    if not tasks:
        raise InputError(f"{minutes:g} minutes are too short to measure anything here; try --minutes 5")
    measured = 0
    with _Bar(len(tasks)) as bar:
        for progress in sweep(
            tasks,
            local_rows_path(),
            Settings(steps=3),
            command=f"oomguard calibrate --minutes {minutes:g}",
            any_origin=True,
        ):
            row = progress.row
            measured += not progress.kept
            peak = "failed" if row.peak_bytes is None else format_bytes(row.peak_bytes)
            bar.tell(f"{progress.task.label}: {peak}", progress.done, max(0.0, deadline - time.monotonic()))
            if time.monotonic() > deadline:
                break
    click.echo(f"Measured {measured} new rows.")


class _Bar:
    """A progress bar on a terminal, a line a row in a pipe."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._live: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> _Bar:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn())
            self._live = Progress(*columns, console=Console(stderr=True), transient=True)
            self._live.start()
            self._task = self._live.add_task("measuring", total=self._total)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def tell(self, what: str, done: int, seconds_left: float) -> None:
        line = f"{what}, at most {format_seconds(seconds_left)} left"
        if self._live is not None and self._task is not None:
            self._live.update(self._task, description=line, completed=done)
        else:
            click.echo(f"[{done}/{self._total}] {line}", err=True)
