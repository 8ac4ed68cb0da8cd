"""Starts a child, watches its time and memory, and turns however it ends into an outcome."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from oomguard.measure import limits
from oomguard.measure.blas import child_environment, find_openblas
from oomguard.measure.provenance import likely_backend
from oomguard.measure.task import Settings, Task
from oomguard.units import format_bytes, format_seconds

POLL_SECONDS = 0.05
SIGNALS = {
    signal.SIGSEGV: "segmentation fault",
    signal.SIGABRT: "aborted",
    signal.SIGKILL: "killed",
    signal.SIGBUS: "bus error",
    signal.SIGILL: "illegal instruction",
    signal.SIGFPE: "arithmetic fault",
    signal.SIGTERM: "terminated",
}
LIKELY = {
    int(signal.SIGKILL): ", most likely by the system for lack of memory",
    int(signal.SIGSEGV): ", as MLX's CPU backend ends when an allocation fails",
}


@dataclass
class Outcome:
    """What a child said before it ended, by kind of message, and why it failed if it did."""

    said: dict[str, dict[str, Any]] = field(default_factory=dict)
    reason: str = ""
    input_problem: bool = False
    resident_bytes: int = 0

    @property
    def doing(self) -> str:
        return str(self.said.get("doing", {}).get("what", "starting"))


def run_child(task: Task, settings: Settings, on_progress: Callable[[str], None] | None = None) -> Outcome:
    """Runs one task in a process of its own. Never raises for what the child does.

    Args:
        on_progress: called with a few words whenever the child starts something.
    """
    limit = settings.max_memory_bytes
    limit = limits.default_limit_bytes() if limit is None else limit
    refusal = _refusal(task, settings, limit)
    if refusal:
        return Outcome(reason=refusal)
    with _started(task, settings, limit) as child:
        return _Watch(child, settings, limit, on_progress).outcome()


def _refusal(task: Task, settings: Settings, limit: int) -> str:
    if settings.force or task.model is None or task.step is None:
        return ""
    least = limits.least_bytes(task.model, task.step, likely_backend())
    if least <= limit:
        return ""
    return (
        f"not run: the estimate is {format_bytes(least)} or more, the limit is {format_bytes(limit)} "
        "(--force runs it all the same)"
    )


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    results: int
    errors: IO[bytes]


@contextlib.contextmanager
def _started(task: Task, settings: Settings, limit: int) -> Iterator[_Child]:
    """The child, with its order given; it is ended when the block is left, however that happens."""
    order = {
        "task": task.model_dump(mode="json"),
        "steps": settings.steps,
        "sequenced": settings.sequenced,
        "memory_limit_bytes": limit,
        "parent": os.getpid(),
    }
    results, child_end = os.pipe()
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "oomguard.measure.worker", str(child_end)],
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                pass_fds=(child_end,),
                env=child_environment(os.environ, find_openblas()),
                start_new_session=True,
            )
        except BaseException:
            os.close(results)
            raise
        finally:
            os.close(child_end)
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(order).encode() + b"\n")
                process.stdin.flush()
            yield _Child(process, results, errors)
        finally:
            _end(process)
            os.close(results)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the child and what it started (it leads a session of its own), and collects it."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


class _Watch:
    """Reads a child's messages until it ends, and ends it when it takes too long or too much."""

    def __init__(
        self, child: _Child, settings: Settings, limit: int, on_progress: Callable[[str], None] | None
    ) -> None:
        import psutil

        self._child = child
        self._settings = settings
        self._limit = limit
        self._tell = on_progress or (lambda _: None)
        self._outcome = Outcome()
        self._unread = b""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._usage = psutil.Process(child.process.pid)

    def outcome(self) -> Outcome:
        """Waits for the child; the outcome has a reason unless the child said that it is done."""
        start = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._child.results, selectors.EVENT_READ)
            while not self._outcome.reason:
                if selector.select(POLL_SECONDS):
                    data = os.read(self._child.results, 65536)
                    if not data:
                        break
                    self._read(data)
                self._check(time.monotonic() - start)
        if not self._outcome.reason and "done" not in self._outcome.said:
            self._outcome.reason = self._how_it_ended()
        return self._outcome

    def _read(self, data: bytes) -> None:
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            kind = message.pop("kind")
            self._outcome.said[kind] = message
            if kind == "doing":
                self._tell(message["what"])
            elif kind == "failed":
                self._outcome.reason = f"{message['reason']} (while {_during(self._outcome.doing)})"
                self._outcome.input_problem = message["input"]
            elif kind == "too large":
                self._outcome.reason = self._too_large(message["active_bytes"])

    def _check(self, elapsed: float) -> None:
        resident = self._resident_bytes()
        self._outcome.resident_bytes = max(self._outcome.resident_bytes, resident)
        if self._outcome.reason:
            return
        if elapsed > self._settings.timeout_seconds:
            allowed = format_seconds(self._settings.timeout_seconds)
            self._outcome.reason = f"took longer than {allowed} (while {_during(self._outcome.doing)})"
        elif resident > self._limit:
            self._outcome.reason = self._too_large(resident)
        elif limits.is_critical(left := limits.available_bytes()):
            self._outcome.reason = (
                f"ended: the machine had only {format_bytes(left)} left, the step held "
                f"{format_bytes(resident)} (while {_during(self._outcome.doing)})"
            )

    def _resident_bytes(self) -> int:
        import psutil

        try:
            return int(self._usage.memory_info().rss)
        except (psutil.Error, AttributeError):
            return 0

    def _too_large(self, held: int) -> str:
        return (
            f"ended: it held {format_bytes(held)}, the limit is {format_bytes(self._limit)} "
            f"(while {_during(self._outcome.doing)})"
        )

    def _how_it_ended(self) -> str:
        """The results ended without a last word: the child died."""
        try:
            code = self._child.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return f"closed its results without a word (while {_during(self._outcome.doing)})"
        return (
            f"{describe_exit(code)}{self._held()} (while {_during(self._outcome.doing)}){self._last_words()}"
        )

    def _held(self) -> str:
        held = self._outcome.resident_bytes
        return f"; it held {format_bytes(held)}" if held else ""

    def _last_words(self) -> str:
        """The last line the child wrote to stderr."""
        size = self._child.errors.seek(0, os.SEEK_END)
        self._child.errors.seek(max(0, size - 2000))
        lines = self._child.errors.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1].strip()[:300]}" if lines else ""


def _during(doing: str) -> str:
    return doing if doing.startswith(("building", "starting")) else f"running {doing}"


def describe_exit(code: int) -> str:
    """An exit status as a person says it: ``segmentation fault (signal 11)``, ``exit status 3``."""
    if code >= 0:
        return f"exit status {code}"
    name = SIGNALS.get(signal.Signals(-code), signal.Signals(-code).name) if _known(-code) else "ended"
    return f"{name} (signal {-code}){LIKELY.get(-code, '')}"


def _known(number: int) -> bool:
    return number in {int(known) for known in signal.Signals}
