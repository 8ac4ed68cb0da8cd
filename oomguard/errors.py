"""What can go wrong with what a user gave. "Does not fit" is a result, not an error."""

from __future__ import annotations


class OomguardError(Exception):
    """Base of everything oomguard raises on purpose; its text is one line a user can act on."""


class InputError(OomguardError, ValueError):
    """A wrong option, file or value. The command line prints it and exits with status 2."""


class OwnMemoryError(OomguardError):
    """oomguard itself took more memory than it may; the text says how much, and of what."""


class MeasureError(OomguardError, RuntimeError):
    """A measured child process did not give a row; the text says how it ended."""


class TraceError(OomguardError, RuntimeError):
    """A step that cannot be captured or simulated; the text says which part and what to do."""
