"""Files that oomguard writes: whole or not at all, and never over anything but a file of its own kind.

One rule for every command. What is written is a new file, or a regular file that oomguard wrote in the same
format before. Nothing that the command reads, no link, pipe or device, and nothing that somebody else made is
ever replaced; two options never name one file. All of it is checked before any work begins, and again at the
moment of writing.

A file is written as a *part* beside its place, and takes the place when it is on disk: whoever reads the name
sees the old file or the new one. A writer holds a lock on its part for as long as it lives; a part that can be
locked was left by a writer that was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from oomguard.errors import InputError

# The name, the writer's process, and what its format asks for. Before there were locks, "oomguard-" was left out.
PART = re.compile(
    r"\..+\.(?P<locks>oomguard-)?(?P<process>\d+)\.part(?(locks)(\.safetensors)?|\.safetensors)"
)
LONGEST_NAME_BYTES = 200  # of a part's name, what the file's own may take; a file system takes 255 or so
LOOKED_AT_BYTES = 4096
KINDS = (
    (stat.S_ISDIR, "a folder, not a file; name one in it"),
    (stat.S_ISFIFO, "a pipe, not a file; name one, and read it when it is written"),
    (stat.S_ISCHR, "a device, not a file; name one"),
    (stat.S_ISBLK, "a device, not a file; name one"),
    (stat.S_ISSOCK, "a socket, not a file; name one"),
)


@dataclass(frozen=True)
class Format:
    """A kind of file that oomguard writes.

    Attributes:
        cannot: how a refusal begins: ``cannot write page``.
        why_not_ours: why an existing file is none that oomguard wrote in this format; empty when it is one.
        part_suffix: what the name of a part must end with for its writer to take it.
    """

    cannot: str
    why_not_ours: Callable[[Path], str]
    part_suffix: str = ""


def kept_in_own_folder(what: str) -> Format:
    """The format of a file that stands in the folder of oomguard's own data under a name of oomguard's.

    Whatever regular file is there is ours: one that is damaged is written anew, and not a reason to stop.
    """
    return Format(f"cannot write {what}", lambda path: "")


@dataclass(frozen=True)
class Output:
    """A file to be written, and what a command reads, which it may therefore not be.

    Attributes:
        option: what named it, ``--html``.
        inputs: files the command reads, by what it reads them as: ``the corpus``.
    """

    path: Path
    format: Format
    option: str = ""
    inputs: Mapping[str, Path] | None = None

    def check(self) -> list[tuple[Path, int]]:
        """Finds out whether the file may and can be written, without writing it.

        Returns:
            The parts of killed writers that were removed from its folder, and the bytes each held.

        Raises:
            InputError: it may or can not; the text says why and what would do.
        """
        if not self.path.parent.is_dir():
            raise self._refusal(f"there is no folder {self.path.parent} to write {self.path.name} to")
        self.check_place()
        removed = remove_dead_parts(self.path.parent)
        try:
            _Part(self).drop()
        except OSError as error:
            raise self._refusal(f"{error.strerror} in {self.path.parent}") from error
        return removed

    def check_place(self) -> None:
        """Raises InputError where something is at the path that must not be replaced."""
        for read_as, read in (self.inputs or {}).items():
            if is_same_file(self.path, read):
                raise self._refusal(f"it is {read_as}; name another file")
        try:
            found = self.path.lstat()
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._refusal(error.strerror or str(error)) from error
        if reason := self._why_not_replace(found):
            raise self._refusal(reason)

    def _why_not_replace(self, found: os.stat_result) -> str:
        if stat.S_ISLNK(found.st_mode):
            kind = _kind(self.path)
            where = self.path.readlink()
            return f"it is {kind}" if kind else f"it is a symbolic link; name {where} itself, or another file"
        if not stat.S_ISREG(found.st_mode):
            return f"it is {_kind(self.path) or 'not a file; name one'}"
        if reason := self._why_not_ours():
            return f"{reason}; name another file, or remove it first"
        if not os.access(self.path, os.W_OK):
            return "it is write-protected; name another file"
        return ""

    def _why_not_ours(self) -> str:
        try:
            return self.format.why_not_ours(self.path)
        except OSError as error:
            return f"it is there already and cannot be read ({error.strerror})"

    def beside(self) -> Output:
        """The first free name beside the file: ``run-2.safetensors``."""
        names = (self.path.with_stem(f"{self.path.stem}-{number}") for number in itertools.count(2))
        return replace(self, path=next(path for path in names if not os.path.lexists(path)))

    def write_text(self, text: str) -> None:
        """Writes the file, durably.

        Raises:
            InputError: it may not or cannot be written; what was there before is still there.
        """
        with self.replaced() as part:
            part.write_text(text, encoding="utf-8")

    @contextlib.contextmanager
    def replaced(self) -> Iterator[Path]:
        """Yields a part to write to. It takes the file's place, with its permissions, when the block ends well.

        Raises:
            InputError: the file may not be written, or something in the block raised an OSError; what was there
                before is still there, and no part is left.
        """
        self.check_place()
        try:
            part = _Part(self)
            try:
                yield part.path
                part.sync()
                self.check_place()
                part.take_place()
            finally:
                part.drop()
        except OSError as error:
            raise self._refusal(error.strerror or str(error)) from error

    def _refusal(self, reason: str) -> InputError:
        named = f"{self.option}: " if self.option else ""
        return InputError(f"{named}{self.format.cannot} {self.path}: {reason}")


def check_outputs(outputs: Sequence[Output]) -> None:
    """Checks every file that a command is to write.

    Raises:
        InputError: one may not or cannot be written, or two are one file.
    """
    for number, output in enumerate(outputs):
        output.check()
        for other in outputs[:number]:
            if is_same_file(output.path, other.path):
                raise InputError(
                    f"{other.option} and {output.option} both name {output.path}; give each a file of its own"
                )


def is_same_file(one: Path, other: Path) -> bool:
    """Whether two paths are one file: through links, spelt otherwise, or not there yet."""
    try:
        return one.samefile(other)
    except OSError:
        pass
    try:
        same_folder = one.parent.samefile(other.parent)
    except OSError:
        return False
    # A Mac's file system takes the names of files in capitals and small letters for the same.
    alike = one.name.casefold() == other.name.casefold() if sys.platform == "darwin" else False
    return same_folder and (alike or one.name == other.name)


def marked(mark: str, what: str) -> Callable[[Path], str]:
    """The ``why_not_ours`` of a format whose files carry ``mark`` in their first 4 KiB; they are called ``what``."""

    def why_not_ours(path: Path) -> str:
        with path.open("rb") as file:
            ours = mark.encode() in file.read(LOOKED_AT_BYTES)
        return "" if ours else f"it is there already and is no {what} that oomguard wrote"

    return why_not_ours


def remove_dead_parts(folder: Path) -> list[tuple[Path, int]]:
    """Removes the parts in a folder whose writers were killed; those of living writers stay.

    Returns:
        What was removed, and how many bytes each held.
    """
    removed = []
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            if (size := _remove_if_dead(path)) is not None:
                removed.append((path, size))
    return removed


def _remove_if_dead(path: Path) -> int | None:
    """Removes a part that nobody holds any more; the bytes it held, None where it is not one."""
    named = PART.fullmatch(path.name)
    if named is None:
        return None
    try:
        held = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        found = os.fstat(held)
        if not stat.S_ISREG(found.st_mode) or not _is_dead(held, named):
            return None
        path.unlink()
        return found.st_size
    except OSError:
        return None
    finally:
        os.close(held)


def _is_dead(held: int, named: re.Match[str]) -> bool:
    """Takes the lock of a part, which its writer has for as long as it lives.

    Where there are no locks the process in the name is the writer for as long as it runs.
    """
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return not _runs(int(named["process"]))
    return named["locks"] is not None or not _runs(int(named["process"]))


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return process != os.getpid()


class _Part:
    """A file beside an output's place, held for as long as it is written."""

    def __init__(self, output: Output) -> None:
        self._place = output.path
        short = output.path.name.encode()[:LONGEST_NAME_BYTES].decode(errors="ignore")
        name = f".{short}.oomguard-{os.getpid()}.part{output.format.part_suffix}"
        self.path = output.path.with_name(name)
        self._held = self._make()

    def _make(self) -> int:
        """Makes the part and locks it: whoever looks for dead parts may be quicker, and takes it for one."""
        while True:
            _remove_if_dead(self.path)  # of a process of the same number that was killed
            held = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                fcntl.flock(held, fcntl.LOCK_EX)
            except OSError:
                return held  # a file system without locks
            with contextlib.suppress(FileNotFoundError):
                if self.path.stat().st_ino == os.fstat(held).st_ino:
                    return held
            os.close(held)

    def sync(self) -> None:
        os.fsync(self._held)

    def take_place(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.fchmod(self._held, stat.S_IMODE(self._place.stat().st_mode))
        self.path.replace(self._place)
        with contextlib.suppress(OSError):  # the file is in its place; some file systems cannot sync a folder
            _sync_folder(self._place.parent)

    def drop(self) -> None:
        """Lets go of the part, and removes it unless it took its place."""
        with contextlib.suppress(OSError):
            self.path.unlink()
        os.close(self._held)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _kind(path: Path) -> str:
    """What a path leads to, where that is no regular file."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return ""
    return next((name for is_kind, name in KINDS if is_kind(mode)), "")
