"""oomguard's own memory: a command that plans, traces or measures ends before it takes the machine down.

What a run holds is measured in processes of its own, which have limits of their own (``measure.limits``), and
training has its guard. This is for the rest: the process that counts, captures and simulates, in which anything
large is a mistake, of oomguard's or of the file it was given.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from oomguard.errors import OwnMemoryError
from oomguard.machine.system import container_bytes, memory
from oomguard.units import format_bytes, parse_bytes

SHARE = 0.5
"""Of the memory that is free when a command begins: what oomguard itself may take of it."""

ALLOWS = "OOMGUARD_OWN_MEMORY"
"""The environment variable that allows another size."""

POLL_SECONDS = 0.05  # a process that writes memory as fast as it can takes some 100 MiB in that time
GRACE_SECONDS = 2.0  # to end in order; then the process ends as it is
ENDED = 2


class _TooMuch(BaseException):
    """Raised where the watched thread stands; no handler of ``Exception`` on the way takes it for its own."""


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Ends what runs inside once this process holds more than ``SHARE`` of what was free.

    A thread looks every ``POLL_SECONDS``, which costs some 20 microseconds, and interrupts the thread that entered. If
    that one does not come back, being in a call that never ends, the process prints the same line and exits. Not
    seen is what one call takes that never lets another thread of Python run.

    Raises:
        OwnMemoryError: it held too much; the text says how much, and of what.
        InputError: ``OOMGUARD_OWN_MEMORY`` is not a size.
    """
    watch = Watch(allowed_bytes())
    watch.start()
    try:
        try:
            yield
        finally:
            watch.stop()
    except _TooMuch:
        raise OwnMemoryError(watch.message) from None
    if watch.message:  # something inside took the interrupt for its own
        raise OwnMemoryError(watch.message)


def allowed_bytes() -> int:
    """What this process may hold: what it holds now, and ``SHARE`` of what is free.

    Raises:
        InputError: ``OOMGUARD_OWN_MEMORY`` is not a size.
    """
    given = os.environ.get(ALLOWS)
    if given:
        return parse_bytes(given)
    return held_bytes() + int(SHARE * free_bytes())


def free_bytes() -> int:
    """Memory that can be had without swapping, within the limits of a container and of the shell."""
    bounds = (memory().free_bytes, container_bytes(), _addresses_left())
    return min(bound for bound in bounds if bound is not None)


def _addresses_left() -> int | None:
    """What ``ulimit -v`` leaves, None where it sets no limit: memory that is refused ends MLX with an abort."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    with contextlib.suppress(OSError):
        pages = Path("/proc/self/statm").read_bytes().split()[0]
        return max(0, limit - int(pages) * os.sysconf("SC_PAGE_SIZE"))
    return limit


def held_bytes() -> int:
    """Physical memory of this process, children not counted."""
    with contextlib.suppress(OSError):  # of Linux; psutil reads the same there, and costs 20 ms to import
        pages = Path("/proc/self/statm").read_bytes().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    import psutil

    return int(psutil.Process().memory_info().rss)


class Watch(threading.Thread):
    """The thread that looks. ``message`` is what there is to say once it found too much."""

    def __init__(self, allowed: int) -> None:
        super().__init__(name="oomguard-own-memory", daemon=True)
        self.message = ""
        self._allowed = allowed
        self._watched = threading.get_ident()
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            held = held_bytes()
            if held > self._allowed:
                self._end(held)
                return

    def stop(self) -> None:
        """Looks no more; an interrupt that is under way arrives before this returns."""
        self._over.set()
        self.join()

    def _end(self, held: int) -> None:
        self.message = self._say(held)
        _interrupt(self._watched, _TooMuch)
        if not self._over.wait(GRACE_SECONDS):
            shown_again = "\x1b[?25h" if sys.stderr.isatty() else ""  # the cursor, which a status line hides
            sys.stderr.write(f"{shown_again}oomguard: {self.message}\n")
            sys.stderr.flush()
            os._exit(ENDED)

    def _say(self, held: int) -> str:
        whose = f"the {format_bytes(self._allowed)} that {ALLOWS} allows"
        if not os.environ.get(ALLOWS):
            whose = f"{format_bytes(self._allowed)}, {SHARE:.0%} of the memory that was free"
        return (
            f"stopped: oomguard itself held {format_bytes(held)}, more than {whose}; a trace needs no evaluated "
            f"arrays, and {ALLOWS}=16GB allows another size"
        )


def _interrupt(thread: int, kind: type[BaseException]) -> None:
    """Raises an exception in a thread, at its next bytecode."""
    import ctypes

    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))
