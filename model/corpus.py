"""A text file as training batches: its bytes, memory-mapped, the end of it held out for validation."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from oomguard.errors import InputError
from oomguard.units import format_bytes

LOOKED_AT_BYTES = 1 << 20

Bytes = NDArray[np.uint8]
Windows = NDArray[np.int32]


@dataclass(frozen=True)
class Corpus:
    """Training and validation bytes of one file, views of a memory map.

    A window is ``seq_len`` bytes and, one further, the targets; windows are drawn so that every batch has the
    same shape and any step's batch can be drawn again without those before it.
    """

    path: Path
    seq_len: int
    training: Bytes
    validation: Bytes

    @classmethod
    def open(cls, path: str | Path, seq_len: int, val_fraction: float) -> Corpus:
        """Maps a file; nothing is read but its first MiB, to see that it is text.

        Args:
            path: any UTF-8 text.
            seq_len: bytes of a window.
            val_fraction: share of the file, its end, held out: at least one window, or 0 for none.

        Raises:
            InputError: the file cannot be read, is empty, is no UTF-8 text, or is too short for the windows.
        """
        path = Path(path)
        text = _map(path)
        _check_text(path, text)
        window = seq_len + 1
        held_out = max(window, int(val_fraction * len(text))) if val_fraction > 0 else 0
        if len(text) < window:
            raise InputError(
                f"corpus {path} holds {len(text)} bytes, fewer than one window of {window}; "
                f"--ctx {len(text) - 1} would fit"
                if len(text) > 1
                else f"corpus {path} holds {len(text)} byte, too little to learn from"
            )
        if len(text) - held_out < window:
            raise InputError(
                f"corpus {path} holds {len(text)} bytes; training and validation each need a window of "
                f"{window}: give a shorter --ctx, or --val-fraction 0 to go without validation"
            )
        return cls(path, seq_len, text[: len(text) - held_out], text[len(text) - held_out :])

    @property
    def size_bytes(self) -> int:
        """Of the whole file."""
        return len(self.training) + len(self.validation)

    def batch(self, step: int, seed: int, sequences: int) -> tuple[Windows, Windows]:
        """Inputs and targets of one update, (sequences, seq_len) each; the same for a step and a seed."""
        return next(self.micro_batches(step, seed, sequences, 1))

    def micro_batches(
        self, step: int, seed: int, sequences: int, count: int
    ) -> Iterator[tuple[Windows, Windows]]:
        """One update in ``count`` parts of ``sequences`` each, drawn one by one: together they are its ``batch``."""
        draw = np.random.default_rng([seed, step])
        for _ in range(count):
            starts = draw.integers(0, len(self.training) - self.seq_len, size=sequences)
            yield _windows(self.training, starts, self.seq_len)

    def validation_batches(self, sequences: int, at_most: int) -> list[tuple[Windows, Windows]]:
        """Evenly spread windows of the held-out text, the same at every call; always full batches.

        A validation split of fewer windows than one batch gives one batch in which they repeat.
        """
        room = len(self.validation) - self.seq_len
        if room <= 0:
            return []
        batches = min(at_most, max(1, room // (self.seq_len * sequences)))
        starts = np.linspace(0, room - 1, num=batches * sequences).astype(np.int64)
        return [_windows(self.validation, part, self.seq_len) for part in np.split(starts, batches)]

    def __str__(self) -> str:
        held_out = f", {format_bytes(len(self.validation))} held out" if len(self.validation) else ""
        return f"{self.path} ({format_bytes(self.size_bytes)}{held_out})"


def _map(path: Path) -> Bytes:
    try:
        with path.open("rb"):
            size = path.stat().st_size
        if size == 0:
            raise InputError(f"corpus {path} is empty")
        return np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as error:
        raise InputError(f"cannot read corpus {path}: {error.strerror or error}") from error


def _check_text(path: Path, text: Bytes) -> None:
    """Looks at the beginning; a character cut by the end of what is looked at is no mistake."""
    start = text[:LOOKED_AT_BYTES].tobytes()
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start, final=len(start) == len(text))
    except UnicodeDecodeError as error:
        raise InputError(
            f"corpus {path} is not UTF-8 text: byte {start[error.start]:#04x} at position {error.start}"
        ) from error
    if (nul := start.find(b"\0")) >= 0:
        raise InputError(f"corpus {path} is not text: a zero byte at position {nul}")


def _windows(text: Bytes, starts: NDArray[np.int64], seq_len: int) -> tuple[Windows, Windows]:
    rows = text[starts[:, None] + np.arange(seq_len + 1)].astype(np.int32)
    return rows[:, :-1], rows[:, 1:]
