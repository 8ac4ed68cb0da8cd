"""A training run on disk: one safetensors file with parameters, optimizer state, random state and settings.

The settings are text in the file's own metadata, so they can be read without MLX and travel with the weights.
How a file takes its place, and what it never replaces, is said in ``oomguard.files.writing``.
"""

from __future__ import annotations

import os
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError

from oomguard.config.base import Frozen, first_problem
from oomguard.errors import InputError
from oomguard.files.reading import parse_json
from oomguard.files.writing import Format, Output
from oomguard.model.run_settings import RunSettings
from oomguard.units import format_bytes

if TYPE_CHECKING:
    import mlx.core as mx

    from oomguard.model.step import BuiltStep

SCHEMA = "oomguard.saved-run/1"
EARLIER_SCHEMA = "oomguard.train/1"  # the same, under the name of what ``train --json`` prints
METADATA_KEY = "oomguard"
MODEL, OPTIMIZER, RANDOM = "model.", "optimizer.", "random"
LENGTH_BYTES = 8
LARGEST_HEADER_BYTES = 100_000_000  # the safetensors format's own limit


class Progress(Frozen):
    """What the metadata holds: how far the run is, and with which settings."""

    schema_: str = Field(SCHEMA, alias="schema")
    step: int = Field(ge=0)
    corpus_bytes: int = Field(ge=0)
    settings: RunSettings


@dataclass(frozen=True)
class SavedRun:
    """A run file whose frame was checked; its tensors are not read yet."""

    path: Path
    progress: Progress

    @property
    def settings(self) -> RunSettings:
        return self.progress.settings

    @property
    def step(self) -> int:
        return self.progress.step


def open_run(path: str | Path) -> SavedRun:
    """Reads how far a saved run is and its settings; no MLX, no tensor.

    Raises:
        InputError: the file cannot be read, is cut short, is no safetensors file, or not one of these.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = _read_header(path, file.read(LENGTH_BYTES), file.read, size)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    metadata = header.get("__metadata__")
    text = metadata.get(METADATA_KEY) if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise InputError(f"{path} is a safetensors file, but not a run that oomguard train saved")
    try:
        value = parse_json(text)
    except ValueError as error:
        raise InputError(f"{path}: its settings are damaged ({error})") from error
    if not isinstance(value, dict) or value.get("schema") not in (SCHEMA, EARLIER_SCHEMA):
        raise InputError(f"{path} was saved by another version of oomguard; this one reads {SCHEMA}")
    try:
        return SavedRun(path, Progress.model_validate(value))
    except ValidationError as error:
        raise InputError(f"{path}: its settings are damaged: {first_problem(error)}") from error


def _read_header(path: Path, prefix: bytes, read: Any, size: int) -> dict[str, Any]:
    """The JSON header of a safetensors file whose length agrees with what the header says."""
    foreign = f"{path} is not a safetensors file"
    if len(prefix) < LENGTH_BYTES:
        raise InputError(f"{path} is cut short: {size} bytes" if prefix else f"{path} is empty")
    (length,) = struct.unpack("<Q", prefix)
    if length > LARGEST_HEADER_BYTES:
        raise InputError(foreign)
    text = read(length)
    if text and not text.startswith(b"{"):
        raise InputError(foreign)
    if len(text) < length:
        raise InputError(f"{path} is cut short: its header alone is longer than its {size} bytes")
    try:
        header = parse_json(text.decode())
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        whole = LENGTH_BYTES + length + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise InputError(foreign) from error
    if size < whole:
        raise InputError(f"{path} is cut short: {format_bytes(size)} of {format_bytes(whole)} are there")
    return dict(header)


def _why_no_run(path: Path) -> str:
    try:
        open_run(path)
    except InputError as error:
        return str(error)
    return ""


RUN_FILE = Format("cannot save", _why_no_run, part_suffix=".safetensors")  # MLX adds it where it is missing


def save_run(
    path: str | Path | Output, built: BuiltStep, settings: RunSettings, step: int, corpus_bytes: int
) -> None:
    """Writes a run, whole or not at all, durably.

    Raises:
        InputError: the file may not or cannot be written; what was there before is still there.
    """
    import mlx.core as mx

    output = path if isinstance(path, Output) else Output(Path(path), RUN_FILE)
    arrays = _arrays(built)
    progress = Progress(schema=SCHEMA, step=step, corpus_bytes=corpus_bytes, settings=settings)
    metadata = {METADATA_KEY: progress.model_dump_json(by_alias=True)}
    with output.replaced() as part:
        try:
            mx.save_safetensors(str(part), arrays, metadata)
        except (RuntimeError, ValueError) as error:  # a full disk, as MLX says it
            raise InputError(f"cannot save {output.path}: {error}") from error
        open_run(part)


def _arrays(built: BuiltStep) -> dict[str, mx.array]:
    """What is saved of a step, by its name in the file."""
    from mlx.utils import tree_flatten

    from oomguard.model.checkpoint import random_state

    module, optimizer_state, _ = built.state
    arrays = {RANDOM: random_state()[0]}
    for prefix, tree in ((MODEL, module.parameters()), (OPTIMIZER, optimizer_state)):
        arrays |= {prefix + name: x for name, x in dict(tree_flatten(tree)).items()}
    return arrays


def check_room(output: Output, built: BuiltStep) -> None:
    """Raises InputError where the disk has no room for the run beside the one that it replaces."""
    needed = sum(array.nbytes for array in _arrays(built).values())
    free = shutil.disk_usage(output.path.parent).free
    if free < needed:
        raise InputError(
            f"cannot save {output.path}: the run takes {format_bytes(needed)}, and its disk has "
            f"{format_bytes(free)} free; make room, or name a file on another disk with --out"
        )


def check_can_save(path: str | Path) -> None:
    """Raises InputError before a run, rather than after it, when it may not or cannot be saved at ``path``."""
    Output(Path(path), RUN_FILE).check()


def restore(built: BuiltStep, run: SavedRun) -> bool:
    """Gives a step the saved parameters, random state and, if it has the same optimizer, optimizer state.

    Tensors are cast to the step's dtype.

    Args:
        built: a step of the saved model, best built with ``evaluated=False``.
        run: the saved run.

    Returns:
        Whether the optimizer's state was restored; it starts anew after a change of optimizer.

    Raises:
        InputError: a tensor is missing, has another shape, or cannot be read.
    """
    import mlx.core as mx

    from oomguard.model.checkpoint import random_state

    try:
        arrays = mx.load(str(run.path), format="safetensors")
        assert isinstance(arrays, dict)
        dtype = getattr(mx, built.step.dtype)
        _assign(run.path, built.state[0].parameters(), arrays, MODEL, dtype, built.model.update)
        same_optimizer = run.settings.step.optimizer == built.step.optimizer
        if same_optimizer:
            _assign(run.path, built.state[1], arrays, OPTIMIZER, dtype, None)
        random_state()[0] = _named(run.path, arrays, RANDOM)
        arrays.clear()
        mx.eval(built.state)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot read {run.path}: {error}") from error
    return same_optimizer


def _assign(path: Path, tree: Any, arrays: dict[str, mx.array], prefix: str, dtype: Any, update: Any) -> None:
    """Replaces the leaves of ``tree`` in place by the arrays of their names; ``update`` is told the tree."""

    def walk(node: Any, name: str) -> Any:
        if isinstance(node, dict | list):
            items = node.items() if isinstance(node, dict) else enumerate(node)
            for key, child in list(items):
                node[key] = walk(child, f"{name}.{key}" if name else str(key))
            return node
        saved = _named(path, arrays, prefix + name)
        if saved.shape != node.shape:
            raise InputError(
                f"{path}: {prefix}{name} has shape {saved.shape}, and the model's has {node.shape}"
            )
        return saved.astype(dtype) if node.ndim and node.dtype == dtype else saved

    walk(tree, "")
    if update is not None:
        update(tree)


def _named(path: Path, arrays: dict[str, mx.array], name: str) -> mx.array:
    if name not in arrays:
        raise InputError(f"{path} holds no {name}; it was not saved by oomguard train")
    return arrays[name]
