"""What ends a run early, and lets it save first: Ctrl-C, a polite kill, a closed terminal."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# A terminal that closes hangs up twice, itself and through its shell; ``timeout -s INT`` signals a process and
# its group. A person who presses Ctrl-C again takes longer.
ONE_STOP_SECONDS = 0.5


@contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Yields what says whether the run was asked to stop; a second Ctrl-C ends it at once.

    Under ``nohup`` a closed terminal does not concern the run.
    """
    asked_at: list[float] = []

    def ask(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and asked_at and now - asked_at[0] > ONE_STOP_SECONDS:
            raise KeyboardInterrupt
        if number == signal.SIGINT and not asked_at:
            _say_on_a_terminal("\nstopping after this micro-batch, to save; Ctrl-C again ends at once\n")
        asked_at.append(now)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    old = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield lambda: bool(asked_at)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _say_on_a_terminal(text: str) -> None:
    """Past Python's streams: a signal may come while they are being written to."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None and sys.stderr.isatty():
            os.write(sys.stderr.fileno(), text.encode())
