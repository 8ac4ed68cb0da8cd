"""What a validation found wrong, in the words of this program: the value, and what would work.

pydantic says "Input should be a valid integer, unable to parse string as an integer"; here it is ``'wide' is not
a whole number; write one such as 8``, as the command line says it of an option.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oomguard.errors import InputError

SHOWN_CHARACTERS = 40

WHOLE = "is not a whole number; write one such as 8"
NUMBER = "is not a number; write one such as 0.5"
TEXT = "is not a text; write one in quotes"
SWITCH = "is neither true nor false"
OBJECT = "is not an object with named fields"
LIST = "is not a list"

# By pydantic's type of error, whose names are part of its interface and whose sentences are not.
PROBLEMS: dict[str, str] = {
    "missing": "missing, and it has no default",
    "extra_forbidden": "there is no such field",
    "invalid_key": "the names of fields are texts",
    "int_type": WHOLE,
    "int_parsing": WHOLE,
    "int_parsing_size": WHOLE,
    "int_from_float": WHOLE,
    "float_type": NUMBER,
    "float_parsing": NUMBER,
    "finite_number": NUMBER,
    "string_type": TEXT,
    "bool_type": SWITCH,
    "bool_parsing": SWITCH,
    "dict_type": OBJECT,
    "model_type": OBJECT,
    "model_attributes_type": OBJECT,
    "list_type": LIST,
    "tuple_type": LIST,
    "greater_than": "is too small; it must be more than {gt}",
    "greater_than_equal": "is too small; the least is {ge}",
    "less_than": "is too large; it must be less than {lt}",
    "less_than_equal": "is too large; the most is {le}",
    "literal_error": "is unknown; choose {expected}",
    "too_short": "is too short; it needs {min_length}",
    "too_long": "is too long; it takes {max_length}",
}
WITHOUT_VALUE = ("missing", "extra_forbidden", "invalid_key")


def say_problem(problem: Mapping[str, Any]) -> str:
    """One of the problems of a ``ValidationError``, without the field's name.

    Args:
        problem: as ``ValidationError.errors()`` gives it.
    """
    kind, limits = problem["type"], problem.get("ctx", {})
    if kind in ("value_error", "assertion_error"):
        return str(problem["msg"]).partition(", ")[2]
    if isinstance(limits.get("gt"), int):  # of whole numbers, more than 0 is 1 and more
        kind, limits = "greater_than_equal", {"ge": limits["gt"] + 1}
    elif isinstance(limits.get("lt"), int):
        kind, limits = "less_than_equal", {"le": limits["lt"] - 1}
    plain = {name: f"{limit:g}" if isinstance(limit, float) else limit for name, limit in limits.items()}
    said = PROBLEMS.get(kind, "is not a value of this field").format(**plain)
    return said if kind in WITHOUT_VALUE else f"{shown(problem.get('input'))} {said}"


def shown(value: object) -> str:
    """A value as a person wrote it, cut where it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."


def check_type(name: str, value: object, kinds: type | tuple[type, ...], works: str) -> None:
    """Raises InputError where an argument is of another type.

    Args:
        name: the argument's.
        kinds: what it may be an instance of; a bool is no number.
        works: what to give instead, in words.
    """
    wanted = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in wanted):
        kind = "None" if value is None else f"{shown(value)} ({type(value).__name__})"
        raise InputError(f"{name} is {kind}; give {works}")


def check_callable(name: str, value: object, works: str) -> None:
    """Raises InputError where an argument cannot be called."""
    if not callable(value):
        raise InputError(f"{name} is {shown(value)} ({type(value).__name__}); give {works}")
