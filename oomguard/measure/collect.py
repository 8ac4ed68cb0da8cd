"""Tasks into rows: one at a time, or a whole sweep into a row file that survives anything."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oomguard.config.model import ModelConfig
from oomguard.config.step import StepConfig, check_seq_len
from oomguard.errors import InputError, MeasureError
from oomguard.files.writing import Output
from oomguard.measure import provenance
from oomguard.measure.process import Outcome, run_child
from oomguard.measure.task import Settings, Task
from oomguard.rows import ROW_FILE, SCHEMA, Header, Row, append_row, is_printed, read_begun

STANDARD = Settings()


def measure(model: ModelConfig, step: StepConfig, settings: Settings = STANDARD) -> Row:
    """Measures one step of the GPT.

    Returns:
        A row. A child that died or was ended gives one with status ``failed`` and the reason.

    Raises:
        InputError: the step is longer than the model's context.
    """
    return measure_task(Task(model=model, step=step), settings)


def measure_case(name: str, settings: Settings = STANDARD) -> Row:
    """Measures one named step of ``oomguard.model.cases``.

    Raises:
        InputError: no such case.
    """
    return measure_task(Task(case=name), settings)


def measure_callable(spec: str, settings: Settings = STANDARD) -> Row:
    """Measures a user's own step.

    Args:
        spec: ``FILE.py:NAME``. ``NAME()`` builds the step and returns what ``oomguard.step.opening.load_step`` reads,
            or a callable without arguments that runs it once and evaluates what it made.

    Raises:
        InputError: no such file or function, or it returned no callable.
    """
    return measure_task(Task(function=spec), settings)


def measure_task(
    task: Task, settings: Settings = STANDARD, on_progress: Callable[[str], None] | None = None
) -> Row:
    """Runs one task in a child; see ``measure``."""
    check_task(task)
    outcome = run_child(task, settings, on_progress)
    if outcome.input_problem:
        raise InputError(outcome.reason)
    return row_of(task, outcome)


def check_task(task: Task) -> None:
    """Refuses what can be seen to be wrong without running it.

    Raises:
        InputError: a sequence longer than the context, an unknown case, or a function's missing file.
    """
    if task.model is not None and task.step is not None:
        check_seq_len(task.model, task.step)
    elif task.case is not None:
        from oomguard.model.cases import check_case

        check_case(task.case)
    elif task.function is not None:
        path, _, name = task.function.rpartition(":")
        if not path.endswith(".py") or not name.isidentifier():
            raise InputError(f"{task.function!r} does not name a function; write FILE.py:FUNCTION")
        if not Path(path).is_file():
            raise InputError(f"no file {path}")


def row_of(task: Task, outcome: Outcome) -> Row:
    """The row that an outcome makes, whatever of it was measured."""
    hello = outcome.said.get("hello", {})
    values: dict[str, Any] = {
        "model": task.model,
        "step": task.step,
        "case": task.case_name,
        "status": "failed" if outcome.reason else "ok",
        "reason": outcome.reason,
        "mlx": hello.get("mlx", provenance.mlx_version()),
        "backend": hello.get("backend", provenance.likely_backend()),
        "machine": provenance.machine(),
        "blas": hello.get("blas", ""),
        "commit": provenance.commit(),
        "date": provenance.now(),
    }
    if "first" in outcome.said:
        values["first_peak_bytes"] = outcome.said["first"]["peak_bytes"]
    if "default" in outcome.said:
        column = outcome.said["default"]
        values |= {
            "peak_bytes": column["peak_bytes"],
            "peak_low_bytes": column["low_bytes"],
            "peak_high_bytes": column["high_bytes"],
            "active_bytes": column["active_bytes"],
            "cache_bytes": column["cache_bytes"],
            "step_seconds": column["seconds"],
            "step_seconds_spread": column["seconds_spread"],
            "steps": column["steps"],
        }
    if "sequenced" in outcome.said:
        column = outcome.said["sequenced"]
        values |= {
            "sequenced_peak_bytes": column["peak_bytes"],
            "sequenced_low_bytes": column["low_bytes"],
            "sequenced_high_bytes": column["high_bytes"],
        }
    return Row.model_validate(values)


@dataclass(frozen=True)
class Progress:
    """One finished row of a sweep.

    ``kept`` rows were in the file already. ``seconds_left`` is an estimate for the tasks still to run.
    """

    task: Task
    row: Row
    kept: bool
    done: int
    total: int
    seconds_left: float


def sweep(
    tasks: Sequence[Task],
    path: str | Path,
    settings: Settings = STANDARD,
    *,
    command: str = "",
    note: str = "",
    retry: bool = False,
    any_origin: bool = False,
    on_progress: Callable[[Task, str], None] | None = None,
) -> Iterator[Progress]:
    """Measures tasks into a row file, yielding after each row is on disk.

    A row that is in the file is not measured again (a failed one is, with ``retry``; a user's function is when
    its file is newer), so a second call after Ctrl-C or a kill goes on where the first stopped. Stop early by
    leaving the loop.

    Args:
        path: the row file; made if missing.
        command, note: for the header of a new file.
        any_origin: rows of another MLX or machine may stand in the file; what they measured is measured again.
        on_progress: called with the task and a few words whenever a child starts something.

    Raises:
        InputError: the file is not a row file, was measured elsewhere, cannot be written, or another process
            is writing it; or a task is wrong (checked before the first runs).
        MeasureError: a row could not be stored, as on a full disk.
    """
    path = Path(path)
    for task in tasks:
        check_task(task)
    Output(path, ROW_FILE).check_place()
    with _locked(path):
        header, finished = _what_is_there(path, command, note, any_origin)
        wanted = list(dict.fromkeys(task.key for task in tasks))
        by_key = {task.key: task for task in tasks}
        keep = {
            key: row
            for key, row in finished.items()
            if key in by_key and (row.status == "ok" or not retry) and _stands(by_key[key], row)
        }
        clock = _Clock([by_key[key] for key in wanted if key not in keep])
        for done, key in enumerate(wanted, start=1):
            task = by_key[key]
            row = keep.get(key)
            if row is None:
                clock.start(task)
                row = _measure_into(path, header, task, settings, on_progress)
                clock.stop(task)
            yield Progress(task, row, key in keep, done, len(wanted), clock.seconds_left())


def _stands(task: Task, row: Row) -> bool:
    """Whether a row still says what the task is: a user's file may have been edited since."""
    if task.function is None:
        return True
    changed = Path(task.function.rpartition(":")[0]).stat().st_mtime
    return changed < datetime.datetime.fromisoformat(row.date).timestamp()


def _measure_into(
    path: Path,
    header: Header,
    task: Task,
    settings: Settings,
    on_progress: Callable[[Task, str], None] | None,
) -> Row:
    tell = None if on_progress is None else (lambda what: on_progress(task, what))
    row = row_of(task, run_child(task, settings, tell))
    if header.backend != row.backend:
        header = header.model_copy(update={"backend": row.backend})
    try:
        with _interrupt_waits():
            append_row(path, header, row)
    except OSError as error:
        raise MeasureError(
            f"cannot store the row of {task.label} in {path}: {error.strerror}; the rows before it are kept, "
            "and the same command goes on from there"
        ) from error
    return row


def _what_is_there(
    path: Path, command: str, note: str, any_origin: bool = False
) -> tuple[Header, dict[str, Row]]:
    """The header, new or found, and the last row of each key; with ``any_origin`` of those measured as here."""
    new = Header(
        schema=SCHEMA,
        machine=provenance.machine(),
        system=provenance.system(),
        mlx=provenance.mlx_version(),
        backend=provenance.likely_backend(),
        commit=provenance.commit(),
        date=provenance.now(),
        command=command,
        note=note,
    )
    begun = read_begun(path)
    if begun is None:
        return new, {}
    if is_printed(path):
        raise InputError(
            f"{path} is what measure --json printed, and a row file takes rows line by line; name another with --out"
        )
    header, rows = begun
    if any_origin:
        same = (row for row in rows if (row.mlx, row.machine) == (new.mlx, new.machine))
        return header, {row.key: row for row in same}
    for what, found, here in (("MLX", header.mlx, new.mlx), ("machine", header.machine, new.machine)):
        if found != here:
            raise InputError(
                f"{path} was measured with {what} {found!r}, this is {here!r}; name another file with --out"
            )
    return header, {row.key: row for row in rows}


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the row file for this process alone; the system lets go of it when the process ends."""
    is_new = not path.exists()
    try:
        file = path.open("ab")
    except OSError as error:
        raise InputError(f"cannot write row file {path}: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"{path} is being written by another oomguard measure") from error
        except OSError:
            pass  # a file system without locks: nobody can be kept out
        try:
            yield
        finally:
            if is_new and os.fstat(file.fileno()).st_size == 0:
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def _interrupt_waits() -> Iterator[None]:
    """Ctrl-C inside the block takes effect when it is left: a measured row is stored whole."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = []
    before = signal.signal(signal.SIGINT, lambda *_: came.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


class _Clock:
    """Time left of a sweep, from the time per FLOP of the rows done so far."""

    START_SECONDS = 1.0

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._left = list(tasks)
        self._seconds = 0.0
        self._work = 0.0
        self._started = 0.0

    def start(self, task: Task) -> None:
        self._started = time.monotonic()

    def stop(self, task: Task) -> None:
        self._seconds += max(0.0, time.monotonic() - self._started - self.START_SECONDS)
        self._work += _work(task)
        self._left.remove(task)

    def seconds_left(self) -> float:
        """Infinite while nothing was measured."""
        if not self._left:
            return 0.0
        if self._work == 0.0:
            return float("inf")
        rate = self._seconds / self._work
        return sum(self.START_SECONDS + rate * _work(task) for task in self._left)


def _work(task: Task) -> float:
    """FLOPs of one step, about; a case counts as a small one."""
    if task.model is None or task.step is None:
        return 1e11
    return 6.0 * task.model.params * task.step.tokens
