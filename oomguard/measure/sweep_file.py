"""Sweep files: a compact list of configurations, lists multiplied out."""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from oomguard.config.base import first_problem
from oomguard.config.model import ModelConfig
from oomguard.config.policy import CheckpointPolicy
from oomguard.config.presets import preset
from oomguard.config.problems import shown
from oomguard.config.step import StepConfig
from oomguard.config.words import read_dtype, read_optimizer
from oomguard.errors import InputError
from oomguard.files.reading import parse_json, read_text
from oomguard.measure.task import Task

FORMAT = """A sweep file is JSON: a list of entries, or {"note": ..., "entries": [...]}; or JSON lines, one
entry a line. An entry is an object; a value that is a list is multiplied out:

\b
  {"preset": ["tiny", "small"], "batch": [1, 2, 4], "checkpoint": "every"}

is 6 configurations. Shape: "preset" (or "config", a file), changed by "n_layers", "d_model", "n_heads",
"d_mlp" (4 x d_model if not given), "context", "vocab_size", "dropout". Step: "batch" (needed), "seq_len" or
"ctx" (the context if not given), "accumulate", "evaluate_micro_steps", "checkpoint", "dtype", "optimizer",
"clip_norm", "compiled". Or {"case": NAME}, where NAME may hold * and ?."""

MOST_CONFIGURATIONS = 10_000
"""Of one sweep file. At a second or two each, which is what a small step takes, they are hours."""

SHAPE_FIELDS = tuple(name for name in ModelConfig.model_fields if name != "name")
STEP_FIELDS = tuple(StepConfig.model_fields)
ALIASES: dict[str, str] = {"ctx": "seq_len", "grad_checkpoint": "checkpoint"}
READERS: dict[str, Callable[[str], Any]] = {
    "checkpoint": CheckpointPolicy.parse,
    "dtype": read_dtype,
    "optimizer": read_optimizer,
}
KNOWN = {"preset", "config", "case", "name", *SHAPE_FIELDS, *STEP_FIELDS, *ALIASES}


@dataclass(frozen=True)
class Sweep:
    """The configurations of a sweep file, in order, each once."""

    tasks: tuple[Task, ...]
    note: str = ""


def read_sweep(path: str | Path) -> Sweep:
    """Reads a sweep file (``FORMAT``).

    Raises:
        InputError: not readable, not JSON, or an entry that makes no configuration; names the entry and why. Or
            it makes more than ``MOST_CONFIGURATIONS``, which is counted before any is made.
    """
    path = Path(path)
    entries, note = _entries(path, read_text(path, "sweep"))
    count = sum(map(_combinations, entries))
    if count > MOST_CONFIGURATIONS:
        raise InputError(
            f"sweep {path} multiplies out to {count:,} configurations, and {MOST_CONFIGURATIONS:,} are the most; "
            "shorten its lists, or split it into several files"
        )
    tasks: dict[str, Task] = {}
    for number, entry in enumerate(entries, start=1):
        try:
            for task in expand(entry, path.parent):
                tasks.setdefault(task.key, task)
        except InputError as error:
            raise InputError(f"{path}, entry {number}: {error}") from error
    if not tasks:
        raise InputError(f"sweep {path} holds no entries")
    return Sweep(tuple(tasks.values()), note)


def _combinations(entry: Any) -> int:
    """How many configurations an entry's lists make."""
    if not isinstance(entry, dict):
        return 1  # said to be none when it is expanded
    return math.prod(len(value) for value in entry.values() if isinstance(value, list))


def _entries(path: Path, text: str) -> tuple[list[Any], str]:
    """The entries of a JSON list, a JSON object with ``entries``, one JSON entry, or JSON lines."""
    try:
        value = parse_json(text)
    except ValueError as whole_error:
        lines = [(n, line) for n, line in enumerate(text.splitlines(), start=1) if line.strip()]
        if len(lines) < 2:
            raise InputError(f"sweep {path} is not JSON: {whole_error}") from whole_error
        return [_line(path, number, line) for number, line in lines], ""
    if isinstance(value, list):
        return value, ""
    if isinstance(value, dict) and "entries" in value:
        unknown = sorted(set(value) - {"entries", "note"})
        if unknown or not isinstance(value["entries"], list):
            raise InputError(f"sweep {path}: beside a list of entries only a note may stand, not {unknown}")
        return value["entries"], str(value.get("note", ""))
    return [value], ""


def _line(path: Path, number: int, line: str) -> Any:
    try:
        return parse_json(line)
    except ValueError as error:
        raise InputError(f"sweep {path}, line {number} is not JSON: {error}") from error


def expand(entry: Any, folder: str | Path = ".") -> Iterator[Task]:
    """The configurations of one entry, the last key changing fastest.

    Args:
        entry: an object as in ``FORMAT``.
        folder: where a ``config`` file's path starts.

    Raises:
        InputError: an unknown key, or a combination that is not a configuration.
    """
    if not isinstance(entry, dict):
        raise InputError(
            f'an entry is an object such as {{"preset": "tiny", "batch": 2}}, not {shown(entry)}'
        )
    unknown = sorted(set(entry) - KNOWN)
    if unknown:
        raise InputError(f"unknown key {unknown[0]!r}; known: {', '.join(sorted(KNOWN))}")
    renamed: dict[str, list[Any]] = {
        ALIASES.get(str(key), str(key)): value if isinstance(value, list) else [value]
        for key, value in entry.items()
    }
    if len(renamed) < len(entry):
        raise InputError("ctx and seq_len, or grad_checkpoint and checkpoint, are the same setting: give one")
    empty = [key for key, values in renamed.items() if not values]
    if empty:
        raise InputError(f"{empty[0]} is an empty list")
    if "case" in renamed:
        yield from _case_tasks(renamed)
        return
    for values in itertools.product(*renamed.values()):
        yield _gpt_task(dict(zip(renamed, values, strict=True)), Path(folder))


def _case_tasks(entry: dict[str, list[Any]]) -> Iterator[Task]:
    if len(entry) > 1:
        raise InputError(
            f"a case brings its own shape and step; {sorted(set(entry) - {'case'})[0]} cannot stand beside"
        )
    from oomguard.model.cases import case_names

    known = case_names()
    for pattern in entry["case"]:
        found = fnmatch.filter(known, str(pattern))
        if not found:
            raise InputError(f"no case {pattern!r}; see oomguard measure --list-cases")
        yield from (Task(case=name) for name in found)


def _gpt_task(values: dict[str, Any], folder: Path) -> Task:
    model = _shape(values, folder)
    step = {key: values[key] for key in STEP_FIELDS if key in values}
    step.setdefault("seq_len", model.context)
    for key, read in READERS.items():
        if isinstance(step.get(key), str):
            try:
                step[key] = read(step[key])
            except InputError as error:
                raise InputError(f"{key}: {error}") from error
    try:
        return Task(model=model, step=StepConfig.model_validate(step))
    except ValidationError as error:
        raise InputError(f"{first_problem(error)} (in {_shown(values.items())})") from error


def _shape(values: dict[str, Any], folder: Path) -> ModelConfig:
    if "preset" in values and "config" in values:
        raise InputError("preset and config both give a shape: give one")
    base: dict[str, Any] = {}
    if "preset" in values:
        base = preset(str(values["preset"])).model_dump()
    elif "config" in values:
        base = ModelConfig.from_file(folder / str(values["config"])).model_dump()
    given = {key: values[key] for key in SHAPE_FIELDS if key in values}
    shape = {**base, **given}
    if "d_model" in given and "d_mlp" not in given and isinstance(given["d_model"], int):
        shape["d_mlp"] = 4 * given["d_model"]
    if base and any(shape[key] != base[key] for key in given):
        shape["name"] = "custom"
    if "seq_len" in values:
        shape.setdefault("context", values["seq_len"])
    if "name" in values:
        shape["name"] = values["name"]
    try:
        return ModelConfig.model_validate(shape)
    except ValidationError as error:
        raise InputError(f"{first_problem(error)} (in {_shown(values.items())})") from error


def _shown(items: Iterable[tuple[str, Any]]) -> str:
    return ", ".join(f"{key} {value if isinstance(value, str) else shown(value)}" for key, value in items)
