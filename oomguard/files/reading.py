"""Text and JSON files that a person names: read the same way everywhere, and refused in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from oomguard.errors import InputError
from oomguard.units import MIB, format_bytes

LARGEST_FILE_BYTES = 256 * MIB  # a thousand times what any of these files holds; /dev/zero never ends

DEEPEST = 32  # what is read here has four levels; Python itself stops at some hundreds, here or in a message
TOO_DEEP = f"lists or objects within one another, more than {DEEPEST} deep"

_SPACE = re.compile(r"\s*")


def read_text(path: str | Path, what: str) -> str:
    """The text of a UTF-8 file, without the byte order mark that some editors put before it.

    Args:
        path: the file.
        what: what it should be, ``config``, ``sweep``: the error says it.

    Raises:
        InputError: missing, not readable, not text, or no file of this kind by its size.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(LARGEST_FILE_BYTES + 1)
    except OSError as error:
        raise InputError(f"cannot read {what} {path}: {error.strerror or error}") from error
    except ValueError as error:  # a NUL in the name
        raise InputError(f"cannot read {what} {str(path)!r}: {error}") from error
    if len(data) > LARGEST_FILE_BYTES:
        raise InputError(
            f"{what} {path} is larger than {format_bytes(LARGEST_FILE_BYTES)}; is it the right file?"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{what} {path} is not text in UTF-8") from error


def parse_json(text: str, refuse_constant: Callable[[str], NoReturn] | None = None) -> Any:
    """The value of a JSON text; JSON has no NaN and no Infinity.

    Args:
        text: the text.
        refuse_constant: called with NaN, Infinity or -Infinity, to refuse it in other words.

    Raises:
        ValueError: not JSON, or nested deeper than can be read; says which, in one line.
    """
    with _said_in_one_line():
        return _shallow(json.loads(text, parse_constant=refuse_constant or _refuse_constant))


def json_values(text: str) -> list[Any]:
    """The JSON values of a text, one after the other, each on a line or over many.

    Raises:
        ValueError: as ``parse_json``.
    """
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    values: list[Any] = []
    at = _after_space(text, 0)
    while at < len(text):
        with _said_in_one_line():
            value, end = decoder.raw_decode(text, at)
            values.append(_shallow(value))
        at = _after_space(text, end)
    return values


def _shallow(value: Any) -> Any:
    """The value itself, unless it is nested deeper than anything that can be meant."""
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return value
    raise ValueError(TOO_DEEP)


@contextmanager
def _said_in_one_line() -> Iterator[None]:
    """Whatever keeps Python from reading a JSON text becomes a ValueError that says where."""
    try:
        yield
    except InputError:
        raise
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg}: line {error.lineno} column {error.colno}") from error
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    except ValueError as error:
        raise ValueError(str(error).partition(";")[0]) from error  # after it, a hint at Python's settings


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number in JSON")


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at
