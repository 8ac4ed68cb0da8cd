"""The child process: builds one step, runs it, says what it peaked at, and ends.

Run as ``python -m oomguard.measure.worker RESULT_FD``. The order comes as one JSON line on stdin, which the
parent then keeps open: its end means that the parent is gone, and so must this process be. Messages leave as
JSON lines on the result descriptor, so that whatever a user's step prints cannot damage them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from oomguard.errors import InputError, MeasureError, OomguardError
from oomguard.machine.system import Backend
from oomguard.measure.blas import loaded_blas
from oomguard.measure.provenance import mlx_version
from oomguard.measure.task import Task
from oomguard.step.opening import FileRaisedError, UserStep, load_step

Run = Callable[[], object]
PR_SET_PDEATHSIG = 1
GUARD_SECONDS = 0.05


@dataclass(frozen=True)
class Order:
    """What the parent wants: the task, how often, and the limit on MLX's active memory."""

    task: Task
    steps: int
    sequenced: bool
    memory_limit_bytes: int
    parent: int

    @classmethod
    def from_json(cls, line: str) -> Order:
        value = json.loads(line)
        return cls(task=Task.model_validate(value.pop("task")), **value)


@dataclass(frozen=True)
class Sample:
    """One measured step."""

    peak_bytes: int
    active_bytes: int
    cache_bytes: int
    seconds: float


class Messages:
    """JSON lines to the parent."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._lock = threading.Lock()

    def send(self, kind: str, **values: Any) -> None:
        with self._lock:
            self._file.write(json.dumps({"kind": kind, **values}) + "\n")
            self._file.flush()


def main() -> None:
    """Measures the task read from stdin."""
    _die_with_the_parent()
    _leave_no_core()
    messages = Messages(os.fdopen(int(sys.argv[1]), "w"))
    line = sys.stdin.readline()
    if not line.endswith("\n"):
        sys.exit(1)
    order = Order.from_json(line)
    if os.getppid() != order.parent:
        sys.exit(1)
    _offer_to_die_first()
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        _measure(order, messages)
    except OomguardError as error:
        messages.send("failed", reason=str(error), input=isinstance(error, InputError))
        sys.exit(3)
    except Exception as error:
        messages.send("failed", reason=f"{type(error).__name__}: {error}", input=False)
        raise
    messages.send("done")


def _die_with_the_parent() -> None:
    """Linux: the kernel ends this process when its parent dies, whatever either is doing."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _leave_no_core() -> None:
    """A crash of a child is expected, and a core file of many GiB is not."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _end_with_stdin() -> None:
    """Everywhere: the parent holds the other end of stdin, so its end is the parent's."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


def _offer_to_die_first() -> None:
    """When memory runs out, the kernel should take this process and no other."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _measure(order: Order, messages: Messages) -> None:
    import mlx.core as mx

    backend = _backend(mx)
    messages.send("hello", backend=backend, mlx=mlx_version(), blas=loaded_blas(backend))
    limit = order.memory_limit_bytes
    threading.Thread(target=_guard_memory, args=(mx, limit, messages), daemon=True).start()
    messages.send("doing", what="building the step")
    run = build(order.task)
    messages.send("doing", what="step 1")
    first = _sample(mx, run)
    messages.send("first", peak_bytes=first.peak_bytes)
    messages.send("default", **summary(_column(mx, run, order.steps, "step", messages)))
    if order.sequenced:
        mx.set_memory_limit(0)
        messages.send("sequenced", **summary(_column(mx, run, order.steps, "sequenced step", messages)))


def _backend(mx: Any) -> Backend:
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def _guard_memory(mx: Any, limit_bytes: int, messages: Messages) -> None:
    """Ends the process when MLX holds more than the limit.

    The parent watches this process's resident memory too, but a GPU's buffers are not always in that.
    """
    while True:
        active = mx.get_active_memory()
        if active > limit_bytes:
            messages.send("too large", active_bytes=active)
            os._exit(4)
        time.sleep(GUARD_SECONDS)


def build(task: Task) -> Run:
    """The callable that runs one evaluated step of the task.

    Raises:
        InputError: no such case, file or function, or the function does not return a callable.
    """
    if task.model is not None and task.step is not None:
        from oomguard.model.step import build_step

        return build_step(task.model, task.step).run
    if task.case is not None:
        from oomguard.model.cases import build_case

        return build_case(task.case).run
    assert task.function is not None
    return load_function(task.function)


def load_function(spec: str) -> Run:
    """One evaluated step of what ``FILE.py:NAME`` builds; see ``user_step.load_step``.

    State and arguments are evaluated now. A step that is returned alone is called as it is: it may evaluate what
    it makes, and what it returns is evaluated.
    """
    try:
        user = load_step(spec)
    except FileRaisedError as error:  # a row that says so, as whatever else a step may raise
        raise MeasureError(f"{type(error.__cause__).__name__}: {error}") from error
    if user.built is not None:
        return user.built.run  # type: ignore[no-any-return]
    assert user.step is not None
    return user.step if user.alone else _run_of(user)


def _run_of(user: UserStep) -> Run:
    import mlx.core as mx

    from oomguard.trace.capture import found_state
    from oomguard.trace.containers import state_tree

    step = user.step
    assert step is not None
    state = found_state(step) if user.state is None else user.state
    mx.eval([state_tree(item) for item in state], user.arguments, user.keywords)

    def run() -> None:
        returned = step(*user.arguments, **user.keywords)
        mx.eval(user.evaluate(returned, [state_tree(item) for item in state]))

    return run


def _column(mx: Any, run: Run, steps: int, what: str, messages: Messages) -> list[Sample]:
    samples = []
    for number in range(1, steps + 1):
        messages.send("doing", what=f"{what} {number} of {steps}")
        samples.append(_sample(mx, run))
    return samples


def _sample(mx: Any, run: Run) -> Sample:
    """Runs one step; what it returns is evaluated, where it was not, and dropped before memory is read."""
    gc.collect()
    mx.synchronize()
    mx.reset_peak_memory()
    start = time.perf_counter()
    mx.eval(run())
    mx.synchronize()
    seconds = time.perf_counter() - start
    sample = Sample(mx.get_peak_memory(), mx.get_active_memory(), mx.get_cache_memory(), seconds)
    if sample.peak_bytes < sample.active_bytes or sample.peak_bytes == 0:
        raise MeasureError(
            f"the step allocated less ({sample.peak_bytes} B) than is held after it "
            f"({sample.active_bytes} B); does it run and evaluate anything?"
        )
    return sample


def summary(samples: Sequence[Sample]) -> dict[str, int | float]:
    """Medians and spread of a column; a median of bytes is one that was measured."""
    peaks = [sample.peak_bytes for sample in samples]
    seconds = [sample.seconds for sample in samples]
    return {
        "peak_bytes": statistics.median_low(peaks),
        "low_bytes": min(peaks),
        "high_bytes": max(peaks),
        "active_bytes": statistics.median_low([sample.active_bytes for sample in samples]),
        "cache_bytes": statistics.median_low([sample.cache_bytes for sample in samples]),
        "seconds": statistics.median(seconds),
        "seconds_spread": max(seconds) - min(seconds),
        "steps": len(samples),
    }


if __name__ == "__main__":
    main()
