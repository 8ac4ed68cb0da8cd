"""Measured rows: one training step, what it was, what it peaked at, and what measured it.

A row file is JSON lines. Its first line is the header: what made the rows. Every further line is one row.
Rows are appended one whole line at a time, so a file cut short loses at most the line being written.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn

from pydantic import Field, ValidationError, model_validator

from oomguard.config.base import Frozen, first_problem
from oomguard.config.model import ModelConfig
from oomguard.config.problems import shown
from oomguard.config.step import StepConfig
from oomguard.errors import InputError
from oomguard.files.reading import json_values, parse_json, read_text
from oomguard.files.writing import Format

SCHEMA: Final = "oomguard.rows/1"
PRINTED_SCHEMA: Final = "oomguard.measure/1"

_PRINTED = re.compile(r'\s*\{\s*"schema"\s*:\s*"oomguard\.measure/1"')
_START_BYTES = 1 << 16  # a header is some hundred

HEADER_BEGINS = f'{{"schema":"{SCHEMA}"'.encode()
LONGEST_BEGINNING_BYTES = 1 << 20

Bytes = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Header(Frozen):
    """What made the rows of a file."""

    schema_: Literal["oomguard.rows/1"] = Field(default=SCHEMA, alias="schema")
    machine: str
    system: str
    mlx: str
    backend: Literal["cpu", "metal", "cuda"]
    commit: str
    date: str
    command: str
    note: str = ""


class Row(Frozen):
    """One measured configuration.

    Either ``model`` and ``step`` (the GPT of ``oomguard.model``) or ``case`` (a named step of
    ``oomguard.model.cases``) says what ran. ``*_bytes`` are medians over the measured steps, from step
    2 on, the peak reset before each. ``sequenced_*`` were measured with the memory limit at 0, where
    evaluation waits for every task: the peak of the graph alone.
    """

    model: ModelConfig | None = None
    step: StepConfig | None = None
    case: str | None = None
    status: Literal["ok", "failed"] = "ok"
    reason: str = ""
    peak_bytes: Bytes | None = None
    peak_low_bytes: Bytes | None = None
    peak_high_bytes: Bytes | None = None
    first_peak_bytes: Bytes | None = None
    sequenced_peak_bytes: Bytes | None = None
    sequenced_low_bytes: Bytes | None = None
    sequenced_high_bytes: Bytes | None = None
    active_bytes: Bytes | None = None
    cache_bytes: Bytes | None = None
    step_seconds: Finite | None = None
    step_seconds_spread: Finite | None = None
    steps: Annotated[int, Field(ge=0)] = 0
    mlx: str
    backend: Literal["cpu", "metal", "cuda"]
    machine: str
    blas: str = ""
    commit: str = ""
    date: str = ""

    @model_validator(mode="after")
    def _says_what_ran(self) -> Row:
        if (self.case is None) == (self.model is None or self.step is None):
            raise ValueError("a row names either a model and a step, or a case")
        if self.status == "ok" and self.peak_bytes is None and self.sequenced_peak_bytes is None:
            raise ValueError("a row with status ok needs peak_bytes")
        return self

    @property
    def key(self) -> str:
        """Identifies the configuration: the same model, step or case gives the same key."""
        return row_key(self.case or "", self.model, self.step)


def row_key(case: str, model: ModelConfig | None, step: StepConfig | None) -> str:
    """A short hash of what runs; the model's name is not part of it."""
    what = {
        "case": case,
        "model": model and model.model_dump(exclude={"name"}),
        "step": step and step.model_dump(),
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def read_rows(path: str | Path) -> tuple[Header, list[Row]]:
    """Header and rows of one file: a row file, or what ``oomguard measure --json`` printed, once or several times.

    A last line without its newline is a row that was being written when the process died; it is left out.

    Raises:
        InputError: not readable, no header, or a line that is not a row; the text names the line and field.
    """
    path = Path(path)
    text = read_text(path, "row file")
    if _is_printed(text):
        return _read_printed(path, text)
    whole, _, _cut = text.rpartition("\n")
    header: Header | None = None
    rows: list[Row] = []
    for number, line in enumerate(whole.split("\n"), start=1):
        if not line.strip():
            continue
        value = _parse_line(path, number, line)
        try:
            if header is None:
                header = Header.model_validate(value)
            else:
                rows.append(Row.model_validate(value))
        except ValidationError as error:
            what = "header" if header is None else "row"
            raise InputError(f"{path}, line {number}, {what}: {first_problem(error)}") from error
    if header is None:
        raise InputError(f"row file {path} is empty; its first line must be a header")
    return header, rows


def is_row_file(path: str | Path) -> bool:
    """Whether ``read_rows`` is what reads the file: by its first line, or by the schema of a printed object."""
    start = _start_of(path)
    if _is_printed(start):
        return True
    try:
        first = parse_json(start.lstrip().partition("\n")[0])
    except ValueError:
        return False
    return isinstance(first, dict) and str(first.get("schema", "")).startswith(SCHEMA.split("/")[0])


def is_printed(path: str | Path) -> bool:
    """Whether the file is what ``oomguard measure --json`` printed, to which no row can be added."""
    return _is_printed(_start_of(path))


def _start_of(path: str | Path) -> str:
    """The first lines of a file; nothing of one that cannot be read."""
    try:
        with Path(path).open("rb") as file:
            return file.read(_START_BYTES).decode("utf-8-sig", errors="ignore")
    except (OSError, ValueError):
        return ""


def printed_rows(rows: Sequence[Row]) -> dict[str, Any]:
    """The object ``oomguard measure --json`` prints; ``read_rows`` reads it again."""
    return {
        "schema": PRINTED_SCHEMA,
        "rows": [row.model_dump(mode="json", exclude_none=True) for row in rows],
    }


def _is_printed(text: str) -> bool:
    return _PRINTED.match(text) is not None


def _read_printed(path: Path, text: str) -> tuple[Header, list[Row]]:
    """The rows of printed objects. Each says itself what measured it; the first one speaks for the file."""
    try:
        values = json_values(text)
    except ValueError as error:
        raise InputError(f"row file {path} is not JSON: {error}") from error
    found: list[Row] = []
    for value in values:
        rows = (
            value.get("rows") if isinstance(value, dict) and value.get("schema") == PRINTED_SCHEMA else None
        )
        if not isinstance(rows, list):
            raise InputError(f"row file {path}: beside what measure --json printed stands {shown(value)}")
        for row in rows:
            try:
                found.append(Row.model_validate(row))
            except ValidationError as error:
                raise InputError(f"{path}, row {len(found) + 1}: {first_problem(error)}") from error
    if not found:
        raise InputError(f"row file {path} holds no rows")
    first = found[0]
    header = Header(
        machine=first.machine,
        system="",
        mlx=first.mlx,
        backend=first.backend,
        commit=first.commit,
        date=first.date,
        command="oomguard measure --json",
    )
    return header, found


def _parse_line(path: Path, number: int, line: str) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise InputError(f"{path}, line {number}: {constant} is not a measurement")

    try:
        return parse_json(line, refuse)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{path}, line {number}: not JSON ({error})") from error


def read_begun(path: str | Path) -> tuple[Header, list[Row]] | None:
    """Header and rows of a file that rows are to be added to; None where there is no file, or not a whole line.

    Raises:
        InputError: the file is something else; ``append_row`` would cut off what it takes for a beginning.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            first = file.readline(LONGEST_BEGINNING_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"cannot read row file {path}: {error.strerror}") from error
    if first.endswith(b"\n"):
        return read_rows(path)
    if first[: len(HEADER_BEGINS)] != HEADER_BEGINS[: len(first)]:
        raise InputError(f"{path}, line 1: not the header of a row file")
    return None


def _why_no_row_file(path: Path) -> str:
    try:
        read_begun(path)
    except InputError as error:
        return str(error)
    return ""


ROW_FILE = Format("cannot write row file", _why_no_row_file)


def append_row(path: str | Path, header: Header, row: Row) -> None:
    """Adds one row, durably: the line is on disk when this returns. Writes the header first in a new file.

    A line that an earlier process left unfinished is cut off before the row is added. Processes that append
    to one file take turns.

    Raises:
        OSError: the row could not be written; the file is as it was.
    """
    path = Path(path)
    line = row.model_dump_json(exclude_defaults=True) + "\n"
    try:
        with _turn_in(path.parent), path.open("a+b", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            keep = _whole_length(file, end)
            if keep < end:
                file.truncate(keep)
            if keep == 0:
                line = header.model_dump_json(by_alias=True) + "\n" + line
            _write_whole(file, keep, line.encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextlib.contextmanager
def _turn_in(folder: Path) -> Iterator[None]:
    """Holds the folder's lock: not the file's, which whoever collects rows may hold for hours.

    On a file system without locks there is no turn to take.
    """
    held = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _write_whole(file: FileIO, start: int, data: bytes) -> None:
    """Writes all of it and waits for the disk, or cuts the file back to where it started."""
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(start)
        raise


def _whole_length(file: FileIO, end: int) -> int:
    """Bytes up to and with the last newline."""
    position = end
    while position > 0:
        start = max(0, position - 65536)
        file.seek(start)
        newline = file.read(position - start).rfind(b"\n")
        if newline >= 0:
            return int(start + newline + 1)
        position = start
    return 0


def shipped_rows_path(name: str) -> Path:
    """One of the row files that ship in ``calibration/rows``."""
    return Path(str(resources.files("oomguard").joinpath("calibration", "rows", name)))


def shipped_row_files() -> Iterator[Path]:
    """The row files that ship in ``calibration/rows``."""
    yield from sorted(shipped_rows_path("").glob("*.jsonl"))


def usable(rows: Iterable[Row]) -> list[Row]:
    """The rows that hold a measurement."""
    return [row for row in rows if row.status == "ok"]
