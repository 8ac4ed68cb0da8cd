"""A line on the terminal while something takes seconds."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

import click

from oomguard.errors import TraceError
from oomguard.units import format_seconds

QUIET_SECONDS = 10.0


@contextlib.contextmanager
def waiting(what: str, *, at_once: bool = True) -> Iterator[None]:
    """Shows ``what`` on stderr, and how long it has taken; what a user's step prints is no part of a report.

    On a terminal ``at_once``; else in a line after ``QUIET_SECONDS``, and after twice as long each time.

    Raises:
        TraceError: as raised inside, in one line; what a user's step raised may be several.
    """
    shown = _status(what) if at_once and sys.stderr.isatty() else _lines(what)
    with contextlib.redirect_stdout(sys.stderr), shown:
        try:
            yield
        except TraceError as error:
            raise TraceError(" ".join(str(error).split())) from error


def _status(what: str) -> contextlib.AbstractContextManager[object]:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    progress.add_task(what, total=None)
    return progress


@contextlib.contextmanager
def _lines(what: str) -> Iterator[None]:
    """A line now and then, from a thread: what takes long may be one call."""
    over = threading.Event()
    begun = time.monotonic()

    def tell() -> None:
        quiet = QUIET_SECONDS
        while not over.wait(quiet):
            click.echo(f"oomguard: {what}, {format_seconds(time.monotonic() - begun)} so far", err=True)
            quiet *= 2

    thread = threading.Thread(target=tell, name="oomguard-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
