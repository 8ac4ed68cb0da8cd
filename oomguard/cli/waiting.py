"""A line on the terminal while something takes seconds."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from oomguard.errors import TraceError


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Shows ``what`` on stderr, where that is a terminal; what a user's step prints is no part of a report.

    Raises:
        TraceError: as raised inside, in one line; what a user's step raised may be several.
    """
    from rich.console import Console

    shown = Console(stderr=True).status(what) if sys.stderr.isatty() else contextlib.nullcontext()
    with contextlib.redirect_stdout(sys.stderr), shown:
        try:
            yield
        except TraceError as error:
            raise TraceError(" ".join(str(error).split())) from error
